//! Which files of a log belong to its session, by the rules of the agent's profile.
//!
//! A store is not trusted: a log must not be able to write the agent's settings, or a file of another
//! session. A restore rejects a log with such a file. A copy leaves the file out.

use std::collections::BTreeSet;
use std::io;

use super::RestoreContext;
use super::options::Purpose;
use crate::agent::{FileClass, SESSION_ID_SEARCH_BYTES, find_session_id};
use crate::error::{Error, Result};
use crate::log::assemble::FileAssembler;
use crate::model::{LogId, LogName, RelPath, SessionId};
use crate::sys::STATE_DIR;

/// Maximum length of a line of a transcript that is searched for the names of files.
const MAX_LINE_LEN: usize = 16 << 20;

/// Number of bytes read at a time.
const CHUNK: usize = 256 << 10;

/// Checks every file of log `id`. Removes files that no transcript names any more, and the files of a
/// copy that do not belong to the log.
pub(super) fn check_files(
    context: &RestoreContext,
    id: &LogId,
    assembler: &mut FileAssembler<'_>,
    purpose: Purpose,
) -> Result<()> {
    let (foreign, unnamed) = foreign_files(context, id, assembler)
        .map_err(|cause| Error::io(format!("read the files of {id}"), cause))?;
    let agent = context.profile.name();
    if purpose == Purpose::Restore
        && let Some(path) = foreign.first()
    {
        return Err(Error::corrupt(format!(
            "{path} is not a file of {id} according to the profile of agent {agent}"
        ))
        .hint(format!(
            "run \"sessiond pull {} --to DIR\" to fetch a copy without the file; nothing was changed",
            id.name
        )));
    }
    // No transcript names, for example, a file of the project that the session has left.
    for path in foreign.into_iter().chain(unnamed) {
        tracing::warn!(%path, session = %id.name, "the file is left out, because it is not a file of the session according to the profile of agent {agent}");
        assembler.forget(&path);
    }
    Ok(())
}

/// The files that do not belong to the log, and the files that belong to it only if a transcript
/// names them, which none does.
fn foreign_files(
    context: &RestoreContext,
    id: &LogId,
    assembler: &FileAssembler<'_>,
) -> io::Result<(Vec<RelPath>, BTreeSet<RelPath>)> {
    let (mut foreign, mut named) = (Vec::new(), BTreeSet::new());
    for (path, _, staged) in assembler.files() {
        let belongs = match context.profile.classify(path) {
            _ if path.components().next() == Some(STATE_DIR) => false,
            FileClass::Ignored => false,
            FileClass::Stored(name, _) => name == id.name,
            FileClass::SessionInContent(key, _, fallback) => {
                let start = read_start(context, &staged.path)?;
                let name =
                    find_session_id(&start, key).map(|id| LogName::Session(SessionId::escape(&id)));
                // The line that names the session may not be complete, and so not stored, yet.
                name.or(fallback).is_none_or(|name| name == id.name)
            }
            FileClass::NamedInTranscript(_) => {
                named.insert(path.clone());
                true
            }
        };
        if !belongs {
            foreign.push(path.clone());
        }
    }
    for (path, _, staged) in assembler.files() {
        if named.is_empty() {
            break;
        }
        if context.profile.has_messages(path) && !foreign.contains(path) {
            remove_named(context, path, &staged.path, &mut named)?;
        }
    }
    Ok((foreign, named))
}

fn read_start(context: &RestoreContext, staged: &RelPath) -> io::Result<Vec<u8>> {
    let mut start = vec![0; SESSION_ID_SEARCH_BYTES];
    let len = match context.directory.open(staged)? {
        Some(file) => file.read_at(&mut start, 0)?,
        None => 0,
    };
    start.truncate(len);
    Ok(start)
}

/// Removes the files that a transcript names. Stops reading when none is left.
fn remove_named(
    context: &RestoreContext,
    path: &RelPath,
    staged: &RelPath,
    named: &mut BTreeSet<RelPath>,
) -> io::Result<()> {
    let Some(file) = context.directory.open(staged)? else {
        return Ok(());
    };
    let (mut chunk, mut line, mut offset) = (vec![0; CHUNK], Vec::new(), 0);
    while !named.is_empty() {
        let len = file.read_at(&mut chunk, offset)?;
        if len == 0 {
            break;
        }
        offset += len as u64;
        for part in chunk[..len].split_inclusive(|byte| *byte == b'\n') {
            if line.len() < MAX_LINE_LEN {
                line.extend_from_slice(part);
            }
            if !part.ends_with(b"\n") {
                continue;
            }
            let parsed = context.profile.parse_line(path, &line);
            if let Some(file) = parsed.and_then(|parsed| parsed.named_file) {
                named.remove(&file);
            }
            line.clear();
        }
    }
    Ok(())
}
