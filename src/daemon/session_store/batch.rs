//! Appending one batch of entries: which entries are new, and where they go.
//!
//! Owns the append record, which makes a repeated append harmless. Does not own when the entries
//! become durable.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::key::TranscriptKey;
use crate::codec::version;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::model::{Digest, FileStat, RelPath};
use crate::sys::{Directory, FileAttributes};

/// Number of batches that the append record keeps. An SDK repeats an append immediately or not at
/// all.
const RECORDED_BATCHES: usize = 4;

/// Size of the chunks in which a file is read.
const CHUNK_BYTES: usize = 256 << 10;

/// The append record of a session: a file in the session's log, next to its transcripts.
#[derive(Debug, Serialize, Deserialize)]
pub struct AppendRecord {
    version: u32,
    /// The last batches, oldest first.
    #[serde(default)]
    batches: Vec<RecordedBatch>,
    /// The SDK's summary of the session.
    #[serde(default)]
    pub summary: Option<Summary>,
}

/// A batch in the append record. It is recorded before its entries are written, so that a repeated
/// append is recognized even if a crash interrupted the first one.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct RecordedBatch {
    id: String,
    path: RelPath,
    start: u64,
    len: u64,
}

/// The SDK's summary of a session. Its content is opaque to sessiond.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Summary {
    /// The version, which increases by 1 with each change.
    pub version: u64,
    /// The modification time of the transcript that it belongs to, in milliseconds since 1970.
    pub mtime: i64,
    /// The content.
    pub data: Box<RawValue>,
}

impl Default for AppendRecord {
    fn default() -> Self {
        AppendRecord {
            version: version::APPEND_RECORD,
            batches: Vec::new(),
            summary: None,
        }
    }
}

impl AppendRecord {
    /// Loads a record. A missing or damaged record is empty; a record of a newer sessiond is an
    /// error.
    pub fn load(directory: &dyn Directory, path: &RelPath) -> Result<AppendRecord> {
        let bytes = directory
            .read(path)
            .map_err(|cause| Error::io(format!("read {path}"), cause))?;
        let Some(bytes) = bytes else {
            return Ok(AppendRecord::default());
        };
        match version::read(path.as_str(), &bytes, version::APPEND_RECORD) {
            Ok(1) => Ok(serde_json::from_slice(&bytes).unwrap_or_default()),
            Err(error) if error.kind() == ErrorKind::NewerFormat => Err(error),
            _ => Ok(AppendRecord::default()),
        }
    }

    /// The version of the summary; 0 if there is none.
    pub fn summary_version(&self) -> u64 {
        self.summary.as_ref().map_or(0, |summary| summary.version)
    }

    fn save(&self, directory: &dyn Directory, path: &RelPath) -> Result<()> {
        let bytes = serde_json::to_vec(self).map_err(|cause| {
            Error::new(ErrorKind::Internal, "encode an append record").caused_by(cause)
        })?;
        directory
            .replace(path, &bytes, true)
            .map_err(|cause| Error::io(format!("write {path}"), cause))
    }

    fn find(&self, id: Option<&str>, path: &RelPath) -> Option<&RecordedBatch> {
        self.batches
            .iter()
            .find(|batch| Some(batch.id.as_str()) == id && batch.path == *path)
    }

    fn is_last(&self, batch: &RecordedBatch) -> bool {
        let last = self.batches.iter().rfind(|other| other.path == batch.path);
        last.is_some_and(|last| last.id == batch.id)
    }

    fn add(&mut self, batch: RecordedBatch) {
        self.batches.retain(|other| other.id != batch.id);
        self.batches.push(batch);
        let excess = self.batches.len().saturating_sub(RECORDED_BATCHES);
        self.batches.drain(..excess);
    }
}

/// A new summary of a session.
#[derive(Debug, Clone, Copy)]
pub struct SummaryUpdate<'a> {
    /// The version that it is based on.
    pub base_version: u64,
    /// The content.
    pub data: &'a RawValue,
}

