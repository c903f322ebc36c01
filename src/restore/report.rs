//! The result of a restore.

use std::collections::BTreeMap;

use serde::Serialize;

use super::options::Options;
use super::plan::{FileAction, FilePlan};
use super::repair::RepairedFile;
use crate::codec::entry::EncodedEntry;
use crate::log::witness::LogRollback;
use crate::model::{LogId, RelPath, ToolCall};

/// A restored log.
#[derive(Debug)]
pub struct Restored {
    /// What was done.
    pub report: RestoreReport,
    /// The claim that was written, if there was one: a record for the index.
    pub claim: Option<EncodedEntry>,
}

/// What a restore did, or would do.
#[derive(Debug, Serialize)]
pub struct RestoreReport {
    /// The session ID, or `@` and the project.
    pub session: String,
    /// The entry that was restored.
    pub seq: u64,
    /// The last entry of the log.
    pub head: u64,
    /// The writer that owns the session now, if it was claimed.
    pub writer: Option<String>,
    /// Number of objects read.
    pub objects: usize,
    /// Number of bytes written.
    pub bytes: u64,
    /// Number of bytes that the log holds at the restored entry, without replaced files.
    pub log_bytes: u64,
    /// Number of bytes of kept files that the log does not hold yet.
    pub lag_bytes: u64,
    /// Each file and what was done with it.
    pub files: Vec<FilePlan>,
    /// Number of bytes after the point that stay in the log, by transcript.
    pub rewound_bytes: BTreeMap<RelPath, u64>,
    /// The tool calls that were pending at the end of the log.
    pub rewound_calls: Vec<ToolCall>,
    /// The transcripts that were repaired.
    pub repaired: Vec<RepairedFile>,
    /// The rollback of the log that the user accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_rollback: Option<LogRollback>,
    /// Whether nothing was changed because of `--dry-run`.
    pub dry_run: bool,
}

impl RestoreReport {
    /// A report of what is done with these files.
    pub(super) fn new(id: &LogId, files: Vec<FilePlan>, options: &Options) -> RestoreReport {
        RestoreReport {
            session: id.name.to_string(),
            seq: 0,
            head: 0,
            writer: None,
            objects: 0,
            bytes: files
                .iter()
                .filter(|file| file.action.is_write())
                .map(|file| file.bytes)
                .sum(),
            log_bytes: in_log(&files).map(|file| file.log_bytes).sum(),
            lag_bytes: files.iter().map(|file| file.lag_bytes).sum(),
            files,
            rewound_bytes: BTreeMap::new(),
            rewound_calls: Vec::new(),
            repaired: Vec::new(),
            accepted_rollback: None,
            dry_run: options.dry_run,
        }
    }

    /// Number of files written.
    pub fn written(&self) -> usize {
        let written = self.files.iter().filter(|file| file.action.is_write());
        written.count()
    }

    /// Number of files with this action.
    pub fn count(&self, action: FileAction) -> usize {
        let files = self.files.iter().filter(|file| file.action == action);
        files.count()
    }

    /// Number of bytes of partial lines that stay in the log.
    pub fn partial_line_bytes(&self) -> u64 {
        in_log(&self.files)
            .map(|file| file.partial_line_bytes)
            .sum()
    }

    /// Number of files that the log holds, without replaced ones.
    pub fn log_files(&self) -> usize {
        in_log(&self.files).count()
    }

    /// Length of the files that are kept in their place.
    pub fn unchanged_bytes(&self) -> u64 {
        let unchanged = self
            .files
            .iter()
            .filter(|file| file.action == FileAction::Keep && !file.is_only_moved());
        unchanged.map(|file| file.bytes).sum()
    }
}

/// The files that the log holds: not those that a newer file replaced, and no second copies.
fn in_log(files: &[FilePlan]) -> impl Iterator<Item = &FilePlan> {
    files
        .iter()
        .filter(|file| !matches!(file.action, FileAction::Superseded | FileAction::Aside))
}
