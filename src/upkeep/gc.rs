//! Deletes what is not needed any more, one log after the other. Safe beside writers, restores and other collectors, and
//! when it is killed at any step: what others stand for can go at any time, and a session only goes behind a mark in its
//! own log that fences whoever writes to it.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use serde::Serialize;

use super::collect::{Listed, Rules, Step, decide};
use super::compact::squeeze;
use super::remove;
use crate::error::{Error, ErrorContext, Result};
use crate::log::Logs;
use crate::log::assemble::FileAssembler;
use crate::log::pins::Pin;
use crate::log::read::ReadOptions;
use crate::log::segments::{Segment, SegmentKind, head};
use crate::log::writer::LogWriter;
use crate::model::{EntryKind, LogId, Seq, Ttl, keys};
use crate::store::list_objects;
use crate::sys::Directory;
use crate::sys::clock::new_writer;

/// Pieces smaller than this are worth making one of, once nobody writes any more.
const SMALL: u64 = 16 << 10;

/// What was done to one log, or would be.
#[derive(Debug, Clone, Default, Serialize, PartialEq, Eq)]
pub struct Outcome {
    /// The session, or `@` and the project.
    pub session: String,
    /// What, in words: `collect`, `squeeze`, `expire`, `purge`, `sweep`, `forget`.
    pub steps: Vec<&'static str>,
    /// Objects deleted.
    pub objects: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// The store's own time: what it says of an object written just now.
pub async fn store_time(logs: &Logs) -> Result<Timestamp> {
    let key = keys::gc_mark(&format!("{:016x}", logs.rng.next()));
    logs.store
        .put(&key, Bytes::from_static(b"what time is it?\n"))
        .await
        .context("ask the store for the time")?;
    let marks = list_objects(&*logs.store, &keys::gc_dir(), None).await?;
    logs.store.delete(&key).await?;
    let ours = marks.iter().find(|object| object.key == key);
    let now = ours
        .ok_or_else(|| {
            Error::unavailable("ask the store for the time: it does not list what it has taken")
        })?
        .modified;
    if now == Timestamp::MAX {
        return Err(Error::usage(
            "ask the store for the time: it does not say when an object was written",
        ));
    }
    Ok(now)
}

/// Deletes the scratch keys that killed processes left; answers how many.
pub async fn sweep_scratch(
    logs: &Logs,
    rules: &Rules,
    now: Timestamp,
    dry_run: bool,
) -> Result<usize> {
    let mut swept = 0;
    for directory in [keys::gc_dir(), keys::probe_dir()] {
        for object in list_objects(&*logs.store, &directory, None).await? {
            if Duration::try_from(now.duration_since(object.modified))
                .is_ok_and(|age| age >= rules.grace)
            {
                swept += 1;
                if !dry_run {
                    logs.store.delete(&object.key).await?;
                }
            }
        }
    }
    Ok(swept)
}

/// Does what is due of one log. `scratch` is a directory where what stays is put together before anything goes.
pub async fn collect(
    logs: &Logs,
    id: &LogId,
    rules: &Rules,
    now: Timestamp,
    scratch: &dyn Directory,
    dry_run: bool,
) -> Result<Outcome> {
    let job = Job {
        logs,
        id,
        rules,
        scratch,
    };
    job.run(now, dry_run)
        .await
        .with_context(|| format!("collect {id}"))
}

struct Job<'a> {
    logs: &'a Logs,
    id: &'a LogId,
    rules: &'a Rules,
    scratch: &'a dyn Directory,
}

