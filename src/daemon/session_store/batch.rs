//! One append, against what is there: which entries are new, and where they go. Owns the record that makes a repeated append
//! harmless; does not own when anything becomes durable.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::key::Key;
use crate::error::{Error, ErrorContext, Result};
use crate::model::{Digest, FileStat, RelPath};
use crate::sys::{Directory, Meta, OpenFile};

/// So many appends are remembered: an SDK repeats one at once, or never.
const REMEMBERED: usize = 4;

/// How much of a file is read at a time.
const CHUNK: usize = 256 << 10;

/// What we keep of a session beside its transcripts, in the same log.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Record {
    /// The last appends, oldest first.
    #[serde(default)]
    batches: Vec<Batch>,
    /// What the SDK made of the entries so far.
    #[serde(default)]
    pub summary: Option<Summary>,
}

/// An append: written down before its entries are, so that the same one is known again whatever happened in between.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Batch {
    id: String,
    path: RelPath,
    start: u64,
    len: u64,
}

/// What the SDK made of a session's entries. Its own business: kept as it was sent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Summary {
    /// Counts up with each change.
    pub version: u64,
    /// The transcript's time when it was made, in milliseconds since 1970.
    pub mtime: i64,
    /// The SDK's own.
    pub data: Box<RawValue>,
}

impl Record {
    /// Reads it; one that is missing or damaged knows nothing.
    pub fn load(directory: &dyn Directory, path: &RelPath) -> Result<Record> {
        let bytes = directory
            .read(path)
            .map_err(|cause| Error::io(format!("read {path}"), cause))?;
        Ok(bytes
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default())
    }

    fn save(&self, directory: &dyn Directory, path: &RelPath, meta: &Meta) -> Result<()> {
        let bytes = serde_json::to_vec(self).map_err(|cause| {
            Error::new(crate::error::ErrorKind::Internal, "write a record").caused_by(cause)
        })?;
        // A name that the profile passes over until it is whole.
        let passing: RelPath = format!("{path}.tmp").parse()?;
        let write = || -> std::io::Result<()> {
            directory.write_at(&passing, 0, &bytes)?;
            directory.finish(&passing, meta)?;
            directory.rename(&passing, path, meta.owner)
        };
        write().map_err(|cause| Error::io(format!("write {path}"), cause))
    }

    fn remember(&mut self, batch: Batch) {
        self.batches.retain(|known| known.id != batch.id);
        self.batches.push(batch);
        let surplus = self.batches.len().saturating_sub(REMEMBERED);
        self.batches.drain(..surplus);
    }
}

/// What is asked.
pub struct Append<'a> {
    /// Where to.
    pub key: &'a Key,
    /// The caller's name for this append, the same when it is repeated.
    pub batch: Option<&'a str>,
    /// The entries, each one JSON object.
    pub entries: &'a [&'a RawValue],
    /// What the SDK makes of them, and the version that it began from.
    pub summary: Option<(u64, &'a RawValue)>,
    /// The time now, in milliseconds since 1970.
    pub now: i64,
}

/// What became of an append; durable it is not yet.
#[derive(Debug, PartialEq, Eq)]
pub enum Written {
    /// All of it is there.
    All {
        /// Entries that are new.
        new: usize,
        /// The files to flush.
        files: Vec<RelPath>,
        /// The version of the summary now.
        summary: u64,
    },
    /// Nothing was written: the summary was made from another one than this.
    Outdated,
}

/// What is known of one file, so that it need not be read again.
struct Known {
    stat: FileStat,
    /// Up to the end of the last whole line.
    len: u64,
    ids: HashSet<u128>,
}

/// What is known of the files of a session.
#[derive(Default)]
pub struct Ids(HashMap<RelPath, Known>);

