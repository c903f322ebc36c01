//! `restore --from-env`: a session in environment variables, for machines without a store.

use std::path::Path;

use crate::cli::select;
use crate::error::{Error, Result};
use crate::model::SessionId;
use crate::restore::inline::{self, InlineSession, Variable};
use crate::wire::Parts;

/// The variable with the ID of the session.
const ID: &str = "AGENT_SESSION_ID";

/// The variable with the session.
const BLOB: &str = "AGENT_SESSION_BLOB";

/// Decodes the session; none if the variable is not set.
pub fn decode(parts: &Parts) -> Result<Option<InlineSession>> {
    let id: Option<SessionId> = variable(ID)?.map(|text| text.trim().parse()).transpose()?;
    let Some(text) = variable(BLOB)? else {
        return Ok(None);
    };
    let project = select::project_of(parts, Path::new("."));
    inline::decode(
        &*parts.profile,
        &Variable {
            name: BLOB,
            value: &text,
            id: id.as_ref(),
            project: &project,
            now_ns: i64::try_from(parts.logs.clock.now().as_nanosecond()).unwrap_or(0),
        },
    )
    .map(Some)
}

/// The error for a variable that is not set.
pub fn not_set() -> Error {
    Error::not_found(format!("variable {BLOB} is not set")).hint(format!(
        "set {BLOB}=$(sessiond export ID --base64) and {ID}=ID, or use --if-exists"
    ))
}

/// A variable; none if it is not set or empty.
fn variable(name: &str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(text) => Ok(Some(text).filter(|text| !text.trim().is_empty())),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => {
            Err(Error::usage(format!("variable {name} is not UTF-8")))
        }
    }
}
