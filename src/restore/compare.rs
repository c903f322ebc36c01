//! Compares a restored file with the local file in its place.

use std::io::{ErrorKind, Result};

use super::options::{Options, RestoreContext};
use super::repair;
use crate::log::assemble::StagedFile;
use crate::log::ledger::{FileCursor, Ledger};
use crate::model::{FileKind, FileState, RelPath};
use crate::sys::lines::complete_lines_len;

/// A restored file and the local file in its place.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The length of the restored file.
    pub len: u64,
    /// Number of bytes of a partial line that stay in the log.
    pub partial_line_bytes: u64,
    /// The local file, if there is one.
    pub local: Option<LocalFile>,
    /// The cursor after the stored bytes of the local file, if it starts with them.
    pub cursor: Option<FileCursor>,
}

/// A local file relative to the stored one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LocalFile {
    /// Length of the local file.
    pub size: u64,
    /// Both are equal.
    pub is_equal: bool,
    /// The local file is a longer version of the stored one.
    pub is_longer: bool,
    /// The local file is a shorter version of the stored one.
    pub is_shorter: bool,
    /// According to the ledger, the log holds exactly these bytes.
    pub is_uploaded: bool,
}

impl LocalFile {
    /// Whether the local file starts with the stored one.
    pub fn continues_stored(&self) -> bool {
        self.is_equal || self.is_longer
    }

    /// Whether the log holds all bytes of the local file.
    pub fn is_stored(&self) -> bool {
        self.is_shorter || self.is_uploaded
    }
}

/// Compares a stored file with the local file at `local_path`.
pub fn compare(
    context: &RestoreContext,
    options: &Options,
    local_path: &RelPath,
    stored: (&FileState, &StagedFile),
    ledger: Option<&Ledger>,
) -> Result<Comparison> {
    let (state, staged) = stored;
    let directory = &*context.directory;
    let stored = directory.open(&staged.path())?.ok_or(ErrorKind::NotFound)?;
    // A copy for debugging is the log as it is. An agent gets complete lines.
    let len = match state.kind {
        FileKind::Append if options.claim => {
            let lines = complete_lines_len(&*stored, state.len)?;
            // A record that lacks only its newline can be repaired.
            if options.repair && repair::ends_with_record(&*stored, lines, state.len)? {
                state.len
            } else {
                lines
            }
        }
        _ => state.len,
    };
    let mut comparison = Comparison {
        len,
        partial_line_bytes: state.len - len,
        local: None,
        cursor: None,
    };
    let Some(file) = directory.open(local_path)? else {
        return Ok(comparison);
    };
    let size = file.stat()?.size;
    let mut local = LocalFile {
        size,
        ..LocalFile::default()
    };
    let common = size.min(len);
    let local_cursor = FileCursor::read(&*file, state.kind, common)?;
    let stored_cursor = FileCursor::read(&*stored, state.kind, common)?;
    if let (Some(local_cursor), Some(stored_cursor)) = (local_cursor, stored_cursor)
        && local_cursor.hash == stored_cursor.hash
    {
        local.is_equal = size == len;
        local.is_longer = size > len;
        local.is_shorter = size < len;
        if size >= len {
            comparison.cursor = Some(local_cursor);
        }
    }
    let uploaded = ledger
        .and_then(|ledger| ledger.files.get(local_path))
        .filter(|uploaded| uploaded.len == size);
    if let Some(uploaded) = uploaded {
        local.is_uploaded = FileCursor::read(&*file, state.kind, size)?
            .is_some_and(|current| current.hash == uploaded.hash);
    }
    comparison.local = Some(local);
    Ok(comparison)
}