impl Ids {
    /// Writes what is new of an append. What a crash left of an unfinished line is cut off: nobody was told that it is there.
    pub fn append(&mut self, directory: &dyn Directory, append: &Append<'_>) -> Result<Written> {
        let Append { key, entries, .. } = append;
        let path = key.file();
        let mut known = self
            .known(directory, path)
            .with_context(|| format!("read {path}"))?;
        let record_path = key.record()?;
        let mut record = Record::load(directory, &record_path)?;
        let version = record.summary.as_ref().map_or(0, |summary| summary.version);
        let before = append.batch.and_then(|id| {
            record
                .batches
                .iter()
                .find(|batch| batch.id == id && batch.path == *path)
        });
        let here = |batch: &Batch| known.len >= batch.start + batch.len;
        if before.is_some_and(here) {
            return Ok(Written::All {
                new: 0,
                files: vec![path.clone(), record_path],
                summary: version,
            });
        }
        let last = record.batches.iter().rfind(|batch| batch.path == *path);
        if let Some(torn) = before.filter(|before| {
            last.is_some_and(|last| last.id == before.id) && before.start < known.len
        }) {
            // A crash cut it short: it is written anew, so that no entry without an id stands there twice.
            directory
                .write_at(path, torn.start, b"")
                .map_err(|cause| Error::io(format!("cut {path}"), cause))?;
            known = self.known(directory, path)?;
        }
        if before.is_none() && append.summary.is_some_and(|(from, _)| from != version) {
            return Ok(Written::Outdated);
        }
        let start = known.len;
        let mut bytes = Vec::new();
        let mut fresh = HashSet::new();
        let mut new = 0;
        for entry in *entries {
            let id = id_of(entry.get().as_bytes());
            if id.is_some_and(|id| known.ids.contains(&id) || fresh.contains(&id)) {
                continue;
            }
            fresh.extend(id);
            new += 1;
            // Between tokens a line break is white space, and within a string JSON has none.
            bytes.extend(
                entry
                    .get()
                    .bytes()
                    .filter(|byte| !matches!(byte, b'\n' | b'\r')),
            );
            bytes.push(b'\n');
        }
        let mtime = append.now.max(known.stat.mtime_ns / 1_000_000 + 1);
        let meta = Meta {
            mode: 0o600,
            mtime_ns: mtime.saturating_mul(1_000_000),
            owner: None,
        };
        let mut summary = version;
        if before.is_none() {
            if let Some((_, data)) = append.summary.filter(|_| new > 0) {
                summary += 1;
                record.summary = Some(Summary {
                    version: summary,
                    mtime,
                    data: data.to_owned(),
                });
            }
            if let Some(id) = append.batch.filter(|_| new > 0) {
                record.remember(Batch {
                    id: id.to_owned(),
                    path: path.clone(),
                    start,
                    len: bytes.len() as u64,
                });
            }
            if new > 0 && (append.batch.is_some() || append.summary.is_some()) {
                record.save(directory, &record_path, &meta)?;
            }
        }
        if new > 0 {
            let write = || {
                directory
                    .write_at(path, start, &bytes)
                    .and_then(|()| directory.finish(path, &meta))
                    .and_then(|()| directory.stat(path))
            };
            let stat = write().map_err(|cause| Error::io(format!("write {path}"), cause));
            match stat {
                Ok(Some(stat)) => {
                    known.stat = stat;
                    known.len = start + bytes.len() as u64;
                    known.ids.extend(fresh);
                }
                failed => {
                    self.0.remove(path);
                    failed?;
                }
            }
        }
        Ok(Written::All {
            new,
            files: vec![path.clone(), record_path],
            summary,
        })
    }

    fn known(&mut self, directory: &dyn Directory, path: &RelPath) -> Result<&mut Known> {
        let stat = directory
            .stat(path)
            .map_err(|cause| Error::io("look at it", cause))?;
        let same = |known: &Known| Some(known.stat) == stat || stat.is_none() && known.len == 0;
        if !self.0.get(path).is_some_and(same) {
            let known = scan(directory, path).map_err(|cause| Error::io("read it", cause))?;
            self.0.insert(path.clone(), known);
        }
        Ok(self.0.entry(path.clone()).or_insert_with(nothing))
    }
}

fn nothing() -> Known {
    Known {
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

fn scan(directory: &dyn Directory, path: &RelPath) -> std::io::Result<Known> {
    let mut known = nothing();
    let Some(file) = directory.open(path)? else {
        return Ok(known);
    };
    known.stat = file.stat()?;
    let mut line = Vec::new();
    let mut chunk = vec![0; CHUNK];
    let mut at = 0;
    loop {
        let got = file.read_at(&mut chunk, at)?;
        if got == 0 {
            return Ok(known);
        }
        for part in chunk[..got].split_inclusive(|byte| *byte == b'\n') {
            at += part.len() as u64;
            line.extend_from_slice(part);
            if line.ends_with(b"\n") {
                known.ids.extend(id_of(&line));
                known.len = at;
                line.clear();
            }
        }
    }
}

/// The length of a file up to the end of its last whole line.
pub fn whole(file: &dyn OpenFile) -> std::io::Result<u64> {
    let mut end = file.stat()?.size;
    let mut chunk = vec![0; CHUNK];
    while end > 0 {
        let start = end.saturating_sub(CHUNK as u64);
        let got = file.read_at(&mut chunk[..(end - start) as usize], start)?;
        if let Some(last) = chunk[..got].iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + last as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

/// Stands for the id of an entry, if it has one.
fn id_of(entry: &[u8]) -> Option<u128> {
    #[derive(Deserialize)]
    struct Entry<'a> {
        #[serde(borrow)]
        uuid: Option<std::borrow::Cow<'a, str>>,
    }
    let uuid = serde_json::from_slice::<Entry<'_>>(entry).ok()?.uuid?;
    let digest = Digest::of(uuid.as_bytes()).to_string();
    u128::from_str_radix(digest.get(..32)?, 16).ok()
}

#[cfg(test)]
mod tests;
