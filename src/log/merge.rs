//! Merges a range of entries into one segment. Pure.
//!
//! Drops the intermediate states of a file within the range. Keeps the first offset at which the
//! file changed, and the final bytes from there on.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::sink::EntrySink;
use super::uploads::Uploads;
use crate::codec::entry::{self, EncodedEntry, Entry};
use crate::codec::{snapshot, version};
use crate::error::{Error, Result};
use crate::model::entry::MAX_ADOPTED;
use crate::model::limits::{MAX_HEADER_LEN, MAX_PARTS, MAX_TOTAL, MAX_WRITERS};
use crate::model::{
    AdoptedBranch, Checkpoint, CheckpointRetention, CoveredRange, Digest, EntryHeader, EntryKind,
    FileMove, Part, RelPath, Seq, UploadPart, WriterId,
};
use crate::sys::mutation::{Mutation, is_active};

/// Merges entries into one segment.
#[derive(Debug, Default)]
pub struct Merger {
    files: BTreeMap<RelPath, (Part, Vec<u8>)>,
    /// The uploads that are not complete at the end of the range.
    uploads: Uploads<(Part, Vec<u8>)>,
    moves: Vec<FileMove>,
    checkpoints: Vec<Checkpoint>,
    keep_checkpoints: Option<CheckpointRetention>,
    adopted: Vec<AdoptedBranch>,
    writers: BTreeMap<WriterId, Seq>,
    first: Option<First>,
    last: Option<Last>,
    written_at: Option<Timestamp>,
    entries: u64,
    raw_bytes: u64,
    stored_bytes: u64,
    /// The target of a rollback that a claim of the range recorded.
    pending_rollback: Option<Seq>,
    /// Whether the range starts with the first entry or with a reset, so that it has no
    /// predecessor.
    starts_log: bool,
}

#[derive(Debug)]
struct First {
    prev_seq: Seq,
    prev_digest: Option<Digest>,
    at: Timestamp,
}

#[derive(Debug)]
struct Last {
    header: EntryHeader,
    digest: Digest,
}

impl Merger {
    /// Whether the header still fits after `entry` is applied. A path is counted as long as it may
    /// become in JSON.
    pub fn has_room_for(&self, entry: &EntryHeader) -> bool {
        const PART_LEN: usize = 400;
        let uploads = || self.uploads.states().map(|(part, _)| &part.path);
        let parts = self.files.len() + uploads().count() + entry.parts.len();
        let moves = self.moves.len() + entry.moves.len();
        let writers = self.writers.len()
            + entry
                .covers
                .as_ref()
                .map_or(1, |covers| covers.writers.len());
        let own = self.files.keys().chain(uploads());
        let own = own.chain(moved_paths(&self.moves));
        let new = entry.parts.iter().map(|part| &part.path);
        let paths = own.chain(new).chain(moved_paths(&entry.moves));
        let len: usize = paths.map(|path| 2 * path.as_str().len()).sum();
        parts <= MAX_PARTS
            && moves <= MAX_PARTS
            && writers <= MAX_WRITERS
            // A quarter is left for the checkpoints.
            && (len + PART_LEN * parts + 100 * (moves + writers)) as u64 <= MAX_HEADER_LEN / 4 * 3
    }

    /// Number of bytes so far.
    pub fn size(&self) -> u64 {
        let parts = self.files.values().chain(self.uploads.states());
        parts.map(|(_, bytes)| bytes.len() as u64).sum()
    }

    fn apply_moves(&mut self, header: &EntryHeader) -> Result<()> {
        for (index, moved) in header.moves.iter().enumerate() {
            // A reader has the start of an upload under the old path.
            if let Some((part, _)) = self.files.get(&moved.from)
                && part.upload.is_some()
            {
                return Err(Error::conflict(format!(
                    "the range does not show the start of {}, which was moved",
                    moved.from
                )));
            }
            // If the moved file is not in the range, it may have existed before. A file of the
            // range at the new path may then have been replaced.
            if !moved.apply(&mut self.files)
                && !self.starts_log
                && self.files.contains_key(&moved.to)
                && !is_rewritten(header, index)
            {
                return Err(Error::conflict(format!(
                    "the range does not show whether {} existed when it was moved to {}",
                    moved.from, moved.to
                )));
            }
            if !self.starts_log {
                self.moves.push(moved.clone());
            }
        }
        Ok(())
    }

