//! The streamer's knowledge about one log between flushes, and its status report.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::flush::LogFlusher;
use super::flush_state::FlushState;
use crate::log::ledger::{FileCursor, Ledger};
use crate::log::writer::WriteTarget;
use crate::model::{LogName, RelPath};
use crate::sys::Directory;

/// Maximum number of files whose current size a status includes. The status of a log with more files
/// has their size at the last scan, because a probe must not wait for a hundred thousand files.
const MAX_STATS: usize = 256;

/// The status of one log.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct LogStatus {
    /// The session ID, or `@` and the project.
    pub session: String,
    /// The `seq` of the last entry of this writer.
    pub head: u64,
    /// The ID of this writer.
    pub writer: String,
    /// Where this writer appends: `main`, `branch`, or `unclaimed`.
    pub write_target: String,
    /// Bytes on disk that are not durable yet.
    pub lag_bytes: u64,
    /// Age of the oldest change that is not durable yet, in seconds.
    pub lag_seconds: f64,
    /// Bytes after the last newline of the transcripts.
    pub partial_line_bytes: u64,
    /// Bytes that are durable.
    pub durable_bytes: u64,
    /// The error of the last flush, if it failed.
    pub last_error: Option<String>,
    /// The number of consecutive failures.
    pub failed_attempts: u32,
}

impl LogStatus {
    fn new(name: &LogName) -> LogStatus {
        LogStatus {
            session: name.to_string(),
            head: 0,
            writer: String::new(),
            write_target: "unclaimed".to_owned(),
            lag_bytes: 0,
            lag_seconds: 0.0,
            partial_line_bytes: 0,
            durable_bytes: 0,
            last_error: None,
            failed_attempts: 0,
        }
    }

    /// Whether another writer took the session over, or the local files differ from it.
    pub fn is_branch(&self) -> bool {
        self.write_target == "branch"
    }
}

/// The streamer's knowledge about one log.
pub(super) struct TrackedLog {
    pub(super) state: FlushState,
    /// The number of flushes that this process has started.
    pub(super) flushes_started: u64,
    /// The flusher, unless it is running or unloaded.
    pub(super) flusher: Option<LogFlusher>,
    /// The known files.
    pub(super) paths: BTreeSet<RelPath>,
    /// Whether the next flush writes a large entry.
    pub(super) is_large: bool,
    /// The size of the files at the last scan.
    pub(super) scanned_bytes: u64,
    /// The fingerprint of the files at the last flush; 0 if they must be read again.
    pub(super) fingerprint: u64,
    /// The last known status. Its lag is computed on request.
    pub(super) status: LogStatus,
}

impl TrackedLog {
    pub(super) fn new(name: &LogName) -> TrackedLog {
        TrackedLog {
            state: FlushState::NEW,
            flushes_started: 0,
            flusher: None,
            paths: BTreeSet::new(),
            is_large: false,
            scanned_bytes: 0,
            fingerprint: 0,
            status: LogStatus::new(name),
        }
    }

    /// Discards everything but the flush state, because only the ledger is authoritative from now
    /// on.
    pub(super) fn reset(&mut self, name: &LogName) {
        *self = TrackedLog {
            state: self.state,
            flushes_started: self.flushes_started,
            ..TrackedLog::new(name)
        };
    }

    pub(super) fn update_from_ledger(&mut self, ledger: &Ledger) {
        self.update_writer(ledger);
        let cursors = self.paths.iter().filter_map(|path| ledger.files.get(path));
        self.status.durable_bytes = cursors.clone().map(FileCursor::durable_len).sum();
        self.status.partial_line_bytes = cursors.map(|cursor| cursor.partial_line_bytes).sum();
    }

    pub(super) fn update_writer(&mut self, ledger: &Ledger) {
        self.status.head = ledger.log_writer.seq;
        self.status.writer = ledger.log_writer.writer.to_string();
        let write_target = match ledger.log_writer.target {
            WriteTarget::Main => "main",
            WriteTarget::Branch => "branch",
            WriteTarget::Unclaimed => "unclaimed",
        };
        self.status.write_target = write_target.to_owned();
    }

    /// The current status.
    pub(super) fn status(&self, directory: &dyn Directory) -> LogStatus {
        let mut status = self.status.clone();
        if let Some((bytes, seconds)) = self.lag(directory) {
            (status.lag_bytes, status.lag_seconds) = (bytes, seconds);
        }
        status
    }

    /// The bytes that are not durable, and the age of the oldest change in seconds. `None` if
    /// everything is durable.
    fn lag(&self, directory: &dyn Directory) -> Option<(u64, f64)> {
        let since = self.state.unsaved_since()?;
        let on_disk = if self.paths.len() > MAX_STATS {
            self.scanned_bytes
        } else {
            let stats = self.paths.iter();
            let stats = stats.filter_map(|path| directory.stat(path).ok().flatten());
            stats.map(|stat| stat.size).sum()
        };
        let bytes = on_disk
            .saturating_sub(self.status.durable_bytes + self.status.partial_line_bytes)
            .max(1);
        Some((bytes, since.elapsed().as_secs_f64()))
    }
}

/// The status of all logs together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StreamSummary {
    /// The number of known logs.
    pub logs: usize,
    /// The number of logs with changes that are not durable.
    pub unflushed: usize,
    /// The number of logs that continue on a branch.
    pub fenced: usize,
    /// The number of known files.
    pub files: usize,
    /// The largest lag of one log in bytes.
    pub lag_max_bytes: u64,
    /// The lag of all logs in bytes.
    pub lag_sum_bytes: u64,
    /// The largest lag of one log in seconds.
    pub lag_max_seconds: f64,
    /// The sum of the lag of all logs in seconds.
    pub lag_sum_seconds: f64,
    /// Whether file events are unreliable, so that the directory is scanned instead.
    pub is_watch_degraded: bool,
}

impl StreamSummary {
    pub(super) fn new<'a>(
        logs: impl Iterator<Item = &'a TrackedLog>,
        directory: &dyn Directory,
        is_watch_degraded: bool,
    ) -> StreamSummary {
        let mut summary = StreamSummary {
            is_watch_degraded,
            ..StreamSummary::default()
        };
        for log in logs {
            summary.logs += 1;
            summary.files += log.paths.len();
            summary.fenced += usize::from(log.status.is_branch());
            if let Some((bytes, seconds)) = log.lag(directory) {
                summary.unflushed += 1;
                summary.lag_max_bytes = summary.lag_max_bytes.max(bytes);
                summary.lag_sum_bytes += bytes;
                summary.lag_max_seconds = summary.lag_max_seconds.max(seconds);
                summary.lag_sum_seconds += seconds;
            }
        }
        summary
    }
}
