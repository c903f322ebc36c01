//! The content of a log, read from the bucket's objects by the rules of docs/reference/format.md
//! alone: entries are followed backwards along their links, then their parts are applied from the
//! first on.

use std::collections::BTreeMap;
use std::sync::Arc;

use sessiond::codec::entry::{Entry, decode};
use sessiond::model::{EntryKind, LogId, Seq, WriterId, keys};

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

/// Applies one entry to the files.
pub fn apply(files: &mut Files, entry: &Entry) -> Result<(), String> {
    if entry.header.resets_log() {
        files.clear();
    }
    for moved in &entry.header.moves {
        if let Some(bytes) = files.remove(moved.from.as_str()) {
            files.insert(moved.to.to_string(), bytes);
        }
    }
    for (part, bytes) in entry.parts() {
        let file = files.entry(part.path.to_string()).or_default();
        if part.start > file.len() as u64 {
            return Err(format!(
                "entry {}: {} has {} bytes and continues at {}",
                entry.header.seq,
                part.path,
                file.len(),
                part.start
            ));
        }
        file.truncate(part.start as usize);
        file.extend_from_slice(bytes);
    }
    Ok(())
}
