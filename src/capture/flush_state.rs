//! The flush state of one log: clean, waiting, flushing, backing off or held.
//!
//! Owns the decision when a log is flushed next. Does not own the clock, the queue of due logs or
//! the flush itself: the streamer executes what this module decides. All functions are pure.

use std::time::Duration;

use tokio::time::Instant;

/// The flush state of one log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlushState {
    /// Every known change is durable.
    Clean {
        /// The start of the last flush that wrote an entry. `None` if there was none, or if the
        /// last flush found nothing to write: the next change is then flushed at once.
        last_flush: Option<Instant>,
    },
    /// The log changed. A flush starts at `due`.
    Waiting {
        /// The time of the first change that is not durable.
        unsaved_since: Instant,
        /// The time to start the flush.
        due: Instant,
    },
    /// A flush is running.
    Flushing(RunningFlush),
    /// The last flush failed. The next attempt starts at `until`.
    BackingOff {
        /// The time of the first change that is not durable.
        unsaved_since: Instant,
        /// The time to start the next attempt.
        until: Instant,
        /// The number of consecutive failures.
        failures: u32,
    },
    /// Another part of the process writes to the log. No flush starts until it is released.
    Held {
        /// The time of the first change since the hold.
        unsaved_since: Option<Instant>,
    },
}

/// The state of a running flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningFlush {
    /// The time of the first change that is not durable.
    pub unsaved_since: Instant,
    /// The start of the flush.
    pub started: Instant,
    /// The number of consecutive failures before this flush.
    pub failures: u32,
    /// The log changed after the flush started, so the flush may have missed the change.
    pub changed_meanwhile: bool,
    /// Another part of the process waits for the end of the flush to write to the log.
    pub hold_requested: bool,
}

/// An event that can change the flush state of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlushEvent {
    /// A file of the log changed.
    Changed,
    /// A caller needs the log to be durable now.
    FlushRequested,
    /// The streamer started the flush that was due.
    FlushStarted,
    /// The flush succeeded.
    FlushFinished {
        /// The flush wrote at least one entry.
        wrote: bool,
        /// A caller waits for a later flush, or the streamer is stopping: if the log changed during
        /// this flush, the next flush starts at once.
        urgent: bool,
    },
    /// The flush wrote a part of the changes. The next flush starts after those of other logs that
    /// are due.
    FlushYielded,
    /// The flush failed.
    FlushFailed {
        /// The delay before the next attempt.
        retry_in: Duration,
    },
    /// Another part of the process requests exclusive access to the log.
    HoldRequested,
    /// The hold has ended.
    Released {
        /// The log has local files.
        has_files: bool,
    },
}

/// An action that the streamer executes after a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlushAction {
    /// Discard what is cached about the log, because another part of the process may now write its
    /// ledger, and confirm the hold.
    ConfirmHold,
}

impl FlushState {
    /// The initial state of a log.
    pub const NEW: FlushState = FlushState::Clean { last_flush: None };

    /// Returns the state after `event`, and the action to execute.
    #[must_use]
    pub fn transition(
        self,
        event: FlushEvent,
        now: Instant,
        flush_interval: Duration,
    ) -> (FlushState, Option<FlushAction>) {
        match event {
            FlushEvent::Changed => (self.after_change(now, flush_interval), None),
            FlushEvent::FlushRequested => (self.after_request(now), None),
            FlushEvent::FlushStarted => (self.after_start(now), None),
            FlushEvent::FlushFinished { wrote, urgent } => {
                let min_interval = if urgent {
                    Duration::ZERO
                } else {
                    flush_interval
                };
                self.after_end(|flush| flush.finish(wrote, now, min_interval))
            }
            FlushEvent::FlushYielded => self.after_end(|flush| FlushState::Waiting {
                unsaved_since: flush.unsaved_since,
                due: now,
            }),
            FlushEvent::FlushFailed { retry_in } => {
                self.after_end(|flush| flush.fail(now + retry_in))
            }
            FlushEvent::HoldRequested => self.after_hold(),
            FlushEvent::Released { has_files } => (self.after_release(has_files, now), None),
        }
    }

    /// Flushes a change at once after a quiet period, otherwise one interval after the start of the
    /// previous flush. A log that is backing off keeps its retry time, so that an append does not
    /// cause an early attempt.
    fn after_change(self, now: Instant, flush_interval: Duration) -> FlushState {
        match self {
            FlushState::Clean { last_flush } => FlushState::Waiting {
                unsaved_since: now,
                due: next_flush(last_flush, now, flush_interval),
            },
            FlushState::Waiting { .. } | FlushState::BackingOff { .. } => self,
            FlushState::Flushing(_) | FlushState::Held { .. } => self.after_request(now),
        }
    }

