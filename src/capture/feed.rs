//! What others are to learn of what was written: the index, in a bounded queue that forgets records and never logs; and
//! who merges entries, the logs that have enough of them; and who says something of each session that is written to, which
//! those are; and who counts.
//!
//! A database that is down for days must not cost memory or hold up a flush: when the queue is full, only the names of
//! the logs are kept, and the index reads what it missed from the bucket.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::Notify;

use super::flush::FlushOutcome;
use crate::error::Result;
use crate::index::{EntryRecord, Failure};
use crate::log::schedule;
use crate::model::{LogName, Seq, WriterId};
use crate::sys::{Counters, Operation};

/// Records that wait for the index; a second or two of a busy fleet.
const MOST_RECORDS: usize = 256;
/// Failures that wait for the index, the newest.
const MOST_FAILURES: usize = 100;

/// One thing for the index.
#[derive(Debug)]
pub enum News {
    /// An entry was written.
    Entry(Box<EntryRecord>),
    /// A log has entries that the index may not know.
    Stale(LogName),
    /// Something failed.
    Failed(Failure),
}

#[derive(Default)]
struct Waiting {
    records: VecDeque<EntryRecord>,
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
    /// Something is to be said of each session.
    says: bool,
    /// Those of which it was not said yet.
    unsaid: BTreeSet<LogName>,
    /// It is being said of one.
    saying: bool,
    /// The branches that were written to, by this process.
    branches: BTreeSet<(LogName, WriterId)>,
}

/// What others are to learn.
#[derive(Default)]
pub struct Feed {
    waiting: Mutex<Waiting>,
    arrived: Notify,
    emptied: Notify,
    grown: Mutex<Grown>,
    ripe: Notify,
    to_say: Notify,
    counts: Arc<Counters>,
}

impl Feed {
    /// One that counts here what happens.
    pub fn counting(counts: Arc<Counters>) -> Feed {
        Feed {
            counts,
            ..Feed::default()
        }
    }

    /// What has happened so far.
    pub fn counts(&self) -> &Counters {
        &self.counts
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An entry was written.
    pub fn entry(&self, record: EntryRecord) {
        let branched = match &record.branch {
            None => {
                self.grew(&record.log.name, record.header.seq);
                false
            }
            Some(writer) => self
                .grown()
                .branches
                .insert((record.log.name.clone(), writer.clone())),
        };
        self.counts.note(|tally| {
            tally.entries += 1;
            tally.raw += record.header.body_len();
            tally.stored += record.stored;
            tally.branches += u64::from(branched);
        });
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

    /// A flush has ended.
    pub(super) fn flushed(&self, result: &Result<FlushOutcome>, took: Duration, now: Timestamp) {
        match result {
            Ok(shipped) if shipped.entries > 0 => self.counts.note(|tally| {
                tally.flushes += 1;
                tally.flush_times.add(took);
                tally.flushed_at = Some(now);
            }),
            // A look that found nothing is no flush.
            Ok(_) => {}
            Err(error) => self.counts.failed(Operation::Flush, error.kind()),
        }
    }

    fn grew(&self, name: &LogName, seq: Seq) {
        let mut grown = self.grown();
        let before = grown.heads.insert(name.clone(), seq);
        if before.is_none() && grown.says && !name.is_project() {
            grown.unsaid.insert(name.clone());
            self.to_say.notify_one();
        }
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
            if let Some(due) = self.grown().due.pop_first() {
                return due;
            }
            ripe.await;
        }
    }

    /// That log was not seen to; it waits again.
    pub fn still_ripe(&self, name: LogName, seq: Seq) {
        self.grown().due.entry(name).or_insert(seq);
        self.ripe.notify_one();
    }

    /// From now on something is to be said of each session that is written to for the first time.
    pub fn say_of_each(&self) {
        self.grown().says = true;
    }

    /// Waits for a session of which it was not said yet. It counts as unsaid until the one after it is asked for.
    pub async fn unsaid(&self) -> LogName {
        self.grown().saying = false;
        loop {
            let arrived = self.to_say.notified();
            {
                let mut grown = self.grown();
                if let Some(name) = grown.unsaid.pop_first() {
                    grown.saying = true;
                    return name;
                }
            }
            arrived.await;
        }
    }

    /// It was not said of that session; it waits again.
    pub fn still_unsaid(&self, name: LogName) {
        self.grown().unsaid.insert(name);
        self.to_say.notify_one();
    }

    /// Whether all is said.
    pub fn all_said(&self) -> bool {
        let grown = self.grown();
        grown.unsaid.is_empty() && !grown.saying
    }

    fn grown(&self) -> MutexGuard<'_, Grown> {
        self.grown.lock().unwrap_or_else(PoisonError::into_inner)
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
            self.emptied.notify_waiters();
            arrived.await;
        }
    }

    /// Waits until nothing waits any more.
    pub async fn emptied(&self) {
        loop {
            let emptied = self.emptied.notified();
            if self.is_empty() {
                return;
            }
            emptied.await;
        }
    }

    /// Logs and failures that wait.
    pub fn len(&self) -> usize {
        let waiting = self.lock();
        waiting.records.len()
            + waiting.stale.len()
            + waiting.failures.len()
            + usize::from(waiting.in_hand)
    }

    /// What the index is behind by: entries, and logs of which it missed more than that.
    pub fn behind(&self) -> usize {
        let waiting = self.lock();
        waiting.records.len() + waiting.stale.len() + usize::from(waiting.in_hand)
    }

    /// Whether the index knows all there is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
