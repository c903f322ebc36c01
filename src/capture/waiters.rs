//! The callers that wait for a flush to finish.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::oneshot;

use super::handle::FlushReport;
use crate::error::Result;
use crate::model::LogName;

/// A caller that waits for one or more logs.
pub(super) struct Waiter {
    /// The logs to wait for, each with the number of the first flush that starts after the request.
    pub(super) pending: BTreeMap<LogName, u64>,
    /// The logs to report.
    pub(super) reported: BTreeSet<LogName>,
    pub(super) reply: oneshot::Sender<Result<FlushReport>>,
}

/// All callers that wait.
#[derive(Default)]
pub(super) struct Waiters(Vec<Waiter>);

impl Waiters {
    pub(super) fn push(&mut self, waiter: Waiter) {
        self.0.push(waiter);
    }

    /// Removes the callers that have stopped waiting. Otherwise their number would grow during an
    /// outage.
    pub(super) fn remove_closed(&mut self) {
        self.0.retain(|waiter| !waiter.reply.is_closed());
    }

    /// Whether a caller waits for a flush of the log after flush `number`.
    pub(super) fn needs_flush_after(&self, name: &LogName, number: u64) -> bool {
        let needs_later = |waiter: &Waiter| waiter.pending.get(name).is_some_and(|n| *n > number);
        self.0.iter().any(needs_later)
    }

    /// Records that flush `number` of the log has finished.
    pub(super) fn flush_finished(&mut self, name: &LogName, number: u64) {
        for waiter in &mut self.0 {
            if waiter.pending.get(name).is_some_and(|n| *n <= number) {
                waiter.pending.remove(name);
            }
        }
    }

    /// Removes and returns the callers that wait for nothing more.
    pub(super) fn take_complete(&mut self) -> Vec<Waiter> {
        self.take(|waiter| waiter.pending.is_empty())
    }

    /// Removes and returns the callers that wait for the log.
    pub(super) fn take_waiting_for(&mut self, name: &LogName) -> Vec<Waiter> {
        self.take(|waiter| waiter.pending.contains_key(name))
    }

    fn take(&mut self, is_taken: impl Fn(&Waiter) -> bool) -> Vec<Waiter> {
        let (taken, kept) = std::mem::take(&mut self.0).into_iter().partition(is_taken);
        self.0 = kept;
        taken
    }
}