    fn after_request(self, now: Instant) -> FlushState {
        match self {
            FlushState::Clean { .. } => FlushState::Waiting {
                unsaved_since: now,
                due: now,
            },
            FlushState::Waiting { unsaved_since, due } => FlushState::Waiting {
                unsaved_since,
                due: due.min(now),
            },
            FlushState::BackingOff {
                unsaved_since,
                until,
                failures,
            } => FlushState::BackingOff {
                unsaved_since,
                until: until.min(now),
                failures,
            },
            FlushState::Flushing(flush) => FlushState::Flushing(RunningFlush {
                changed_meanwhile: true,
                ..flush
            }),
            FlushState::Held { unsaved_since } => FlushState::Held {
                unsaved_since: unsaved_since.or(Some(now)),
            },
        }
    }

    fn after_start(self, now: Instant) -> FlushState {
        let (unsaved_since, failures) = match self {
            FlushState::Waiting { unsaved_since, .. } => (unsaved_since, 0),
            FlushState::BackingOff {
                unsaved_since,
                failures,
                ..
            } => (unsaved_since, failures),
            // No flush is due in these states.
            FlushState::Clean { .. } | FlushState::Flushing(_) | FlushState::Held { .. } => {
                return self;
            }
        };
        FlushState::Flushing(RunningFlush {
            unsaved_since,
            started: now,
            failures,
            changed_meanwhile: false,
            hold_requested: false,
        })
    }

    fn after_end(
        self,
        next: impl FnOnce(RunningFlush) -> FlushState,
    ) -> (FlushState, Option<FlushAction>) {
        match self {
            FlushState::Flushing(flush) if flush.hold_requested => hold(),
            FlushState::Flushing(flush) => (next(flush), None),
            _ => (self, None),
        }
    }

    /// A hold begins when the running flush has ended.
    fn after_hold(self) -> (FlushState, Option<FlushAction>) {
        match self {
            FlushState::Flushing(flush) => {
                let flush = RunningFlush {
                    hold_requested: true,
                    ..flush
                };
                (FlushState::Flushing(flush), None)
            }
            _ => hold(),
        }
    }

    /// Flushes the files of the log at once: they may have changed during the hold.
    fn after_release(self, has_files: bool, now: Instant) -> FlushState {
        let released = match self {
            FlushState::Held { unsaved_since } => match unsaved_since {
                Some(unsaved_since) => FlushState::Waiting {
                    unsaved_since,
                    due: now,
                },
                None => FlushState::NEW,
            },
            FlushState::Flushing(flush) => FlushState::Flushing(RunningFlush {
                hold_requested: false,
                ..flush
            }),
            not_held => not_held,
        };
        if has_files {
            released.after_request(now)
        } else {
            released
        }
    }

    /// The time at which the next flush starts, if one is due.
    pub fn due(self) -> Option<Instant> {
        match self {
            FlushState::Waiting { due, .. } => Some(due),
            FlushState::BackingOff { until, .. } => Some(until),
            FlushState::Clean { .. } | FlushState::Flushing(_) | FlushState::Held { .. } => None,
        }
    }

    /// The time of the first change that is not durable.
    pub fn unsaved_since(self) -> Option<Instant> {
        match self {
            FlushState::Clean { .. } => None,
            FlushState::Waiting { unsaved_since, .. }
            | FlushState::BackingOff { unsaved_since, .. } => Some(unsaved_since),
            FlushState::Flushing(flush) => Some(flush.unsaved_since),
            FlushState::Held { unsaved_since } => unsaved_since,
        }
    }

    /// The running flush.
    pub fn running_flush(self) -> Option<RunningFlush> {
        match self {
            FlushState::Flushing(flush) => Some(flush),
            _ => None,
        }
    }

    /// Whether a flush is running or due.
    pub fn has_pending_flush(self) -> bool {
        self.running_flush().is_some() || self.due().is_some()
    }

    /// Whether everything is durable and the last flush started more than `period` ago.
    pub fn is_quiet(self, now: Instant, period: Duration) -> bool {
        match self {
            FlushState::Clean { last_flush } => {
                last_flush.is_none_or(|started| now.saturating_duration_since(started) > period)
            }
            FlushState::Held { unsaved_since } => unsaved_since.is_none(),
            _ => false,
        }
    }
}

impl RunningFlush {
    fn finish(self, wrote: bool, now: Instant, min_interval: Duration) -> FlushState {
        let last_flush = wrote.then_some(self.started);
        if !self.changed_meanwhile {
            return FlushState::Clean { last_flush };
        }
        FlushState::Waiting {
            // Everything before the start of the flush is durable.
            unsaved_since: self.started,
            due: next_flush(last_flush, now, min_interval),
        }
    }

    fn fail(self, until: Instant) -> FlushState {
        FlushState::BackingOff {
            unsaved_since: self.unsaved_since,
            until,
            failures: self.failures.saturating_add(1),
        }
    }
}

fn hold() -> (FlushState, Option<FlushAction>) {
    let held = FlushState::Held {
        unsaved_since: None,
    };
    (held, Some(FlushAction::ConfirmHold))
}

/// At most one flush starts per interval.
fn next_flush(last_flush: Option<Instant>, now: Instant, min_interval: Duration) -> Instant {
    last_flush.map_or(now, |started| now.max(started + min_interval))
}

#[cfg(test)]
mod tests;
