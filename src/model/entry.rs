//! What an entry of a log says about itself: the header that is the first line of every one, and of what stands for many.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::{AgentName, Checkpoint, Digest, FileKind, LogName, RelPath, Seq, WriterId};

/// The version of the format that this build writes and reads.
pub const FORMAT: u32 = 1;

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    /// A writer takes the session over.
    Claim,
    /// What was appended since the entry before.
    Delta,
    /// A run of entries as one; it has no number of its own.
    Merge,
    /// All files after an entry; it stands for everything up to there.
    Snapshot,
    /// The session was removed or has expired. A claim behind it brings it back.
    Tombstone,
    /// What was removed is being deleted for good. A claim behind it begins with nothing.
    Purge,
}

impl EntryKind {
    /// Whether it stands for many entries.
    pub fn is_composite(self) -> bool {
        matches!(self, EntryKind::Merge | EntryKind::Snapshot)
    }

    /// Whether the session is removed with it.
    pub fn is_removal(self) -> bool {
        matches!(self, EntryKind::Tombstone | EntryKind::Purge)
    }

    /// The word for it, in headers and in the index.
    pub fn word(self) -> &'static str {
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

/// What a merge or a snapshot stands for, besides its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoveredRange {
    /// The first number; the last is the header's.
    pub from: Seq,
    /// SHA-256 of the last entry as stored: what the next one names as the one before.
    pub digest: Digest,
    /// When the first entry was written.
    pub began: Timestamp,
    /// How many entries there were.
    pub entries: u64,
    /// Their bytes behind the headers.
    pub raw: u64,
    /// Their size as stored.
    pub stored: u64,
    /// The last entry of each writer.
    pub writers: BTreeMap<WriterId, Seq>,
}

/// The header of an entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EntryHeader {
    /// Version of the format.
    pub v: u32,
    /// What it is.
    pub kind: EntryKind,
    /// Whose files these are.
    pub agent: AgentName,
    /// The session, or `@` and the project.
    pub session: LogName,
    /// The number of this entry.
    pub seq: Seq,
    /// Who wrote it.
    pub writer: WriterId,
    /// When, by the writer's clock; for people, never for order.
    pub at: Timestamp,
    /// SHA-256 of the entry before, as stored; none for the first.
    pub prev: Option<Digest>,
    /// The number of the entry before, where it is not `seq - 1` (a branch begins behind the log it left; a number
    /// reserved in the database by a writer that died is passed over).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Seq>,
    /// What it stands for, if it is a merge or a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub covers: Option<CoveredRange>,
    /// Files that got another path, applied before the parts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moves: Vec<FileMove>,
    /// What each file gained, in the order of their bytes behind the header.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    /// Points to go back to that are reached with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<Checkpoint>,
    /// In the first entry: the session it was forked from, which it begins with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork: Option<ForkOrigin>,
    /// In a claim: the entry that was gone back to, and from which the writer goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_to: Option<Seq>,
}

impl EntryHeader {
    /// The number of the entry before this one.
    pub fn follows(&self) -> Seq {
        self.after.unwrap_or(self.seq.saturating_sub(1))
    }

    /// Whether nothing that came before counts from here on: behind a purge, or where the log was purged.
    pub fn begins_anew(&self) -> bool {
        self.kind == EntryKind::Purge || self.kind == EntryKind::Claim && self.after == Some(0)
    }

    /// Its checkpoints, each with the entry it is in.
    pub fn points(&self) -> impl Iterator<Item = Checkpoint> {
        let begins = self.fork.as_ref().and_then(ForkOrigin::point);
        begins
            .into_iter()
            .chain(self.checkpoints.iter().cloned())
            .map(|point| Checkpoint {
                seq: Some(point.seq.unwrap_or(self.seq)),
                ..point
            })
    }

    /// Bytes behind the header.
    pub fn body_len(&self) -> u64 {
        self.parts
            .iter()
            .map(|part| part.len)
            .fold(0, u64::saturating_add)
    }
}

/// What a session begins with that was forked from another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkOrigin {
    /// The other session.
    pub from: LogName,
    /// Up to this entry of it.
    pub seq: Seq,
    /// How long its transcripts were at the point, where that is not all of the entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<BTreeMap<RelPath, u64>>,
    /// Its turns that were complete.
    pub turn: u64,
    /// When the last of them was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<Timestamp>,
    /// Where the last of them ends in the files, where that is before their end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends: Option<BTreeMap<RelPath, u64>>,
    /// The files that it begins with: under their new names, with the new id in their lines.
    pub files: Vec<Part>,
}

impl ForkOrigin {
    /// Its first checkpoint: the last turn that was complete.
    fn point(&self) -> Option<Checkpoint> {
        let transcripts = self
            .files
            .iter()
            .filter(|part| part.kind == FileKind::Append);
        let files = match (&self.ends, &self.cut) {
            (Some(ends), _) => ends.clone(),
            (None, Some(_)) => transcripts
                .map(|part| (part.path.clone(), part.len))
                .collect(),
            (None, None) => return None,
        };
        Some(Checkpoint {
            number: 1,
            seq: None,
            turn: self.turn,
            parent: None,
            at: self.last?,
            uuid: None,
            stop: None,
            files,
            pending: Vec::new(),
            last_answer: None,
        })
    }
}

/// A file that got another path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMove {
    /// Its path until now.
    pub from: RelPath,
    /// Its path from now on.
    pub to: RelPath,
}

/// What one file gained: cut it at `start`, go on with `len` bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The file.
    pub path: RelPath,
    /// How the agent writes it.
    pub kind: FileKind,
    /// Where the bytes go; at most the file's length so far.
    pub start: u64,
    /// How many there are.
    pub len: u64,
    /// SHA-256 of the file from 0 to `start + len`.
    pub file_sha256: Digest,
    /// Permission bits.
    pub mode: u32,
    /// Time of the last change, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// The entry that changed it last, where that is not the one this part is in: in a merge or a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<Seq>,
}

impl Part {
    /// The file's length after this part.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }
}
