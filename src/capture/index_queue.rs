//! The queue of entries and failures that the index has not recorded yet.
//!
//! Owns when the indexer records: many entries together, because a transaction costs the database
//! about as much for one entry as for a hundred. A database that is down for days must neither use up
//! memory nor delay a flush. When the queue is full, it keeps only the names of the logs, and the
//! indexer reads their entries from the store.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::index::{EntryRecord, Failure};
use crate::model::LogName;

/// Minimum time between two batches of entries. The first entry after a pause does not wait.
const BATCH_INTERVAL: Duration = Duration::from_secs(5);

/// Minimum time between two batches if a user has asked for a flush and may look at the index next.
const HURRIED_INTERVAL: Duration = Duration::from_secs(1);

/// A batch of this size does not wait: the entries of two seconds with hundreds of busy agents.
const LARGE_BATCH: Size = Size {
    entries: 500,
    items: 4096,
    raw_bytes: 2 << 20,
};

/// Maximum size of the queue.
const MAX_SIZE: Size = Size {
    entries: 4096,
    items: 8192,
    raw_bytes: 8 << 20,
};

/// Maximum number of failures in the queue. A new failure replaces the oldest one.
const MAX_FAILURES: usize = 100;

/// The size of queued entries.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    entries: usize,
    /// The number of their parts and messages: an entry can have thousands.
    items: usize,
    raw_bytes: u64,
}

impl Size {
    fn of(record: &EntryRecord) -> Size {
        Size {
            entries: 1,
            items: record.header.parts.len() + record.transcripts.messages.len(),
            raw_bytes: record.header.body_len(),
        }
    }

    fn plus(self, other: Size) -> Size {
        Size {
            entries: self.entries + other.entries,
            items: self.items + other.items,
            raw_bytes: self.raw_bytes.saturating_add(other.raw_bytes),
        }
    }

    fn exceeds(self, limit: Size) -> bool {
        self.entries > limit.entries || self.items > limit.items || self.raw_bytes > limit.raw_bytes
    }
}

/// One unit of work for the indexer.
#[derive(Debug)]
pub enum IndexTask {
    /// Record entries. Those of one log are in order.
    Entries(Vec<EntryRecord>),
    /// Read the log from the store, because the index may lack some of its entries.
    StaleLog(LogName),
    /// Record a failed flush.
    Failure(Failure),
}

/// How long entries wait for others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Urgency {
    #[default]
    Normal,
    /// A user has asked for a flush.
    Hurried,
    /// The process is about to end.
    Immediate,
}

#[derive(Default)]
struct Pending {
    entries: VecDeque<EntryRecord>,
    size: Size,
    stale_logs: BTreeSet<LogName>,
    /// The stale log that was read last. The others come first, so that one that fails again and
    /// again does not delay them.
    last_stale: Option<LogName>,
    failures: VecDeque<Failure>,
    /// Whether the indexer is working on a task.
    in_progress: bool,
    urgency: Urgency,
    last_batch: Option<Instant>,
    /// The number of running checks for entries that the index lacks.
    checks: usize,
}

impl Pending {
    /// The time of the next batch; none if it is due.
    fn next_batch(&self, now: Instant) -> Option<Instant> {
        let interval = match self.urgency {
            _ if self.size.exceeds(LARGE_BATCH) => return None,
            Urgency::Normal => BATCH_INTERVAL,
            Urgency::Hurried => HURRIED_INTERVAL,
            Urgency::Immediate => return None,
        };
        Some(self.last_batch? + interval).filter(|next| *next > now)
    }

    fn pop_entries(&mut self) -> Option<IndexTask> {
        if self.entries.is_empty() {
            return None;
        }
        self.size = Size::default();
        if self.urgency == Urgency::Hurried {
            self.urgency = Urgency::Normal;
        }
        Some(IndexTask::Entries(std::mem::take(&mut self.entries).into()))
    }

    /// The next task that is not a batch of entries.
    fn pop_other(&mut self) -> Option<IndexTask> {
        let after = self
            .last_stale
            .take()
            .map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.stale_logs.range((after, Bound::Unbounded)).next();
        if let Some(name) = next.or(self.stale_logs.first()).cloned() {
            self.stale_logs.remove(&name);
            self.last_stale = Some(name.clone());
            return Some(IndexTask::StaleLog(name));
        }
        self.failures.pop_front().map(IndexTask::Failure)
    }

    fn push_back(&mut self, record: EntryRecord) {
        // The indexer reads the entry from the store together with the others of a stale log.
        if self.stale_logs.contains(&record.log.name) {
            return;
        }
        let size = self.size.plus(Size::of(&record));
        if !self.entries.is_empty() && size.exceeds(MAX_SIZE) {
            self.stale_logs.insert(record.log.name);
        } else {
            self.size = size;
            self.entries.push_back(record);
        }
    }

    /// The number of entries and stale logs that the index does not have.
    fn backlog(&self) -> usize {
        self.entries.len() + self.stale_logs.len() + usize::from(self.in_progress)
    }
}

