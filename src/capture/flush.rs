//! One flush of one log: detect changes, encode, append, and resolve conflicts.
//!
//! Owns the steps of a flush and the handling of takeovers. Does not own the time of a flush or its
//! retries (`flush_state`).

mod confirm;

use std::collections::{BTreeMap, BTreeSet};

use tracing::Instrument;
use tracing::field::{Empty, display};

use super::CaptureContext;
use super::changes::{ChangeDetector, ChangeSet};
use super::recover::recover_ledger;
use super::scan::wait_for_turn;
use crate::agent::transcript::TranscriptReader;
use crate::codec::entry::{self, EncodedEntry, Entry};
use crate::error::{Error, ErrorContext, Result};
use crate::index::EntryRecord;
use crate::log::append::AppendOutcome;
use crate::log::ledger::{FileCursor, Ledger};
use crate::log::race::LostRaces;
use crate::log::writer::{LogWriter, WriteTarget, fenced_error};
use crate::model::{
    EntryHeader, EntryKind, FileKind, LogId, ParsedTranscripts, RelPath, UploadPart,
};
use crate::store::Store;
use crate::sys::clock::new_writer_id;
use crate::sys::mutation::{Mutation, is_active};
use crate::sys::{TRACE_TARGET, blocking};

/// From this number of files on, the ledger is not saved after each entry of a large flush, and the
/// change detection waits for scans.
const MANY_FILES: usize = 1000;

/// Maximum number of entries until the ledger is saved.
const MAX_UNSAVED_ENTRIES: u32 = 16;

/// The state that a log's flushes share.
pub struct LogFlusher {
    /// The log.
    pub id: LogId,
    /// The ledger, once it is loaded.
    pub ledger: Option<Ledger>,
    /// Files to check besides those that have a cursor.
    pub paths: BTreeSet<RelPath>,
    transcript_reader: TranscriptReader,
    /// An entry that may or may not be stored: a retry must write the same bytes.
    pending: Option<PendingEntry>,
    /// The ledger on disk is older than the log.
    is_ledger_stale: bool,
    /// This process has checked that the store has the last entry of the ledger.
    is_confirmed: bool,
    /// The ledger comes from the agent's directory, where the agent can change it.
    is_ledger_from_disk: bool,
    /// This process has written to the log, or the store confirmed that an earlier one had.
    is_own_log: bool,
    /// The cursors of a project's files from before another writer appended.
    cursors_before_conflict: BTreeMap<RelPath, FileCursor>,
    /// The changes do not fit into a small entry.
    is_large: bool,
    /// The number of entries since the ledger was saved.
    unsaved_entries: u32,
}

struct PendingEntry {
    encoded: EncodedEntry,
    changes: ChangeSet,
    /// An earlier flush detected the changes.
    is_retry: bool,
}

/// The outcome of a flush.
#[derive(Debug, Default)]
pub struct FlushOutcome {
    /// Bytes made durable, before compression.
    pub raw_bytes: u64,
    /// Entries written.
    pub entries: u32,
    /// Bytes after the last newline of the transcripts, which wait for the rest of their line.
    pub partial_line_bytes: u64,
    /// The fingerprint of the files; 0 if some could not be read.
    pub fingerprint: u64,
    /// The existing files.
    pub files: BTreeSet<RelPath>,
    /// Durable bytes of the existing files.
    pub durable_bytes: u64,
    /// Whether another turn is needed, because the changes need a large entry or several entries.
    pub is_unfinished: bool,
    /// Whether everything is durable except for side files that changed during their upload: why each
    /// of the others is not durable.
    pub caught_up: Option<Vec<String>>,
}

/// The next step of a flush.
enum Step {
    /// Everything is durable.
    Done,
    /// Detect changes again.
    Continue,
    /// Detect changes again, after the flushes of other logs.
    Yield,
    /// The log is ahead of the ledger: recover it from the store, then detect changes again.
    Recover,
}

impl LogFlusher {
    /// A flusher without a ledger.
    pub fn new(id: LogId) -> Self {
        LogFlusher {
            id,
            ledger: None,
            paths: BTreeSet::new(),
            transcript_reader: TranscriptReader::default(),
            pending: None,
            is_ledger_stale: false,
            is_confirmed: false,
            is_ledger_from_disk: false,
            is_own_log: false,
            cursors_before_conflict: BTreeMap::new(),
            is_large: false,
            unsaved_entries: 0,
        }
    }

