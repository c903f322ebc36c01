//! Appending entries with a fence, to the log or to a branch.
//!
//! Decides what an existing object at the next `seq` means. Does not own retries: after an
//! `Unavailable` error the outcome is unknown, and the caller appends the same bytes again.

use super::writer::{LogWriter, WriteTarget};
use super::{Fence, Logs};
use crate::codec::entry::{EncodedEntry, Entry};
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::index::{FenceRow, FenceTable};
use crate::model::{LogId, Seq, keys};
use crate::store::CreateOutcome;
use crate::store::encrypted::policy::WriteEncryption;
use crate::sys::mutation::{Mutation, is_active};

/// The result of an append.
#[derive(Debug)]
pub enum AppendOutcome {
    /// The entry is durable, and the writer has advanced to it.
    Written,
    /// Another entry has this `seq`; `None` if that entry is unreadable, not written yet, or
    /// already deleted by garbage collection.
    Conflict(Option<Box<Entry>>),
}

/// The parameters of one append: the entry, its writer and its encryption.
#[derive(Clone, Copy)]
struct Append<'a> {
    id: &'a LogId,
    writer: &'a LogWriter,
    entry: &'a EncodedEntry,
    encryption: WriteEncryption,
}

impl Append<'_> {
    fn seq(&self) -> Seq {
        self.entry.header.seq
    }
}

impl Logs {
    /// Appends `entry`, whose header the writer made. After an `Unavailable` error the outcome is
    /// unknown: call again with the same bytes.
    pub async fn append(
        &self,
        id: &LogId,
        writer: &mut LogWriter,
        entry: &EncodedEntry,
    ) -> Result<AppendOutcome> {
        let seq = entry.header.seq;
        let outcome = async {
            let append = Append {
                id,
                encryption: self.entry_encryption(id, writer).await?,
                writer,
                entry,
            };
            match append.writer.target {
                WriteTarget::Branch => self.append_branch(append).await,
                WriteTarget::Main | WriteTarget::Unclaimed => self.append_main(append).await,
            }
        };
        let outcome = outcome
            .await
            .with_context(|| format!("write entry {seq} of {id}"));
        let outcome = match outcome {
            Err(_) if is_active(Mutation::AcknowledgeFailedWrite) => AppendOutcome::Written,
            outcome => outcome?,
        };
        if let AppendOutcome::Written = outcome {
            writer.advance_to(seq, entry.digest, self.clock.now());
            self.progress.add_done(entry.bytes.len() as u64);
            if writer.target != WriteTarget::Branch {
                self.recent.insert(id, seq, &entry.bytes);
            }
        }
        Ok(outcome)
    }

    async fn append_main(&self, append: Append<'_>) -> Result<AppendOutcome> {
        let (id, seq) = (append.id, append.seq());
        let outcome = self.create_main(append).await?;
        // A writer that was idle for half the grace period may have missed an entry at this `seq`
        // that another writer created, and that was then compacted and deleted by garbage
        // collection. The create succeeds in that case, but no reader ever reads the new entry.
        // This check comes after the create, because the process may be suspended at any time
        // before it.
        let is_suspect = matches!(outcome, AppendOutcome::Written)
            && append
                .writer
                .has_been_idle_for_half_the_grace_period(self.clock.now());
        if is_suspect && !is_active(Mutation::SkipIdleCheck) {
            let compacted = self.list_compacted_segments(id).await?;
            let is_covered = compacted.iter().any(|segment| segment.last_seq >= seq);
            if is_covered || !self.list_entries(id, seq).await?.is_empty() {
                return Ok(AppendOutcome::Conflict(None));
            }
        }
        Ok(outcome)
    }

    async fn create_main(&self, append: Append<'_>) -> Result<AppendOutcome> {
        let key = keys::entry(append.id, append.seq());
        let body = append.entry.bytes.clone();
        match self.fence.choose(&*self.store, &self.rng).await? {
            Fence::Store => {
                let created = self.store.create_with(&key, body, append.encryption);
                match created.await? {
                    CreateOutcome::Created => Ok(AppendOutcome::Written),
                    _ if is_active(Mutation::SkipReadBack) => Ok(AppendOutcome::Written),
                    CreateOutcome::AlreadyExists => {
                        self.read_conflict(append.id, append.seq(), append.entry)
                            .await
                    }
                }
            }
            Fence::Database(fences) => self.append_reserved(&*fences, append).await,
            Fence::Off => match self.store.protection_of(&key).await? {
                Some(_) => {
                    self.read_conflict(append.id, append.seq(), append.entry)
                        .await
                }
                None => {
                    self.store.put_with(&key, body, append.encryption).await?;
                    Ok(AppendOutcome::Written)
                }
            },
        }
    }

    /// Reads the existing entry: the same bytes mean that an earlier attempt succeeded.
    async fn read_conflict(
        &self,
        id: &LogId,
        seq: Seq,
        entry: &EncodedEntry,
    ) -> Result<AppendOutcome> {
        compare_existing(self.read_entry(id, seq).await, entry)?.ok_or_else(|| {
            Error::unavailable(format!("entry {seq} of {id} was deleted during the append"))
        })
    }

