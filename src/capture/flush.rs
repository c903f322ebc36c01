//! Flushes one log: look, encode, append, and when the number is taken, find out by whom.
//!
//! Owns the steps of a flush and what a fenced writer does. Does not own when a flush happens or is tried again
//! (`streamer`).

use std::collections::{BTreeMap, BTreeSet};

use tracing::Instrument;
use tracing::field::{Empty, display};

use super::Context;
use super::changes::{ChangeDetector, ChangeSet};
use super::recover::adopt;
use crate::agent::transcript::Reader;
use crate::codec::entry::{self, Encoded, Entry};
use crate::error::{Error, ErrorKind, Result};
use crate::index::EntryRecord;
use crate::log::ledger::{FileCursor, Ledger};
use crate::log::writer::{AppendOutcome, LogWriter, WriteTarget, fenced};
use crate::model::{EntryHeader, EntryKind, FileKind, LogId, ParsedTranscripts, RelPath};
use crate::sys::clock::new_writer;
use crate::sys::{Operation, TRACED};

/// A log that loses a race this often in one flush is left for the next.
const MOST_RACES: u32 = 20;

/// What a flush needs to know between two runs.
pub struct LogFlusher {
    /// The log.
    pub id: LogId,
    /// The ledger, once it is known.
    pub ledger: Option<Ledger>,
    /// Files to look at besides those that have a cursor.
    pub hints: BTreeSet<RelPath>,
    /// Reads what is appended.
    reader: Reader,
    /// An entry whose fate is unknown: the same bytes must be tried again.
    pending: Option<(Encoded, ChangeSet)>,
    /// The ledger on disk is known to be behind: ask the bucket.
    outdated: bool,
    /// The store was seen to hold the entry that the ledger ends with.
    confirmed: bool,
    /// How far the files of a project were shipped when somebody else wrote.
    overtaken: BTreeMap<RelPath, FileCursor>,
}

/// What a flush did.
#[derive(Debug, Default)]
pub struct FlushOutcome {
    /// Bytes made durable, before compression.
    pub bytes: u64,
    /// Entries written.
    pub entries: u32,
    /// Bytes of unfinished lines that wait for their end.
    pub torn: u64,
    /// What the files looked like; 0 if not all could be read.
    pub seen: u64,
    /// The files that are there.
    pub present: BTreeSet<RelPath>,
    /// Bytes of the present files that are durable.
    pub durable: u64,
}

impl LogFlusher {
    /// A log of which nothing is known yet.
    pub fn new(id: LogId) -> Self {
        LogFlusher {
            id,
            ledger: None,
            hints: BTreeSet::new(),
            reader: Reader::default(),
            pending: None,
            outdated: false,
            confirmed: false,
            overtaken: BTreeMap::new(),
        }
    }

    /// Makes everything durable that is on disk now. With `last` the agent is gone, and an unfinished line goes out too.
    pub async fn flush(&mut self, context: &Context, last: bool) -> Result<FlushOutcome> {
        let span = tracing::info_span!(target: TRACED, "flush", session.id = %self.id.name, entries = Empty, bytes = Empty, error = Empty);
        let result = self.turns(context, last).instrument(span.clone()).await;
        match &result {
            Ok(shipped) => span
                .record("entries", shipped.entries)
                .record("bytes", shipped.bytes),
            Err(error) => span.record("error", display(error)),
        };
        result
    }

    async fn turns(&mut self, context: &Context, last: bool) -> Result<FlushOutcome> {
        let mut shipped = FlushOutcome::default();
        let mut races = 0;
        loop {
            let mut ledger = match self.ledger.take() {
                Some(ledger) => ledger,
                None => self.find_ledger(context).await?,
            };
            let turn = self.turn(context, &mut ledger, last, &mut shipped).await;
            let done = match turn {
                Err(error) => {
                    self.ledger = Some(ledger);
                    return Err(error);
                }
                Ok(done) => done,
            };
            match done {
                Turn::Clean => {
                    self.ledger = Some(ledger);
                    return Ok(shipped);
                }
                Turn::Wrote => self.ledger = Some(ledger),
                // Somebody else wrote: ask the bucket again.
                Turn::Again => {
                    self.outdated = true;
                    if self.id.name.is_project() {
                        self.overtaken = ledger.files;
                    }
                    races += 1;
                    if races > MOST_RACES {
                        return Err(Error::unavailable(format!(
                            "write to {}: lost the race {races} times",
                            self.id
                        )));
                    }
                }
            }
        }
    }

