//! The results of flushes: what a log does next, and who is told.

use std::time::Duration;

use tokio::task;
use tokio::time::Instant;

use super::{JoinedFlush, Shutdown, Streamer};
use crate::capture::flush::{FlushOutcome, LogFlusher};
use crate::capture::flush_state::{FlushAction, FlushEvent, RunningFlush};
use crate::capture::limits::MAX_LARGE_FLUSHES;
use crate::capture::tracked_log::TrackedLog;
use crate::error::{Error, ErrorKind};
use crate::index::Failure;
use crate::model::LogName;
use crate::sys::Backoff;
use crate::sys::lines::one_line;

/// Delay between attempts during the final flush, which has a deadline of its own.
const FINAL_RETRY_DELAY: Duration = Duration::from_millis(250);
/// Failed attempts of a final flush from one log line to the next: one line every two seconds.
const FINAL_LOG_ATTEMPTS: u32 = 8;
/// Maximum length of an error in a log line, in bytes.
const MAX_ERROR_LEN: usize = 500;
impl Streamer {
    pub(super) fn flush_ended(&mut self, joined: JoinedFlush) {
        let id = joined
            .as_ref()
            .map_or_else(task::JoinError::id, |(id, _)| *id);
        let Some(name) = self.flushing_logs.remove(&id) else {
            return;
        };
        let (flusher, result) = match joined {
            Ok((_, ended)) => ended,
            // A panic in one flush must not stop the streaming of its session: a new flusher starts
            // from the ledger.
            Err(panic) => {
                let flusher = LogFlusher::new(self.context.logs.id(name.clone()));
                let error = Error::new(ErrorKind::Internal, format!("flush {name}"));
                (Box::new(flusher), Err(error.caused_by(panic)))
            }
        };
        let Some(running) = self.tracked(&name).state.running_flush() else {
            return;
        };
        let now = self.context.logs.clock.now();
        self.context
            .counters
            .flush_ended(&result, running.started.elapsed(), now);
        let tracked = self.tracked(&name);
        if let Some(ledger) = &flusher.ledger {
            tracked.update_writer(ledger);
        }
        let was_large = std::mem::replace(&mut tracked.is_large, flusher.is_large());
        tracked.flusher = Some(*flusher);
        self.large_flushes -= usize::from(was_large);
        let wrote_nothing =
            matches!(&result, Ok(outcome) if outcome.is_unfinished && outcome.entries == 0);
        if !wrote_nothing {
            self.log_outage(&name, result.as_ref().err());
        }
        let action = match result {
            Ok(outcome) if outcome.is_unfinished => self.flush_yielded(&name, outcome),
            Ok(outcome) => self.flush_succeeded(&name, running, outcome),
            Err(error) => self.flush_failed(&name, running, &error),
        };
        // This comes after the replies to the callers, because a hold discards the state that the
        // replies contain.
        if let Some(action) = action {
            self.execute(&name, action);
        }
    }

    /// Logs the first failed flush of an outage, a reminder from time to time, and the recovery.
    fn log_outage(&mut self, name: &LogName, error: Option<&Error>) {
        let now = Instant::now();
        let Some(error) = error else {
            if let Some(ended) = self.outage.succeeded(name, now) {
                let (elapsed, attempts) = (ended.elapsed, ended.attempts);
                tracing::info!(?elapsed, attempts, "flushes succeed again");
            }
            return;
        };
        // The final flush logs each attempt with the time that remains.
        if let Some(outage) = self.outage.failed(name, error.kind(), now)
            && self.shutdown.is_none()
        {
            let (attempts, sessions) = (outage.attempts, outage.sessions);
            let error = one_line(&error.to_string(), MAX_ERROR_LEN);
            if attempts == 1 {
                tracing::warn!(session = %name, error, "flush failed; retrying until it succeeds");
            } else {
                let elapsed = outage.elapsed;
                tracing::warn!(session = %name, ?elapsed, attempts, sessions, error, "flushes still fail");
            }
        }
    }

