//! Removing a session and bringing it back: a mark in its log, which fences like any other entry.

use crate::error::{Error, Result};
use crate::log::Logs;
use crate::log::read::ReadOptions;
use crate::log::state::LogState;
use crate::log::writer::LogWriter;
use crate::model::{EntryKind, LogId, Seq};
use crate::sys::clock::new_writer;

/// Somebody may write between our look and our mark; so often we look again.
const MOST_RACES: u32 = 10;

/// Removes a session: nobody restores it any more, and the collector deletes it when the grace period has passed. False
/// if it was removed already.
pub async fn remove(logs: &Logs, id: &LogId) -> Result<bool> {
    for _ in 0..MOST_RACES {
        if let Some(done) = remove_at(logs, id, None).await? {
            return Ok(done);
        }
    }
    Err(busy(id))
}

/// The same, if its last entry is `head`. None if somebody wrote in between.
pub async fn remove_at(logs: &Logs, id: &LogId, head: Option<Seq>) -> Result<Option<bool>> {
    let (mut log_writer, state, end) = look(logs, id).await?;
    if head.is_some_and(|head| head != end) {
        return Ok(None);
    }
    if state.removed.is_some() {
        return Ok(Some(false));
    }
    Ok(logs
        .mark(id, &mut log_writer, end, EntryKind::Tombstone)
        .await?
        .map(|_| true))
}

/// Brings a removed session back. False if it was not removed.
pub async fn undelete(logs: &Logs, id: &LogId) -> Result<bool> {
    for _ in 0..MOST_RACES {
        let (mut log_writer, state, end) = look(logs, id).await?;
        match state.removed {
            None => return Ok(false),
            Some(EntryKind::Purge) => {
                return Err(Error::not_found(format!("{id} was deleted for good"))
                    .hint("the grace period had passed"));
            }
            Some(_) => {}
        }
        if logs.claim(id, &mut log_writer, end).await?.is_some() {
            return Ok(true);
        }
    }
    Err(busy(id))
}

/// Where the log stands, damaged or not.
async fn look(logs: &Logs, id: &LogId) -> Result<(LogWriter, LogState, Seq)> {
    let read = logs
        .read_log(id, ReadOptions::default(), LogState::default)
        .await?;
    let end = read.head.max(read.seq);
    if end == 0 {
        return Err(Error::not_found(format!(
            "there is no {id} in namespace {} of agent {}",
            id.namespace, id.agent
        )));
    }
    Ok((
        LogWriter::unclaimed(
            new_writer(&logs.rng),
            read.seq,
            read.digest,
            logs.clock.now(),
        ),
        read.sink,
        end,
    ))
}

fn busy(id: &LogId) -> Error {
    Error::unavailable(format!("{id} is being written to")).hint("stop its writer, or try again")
}