    /// Whether the next turn writes a large entry.
    pub fn is_large(&self) -> bool {
        self.is_large
    }

    /// Whether it keeps a large entry of which it is unknown whether it is stored.
    pub fn has_large_pending_entry(&self) -> bool {
        self.is_large && self.pending.is_some()
    }

    /// One turn of a flush: all current changes if they fit into a small entry, otherwise at most one
    /// large entry. The outcome says whether there is more.
    pub async fn flush_turn(
        &mut self,
        context: &CaptureContext,
        agent_exited: bool,
    ) -> Result<FlushOutcome> {
        let span = tracing::info_span!(target: TRACE_TARGET, "flush", session.id = %self.id.name, entries = Empty, bytes = Empty, error = Empty);
        let result = self
            .run_steps(context, agent_exited)
            .instrument(span.clone())
            .await;
        match &result {
            Ok(outcome) => span
                .record("entries", outcome.entries)
                .record("bytes", outcome.raw_bytes),
            Err(error) => span.record("error", display(error)),
        };
        result
    }

    async fn run_steps(
        &mut self,
        context: &CaptureContext,
        agent_exited: bool,
    ) -> Result<FlushOutcome> {
        let mut outcome = FlushOutcome::default();
        let mut races = LostRaces::default();
        loop {
            let mut ledger = match self.ledger.take() {
                Some(ledger) => ledger,
                None => self.load_ledger(context).await?,
            };
            let step = self
                .step(context, &mut ledger, agent_exited, &mut outcome)
                .await;
            match step {
                Ok(Step::Recover) => {
                    self.is_ledger_stale = true;
                    if self.id.name.is_project() {
                        self.cursors_before_conflict = ledger.files;
                    }
                    // The next flush tries again.
                    races
                        .count(&self.id)
                        .with_context(|| format!("append to {}", self.id))?;
                }
                step => {
                    self.ledger = Some(ledger);
                    match step? {
                        Step::Done => return Ok(outcome),
                        Step::Yield => {
                            outcome.is_unfinished = true;
                            return Ok(outcome);
                        }
                        Step::Continue | Step::Recover => {}
                    }
                }
            }
        }
    }

    async fn load_ledger(&mut self, context: &CaptureContext) -> Result<Ledger> {
        let store = context.logs.store.address();
        let on_disk = blocking(|| Ledger::load(&*context.directory, &store, &self.id))
            .filter(|_| !self.is_ledger_stale);
        self.is_ledger_from_disk = on_disk.is_some();
        let mut ledger = match on_disk {
            Some(ledger) => ledger,
            None => {
                let ledger = recover_ledger(context, &self.id).await?;
                self.check_limit(context, &ledger.log_writer)?;
                ledger
            }
        };
        if self.transcript_reader.models().is_empty() {
            self.transcript_reader.continue_with(&ledger.models);
        }
        // A file that was completely uploaded and has not changed since is not a change. If the log
        // differs from it, the version of the other writer is newer.
        let uploaded = std::mem::take(&mut self.cursors_before_conflict)
            .into_iter()
            .filter(|(_, cursor)| cursor.len == cursor.stat.size);
        ledger.files.extend(uploaded);
        self.is_ledger_stale = false;
        Ok(ledger)
    }

