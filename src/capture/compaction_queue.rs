//! The queue of logs that have a complete run of entries to compact.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::log::schedule;
use crate::model::{LogName, Seq};

#[derive(Default)]
struct Pending {
    /// The last entry that this process appended to each log.
    heads: BTreeMap<LogName, Seq>,
    /// The logs to compact, and the last entry to include.
    due: BTreeMap<LogName, Seq>,
}

/// A queue of logs to compact.
#[derive(Default)]
pub struct CompactionQueue {
    pending: Mutex<Pending>,
    pushed: Notify,
}

impl CompactionQueue {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that entry `seq` was appended, and adds the log to the queue if a run of entries is
    /// complete.
    pub fn push(&self, name: &LogName, seq: Seq) {
        let mut pending = self.lock();
        let is_due = match pending.heads.insert(name.clone(), seq) {
            Some(previous) => (previous + 1..=seq).any(schedule::is_due),
            // An earlier process may have left runs that it did not compact.
            None => schedule::ranges(seq).iter().any(|(from, to)| from < to),
        };
        if is_due {
            pending.due.insert(name.clone(), seq);
            self.pushed.notify_one();
        }
    }

    /// Waits for a log to compact, and returns it with the last entry to include.
    pub async fn next(&self) -> (LogName, Seq) {
        loop {
            let pushed = self.pushed.notified();
            if let Some(due) = self.lock().due.pop_first() {
                return due;
            }
            pushed.await;
        }
    }

    /// Puts back a log whose compaction failed.
    pub fn retry(&self, name: LogName, seq: Seq) {
        self.lock().due.entry(name).or_insert(seq);
        self.pushed.notify_one();
    }
}
