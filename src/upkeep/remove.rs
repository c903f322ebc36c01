//! Removes and undeletes a session with an entry in its log, which fences other writers like any
//! entry.

use crate::error::Result;
use crate::log::read::ReadOptions;
use crate::log::state::LogState;
use crate::log::writer::LogWriter;
use crate::log::{Logs, errors, race};
use crate::model::{EntryKind, LogId, Seq};
use crate::sys::clock::new_writer_id;

/// Removes a session: it can no longer be restored, and garbage collection deletes it after the
/// grace period. Returns false if it was removed already.
pub async fn remove(logs: &Logs, id: &LogId) -> Result<bool> {
    race::retry(id, || async {
        let end = AppendPosition::read(logs, id).await?;
        if end.state.removed.is_some() {
            return Ok(Some(false));
        }
        let appended = end.append_tombstone(logs, id).await?;
        Ok(appended.then_some(true))
    })
    .await
}

/// Removes a session if its last entry is `head` and the session is not removed yet.
pub async fn remove_if_head(logs: &Logs, id: &LogId, head: Seq) -> Result<()> {
    let end = AppendPosition::read(logs, id).await?;
    if end.head == head && end.state.removed.is_none() {
        end.append_tombstone(logs, id).await?;
    }
    Ok(())
}

/// Undeletes a removed session. Returns false if it was not removed.
pub async fn undelete(logs: &Logs, id: &LogId) -> Result<bool> {
    race::retry(id, || async {
        let mut end = AppendPosition::read(logs, id).await?;
        match end.state.removed {
            None => return Ok(Some(false)),
            Some(EntryKind::Purge) => return Err(errors::removed(id, EntryKind::Purge)),
            Some(_) => {}
        }
        let claimed = logs.claim(id, &mut end.log_writer, end.head).await?;
        Ok(claimed.map(|_| true))
    })
    .await
}

/// The end of a log, even if it is damaged, and a writer that can append to it.
struct AppendPosition {
    log_writer: LogWriter,
    state: LogState,
    head: Seq,
}

impl AppendPosition {
    async fn read(logs: &Logs, id: &LogId) -> Result<AppendPosition> {
        let read = logs
            .read_log(id, ReadOptions::default(), LogState::default)
            .await?;
        let head = read.head.max(read.seq);
        if head == 0 {
            return Err(errors::not_found(id));
        }
        let writer = new_writer_id(&logs.rng);
        Ok(AppendPosition {
            log_writer: LogWriter::unclaimed(writer, read.seq, read.digest, logs.clock.now()),
            state: read.sink,
            head,
        })
    }

    /// Returns false if another writer appended in between.
    async fn append_tombstone(mut self, logs: &Logs, id: &LogId) -> Result<bool> {
        let kind = EntryKind::Tombstone;
        let appended = logs
            .append_marker(id, &mut self.log_writer, self.head, kind)
            .await?;
        Ok(appended.is_some())
    }
}
