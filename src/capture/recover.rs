//! Finds out where a log stands that no ledger here knows, and whether the local files go on from there.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::Context;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::ledger::{FileCursor, Ledger};
use crate::log::writer::{LogWriter, WriteTarget};
use crate::model::{EntryKind, FileKind, FileState, LogId, RelPath};
use crate::sys::clock::new_writer;
use crate::sys::{Directory, Operation};

/// Makes a ledger for a log that has none: behind the head if the local files equal or extend it, on a branch if not.
/// Nothing is claimed yet.
pub async fn adopt(context: &Context, id: &LogId) -> Result<Ledger> {
    let writer = new_writer(&context.logs.rng);
    let now = context.logs.clock.now();
    let state = match context.logs.read_state(id).await {
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Encrypted) => {
            tracing::error!(%error, %id, "the log cannot be read; the local files go to a branch");
            context.feed.counts().failed(Operation::Flush, error.kind());
            let log_writer = LogWriter {
                target: WriteTarget::Branch,
                ..LogWriter::unclaimed(writer, 0, None, now)
            };
            return Ok(Ledger::new(
                context.logs.store.address(),
                id.clone(),
                log_writer,
            ));
        }
        state => state.context("find out where the log stands")?,
    };
    // What was purged is gone for good; all that is here goes out anew.
    let digest = state
        .digest
        .filter(|_| state.removed != Some(EntryKind::Purge));
    let log_writer = LogWriter {
        seen: Some(Instant::now()),
        ..LogWriter::unclaimed(writer, state.seq, digest, now)
    };
    let mut ledger = Ledger::new(context.logs.store.address(), id.clone(), log_writer);
    let files = compare(&*context.directory, &state.files)
        .map_err(|cause| Error::io("compare the local files with the log", cause))?;
    match files {
        Some(files) => {
            ledger.files = files;
            ledger.turns = state.turns;
        }
        // Any writer may append to a project's log, whatever it had before.
        None if id.name.is_project() => {}
        // What was removed is in nobody's way: this is another conversation under the same id.
        None if state.removed.is_some() => ledger.log_writer.digest = None,
        None => {
            context
                .feed
                .counts()
                .failed(Operation::Flush, ErrorKind::Conflict);
            tracing::warn!(%id, head = state.seq, writer = %ledger.log_writer.writer, "the local files do not go on from the log; they go to a branch");
            ledger.log_writer = LogWriter {
                target: WriteTarget::Branch,
                seq: 0,
                digest: None,
                ..ledger.log_writer
            };
        }
    }
    Ok(ledger)
}

/// The cursors of the local files, if they equal or extend the log; none if they are behind it or differ from it.
fn compare(
    directory: &dyn Directory,
    files: &BTreeMap<RelPath, FileState>,
) -> std::io::Result<Option<BTreeMap<RelPath, FileCursor>>> {
    let mut cursors = BTreeMap::new();
    let appends = files
        .iter()
        .filter(|(_, file)| file.kind == FileKind::Append);
    // The file that was written last must be here; an older one may have been cleaned up by the agent.
    let newest = appends.clone().map(|(_, file)| file.seq).max();
    let mut newest_is_here = newest.is_none();
    for (path, at) in files {
        let Some(file) = directory.open(path)? else {
            continue;
        };
        let cursor = FileCursor::over(&*file, at.kind, at.len)?
            .filter(|cursor| cursor.hash.digest() == at.sha256);
        match cursor {
            Some(mut cursor) => {
                newest_is_here |= Some(at.seq) == newest && at.kind == FileKind::Append;
                // The next look compares what the file system says with this and ships what was appended.
                cursor.stat.size = at.len;
                cursors.insert(path.clone(), cursor);
            }
            None if at.kind == FileKind::Append => return Ok(None),
            None if newest.is_none() => return Ok(None),
            // A side file was replaced; the next look ships it.
            None => {}
        }
    }
    Ok((newest_is_here || files.is_empty()).then_some(cursors))
}