    fn flush_succeeded(
        &mut self,
        name: &LogName,
        running: RunningFlush,
        outcome: FlushOutcome,
    ) -> Option<FlushAction> {
        let tracked = self.tracked(name);
        let number = tracked.flushes_started;
        tracked.status.last_error = None;
        tracked.status.failed_attempts = 0;
        tracked.status.partial_line_bytes = outcome.partial_line_bytes;
        tracked.status.durable_bytes = outcome.durable_bytes;
        tracked.fingerprint = outcome.fingerprint;
        if running.changed_meanwhile {
            // The flush may have missed a new file, which the next one finds only by its path.
            tracked.paths.extend(outcome.files);
        } else {
            tracked.paths = outcome.files;
        }
        let wrote = outcome.entries > 0;
        if wrote {
            let head = tracked.status.head;
            tracing::debug!(session = %name, head, bytes = outcome.raw_bytes, "flushed");
        }
        let urgent = self.shutdown.is_some() || self.waiters.needs_flush_after(name, number);
        let action = self.transition(name, FlushEvent::FlushFinished { wrote, urgent });
        self.waiters.flush_finished(name, number);
        self.reply_to_complete_waiters();
        action
    }

    fn flush_yielded(&mut self, name: &LogName, outcome: FlushOutcome) -> Option<FlushAction> {
        let tracked = self.tracked(name);
        if outcome.entries > 0 {
            tracked.status.last_error = None;
            tracked.status.failed_attempts = 0;
            tracked.status.partial_line_bytes = outcome.partial_line_bytes;
            tracked.status.durable_bytes = outcome.durable_bytes;
            tracked.paths.extend(outcome.files);
        }
        let number = tracked.flushes_started;
        if let Some(not_durable) = outcome.caught_up {
            self.waiters.caught_up(name, number, &not_durable);
            self.reply_to_complete_waiters();
        }
        self.transition(name, FlushEvent::FlushYielded)
    }

    /// Bounds the memory of large entries that wait for a retry. The log starts again from its
    /// ledger, as after a restart of the process, and reads the same files again.
    fn drop_large_entry(&mut self, name: &LogName) {
        let has_entry = |log: &&TrackedLog| {
            let flusher = log.flusher.as_ref();
            flusher.is_some_and(LogFlusher::has_large_pending_entry)
        };
        if self.logs.values().filter(has_entry).count() > MAX_LARGE_FLUSHES
            && let Some(tracked) = self.logs.get_mut(name).filter(|log| has_entry(&&**log))
        {
            tracked.flusher = None;
        }
    }

    fn flush_failed(
        &mut self,
        name: &LogName,
        running: RunningFlush,
        error: &Error,
    ) -> Option<FlushAction> {
        let attempt = running.failures.saturating_add(1);
        let retry_in = match &self.shutdown {
            Some(Shutdown {
                started, deadline, ..
            }) => {
                if attempt % FINAL_LOG_ATTEMPTS == 1 {
                    let elapsed = started.elapsed();
                    let remaining = deadline.saturating_duration_since(Instant::now());
                    let error = one_line(&error.to_string(), MAX_ERROR_LEN);
                    tracing::warn!(session = %name, attempt, ?elapsed, ?remaining, error, "final flush failed; retrying");
                }
                FINAL_RETRY_DELAY
            }
            None => Backoff::delay(running.failures, self.context.logs.rng.next()),
        };
        self.drop_large_entry(name);
        let status = &mut self.tracked(name).status;
        status.last_error = Some(error.to_string());
        status.failed_attempts = attempt;
        self.context.index_queue.push_failure(Failure {
            namespace: self.context.logs.namespace.clone(),
            agent: self.context.logs.agent.clone(),
            session: Some(name.to_string()),
            at: self.context.logs.clock.now(),
            attempt,
            message: error.to_string(),
        });
        let action = self.transition(name, FlushEvent::FlushFailed { retry_in });
        // After a retryable error, callers wait for the retry. They receive any other error at
        // once.
        if !error.is_retryable() {
            self.reject_waiters(name, error);
        }
        action
    }
}
