//! One attempt to read a log: fetches the selected segments, links them and applies them to a sink.
//!
//! Owns the steps of one attempt. Does not own the decision what to do after it stopped
//! (`recovery`, `read`).

use std::collections::BTreeMap;

use super::Logs;
use super::chain::EntryChain;
use super::fetch::SegmentFetcher;
use super::fork::SessionRenamer;
use super::options::{NewSink, ReadOptions};
use super::protection_order::ProtectionOrder;
use super::recovery::{Exclusions, Stop};
use super::segments::{Segment, select_segments};
use super::sink::EntrySink;
use crate::codec::entry::Entry;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Digest, EntryHeader, ForkOrigin, LogId, LogPoint, Seq, WriterId};
use crate::sys::blocking;

/// Maximum raw bytes of an entry that is applied without another thread.
const MAX_INLINE_BYTES: usize = 64 << 10;

/// The state of one attempt.
pub(super) struct ReadAttempt<'a, S> {
    logs: &'a Logs,
    id: &'a LogId,
    options: ReadOptions<'a>,
    new_sink: NewSink<'a, S>,
    origin: Origin<S>,
    /// The sink that entries are applied to.
    pub(super) sink: S,
    /// The last entry that was applied.
    pub(super) seq: Seq,
    /// Its digest.
    pub(super) digest: Option<Digest>,
    /// The raw bytes of the entries that were applied.
    raw_bytes: u64,
    /// Number of objects read.
    pub(super) objects: usize,
    /// The merges and snapshots that were applied.
    pub(super) compacted: Vec<Segment>,
    /// The last entry of the branch that is read; none if the log itself is read.
    pub(super) branch_head: Option<Seq>,
    /// The last entries that were applied, and their digests.
    pub(super) links: Vec<(Seq, Digest)>,
}

/// The session that a fork starts from.
pub(super) enum Origin<S> {
    /// It is read when the first entry of a fork is found.
    Unread,
    /// It was read before, up to the point of the fork; none if the log is not a fork.
    Read(Option<Box<(ForkOrigin, S)>>),
}

/// Maximum number of `links`: half of them are dropped when there are more.
const MAX_LINKS: usize = 2048;

/// Whether an entry was applied.
enum Applied {
    Yes,
    /// The point lies before the end of this segment.
    AfterPoint,
}

impl<'a, S: EntrySink + Send> ReadAttempt<'a, S> {
    pub(super) fn new(
        logs: &'a Logs,
        id: &'a LogId,
        options: ReadOptions<'a>,
        new_sink: NewSink<'a, S>,
        origin: Origin<S>,
    ) -> Self {
        let sink = new_sink();
        ReadAttempt {
            logs,
            id,
            options,
            new_sink,
            origin,
            sink,
            seq: options.after,
            digest: options.after_digest,
            raw_bytes: 0,
            objects: 0,
            compacted: Vec::new(),
            branch_head: None,
            links: Vec::new(),
        }
    }

    /// Reads the log, then the branch if there is one, up to the point.
    pub(super) async fn run(
        &mut self,
        listed: &[Segment],
        exclusions: &Exclusions,
    ) -> Result<(), Stop> {
        let branch = match self.options.branch {
            None => None,
            Some(writer) => Some((
                writer.clone(),
                self.logs.list_branch_segments(self.id, writer).await?,
            )),
        };
        let mut last = match self.options.at {
            LogPoint::Seq(seq) => seq,
            LogPoint::Latest | LogPoint::Time(_) => Seq::MAX,
        };
        if let Some((writer, segments)) = &branch {
            self.branch_head = segments.last().map(|segment| segment.last_seq);
            last = last.min(self.logs.branch_base(self.id, writer, segments).await?);
        }
        let mut order = ProtectionOrder::after(self.logs, self.id, listed, self.seq).await?;
        let mut chain = EntryChain::new(self.id.to_string(), self.seq, self.digest);
        let mut excluded = exclusions.excluded_segments(listed);
        loop {
            let granularity = self.options.granularity;
            let selected = select_segments(listed, self.seq, last, granularity, &excluded);
            let Some(segment) = self
                .apply_segments(&selected, None, (&mut chain, &mut order), exclusions)
                .await?
            else {
                break;
            };
            // The point lies within the segment: read the segments that it covers, if they exist.
            let has_finer = listed
                .iter()
                .any(|other| segment.contains(other) && other.first_seq > self.seq);
            if !has_finer {
                // The point is before the end of the segment, and so before the branch.
                return Ok(());
            }
            excluded.insert(segment.id());
            chain = EntryChain::new(self.id.to_string(), self.seq, self.digest);
        }
        if self.is_full() {
            return Ok(());
        }
        if let Some((writer, mut segments)) = branch {
            if let LogPoint::Seq(seq) = self.options.at {
                segments.retain(|segment| segment.last_seq <= seq);
            }
            let name = format!("branch {writer} of {}", self.id);
            let mut chain = EntryChain::new(name, self.seq, self.digest);
            let links = (&mut chain, &mut order);
            self.apply_segments(&segments, Some(&writer), links, exclusions)
                .await?;
        }
        Ok(())
    }

