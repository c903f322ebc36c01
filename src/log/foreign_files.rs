//! Which files of a log do not belong to its session, by the rules of the agent's profile.
//!
//! A store is not trusted: a log must not be able to write the agent's settings, or a file of another
//! session.

use std::collections::BTreeSet;
use std::io;

use crate::agent::{FileClass, Profile, SESSION_ID_SEARCH_BYTES, find_session_id};
use crate::log::assemble::FileAssembler;
use crate::model::{LogId, LogName, RelPath, SessionId};
use crate::sys::{Directory, STATE_DIR};

/// Maximum length of a line of a transcript that is searched for the names of files.
const MAX_LINE_LEN: usize = 16 << 20;

/// Number of bytes read at a time.
const CHUNK: usize = 256 << 10;

/// The files of a log that may not be restored.
#[derive(Debug, Default)]
pub struct ForeignFiles {
    /// Files that do not belong to the log.
    pub foreign: Vec<RelPath>,
    /// Files that would belong to the log if a transcript named them.
    pub unnamed: BTreeSet<RelPath>,
}

/// Finds the files of log `id` that may not be restored. `directory` holds the assembled files.
pub fn find_foreign_files(
    profile: &dyn Profile,
    directory: &dyn Directory,
    id: &LogId,
    assembler: &FileAssembler<'_>,
) -> io::Result<ForeignFiles> {
    let (mut foreign, mut named) = (Vec::new(), BTreeSet::new());
    for (path, _, staged) in assembler.files() {
        let belongs = match profile.classify(path) {
            _ if path.components().next() == Some(STATE_DIR) => false,
            FileClass::Ignored => false,
            FileClass::Stored(name, _) => name == id.name,
            FileClass::SessionInContent(key, _, fallback) => {
                let start = read_start(directory, &staged.path())?;
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
        if profile.has_messages(path) && !foreign.contains(path) {
            remove_named((profile, directory), path, &staged.path(), &mut named)?;
        }
    }
    Ok(ForeignFiles {
        foreign,
        unnamed: named,
    })
}

fn read_start(directory: &dyn Directory, staged: &RelPath) -> io::Result<Vec<u8>> {
    let mut start = vec![0; SESSION_ID_SEARCH_BYTES];
    let len = match directory.open(staged)? {
        Some(file) => file.read_at(&mut start, 0)?,
        None => 0,
    };
    start.truncate(len);
    Ok(start)
}

/// Removes the files that a transcript names. Stops reading when none is left.
fn remove_named(
    (profile, directory): (&dyn Profile, &dyn Directory),
    path: &RelPath,
    staged: &RelPath,
    named: &mut BTreeSet<RelPath>,
) -> io::Result<()> {
    let Some(file) = directory.open(staged)? else {
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
            let parsed = profile.parse_line(path, &line);
            if let Some(file) = parsed.and_then(|parsed| parsed.named_file) {
                named.remove(&file);
            }
            line.clear();
        }
    }
    Ok(())
}
