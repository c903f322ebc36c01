//! What others are to learn of what was written: the index, in a bounded queue that forgets records and never logs; and
//! who merges entries, the logs that have enough of them.
//!
//! A database that is down for days must not cost memory or hold up a flush: when the queue is full, only the names of
//! the logs are kept, and the index reads what it missed from the bucket.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::index::{Failure, Record};
use crate::log::schedule;
use crate::model::{LogName, Seq};

/// Records that wait for the index; a second or two of a busy fleet.
const MOST_RECORDS: usize = 256;
/// Failures that wait for the index, the newest.
const MOST_FAILURES: usize = 100;

/// One thing for the index.
#[derive(Debug)]
pub enum News {
    /// An entry was written.
    Entry(Box<Record>),
    /// A log has entries that the index may not know.
    Stale(LogName),
    /// Something failed.
    Failed(Failure),
}

#[derive(Default)]
struct Waiting {
    records: VecDeque<Record>,
    stale: BTreeSet<LogName>,
    failures: VecDeque<Failure>,
    /// The index is being told something.
    in_hand: bool,
}

impl Waiting {
    fn take(&mut self) -> Option<News> {
        if let Some(record) = self.records.pop_front() {
            return Some(News::Entry(Box::new(record)));
        }
        if let Some(name) = self.stale.pop_first() {
            return Some(News::Stale(name));
        }
        self.failures.pop_front().map(News::Failed)
    }

    fn take_in_hand(&mut self) -> Option<News> {
        let news = self.take();
        self.in_hand = news.is_some();
        news
    }
}

/// Logs that have grown.
#[derive(Default)]
struct Grown {
    /// The last entry that was written to each, by this process.
    heads: BTreeMap<LogName, Seq>,
    /// Those in which a run of entries is complete.
    due: BTreeMap<LogName, Seq>,
}

/// What others are to learn.
#[derive(Default)]
pub struct Feed {
    waiting: Mutex<Waiting>,
    arrived: Notify,
    grown: Mutex<Grown>,
    ripe: Notify,
}

impl Feed {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An entry was written.
    pub fn entry(&self, record: Record) {
        if record.branch.is_none() {
            self.grew(&record.log.name, record.header.seq);
        }
        let mut waiting = self.lock();
        let known_stale = waiting.stale.contains(&record.log.name);
        if !known_stale {
            if waiting.records.len() < MOST_RECORDS {
                waiting.records.push_back(record);
            } else {
                waiting.stale.insert(record.log.name);
            }
        }
        drop(waiting);
        self.arrived.notify_one();
    }

    fn grew(&self, name: &LogName, seq: Seq) {
        let mut grown = self.grown.lock().unwrap_or_else(PoisonError::into_inner);
        let before = grown.heads.insert(name.clone(), seq);
        // What an earlier process left undone is found at the first entry of this one.
        let first = before.is_none() && schedule::runs(seq).iter().any(|(from, to)| from < to);
        if first || (before.map_or(seq, |before| before + 1)..=seq).any(schedule::is_due) {
            grown.due.insert(name.clone(), seq);
            self.ripe.notify_one();
        }
    }

    /// Waits for a log in which a run of entries is complete, and its last entry.
    pub async fn ripe(&self) -> (LogName, Seq) {
        loop {
            let ripe = self.ripe.notified();
            if let Some(due) = self.grown.lock().unwrap_or_else(PoisonError::into_inner).due.pop_first() {
                return due;
            }
            ripe.await;
        }
    }

    /// That log was not seen to; it waits again.
    pub fn still_ripe(&self, name: LogName, seq: Seq) {
        self.grown.lock().unwrap_or_else(PoisonError::into_inner).due.entry(name).or_insert(seq);
        self.ripe.notify_one();
    }

    /// A log has entries that the index may not know.
    pub fn stale(&self, name: LogName) {
        self.lock().stale.insert(name);
        self.arrived.notify_one();
    }

    /// Something failed.
    pub fn failed(&self, failure: Failure) {
        let mut waiting = self.lock();
        if waiting.failures.len() == MOST_FAILURES {
            waiting.failures.pop_front();
        }
        waiting.failures.push_back(failure);
        drop(waiting);
        self.arrived.notify_one();
    }

    /// The next thing, if there is one.
    pub fn try_next(&self) -> Option<News> {
        self.lock().take()
    }

    /// Waits for the next thing. It counts as waiting until the one after it is asked for.
    pub async fn next(&self) -> News {
        loop {
            let arrived = self.arrived.notified();
            if let Some(news) = self.lock().take_in_hand() {
                return news;
            }
            arrived.await;
        }
    }

    /// Logs and failures that wait.
    pub fn len(&self) -> usize {
        let waiting = self.lock();
        waiting.records.len() + waiting.stale.len() + waiting.failures.len() + usize::from(waiting.in_hand)
    }

    /// Whether the index knows all there is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