    /// Reads and applies segments up to the point. Returns the segment that contains the point, if
    /// the point is not at its end.
    async fn apply_segments(
        &mut self,
        selected: &[Segment],
        branch: Option<&WriterId>,
        (chain, order): (&mut EntryChain, &mut ProtectionOrder<'_>),
        exclusions: &Exclusions,
    ) -> Result<Option<Segment>, Stop> {
        let by_seq: BTreeMap<Seq, Segment> = selected
            .iter()
            .map(|segment| (segment.last_seq, *segment))
            .collect();
        let concurrency = self.options.concurrency;
        let mut fetcher = SegmentFetcher::new(self.logs, self.id, branch, selected, concurrency);
        while let Some((segment, decoded)) = fetcher.next().await {
            self.objects += 1;
            let excluded_entry = exclusions
                .entries
                .get(&segment.last_seq)
                .filter(|_| !segment.is_compacted() && branch.is_none());
            let read = match (excluded_entry, decoded) {
                (Some(error), _) => Err(Error::corrupt(error)),
                (None, Ok(Some((entry, is_encrypted)))) => order
                    .push(&segment, branch, is_encrypted)
                    .await
                    .map(|()| entry),
                (None, Ok(None)) => {
                    return Err(Stop::deleted(deleted_segment_error(self.id, &segment)));
                }
                (None, Err(error)) => Err(error),
            };
            let read = match read {
                Err(error) if segment.is_compacted() && is_bypassable(&error) => {
                    return Err(Stop::rejected(segment.id(), error));
                }
                read => read,
            };
            let linked = chain
                .push(segment.last_seq, read)
                .map_err(|error| rejected(chain, &by_seq, error))?;
            if let Some(entry) = linked
                && let Applied::AfterPoint = self.apply(&entry, &by_seq).await?
            {
                return Ok(by_seq.get(&entry.header.seq).copied());
            }
            if self.is_full() {
                return Ok(None);
            }
        }
        while let Some(entry) = chain
            .pop()
            .map_err(|error| rejected(chain, &by_seq, error))?
        {
            if let Applied::AfterPoint = self.apply(&entry, &by_seq).await? {
                return Ok(by_seq.get(&entry.header.seq).copied());
            }
            if self.is_full() {
                break;
            }
        }
        Ok(None)
    }

    /// Whether it has read as many bytes as it may.
    pub(super) fn is_full(&self) -> bool {
        self.raw_bytes >= self.options.max_raw_bytes
    }

    async fn apply(
        &mut self,
        entry: &Entry,
        by_seq: &BTreeMap<Seq, Segment>,
    ) -> Result<Applied, Stop> {
        let header = &entry.header;
        if !self.is_before_point(header) {
            return Ok(Applied::AfterPoint);
        }
        let segment = by_seq.get(&header.seq);
        if let Some(fork) = header
            .fork
            .as_ref()
            .filter(|_| self.sink.needs_fork_origin())
        {
            self.apply_fork_origin(fork).await?;
        }
        let applied = if entry.body.len() > MAX_INLINE_BYTES {
            blocking(|| self.sink.apply_entry(entry))
        } else {
            self.sink.apply_entry(entry)
        };
        applied.map_err(|error| {
            let is_damage = error.kind() == ErrorKind::Corrupt && self.options.branch.is_none();
            let error = match segment.filter(|_| is_damage) {
                Some(segment) => error.context(format_args!("read {}", segment.key(self.id))),
                None => error,
            };
            Stop {
                segment: segment.map(Segment::id),
                ..Stop::from(error)
            }
        })?;
        self.compacted
            .extend(segment.filter(|segment| segment.is_compacted()));
        (self.seq, self.digest) = (header.seq, Some(entry.digest));
        self.raw_bytes = self.raw_bytes.saturating_add(entry.body.len() as u64);
        if self.links.len() == MAX_LINKS {
            self.links.drain(..MAX_LINKS / 2);
        }
        self.links.push((header.seq, entry.digest));
        Ok(Applied::Yes)
    }

    fn is_before_point(&self, header: &EntryHeader) -> bool {
        self.options.at.includes(header)
    }

    /// Applies the session that a fork starts from.
    async fn apply_fork_origin(&mut self, fork: &ForkOrigin) -> Result<()> {
        let mut sink = match &mut self.origin {
            Origin::Unread => {
                let read = self.logs.read_origin(
                    self.id,
                    fork,
                    self.options.concurrency,
                    &mut *self.new_sink,
                );
                let (sink, objects) = read.await?;
                self.objects += objects;
                sink
            }
            Origin::Read(origin) => {
                origin
                    .take_if(|read| read.0 == *fork)
                    .ok_or_else(|| {
                        Error::corrupt(format!("the origin of {} is inconsistent", self.id))
                    })?
                    .1
            }
        };
        sink.start_fork(fork, &SessionRenamer::of_fork(fork, &self.id.name))?;
        self.sink = sink;
        Ok(())
    }
}

/// Whether a reader may use the covered segments instead of a compacted segment that failed with
/// this error.
fn is_bypassable(error: &Error) -> bool {
    error.kind() == ErrorKind::Corrupt || error.kind().is_unreadable()
}

/// A segment was deleted between the listing and the read.
pub(super) fn deleted_segment_error(id: &LogId, segment: &Segment) -> Error {
    Error::unavailable(format!(
        "garbage collection deleted {} after it was listed",
        segment.key(id)
    ))
    .hint("run the command again")
}

/// The chain rejected an entry.
fn rejected(chain: &EntryChain, by_seq: &BTreeMap<Seq, Segment>, error: Error) -> Stop {
    let segment = chain
        .rejected()
        .and_then(|seq| by_seq.get(&seq))
        .map(Segment::id);
    Stop {
        segment,
        skips_back_to: chain.skips_back_to(),
        ..Stop::from(error)
    }
}
