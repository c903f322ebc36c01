//! The transitions of a log's flush state, as tables: state, event and time in, state out.

use super::*;

const INTERVAL: Duration = Duration::from_secs(1);

/// Turns "seconds since the start of the test" into the states and instants of a table.
#[derive(Clone, Copy)]
struct Timeline(Instant);

impl Timeline {
    fn new() -> Timeline {
        Timeline(Instant::now())
    }

    fn at(self, seconds: f64) -> Instant {
        self.0 + Duration::from_secs_f64(seconds)
    }

    fn clean(self, last_flush: f64) -> FlushState {
        FlushState::Clean {
            last_flush: Some(self.at(last_flush)),
        }
    }

    fn waiting(self, unsaved_since: f64, due: f64) -> FlushState {
        FlushState::Waiting {
            unsaved_since: self.at(unsaved_since),
            due: self.at(due),
        }
    }

    fn backing_off(self, unsaved_since: f64, until: f64, failures: u32) -> FlushState {
        FlushState::BackingOff {
            unsaved_since: self.at(unsaved_since),
            until: self.at(until),
            failures,
        }
    }

    fn flushing(self, unsaved_since: f64, started: f64) -> RunningFlush {
        RunningFlush {
            unsaved_since: self.at(unsaved_since),
            started: self.at(started),
            failures: 0,
            changed_meanwhile: false,
            hold_requested: false,
        }
    }

    fn held(self, unsaved_since: f64) -> FlushState {
        FlushState::Held {
            unsaved_since: Some(self.at(unsaved_since)),
        }
    }

    /// Checks rows of (state, event, seconds, expected state), none of which has an action.
    #[track_caller]
    fn check(self, rows: &[(FlushState, FlushEvent, f64, FlushState)]) {
        for (number, (state, event, now, expected)) in rows.iter().enumerate() {
            let result = state.transition(*event, self.at(*now), INTERVAL);
            assert_eq!(
                result,
                (*expected, None),
                "row {number}: {state:?} and {event:?}"
            );
        }
    }
}

const HELD: FlushState = FlushState::Held {
    unsaved_since: None,
};
const CONFIRM: Option<FlushAction> = Some(FlushAction::ConfirmHold);

fn changed_meanwhile(flush: RunningFlush) -> FlushState {
    FlushState::Flushing(RunningFlush {
        changed_meanwhile: true,
        ..flush
    })
}

fn with_failures(flush: RunningFlush, failures: u32) -> FlushState {
    FlushState::Flushing(RunningFlush { failures, ..flush })
}

fn hold_requested(flush: RunningFlush) -> FlushState {
    FlushState::Flushing(RunningFlush {
        hold_requested: true,
        ..flush
    })
}

#[test]
fn a_change_is_flushed_at_once_or_one_interval_after_the_previous_flush() {
    let t = Timeline::new();
    t.check(&[
        // The first change, and a change after a quiet period.
        (
            FlushState::NEW,
            FlushEvent::Changed,
            5.0,
            t.waiting(5.0, 5.0),
        ),
        (t.clean(1.0), FlushEvent::Changed, 5.0, t.waiting(5.0, 5.0)),
        // A change shortly after a flush.
        (t.clean(4.8), FlushEvent::Changed, 5.0, t.waiting(5.0, 5.8)),
        // More changes do not move a flush that is due.
        (
            t.waiting(5.0, 5.8),
            FlushEvent::Changed,
            5.5,
            t.waiting(5.0, 5.8),
        ),
    ]);
}

#[test]
fn a_request_moves_the_flush_to_now_and_never_later() {
    let t = Timeline::new();
    let request = FlushEvent::FlushRequested;
    t.check(&[
        (t.clean(4.8), request, 5.0, t.waiting(5.0, 5.0)),
        (t.waiting(4.9, 5.8), request, 5.0, t.waiting(4.9, 5.0)),
        (t.waiting(4.9, 4.9), request, 5.0, t.waiting(4.9, 4.9)),
        (
            t.backing_off(3.0, 9.0, 2),
            request,
            5.0,
            t.backing_off(3.0, 5.0, 2),
        ),
    ]);
}

#[test]
fn only_a_log_that_is_due_starts_a_flush() {
    let t = Timeline::new();
    let flush = t.flushing(4.9, 5.0);
    let running = FlushState::Flushing(flush);
    let start = FlushEvent::FlushStarted;
    t.check(&[
        (t.waiting(4.9, 5.0), start, 5.0, running),
        (
            t.backing_off(4.9, 5.0, 3),
            start,
            5.0,
            with_failures(flush, 3),
        ),
        (FlushState::NEW, start, 5.0, FlushState::NEW),
        (running, start, 6.0, running),
        (HELD, start, 5.0, HELD),
    ]);
}

