//! What is known of one log between flushes, and how that is told.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::flush::LogFlusher;
use crate::log::ledger::Ledger;
use crate::log::writer::WriteTarget;
use crate::model::{LogName, RelPath};
use crate::sys::{Backoff, Directory};

/// How a log stands.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct LogStatus {
    /// The session, or `@` and the project.
    pub session: String,
    /// The last number written.
    pub head: u64,
    /// Under which name we write.
    pub writer: String,
    /// `main`, `branch`, or `unclaimed`.
    pub target: String,
    /// Bytes on disk that are not durable yet.
    pub lag_bytes: u64,
    /// For how long.
    pub lag_seconds: f64,
    /// Bytes of an unfinished line.
    pub unfinished_bytes: u64,
    /// Bytes that are durable.
    pub durable_bytes: u64,
    /// What failed last, until it went well again.
    pub last_error: Option<String>,
    /// Which attempt that was.
    pub failed_attempts: u32,
}

impl LogStatus {
    /// Whether the session was lost to another writer.
    pub fn is_branch(&self) -> bool {
        self.target == "branch"
    }
}

/// What is known of one log between flushes.
pub(super) struct TrackedLog {
    pub(super) shipment: Option<LogFlusher>,
    pub(super) paths: BTreeSet<RelPath>,
    pub(super) seen: u64,
    /// Since when something is not durable.
    pub(super) dirty: Option<Instant>,
    pub(super) due: Option<Instant>,
    pub(super) flying: bool,
    /// It changed while a flush was under way.
    pub(super) again: bool,
    /// How many flushes have begun.
    pub(super) flushes: u64,
    pub(super) started: Option<Instant>,
    pub(super) backoff: Backoff,
    pub(super) status: LogStatus,
}

impl TrackedLog {
    pub(super) fn new(name: &LogName, backoff: Backoff) -> TrackedLog {
        let status = LogStatus {
            session: name.to_string(),
            head: 0,
            writer: String::new(),
            target: "unclaimed".to_owned(),
            lag_bytes: 0,
            lag_seconds: 0.0,
            unfinished_bytes: 0,
            durable_bytes: 0,
            last_error: None,
            failed_attempts: 0,
        };
        TrackedLog {
            shipment: None,
            paths: BTreeSet::new(),
            seen: 0,
            dirty: None,
            due: None,
            flying: false,
            again: false,
            flushes: 0,
            started: None,
            backoff,
            status,
        }
    }

    pub(super) fn note_ledger(&mut self, ledger: &Ledger) {
        self.status.head = ledger.log_writer.seq;
        self.status.writer = ledger.log_writer.writer.to_string();
        let target = match ledger.log_writer.target {
            WriteTarget::Main => "main",
            WriteTarget::Branch => "branch",
            WriteTarget::Unclaimed => "unclaimed",
        };
        self.status.target = target.to_owned();
        let here = self.paths.iter().filter_map(|path| ledger.files.get(path));
        self.status.durable_bytes = here.clone().map(|cursor| cursor.len).sum();
        self.status.unfinished_bytes = here.map(|cursor| cursor.torn).sum();
    }

    pub(super) fn report(&self, directory: &dyn Directory) -> LogStatus {
        let mut status = self.status.clone();
        if let Some((bytes, seconds)) = self.lag(directory) {
            (status.lag_bytes, status.lag_seconds) = (bytes, seconds);
        }
        status
    }

    /// Bytes that are not durable, and for how many seconds; none if all is.
    fn lag(&self, directory: &dyn Directory) -> Option<(u64, f64)> {
        let since = self.dirty?;
        let on_disk: u64 = self
            .paths
            .iter()
            .filter_map(|path| directory.stat(path).ok().flatten())
            .map(|stat| stat.size)
            .sum();
        let bytes = on_disk
            .saturating_sub(self.status.durable_bytes + self.status.unfinished_bytes)
            .max(1);
        Some((bytes, since.elapsed().as_secs_f64()))
    }
}

/// How all logs stand together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StreamSummary {
    /// Logs that are known.
    pub logs: usize,
    /// Those with something that is not durable.
    pub unflushed: usize,
    /// Those that were lost to another writer.
    pub fenced: usize,
    /// Files that are kept.
    pub files: usize,
    /// The most bytes that one log lags behind by.
    pub lag_max_bytes: u64,
    /// What all lag behind by.
    pub lag_sum_bytes: u64,
    /// For how long the oldest of it.
    pub lag_max_seconds: f64,
    /// For how long each, together.
    pub lag_sum_seconds: f64,
    /// Events of the file system cannot be relied on.
    pub scanning: bool,
}

impl StreamSummary {
    pub(super) fn of<'a>(
        slots: impl Iterator<Item = &'a TrackedLog>,
        directory: &dyn Directory,
        scanning: bool,
    ) -> StreamSummary {
        let mut all = StreamSummary {
            scanning,
            ..StreamSummary::default()
        };
        for slot in slots {
            all.logs += 1;
            all.files += slot.paths.len();
            all.fenced += usize::from(slot.status.is_branch());
            if let Some((bytes, seconds)) = slot.lag(directory) {
                all.unflushed += 1;
                all.lag_max_bytes = all.lag_max_bytes.max(bytes);
                all.lag_sum_bytes += bytes;
                all.lag_max_seconds = all.lag_max_seconds.max(seconds);
                all.lag_sum_seconds += seconds;
            }
        }
        all
    }
}
