//! Updates the index from the store: records the entries that it lacks, or all entries.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::agent::Profile;
use crate::agent::transcript::TranscriptReader;
use crate::codec::entry::Entry;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::index::{EntryRecord, Index, RecordOutcome};
use crate::log::Logs;
use crate::log::fork::{SessionRenamer, truncated_lengths};
use crate::log::metadata::VersionedMetadata;
use crate::log::read::{EntrySink, ReadOptions};
use crate::log::segments::Granularity;
use crate::log::state::LogState;
use crate::model::{
    FileKind, FileMove, ForkOrigin, LogId, LogPoint, ParsedTranscripts, RelPath, WriterId,
};

/// Maximum number of entries that are recorded in one transaction.
const BATCH_SIZE: usize = 200;

/// Raw bytes that are read before they are recorded. This bounds the memory for a long log.
const MAX_RAW_BYTES: u64 = 4 << 20;

/// Maximum number of objects in flight. Those after the last one that is recorded are read twice.
const CONCURRENCY: usize = 4;

/// Records the entries of a log that the index lacks; returns their number.
pub async fn catch_up(
    logs: &Logs,
    index: &dyn Index,
    profile: &dyn Profile,
    id: &LogId,
) -> Result<u64> {
    let indexed = index.session(id).await?.map_or(0, |row| row.head);
    match index_log(logs, index, profile, id, Some(indexed)).await {
        // The index contradicts the store, or its entries were rolled back: index the log again.
        Err(error)
            if error.kind() == ErrorKind::Conflict
                || error.kind() == ErrorKind::Corrupt && indexed > 0 =>
        {
            index_log(logs, index, profile, id, None).await
        }
        recorded => recorded,
    }
    .with_context(|| format!("index {id}"))
}

/// Records the entries after `indexed`, or all of them. Rows of the log are deleted only after its
/// first entries were read.
async fn index_log(
    logs: &Logs,
    index: &dyn Index,
    profile: &dyn Profile,
    id: &LogId,
    indexed: Option<u64>,
) -> Result<u64> {
    let mut recorded = 0;
    let mut is_replaced = indexed.is_none();
    let mut reader = TranscriptReader::default();
    // Indexed entries are not read again, so the first link is not checked; all others are.
    let mut options = ReadOptions {
        granularity: Granularity::Fine,
        after: indexed.unwrap_or(0),
        concurrency: CONCURRENCY,
        max_raw_bytes: MAX_RAW_BYTES,
        ..ReadOptions::default()
    };
    loop {
        let read = logs
            .read_log(id, options, || RecordCollector {
                id,
                profile,
                reader: reader.clone(),
                records: Vec::new(),
            })
            .await?;
        reader = read.sink.reader;
        if std::mem::take(&mut is_replaced) {
            index.delete_log(id).await?;
        }
        let mut records = read.sink.records;
        for record in &mut records {
            if let Some(fork) = record.header.fork.clone() {
                record.transcripts = parse_fork_origin(logs, profile, id, &fork).await?;
                record.header.parts = fork.files;
            }
        }
        for batch in records.chunks(BATCH_SIZE) {
            recorded += write_records(index, batch).await?;
        }
        if let Some(error) = read.damage {
            return Err(error);
        }
        if read.seq >= read.head || read.seq == options.after {
            break;
        }
        (options.after, options.after_digest) = (read.seq, read.digest);
    }
    for writer in logs.list_branches(id).await? {
        recorded += index_branch(logs, index, profile, id, &writer).await?;
    }
    update_metadata(logs, index, id).await?;
    Ok(recorded)
}

