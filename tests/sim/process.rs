//! One process: every effect on the world passes through here, is counted, and can be its last.
//!
//! A dead process has no effect: its synchronous calls fail and its asynchronous ones never return.
//! A paused one hangs before or after the effect of a request, like a stopped process or a
//! suspended machine.

use std::future::pending;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// A step after which nothing follows: just before its effect, or just behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crash {
    pub step: u64,
    pub after: bool,
}

#[derive(Default)]
struct LogState {
    dead: bool,
    paused: bool,
    steps: u64,
    crash: Option<Crash>,
}

/// One life of a process.
pub struct ProcessLifetime {
    /// Which life of the world this is.
    pub number: u64,
    /// The volume it works on.
    pub volume: u64,
    state: Mutex<LogState>,
    woken: Notify,
}

impl ProcessLifetime {
    pub fn new(number: u64, volume: u64) -> ProcessLifetime {
        ProcessLifetime {
            number,
            volume,
            state: Mutex::default(),
            woken: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, LogState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it at one of its next steps; the next is 1.
    pub fn crash_in(&self, steps: u64, after: bool) {
        let mut state = self.state();
        state.crash = Some(Crash {
            step: state.steps + steps.max(1),
            after,
        });
    }

    pub fn never_mind_the_crash(&self) {
        self.state().crash = None;
    }

    pub fn kill(&self) {
        self.state().dead = true;
    }

    pub fn is_dead(&self) -> bool {
        self.state().dead
    }

    pub fn pause(&self) {
        self.state().paused = true;
    }

    pub fn wake(&self) {
        self.state().paused = false;
        self.woken.notify_waiters();
    }

    /// Begins a step; none if there is no more.
    pub fn begin(&self) -> Option<u64> {
        let mut state = self.state();
        state.steps += 1;
        let step = state.steps;
        if state.crash == Some(Crash { step, after: false }) {
            state.dead = true;
        }
        (!state.dead).then_some(step)
    }

    /// Ends a step; false if it was the last.
    pub fn end(&self, step: u64) -> bool {
        let mut state = self.state();
        if state.crash == Some(Crash { step, after: true }) {
            state.dead = true;
        }
        !state.dead
    }

    /// Begins a request.
    pub async fn enter(&self) -> u64 {
        match self.begin() {
            Some(step) => {
                self.awake().await;
                step
            }
            None => pending().await,
        }
    }

    /// Brings the answer of a request.
    pub async fn leave(&self, step: u64) {
        if !self.end(step) {
            pending::<()>().await;
        }
        self.awake().await;
    }

    async fn awake(&self) {
        loop {
            let woken = self.woken.notified();
            let (dead, paused) = {
                let state = self.state();
                (state.dead, state.paused)
            };
            if dead {
                pending::<()>().await;
            }
            if !paused {
                return;
            }
            woken.await;
        }
    }

    /// What a call on local files answers that is not reached any more.
    pub fn gone() -> io::Error {
        io::Error::other("the process is gone")
    }
}