#[test]
fn a_log_that_changed_during_a_flush_is_flushed_again() {
    let t = Timeline::new();
    let flush = t.flushing(4.9, 5.0);
    let (running, changed) = (FlushState::Flushing(flush), changed_meanwhile(flush));
    let finished = |wrote, urgent| FlushEvent::FlushFinished { wrote, urgent };
    t.check(&[
        (running, FlushEvent::Changed, 5.1, changed),
        (running, FlushEvent::FlushRequested, 5.1, changed),
        // Without a change the log is clean; a flush without an entry does not count as one.
        (running, finished(true, false), 5.2, t.clean(5.0)),
        (running, finished(false, false), 5.2, FlushState::NEW),
        // With a change, the next flush waits for the interval, unless it is urgent, or the last
        // one wrote nothing. Everything before its start is durable.
        (changed, finished(true, false), 5.2, t.waiting(5.0, 6.0)),
        (changed, finished(true, false), 7.0, t.waiting(5.0, 7.0)),
        (changed, finished(true, true), 5.2, t.waiting(5.0, 5.2)),
        (changed, finished(false, false), 5.2, t.waiting(5.0, 5.2)),
    ]);
}

#[test]
fn a_failed_flush_backs_off_until_its_retry_and_success_resets_the_count() {
    let t = Timeline::new();
    let flush = t.flushing(4.0, 5.0);
    let failed = |seconds| FlushEvent::FlushFailed {
        retry_in: Duration::from_secs(seconds),
    };
    let finished = FlushEvent::FlushFinished {
        wrote: true,
        urgent: false,
    };
    t.check(&[
        (
            FlushState::Flushing(flush),
            failed(2),
            5.5,
            t.backing_off(4.0, 7.5, 1),
        ),
        (
            with_failures(flush, 1),
            failed(4),
            5.5,
            t.backing_off(4.0, 9.5, 2),
        ),
        // A retry reads all files, so a change during the failed flush needs no flush of its own.
        (
            changed_meanwhile(flush),
            failed(2),
            5.5,
            t.backing_off(4.0, 7.5, 1),
        ),
        // An append during the pause causes no attempt.
        (
            t.backing_off(4.0, 7.5, 1),
            FlushEvent::Changed,
            6.0,
            t.backing_off(4.0, 7.5, 1),
        ),
        (with_failures(flush, 7), finished, 5.5, t.clean(5.0)),
    ]);
}

#[test]
fn a_hold_begins_when_no_flush_is_running() {
    let t = Timeline::new();
    let flush = t.flushing(4.9, 5.0);
    let apply = |state: FlushState, event| state.transition(event, t.at(6.0), INTERVAL);
    for idle in [
        FlushState::NEW,
        t.waiting(5.0, 5.0),
        t.backing_off(4.0, 9.0, 2),
        t.held(5.0),
    ] {
        assert_eq!(apply(idle, FlushEvent::HoldRequested), (HELD, CONFIRM));
    }
    let waiting = apply(FlushState::Flushing(flush), FlushEvent::HoldRequested);
    assert_eq!(waiting, (hold_requested(flush), None));
    for end in [
        FlushEvent::FlushFinished {
            wrote: true,
            urgent: false,
        },
        FlushEvent::FlushFailed { retry_in: INTERVAL },
    ] {
        assert_eq!(apply(waiting.0, end), (HELD, CONFIRM));
    }
}

#[test]
fn a_held_log_is_not_flushed_until_its_release() {
    let t = Timeline::new();
    let flush = t.flushing(4.9, 5.0);
    let released = |has_files| FlushEvent::Released { has_files };
    t.check(&[
        (HELD, FlushEvent::Changed, 5.0, t.held(5.0)),
        (t.held(5.0), FlushEvent::FlushRequested, 6.0, t.held(5.0)),
        (HELD, released(true), 7.0, t.waiting(7.0, 7.0)),
        (HELD, released(false), 7.0, FlushState::NEW),
        (t.held(5.0), released(true), 7.0, t.waiting(5.0, 7.0)),
        (t.held(5.0), released(false), 7.0, t.waiting(5.0, 7.0)),
        // The caller gave up before the running flush ended.
        (
            hold_requested(flush),
            released(true),
            7.0,
            changed_meanwhile(flush),
        ),
        (
            hold_requested(flush),
            released(false),
            7.0,
            FlushState::Flushing(flush),
        ),
    ]);
    assert_eq!((HELD.due(), t.held(5.0).due()), (None, None));
}

#[test]
fn lag_starts_with_the_first_change_that_is_not_durable() {
    let t = Timeline::new();
    let table = [
        (FlushState::NEW, None),
        (t.clean(1.0), None),
        (t.waiting(2.0, 3.0), Some(2.0)),
        (FlushState::Flushing(t.flushing(2.0, 3.0)), Some(2.0)),
        (t.backing_off(2.0, 9.0, 1), Some(2.0)),
        (HELD, None),
        (t.held(2.0), Some(2.0)),
    ];
    for (state, since) in table {
        let since = since.map(|seconds| t.at(seconds));
        assert_eq!(state.unsaved_since(), since, "{state:?}");
    }
}

#[test]
fn a_log_is_quiet_after_a_period_without_changes() {
    let t = Timeline::new();
    let quiet = |state: FlushState| state.is_quiet(t.at(70.0), Duration::from_secs(60));
    assert!(quiet(FlushState::NEW) && quiet(t.clean(9.0)) && quiet(HELD));
    assert!(!quiet(t.clean(11.0)) && !quiet(t.held(1.0)) && !quiet(t.waiting(1.0, 1.0)));
}