    async fn find_ledger(&mut self, context: &Context) -> Result<Ledger> {
        let here = Ledger::load(&*context.directory, &context.logs.store.address(), &self.id)
            .filter(|_| !self.outdated);
        let mut ledger = match here {
            Some(ledger) => ledger,
            None => adopt(context, &self.id).await?,
        };
        // What we shipped and did not change since is not new: where the log differs, the other's is newer.
        let whole = std::mem::take(&mut self.overtaken)
            .into_iter()
            .filter(|(_, cursor)| cursor.len == cursor.stat.size);
        ledger.files.extend(whole);
        self.outdated = false;
        Ok(ledger)
    }

    async fn turn(
        &mut self,
        context: &Context,
        ledger: &mut Ledger,
        last: bool,
        shipped: &mut FlushOutcome,
    ) -> Result<Turn> {
        let tried_before = self.pending.is_some();
        let (encoded, mut cut) = match self.pending.take() {
            Some(pending) => pending,
            None => {
                let look = ChangeDetector {
                    directory: &*context.directory,
                    profile: &*context.profile,
                    name: &self.id.name,
                    last,
                    now: context.logs.clock.now(),
                };
                let mut cut = look.take(&ledger.files, &self.hints);
                if cut.is_empty() {
                    let before = (ledger.seen, std::mem::take(&mut ledger.files));
                    let settled = self.settle(ledger, cut, shipped);
                    if before.0 != ledger.seen || before.1 != ledger.files {
                        self.save(context, ledger, false);
                    }
                    return settled.map(|()| Turn::Clean);
                }
                if (!self.confirmed || ledger.log_writer.has_slept(context.logs.clock.now()))
                    && let Some(turn) = self.confirm(context, ledger).await?
                {
                    return Ok(turn);
                }
                if ledger.log_writer.target == WriteTarget::Unclaimed {
                    let end = ledger.log_writer.seq;
                    match context
                        .logs
                        .claim(&self.id, &mut ledger.log_writer, end)
                        .await?
                    {
                        Some(claim) => {
                            self.save(context, ledger, true);
                            feed(
                                context,
                                &self.id,
                                ledger,
                                &claim,
                                ParsedTranscripts::default(),
                            );
                        }
                        None => return Ok(Turn::Again),
                    }
                }
                self.reader.moved(&cut.moves);
                cut.told = self.reader.read(
                    &*context.profile,
                    cut.parts.iter().zip(cut.bodies.iter().map(Vec::as_slice)),
                );
                cut.turns = ledger.turns.clone();
                let checkpoints = cut.turns.take(&cut.told.marks, &cut.lengths());
                let moves = std::mem::take(&mut cut.moves);
                let parts = std::mem::take(&mut cut.parts);
                let header = ledger.log_writer.header(
                    &self.id,
                    EntryKind::Delta,
                    context.logs.clock.now(),
                    moves,
                    parts,
                );
                (
                    entry::encode(
                        EntryHeader {
                            checkpoints,
                            ..header
                        },
                        &cut.bodies,
                    )?,
                    cut,
                )
            }
        };
        match context
            .logs
            .append(&self.id, &mut ledger.log_writer, &encoded)
            .await
        {
            Err(error) => {
                if error.is_retryable() {
                    self.pending = Some((encoded, cut));
                }
                Err(error)
            }
            Ok(AppendOutcome::Written) => {
                shipped.bytes += encoded.header.body_len();
                shipped.entries += 1;
                let told = std::mem::take(&mut cut.told);
                ledger.turns = std::mem::take(&mut cut.turns);
                let more = cut.more;
                // The look behind an entry that is tried again knows nothing of the files that were named since.
                let named_since = if tried_before {
                    std::mem::take(&mut self.hints)
                } else {
                    BTreeSet::new()
                };
                let settled = self.settle(ledger, cut, shipped);
                self.hints.extend(named_since);
                self.save(context, ledger, false);
                feed(context, &self.id, ledger, &encoded, told);
                // What was appended since the look is the next flush's; but an entry that is tried again is of an
                // older flush's look.
                if more || tried_before {
                    Ok(Turn::Wrote)
                } else {
                    settled.map(|()| Turn::Clean)
                }
            }
            Ok(AppendOutcome::Conflict(entry)) => self.taken(context, ledger, entry),
        }
    }

