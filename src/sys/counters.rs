//! What has happened since this process started, counted. Nobody waits for it and no timer feeds it: it is read when somebody asks.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;

use crate::error::ErrorKind;

/// What something failed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Making a session durable.
    Flush,
    /// Bringing one back.
    Restore,
    /// Telling the index.
    Index,
    /// Merging entries.
    Merge,
    /// Saying labels and the like of a session.
    Label,
}

impl Operation {
    /// All of them, in the order of their numbers.
    pub const ALL: [Operation; 5] = [
        Operation::Flush,
        Operation::Restore,
        Operation::Index,
        Operation::Merge,
        Operation::Label,
    ];

    /// As people read it.
    pub fn word(self) -> &'static str {
        match self {
            Operation::Flush => "flush",
            Operation::Restore => "restore",
            Operation::Index => "index",
            Operation::Merge => "merge",
            Operation::Label => "label",
        }
    }
}

/// The upper bounds of `Times`, in seconds: a directory on this machine takes the first, a bucket far away with a large backlog
/// the last.
pub const BOUNDS: [f64; 11] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// How long something took, each time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Times {
    /// So many fell below each bound and above the one before.
    pub below: [u64; BOUNDS.len()],
    /// All of them.
    pub count: u64,
    /// What they took together, in seconds.
    pub sum: f64,
}

impl Times {
    /// One more.
    pub fn add(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        if let Some(bound) = BOUNDS.iter().position(|bound| seconds <= *bound) {
            self.below[bound] += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }
}

/// The counts.
#[derive(Debug, Clone, Default)]
pub struct CounterValues {
    /// Flushes that made something durable.
    pub flushes: u64,
    /// How long each of them took.
    pub flush_times: Times,
    /// When the last of them was done.
    pub flushed_at: Option<Timestamp>,
    /// Entries written.
    pub entries: u64,
    /// Their bytes before compression.
    pub raw: u64,
    /// Their bytes as stored.
    pub stored: u64,
    /// Branches that were written to.
    pub branches: u64,
    /// Merges and snapshots written.
    pub merges: u64,
    /// Their bytes as stored.
    pub merged: u64,
    /// When the index last took something.
    pub indexed_at: Option<Timestamp>,
    /// Sessions restored.
    pub restores: u64,
    /// Bytes put in place.
    pub restored: u64,
    /// How long the last restore took.
    pub restore_took: Duration,
    /// When it was done.
    pub restored_at: Option<Timestamp>,
    /// Heartbeats that were heard.
    pub beats: u64,
    /// Heartbeats that were not.
    pub missed_beats: u64,
    /// Heartbeats that were not sent, because not everything was durable.
    pub withheld_beats: u64,
    /// When one was last heard.
    pub beat_at: Option<Timestamp>,
    errors: [[u64; ErrorKind::ALL.len()]; Operation::ALL.len()],
}

impl CounterValues {
    /// How often something of this kind failed.
    pub fn errors(&self, during: Operation, kind: ErrorKind) -> u64 {
        self.errors[during as usize][kind as usize]
    }

    /// A session was brought back.
    pub fn restored(&mut self, bytes: u64, took: Duration, now: Timestamp) {
        self.restores += 1;
        self.restored += bytes;
        self.restore_took = took;
        self.restored_at = Some(now);
    }
}

/// The counts of a process, shared by all that happens in it.
#[derive(Debug, Default)]
pub struct Counters(Mutex<CounterValues>);

impl Counters {
    /// Something happened.
    pub fn note(&self, change: impl FnOnce(&mut CounterValues)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Something failed.
    pub fn failed(&self, during: Operation, kind: ErrorKind) {
        self.note(|tally| tally.errors[during as usize][kind as usize] += 1);
    }

    /// How it stands.
    pub fn so_far(&self) -> CounterValues {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_own_count() {
        let counts = Counters::default();
        for (number, during) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(during as usize, number);
            for (number, kind) in ErrorKind::ALL.into_iter().enumerate() {
                assert_eq!(kind as usize, number);
                counts.failed(during, kind);
            }
        }
        let tally = counts.so_far();
        assert!(Operation::ALL.into_iter().all(|during| {
            ErrorKind::ALL
                .into_iter()
                .all(|kind| tally.errors(during, kind) == 1)
        }));
    }

    #[test]
    fn a_time_falls_below_the_first_bound_that_holds_it() {
        let mut times = Times::default();
        [0.01, 0.011, 0.9, 31.0]
            .into_iter()
            .for_each(|seconds| times.add(Duration::from_secs_f64(seconds)));
        assert_eq!((times.below[0], times.below[1], times.below[6]), (1, 1, 1));
        assert_eq!((times.below.iter().sum::<u64>(), times.count), (3, 4));
        assert!((times.sum - 31.921).abs() < 1e-6);
    }
}