/// Records the entries of a branch.
async fn index_branch(
    logs: &Logs,
    index: &dyn Index,
    profile: &dyn Profile,
    id: &LogId,
    writer: &WriterId,
) -> Result<u64> {
    let (mut records, mut raw_bytes, mut recorded) = (Vec::new(), 0, 0);
    for segment in logs.list_branch_segments(id, writer).await? {
        if let Some(entry) = logs.read_segment(id, &segment, Some(writer)).await? {
            let mut reader = TranscriptReader::default();
            let branch = Some(writer.clone());
            records.push(entry_record(&mut reader, profile, id, branch, &entry));
            raw_bytes += entry.body.len() as u64;
        }
        if raw_bytes >= MAX_RAW_BYTES {
            recorded += write_records(index, &records).await?;
            (records, raw_bytes) = (Vec::new(), 0);
        }
    }
    Ok(recorded + write_records(index, &records).await?)
}

/// Parses the files that a fork starts with.
async fn parse_fork_origin(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    fork: &ForkOrigin,
) -> Result<ParsedTranscripts> {
    let origin = logs.id(fork.session.clone());
    let options = ReadOptions {
        at: LogPoint::Seq(fork.seq),
        ..ReadOptions::default()
    };
    let files = logs
        .read_log(&origin, options, TranscriptBytes::default)
        .await?
        .require_undamaged(&origin)?;
    let renamer = SessionRenamer::of_fork(fork, &id.name);
    let lengths = truncated_lengths(&files.state.files, fork.transcript_lengths.as_ref());
    let mut renamed = BTreeMap::new();
    for (path, len) in lengths {
        let (Some(file), Some(bytes)) = (files.state.files.get(&path), files.bytes.get(&path))
        else {
            continue;
        };
        let bytes = &bytes[..usize::try_from(len).unwrap_or(usize::MAX).min(bytes.len())];
        renamed.insert(renamer.path(&path)?, renamer.bytes(&path, file.kind, bytes));
    }
    let parts = fork
        .files
        .iter()
        .filter_map(|part| Some((part, renamed.get(&part.path)?.as_slice())));
    Ok(TranscriptReader::default().read(profile, parts))
}

/// The bytes of every transcript.
#[derive(Default)]
struct TranscriptBytes {
    state: LogState,
    bytes: BTreeMap<RelPath, Vec<u8>>,
}

impl EntrySink for TranscriptBytes {
    fn apply_entry(&mut self, entry: &Entry) -> Result<()> {
        self.state.apply(&entry.header, entry.digest)?;
        FileMove::apply_all(&entry.header.moves, &mut self.bytes);
        for (part, bytes) in entry
            .parts()
            .filter(|(part, _)| part.kind == FileKind::Append)
        {
            let file = self.bytes.entry(part.path.clone()).or_default();
            file.truncate(usize::try_from(part.start).unwrap_or(usize::MAX));
            file.extend_from_slice(bytes);
        }
        Ok(())
    }

    fn needs_fork_origin(&self) -> bool {
        true
    }

    fn start_fork(&mut self, fork: &ForkOrigin, renamer: &SessionRenamer) -> Result<()> {
        let lengths = truncated_lengths(&self.state.files, fork.transcript_lengths.as_ref());
        let originals = std::mem::take(&mut self.bytes);
        self.state = LogState::default();
        for (path, mut bytes) in originals {
            bytes.truncate(
                lengths
                    .get(&path)
                    .map_or(0, |len| usize::try_from(*len).unwrap_or(usize::MAX)),
            );
            self.bytes.insert(
                renamer.path(&path)?,
                renamer.bytes(&path, FileKind::Append, &bytes),
            );
        }
        Ok(())
    }
}

/// Records the named checkpoints of a session.
pub async fn update_named_checkpoints(logs: &Logs, index: &dyn Index, id: &LogId) -> Result<()> {
    let named = logs
        .named_checkpoints(id)
        .await?
        .into_iter()
        .map(|named| (named.name, named.checkpoint))
        .collect::<Vec<_>>();
    index.replace_named_checkpoints(id, &named).await
}

