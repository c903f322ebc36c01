//! The right to write to a log, and the writing: append with a fence, claim, branch.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::{Fence, Logs};
use crate::codec::entry::{self, Encoded, Entry};
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::index::{FenceRow, Index};
use crate::model::{
    Digest, EntryHeader, EntryKind, FileMove, ForkOrigin, LogId, Part, Seq, WriterId,
    entry::FORMAT, keys,
};
use crate::store::Created;

/// What a merge or a snapshot stands for is collected no sooner than this after it was made, and what was removed no
/// sooner than this after that.
pub const GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// Where a writer writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WriteTarget {
    /// Nowhere yet: it knows the log and has not claimed it.
    Unclaimed,
    /// The log itself.
    Main,
    /// A branch of its own: it lost the session, or its files do not go with the log.
    Branch,
}

/// The right to write: who, where, and the last number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogWriter {
    /// Who.
    pub writer: WriterId,
    /// Where.
    pub target: WriteTarget,
    /// The entry that the next one follows; 0 before the first.
    pub seq: Seq,
    /// Its digest.
    pub digest: Option<Digest>,
    /// When it was written, or last found to be the head.
    pub wrote: Timestamp,
    /// The same by a clock that nobody sets, while this process lives.
    #[serde(skip)]
    pub seen: Option<Instant>,
    /// The entry that was gone back to, which the next claim says.
    #[serde(skip)]
    pub back_to: Option<Seq>,
    /// Files that have other paths here than in the log, which the next claim says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moves: Vec<FileMove>,
    /// What the session begins with, which the first claim says.
    #[serde(skip)]
    pub fork: Option<ForkOrigin>,
}

/// What an attempt to write did.
#[derive(Debug)]
pub enum AppendOutcome {
    /// It is durable, and the pen has moved on.
    Written,
    /// The number is taken by another entry. `None`: by one that cannot be read, or is collected already.
    Conflict(Option<Box<Entry>>),
}

impl LogWriter {
    /// A pen that knows the head and has not claimed.
    pub fn unclaimed(writer: WriterId, seq: Seq, digest: Option<Digest>, now: Timestamp) -> Self {
        LogWriter {
            writer,
            target: WriteTarget::Unclaimed,
            seq,
            digest,
            wrote: now,
            seen: None,
            back_to: None,
            moves: Vec::new(),
            fork: None,
        }
    }

    /// Whether so much time has passed that the entry it follows, or the number it would write, may have been collected.
    pub fn has_slept(&self, now: Timestamp) -> bool {
        now.duration_since(self.wrote).unsigned_abs() > GRACE / 2
            || self.seen.is_some_and(|seen| seen.elapsed() > GRACE / 2)
    }

    /// The header of the entry that this pen would write next.
    pub fn header(
        &self,
        id: &LogId,
        kind: EntryKind,
        at: Timestamp,
        moves: Vec<FileMove>,
        parts: Vec<Part>,
    ) -> EntryHeader {
        EntryHeader {
            v: FORMAT,
            kind,
            agent: id.agent.clone(),
            session: id.name.clone(),
            seq: self.seq + 1,
            writer: self.writer.clone(),
            at,
            prev: self.digest,
            after: None,
            covers: None,
            moves,
            parts,
            checkpoints: Vec::new(),
            fork: self
                .fork
                .clone()
                .filter(|_| kind == EntryKind::Claim && self.seq == 0),
            back_to: self.back_to.filter(|_| kind == EntryKind::Claim),
        }
    }

    /// Goes on behind an entry.
    pub fn follow(&mut self, seq: Seq, digest: Digest, now: Timestamp) {
        self.seq = seq;
        self.digest = Some(digest);
        self.wrote = now;
        self.seen = Some(Instant::now());
    }
}

impl Logs {
    /// Writes `encoded`, whose header the pen made. An error of kind `Unavailable` means unknown: call again with the
    /// same bytes.
    pub async fn append(
        &self,
        id: &LogId,
        log_writer: &mut LogWriter,
        encoded: &Encoded,
    ) -> Result<AppendOutcome> {
        let seq = encoded.header.seq;
        let done = match log_writer.target {
            WriteTarget::Branch => self.append_branch(id, log_writer, encoded).await,
            _ => self.append_main(id, log_writer, encoded).await,
        };
        let done = done.with_context(|| format!("write entry {seq} of {id}"))?;
        if let AppendOutcome::Written = done {
            log_writer.follow(seq, encoded.digest, self.clock.now());
            self.progress.did(encoded.bytes.len() as u64);
            if log_writer.target != WriteTarget::Branch {
                self.recent.keep(id, seq, &encoded.bytes);
            }
        }
        Ok(done)
    }

