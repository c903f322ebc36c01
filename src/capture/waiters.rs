//! The callers that wait for a flush to finish.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::oneshot;

use super::handle::FlushReport;
use crate::error::{Error, Result};
use crate::model::LogName;

/// How often a flush may have caught up with everything but changing files until a caller is told
/// that they are not durable.
const MAX_CAUGHT_UP: u32 = 4;

/// A caller that waits for one or more logs.
pub(super) struct Waiter {
    /// The logs to wait for.
    pending: BTreeMap<LogName, Awaited>,
    /// The logs to report.
    pub(super) reported: BTreeSet<LogName>,
    pub(super) reply: oneshot::Sender<Result<FlushReport>>,
    /// Why files are not durable that the caller does not wait for any more.
    not_durable: Vec<String>,
}

/// What a caller waits for in one log.
struct Awaited {
    /// The number of the first flush that starts after the request.
    first_flush: u64,
    /// How often such a flush caught up with everything but changing files.
    caught_up: u32,
}

impl Waiter {
    /// A caller that waits for the `pending` logs, each with the number of the first flush that
    /// starts after the request.
    pub(super) fn new(
        pending: impl IntoIterator<Item = (LogName, u64)>,
        reported: impl IntoIterator<Item = LogName>,
        reply: oneshot::Sender<Result<FlushReport>>,
    ) -> Waiter {
        let pending = pending.into_iter().map(|(name, first_flush)| {
            let caught_up = 0;
            (
                name,
                Awaited {
                    first_flush,
                    caught_up,
                },
            )
        });
        Waiter {
            pending: pending.collect(),
            reported: reported.into_iter().collect(),
            reply,
            not_durable: Vec::new(),
        }
    }

    /// Sends the report, or the error for what is not durable.
    pub(super) fn reply(self, report: FlushReport) {
        let result = match self.not_durable.as_slice() {
            [] => Ok(report),
            [reason, others @ ..] => {
                let others = match others.len() {
                    0 => String::new(),
                    count => format!("; the same for {count} more"),
                };
                Err(
                    Error::unavailable(format!("not everything is durable: {reason}{others}"))
                        .hint("stop the process that writes the file, then run \"sessiond flush --wait\" again"),
                )
            }
        };
        let _ = self.reply.send(result);
    }
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
        let needs_later = |waiter: &Waiter| {
            let awaited = waiter.pending.get(name);
            awaited.is_some_and(|awaited| awaited.first_flush > number)
        };
        self.0.iter().any(needs_later)
    }

    /// Records that flush `number` of the log has finished.
    pub(super) fn flush_finished(&mut self, name: &LogName, number: u64) {
        for waiter in &mut self.0 {
            let awaited = waiter.pending.get(name);
            if awaited.is_some_and(|awaited| awaited.first_flush <= number) {
                waiter.pending.remove(name);
            }
        }
    }

    /// Records that flush `number` of the log has caught up with everything but side files that
    /// changed during their upload, and why some of those are not durable at all.
    ///
    /// A caller waits for the bytes that existed at the request. A file that only grows has them once
    /// an upload that started after the request is complete. The upload that was running at the
    /// request ends with the first flush that catches up, so the second suffices. A file that is
    /// rewritten all the time may never be durable: the caller is told so.
    pub(super) fn caught_up(&mut self, name: &LogName, number: u64, not_durable: &[String]) {
        for waiter in &mut self.0 {
            let Some(awaited) = waiter.pending.get_mut(name) else {
                continue;
            };
            if awaited.first_flush > number {
                continue;
            }
            awaited.caught_up += 1;
            let is_durable = not_durable.is_empty() && awaited.caught_up >= 2;
            if is_durable || awaited.caught_up >= MAX_CAUGHT_UP {
                waiter.pending.remove(name);
                waiter.not_durable.extend_from_slice(not_durable);
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