/// A batch of entries to append to a transcript.
pub struct Batch<'a> {
    /// The transcript.
    pub key: &'a TranscriptKey,
    /// The client's ID of this append; a repeated append has the same ID.
    pub id: Option<&'a str>,
    /// The entries, each one JSON object.
    pub entries: &'a [&'a RawValue],
    /// The new summary.
    pub summary: Option<SummaryUpdate<'a>>,
    /// The current time, in milliseconds since 1970.
    pub now_ms: i64,
}

/// The outcome of a batch. What it wrote is not durable yet.
#[derive(Debug, PartialEq, Eq)]
pub enum BatchOutcome {
    /// All entries are in the transcript.
    Complete {
        /// Number of entries that were new.
        new_entries: usize,
        /// The files to flush.
        files: Vec<RelPath>,
        /// The current version of the summary.
        summary_version: u64,
    },
    /// Nothing was written, because the new summary is based on an outdated version.
    OutdatedSummary,
}

/// The state of one transcript, so that it need not be read again.
struct CachedTranscript {
    stat: FileStat,
    /// The length up to the end of the last complete line.
    len: u64,
    /// Hashes of the entries' IDs.
    ids: HashSet<u128>,
}

/// The entries of a batch that the transcript does not contain yet.
struct NewEntries {
    count: usize,
    bytes: Vec<u8>,
    ids: HashSet<u128>,
}

impl NewEntries {
    fn select(entries: &[&RawValue], transcript: &CachedTranscript) -> NewEntries {
        let mut new = NewEntries {
            count: 0,
            bytes: Vec::new(),
            ids: HashSet::new(),
        };
        for entry in entries {
            let id = hash_entry_id(entry.get().as_bytes());
            if id.is_some_and(|id| transcript.ids.contains(&id) || new.ids.contains(&id)) {
                continue;
            }
            new.ids.extend(id);
            new.count += 1;
            // In JSON, a line break is white space between tokens; a string cannot contain one.
            let line = entry
                .get()
                .bytes()
                .filter(|byte| !matches!(byte, b'\n' | b'\r'));
            new.bytes.extend(line);
            new.bytes.push(b'\n');
        }
        new
    }
}

/// The transcripts of one session that were read before.
#[derive(Default)]
pub struct TranscriptCache(HashMap<RelPath, CachedTranscript>);

impl TranscriptCache {
    /// Writes the new entries of a batch. An incomplete last line, which a crash left, is cut off:
    /// no append of it was ever acknowledged.
    pub fn append(&mut self, directory: &dyn Directory, batch: &Batch<'_>) -> Result<BatchOutcome> {
        let path = batch.key.path();
        let mut transcript = self
            .transcript(directory, path)
            .with_context(|| format!("read {path}"))?;
        let record_path = batch.key.record_path()?;
        let mut record = AppendRecord::load(directory, &record_path)?;
        let outcome = |new_entries, summary_version| BatchOutcome::Complete {
            new_entries,
            files: vec![path.clone(), record_path.clone()],
            summary_version,
        };
        let earlier = record.find(batch.id, path);
        if earlier.is_some_and(|earlier| transcript.len >= earlier.start + earlier.len) {
            return Ok(outcome(0, record.summary_version()));
        }
        let is_repeated = earlier.is_some();
        let torn = earlier.filter(|torn| record.is_last(torn) && torn.start < transcript.len);
        if let Some(torn) = torn {
            // A crash interrupted the earlier append. It is written again from its start, so that
            // no entry without an ID appears twice.
            directory
                .write_at(path, torn.start, b"")
                .map_err(|cause| Error::io(format!("truncate {path}"), cause))?;
            transcript = self.transcript(directory, path)?;
        }
        let is_outdated =
            |summary: SummaryUpdate<'_>| summary.base_version != record.summary_version();
        if !is_repeated && batch.summary.is_some_and(is_outdated) {
            return Ok(BatchOutcome::OutdatedSummary);
        }
        let new = NewEntries::select(batch.entries, transcript);
        if new.count == 0 {
            return Ok(outcome(0, record.summary_version()));
        }
        let mtime = batch.now_ms.max(transcript.stat.mtime_ns / 1_000_000 + 1);
        let attributes = FileAttributes {
            mode: 0o600,
            mtime_ns: mtime.saturating_mul(1_000_000),
            owner: None,
        };
        if !is_repeated && (batch.id.is_some() || batch.summary.is_some()) {
            update_record(&mut record, batch, mtime, transcript.len, new.bytes.len());
            record.save(directory, &record_path)?;
        }
        let count = new.count;
        self.write(directory, path, new, &attributes)?;
        Ok(outcome(count, record.summary_version()))
    }

