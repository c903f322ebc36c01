//! The queue of entries and failures that the index has not recorded yet.
//!
//! A database that is down for days must neither use up memory nor delay a flush. When the queue is
//! full, it keeps only the names of the logs, and the indexer reads their entries from the store.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::index::{EntryRecord, Failure};
use crate::model::LogName;

/// Maximum number of entries in the queue: the entries of one or two seconds with many busy agents.
const MAX_ENTRIES: usize = 256;
/// Maximum number of parts and messages of the entries in the queue: an entry can have thousands.
const MAX_ITEMS: usize = 8192;
/// Maximum number of failures in the queue. A new failure replaces the oldest one.
const MAX_FAILURES: usize = 100;

/// One unit of work for the indexer.
#[derive(Debug)]
pub enum IndexTask {
    /// Record an entry.
    Entry(Box<EntryRecord>),
    /// Read the log from the store, because the index may lack some of its entries.
    StaleLog(LogName),
    /// Record a failed flush.
    Failure(Failure),
}

#[derive(Default)]
struct Pending {
    entries: VecDeque<EntryRecord>,
    /// The number of their parts and messages.
    items: usize,
    stale_logs: BTreeSet<LogName>,
    failures: VecDeque<Failure>,
    /// Whether the indexer is working on a task.
    in_progress: bool,
}

impl Pending {
    fn pop(&mut self) -> Option<IndexTask> {
        if let Some(record) = self.entries.pop_front() {
            self.items = self.items.saturating_sub(items(&record));
            return Some(IndexTask::Entry(Box::new(record)));
        }
        if let Some(name) = self.stale_logs.pop_first() {
            return Some(IndexTask::StaleLog(name));
        }
        self.failures.pop_front().map(IndexTask::Failure)
    }

    /// The number of entries and stale logs that the index does not have.
    fn backlog(&self) -> usize {
        self.entries.len() + self.stale_logs.len() + usize::from(self.in_progress)
    }
}

fn items(record: &EntryRecord) -> usize {
    record.header.parts.len() + record.transcripts.messages.len()
}

/// A bounded queue of work for the indexer.
#[derive(Default)]
pub struct IndexQueue {
    pending: Mutex<Pending>,
    pushed: Notify,
    idle: Notify,
}

impl IndexQueue {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an entry. If the queue is full, it adds the name of the log instead.
    pub fn push(&self, record: EntryRecord) {
        let mut pending = self.lock();
        // The indexer reads the entry from the store together with the others of a stale log.
        if !pending.stale_logs.contains(&record.log.name) {
            let items = pending.items + items(&record);
            let fits = pending.entries.len() < MAX_ENTRIES && items <= MAX_ITEMS;
            if fits || pending.entries.is_empty() {
                pending.items = items;
                pending.entries.push_back(record);
            } else {
                pending.stale_logs.insert(record.log.name);
            }
        }
        drop(pending);
        self.pushed.notify_one();
    }

    /// Adds a log of which the index may lack some entries.
    pub fn push_stale(&self, name: LogName) {
        self.lock().stale_logs.insert(name);
        self.pushed.notify_one();
    }

    /// Adds a failed flush.
    pub fn push_failure(&self, failure: Failure) {
        let mut pending = self.lock();
        if pending.failures.len() == MAX_FAILURES {
            pending.failures.pop_front();
        }
        pending.failures.push_back(failure);
        drop(pending);
        self.pushed.notify_one();
    }

    /// Returns the next task without waiting.
    pub fn try_next(&self) -> Option<IndexTask> {
        self.lock().pop()
    }

    /// Waits for the next task. The previous task counts as finished.
    pub async fn next(&self) -> IndexTask {
        loop {
            let pushed = self.pushed.notified();
            if let Some(task) = self.start_next() {
                return task;
            }
            self.idle.notify_waiters();
            pushed.await;
        }
    }

    fn start_next(&self) -> Option<IndexTask> {
        let mut pending = self.lock();
        let task = pending.pop();
        pending.in_progress = task.is_some();
        task
    }

    /// Puts back a task that failed. For an entry, only the name of its log is kept.
    pub fn retry(&self, task: IndexTask) {
        match task {
            IndexTask::Entry(record) => self.push_stale(record.log.name),
            IndexTask::StaleLog(name) => self.push_stale(name),
            IndexTask::Failure(failure) => self.push_failure(failure),
        }
    }

    /// Waits until the indexer has finished all tasks.
    pub async fn wait_until_idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.is_idle() {
                return;
            }
            idle.await;
        }
    }

    /// The number of unfinished tasks.
    pub fn unfinished(&self) -> usize {
        let pending = self.lock();
        pending.backlog() + pending.failures.len()
    }

    /// The number of entries and stale logs that the index does not have.
    pub fn backlog(&self) -> usize {
        self.lock().backlog()
    }

    /// Whether all tasks are finished.
    pub fn is_idle(&self) -> bool {
        self.unfinished() == 0
    }
}
