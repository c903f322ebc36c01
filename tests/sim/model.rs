//! The content of a log, read from the bucket's objects by the rules of docs/reference/format.md
//! alone: entries are followed backwards along their links, then their parts are applied from the
//! first on.

use std::collections::BTreeMap;
use std::sync::Arc;

use sessiond::codec::entry::{Entry, decode};
use sessiond::model::{EntryKind, LogId, Seq, UploadPart, WriterId, keys};

use super::bucket::{Objects, Stored};
use super::history::Files;

/// An entry and the volume whose process wrote it.
#[derive(Clone)]
pub struct Written {
    pub entry: Arc<Entry>,
    pub author: u64,
}

/// Entries that were decoded before, by key.
#[derive(Default)]
pub struct Reader(BTreeMap<String, (bytes::Bytes, Arc<Entry>)>);

impl Reader {
    fn entry(&mut self, key: &str, stored: &Stored) -> Result<Written, String> {
        if let Some((bytes, entry)) = self.0.get(key)
            && *bytes == stored.bytes
        {
            return Ok(Written {
                entry: entry.clone(),
                author: stored.author,
            });
        }
        let entry = Arc::new(
            decode(key, &stored.bytes).map_err(|error| format!("{key} cannot be read: {error}"))?,
        );
        self.0
            .insert(key.to_owned(), (stored.bytes.clone(), entry.clone()));
        Ok(Written {
            entry,
            author: stored.author,
        })
    }

    fn directory(
        &mut self,
        objects: &Objects,
        directory: &str,
    ) -> Result<BTreeMap<Seq, Written>, String> {
        let below = objects
            .range(directory.to_owned()..)
            .take_while(|(key, _)| key.starts_with(directory));
        let mut found = BTreeMap::new();
        for (key, stored) in below {
            let seq = keys::entry_seq(key).ok_or_else(|| format!("{key} is no entry"))?;
            found.insert(seq, self.entry(key, stored)?);
        }
        Ok(found)
    }

    /// Every entry of the log, by seq.
    pub fn main(
        &mut self,
        objects: &Objects,
        id: &LogId,
    ) -> Result<BTreeMap<Seq, Written>, String> {
        self.directory(objects, &keys::entries_dir(id))
    }

    /// Every branch, by writer.
    pub fn branches(
        &mut self,
        objects: &Objects,
        id: &LogId,
    ) -> Result<BTreeMap<WriterId, BTreeMap<Seq, Written>>, String> {
        let directory = keys::branches_dir(id);
        let keys: Vec<&String> = objects
            .range(directory.clone()..)
            .map(|(key, _)| key)
            .take_while(|key| key.starts_with(&directory))
            .collect();
        let mut writers: Vec<WriterId> = keys
            .iter()
            .filter_map(|key| key[directory.len()..].split('/').next()?.parse().ok())
            .collect();
        writers.dedup();
        let read = |writer: WriterId| {
            Ok((
                writer.clone(),
                self.directory(objects, &keys::branch_dir(id, &writer))?,
            ))
        };
        writers.into_iter().map(read).collect()
    }
}

/// The entries that make the log up to `last`, in order.
pub fn path_to(all: &BTreeMap<Seq, Written>, last: Seq) -> Result<Vec<Written>, String> {
    let mut path: Vec<Written> = Vec::new();
    let mut at = last;
    while at > 0 {
        let written = all
            .get(&at)
            .ok_or_else(|| format!("entry {at} is missing and no entry skips it"))?;
        if let Some(next) = path.last()
            && next.entry.header.prev_digest != Some(written.entry.digest)
        {
            return Err(format!(
                "entry {} does not have the digest of entry {at}",
                next.entry.header.seq
            ));
        }
        at = written.entry.header.predecessor();
        path.push(written.clone());
    }
    path.reverse();
    Ok(path)
}

/// Checks that there is one writer at a time: a claim starts a writer's entries, and a fenced
/// writer never writes again.
pub fn one_writer_at_a_time(path: &[Written]) -> Result<(), String> {
    let mut owner: Option<&WriterId> = None;
    let mut fenced: Vec<&WriterId> = Vec::new();
    for written in path {
        let header = &written.entry.header;
        match header.kind {
            EntryKind::Claim => {
                fenced.extend(owner.replace(&header.writer));
                if fenced.contains(&&header.writer) {
                    return Err(format!(
                        "entry {}: writer {} claims again after it was fenced",
                        header.seq, header.writer
                    ));
                }
            }
            EntryKind::Delta if owner != Some(&header.writer) => {
                return Err(format!(
                    "entry {}: writer {} writes while {owner:?} owns the session",
                    header.seq, header.writer
                ));
            }
            EntryKind::Delta | EntryKind::Tombstone | EntryKind::Purge => {}
            EntryKind::Merge | EntryKind::Snapshot => {
                return Err(format!(
                    "entry {} is a {}",
                    header.seq,
                    header.kind.as_str()
                ));
            }
        }
    }
    Ok(())
}

/// The files of a log, and the side files of which the last part has not been read yet.
#[derive(Default)]
pub struct Content {
    pub files: Files,
    /// The start of each upload, and its bytes from there on.
    uploads: BTreeMap<String, (u64, Vec<u8>)>,
    writer: Option<WriterId>,
}

impl Content {
    /// Removes everything.
    pub fn clear(&mut self) {
        *self = Content::default();
    }

    /// Applies one entry.
    pub fn apply(&mut self, entry: &Entry) -> Result<(), String> {
        let header = &entry.header;
        if header.resets_log() {
            self.clear();
        }
        // Another writer does not continue an upload.
        if self.writer.replace(header.writer.clone()) != Some(header.writer.clone()) {
            self.uploads.clear();
        }
        for moved in &header.moves {
            if let Some(bytes) = self.files.remove(moved.from.as_str()) {
                self.files.insert(moved.to.to_string(), bytes);
            }
        }
        for (part, bytes) in entry.parts() {
            let path = part.path.to_string();
            let begun = self.uploads.remove(&path);
            let begun = begun.filter(|(start, bytes)| start + bytes.len() as u64 == part.start);
            let (start, mut upload) = match part.upload.and(begun) {
                Some(begun) => begun,
                None => (part.start, Vec::new()),
            };
            upload.extend_from_slice(bytes);
            if part.upload == Some(UploadPart::More) {
                self.uploads.insert(path, (start, upload));
                continue;
            }
            let file = self.files.entry(path).or_default();
            if start > file.len() as u64 {
                return Err(format!(
                    "entry {}: {} has {} bytes and continues at {start}",
                    header.seq,
                    part.path,
                    file.len(),
                ));
            }
            file.truncate(start as usize);
            file.extend_from_slice(&upload);
        }
        Ok(())
    }
}
