//! What a command does with files of a log that do not belong to its session.
//!
//! Does not own which files these are (`log::foreign_files`).

use super::RestoreContext;
use super::options::Purpose;
use crate::error::{Error, Result};
use crate::log::assemble::FileAssembler;
use crate::log::foreign_files::{ForeignFiles, find_foreign_files};
use crate::model::LogId;

/// Checks every file of log `id`. Removes files that no transcript names any more, and the files of a
/// copy that do not belong to the log.
pub(super) fn check_files(
    context: &RestoreContext,
    id: &LogId,
    assembler: &mut FileAssembler<'_>,
    purpose: Purpose,
) -> Result<()> {
    let found = find_foreign_files(&*context.profile, &*context.directory, id, assembler);
    let ForeignFiles { foreign, unnamed } =
        found.map_err(|cause| Error::io(format!("read the files of {id}"), cause))?;
    let agent = context.profile.name();
    if purpose == Purpose::Restore
        && let Some(path) = foreign.first()
    {
        return Err(Error::corrupt(format!(
            "{path} is not a file of {id} according to the profile of agent {agent}"
        )));
    }
    // No transcript names, for example, a file of the project that the session has left.
    for path in foreign.into_iter().chain(unnamed) {
        tracing::warn!(%path, session = %id.name, "the file is left out, because it is not a file of the session according to the profile of agent {agent}");
        assembler.forget(&path);
    }
    Ok(())
}
