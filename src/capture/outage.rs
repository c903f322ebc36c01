//! Which failed flushes are logged: the first of an outage, an occasional reminder, and the
//! recovery. Pure.
//!
//! A flush that fails is retried every few seconds, and every log of the process fails in the same
//! outage. `status` and the metrics have each failure.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use crate::error::ErrorKind;
use crate::model::LogName;

/// Time between two log lines of an outage.
const REMINDER_INTERVAL: Duration = Duration::from_secs(5 * 60);

/// The flushes that fail at the moment.
#[derive(Debug, Default)]
pub(super) struct OutageLog {
    current: Option<Outage>,
}

#[derive(Debug)]
struct Outage {
    since: Instant,
    logged_at: Instant,
    kind: ErrorKind,
    attempts: u64,
    failing: BTreeSet<LogName>,
}

/// How long an outage lasted, or lasts, and what it affects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OutageSummary {
    pub elapsed: Duration,
    /// Failed flushes.
    pub attempts: u64,
    /// Sessions whose flush fails; 0 after the recovery.
    pub sessions: usize,
}

impl Outage {
    fn summary(&self, now: Instant) -> OutageSummary {
        OutageSummary {
            elapsed: now.saturating_duration_since(self.since),
            attempts: self.attempts,
            sessions: self.failing.len(),
        }
    }
}

impl OutageLog {
    /// Counts a failed flush. Returns a summary if it is to be logged.
    pub fn failed(
        &mut self,
        name: &LogName,
        kind: ErrorKind,
        now: Instant,
    ) -> Option<OutageSummary> {
        let is_new = self.current.is_none();
        let outage = self.current.get_or_insert_with(|| Outage {
            since: now,
            logged_at: now,
            kind,
            attempts: 0,
            failing: BTreeSet::new(),
        });
        outage.attempts += 1;
        outage.failing.insert(name.clone());
        let is_due = now.saturating_duration_since(outage.logged_at) >= REMINDER_INTERVAL;
        if !is_new && !is_due && outage.kind == kind {
            return None;
        }
        (outage.logged_at, outage.kind) = (now, kind);
        Some(outage.summary(now))
    }

    /// Counts a successful flush. Returns a summary if it ends the outage.
    pub fn succeeded(&mut self, name: &LogName, now: Instant) -> Option<OutageSummary> {
        let outage = self.current.as_mut()?;
        outage.failing.remove(name);
        if !outage.failing.is_empty() {
            return None;
        }
        self.current.take().map(|outage| outage.summary(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_logs_its_start_reminders_and_its_end() {
        let start = Instant::now();
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        let (one, other): (LogName, LogName) = ("s1".parse().unwrap(), "s2".parse().unwrap());
        let mut log = OutageLog::default();
        assert!(log.succeeded(&one, start).is_none());
        let kind = ErrorKind::Unavailable;
        assert!(
            log.failed(&one, kind, start).is_some(),
            "the first is logged"
        );
        let logged = (1..=900).filter(|second| {
            let name = if second % 2 == 0 { &one } else { &other };
            log.failed(name, kind, after(*second)).is_some()
        });
        assert_eq!(logged.collect::<Vec<_>>(), [300, 600, 900]);
        assert!(
            log.failed(&one, ErrorKind::Corrupt, after(901)).is_some(),
            "another kind of error is news"
        );
        assert!(log.succeeded(&one, after(902)).is_none());
        let ended = log.succeeded(&other, after(903)).unwrap();
        assert_eq!((ended.attempts, ended.sessions), (902, 0));
        assert_eq!(ended.elapsed, Duration::from_secs(903));
        assert!(log.succeeded(&other, after(904)).is_none());
    }
}
