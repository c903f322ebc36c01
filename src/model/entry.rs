//! The header of an entry: the first line of every object of a log, and of the merges and snapshots
//! that replace many entries.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::limits::{self, check, check_count};
use crate::model::{
    AgentName, Checkpoint, CheckpointRetention, CheckpointStatus, Digest, FileKind, LogId, LogName,
    Namespace, RelPath, Seq, WriterId,
};

/// Maximum size of the checkpoints that a writer puts into one header.
const MAX_CHECKPOINT_BYTES: usize = 1 << 20;

/// The kind of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    /// A writer takes ownership of the log.
    Claim,
    /// Bytes appended since the previous entry.
    Delta,
    /// A range of entries in one object; it has no `seq` of its own.
    Merge,
    /// All files after an entry; it replaces every entry up to there.
    Snapshot,
    /// The session was removed or has expired. A later claim restores it.
    Tombstone,
    /// The final deletion of a removed session has begun. A later claim starts an empty session.
    Purge,
}

impl EntryKind {
    /// Whether it is a compacted segment: it replaces many entries.
    pub fn is_compacted(self) -> bool {
        matches!(self, EntryKind::Merge | EntryKind::Snapshot)
    }

    /// Whether it removes the session.
    pub fn is_removal(self) -> bool {
        matches!(self, EntryKind::Tombstone | EntryKind::Purge)
    }

    /// The name in headers and in the index.
    pub fn as_str(self) -> &'static str {
        match self {
            EntryKind::Claim => "claim",
            EntryKind::Delta => "delta",
            EntryKind::Merge => "merge",
            EntryKind::Snapshot => "snapshot",
            EntryKind::Tombstone => "tombstone",
            EntryKind::Purge => "purge",
        }
    }
}

/// The entries that a merge or a snapshot replaces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoveredRange {
    /// The first `seq`; the last is the header's.
    pub first_seq: Seq,
    /// Digest of the last entry: the `prev_digest` of the next entry.
    pub digest: Digest,
    /// Time of the first entry.
    pub first_at: Timestamp,
    /// Time of the newest entry that wrote content; none if the range holds only claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_at: Option<Timestamp>,
    /// Number of entries.
    pub entries: u64,
    /// Raw bytes of their parts.
    pub raw_bytes: u64,
    /// Their size as stored.
    pub stored_bytes: u64,
    /// The last `seq` of each writer.
    pub writers: BTreeMap<WriterId, Seq>,
}

/// The header of an entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EntryHeader {
    /// Version of the format (`codec::version::ENTRY`).
    pub version: u32,
    /// Kind of the entry.
    pub kind: EntryKind,
    /// The namespace of the log. With the agent and the session it binds the entry to its log.
    pub namespace: Namespace,
    /// The agent whose files these are.
    pub agent: AgentName,
    /// The session, or `@` and the project.
    pub session: LogName,
    /// The number of this entry.
    pub seq: Seq,
    /// The writer that created it.
    pub writer: WriterId,
    /// Time by the writer's clock; informational, never used for ordering.
    pub at: Timestamp,
    /// Digest of the previous entry; none for the first.
    pub prev_digest: Option<Digest>,
    /// The `seq` of the previous entry, where it is not `seq - 1`: a branch continues the log that
    /// it left, and a number that a dead writer reserved in the database is skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prev_seq: Option<Seq>,
    /// The entries that a merge or a snapshot replaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub covers: Option<CoveredRange>,
    /// Files that got another path, applied before the parts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moves: Vec<FileMove>,
    /// The bytes that each file gains, in the order of the body.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    /// Checkpoints that are reached with this entry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<Checkpoint>,
    /// Which checkpoints of the session are kept from this entry on, if it has checkpoints; none
    /// for the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_checkpoints: Option<CheckpointRetention>,
    /// In the first entry of a fork: the point of the other session that it starts from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork: Option<ForkOrigin>,
    /// In a claim: the entry that the writer rolled back to and continues from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback_to: Option<Seq>,
    /// In a claim: the number of the checkpoint within that entry, if the entry goes on after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback_checkpoint: Option<u64>,
    /// The branches whose content the main line has from this entry on. In a merge or a snapshot:
    /// those of the range.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adopted: Vec<AdoptedBranch>,
}