    /// Fences through the database: reserves the `seq`, writes the entry, then checks that the
    /// reservation is still valid.
    async fn append_reserved(
        &self,
        fences: &dyn FenceTable,
        append: Append<'_>,
    ) -> Result<AppendOutcome> {
        let Append {
            id, writer, entry, ..
        } = append;
        let seq = append.seq();
        let row = |seq: Seq| FenceRow {
            seq,
            writer: writer.writer.clone(),
        };
        let (reserved, previous) = (row(seq), (writer.seq > 0).then(|| row(writer.seq)));
        let is_reserved = fences
            .compare_and_swap_fence(id, previous.as_ref(), &reserved)
            .await?
            || fences.read_fence(id).await?.as_ref() == Some(&reserved);
        if !is_reserved {
            return self.read_lost_reservation(append).await;
        }
        // This writer may have written an entry here before a crash. Overwriting that entry would
        // lose acknowledged bytes.
        if let Some(outcome) = compare_existing(self.read_entry(id, seq).await, entry)? {
            return Ok(outcome);
        }
        self.store
            .put_with(
                &keys::entry(id, seq),
                entry.bytes.clone(),
                append.encryption,
            )
            .await?;
        match fences.read_fence(id).await? {
            Some(current) if current == reserved => Ok(AppendOutcome::Written),
            _ if is_active(Mutation::SkipFenceCheckAfterWrite) => Ok(AppendOutcome::Written),
            _ => Ok(AppendOutcome::Conflict(None)),
        }
    }

    /// The outcome of an append whose `seq` another writer has moved the fence beyond.
    async fn read_lost_reservation(&self, append: Append<'_>) -> Result<AppendOutcome> {
        let Append { id, entry, .. } = append;
        let newer = self.list_entries(id, append.writer.seq).await?;
        let Some(found) = newer.first() else {
            // Another writer reserved the `seq` and has not written it yet; it owns the log.
            return Ok(AppendOutcome::Conflict(None));
        };
        let outcome = self.read_conflict(id, found.seq, entry).await?;
        if !matches!(outcome, AppendOutcome::Written) {
            return Ok(outcome);
        }
        // The entry may have arrived after the other writer listed the log. It is part of the log
        // only if the next entry continues it.
        let next = match newer.get(1) {
            Some(next) => self.read_entry(id, next.seq).await?,
            None => None,
        };
        match next {
            Some(next) if next.header.prev_digest == Some(entry.digest) => {
                Ok(AppendOutcome::Written)
            }
            next => Ok(AppendOutcome::Conflict(next.map(Box::new))),
        }
    }

    /// Whether this writer has reserved a `seq` in the database but the store has no entry there.
    /// Such a `seq` must be skipped: a delayed write of an earlier process may still arrive there,
    /// and would replace a new entry if the store ignores conditions.
    pub async fn has_reserved_seq_without_entry(
        &self,
        id: &LogId,
        writer: &LogWriter,
    ) -> Result<bool> {
        let Fence::Database(fences) = self.fence.choose(&*self.store, &self.rng).await? else {
            return Ok(false);
        };
        let row = fences.read_fence(id).await?;
        let Some(ahead) = row.filter(|row| row.writer == writer.writer && row.seq > writer.seq)
        else {
            return Ok(false);
        };
        let existing = self
            .store
            .protection_of(&keys::entry(id, ahead.seq))
            .await?;
        Ok(existing.is_none())
    }

    /// Whether the store itself prevents a second write to a key.
    pub async fn has_conditional_create(&self) -> Result<bool> {
        let fence = self.fence.choose(&*self.store, &self.rng).await?;
        Ok(matches!(fence, Fence::Store))
    }

    async fn append_branch(&self, append: Append<'_>) -> Result<AppendOutcome> {
        let (id, writer, seq) = (append.id, &append.writer.writer, append.seq());
        let key = keys::branch_entry(id, writer, seq);
        let body = append.entry.bytes.clone();
        let created = match self.fence.choose(&*self.store, &self.rng).await? {
            Fence::Store => {
                self.store
                    .create_with(&key, body, append.encryption)
                    .await?
            }
            // A copy of this volume may write to the same branch, and a store that ignores
            // conditions would let it overwrite the entry.
            _ if self.store.protection_of(&key).await?.is_some() => CreateOutcome::AlreadyExists,
            _ => {
                self.store.put_with(&key, body, append.encryption).await?;
                CreateOutcome::Created
            }
        };
        if created == CreateOutcome::Created {
            return Ok(AppendOutcome::Written);
        }
        let existing = self.read_branch_entry(id, writer, seq).await;
        compare_existing(existing, append.entry)?
            .ok_or_else(|| Error::unavailable(format!("{key} was deleted during the append")))
    }
}

/// The outcome that the existing object at the `seq` of `entry` implies; none if there is no
/// object.
fn compare_existing(
    existing: Result<Option<Entry>>,
    entry: &EncodedEntry,
) -> Result<Option<AppendOutcome>> {
    match existing {
        Ok(Some(existing)) if existing.digest == entry.digest => Ok(Some(AppendOutcome::Written)),
        Ok(Some(existing)) => Ok(Some(AppendOutcome::Conflict(Some(Box::new(existing))))),
        Ok(None) => Ok(None),
        // This writer did not write an unreadable object, and the `seq` is in use.
        Err(error) if error.kind() == ErrorKind::Corrupt || error.kind().is_unreadable() => {
            tracing::error!(%error, "the entry at the next seq is unreadable");
            Ok(Some(AppendOutcome::Conflict(None)))
        }
        Err(error) => Err(error),
    }
}
