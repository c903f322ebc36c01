//! The origins of a fork: the session that it was forked from, the session that one was forked from,
//! and so on.
//!
//! Owns the order in which origins are read, the limit on their number, and the detection of cycles.
//! Origins are read one after the other, starting with the oldest: a bucket is untrusted, and must
//! not determine how deep calls are nested.

use std::collections::BTreeSet;

use futures_util::future::BoxFuture;

use super::Logs;
use super::attempt::{Origin, ReadAttempt};
use super::options::{NewSink, ReadOptions};
use super::read::{EntrySink, LogReader};
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::model::limits::MAX_FORK_DEPTH;
use crate::model::{ForkOrigin, LogId, LogPoint};

/// An origin, and the point of it that the next session starts from.
struct OriginPoint {
    id: LogId,
    fork: ForkOrigin,
}

impl Logs {
    /// Checks that a session can be forked: its own origins are readable, and are not too many.
    pub async fn check_fork_depth(&self, id: &LogId) -> Result<()> {
        let depth = match self.first_entry_origin(id).await? {
            Some(fork) => self.lineage(id, &fork).await?.len(),
            None => 0,
        };
        if depth < MAX_FORK_DEPTH {
            return Ok(());
        }
        let name = &id.name;
        Err(Error::conflict(format!(
            "{id} is already a fork of a fork, {depth} times in a row, which is the maximum"
        ))
        .hint(format!(
            "run \"sessiond export {name} -o {name}.tar.gz\" and \"sessiond import {name}.tar.gz --id NEW\" to make a session without an origin"
        )))
    }

    /// Reads the origin of the fork `id` up to the point of the fork. Returns its sink, and the
    /// number of objects read.
    pub(super) fn read_origin<'a, S: EntrySink + Send + 'a>(
        &'a self,
        id: &'a LogId,
        fork: &'a ForkOrigin,
        concurrency: usize,
        new_sink: NewSink<'a, S>,
    ) -> BoxFuture<'a, Result<(S, usize)>> {
        // An attempt contains this future, and it contains attempts. These never start another one:
        // they are given their origin.
        Box::pin(async move {
            let mut reader = OriginReader {
                logs: self,
                id,
                concurrency,
                new_sink,
                objects: 0,
            };
            let sink = reader.read(fork).await?;
            Ok((sink, reader.objects))
        })
    }

    /// The origins of the session `id`, the nearest first. `fork` is its own origin.
    async fn lineage(&self, id: &LogId, fork: &ForkOrigin) -> Result<Vec<OriginPoint>> {
        let mut lineage: Vec<OriginPoint> = Vec::new();
        let mut seen = BTreeSet::from([id.name.clone()]);
        let mut next = Some(fork.clone());
        while let Some(fork) = next {
            if !seen.insert(fork.session.clone()) {
                return Err(Error::corrupt(format!("{id} is a fork of itself")));
            }
            if lineage.len() == MAX_FORK_DEPTH {
                return Err(Error::corrupt(format!(
                    "{id} has more than {MAX_FORK_DEPTH} origins"
                )));
            }
            let origin_id = self.id(fork.session.clone());
            next = self.first_entry_origin(&origin_id).await?;
            lineage.push(OriginPoint {
                id: origin_id,
                fork,
            });
        }
        Ok(lineage)
    }

    /// The origin of a session; none if its first entry is damaged. The reader then decides whether
    /// the damage matters.
    async fn first_entry_origin(&self, id: &LogId) -> Result<Option<ForkOrigin>> {
        match self.fork_origin(id).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(None),
            origin => origin,
        }
    }
}

/// Reads the origin of a fork.
struct OriginReader<'a, S> {
    logs: &'a Logs,
    /// The fork.
    id: &'a LogId,
    concurrency: usize,
    new_sink: NewSink<'a, S>,
    /// Number of objects read.
    objects: usize,
}

impl<S: EntrySink + Send> OriginReader<'_, S> {
    /// Returns the sink of the origin at the point of the fork.
    async fn read(&mut self, fork: &ForkOrigin) -> Result<S> {
        let lineage = self.logs.lineage(self.id, fork).await?;
        let mut readers = Vec::with_capacity(lineage.len());
        for origin in &lineage {
            let options = ReadOptions {
                at: LogPoint::Seq(origin.fork.seq),
                branch: origin.fork.branch.as_ref(),
                concurrency: self.concurrency,
                ..ReadOptions::default()
            };
            readers.push(LogReader::open(self.logs, &origin.id, options).await?);
        }
        // After damage, all of them are read again, and each leaves out what it found damaged.
        loop {
            if let Some(sink) = self.read_once(&lineage, &mut readers).await? {
                return Ok(sink);
            }
        }
    }

    /// Reads every origin once, the oldest first. Returns none if another attempt is needed.
    async fn read_once(
        &mut self,
        lineage: &[OriginPoint],
        readers: &mut [LogReader<'_>],
    ) -> Result<Option<S>> {
        let mut origin: Option<(ForkOrigin, S)> = None;
        for (index, (point, reader)) in lineage.iter().zip(readers).enumerate().rev() {
            let OriginPoint { id, fork } = point;
            let child = index
                .checked_sub(1)
                .map_or(self.id, |next| &lineage[next].id);
            let attempt = ReadAttempt::new(
                self.logs,
                id,
                reader.options(),
                &mut *self.new_sink,
                Origin::Read(origin.take().map(Box::new)),
            );
            let read = reader.run(attempt).await;
            let Some(read) = read.with_context(|| format!("read {id}, the origin of {child}"))?
            else {
                return Ok(None);
            };
            self.objects += read.objects;
            let seq = read.seq;
            let sink = read.require_undamaged(id)?;
            if seq != fork.seq {
                return Err(Error::corrupt(format!(
                    "{id} has no entry {}, from which {child} was forked",
                    fork.seq
                )));
            }
            origin = Some((fork.clone(), sink));
        }
        Ok(origin.map(|(_, sink)| sink))
    }
}