    async fn step(
        &mut self,
        context: &CaptureContext,
        ledger: &mut Ledger,
        agent_exited: bool,
        outcome: &mut FlushOutcome,
    ) -> Result<Step> {
        if let Some(pending) = self.pending.take() {
            return self.append(context, ledger, pending, outcome).await;
        }
        let now = context.logs.clock.now();
        let detector = ChangeDetector {
            directory: &*context.directory,
            profile: &*context.profile,
            name: &self.id.name,
            agent_exited,
            now,
            limits: context.limits,
            is_large: self.is_large,
        };
        let changes = blocking(|| {
            let has_many_files = ledger.files.len().max(self.paths.len()) >= MANY_FILES;
            let _turn = has_many_files.then(wait_for_turn);
            detector.detect(&ledger.files, &self.paths)
        });
        if changes.has_more && !self.is_large {
            self.is_large = true;
            return Ok(Step::Yield);
        }
        if changes.is_empty() {
            self.is_large = changes.has_more;
            let before = ledger.clean_fingerprint;
            let (result, has_changes) = self.commit(ledger, changes, outcome);
            if has_changes || before != ledger.clean_fingerprint || self.unsaved_entries > 0 {
                self.save(context, ledger, false);
            }
            if self.is_large {
                return Ok(Step::Yield);
            }
            return result.map(|()| Step::Done);
        }
        if (!self.is_confirmed
            || ledger
                .log_writer
                .has_been_idle_for_half_the_grace_period(now))
            && let Some(step) = self.confirm(context, ledger).await?
        {
            return Ok(step);
        }
        if ledger.log_writer.target == WriteTarget::Unclaimed {
            let end = ledger.log_writer.seq;
            let log_writer = &mut ledger.log_writer;
            let Some(claim) = context.logs.claim(&self.id, log_writer, end).await? else {
                return Ok(Step::Recover);
            };
            self.is_own_log = true;
            self.save(context, ledger, true);
            entry_appended(context, ledger, &claim, ParsedTranscripts::default());
        }
        let pending = blocking(|| self.encode(context, ledger, changes))?;
        self.append(context, ledger, pending, outcome).await
    }

    fn encode(
        &mut self,
        context: &CaptureContext,
        ledger: &Ledger,
        mut changes: ChangeSet,
    ) -> Result<PendingEntry> {
        self.transcript_reader.move_files(&changes.moves);
        changes.transcripts = self.transcript_reader.read(
            &*context.profile,
            changes
                .parts
                .iter()
                .zip(changes.bodies.iter().map(Vec::as_slice)),
        );
        changes.turns = ledger.turns.clone();
        let lengths = changes.transcript_lengths(&ledger.files);
        let checkpoints = changes.turns.apply(
            &changes.transcripts.turn_events,
            &lengths,
            context.checkpoints.interval,
        );
        let header = ledger.log_writer.next_header(
            &self.id,
            EntryKind::Delta,
            context.logs.clock.now(),
            std::mem::take(&mut changes.moves),
            std::mem::take(&mut changes.parts),
        );
        let header = EntryHeader {
            keep_checkpoints: context.checkpoints.keep.filter(|_| !checkpoints.is_empty()),
            checkpoints,
            ..header
        };
        let bodies = std::mem::take(&mut changes.bodies);
        Ok(PendingEntry {
            encoded: entry::encode(header, &bodies)?,
            changes,
            is_retry: false,
        })
    }

    async fn append(
        &mut self,
        context: &CaptureContext,
        ledger: &mut Ledger,
        pending: PendingEntry,
        outcome: &mut FlushOutcome,
    ) -> Result<Step> {
        if is_active(Mutation::AdvanceLedgerBeforeWrite) {
            pending.changes.cursors.clone().apply(&mut ledger.files);
            self.save(context, ledger, false);
        }
        let appended = context
            .logs
            .append(&self.id, &mut ledger.log_writer, &pending.encoded)
            .await;
        match appended {
            Err(error) => {
                if error.is_retryable() && !is_active(Mutation::RetryWithOtherBytes) {
                    self.pending = Some(PendingEntry {
                        is_retry: true,
                        ..pending
                    });
                }
                Err(error)
            }
            Ok(AppendOutcome::Written) => self.written(context, ledger, pending, outcome),
            Ok(AppendOutcome::Conflict(entry)) => self.resolve_conflict(context, ledger, entry),
        }
    }