/// A branch that was made the main line of its session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedBranch {
    /// The writer of the branch.
    pub writer: WriterId,
    /// The last entry of the branch at that time.
    pub branch_seq: Seq,
    /// In a merge or a snapshot: the entry of the log that completed the adoption.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<Seq>,
}

/// Maximum number of adopted branches that are kept per session; the newest stay.
pub const MAX_ADOPTED: usize = 100;

impl EntryHeader {
    /// The log that it belongs to.
    pub fn log_id(&self) -> LogId {
        LogId {
            namespace: self.namespace.clone(),
            agent: self.agent.clone(),
            name: self.session.clone(),
        }
    }

    /// The `seq` of the previous entry.
    pub fn predecessor(&self) -> Seq {
        self.prev_seq.unwrap_or(self.seq.saturating_sub(1))
    }

    /// Whether the log starts over with this entry: it is a purge, or the first claim after one.
    pub fn resets_log(&self) -> bool {
        self.kind == EntryKind::Purge || self.kind == EntryKind::Claim && self.prev_seq == Some(0)
    }

    /// The time at which it wrote content, or the newest of the entries that it replaces did; none
    /// for a claim or a removal.
    pub fn written_at(&self) -> Option<Timestamp> {
        match (&self.covers, self.kind) {
            // A segment without the field holds content if it has parts.
            (Some(covers), _) => covers
                .written_at
                .or((!self.parts.is_empty()).then_some(self.at)),
            (None, EntryKind::Delta) => Some(self.at),
            (None, _) => None,
        }
    }

    /// Its checkpoints, that of the fork's origin included, each with its `seq`.
    pub fn all_checkpoints(&self) -> impl Iterator<Item = Checkpoint> {
        let origin = self.fork.as_ref().and_then(ForkOrigin::checkpoint);
        origin
            .into_iter()
            .chain(self.checkpoints.iter().cloned())
            .map(|checkpoint| Checkpoint {
                seq: Some(checkpoint.seq.unwrap_or(self.seq)),
                ..checkpoint
            })
    }

    /// Checks every number and count against the limits of the format.
    pub fn check_limits(&self) -> Result<()> {
        check("seq", self.seq, limits::MAX_SEQ)?;
        for earlier in [self.prev_seq, self.rollback_to].into_iter().flatten() {
            check("seq of an earlier entry", earlier, self.seq)?;
        }
        if self.seq == 0 || self.predecessor() >= self.seq {
            return Err(Error::corrupt("its sequence numbers are inconsistent"));
        }
        check_count("parts", self.parts.len(), limits::MAX_PARTS)?;
        check_count("moves", self.moves.len(), limits::MAX_PARTS)?;
        check_count(
            "checkpoints",
            self.checkpoints.len(),
            limits::MAX_HEADER_CHECKPOINTS,
        )?;
        check("number of bytes", self.body_len(), limits::MAX_RAW_BYTES)?;
        self.retention().check_limits()?;
        let rollback = self.rollback_checkpoint.unwrap_or(0);
        check("number of a checkpoint", rollback, limits::MAX_TURN)?;
        for part in &self.parts {
            part.check_limits()?;
            check("seq of a part", part.seq.unwrap_or(0), self.seq)?;
        }
        for checkpoint in &self.checkpoints {
            checkpoint.check_limits()?;
            check("seq of a checkpoint", checkpoint.seq.unwrap_or(0), self.seq)?;
        }
        check_count("adopted branches", self.adopted.len(), MAX_ADOPTED)?;
        for adopted in &self.adopted {
            check("seq of a branch", adopted.branch_seq, limits::MAX_SEQ)?;
            check("seq of an adoption", adopted.seq.unwrap_or(0), self.seq)?;
        }
        if let Some(covers) = &self.covers {
            covers.check_limits(self.seq)?;
        }
        self.fork.as_ref().map_or(Ok(()), |fork| {
            // The first entry of a fork is the first of its log.
            if self.kind != EntryKind::Claim || self.predecessor() > 0 {
                return Err(Error::corrupt(
                    "only the first entry of a log has an origin",
                ));
            }
            fork.check_limits()
        })
    }