    fn apply_part(&mut self, part: &Part, header: &EntryHeader, bytes: &[u8]) -> Result<()> {
        let seq = part.seq.unwrap_or(header.seq);
        let new = Part {
            seq: Some(seq),
            ..part.clone()
        };
        let upload = self.uploads.take(&part.path, part.start);
        match part.upload {
            None => self.put(new, bytes),
            Some(place) => {
                let (start, mut merged) = upload.map_or_else(
                    || (part.start, Vec::new()),
                    |(earlier, merged)| (earlier.start, merged),
                );
                merged.extend_from_slice(bytes);
                let new = Part {
                    start,
                    len: merged.len() as u64,
                    ..new
                };
                match place {
                    UploadPart::More => {
                        let end = new.end();
                        self.uploads.insert(&part.path, header, end, (new, merged));
                        Ok(())
                    }
                    // The range has all bytes of the file.
                    UploadPart::Last if start == 0 => self.put(
                        Part {
                            upload: None,
                            ..new
                        },
                        &merged,
                    ),
                    UploadPart::Last => self.put(new, &merged),
                }
            }
        }
    }

    /// Replaces the bytes of a file from the start of the part.
    fn put(&mut self, new: Part, bytes: &[u8]) -> Result<()> {
        let Some((old, merged)) = self.files.get_mut(&new.path) else {
            self.files.insert(new.path.clone(), (new, bytes.to_vec()));
            return Ok(());
        };
        if old.upload.is_some() && 0 < new.start && new.start < old.start {
            return Err(Error::conflict(format!(
                "the range does not show the start of {}",
                new.path
            )));
        }
        let start = old.start.min(new.start);
        // A file whose upload starts before the range stays the last part of that upload.
        let upload = old.upload.filter(|_| new.start > 0);
        merged.truncate(usize::try_from(new.start.saturating_sub(old.start)).unwrap_or(usize::MAX));
        if !is_active(Mutation::DropMergedBytes) {
            merged.extend_from_slice(bytes);
        }
        *old = Part {
            start,
            len: merged.len() as u64,
            upload,
            ..new
        };
        Ok(())
    }

    /// The range as one segment that starts with `first_seq`: a snapshot if the range has no
    /// predecessor, otherwise a merge. None if nothing was applied; if the range ends with a removal,
    /// because readers find out from the last entry itself whether a session is removed; or if a
    /// snapshot would contain incomplete files.
    pub fn finish(self, first_seq: Seq) -> Result<Option<EncodedEntry>> {
        let (Some(first), Some(last)) = (
            self.first,
            self.last.filter(|last| !last.header.kind.is_removal()),
        ) else {
            return Ok(None);
        };
        if self.starts_log && !self.uploads.is_empty() {
            return Ok(None);
        }
        let (mut parts, mut bodies) = (Vec::new(), Vec::new());
        for (path, (part, bytes)) in self.files.into_iter().chain(self.uploads.into_states()) {
            parts.push(Part { path, ..part });
            bodies.push(bytes);
        }
        let kind = if self.starts_log {
            EntryKind::Snapshot
        } else {
            EntryKind::Merge
        };
        let covers = CoveredRange {
            first_seq: if self.starts_log { 1 } else { first_seq },
            digest: last.digest,
            first_at: first.at,
            written_at: self.written_at,
            entries: self.entries,
            raw_bytes: self.raw_bytes,
            stored_bytes: self.stored_bytes,
            writers: self.writers,
        };
        let header = EntryHeader {
            version: version::ENTRY,
            kind,
            namespace: last.header.namespace,
            agent: last.header.agent,
            session: last.header.session,
            seq: last.header.seq,
            writer: last.header.writer,
            at: last.header.at,
            prev_digest: if self.starts_log {
                None
            } else {
                first.prev_digest
            },
            prev_seq: Some(if self.starts_log { 0 } else { first.prev_seq }),
            covers: Some(covers),
            moves: self.moves,
            parts,
            checkpoints: self.checkpoints,
            keep_checkpoints: self.keep_checkpoints,
            fork: None,
            rollback_to: None,
            rollback_checkpoint: None,
            adopted: self.adopted,
        };
        if self.starts_log {
            snapshot::encode(header, &bodies)
        } else {
            entry::encode(header, &bodies)
        }
        .map(Some)
    }
}