    /// Before the first write of a process, and after a long sleep: a ledger can outlive its store, which was emptied,
    /// replaced, or brought back from an older copy, and a session can outlive its time. Writing behind an entry that is
    /// gone would make a log that nobody can read.
    async fn confirm(&mut self, context: &Context, ledger: &mut Ledger) -> Result<Option<Turn>> {
        let log_writer = &ledger.log_writer;
        let there = match log_writer.target {
            _ if log_writer.seq == 0 => true,
            WriteTarget::Branch => {
                is_there(
                    context
                        .logs
                        .read_branch(&self.id, &log_writer.writer, log_writer.seq)
                        .await,
                )? || is_there(context.logs.read(&self.id, log_writer.seq).await)?
            }
            WriteTarget::Main | WriteTarget::Unclaimed => {
                match context.logs.read(&self.id, log_writer.seq).await {
                    Ok(Some(entry)) => log_writer
                        .digest
                        .is_none_or(|digest| digest == entry.digest),
                    // Collected: then a merge or a snapshot stands for it.
                    Ok(None) => context
                        .logs
                        .composites(&self.id)
                        .await?
                        .iter()
                        .any(|piece| piece.to == log_writer.seq),
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Encrypted) =>
                    {
                        false
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        let open = there
            && log_writer.target == WriteTarget::Main
            && context.logs.has_open_number(&self.id, log_writer).await?;
        let first = !std::mem::replace(&mut self.confirmed, true);
        if there
            && first
            && log_writer.target == WriteTarget::Branch
            && !context.logs.creates_once().await?
        {
            // A write of an earlier life of ours may still arrive, at the number that we would write, and replace it.
            self.begin_branch(context, ledger);
            return Ok(Some(Turn::Wrote));
        }
        if open {
            tracing::info!(id = %self.id, seq = log_writer.seq, "an earlier write may still arrive; claiming behind it");
            return Ok(Some(Turn::Again));
        }
        if there {
            return Ok(None);
        }
        tracing::warn!(id = %self.id, seq = log_writer.seq, "the store does not have the entry that the ledger ends with; asking the bucket");
        Ok(Some(Turn::Again))
    }

    /// All that a look found is durable: remember what the files look like, so that nobody looks again before they
    /// change. An error if something could not be read.
    fn settle(
        &mut self,
        ledger: &mut Ledger,
        mut cut: ChangeSet,
        shipped: &mut FlushOutcome,
    ) -> Result<()> {
        shipped.torn = cut.torn;
        shipped.durable = cut
            .present
            .iter()
            .filter_map(|path| cut.cursors.get(path))
            .map(|cursor| cursor.len)
            .sum();
        shipped.seen = if cut.unread.is_empty() && !cut.more {
            cut.seen
        } else {
            0
        };
        ledger.seen = shipped.seen;
        ledger.files = cut.cursors;
        self.hints = cut.present.clone();
        shipped.present = cut.present;
        cut.unread.pop().map_or(Ok(()), Err)
    }

    /// A ledger that cannot be written (a full disk) is no reason to stop: the bucket knows.
    fn save(&self, context: &Context, ledger: &Ledger, durable: bool) {
        if let Err(error) = ledger.save(&*context.directory, durable) {
            tracing::warn!(%error, id = %self.id, "the ledger was not written");
        }
    }

    /// The number is taken. By ourselves before a crash: take over what it says. By somebody else: the session is lost,
    /// and what we still have goes to a branch.
    fn taken(
        &mut self,
        context: &Context,
        ledger: &mut Ledger,
        entry: Option<Box<Entry>>,
    ) -> Result<Turn> {
        let now = context.logs.clock.now();
        if let Some(entry) = &entry
            && entry.header.writer == ledger.log_writer.writer
            && entry.header.follows() == ledger.log_writer.seq
            && entry.header.prev == ledger.log_writer.digest
            && self.absorb(context, ledger, entry)?
        {
            ledger
                .log_writer
                .follow(entry.header.seq, entry.digest, now);
            tracing::info!(id = %self.id, seq = entry.header.seq, "found an entry of ours that the ledger did not know");
            context.feed.stale(self.id.name.clone());
            self.save(context, ledger, false);
            return Ok(Turn::Wrote);
        }
        if self.id.name.is_project()
            || entry
                .as_ref()
                .is_some_and(|entry| entry.header.kind.is_removal())
        {
            // What was removed lives again when it is written to. And a project's log is anybody's: go on behind whoever wrote.
            return Ok(Turn::Again);
        }
        let by = entry.as_ref().map(|entry| &entry.header.writer);
        if ledger.log_writer.target == WriteTarget::Branch {
            // Another volume carries a copy of our ledger.
            self.begin_branch(context, ledger);
        } else {
            let error = fenced(&self.id, by);
            context.feed.counts().failed(Operation::Flush, error.kind());
            tracing::warn!(id = %self.id, writer = %ledger.log_writer.writer, "{error}; going on with a branch");
            if ledger.log_writer.has_slept(now) {
                // The entry that we wrote last may be collected, and a branch from there would hang in the air.
                self.begin_branch(context, ledger);
            }
            ledger.log_writer.target = WriteTarget::Branch;
            if by == Some(&ledger.log_writer.writer) {
                ledger.log_writer.writer = new_writer(&context.logs.rng);
            }
        }
        self.save(context, ledger, true);
        Ok(Turn::Wrote)
    }

    /// Begins a branch of our own, with everything.
    fn begin_branch(&self, context: &Context, ledger: &mut Ledger) {
        let writer = new_writer(&context.logs.rng);
        ledger.log_writer = LogWriter {
            writer,
            target: WriteTarget::Branch,
            seq: 0,
            digest: None,
            ..ledger.log_writer.clone()
        };
        ledger.files.clear();
    }

    /// Moves the cursors over an entry that we wrote and forgot; false if the local files do not show that it is ours:
    /// a copy of the volume carries our name too.
    fn absorb(&self, context: &Context, ledger: &mut Ledger, entry: &Entry) -> Result<bool> {
        let over = |path: &RelPath, kind, len| -> Result<Option<FileCursor>> {
            let failed = |cause| Error::io(format!("read {path}"), cause);
            let Some(file) = context.directory.open(path).map_err(failed)? else {
                return Ok(None);
            };
            FileCursor::over(&*file, kind, len).map_err(failed)
        };
        let mut files = ledger.files.clone();
        // Lines that it appended are here, which only we can have; or else all that it changed is here.
        let (mut lines_are_here, mut all_is_here) = (false, true);
        for moved in &entry.header.moves {
            let Some(cursor) = files.remove(&moved.from) else {
                continue;
            };
            all_is_here &= over(&moved.to, cursor.kind, cursor.len)?
                .is_some_and(|now| now.hash == cursor.hash);
            files.insert(moved.to.clone(), cursor);
        }
        for part in &entry.header.parts {
            match over(&part.path, part.kind, part.end())?
                .filter(|cursor| cursor.hash.digest() == part.file_sha256)
            {
                Some(mut cursor) => {
                    lines_are_here |= part.kind == FileKind::Append && part.len > 0;
                    cursor.stat.size = part.end();
                    files.insert(part.path.clone(), cursor);
                }
                // It may have been replaced since; from 0 is always right.
                None if part.kind == FileKind::Whole => {
                    all_is_here = false;
                    files.remove(&part.path);
                }
                None => return Ok(false),
            }
        }
        let ours = lines_are_here || all_is_here;
        if ours {
            ledger.files = files;
            entry
                .header
                .checkpoints
                .iter()
                .for_each(|point| ledger.turns.follow(point));
        }
        Ok(ours)
    }
}

/// Whether an entry is there, readable or not.
fn is_there(read: Result<Option<Entry>>) -> Result<bool> {
    match read {
        Err(error) if error.kind() == ErrorKind::Encrypted => Ok(true),
        read => Ok(read?.is_some()),
    }
}

enum Turn {
    Clean,
    Wrote,
    Again,
}

fn feed(
    context: &Context,
    id: &LogId,
    ledger: &Ledger,
    encoded: &Encoded,
    told: ParsedTranscripts,
) {
    let branch =
        (ledger.log_writer.target == WriteTarget::Branch).then(|| ledger.log_writer.writer.clone());
    let header = encoded.header.clone();
    context.feed.entry(EntryRecord {
        log: id.clone(),
        branch,
        header,
        stored: encoded.bytes.len() as u64,
        digest: encoded.digest,
        told,
    });
}