    /// Which checkpoints of the session are kept.
    pub fn retention(&self) -> CheckpointRetention {
        self.keep_checkpoints.unwrap_or_default()
    }

    /// Drops the checkpoints that no reader keeps, and those that do not fit into a header: the
    /// oldest steps, and then the oldest turns.
    pub fn drop_surplus_checkpoints(&mut self) {
        self.retention().apply(&mut self.checkpoints);
        let lens: Vec<usize> = self
            .checkpoints
            .iter()
            .map(Checkpoint::estimated_len)
            .collect();
        let mut surplus = lens
            .iter()
            .sum::<usize>()
            .saturating_sub(MAX_CHECKPOINT_BYTES);
        for is_step in [true, false] {
            let mut left = self.checkpoints.len();
            self.checkpoints.retain(|checkpoint| {
                left -= 1;
                let drops = surplus > 0 && left > 0 && checkpoint.step.is_some() == is_step;
                if drops {
                    surplus = surplus.saturating_sub(checkpoint.estimated_len());
                }
                !drops
            });
        }
    }

    /// Its adopted branches, each with its `seq`.
    pub fn all_adopted(&self) -> impl Iterator<Item = AdoptedBranch> {
        self.adopted.iter().map(|adopted| AdoptedBranch {
            seq: Some(adopted.seq.unwrap_or(self.seq)),
            ..adopted.clone()
        })
    }

    /// Length of the body: the bytes of all parts.
    pub fn body_len(&self) -> u64 {
        self.parts
            .iter()
            .map(|part| part.len)
            .fold(0, u64::saturating_add)
    }
}

/// The point of another session that a fork starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkOrigin {
    /// The other session.
    pub session: LogName,
    /// The writer whose branch of it the fork starts from; none for the main line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<WriterId>,
    /// The last entry of it that the fork includes.
    pub seq: Seq,
    /// Length of its transcripts at the point, where the point is before the end of that entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transcript_lengths: Option<BTreeMap<RelPath, u64>>,
    /// Number of its complete turns.
    pub turn: u64,
    /// Number of completed steps of its open turn, if its last checkpoint is a step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Its last checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<u64>,
    /// Time of that checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpointed_at: Option<Timestamp>,
    /// Length of the fork's transcripts at that checkpoint, where that is before their end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_lengths: Option<BTreeMap<RelPath, u64>>,
    /// The files that the fork starts with, under their new names and with the new ID in their
    /// lines.
    pub files: Vec<Part>,
}

impl CoveredRange {
    fn check_limits(&self, last: Seq) -> Result<()> {
        check("first seq", self.first_seq, last)?;
        check("number of entries", self.entries, last)?;
        check("number of raw bytes", self.raw_bytes, limits::MAX_TOTAL)?;
        check(
            "number of stored bytes",
            self.stored_bytes,
            limits::MAX_TOTAL,
        )?;
        check_count("writers", self.writers.len(), limits::MAX_WRITERS)?;
        self.writers
            .values()
            .try_for_each(|seq| check("seq of a writer", *seq, last))
    }
}