impl Job<'_> {
    async fn run(&self, now: Timestamp, dry_run: bool) -> Result<Outcome> {
        let mut outcome = Outcome {
            session: self.id.name.to_string(),
            ..Outcome::default()
        };
        let (listed, wishes) = self.list().await?;
        let wish = if wishes.is_empty() {
            None
        } else {
            self.logs.said(self.id).await?.wishes.ttl
        };
        // A project's memory has no time of its own.
        let ttl = if self.id.name.is_project() {
            None
        } else {
            wish.map_or(self.rules.ttl, Ttl::duration)
        };
        if !listed.may_be_due(&Rules { ttl, ..*self.rules }, now) {
            return Ok(outcome);
        }
        let last = self.last(&listed).await?;
        for step in decide(&listed, last, ttl, self.rules, now) {
            outcome.steps.push(word(&step));
            let deleted = match &step {
                Step::Collect(pieces) if dry_run => sizes(pieces),
                _ if dry_run => Deleted::default(),
                _ => self.step(&listed, &wishes, step).await?,
            };
            outcome.objects += deleted.objects;
            outcome.bytes += deleted.bytes;
        }
        Ok(outcome)
    }

    async fn list(&self) -> Result<(Listed, Vec<u64>)> {
        let mut listed = Listed {
            pieces: self.logs.pieces(self.id).await?,
            ..Listed::default()
        };
        for writer in self.logs.branches(self.id).await? {
            let pieces = self.logs.branch_pieces(self.id, &writer).await?;
            listed.branches.push((writer, pieces));
        }
        for pin in self.pins().await? {
            listed.held |= pin.holds_all();
            // One that cannot be read may mean any entry.
            listed.pinned.extend(pin.seq());
            if matches!(pin, Pin::Unknown(_)) {
                listed
                    .pinned
                    .extend(listed.pieces.iter().map(|piece| piece.to));
            }
        }
        Ok((listed, self.logs.wishes(self.id).await?))
    }

    /// What holds the log; where a fork begins that is gone holds nothing.
    async fn pins(&self) -> Result<Vec<Pin>> {
        let mut pins = self.logs.pins(self.id).await?;
        for at in (0..pins.len()).rev() {
            if let Pin::ForkOrigin { fork, .. } = &pins[at]
                && self.is_gone(&self.logs.id(fork.clone())).await?
            {
                pins.remove(at);
            }
        }
        Ok(pins)
    }

    /// Whether a session was deleted for good.
    async fn is_gone(&self, id: &LogId) -> Result<bool> {
        let pieces = self.logs.pieces(id).await?;
        let Some(newest) = pieces
            .iter()
            .max_by_key(|piece| (piece.to, piece.kind == SegmentKind::Entry))
        else {
            // It may be just about to begin: what holds for it is written first.
            return Ok(false);
        };
        let entry = self.logs.read_piece(id, newest, None).await?;
        Ok(entry.is_some_and(|entry| entry.header.kind == EntryKind::Purge))
    }

    /// What the log ends with.
    async fn last(&self, listed: &Listed) -> Result<EntryKind> {
        let newest = listed
            .pieces
            .iter()
            .max_by_key(|piece| (piece.to, piece.kind == SegmentKind::Entry));
        let Some(newest) = newest else {
            return Ok(EntryKind::Delta);
        };
        match self.logs.read_piece(self.id, newest, None).await {
            Ok(entry) => Ok(entry.map_or(EntryKind::Delta, |entry| entry.header.kind)),
            // A damaged log is no removed one.
            Err(error) if error.kind() == crate::error::ErrorKind::Corrupt => Ok(EntryKind::Delta),
            Err(error) => Err(error),
        }
    }

    async fn step(&self, listed: &Listed, wishes: &[u64], step: Step) -> Result<Deleted> {
        match step {
            Step::Squeeze => squeeze(self.logs, self.id, head(&listed.pieces), SMALL)
                .await
                .map(|_| Deleted::default()),
            Step::Collect(pieces) => {
                self.rehearse(listed, &pieces).await?;
                // Somebody may have named a point meanwhile, or forked.
                let pinned: Vec<Seq> = self.pins().await?.iter().filter_map(Pin::seq).collect();
                if pinned.iter().any(|seq| !listed.pinned.contains(seq)) {
                    return Ok(Deleted::default());
                }
                self.delete(pieces.iter().map(|piece| (piece.key(self.id), piece.size)))
                    .await
            }
            Step::Expire => {
                remove::remove_at(self.logs, self.id, Some(head(&listed.pieces))).await?;
                Ok(Deleted::default())
            }
            Step::Purge => self.purge(listed, wishes).await,
            Step::Sweep => self.sweep(listed, wishes, Some(head(&listed.pieces))).await,
            // What was said since goes first: without the mark nobody would look for it.
            Step::Forget => {
                let mark = listed
                    .pieces
                    .iter()
                    .map(|piece| (piece.key(self.id), piece.size));
                self.delete(self.wishes(wishes).chain(mark)).await
            }
        }
    }

    /// Restores from what would be left, as a whole, before anything goes.
    async fn rehearse(&self, listed: &Listed, surplus: &[Segment]) -> Result<()> {
        let without: BTreeSet<_> = surplus.iter().map(Segment::name).collect();
        let stage: crate::model::RelPath = format!("gc-{:016x}", self.logs.rng.next()).parse()?;
        let mut made = 0;
        let fresh = || {
            made += 1;
            FileAssembler::new(self.scratch, stage.clone(), made)
        };
        let read = self
            .logs
            .read_log(
                self.id,
                ReadOptions {
                    without: Some(&without),
                    ..ReadOptions::default()
                },
                fresh,
            )
            .await;
        self.scratch
            .remove(&stage)
            .map_err(|cause| Error::io(format!("remove {stage}"), cause))?;
        let read = read?;
        let told = read
            .damage
            .as_ref()
            .map(ToString::to_string)
            .or_else(|| read.spared.first().cloned());
        if let Some(told) = told {
            return Err(Error::corrupt(format!(
                "nothing is deleted, for what would be left is damaged: {told}"
            ))
            .hint("sessiond verify --deep tells more"));
        }
        if read.seq < head(&listed.pieces) {
            return Err(Error::corrupt(format!(
                "nothing is deleted, for what would be left ends with entry {}",
                read.seq
            )));
        }
        Ok(())
    }

    async fn purge(&self, listed: &Listed, wishes: &[u64]) -> Result<Deleted> {
        let seq = head(&listed.pieces);
        let Some(entry) = self.logs.read(self.id, seq).await? else {
            return Ok(Deleted::default());
        };
        let mut log_writer = LogWriter::unclaimed(
            new_writer(&self.logs.rng),
            seq,
            Some(entry.digest),
            self.logs.clock.now(),
        );
        // Somebody may have brought it back just now; then nothing is deleted.
        match self
            .logs
            .mark(self.id, &mut log_writer, seq, EntryKind::Purge)
            .await?
        {
            Some(_) => self.sweep(listed, wishes, None).await,
            None => Ok(Deleted::default()),
        }
    }

    /// Deletes all that was listed but the mark, oldest first.
    async fn sweep(&self, listed: &Listed, wishes: &[u64], mark: Option<Seq>) -> Result<Deleted> {
        let mut pieces: Vec<&Segment> = listed
            .pieces
            .iter()
            .filter(|piece| Some(piece.to) != mark)
            .collect();
        pieces.sort_by_key(|piece| (piece.to, piece.from));
        let own = pieces
            .into_iter()
            .map(|piece| (piece.key(self.id), piece.size));
        let branches = listed.branches.iter().flat_map(|(writer, pieces)| {
            pieces
                .iter()
                .map(|piece| (keys::branch_entry(self.id, writer, piece.to), piece.size))
        });
        let pins: Vec<(String, u64)> = self
            .logs
            .pins(self.id)
            .await?
            .iter()
            .map(|pin| (pin.key(self.id), 0))
            .collect();
        self.delete(own.chain(branches).chain(pins).chain(self.wishes(wishes)))
            .await
    }

    fn wishes(&self, numbers: &[u64]) -> impl Iterator<Item = (String, u64)> {
        numbers
            .iter()
            .map(|number| (keys::wishes(self.id, *number), 0))
    }

    async fn delete(&self, keys: impl Iterator<Item = (String, u64)>) -> Result<Deleted> {
        let mut deleted = Deleted::default();
        for (key, size) in keys {
            self.logs.store.delete(&key).await?;
            deleted.objects += 1;
            deleted.bytes += size;
        }
        Ok(deleted)
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Deleted {
    objects: usize,
    bytes: u64,
}

fn sizes(pieces: &[Segment]) -> Deleted {
    Deleted {
        objects: pieces.len(),
        bytes: pieces.iter().map(|piece| piece.size).sum(),
    }
}

fn word(step: &Step) -> &'static str {
    match step {
        Step::Squeeze => "squeeze",
        Step::Collect(_) => "collect",
        Step::Expire => "expire",
        Step::Purge => "purge",
        Step::Sweep => "sweep",
        Step::Forget => "forget",
    }
}