    fn written(
        &mut self,
        context: &CaptureContext,
        ledger: &mut Ledger,
        pending: PendingEntry,
        outcome: &mut FlushOutcome,
    ) -> Result<Step> {
        let PendingEntry {
            encoded,
            mut changes,
            is_retry,
        } = pending;
        outcome.raw_bytes += encoded.header.body_len();
        outcome.entries += 1;
        self.is_own_log = true;
        let mut transcripts = std::mem::take(&mut changes.transcripts);
        // The lines that were uploaded can name files that the change detection did not know.
        let mut named = std::mem::take(&mut transcripts.named_files);
        named.retain(|path| {
            !changes.files.contains(path) && matches!(context.directory.stat(path), Ok(Some(_)))
        });
        let has_new_names = !named.is_empty();
        ledger.turns = std::mem::take(&mut changes.turns);
        ledger.models.clone_from(self.transcript_reader.models());
        let has_more = changes.has_more;
        // The change set of a retry does not include files that were reported after it was
        // detected.
        let reported_since = if is_retry {
            std::mem::take(&mut self.paths)
        } else {
            BTreeSet::new()
        };
        let (result, _) = self.commit(ledger, changes, outcome);
        if is_retry || has_new_names {
            outcome.caught_up = None;
        }
        if !is_active(Mutation::ForgetPathsChangedDuringRetry) {
            self.paths.extend(reported_since);
        }
        self.paths.extend(named);
        self.unsaved_entries += 1;
        // The ledger of many files is large. If it lacks entries, the writer finds them in the log.
        if !has_more
            || ledger.files.len() < MANY_FILES
            || self.unsaved_entries >= MAX_UNSAVED_ENTRIES
        {
            self.save(context, ledger, false);
        }
        entry_appended(context, ledger, &encoded, transcripts);
        self.is_large &= has_more || is_retry;
        // The next flush uploads bytes that were appended after the change detection. The change
        // detection of a retry belongs to an earlier flush.
        if self.is_large {
            Ok(Step::Yield)
        } else if has_more || is_retry || has_new_names {
            Ok(Step::Continue)
        } else {
            result.map(|()| Step::Done)
        }
    }

    /// Updates the ledger after the changes are durable, so that no flush reads the files again
    /// before they change. Returns an error if a file could not be read, and whether a cursor
    /// changed.
    fn commit(
        &mut self,
        ledger: &mut Ledger,
        mut changes: ChangeSet,
        outcome: &mut FlushOutcome,
    ) -> (Result<()>, bool) {
        outcome.partial_line_bytes = changes.partial_line_bytes;
        outcome.durable_bytes = changes.durable_bytes;
        outcome.fingerprint = if changes.read_errors.is_empty() && !changes.has_more {
            changes.fingerprint
        } else {
            0
        };
        ledger.clean_fingerprint = outcome.fingerprint;
        outcome.caught_up = changes.is_caught_up.then(|| {
            let rewritten = changes.rewritten.iter();
            let rewritten = rewritten.map(|path| format!("{path} changes during every upload"));
            let unread = changes.read_errors.iter().map(ToString::to_string);
            rewritten.chain(unread).collect()
        });
        let has_changes = changes.cursors.apply(&mut ledger.files);
        self.paths = changes.files.clone();
        outcome.files = changes.files;
        (changes.read_errors.pop().map_or(Ok(()), Err), has_changes)
    }

    /// Saves the ledger. A failure, such as a full disk, does not stop the flush, because the
    /// ledger can be recovered from the store.
    fn save(&mut self, context: &CaptureContext, ledger: &Ledger, durable: bool) {
        self.unsaved_entries = 0;
        let saved = blocking(|| ledger.save(&*context.directory, durable));
        if let Err(error) = saved {
            tracing::warn!(%error, session = %self.id.name, "saving the ledger failed");
        }
    }

    /// Handles a `seq` that already has an entry. If this writer wrote the entry before a crash,
    /// the ledger advances past it. If another writer wrote it, this writer is fenced, and the
    /// remaining changes go to a branch.
    fn resolve_conflict(
        &mut self,
        context: &CaptureContext,
        ledger: &mut Ledger,
        entry: Option<Box<Entry>>,
    ) -> Result<Step> {
        let now = context.logs.clock.now();
        if let Some(entry) = &entry
            && entry.header.writer == ledger.log_writer.writer
            && entry.header.predecessor() == ledger.log_writer.seq
            && entry.header.prev_digest == ledger.log_writer.digest
            && blocking(|| apply_own_entry(context, ledger, entry))?
        {
            ledger
                .log_writer
                .advance_to(entry.header.seq, entry.digest, now);
            tracing::info!(session = %self.id.name, seq = entry.header.seq, "found an entry of this writer that the ledger did not have");
            context.index_queue.push_stale(self.id.name.clone());
            self.save(context, ledger, false);
            return Ok(Step::Continue);
        }
        let is_removal = entry
            .as_ref()
            .is_some_and(|entry| entry.header.kind.is_removal());
        // A removed session is claimed again by a write. Any writer may append to a project's log.
        if is_removal || self.id.name.is_project() {
            return Ok(Step::Recover);
        }
        let winner = entry.as_ref().map(|entry| &entry.header.writer);
        if ledger.log_writer.target == WriteTarget::Branch {
            // A copy of this volume has the same ledger.
            start_branch(context, ledger);
        } else {
            let error = fenced_error(&self.id, winner);
            context.counters.flush_failed(error.kind());
            tracing::warn!(session = %self.id.name, writer = %ledger.log_writer.writer, "{error}; continuing on a branch");
            if ledger
                .log_writer
                .has_been_idle_for_half_the_grace_period(now)
            {
                // Garbage collection may have deleted the entry that the branch would start from.
                start_branch(context, ledger);
            }
            match &entry {
                Some(entry) if is_active(Mutation::StayOnMainAfterFencing) => {
                    let header = &entry.header;
                    ledger.log_writer.advance_to(header.seq, entry.digest, now);
                }
                _ => ledger.log_writer.target = WriteTarget::Branch,
            }
            if winner == Some(&ledger.log_writer.writer) {
                ledger.log_writer.writer = new_writer_id(&context.logs.rng);
            }
        }
        self.save(context, ledger, true);
        Ok(Step::Continue)
    }
}