    async fn append_main(
        &self,
        id: &LogId,
        log_writer: &LogWriter,
        encoded: &Encoded,
    ) -> Result<AppendOutcome> {
        let seq = encoded.header.seq;
        let appended = self.create_main(id, log_writer, encoded).await?;
        // After half the grace period the number may have been written by another, covered by a snapshot and collected: the
        // create then succeeds, and nobody reads it. Asked afterwards, for we may have been asleep in between.
        if matches!(appended, AppendOutcome::Written) && log_writer.has_slept(self.clock.now()) {
            let covered = self
                .composites(id)
                .await?
                .iter()
                .any(|piece| piece.to >= seq);
            if covered || !self.entries(id, seq).await?.is_empty() {
                return Ok(AppendOutcome::Conflict(None));
            }
        }
        Ok(appended)
    }

    async fn create_main(
        &self,
        id: &LogId,
        log_writer: &LogWriter,
        encoded: &Encoded,
    ) -> Result<AppendOutcome> {
        let seq = encoded.header.seq;
        let key = keys::entry(id, seq);
        match self.fence.choose(&*self.store, &self.rng).await? {
            Fence::Store => match self.store.create(&key, encoded.bytes.clone()).await? {
                Created::New => Ok(AppendOutcome::Written),
                Created::Exists => self.taken(id, seq, encoded).await,
            },
            Fence::Database(index) => self.append_reserved(&*index, id, log_writer, encoded).await,
            Fence::Off => match self.store.get(&key).await? {
                Some(_) => self.taken(id, seq, encoded).await,
                None => self
                    .store
                    .put(&key, encoded.bytes.clone())
                    .await
                    .map(|()| AppendOutcome::Written),
            },
        }
    }

    /// Reads back what holds the number: our own bytes mean that an earlier try had arrived.
    async fn taken(&self, id: &LogId, seq: Seq, encoded: &Encoded) -> Result<AppendOutcome> {
        match held(self.read(id, seq).await, encoded)? {
            Some(appended) => Ok(appended),
            None => Err(Error::unavailable(format!(
                "{id} changes under us: entry {seq} was there and is gone"
            ))),
        }
    }

    /// Fences through the database: reserve the number, write it, and see that it is still ours.
    async fn append_reserved(
        &self,
        index: &dyn Index,
        id: &LogId,
        log_writer: &LogWriter,
        encoded: &Encoded,
    ) -> Result<AppendOutcome> {
        let seq = encoded.header.seq;
        let ours = FenceRow {
            seq,
            writer: log_writer.writer.clone(),
        };
        let before = (log_writer.seq > 0).then(|| FenceRow {
            seq: log_writer.seq,
            writer: log_writer.writer.clone(),
        });
        let reserved = index.move_fence(id, before.as_ref(), &ours).await?
            || index.fence(id).await? == Some(ours.clone());
        if !reserved {
            let foreign = self.entries(id, log_writer.seq).await?;
            let Some(found) = foreign.first() else {
                // Reserved by another writer and not written yet; it holds the session all the same.
                return Ok(AppendOutcome::Conflict(None));
            };
            return self.taken(id, found.seq, encoded).await;
        }
        // Our own entry from before a crash may stand here already; overwriting it would lose what it had made durable.
        if let Some(appended) = held(self.read(id, seq).await, encoded)? {
            return Ok(appended);
        }
        self.store
            .put(&keys::entry(id, seq), encoded.bytes.clone())
            .await?;
        match index.fence(id).await? {
            Some(row) if row == ours => Ok(AppendOutcome::Written),
            _ => Ok(AppendOutcome::Conflict(None)),
        }
    }

    /// Whether the database holds a number for us that no entry fills. A write of an earlier life of ours may still arrive
    /// there and, where the store ignores conditions, replace what we would write: the number must be passed over.
    pub async fn has_open_number(&self, id: &LogId, log_writer: &LogWriter) -> Result<bool> {
        let Fence::Database(index) = self.fence.choose(&*self.store, &self.rng).await? else {
            return Ok(false);
        };
        let ahead = index
            .fence(id)
            .await?
            .filter(|row| row.writer == log_writer.writer && row.seq > log_writer.seq);
        let Some(row) = ahead else { return Ok(false) };
        Ok(self.store.get(&keys::entry(id, row.seq)).await?.is_none())
    }

    /// Whether the store keeps a second write from a key.
    pub async fn creates_once(&self) -> Result<bool> {
        Ok(matches!(
            self.fence.choose(&*self.store, &self.rng).await?,
            Fence::Store
        ))
    }

    async fn append_branch(
        &self,
        id: &LogId,
        log_writer: &LogWriter,
        encoded: &Encoded,
    ) -> Result<AppendOutcome> {
        let key = keys::branch_entry(id, &log_writer.writer, encoded.header.seq);
        let created = match self.fence.choose(&*self.store, &self.rng).await? {
            Fence::Store => self.store.create(&key, encoded.bytes.clone()).await?,
            // A copy of our volume may write to the same branch, and a store that ignores conditions would let it overwrite.
            _ if self.store.get(&key).await?.is_some() => Created::Exists,
            _ => self
                .store
                .put(&key, encoded.bytes.clone())
                .await
                .map(|()| Created::New)?,
        };
        if created == Created::New {
            return Ok(AppendOutcome::Written);
        }
        match held(
            self.read_branch(id, &log_writer.writer, encoded.header.seq)
                .await,
            encoded,
        )? {
            Some(appended) => Ok(appended),
            None => Err(Error::unavailable(format!("{key} was there and is gone"))),
        }
    }

