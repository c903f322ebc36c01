//! One process: every effect on the world passes through here, is counted, and can be its last.
//!
//! A dead process has no effect: its synchronous calls fail and its asynchronous ones never return.
//! A paused one hangs before or after the effect of a request, like a stopped process or a
//! suspended machine.

use std::future::pending;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The step at which a process crashes: just before its effect, or just after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crash {
    pub step: u64,
    pub after: bool,
}

#[derive(Default)]
struct ProcessState {
    is_dead: bool,
    paused: bool,
    steps: u64,
    crash: Option<Crash>,
}

/// One process, from its start to its end.
pub struct ProcessLifetime {
    /// The number of the process in its world.
    pub number: u64,
    /// The volume it works on.
    pub volume: u64,
    state: Mutex<ProcessState>,
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

    fn state(&self) -> MutexGuard<'_, ProcessState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Crashes it at one of its next steps; the next is 1.
    pub fn crash_in(&self, steps: u64, after: bool) {
        let mut state = self.state();
        state.crash = Some(Crash {
            step: state.steps + steps.max(1),
            after,
        });
    }

    pub fn cancel_crash(&self) {
        self.state().crash = None;
    }

    pub fn kill(&self) {
        self.state().is_dead = true;
    }

    pub fn is_killed(&self) -> bool {
        self.state().is_dead
    }

    pub fn pause(&self) {
        self.state().paused = true;
    }

    pub fn wake(&self) {
        self.state().paused = false;
        self.woken.notify_waiters();
    }

    /// Begins a step; none if the process is dead.
    pub fn begin(&self) -> Option<u64> {
        let mut state = self.state();
        state.steps += 1;
        let step = state.steps;
        if state.crash == Some(Crash { step, after: false }) {
            state.is_dead = true;
        }
        (!state.is_dead).then_some(step)
    }

    /// Ends a step; false if the process is dead.
    pub fn end(&self, step: u64) -> bool {
        let mut state = self.state();
        if state.crash == Some(Crash { step, after: true }) {
            state.is_dead = true;
        }
        !state.is_dead
    }

    /// Begins a request. Never returns if the process is dead.
    pub async fn enter(&self) -> u64 {
        match self.begin() {
            Some(step) => {
                self.wait_while_paused().await;
                step
            }
            None => pending().await,
        }
    }

    /// Ends a request. Never returns if the process is dead.
    pub async fn leave(&self, step: u64) {
        if !self.end(step) {
            pending::<()>().await;
        }
        self.wait_while_paused().await;
    }

    async fn wait_while_paused(&self) {
        loop {
            let woken = self.woken.notified();
            let (is_dead, paused) = {
                let state = self.state();
                (state.is_dead, state.paused)
            };
            if is_dead {
                pending::<()>().await;
            }
            if !paused {
                return;
            }
            woken.await;
        }
    }

    /// The error of a call on local files by a killed process.
    pub fn killed_error() -> io::Error {
        io::Error::other("the process was killed")
    }
}
