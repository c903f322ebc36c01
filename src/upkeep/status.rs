//! Where a session is in its life, and the moves that people make: close, archive, reopen. Nothing is deleted by them.
//!
//! The bucket alone tells: what was said counts as long as nobody wrote to the session since.

use crate::error::{Error, Result};
use crate::log::Logs;
use crate::log::metadata::VersionedMetadata;
use crate::log::read::ReadOptions;
use crate::log::state::LogState;
use crate::model::{Closed, ClosedStatus, LogId, Status};

/// What a person can do to the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusChange {
    /// It is done.
    Close,
    /// Put it away.
    Archive,
    /// Go on with it.
    Reopen,
}

impl StatusChange {
    const ALL: [StatusChange; 3] = [
        StatusChange::Close,
        StatusChange::Archive,
        StatusChange::Reopen,
    ];

    /// The verb.
    pub fn word(self) -> &'static str {
        match self {
            StatusChange::Close => "close",
            StatusChange::Archive => "archive",
            StatusChange::Reopen => "reopen",
        }
    }

    /// Pure: what was said of a session comes to this; none if it cannot be said of one in this status.
    fn from(self, status: Status) -> Option<Option<ClosedStatus>> {
        match (self, status) {
            (StatusChange::Close, Status::Active) => Some(Some(ClosedStatus::Completed)),
            (StatusChange::Archive, Status::Completed) => Some(Some(ClosedStatus::Archived)),
            (StatusChange::Reopen, Status::Completed | Status::Archived) => Some(None),
            _ => None,
        }
    }
}

/// Makes a move; answers the status that it leads to. A writer that goes on makes the session active again.
pub async fn make(logs: &Logs, id: &LogId, make: StatusChange) -> Result<Status> {
    let raw = raw_of(logs, id).await?;
    let said = logs.say(id, |before| {
        let status = before.status(raw);
        let rest = make.from(status).ok_or_else(|| refused(id, make, status))?;
        Ok(crate::model::SessionMetadata {
            status: rest.map(|is| Closed { is, raw }),
            ..before.clone()
        })
    });
    Ok(said.await?.wishes.status(raw))
}

/// Where a session is in its life, and all that was said of it.
pub async fn of(logs: &Logs, id: &LogId) -> Result<(Status, VersionedMetadata)> {
    let raw = raw_of(logs, id).await?;
    let said = logs.said(id).await?;
    Ok((said.wishes.status(raw), said))
}

/// The bytes that a session has, if it is there.
async fn raw_of(logs: &Logs, id: &LogId) -> Result<u64> {
    let read = logs
        .read_log(id, ReadOptions::default(), LogState::default)
        .await?;
    if read.head == 0 {
        return Err(Error::not_found(format!(
            "there is no {id} in namespace {} of agent {}",
            id.namespace, id.agent
        )));
    }
    let state = read.sound()?;
    if state.removed.is_some() {
        return Err(
            Error::not_found(format!("{id} was removed, or has expired")).hint(format!(
                "sessiond undelete {} brings it back within the grace period",
                id.name
            )),
        );
    }
    Ok(state.raw)
}

fn refused(id: &LogId, make: StatusChange, status: Status) -> Error {
    let possible: Vec<String> = StatusChange::ALL
        .iter()
        .filter(|other| other.from(status).is_some())
        .map(|other| format!("sessiond {} {}", other.word(), id.name))
        .collect();
    let hint = if possible.is_empty() {
        "it becomes active when it is first written to".to_owned()
    } else {
        format!("from there: {}", possible.join(", "))
    };
    Error::conflict(format!("{} {id}: it is {status}", make.word())).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_moves() {
        use Status::{Active, Archived, Completed, Created};
        let allowed = |status: Status| {
            StatusChange::ALL
                .into_iter()
                .filter(|make| make.from(status).is_some())
                .collect::<Vec<_>>()
        };
        assert_eq!(allowed(Created), []);
        assert_eq!(allowed(Active), [StatusChange::Close]);
        assert_eq!(
            allowed(Completed),
            [StatusChange::Archive, StatusChange::Reopen]
        );
        assert_eq!(allowed(Archived), [StatusChange::Reopen]);
    }
}
