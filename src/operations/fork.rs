//! Forks a session and indexes the fork.

use super::index;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::{self, ForkReport};
use crate::model::{LogId, LogName, PointSpec, ResolvedPoint, SessionId, WriterId};
use crate::sessions::point;
use crate::sys::scratch::ScratchDirectory;
use crate::wire::Parts;

/// Forks a session at a point of its main line or of a branch, as session `new_id` or under a random ID in the agent's own form.
pub async fn fork(
    parts: &Parts,
    id: &LogId,
    branch: Option<&WriterId>,
    point: &PointSpec,
    new_id: Option<&str>,
) -> Result<ForkReport> {
    let rng = &*parts.logs.rng;
    let new_id = match new_id {
        Some(new_id) => new_id.to_owned(),
        None => {
            let random = u128::from(rng.next()) << 64 | u128::from(rng.next());
            parts.profile.new_session_id(random)
        }
    };
    let session: SessionId = new_id.parse()?;
    // The ID is a file name too: the agent must be able to read it back.
    if SessionId::escape(&new_id) != session {
        return Err(Error::usage(format!(
            "invalid session ID {new_id:?}: only letters, digits, - and _ are allowed"
        )));
    }
    let new = parts.logs.id(LogName::Session(session));
    let (id, point) = resolve(parts, id, branch, point).await?;
    let scratch = ScratchDirectory::new(rng);
    let report = fork::fork(&parts.logs, &id, &point, &new, &scratch).await?;
    index::update(parts, &new).await;
    Ok(report)
}

/// Resolves a point of a session. A turn that a fork inherited is a point of its origin.
async fn resolve(
    parts: &Parts,
    id: &LogId,
    branch: Option<&WriterId>,
    point: &PointSpec,
) -> Result<(LogId, ResolvedPoint)> {
    let resolved = point::resolve_on(&parts.logs, id, branch, point).await;
    let error = match (resolved, point) {
        (Err(error), PointSpec::Turn(Some(_))) if error.kind() == ErrorKind::NotFound => error,
        (resolved, _) => return Ok((id.clone(), resolved?)),
    };
    let PointSpec::Turn(Some(turn)) = point else {
        return Err(error);
    };
    let inherited = point::resolve_inherited(&parts.logs, id, *turn).await?;
    inherited.ok_or(error)
}
