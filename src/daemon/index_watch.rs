//! Notices that the index lost entries that this process had recorded, and queues them again.
//!
//! The database file can be deleted, the database dropped and created again, or an old backup
//! restored, all under a running daemon. The next update creates the schema again, but brings only
//! its own log back. Owns the check. Does not own recording (`indexer`) or reconnecting (`index`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;

use super::indexer;
use crate::capture::tracked_log::LogStatus;
use crate::capture::{IndexQueue, StreamerHandle};
use crate::error::{ErrorKind, Result};
use crate::index::Index;
use crate::log::Logs;
use crate::model::{LogId, LogName, Seq};
use crate::sys::{Counters, Directory, Operation};
use crate::wire::Parts;

/// How often the index is checked: one lookup by primary key. `status` and `doctor` also check it.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum number of lookups until an indexed log is found.
const MAX_CANDIDATES: usize = 4;

/// Watches the index of a daemon.
pub struct IndexWatch {
    index: Arc<dyn Index>,
    logs: Logs,
    directory: Arc<dyn Directory>,
    handle: StreamerHandle,
    queue: Arc<IndexQueue>,
    counters: Arc<Counters>,
    reachable: Arc<AtomicBool>,
    /// A log that the index had, and its head then. If the index lacks it now, it lost entries.
    known: Mutex<Option<(LogId, Seq)>>,
    losses: AtomicU64,
}

impl IndexWatch {
    /// A watch of the index of `parts`.
    pub fn new(
        parts: &Parts,
        handle: StreamerHandle,
        queue: Arc<IndexQueue>,
        counters: Arc<Counters>,
        reachable: Arc<AtomicBool>,
    ) -> Result<IndexWatch> {
        Ok(IndexWatch {
            index: parts.index.clone(),
            logs: parts.logs.clone(),
            directory: parts.directory()?,
            handle,
            queue,
            counters,
            reachable,
            known: Mutex::default(),
            losses: AtomicU64::new(0),
        })
    }

    /// How often the index lost entries.
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }

    /// Checks the index at an interval, forever.
    pub async fn run(self: Arc<Self>) {
        let is_file = self.index.address().starts_with("sqlite:");
        let mut entries_at_check = 0;
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let entries = self.counters.entries.get();
            // An idle daemon sends no requests to a database, which many daemons share.
            if !is_file && entries == entries_at_check {
                continue;
            }
            entries_at_check = entries;
            // Under steady load, there are always entries that wait for others.
            if self.queue.is_waiting_for_entries() {
                self.check_now().await;
            }
        }
    }

    /// Checks the index once. The indexer reports errors while it works, and may be writing a log
    /// again; entries in its queue are not lost.
    pub async fn check(&self) {
        if self.queue.is_idle() {
            self.check_now().await;
        }
    }

    async fn check_now(&self) {
        if let Err(error) = self.look_up().await {
            if self.reachable.swap(false, Ordering::Relaxed) {
                tracing::warn!(%error, "the index is unreachable; streaming continues");
            }
            self.counters.record_error(Operation::Index, error.kind());
        }
    }

    async fn look_up(&self) -> Result<()> {
        let mut known = self.known.lock().await;
        let statuses = self.handle.status().await?;
        if let Some((log, head)) = known.clone() {
            let found = self.index.session(&log).await?;
            self.reachable.store(true, Ordering::Relaxed);
            if found.is_none_or(|row| row.head < head) {
                *known = None;
                let _check = self.queue.start_check();
                self.losses.fetch_add(1, Ordering::Relaxed);
                self.counters
                    .record_error(Operation::Index, ErrorKind::NotFound);
                tracing::warn!(
                    index = self.index.address(),
                    "the index lost entries, or was created again; sending them again"
                );
                return self.queue_all(&statuses).await;
            }
        }
        *known = self.find_indexed(&statuses).await?;
        Ok(())
    }

    async fn queue_all(&self, statuses: &[LogStatus]) -> Result<()> {
        let names: Vec<LogName> = statuses
            .iter()
            .filter_map(|status| status.session.parse().ok())
            .collect();
        let directory = &*self.directory;
        indexer::queue_stale_logs(&self.queue, &*self.index, &self.logs, directory, &names).await
    }

    /// A log of this daemon that the index has, and its head there. The index need not have all:
    /// sessions that were deleted still have local files.
    async fn find_indexed(&self, statuses: &[LogStatus]) -> Result<Option<(LogId, Seq)>> {
        let is_candidate = |status: &&LogStatus| status.head > 0 && status.write_target == "main";
        for status in statuses.iter().filter(is_candidate).take(MAX_CANDIDATES) {
            let Ok(name) = status.session.parse::<LogName>() else {
                continue;
            };
            let log = self.logs.id(name);
            let found = self.index.session(&log).await?;
            self.reachable.store(true, Ordering::Relaxed);
            // Newer entries may be on their way.
            if let Some(head) = found.map(|row| row.head).filter(|head| *head > 0) {
                return Ok(Some((log, head)));
            }
        }
        Ok(None)
    }
}
