//! How far long work has come, for whoever shows it: counters, and no opinion on how they look.

use std::sync::atomic::{AtomicU64, Ordering};

/// How far a reader or writer of logs has come. Counting costs nothing to speak of; nobody needs to look.
#[derive(Debug, Default)]
pub struct Progress {
    expected: AtomicU64,
    done: AtomicU64,
    logs: AtomicU64,
    of_logs: AtomicU64,
}

/// What has been counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    /// Stored bytes that are known to be read in all.
    pub expected: u64,
    /// Those that were read or written.
    pub done: u64,
    /// Logs that were begun.
    pub logs: u64,
    /// Logs there are; 0 if that is not known.
    pub of_logs: u64,
}

impl Progress {
    /// So many more bytes will be read.
    pub fn expect(&self, bytes: u64) {
        self.expected.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many more were read or written.
    pub fn did(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// There are so many logs to go through.
    pub fn logs(&self, count: usize) {
        self.of_logs.store(count as u64, Ordering::Relaxed);
    }

    /// The next of them has begun.
    pub fn next_log(&self) {
        self.logs.fetch_add(1, Ordering::Relaxed);
    }

    /// What has been counted so far.
    pub fn counted(&self) -> Counted {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counted {
            expected: value(&self.expected),
            done: value(&self.done),
            logs: value(&self.logs),
            of_logs: value(&self.of_logs),
        }
    }
}