    /// Takes the log over: writes a claim that follows what `log_writer` knows. It gets the number behind `end`, the last one
    /// there is: what stands between the two is damaged and passed over. None if somebody wrote in between; then read on
    /// and try again.
    pub async fn claim(
        &self,
        id: &LogId,
        log_writer: &mut LogWriter,
        end: Seq,
    ) -> Result<Option<Encoded>> {
        let mut main = LogWriter {
            target: WriteTarget::Main,
            ..log_writer.clone()
        };
        let claim = self.mark(id, &mut main, end, EntryKind::Claim).await?;
        if claim.is_some() {
            *log_writer = LogWriter {
                moves: Vec::new(),
                ..main
            };
        }
        Ok(claim)
    }

    /// Writes an entry without parts behind `end`, by the rules of a claim.
    pub async fn mark(
        &self,
        id: &LogId,
        log_writer: &mut LogWriter,
        end: Seq,
        kind: EntryKind,
    ) -> Result<Option<Encoded>> {
        let moves = if kind == EntryKind::Claim {
            log_writer.moves.clone()
        } else {
            Vec::new()
        };
        let mut header = log_writer.header(id, kind, self.clock.now(), moves, Vec::new());
        let end = end.max(log_writer.seq);
        // What was purged is followed by nothing.
        let anew = log_writer.seq > 0 && log_writer.digest.is_none();
        let mut pass_over = |to: Seq| {
            header.seq = to + 1;
            header.after = if anew {
                Some(0)
            } else {
                (to > log_writer.seq).then_some(log_writer.seq)
            };
        };
        pass_over(end);
        if let Fence::Database(index) = self.fence.choose(&*self.store, &self.rng).await? {
            // The row may be ahead of the log by a number whose writer died; pass over it.
            let row = index.fence(id).await?;
            pass_over(row.as_ref().map_or(0, |row| row.seq).max(end));
            let ours = FenceRow {
                seq: header.seq,
                writer: log_writer.writer.clone(),
            };
            if !index.move_fence(id, row.as_ref(), &ours).await? {
                return Ok(None);
            }
            let encoded = entry::encode::<Vec<u8>>(header, &[])?;
            let unseen = self.entries(id, end).await?;
            if !unseen.is_empty() {
                return Ok(None);
            }
            self.store
                .put(&keys::entry(id, encoded.header.seq), encoded.bytes.clone())
                .await?;
            if index.fence(id).await? != Some(ours) {
                return Ok(None);
            }
            log_writer.follow(encoded.header.seq, encoded.digest, self.clock.now());
            return Ok(Some(encoded));
        }
        let encoded = entry::encode::<Vec<u8>>(header, &[])?;
        match self.append(id, log_writer, &encoded).await? {
            AppendOutcome::Written => Ok(Some(encoded)),
            AppendOutcome::Conflict(None) => Ok(None),
            AppendOutcome::Conflict(Some(entry)) => {
                // An earlier try of ours that had arrived differs in its time alone.
                let earlier = entry::encode::<Vec<u8>>(
                    EntryHeader {
                        at: entry.header.at,
                        ..encoded.header
                    },
                    &[],
                )?;
                let ours = earlier.digest == entry.digest;
                if ours {
                    log_writer.follow(entry.header.seq, entry.digest, self.clock.now());
                }
                Ok(ours.then_some(earlier))
            }
        }
    }
}

/// What it means that `read` was found at the number of `encoded`; nothing if nothing was found.
fn held(read: Result<Option<Entry>>, encoded: &Encoded) -> Result<Option<AppendOutcome>> {
    match read {
        Ok(Some(entry)) if entry.digest == encoded.digest => Ok(Some(AppendOutcome::Written)),
        Ok(Some(entry)) => Ok(Some(AppendOutcome::Conflict(Some(Box::new(entry))))),
        Ok(None) => Ok(None),
        // A later format, nobody's, or encrypted to others: not ours in any case, and the number is taken.
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Encrypted) => {
            tracing::error!(%error, "an entry cannot be read");
            Ok(Some(AppendOutcome::Conflict(None)))
        }
        Err(error) => Err(error),
    }
}

/// The error of a writer that lost the session.
pub fn fenced(id: &LogId, by: Option<&WriterId>) -> Error {
    let by = by.map_or_else(
        || "another writer".to_owned(),
        |writer| format!("writer {writer}"),
    );
    Error::new(ErrorKind::Fenced, format!("{id} was taken over by {by}"))
        .hint("what this one still had is on its branch: sessiond ls shows it, sessiond pull ID --branch WRITER fetches it")
}