/// Records the metadata of a session.
async fn update_metadata(logs: &Logs, index: &dyn Index, id: &LogId) -> Result<()> {
    if id.name.is_project() {
        return Ok(());
    }
    match logs.metadata(id).await {
        Ok(VersionedMetadata { version: 0, .. }) => Ok(()),
        Ok(current) => {
            index
                .set_metadata(id, current.version, &current.metadata)
                .await
        }
        // The other rows do not depend on the metadata.
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            tracing::warn!(%error, session = %id.name, "the metadata of the session is damaged and was not indexed");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Collects the records of a log. Does not keep the bytes of its files.
struct RecordCollector<'a> {
    id: &'a LogId,
    profile: &'a dyn Profile,
    reader: TranscriptReader,
    records: Vec<EntryRecord>,
}

impl EntrySink for RecordCollector<'_> {
    fn apply_entry(&mut self, entry: &Entry) -> Result<()> {
        self.records.push(entry_record(
            &mut self.reader,
            self.profile,
            self.id,
            None,
            entry,
        ));
        Ok(())
    }
}

fn entry_record(
    reader: &mut TranscriptReader,
    profile: &dyn Profile,
    id: &LogId,
    branch: Option<WriterId>,
    entry: &Entry,
) -> EntryRecord {
    reader.move_files(&entry.header.moves);
    let transcripts = reader.read(profile, entry.parts());
    EntryRecord {
        log: id.clone(),
        branch,
        header: entry.header.clone(),
        stored_bytes: entry.stored_bytes,
        digest: entry.digest,
        transcripts,
    }
}

/// Records entries of one log; returns the number of those that were new.
async fn write_records(index: &dyn Index, records: &[EntryRecord]) -> Result<u64> {
    let mut recorded = 0;
    for (record, outcome) in records.iter().zip(index.record_all(records).await?) {
        match outcome {
            RecordOutcome::Recorded => recorded += 1,
            RecordOutcome::AlreadyRecorded => {}
            RecordOutcome::Gap { head } => {
                return Err(Error::conflict(format!(
                    "the index ends with entry {head}, but the store continues with entry {}",
                    record.header.seq
                )));
            }
        }
    }
    Ok(recorded)
}

/// The result of a rebuild.
#[derive(Debug, Default, Clone, Copy, Serialize)]
pub struct ReindexReport {
    /// Number of logs in the store.
    pub logs: usize,
    /// Number of entries recorded.
    pub entries: u64,
    /// Number of logs deleted from the index, because the store does not have them.
    pub deleted: usize,
    /// Number of logs that could not be indexed.
    pub failed: usize,
    /// Number of logs that this process cannot read: encrypted to others, or written by a newer
    /// sessiond.
    pub unreadable: usize,
    /// Number of these logs that a newer sessiond wrote.
    pub newer_format: usize,
}

/// Rebuilds the index of an agent from the store. Passes the result of each log to `on_log`: a log
/// that cannot be read does not stop the others.
pub async fn rebuild(
    logs: &Logs,
    index: &dyn Index,
    profile: &dyn Profile,
    mut on_log: impl FnMut(&LogId, &Result<u64>),
) -> Result<ReindexReport> {
    let mut report = ReindexReport::default();
    let names = logs.log_names("").await?;
    for known in index.logs(&logs.namespace, &logs.agent).await? {
        if !names.contains(&known.name) {
            index.delete_log(&known).await?;
            report.deleted += 1;
        }
    }
    logs.progress.set_total_logs(names.len());
    for name in names {
        let id = logs.id(name);
        logs.progress.start_log();
        let mut recorded = index_log(logs, index, profile, &id, None).await;
        if recorded.is_ok()
            && let Err(error) = update_named_checkpoints(logs, index, &id).await
        {
            recorded = Err(error);
        }
        match &recorded {
            Ok(entries) => report.entries += entries,
            // If the database or the store is unavailable, every other log would fail too.
            Err(error) if error.is_retryable() => {
                return recorded
                    .map(|_| report)
                    .with_context(|| format!("index {id}"));
            }
            Err(error) if error.kind().is_unreadable() => {
                report.unreadable += 1;
                report.newer_format += usize::from(error.kind() == ErrorKind::NewerFormat);
            }
            Err(_) => report.failed += 1,
        }
        on_log(&id, &recorded);
        report.logs += 1;
    }
    Ok(report)
}
