//! The state of a log at a point: its files, checkpoints and turns. Pure; built entry by entry.

use std::collections::BTreeMap;

use super::uploads::Uploads;
use crate::error::{Error, Result};
use crate::model::entry::MAX_ADOPTED;
use crate::model::{
    AdoptedBranch, Checkpoint, CheckpointRetention, Digest, EntryHeader, EntryKind, FileMove,
    FileState, Part, RelPath, Seq, TurnTracker, UploadPart,
};
use crate::sys::mutation::{Mutation, is_active};

/// The state of a log at a point.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogState {
    /// The last entry that was applied.
    pub seq: Seq,
    /// Its digest.
    pub digest: Option<Digest>,
    /// The files.
    pub files: BTreeMap<RelPath, FileState>,
    /// The checkpoints, in the order they were reached.
    pub checkpoints: Vec<Checkpoint>,
    /// The branches that were adopted, without those that a rollback took back.
    pub adopted: Vec<AdoptedBranch>,
    /// The turns so far.
    pub turns: TurnTracker,
    /// Bytes appended, before compression.
    pub raw_bytes: u64,
    /// The kind of the last entry, if it is a tombstone or a purge.
    pub removed: Option<EntryKind>,
    /// The target of a rollback that a claim recorded, and the checkpoint within it. It takes effect
    /// with the next entry.
    pending_rollback: Option<(Seq, Option<u64>)>,
    /// The side files of which the last part has not been read yet.
    uploads: Uploads<()>,
}

impl LogState {
    /// Applies the next entry.
    pub fn apply(&mut self, header: &EntryHeader, digest: Digest) -> Result<()> {
        if header.resets_log() || header.kind == EntryKind::Snapshot {
            self.files.clear();
            self.uploads.clear();
            self.checkpoints.clear();
            self.adopted.clear();
            self.turns = TurnTracker::default();
            self.raw_bytes = 0;
        }
        if let Some(fork) = &header.fork {
            self.turns = TurnTracker::starting_after(fork.turn, fork.checkpointed_at);
            for part in &fork.files {
                self.put(part, header.seq);
            }
        }
        if header.kind == EntryKind::Claim {
            let rollback = |seq| (seq, header.rollback_checkpoint);
            self.pending_rollback = header.rollback_to.map(rollback);
        } else if let Some((seq, number)) = self.pending_rollback.take() {
            let by_number = self
                .checkpoints
                .iter()
                .find(|checkpoint| Some(checkpoint.number) == number);
            let by_seq = || {
                let mut checkpoints = self.checkpoints.iter();
                checkpoints.rfind(|checkpoint| checkpoint.seq.is_some_and(|at| at <= seq))
            };
            self.turns.roll_back(by_number.or_else(by_seq));
            self.adopted
                .retain(|adopted| adopted.seq.is_some_and(|at| at <= seq));
        }
        for point in header.all_checkpoints() {
            self.turns.continue_from(&point);
            CheckpointRetention::add(&mut self.checkpoints, point);
        }
        if !header.checkpoints.is_empty() {
            header.retention().apply(&mut self.checkpoints);
        }
        self.adopted.extend(header.all_adopted());
        let surplus = self.adopted.len().saturating_sub(MAX_ADOPTED);
        self.adopted.drain(..surplus);
        self.removed = header.kind.is_removal().then_some(header.kind);
        FileMove::apply_all(&header.moves, &mut self.files);
        self.uploads.start_entry(header);
        for part in &header.parts {
            self.apply_part(part, header)?;
        }
        self.uploads.end_entry(header);
        self.raw_bytes = self.raw_bytes.saturating_add(
            header
                .covers
                .as_ref()
                .map_or_else(|| header.body_len(), |covers| covers.raw_bytes),
        );
        self.seq = header.seq;
        self.digest = Some(digest);
        Ok(())
    }

    /// Applies a part. A file that is uploaded in several parts changes with the last of them.
    fn apply_part(&mut self, part: &Part, header: &EntryHeader) -> Result<()> {
        let continues_upload = self.uploads.take(&part.path, part.start).is_some();
        let length = self.files.get(&part.path).map_or(0, |file| file.len);
        if part.start > length && !(continues_upload && part.upload.is_some()) {
            return Err(Error::corrupt(format!(
                "entry {} appends to {} at offset {}, but the file has {length} bytes",
                header.seq, part.path, part.start
            )));
        }
        if part.upload == Some(UploadPart::More) && !is_active(Mutation::ShowIncompleteUpload) {
            self.uploads.insert(&part.path, header, part.end(), ());
        } else {
            self.put(part, header.seq);
        }
        Ok(())
    }

    /// The checkpoints of the current conversation, oldest first, without rewound ones.
    pub fn active_checkpoints(&self) -> Vec<&Checkpoint> {
        self.checkpoints_up_to(self.turns.parent)
    }

    /// The checkpoint `last` and those that led to it, oldest first.
    pub fn checkpoints_up_to(&self, last: Option<u64>) -> Vec<&Checkpoint> {
        let by_number: BTreeMap<u64, &Checkpoint> = self
            .checkpoints
            .iter()
            .map(|checkpoint| (checkpoint.number, checkpoint))
            .collect();
        let mut active = Vec::new();
        let mut next = last;
        // A number that is missing was a step whose parent was the number before it.
        while let Some((_, checkpoint)) =
            next.and_then(|number| by_number.range(..=number).next_back())
        {
            active.push(*checkpoint);
            next = checkpoint
                .parent
                .filter(|parent| *parent < checkpoint.number);
        }
        active.reverse();
        active
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
