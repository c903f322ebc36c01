//! The status of a session and the commands that change it: close, archive, reopen. They delete
//! nothing.
//!
//! The store is authoritative. A closed status applies until the session grows.

use crate::error::{Error, Result};
use crate::log::read::ReadOptions;
use crate::log::state::LogState;
use crate::log::{Logs, errors};
use crate::model::{Closed, ClosedStatus, LogId, SessionMetadata, SessionStatus};

/// A change of the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusChange {
    /// Active to completed.
    Close,
    /// Completed to archived.
    Archive,
    /// Completed or archived to active.
    Reopen,
}

/// The status that a change leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NewStatus {
    Active,
    Closed(ClosedStatus),
}

impl StatusChange {
    const ALL: [StatusChange; 3] = [
        StatusChange::Close,
        StatusChange::Archive,
        StatusChange::Reopen,
    ];

    /// The name of the command.
    pub fn as_str(self) -> &'static str {
        match self {
            StatusChange::Close => "close",
            StatusChange::Archive => "archive",
            StatusChange::Reopen => "reopen",
        }
    }

    /// The status that the change leads to.
    fn target(self) -> SessionStatus {
        match self {
            StatusChange::Close => SessionStatus::Completed,
            StatusChange::Archive => SessionStatus::Archived,
            StatusChange::Reopen => SessionStatus::Active,
        }
    }

    /// The status after the change; none if the change is invalid for this status. Pure.
    fn apply_to(self, status: SessionStatus) -> Option<NewStatus> {
        match (self, status) {
            (StatusChange::Close, SessionStatus::Active) => {
                Some(NewStatus::Closed(ClosedStatus::Completed))
            }
            (StatusChange::Archive, SessionStatus::Completed) => {
                Some(NewStatus::Closed(ClosedStatus::Archived))
            }
            (StatusChange::Reopen, SessionStatus::Completed | SessionStatus::Archived) => {
                Some(NewStatus::Active)
            }
            _ => None,
        }
    }

    /// The change that makes this one valid. Pure.
    fn prerequisite(self, status: SessionStatus) -> Option<StatusChange> {
        StatusChange::ALL.into_iter().find(|first| {
            first.apply_to(status).is_some() && self.apply_to(first.target()).is_some()
        })
    }
}

/// Changes the status, and returns the new one. A session that grows becomes active again.
pub async fn change_status(logs: &Logs, id: &LogId, change: StatusChange) -> Result<SessionStatus> {
    let raw_bytes = raw_bytes(logs, id).await?;
    let update = logs.update_metadata(id, |current| {
        let status = current.status(raw_bytes);
        if status == change.target() {
            return Ok(current.clone());
        }
        let closed = match change.apply_to(status) {
            Some(NewStatus::Active) => None,
            Some(NewStatus::Closed(status)) => Some(Closed { status, raw_bytes }),
            None => return Err(invalid_change(id, change, status)),
        };
        Ok(SessionMetadata {
            closed,
            ..current.clone()
        })
    });
    Ok(update.await?.metadata.status(raw_bytes))
}

/// Number of raw bytes of a session that exists and was not removed.
pub(super) async fn raw_bytes(logs: &Logs, id: &LogId) -> Result<u64> {
    let read = logs
        .read_log(id, ReadOptions::default(), LogState::default)
        .await?;
    if read.head == 0 {
        return Err(errors::not_found(id));
    }
    let state = read.require_undamaged(id)?;
    match state.removed {
        Some(by) => Err(errors::removed(id, by)),
        None => Ok(state.raw_bytes),
    }
}

fn invalid_change(id: &LogId, change: StatusChange, status: SessionStatus) -> Error {
    let error = Error::conflict(format!("the session is {status}"))
        .context(format!("{} {id}", change.as_str()));
    match change.prerequisite(status) {
        Some(first) => error.hint(format!(
            "run \"sessiond {} {}\" first",
            first.as_str(),
            id.name
        )),
        None => error.hint("wait for the first upload: it makes the session active"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_changes_are_allowed() {
        use SessionStatus::{Active, Archived, Completed, Created};
        let allowed = |status: SessionStatus| {
            StatusChange::ALL
                .into_iter()
                .filter(|change| change.apply_to(status).is_some())
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

    #[test]
    fn an_invalid_change_names_the_one_that_comes_first() {
        use SessionStatus::{Active, Archived, Created};
        let first = |change: StatusChange, status| change.prerequisite(status);
        assert_eq!(
            first(StatusChange::Archive, Active),
            Some(StatusChange::Close)
        );
        assert_eq!(
            first(StatusChange::Close, Archived),
            Some(StatusChange::Reopen)
        );
        assert_eq!(first(StatusChange::Close, Created), None);
    }
}
