//! Errors that several readers of a log return.

use super::read::ReadOutcome;
use crate::error::{Error, Result};
use crate::model::limits::MAX_SEQ;
use crate::model::{EntryKind, LogId, LogPoint, keys};

/// The hint if not even the first entry is readable.
pub const NO_UNDAMAGED_ENTRY: &str = "restore the object from a backup, or from an earlier object version if the bucket has versioning";

/// The store has no such log.
pub fn not_found(id: &LogId) -> Error {
    Error::not_found(format!(
        "{id} does not exist in namespace {} of agent {}",
        id.namespace, id.agent
    ))
    .hint("run \"sessiond ls\" to list the sessions; check --store, --namespace and --agent")
}

/// The log ends with an entry that removed the session.
pub fn removed(id: &LogId, by: EntryKind) -> Error {
    if by == EntryKind::Purge {
        return Error::not_found(format!("{id} was deleted permanently"));
    }
    Error::not_found(format!("{id} was removed or has expired")).hint(format!(
        "run \"sessiond undelete {}\" within the grace period to bring it back",
        id.name
    ))
}

/// The log has an object with the highest number. No writer gets that far.
pub fn full(id: &LogId) -> Error {
    Error::corrupt(format!(
        "{id} cannot be continued: an object has the highest number of an entry, {MAX_SEQ}"
    ))
    .hint(format!(
        "delete the object {}; no sessiond has written it",
        keys::entry(id, MAX_SEQ)
    ))
}

/// The hint for a damaged log whose undamaged part holds no transcript.
pub fn history_hint(id: &LogId) -> String {
    format!(
        "run \"sessiond restore {} --fallback history\" to write the readable messages as text",
        id.name
    )
}

/// Checks that a log exists and that it reaches the point it was read up to.
pub fn check_point<S>(id: &LogId, at: LogPoint, read: &ReadOutcome<S>) -> Result<()> {
    if read.head == 0 {
        return Err(not_found(id));
    }
    if let LogPoint::Seq(seq) = at
        && seq > read.head
    {
        return Err(Error::not_found(format!(
            "{id} has no entry {seq}; its last entry is {}",
            read.head
        )));
    }
    if read.seq == 0 && read.damage.is_none() {
        return Err(
            Error::not_found(format!("{id} has no entry at or before {at}")).hint(format!(
                "run \"sessiond checkpoints {}\" to list its checkpoints",
                id.name
            )),
        );
    }
    Ok(())
}
