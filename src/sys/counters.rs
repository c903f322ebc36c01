//! Counters of what this process has done since it started.
//!
//! Owns the values. Does not own their metric names, which `daemon/metrics.rs` lists. Updating a
//! counter never blocks, and no timer runs: a scrape reads the values.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use jiff::Timestamp;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::error::ErrorKind;

/// Upper bounds of the flush duration histogram, in seconds. The smallest is for a local directory,
/// the largest for a distant bucket and a large backlog.
const FLUSH_DURATION_BUCKETS: [f64; 11] =
    [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// The operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Uploading a session's changes.
    Flush,
    /// Restoring a session.
    Restore,
    /// Writing to the index.
    Index,
    /// Merging entries and writing snapshots.
    Compaction,
    /// Writing a session's metadata.
    Metadata,
}

impl Operation {
    /// All operations.
    pub const ALL: [Operation; 5] = [
        Operation::Flush,
        Operation::Restore,
        Operation::Index,
        Operation::Compaction,
        Operation::Metadata,
    ];

    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Operation::Flush => "flush",
            Operation::Restore => "restore",
            Operation::Index => "index",
            Operation::Compaction => "compaction",
            Operation::Metadata => "metadata",
        }
    }
}

/// The result of one heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeartbeatResult {
    /// The server acknowledged it.
    Sent,
    /// The server could not be reached, or rejected it.
    Failed,
    /// It was not sent, because not everything is durable.
    Withheld,
}

impl HeartbeatResult {
    const ALL: [HeartbeatResult; 3] = [
        HeartbeatResult::Sent,
        HeartbeatResult::Failed,
        HeartbeatResult::Withheld,
    ];

    fn as_str(self) -> &'static str {
        match self {
            HeartbeatResult::Sent => "sent",
            HeartbeatResult::Failed => "failed",
            HeartbeatResult::Withheld => "withheld",
        }
    }
}

/// The labels of a counter.
pub(crate) type Labels<const N: usize> = [(&'static str, &'static str); N];

/// A time in seconds since 1970, or a duration in seconds; 0 if there is none.
pub(crate) type Seconds = Gauge<f64, AtomicU64>;

/// The counters of one process. All its parts share them.
#[derive(Debug)]
pub struct Counters {
    pub(crate) flushes: Counter,
    pub(crate) flush_duration: Histogram,
    pub(crate) flush_last_success: Seconds,
    pub(crate) entries: Counter,
    pub(crate) raw_bytes: Counter,
    pub(crate) stored_bytes: Counter,
    pub(crate) branches: Counter,
    pub(crate) compacted_segments: Counter,
    pub(crate) compacted_stored_bytes: Counter,
    pub(crate) errors: Family<Labels<2>, Counter>,
    pub(crate) index_last_success: Seconds,
    pub(crate) restores: Counter,
    pub(crate) restored_bytes: Counter,
    pub(crate) restore_last_duration: Seconds,
    pub(crate) restore_last_success: Seconds,
    pub(crate) heartbeats: Family<Labels<1>, Counter>,
    pub(crate) heartbeat_last_success: Seconds,
}

impl Default for Counters {
    fn default() -> Self {
        let errors = Family::default();
        let heartbeats = Family::default();
        // Every series exists from the start, because a rate needs an initial value of 0.
        for operation in Operation::ALL {
            for kind in ErrorKind::ALL {
                drop(errors.get_or_create(&error_labels(operation, kind)));
            }
        }
        for result in HeartbeatResult::ALL {
            drop(heartbeats.get_or_create(&[("result", result.as_str())]));
        }
        Counters {
            flushes: Counter::default(),
            flush_duration: Histogram::new(FLUSH_DURATION_BUCKETS),
            flush_last_success: Seconds::default(),
            entries: Counter::default(),
            raw_bytes: Counter::default(),
            stored_bytes: Counter::default(),
            branches: Counter::default(),
            compacted_segments: Counter::default(),
            compacted_stored_bytes: Counter::default(),
            errors,
            index_last_success: Seconds::default(),
            restores: Counter::default(),
            restored_bytes: Counter::default(),
            restore_last_duration: Seconds::default(),
            restore_last_success: Seconds::default(),
            heartbeats,
            heartbeat_last_success: Seconds::default(),
        }
    }
}

impl Counters {
    /// Counts a flush that made something durable.
    pub fn record_flush(&self, duration: Duration, now: Timestamp) {
        self.flushes.inc();
        self.flush_duration.observe(duration.as_secs_f64());
        self.flush_last_success.set(unix_seconds(now));
    }

    /// Counts an entry that was written.
    pub fn record_entry(&self, raw_bytes: u64, stored_bytes: u64) {
        self.entries.inc();
        self.raw_bytes.inc_by(raw_bytes);
        self.stored_bytes.inc_by(stored_bytes);
    }

    /// Counts a branch that was started.
    pub fn record_branch(&self) {
        self.branches.inc();
    }

    /// Counts merges and snapshots that were written.
    pub fn record_compaction(&self, segments: u64, stored_bytes: u64) {
        self.compacted_segments.inc_by(segments);
        self.compacted_stored_bytes.inc_by(stored_bytes);
    }

    /// Records that the index accepted an update.
    pub fn record_index_update(&self, now: Timestamp) {
        self.index_last_success.set(unix_seconds(now));
    }

    /// Counts a restore.
    pub fn record_restore(&self, bytes: u64, duration: Duration, now: Timestamp) {
        self.restores.inc();
        self.restored_bytes.inc_by(bytes);
        self.restore_last_duration.set(duration.as_secs_f64());
        self.restore_last_success.set(unix_seconds(now));
    }

    /// Counts a heartbeat.
    pub fn record_heartbeat(&self, result: HeartbeatResult, now: Timestamp) {
        let labels = [("result", result.as_str())];
        self.heartbeats.get_or_create(&labels).inc();
        if result == HeartbeatResult::Sent {
            self.heartbeat_last_success.set(unix_seconds(now));
        }
    }

    /// Counts a failed attempt.
    pub fn record_error(&self, operation: Operation, kind: ErrorKind) {
        self.errors
            .get_or_create(&error_labels(operation, kind))
            .inc();
    }
}

fn error_labels(operation: Operation, kind: ErrorKind) -> Labels<2> {
    [("operation", operation.as_str()), ("kind", kind.as_str())]
}

/// A time in the form that Prometheus expects: seconds since 1970.
pub(crate) fn unix_seconds(at: Timestamp) -> f64 {
    at.as_microsecond() as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_counted_per_operation_and_kind() {
        let counters = Counters::default();
        counters.record_error(Operation::Flush, ErrorKind::Fenced);
        counters.record_error(Operation::Flush, ErrorKind::Fenced);
        for operation in Operation::ALL {
            for kind in ErrorKind::ALL {
                let count = counters.errors.get(&error_labels(operation, kind));
                let expected = if (operation, kind) == (Operation::Flush, ErrorKind::Fenced) {
                    2
                } else {
                    0
                };
                assert_eq!(count.map(|count| count.get()), Some(expected));
            }
        }
    }

    #[test]
    fn only_an_acknowledged_heartbeat_moves_the_last_success() {
        let counters = Counters::default();
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        counters.record_heartbeat(HeartbeatResult::Withheld, now);
        counters.record_heartbeat(HeartbeatResult::Failed, now);
        assert_eq!(counters.heartbeat_last_success.get(), 0.0);
        counters.record_heartbeat(HeartbeatResult::Sent, now);
        assert_eq!(counters.heartbeat_last_success.get(), 1_700_000_000.0);
    }
}
