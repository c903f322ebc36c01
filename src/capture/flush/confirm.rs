//! The confirmation of a ledger: whether the store has the entries that the ledger names.
//!
//! Owns which ledgers are trusted. The agent can change a ledger, and a store can be emptied or
//! replaced.

use super::{LogFlusher, Step, start_branch};
use crate::capture::CaptureContext;
use crate::codec::entry::Entry;
use crate::error::{Error, ErrorKind, Result};
use crate::log::ledger::Ledger;
use crate::log::writer::{LogWriter, WriteTarget};

impl LogFlusher {
    /// Checks that the store has the last entry of the ledger. The store may have been emptied,
    /// replaced or restored from a backup since the ledger was written, or the session may have
    /// been removed. An entry after a missing one would make the log unreadable. Runs before the
    /// first write of a process and after a long idle time.
    pub(super) async fn confirm(
        &mut self,
        context: &CaptureContext,
        ledger: &mut Ledger,
    ) -> Result<Option<Step>> {
        let exists = match self.is_ledger_from_disk && !self.is_confirmed {
            true => self.is_confirmed_by_store(context, ledger).await?,
            false => self.has_last_entry(context, &ledger.log_writer).await?,
        };
        let log_writer = &ledger.log_writer;
        let has_reserved_seq = exists
            && log_writer.target == WriteTarget::Main
            && context
                .logs
                .has_reserved_seq_without_entry(&self.id, log_writer)
                .await?;
        let is_first = !std::mem::replace(&mut self.is_confirmed, true);
        if exists
            && is_first
            && log_writer.target == WriteTarget::Branch
            && !context.logs.has_conditional_create().await?
        {
            // A write of an earlier process may still arrive and replace the next entry of the
            // branch.
            start_branch(context, ledger);
            return Ok(Some(Step::Continue));
        }
        if has_reserved_seq {
            tracing::info!(session = %self.id.name, seq = log_writer.seq, "an earlier write may still be in flight; claiming the session at a later seq");
            return Ok(Some(Step::Recover));
        }
        if exists {
            let is_unproven = log_writer.target == WriteTarget::Branch && log_writer.seq == 0;
            self.is_own_log |= self.is_ledger_from_disk && !is_unproven;
            if is_unproven {
                self.check_limit(context, log_writer)?;
            }
            return Ok(None);
        }
        tracing::warn!(session = %self.id.name, seq = log_writer.seq, "the store does not confirm the last entry in the ledger; reading the log");
        Ok(Some(Step::Recover))
    }

    /// Fails if this process must not continue a log that others wrote.
    pub(super) fn check_limit(
        &self,
        context: &CaptureContext,
        log_writer: &LogWriter,
    ) -> Result<()> {
        let is_new = log_writer.seq == 0 && log_writer.target == WriteTarget::Unclaimed;
        if is_new || self.is_own_log || context.session_limit.contains(&self.id.name) {
            return Ok(());
        }
        Err(Error::conflict(format!(
            "session {} exists in the store and is not one of the sessions in --only",
            self.id.name
        ))
        .hint(format!(
            "add {} to --only if this machine should continue the session",
            self.id.name
        )))
    }

    /// Whether the store proves that the writer of a ledger from disk wrote its last entry. The
    /// agent can write any ledger, but it does not know the digest of an entry that it has not
    /// written.
    async fn is_confirmed_by_store(
        &self,
        context: &CaptureContext,
        ledger: &Ledger,
    ) -> Result<bool> {
        let (logs, log_writer) = (&context.logs, &ledger.log_writer);
        let seq = log_writer.seq;
        let has_digest = |entry: &Entry| log_writer.digest == Some(entry.digest);
        let in_log = match log_writer.target {
            // Nothing is confirmed, but a branch is nobody else's log.
            WriteTarget::Branch if seq == 0 => return Ok(true),
            _ if seq == 0 => return Ok(false),
            WriteTarget::Branch => {
                let read = logs.read_branch_entry(&self.id, &log_writer.writer, seq);
                if readable(read.await)?.is_some_and(|entry| has_digest(&entry)) {
                    return Ok(true);
                }
                readable(logs.read_entry(&self.id, seq).await)?
            }
            WriteTarget::Main | WriteTarget::Unclaimed => {
                readable(logs.read_entry(&self.id, seq).await)?
            }
        };
        let Some(entry) = in_log.filter(has_digest) else {
            return Ok(false);
        };
        let is_writer =
            log_writer.target != WriteTarget::Main || entry.header.writer == log_writer.writer;
        // A cursor behind the stored bytes would leave a gap.
        let has_cursors = entry.header.parts.iter().all(|part| {
            let cursor = ledger.files.get(&part.path);
            cursor.is_none_or(|cursor| cursor.len <= part.end())
        });
        Ok(is_writer && has_cursors)
    }

    async fn has_last_entry(
        &self,
        context: &CaptureContext,
        log_writer: &LogWriter,
    ) -> Result<bool> {
        let (logs, seq) = (&context.logs, log_writer.seq);
        match log_writer.target {
            _ if seq == 0 => Ok(true),
            WriteTarget::Branch => {
                let in_branch = logs
                    .read_branch_entry(&self.id, &log_writer.writer, seq)
                    .await;
                Ok(exists(in_branch)? || exists(logs.read_entry(&self.id, seq).await)?)
            }
            WriteTarget::Main | WriteTarget::Unclaimed => {
                match logs.read_entry(&self.id, seq).await {
                    Ok(Some(entry)) => Ok(log_writer
                        .digest
                        .is_none_or(|digest| digest == entry.digest)),
                    // Garbage collection deletes an entry only if a compacted segment replaces it.
                    Ok(None) => {
                        let segments = logs.list_compacted_segments(&self.id).await?;
                        Ok(segments.iter().any(|segment| segment.last_seq == seq))
                    }
                    Err(error)
                        if error.kind() == ErrorKind::Corrupt || error.kind().is_unreadable() =>
                    {
                        Ok(false)
                    }
                    Err(error) => Err(error),
                }
            }
        }
    }
}

/// An entry that can be read; none if it is missing, damaged or encrypted for others.
fn readable(read: Result<Option<Entry>>) -> Result<Option<Entry>> {
    match read {
        Err(error) if error.kind() == ErrorKind::Corrupt || error.kind().is_unreadable() => {
            Ok(None)
        }
        read => read,
    }
}

/// Whether an entry exists, readable or not.
fn exists(read: Result<Option<Entry>>) -> Result<bool> {
    match read {
        Err(error) if error.kind().is_unreadable() => Ok(true),
        read => Ok(read?.is_some()),
    }
}
