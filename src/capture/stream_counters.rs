//! The counters of the streamer: entries, branches and flushes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::{Notify, watch};

use super::flush::FlushOutcome;
use crate::error::{ErrorKind, Result};
use crate::index::EntryRecord;
use crate::model::{LogName, WriterId};
use crate::sys::{Counters, Operation};

/// Counts what the streamer does.
#[derive(Default)]
pub struct StreamCounters {
    counters: Arc<Counters>,
    /// The branches to which this process has appended.
    branches: watch::Sender<BTreeSet<(LogName, WriterId)>>,
    /// Notified after each scan of the root.
    scans: Notify,
}

impl StreamCounters {
    /// Adds to the counters of the process.
    pub fn new(counters: Arc<Counters>) -> StreamCounters {
        StreamCounters {
            counters,
            branches: watch::Sender::default(),
            scans: Notify::new(),
        }
    }

    /// The branches to which this process has appended: each belongs to a session that another
    /// writer owns.
    pub fn branches(&self) -> watch::Receiver<BTreeSet<(LogName, WriterId)>> {
        self.branches.subscribe()
    }

    /// Waits for the end of the next scan of the root, or returns if one ended since the last call.
    pub async fn wait_for_scan(&self) {
        self.scans.notified().await;
    }

    /// Records the end of a scan.
    pub(super) fn scan_ended(&self) {
        self.scans.notify_one();
    }

    /// Counts an appended entry.
    pub(super) fn entry_appended(&self, record: &EntryRecord) {
        let is_new_branch = record.branch.as_ref().is_some_and(|writer| {
            let branch = (record.log.name.clone(), writer.clone());
            self.branches
                .send_if_modified(|branches| branches.insert(branch))
        });
        self.counters
            .record_entry(record.header.body_len(), record.stored_bytes);
        if is_new_branch {
            self.counters.record_branch();
        }
    }

    /// Counts a flush. A flush that found nothing to write does not count.
    pub(super) fn flush_ended(
        &self,
        result: &Result<FlushOutcome>,
        duration: Duration,
        now: Timestamp,
    ) {
        match result {
            Ok(outcome) if outcome.entries > 0 => self.counters.record_flush(duration, now),
            Ok(_) => {}
            Err(error) => self.flush_failed(error.kind()),
        }
    }

    /// Counts an error of a flush.
    pub(super) fn flush_failed(&self, kind: ErrorKind) {
        self.counters.record_error(Operation::Flush, kind);
    }
}
