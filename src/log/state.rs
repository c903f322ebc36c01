//! What a log amounts to at a point: each file's length, digest and kind. Pure; fed entry by entry.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::model::checkpoint::MOST_CHECKPOINTS;
use crate::model::{
    Checkpoint, Digest, EntryHeader, EntryKind, FileState, Part, RelPath, Seq, TurnTracker,
};

/// The files of a log at a point.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogState {
    /// The last entry taken in.
    pub seq: Seq,
    /// Its digest.
    pub digest: Option<Digest>,
    /// The files.
    pub files: BTreeMap<RelPath, FileState>,
    /// The points to go back to, in the order they were reached.
    pub checkpoints: Vec<Checkpoint>,
    /// How far the turns have come.
    pub turns: TurnTracker,
    /// Bytes shipped, before compression.
    pub raw: u64,
    /// How the log ends, if it ends with a tombstone or a purge.
    pub removed: Option<EntryKind>,
    /// Somebody went back to this entry and has not written since: until then the end of the log is what it was.
    going_back: Option<Seq>,
}

impl LogState {
    /// Takes one more entry in.
    pub fn apply(&mut self, header: &EntryHeader, digest: Digest) -> Result<()> {
        if header.begins_anew() || header.kind == EntryKind::Snapshot {
            self.files.clear();
            self.checkpoints.clear();
            self.turns = TurnTracker::default();
            self.raw = 0;
        }
        if let Some(fork) = &header.fork {
            self.turns = TurnTracker::after(fork.turn, fork.last);
            for part in &fork.files {
                self.put(part, header.seq);
            }
        }
        if header.kind == EntryKind::Claim {
            self.going_back = header.back_to;
        } else if let Some(seq) = self.going_back.take() {
            self.turns.go_back(
                self.checkpoints
                    .iter()
                    .rfind(|point| point.seq.is_some_and(|at| at <= seq)),
            );
        }
        for point in header.points() {
            self.turns.follow(&point);
            self.checkpoints
                .retain(|earlier| earlier.number != point.number);
            self.checkpoints.push(point);
            let surplus = self.checkpoints.len().saturating_sub(MOST_CHECKPOINTS);
            self.checkpoints.drain(..surplus);
        }
        self.removed = header.kind.is_removal().then_some(header.kind);
        for moved in &header.moves {
            if let Some(file) = self.files.remove(&moved.from) {
                self.files.insert(moved.to.clone(), file);
            }
        }
        for part in &header.parts {
            let length = self.files.get(&part.path).map_or(0, |file| file.len);
            if part.start > length {
                return Err(Error::corrupt(format!(
                    "entry {}: {} goes on at {} and has {length} bytes",
                    header.seq, part.path, part.start
                )));
            }
            self.put(part, header.seq);
        }
        self.raw = self.raw.saturating_add(
            header
                .covers
                .as_ref()
                .map_or_else(|| header.body_len(), |covers| covers.raw),
        );
        self.seq = header.seq;
        self.digest = Some(digest);
        Ok(())
    }

    fn put(&mut self, part: &Part, seq: Seq) {
        let file = FileState {
            kind: part.kind,
            len: part.end(),
            sha256: part.file_sha256,
            mode: part.mode,
            mtime_ns: part.mtime_ns,
            seq: part.seq.unwrap_or(seq),
        };
        self.files.insert(part.path.clone(), file);
    }
}
