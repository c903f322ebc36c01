//! The agent as our child: started, sent the signals we get, waited for; and every orphan reaped, for we may be PID 1.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use crate::daemon::signals::Arrived;
use crate::error::{Error, ErrorKind, Result};

/// A running agent.
pub struct Child {
    pid: Pid,
    exited: Option<i32>,
}

/// Why a command could not be started, as a shell would put it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotStarted {
    /// 127.
    NotFound,
    /// 126.
    NotExecutable,
}

impl Child {
    /// Starts `command`; it has our terminal, our directory and our environment.
    pub fn start(command: &[OsString]) -> Result<Child, (NotStarted, Error)> {
        let Some((program, arguments)) = command.split_first() else {
            return Err((
                NotStarted::NotFound,
                Error::usage("run: no command given").hint("sessiond run -- COMMAND ARGS…"),
            ));
        };
        // Of the same process group: a key at the terminal then reaches it as it would without us.
        let spawned = Command::new(program).args(arguments).arg0(program).spawn();
        let spawned = spawned.map_err(|cause| {
            let (why, hint) = match cause.kind() {
                std::io::ErrorKind::NotFound => (
                    NotStarted::NotFound,
                    "see that it is installed, and on the PATH",
                ),
                _ => (
                    NotStarted::NotExecutable,
                    "see that it is a program, and that this user may execute it",
                ),
            };
            (
                why,
                Error::usage(format!("run {}", program.to_string_lossy()))
                    .caused_by(cause)
                    .hint(hint),
            )
        })?;
        let pid = i32::try_from(spawned.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| {
            (
                NotStarted::NotExecutable,
                Error::new(ErrorKind::Internal, "run: the child has no process id"),
            )
        })?;
        // Dropping std's handle neither kills nor waits; `reap` does the waiting, for all children alike.
        Ok(Child { pid, exited: None })
    }

    /// Its process id.
    pub fn id(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Passes a signal on. What the terminal sent has reached the agent already.
    pub fn forward(&self, arrived: Arrived) {
        if arrived.from_kernel || self.exited.is_some() {
            return;
        }
        if let Some(signal) = Signal::from_named_raw(arrived.number)
            && let Err(error) = kill_process(self.pid, signal)
        {
            tracing::warn!(%error, signal = arrived.number, "the agent did not get a signal");
        }
    }

    /// Waits for every child that has died, ours and orphans; answers the exit code once the agent is among them: its
    /// own, or 128 and the number of the signal that killed it.
    pub fn reap(&mut self) -> Option<i32> {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if pid == self.pid {
                let signalled = status.terminating_signal().map(|signal| 128 + signal);
                self.exited = status.exit_status().or(signalled).or(Some(1));
            }
        }
        self.exited
    }
}