/// A bounded queue of work for the indexer.
#[derive(Default)]
pub struct IndexQueue {
    pending: Mutex<Pending>,
    pushed: Notify,
    idle: Notify,
}

/// A running check for entries that the index lacks.
pub struct StaleCheck(Arc<IndexQueue>);

impl Drop for StaleCheck {
    fn drop(&mut self) {
        self.0.lock().checks -= 1;
    }
}

/// What the indexer does next.
enum Next {
    Task(IndexTask),
    WaitUntil(Instant),
    WaitForPush,
}

impl IndexQueue {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an entry. If the queue is full, it adds the name of the log instead.
    pub fn push(&self, record: EntryRecord) {
        self.lock().push_back(record);
        self.pushed.notify_one();
    }

    /// Shortens the wait for the next batch, because a user has asked for a flush.
    pub fn hurry(&self) {
        self.raise_urgency(Urgency::Hurried);
    }

    fn raise_urgency(&self, urgency: Urgency) {
        let mut pending = self.lock();
        pending.urgency = pending.urgency.max(urgency);
        drop(pending);
        self.pushed.notify_one();
    }

    /// Adds a log of which the index may lack some entries.
    pub fn push_stale(&self, name: LogName) {
        self.lock().stale_logs.insert(name);
        self.pushed.notify_one();
    }

    /// Adds logs of which the index may lack some entries: all at once, so that the queue is not empty
    /// before all of them are indexed.
    pub fn push_all_stale(&self, names: Vec<LogName>) {
        self.lock().stale_logs.extend(names);
        self.pushed.notify_one();
    }

    /// Starts a check for entries that the index lacks. Until it ends, the index does not count as
    /// current.
    pub fn start_check(self: &Arc<Self>) -> StaleCheck {
        self.lock().checks += 1;
        StaleCheck(self.clone())
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
        let mut pending = self.lock();
        pending.pop_entries().or_else(|| pending.pop_other())
    }

    /// Waits for the next task. The previous task counts as finished.
    pub async fn next(&self) -> IndexTask {
        loop {
            let pushed = self.pushed.notified();
            match self.start_next(Instant::now()) {
                Next::Task(task) => return task,
                Next::WaitUntil(next) => {
                    tokio::select! {
                        () = pushed => {}
                        () = sleep_until(next) => {}
                    }
                }
                Next::WaitForPush => {
                    self.idle.notify_waiters();
                    pushed.await;
                }
            }
        }
    }

    fn start_next(&self, now: Instant) -> Next {
        let mut pending = self.lock();
        let next_batch = pending.next_batch(now);
        let task = match next_batch {
            None => pending.pop_entries(),
            Some(_) => None,
        };
        if task.is_some() {
            pending.last_batch = Some(now);
        }
        let task = task.or_else(|| pending.pop_other());
        pending.in_progress = task.is_some();
        match (task, next_batch) {
            (Some(task), _) => Next::Task(task),
            (None, Some(next)) if !pending.entries.is_empty() => Next::WaitUntil(next),
            (None, _) => Next::WaitForPush,
        }
    }

    /// Puts back a task that failed. Entries that the index rejected are not recorded again: the
    /// indexer reads each of their logs from the store.
    pub fn retry(&self, task: IndexTask, is_rejected: bool) {
        match task {
            IndexTask::Entries(records) if is_rejected => {
                let names = records.into_iter().map(|record| record.log.name);
                self.lock().stale_logs.extend(names);
            }
            IndexTask::Entries(records) => {
                let mut pending = self.lock();
                let newer = std::mem::take(&mut pending.entries);
                pending.size = Size::default();
                // The indexer has its own delay after a failure.
                pending.last_batch = None;
                for record in records.into_iter().chain(newer) {
                    pending.push_back(record);
                }
            }
            IndexTask::StaleLog(name) => self.push_stale(name),
            IndexTask::Failure(failure) => self.push_failure(failure),
        }
        self.pushed.notify_one();
    }

