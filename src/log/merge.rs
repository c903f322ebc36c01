//! Makes one piece of a run of entries: pure. What a file went through within the run does not matter any more, only from
//! where it differs from before and what it became.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::read::EntrySink;
use crate::codec::entry::{self, Encoded, Entry};
use crate::codec::snapshot;
use crate::error::{Error, Result};
use crate::model::checkpoint::MOST_CHECKPOINTS;
use crate::model::{
    Checkpoint, CoveredRange, Digest, EntryHeader, EntryKind, FileMove, Part, RelPath, Seq,
    WriterId, entry::FORMAT,
};

/// Entries in the making of one.
#[derive(Debug, Default)]
pub struct Merger {
    files: BTreeMap<RelPath, (Part, Vec<u8>)>,
    moves: Vec<FileMove>,
    checkpoints: Vec<Checkpoint>,
    writers: BTreeMap<WriterId, Seq>,
    first: Option<First>,
    last: Option<Last>,
    entries: u64,
    raw: u64,
    stored: u64,
    /// Nothing before the run counts: it began at the first entry, or anew.
    from_nothing: bool,
}

#[derive(Debug)]
struct First {
    follows: Seq,
    prev: Option<Digest>,
    began: Timestamp,
}

#[derive(Debug)]
struct Last {
    header: EntryHeader,
    digest: Digest,
}

impl Merger {
    /// Bytes gathered so far.
    pub fn size(&self) -> u64 {
        self.files
            .values()
            .map(|(_, bytes)| bytes.len() as u64)
            .sum()
    }

    fn apply_moves(&mut self, header: &EntryHeader) -> Result<()> {
        for (at, moved) in header.moves.iter().enumerate() {
            match self.files.remove(&moved.from) {
                Some(file) => {
                    self.files.insert(moved.to.clone(), file);
                }
                // Whether it was there before the run is not known here; a file that it would have replaced is.
                None if !self.from_nothing
                    && self.files.contains_key(&moved.to)
                    && !is_written_anew(header, at) =>
                {
                    return Err(Error::conflict(format!(
                        "merge: {} may or may not have become {}",
                        moved.from, moved.to
                    )));
                }
                None => {}
            }
            if !self.from_nothing {
                self.moves.push(moved.clone());
            }
        }
        Ok(())
    }

    fn apply_part(&mut self, part: &Part, seq: Seq, bytes: &[u8]) {
        let new = Part {
            seq: Some(part.seq.unwrap_or(seq)),
            ..part.clone()
        };
        let Some((old, kept)) = self.files.get_mut(&part.path) else {
            self.files.insert(part.path.clone(), (new, bytes.to_vec()));
            return;
        };
        let start = old.start.min(part.start);
        kept.truncate(usize::try_from(part.start.saturating_sub(old.start)).unwrap_or(usize::MAX));
        kept.extend_from_slice(bytes);
        *old = Part {
            start,
            len: kept.len() as u64,
            ..new
        };
    }

    /// The run as one piece, from number `from` on: a snapshot if nothing before it counts, else a merge. None if nothing
    /// was taken in, or if it ends with a removal: whether a session is removed must be told by the entry itself.
    pub fn finish(self, from: Seq) -> Result<Option<Encoded>> {
        let (Some(first), Some(last)) = (
            self.first,
            self.last.filter(|last| !last.header.kind.is_removal()),
        ) else {
            return Ok(None);
        };
        let (mut parts, mut bodies) = (Vec::new(), Vec::new());
        for (path, (part, bytes)) in self.files {
            parts.push(Part { path, ..part });
            bodies.push(bytes);
        }
        let kind = if self.from_nothing {
            EntryKind::Snapshot
        } else {
            EntryKind::Merge
        };
        let covers = CoveredRange {
            from: if self.from_nothing { 1 } else { from },
            digest: last.digest,
            began: first.began,
            entries: self.entries,
            raw: self.raw,
            stored: self.stored,
            writers: self.writers,
        };
        let header = EntryHeader {
            v: FORMAT,
            kind,
            agent: last.header.agent,
            session: last.header.session,
            seq: last.header.seq,
            writer: last.header.writer,
            at: last.header.at,
            prev: if self.from_nothing { None } else { first.prev },
            after: Some(if self.from_nothing { 0 } else { first.follows }),
            covers: Some(covers),
            moves: self.moves,
            parts,
            checkpoints: self.checkpoints,
            fork: None,
            back_to: None,
        };
        if self.from_nothing {
            snapshot::encode(header, &bodies)
        } else {
            entry::encode(header, &bodies)
        }
        .map(Some)
    }
}

/// Whether it does not matter which file the move numbered `at` leaves in its place: it is written anew there, and does not
/// move on before that.
fn is_written_anew(header: &EntryHeader, at: usize) -> bool {
    let to = &header.moves[at].to;
    let moves_on = header.moves[at + 1..].iter().any(|next| next.from == *to);
    !moves_on
        && header
            .parts
            .iter()
            .any(|part| part.path == *to && part.start == 0)
}

impl EntrySink for Merger {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        let header = &entry.header;
        if header.fork.is_some() {
            // It stands for entries of another log, which stay where they are.
            return Err(Error::conflict(
                "merge: what a fork begins with stays an entry of its own",
            ));
        }
        if header.begins_anew() || header.kind == EntryKind::Snapshot || header.follows() == 0 {
            *self = Merger {
                from_nothing: true,
                ..Merger::default()
            };
        }
        self.apply_moves(header)?;
        for (part, bytes) in entry.parts() {
            self.apply_part(part, header.seq, bytes);
        }
        self.checkpoints.extend(header.points());
        let surplus = self.checkpoints.len().saturating_sub(MOST_CHECKPOINTS);
        self.checkpoints.drain(..surplus);
        let covers = header.covers.as_ref();
        self.first.get_or_insert_with(|| First {
            follows: header.follows(),
            prev: header.prev,
            began: covers.map_or(header.at, |covers| covers.began),
        });
        self.entries += covers.map_or(1, |covers| covers.entries);
        self.raw += covers.map_or(header.body_len(), |covers| covers.raw);
        self.stored += covers.map_or(entry.stored, |covers| covers.stored);
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