impl ForkOrigin {
    fn check_limits(&self) -> Result<()> {
        check("seq of the origin", self.seq, limits::MAX_SEQ)?;
        let optional = [self.step, self.checkpoint].map(Option::unwrap_or_default);
        for number in [self.turn].into_iter().chain(optional) {
            check("turn", number, limits::MAX_TURN)?;
        }
        check_count("files", self.files.len(), limits::MAX_FORK_FILES)?;
        self.files.iter().try_for_each(Part::check_limits)?;
        let lengths = [&self.transcript_lengths, &self.checkpoint_lengths];
        lengths
            .into_iter()
            .flatten()
            .flat_map(BTreeMap::values)
            .try_for_each(|len| check("length", *len, limits::MAX_FILE_LEN))
    }

    /// The first checkpoint of the fork: the last one of the other session.
    fn checkpoint(&self) -> Option<Checkpoint> {
        let transcripts = self
            .files
            .iter()
            .filter(|part| part.kind == FileKind::Append);
        let transcript_lengths = match (&self.checkpoint_lengths, &self.transcript_lengths) {
            (Some(lengths), _) => lengths.clone(),
            (None, Some(_)) => transcripts
                .map(|part| (part.path.clone(), part.len))
                .collect(),
            (None, None) => return None,
        };
        Some(Checkpoint {
            number: 1,
            seq: None,
            turn: self.turn.saturating_add(u64::from(self.step.is_some())),
            step: self.step,
            status: match self.step {
                Some(_) => CheckpointStatus::Running,
                None => CheckpointStatus::Completed,
            },
            parent: self.checkpoint,
            parent_session: self.checkpoint.map(|_| self.session.clone()),
            at: self.checkpointed_at?,
            message_id: None,
            stop_reason: None,
            transcript_lengths,
            pending_calls: Vec::new(),
        })
    }
}

/// A file that got another path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMove {
    /// The old path.
    pub from: RelPath,
    /// The new path.
    pub to: RelPath,
}

impl FileMove {
    /// Applies moves, in order, to values that are kept by path. A file that is not there is
    /// ignored; one at the new path is replaced.
    pub fn apply_all<T>(moves: &[FileMove], files: &mut BTreeMap<RelPath, T>) {
        for step in moves {
            step.apply(files);
        }
    }

    /// Applies one move. Returns false if the file is not there.
    pub fn apply<T>(&self, files: &mut BTreeMap<RelPath, T>) -> bool {
        let Some(file) = files.remove(&self.from) else {
            return false;
        };
        files.insert(self.to.clone(), file);
        true
    }
}

/// The bytes that one entry adds to one file: truncate the file at `start`, then append `len`
/// bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The file.
    pub path: RelPath,
    /// How the agent writes it.
    #[serde(default, skip_serializing_if = "FileKind::is_append")]
    pub kind: FileKind,
    /// Offset of the bytes; at most the file's current length.
    pub start: u64,
    /// Number of bytes.
    pub len: u64,
    /// SHA-256 of the file from 0 to `start + len`.
    pub file_sha256: Digest,
    /// Permission bits.
    pub mode: u32,
    /// Modification time, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// In a merge or a snapshot: the entry that changed the file last, where it is not the
    /// header's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<Seq>,
    /// The place in an upload of several parts; none if the part is complete by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<UploadPart>,
}

/// The place of a part in the upload of a side file that does not fit into one entry. All parts of an
/// upload have the same writer. The file changes with the last part, so that no reader sees an
/// incomplete file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UploadPart {
    /// More parts follow.
    More,
    /// The last part.
    Last,
}

impl Part {
    fn check_limits(&self) -> Result<()> {
        check("length", self.end(), limits::MAX_FILE_LEN)
    }

    /// The file's length after this part.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> RelPath {
        text.parse().unwrap()
    }

    #[test]
    fn moves_apply_in_order_and_ignore_missing_files() {
        let mut files = BTreeMap::from([(path("a"), 1), (path("b"), 2)]);
        let moves = [("a", "c"), ("b", "a"), ("x", "y"), ("c", "a")].map(|(from, to)| FileMove {
            from: path(from),
            to: path(to),
        });
        FileMove::apply_all(&moves, &mut files);
        assert_eq!(files, BTreeMap::from([(path("a"), 1)]));
    }
}