    /// Waits until the indexer has finished all tasks, and lets no entry wait for others from now
    /// on.
    pub async fn wait_until_idle(&self) {
        self.raise_urgency(Urgency::Immediate);
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

    /// The number of entries and stale logs that the index does not have, and of running checks.
    pub fn backlog(&self) -> usize {
        let pending = self.lock();
        pending.backlog() + pending.checks
    }

    /// Whether all tasks are finished.
    pub fn is_idle(&self) -> bool {
        self.unfinished() == 0
    }

    /// Whether all tasks but entries that wait for others are finished.
    pub fn is_waiting_for_entries(&self) -> bool {
        let pending = self.lock();
        !pending.in_progress && pending.stale_logs.is_empty() && pending.failures.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Digest, EntryHeader, EntryKind, LogId, ParsedTranscripts};

    fn record(session: &str, seq: u64) -> EntryRecord {
        let log = LogId {
            namespace: "team".parse().unwrap(),
            agent: "claude-code".parse().unwrap(),
            name: session.parse().unwrap(),
        };
        EntryRecord {
            branch: None,
            header: EntryHeader {
                version: 1,
                kind: EntryKind::Claim,
                namespace: log.namespace.clone(),
                agent: log.agent.clone(),
                session: log.name.clone(),
                seq,
                writer: "w1".parse().unwrap(),
                at: jiff::Timestamp::UNIX_EPOCH,
                prev_digest: None,
                prev_seq: None,
                covers: None,
                moves: Vec::new(),
                parts: Vec::new(),
                checkpoints: Vec::new(),
                keep_checkpoints: None,
                fork: None,
                rollback_to: None,
                rollback_checkpoint: None,
                adopted: Vec::new(),
            },
            stored_bytes: 1,
            digest: Digest::of(b""),
            transcripts: ParsedTranscripts::default(),
            log,
        }
    }

    #[test]
    fn the_index_is_not_current_while_missing_entries_are_searched() {
        let queue = Arc::new(IndexQueue::default());
        let check = queue.start_check();
        assert_eq!((queue.backlog(), queue.is_idle()), (1, true));
        queue.push_all_stale(vec!["s1".parse().unwrap(), "@project".parse().unwrap()]);
        drop(check);
        assert_eq!((queue.backlog(), queue.is_idle()), (2, false));
    }

    /// The number of entries in the next batch, and the seconds until it was due.
    async fn next_batch(queue: &IndexQueue) -> (usize, u64) {
        let began = Instant::now();
        match queue.next().await {
            IndexTask::Entries(records) => (records.len(), began.elapsed().as_secs()),
            other => panic!("{other:?}"),
        }
    }

    fn push(queue: &IndexQueue, count: u64) {
        (0..count).for_each(|seq| queue.push(record("s1", seq + 1)));
    }

    #[tokio::test(start_paused = true)]
    async fn entries_wait_for_others_but_not_the_first_after_a_pause() {
        let queue = IndexQueue::default();
        push(&queue, 1);
        assert_eq!(next_batch(&queue).await, (1, 0));
        push(&queue, 3);
        assert_eq!(next_batch(&queue).await, (3, 5));
        tokio::time::sleep(Duration::from_secs(60)).await;
        push(&queue, 2);
        assert_eq!(next_batch(&queue).await, (2, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_flush_shortens_the_wait_once() {
        let queue = IndexQueue::default();
        push(&queue, 1);
        next_batch(&queue).await;
        push(&queue, 1);
        queue.hurry();
        assert_eq!(next_batch(&queue).await, (1, 1));
        push(&queue, 1);
        assert_eq!(next_batch(&queue).await, (1, 5));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_waits_at_the_end_or_in_a_large_batch() {
        let queue = IndexQueue::default();
        push(&queue, 1);
        next_batch(&queue).await;
        push(&queue, 501);
        assert_eq!(next_batch(&queue).await, (501, 0));
        push(&queue, 1);
        let finish = async {
            let batch = next_batch(&queue).await;
            tokio::select! {
                _ = queue.next() => panic!("the queue is empty"),
                () = tokio::time::sleep(Duration::from_secs(1)) => batch,
            }
        };
        let (batch, ()) = tokio::join!(finish, queue.wait_until_idle());
        assert_eq!(batch, (1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_keeps_only_the_names_of_the_logs() {
        let queue = IndexQueue::default();
        push(&queue, 4096);
        queue.push(record("s2", 1));
        queue.push(record("s2", 2));
        assert_eq!(next_batch(&queue).await.0, 4096);
        let next = queue.next().await;
        assert!(matches!(&next, IndexTask::StaleLog(name) if name.to_string() == "s2"));
        assert_eq!(queue.unfinished(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn entries_are_kept_in_order_until_the_database_is_back() {
        let queue = IndexQueue::default();
        push(&queue, 2);
        let task = queue.next().await;
        queue.push(record("s1", 3));
        queue.retry(task, false);
        let IndexTask::Entries(records) = queue.next().await else {
            panic!("no entries")
        };
        let order: Vec<u64> = records.iter().map(|record| record.header.seq).collect();
        assert_eq!(order, [1, 2, 3]);
        queue.retry(IndexTask::Entries(records), true);
        let next = queue.next().await;
        assert!(matches!(&next, IndexTask::StaleLog(name) if name.to_string() == "s1"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_log_that_fails_does_not_delay_the_others() {
        let queue = IndexQueue::default();
        for name in ["a", "b", "c"] {
            queue.push_stale(name.parse().unwrap());
        }
        let mut read = String::new();
        for _ in 0..4 {
            let task = queue.next().await;
            let IndexTask::StaleLog(name) = &task else {
                panic!("{task:?}")
            };
            read += &name.to_string();
            if name.to_string() == "a" {
                queue.retry(task, true);
            }
        }
        assert_eq!(read, "abca");
    }
}
