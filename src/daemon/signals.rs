//! Signals as a stream, with their sender. A signal that the terminal sends reaches the agent
//! directly.

use futures_util::StreamExt;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use signal_hook_tokio::SignalsInfo;

use crate::error::{Error, ErrorKind, Result};

/// A signal that this process received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedSignal {
    /// The number of the signal.
    pub number: i32,
    /// Whether the kernel sent it, as it does for a key such as Ctrl-C. The whole foreground
    /// process group receives such a signal.
    pub is_from_kernel: bool,
}

impl ReceivedSignal {
    /// Whether it requests termination.
    pub fn is_termination(&self) -> bool {
        matches!(self.number, SIGTERM | SIGINT)
    }

    /// Whether a child process has exited.
    pub fn is_child_exit(&self) -> bool {
        self.number == SIGCHLD
    }
}

/// A stream of signals.
pub struct Signals {
    inner: SignalsInfo<WithOrigin>,
}

impl Signals {
    /// Subscribes to the signals that are forwarded to a child process, and to SIGCHLD.
    pub fn for_child() -> Result<Signals> {
        Signals::subscribe(&[
            SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCHLD,
        ])
    }

    /// Subscribes to the signals that request termination.
    pub fn for_termination() -> Result<Signals> {
        Signals::subscribe(&[SIGTERM, SIGINT])
    }

    fn subscribe(numbers: &[i32]) -> Result<Signals> {
        let inner = SignalsInfo::<WithOrigin>::new(numbers).map_err(|cause| {
            Error::new(ErrorKind::Internal, "install signal handlers").caused_by(cause)
        })?;
        Ok(Signals { inner })
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> ReceivedSignal {
        match self.inner.next().await {
            Some(origin) => ReceivedSignal {
                number: origin.signal,
                is_from_kernel: matches!(origin.cause, Cause::Kernel),
            },
            // The stream ends only when its handle is closed, which never happens.
            None => std::future::pending().await,
        }
    }

    /// Waits for a signal that requests termination.
    pub async fn termination(&mut self) -> ReceivedSignal {
        loop {
            let signal = self.next().await;
            if signal.is_termination() {
                return signal;
            }
        }
    }
}