/// Starts a branch with a new writer ID that contains all files from the start.
fn start_branch(context: &CaptureContext, ledger: &mut Ledger) {
    ledger.log_writer = LogWriter {
        writer: new_writer_id(&context.logs.rng),
        target: WriteTarget::Branch,
        seq: 0,
        digest: None,
        ..ledger.log_writer.clone()
    };
    ledger.files.clear();
}

/// Advances the cursors past an entry that this writer wrote before a crash. Returns false if the
/// local files do not prove that this writer wrote it: a copy of the volume has the same writer ID.
fn apply_own_entry(context: &CaptureContext, ledger: &mut Ledger, entry: &Entry) -> Result<bool> {
    let cursor_at = |path: &RelPath, kind, len| -> Result<Option<FileCursor>> {
        let failed = |cause| Error::io(format!("read {path}"), cause);
        let Some(file) = context.directory.open(path).map_err(failed)? else {
            return Ok(None);
        };
        FileCursor::read(&*file, kind, len).map_err(failed)
    };
    let mut files = ledger.files.clone();
    // The proof is that the local transcripts contain lines that the entry appended, or that the
    // local files contain all its changes.
    let (mut has_appended_lines, mut has_all_changes) = (false, true);
    for moved in &entry.header.moves {
        if moved.apply(&mut files)
            && let Some(cursor) = files.get(&moved.to)
        {
            has_all_changes &= cursor_at(&moved.to, cursor.kind, cursor.len)?
                .is_some_and(|local| local.hash == cursor.hash);
        }
    }
    for part in &entry.header.parts {
        let cursor = cursor_at(&part.path, part.kind, part.end())?
            .filter(|cursor| cursor.hash.digest() == part.file_sha256);
        match cursor {
            Some(mut cursor) if part.upload == Some(UploadPart::More) => {
                cursor.uploading = Some(cursor.stat.size).filter(|size| *size > part.end());
                match cursor.uploading {
                    Some(_) => files.insert(part.path.clone(), cursor),
                    None => files.remove(&part.path),
                };
            }
            Some(mut cursor) => {
                has_appended_lines |= part.kind == FileKind::Append && part.len > 0;
                cursor.stat.size = part.end();
                files.insert(part.path.clone(), cursor);
            }
            // The file may have been replaced since. Without a cursor it is uploaded from offset 0.
            None if part.kind == FileKind::Whole => {
                has_all_changes = false;
                files.remove(&part.path);
            }
            None => return Ok(false),
        }
    }
    let is_proven = has_appended_lines || has_all_changes;
    if is_proven {
        ledger.files = files;
        for checkpoint in &entry.header.checkpoints {
            ledger.turns.continue_from(checkpoint);
        }
    }
    Ok(is_proven)
}

fn entry_appended(
    context: &CaptureContext,
    ledger: &Ledger,
    encoded: &EncodedEntry,
    transcripts: ParsedTranscripts,
) {
    let log_writer = &ledger.log_writer;
    let is_branch = log_writer.target == WriteTarget::Branch;
    context.entry_appended(EntryRecord {
        log: ledger.id.clone(),
        branch: is_branch.then(|| log_writer.writer.clone()),
        header: encoded.header.clone(),
        stored_bytes: encoded.bytes.len() as u64,
        digest: encoded.digest,
        transcripts,
    });
}
