//! The agent as a child process: starts it, forwards signals to it and waits for it. Also reaps
//! orphans, because sessiond may run as PID 1.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use crate::daemon::child_environment::ChildEnvironment;
use crate::daemon::signals::ReceivedSignal;
use crate::error::{Error, ErrorKind, Result};

/// The agent's process.
pub struct Child {
    pid: Pid,
    exit_code: Option<i32>,
}

/// Why a command could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartFailure {
    /// The command does not exist; a shell returns 127.
    NotFound,
    /// The command cannot be executed; a shell returns 126.
    NotExecutable,
}

impl Child {
    /// Starts `command` with the terminal and working directory of this process, and with its
    /// environment without sessiond's credentials, plus `variables`.
    pub fn start(
        command: &[OsString],
        environment: &ChildEnvironment,
        variables: &[(&str, String)],
    ) -> Result<Child, (StartFailure, Error)> {
        let Some((program, arguments)) = command.split_first() else {
            return Err((
                StartFailure::NotFound,
                Error::usage("no command given").hint("run \"sessiond run -- COMMAND ARGS…\""),
            ));
        };
        // The child stays in this process group, so that it receives a key such as Ctrl-C directly.
        let mut started = Command::new(program);
        started.args(arguments).arg0(program);
        let removed = environment.removed(std::env::vars_os().map(|(name, _)| name));
        for name in &removed {
            started.env_remove(name);
        }
        tracing::debug!(
            ?removed,
            "the command gets no credentials of sessiond; use --pass-env to pass a variable"
        );
        started.envs(variables.iter().map(|(name, value)| (name, value)));
        let spawned = started.spawn().map_err(|cause| {
            let (failure, hint) = match cause.kind() {
                std::io::ErrorKind::NotFound => (
                    StartFailure::NotFound,
                    "install the command, or add its directory to PATH",
                ),
                _ => (
                    StartFailure::NotExecutable,
                    "run \"ls -l\" on the command to check that this user may execute it",
                ),
            };
            (
                failure,
                Error::usage(format!("start {}", program.to_string_lossy()))
                    .caused_by(cause)
                    .hint(hint),
            )
        })?;
        let pid = i32::try_from(spawned.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| {
            (
                StartFailure::NotExecutable,
                Error::new(ErrorKind::Internal, "the child has no process ID"),
            )
        })?;
        // Dropping the handle neither kills the child nor waits for it; `reap` waits for all
        // children.
        Ok(Child {
            pid,
            exit_code: None,
        })
    }

    /// The process ID.
    pub fn id(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Forwards a signal, unless the terminal has already sent it to the agent.
    pub fn forward(&self, signal: ReceivedSignal) {
        if signal.is_from_kernel || self.exit_code.is_some() {
            return;
        }
        if let Some(named) = Signal::from_named_raw(signal.number) {
            self.send(named);
        }
    }

    /// Sends a signal.
    pub fn send(&self, signal: Signal) {
        if self.exit_code.is_none()
            && let Err(error) = kill_process(self.pid, signal)
        {
            tracing::warn!(%error, signal = signal.as_raw(), "sending a signal to the agent failed");
        }
    }

    /// Reaps every child that has exited, including orphans. Returns the exit code once the agent
    /// has exited: its own, or 128 plus the number of the signal that killed it.
    pub fn reap(&mut self) -> Option<i32> {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if pid == self.pid {
                let signaled = status.terminating_signal().map(|signal| 128 + signal);
                self.exit_code = status.exit_status().or(signaled).or(Some(1));
            }
        }
        self.exit_code
    }
}
