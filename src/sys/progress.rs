//! Progress counters of long operations. Does not own how they are displayed.

use std::sync::atomic::{AtomicU64, Ordering};

/// The progress of reading or writing logs.
#[derive(Debug, Default)]
pub struct Progress {
    expected_bytes: AtomicU64,
    done_bytes: AtomicU64,
    started_logs: AtomicU64,
    total_logs: AtomicU64,
}

/// The values of the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgressSnapshot {
    /// Stored bytes to be read in total, as far as known.
    pub expected_bytes: u64,
    /// Bytes read or written so far.
    pub done_bytes: u64,
    /// Number of logs started.
    pub started_logs: u64,
    /// Total number of logs; 0 if unknown.
    pub total_logs: u64,
}

impl Progress {
    /// Adds bytes that will be read.
    pub fn add_expected(&self, bytes: u64) {
        self.expected_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds bytes that were read or written.
    pub fn add_done(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Sets the total number of logs.
    pub fn set_total_logs(&self, count: usize) {
        self.total_logs.store(count as u64, Ordering::Relaxed);
    }

    /// Counts a log as started.
    pub fn start_log(&self) {
        self.started_logs.fetch_add(1, Ordering::Relaxed);
    }

    /// The current values.
    pub fn snapshot(&self) -> ProgressSnapshot {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ProgressSnapshot {
            expected_bytes: value(&self.expected_bytes),
            done_bytes: value(&self.done_bytes),
            started_logs: value(&self.started_logs),
            total_logs: value(&self.total_logs),
        }
    }
}