fn moved_paths(moves: &[FileMove]) -> impl Iterator<Item = &RelPath> {
    moves.iter().flat_map(|moved| [&moved.from, &moved.to])
}

/// Whether the file at the target of move `index` is irrelevant: the entry rewrites the file there,
/// and no later move of the entry takes it away first.
fn is_rewritten(header: &EntryHeader, index: usize) -> bool {
    let to = &header.moves[index].to;
    let moves_again = header.moves[index + 1..]
        .iter()
        .any(|next| next.from == *to);
    !moves_again
        && header
            .parts
            .iter()
            .any(|part| part.path == *to && part.start == 0)
}

impl EntrySink for Merger {
    fn apply_entry(&mut self, entry: &Entry) -> Result<()> {
        let header = &entry.header;
        if header.fork.is_some() {
            // It refers to entries of another log, and a merge holds entries of one log only.
            return Err(Error::conflict(
                "the first entry of a fork cannot be merged",
            ));
        }
        if header.resets_log() || header.kind == EntryKind::Snapshot || header.predecessor() == 0 {
            *self = Merger {
                starts_log: true,
                ..Merger::default()
            };
        }
        self.apply_moves(header)?;
        self.uploads.start_entry(header);
        for (part, bytes) in entry.parts() {
            self.apply_part(part, header, bytes)?;
        }
        self.uploads.end_entry(header);
        if !header.checkpoints.is_empty() {
            for checkpoint in header.all_checkpoints() {
                CheckpointRetention::add(&mut self.checkpoints, checkpoint);
            }
            header.retention().apply(&mut self.checkpoints);
            self.keep_checkpoints = header.keep_checkpoints;
        }
        // A rollback takes an adoption back with the next entry.
        if header.kind == EntryKind::Claim {
            self.pending_rollback = header.rollback_to;
        } else if let Some(seq) = self.pending_rollback.take() {
            self.adopted
                .retain(|adopted| adopted.seq.is_some_and(|at| at <= seq));
        }
        self.adopted.extend(header.all_adopted());
        let surplus = self.adopted.len().saturating_sub(MAX_ADOPTED);
        self.adopted.drain(..surplus);
        let covers = header.covers.as_ref();
        self.first.get_or_insert_with(|| First {
            prev_seq: header.predecessor(),
            prev_digest: header.prev_digest,
            at: covers.map_or(header.at, |covers| covers.first_at),
        });
        self.written_at = self.written_at.max(header.written_at());
        let add = u64::saturating_add;
        self.entries = add(self.entries, covers.map_or(1, |covers| covers.entries));
        let raw_bytes = covers.map_or(header.body_len(), |covers| covers.raw_bytes);
        self.raw_bytes = add(self.raw_bytes, raw_bytes).min(MAX_TOTAL);
        let stored_bytes = covers.map_or(entry.stored_bytes, |covers| covers.stored_bytes);
        self.stored_bytes = add(self.stored_bytes, stored_bytes).min(MAX_TOTAL);
        match covers {
            Some(covers) => self.writers.extend(covers.writers.clone()),
            None => {
                self.writers.insert(header.writer.clone(), header.seq);
            }
        }
        self.last = Some(Last {
            header: EntryHeader {
                parts: Vec::new(),
                moves: Vec::new(),
                ..header.clone()
            },
            digest: entry.digest,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
