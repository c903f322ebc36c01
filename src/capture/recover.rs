//! Ledger recovery: makes a ledger for a log that has none on this volume.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::CaptureContext;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::ledger::{FileCursor, Ledger};
use crate::log::writer::{LogWriter, WriteTarget};
use crate::model::{EntryKind, FileKind, FileState, LogId, RelPath};
use crate::store::Store;
use crate::sys::clock::new_writer_id;
use crate::sys::mutation::{Mutation, is_active};
use crate::sys::{Directory, blocking};

/// Makes a ledger from the log in the store. If the local files equal or extend the log, the writer
/// continues after its head, otherwise on a branch. Does not claim the log.
pub async fn recover_ledger(context: &CaptureContext, id: &LogId) -> Result<Ledger> {
    let writer = new_writer_id(&context.logs.rng);
    let now = context.logs.clock.now();
    let state = match context.logs.read_state(id).await {
        Err(error) if error.kind() == ErrorKind::Corrupt || error.kind().is_unreadable() => {
            tracing::error!(%error, session = %id.name, "reading the log failed; uploading the local files to a branch");
            context.counters.flush_failed(error.kind());
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
        state => state.context("read the state of the log")?,
    };
    // Nothing of a purged session remains, so its next entry has no predecessor.
    let digest = state
        .digest
        .filter(|_| state.removed != Some(EntryKind::Purge));
    let log_writer = LogWriter {
        confirmed_instant: Some(Instant::now()),
        ..LogWriter::unclaimed(writer, state.seq, digest, now)
    };
    let mut ledger = Ledger::new(context.logs.store.address(), id.clone(), log_writer);
    let cursors = blocking(|| match_local_files(&*context.directory, &state.files))
        .map_err(|cause| Error::io("compare the local files with the log", cause))?
        .or_else(|| is_active(Mutation::ClaimWithoutComparison).then(BTreeMap::new));
    match cursors {
        Some(cursors) => {
            ledger.files = cursors;
            ledger.turns = state.turns;
        }
        // Any writer may append to a project's log, even if its local files differ.
        None if id.name.is_project() => {}
        // The local files belong to another conversation, which reuses the ID of a removed session.
        None if state.removed.is_some() => ledger.log_writer.digest = None,
        None => {
            context.counters.flush_failed(ErrorKind::Conflict);
            tracing::warn!(session = %id.name, head = state.seq, writer = %ledger.log_writer.writer, "the local files differ from the log; continuing on a branch");
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

/// Returns the cursors of the local files if they equal or extend the log.
fn match_local_files(
    directory: &dyn Directory,
    files: &BTreeMap<RelPath, FileState>,
) -> std::io::Result<Option<BTreeMap<RelPath, FileCursor>>> {
    let mut cursors = BTreeMap::new();
    // The transcript that was written last must exist; the agent may have deleted an older one.
    let last_seq = files
        .values()
        .filter(|stored| stored.kind == FileKind::Append)
        .map(|stored| stored.seq)
        .max();
    let mut has_last_transcript = last_seq.is_none();
    for (path, stored) in files {
        let Some(file) = directory.open(path)? else {
            continue;
        };
        let cursor = FileCursor::read(&*file, stored.kind, stored.len)?
            .filter(|cursor| cursor.hash.digest() == stored.sha256);
        match cursor {
            Some(mut cursor) => {
                has_last_transcript |=
                    Some(stored.seq) == last_seq && stored.kind == FileKind::Append;
                // With the stored size, the next change detection finds the appended bytes.
                cursor.stat.size = stored.len;
                cursor.settle();
                cursors.insert(path.clone(), cursor);
            }
            None if stored.kind == FileKind::Append => return Ok(None),
            None if last_seq.is_none() => return Ok(None),
            // A side file was replaced; the next flush uploads it.
            None => {}
        }
    }
    Ok((has_last_transcript || files.is_empty()).then_some(cursors))
}
