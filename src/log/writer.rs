//! The position of a writer in a log: its ID, its write target, and the entry that it continues from.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::codec::version;
use crate::error::{Error, ErrorKind};
use crate::model::{
    Digest, EntryHeader, EntryKind, FileMove, ForkOrigin, LogId, Part, Seq, WriterId,
};
use crate::store::encrypted::policy::WriteEncryption;

/// The grace period: garbage collection deletes compacted entries no sooner than this after the
/// merge or snapshot was made, and removed sessions no sooner than this after their removal.
pub const GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// Where a writer appends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WriteTarget {
    /// Nowhere yet: the writer knows the head but has not claimed the log.
    Unclaimed,
    /// The log itself.
    Main,
    /// Its own branch: it was fenced, or its files do not continue the log.
    Branch,
}

/// The right to write to a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogWriter {
    /// The ID of the writer.
    pub writer: WriterId,
    /// Where it appends.
    pub target: WriteTarget,
    /// The entry that the next one follows; 0 before the first.
    pub seq: Seq,
    /// Its digest.
    pub digest: Option<Digest>,
    /// When that entry was written, or last confirmed to be the head.
    pub confirmed_at: Timestamp,
    /// The same time by the monotonic clock; none after a restart.
    #[serde(skip)]
    pub confirmed_instant: Option<Instant>,
    /// The entry that was rolled back to; recorded in the next claim.
    #[serde(skip)]
    pub rollback_to: Option<Seq>,
    /// The checkpoint within that entry; recorded in the next claim.
    #[serde(skip)]
    pub rollback_checkpoint: Option<u64>,
    /// Files whose local paths differ from those in the log; recorded in the next claim.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moves: Vec<FileMove>,
    /// The origin of a fork; recorded in the first claim.
    #[serde(skip)]
    pub fork: Option<ForkOrigin>,
    /// How entries are encrypted, determined before the first write to a target.
    #[serde(skip)]
    pub encryption: Option<(WriteTarget, WriteEncryption)>,
}

impl LogWriter {
    /// A writer that knows the head but has not claimed the log.
    pub fn unclaimed(writer: WriterId, seq: Seq, digest: Option<Digest>, now: Timestamp) -> Self {
        LogWriter {
            writer,
            target: WriteTarget::Unclaimed,
            seq,
            digest,
            confirmed_at: now,
            confirmed_instant: None,
            rollback_to: None,
            rollback_checkpoint: None,
            moves: Vec::new(),
            fork: None,
            encryption: None,
        }
    }

    /// Whether garbage collection may have deleted the entry that it follows, or an entry that
    /// another writer created at its next `seq`.
    pub fn has_been_idle_for_half_the_grace_period(&self, now: Timestamp) -> bool {
        now.duration_since(self.confirmed_at).unsigned_abs() > GRACE / 2
            || self
                .confirmed_instant
                .is_some_and(|instant| instant.elapsed() > GRACE / 2)
    }

    /// The header of the next entry.
    pub fn next_header(
        &self,
        id: &LogId,
        kind: EntryKind,
        at: Timestamp,
        moves: Vec<FileMove>,
        parts: Vec<Part>,
    ) -> EntryHeader {
        EntryHeader {
            version: version::ENTRY,
            kind,
            namespace: id.namespace.clone(),
            agent: id.agent.clone(),
            session: id.name.clone(),
            seq: self.seq.saturating_add(1),
            writer: self.writer.clone(),
            // Milliseconds are enough for a time that orders nothing.
            at: Timestamp::from_millisecond(at.as_millisecond()).unwrap_or(at),
            prev_digest: self.digest,
            prev_seq: None,
            covers: None,
            moves,
            parts,
            checkpoints: Vec::new(),
            keep_checkpoints: None,
            fork: self
                .fork
                .clone()
                .filter(|_| kind == EntryKind::Claim && self.seq == 0),
            rollback_to: self.rollback_to.filter(|_| kind == EntryKind::Claim),
            rollback_checkpoint: self
                .rollback_checkpoint
                .filter(|_| kind == EntryKind::Claim),
            adopted: Vec::new(),
        }
    }

    /// Continues after an entry.
    pub fn advance_to(&mut self, seq: Seq, digest: Digest, now: Timestamp) {
        self.seq = seq;
        self.digest = Some(digest);
        self.confirmed_at = now;
        self.confirmed_instant = Some(Instant::now());
    }
}

/// The error of a fenced writer.
pub fn fenced_error(id: &LogId, by: Option<&WriterId>) -> Error {
    let by = by.map_or_else(
        || "another writer".to_owned(),
        |writer| format!("writer {writer}"),
    );
    Error::new(ErrorKind::Fenced, format!("{by} took over {id}")).hint(format!(
        "run \"sessiond branches {}\" to find the entries of the fenced writer",
        id.name
    ))
}

/// How to continue after a takeover: look at the branch, or make it the main line.
pub fn branch_hint(session: impl fmt::Display, writer: impl fmt::Display) -> String {
    format!(
        "run \"sessiond show {session} --branch {writer}\" to see the branch, or \"sessiond adopt {session} --branch {writer}\" to make it the main line"
    )
}