    /// Appends the new entries to a transcript.
    fn write(
        &mut self,
        directory: &dyn Directory,
        path: &RelPath,
        new: NewEntries,
        attributes: &FileAttributes,
    ) -> Result<()> {
        let transcript = self.0.entry(path.clone()).or_insert_with(empty_transcript);
        let start = transcript.len;
        let write = || {
            directory
                .write_at(path, start, &new.bytes)
                .and_then(|()| directory.finish(path, attributes))
                .and_then(|()| directory.stat(path))
        };
        match write().map_err(|cause| Error::io(format!("write {path}"), cause)) {
            Ok(Some(stat)) => {
                transcript.stat = stat;
                transcript.len = start + new.bytes.len() as u64;
                transcript.ids.extend(new.ids);
                Ok(())
            }
            unknown => {
                self.0.remove(path);
                unknown.map(|_| ())
            }
        }
    }

    /// The state of a transcript, read again if the file has changed.
    fn transcript(
        &mut self,
        directory: &dyn Directory,
        path: &RelPath,
    ) -> Result<&mut CachedTranscript> {
        let stat = directory
            .stat(path)
            .map_err(|cause| Error::io(format!("read the metadata of {path}"), cause))?;
        let is_current = |transcript: &CachedTranscript| {
            Some(transcript.stat) == stat || stat.is_none() && transcript.len == 0
        };
        if !self.0.get(path).is_some_and(is_current) {
            let transcript =
                scan(directory, path).map_err(|cause| Error::io(format!("scan {path}"), cause))?;
            self.0.insert(path.clone(), transcript);
        }
        Ok(self.0.entry(path.clone()).or_insert_with(empty_transcript))
    }
}

/// Adds a batch, and its summary, to the append record.
fn update_record(record: &mut AppendRecord, batch: &Batch<'_>, mtime: i64, start: u64, len: usize) {
    if let Some(update) = batch.summary {
        record.summary = Some(Summary {
            version: record.summary_version() + 1,
            mtime,
            data: update.data.to_owned(),
        });
    }
    if let Some(id) = batch.id {
        record.add(RecordedBatch {
            id: id.to_owned(),
            path: batch.key.path().clone(),
            start,
            len: len as u64,
        });
    }
}

fn empty_transcript() -> CachedTranscript {
    CachedTranscript {
        stat: FileStat {
            dev: 0,
            ino: 0,
            size: 0,
            mtime_ns: 0,
            mode: 0,
        },
        len: 0,
        ids: HashSet::new(),
    }
}

fn scan(directory: &dyn Directory, path: &RelPath) -> std::io::Result<CachedTranscript> {
    let mut transcript = empty_transcript();
    let Some(file) = directory.open(path)? else {
        return Ok(transcript);
    };
    transcript.stat = file.stat()?;
    let mut line = Vec::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut offset = 0;
    loop {
        let read = file.read_at(&mut chunk, offset)?;
        if read == 0 {
            return Ok(transcript);
        }
        for part in chunk[..read].split_inclusive(|byte| *byte == b'\n') {
            offset += part.len() as u64;
            line.extend_from_slice(part);
            if line.ends_with(b"\n") {
                transcript.ids.extend(hash_entry_id(&line));
                transcript.len = offset;
                line.clear();
            }
        }
    }
}

/// A hash of the ID of an entry, if it has one.
fn hash_entry_id(entry: &[u8]) -> Option<u128> {
    #[derive(Deserialize)]
    struct SdkEntry<'a> {
        #[serde(borrow)]
        uuid: Option<std::borrow::Cow<'a, str>>,
    }
    let uuid = serde_json::from_slice::<SdkEntry<'_>>(entry).ok()?.uuid?;
    let digest = Digest::of(uuid.as_bytes()).to_string();
    u128::from_str_radix(digest.get(..32)?, 16).ok()
}

#[cfg(test)]
mod tests;
