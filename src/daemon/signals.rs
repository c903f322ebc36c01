//! Signals, as a stream, with who sent them: what the terminal sends reaches the agent without us.

use futures_util::StreamExt;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use signal_hook_tokio::SignalsInfo;

use crate::error::{Error, ErrorKind, Result};

/// A signal that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    /// Its number.
    pub number: i32,
    /// Whether the kernel sent it, as it does for a key at the terminal: the whole foreground group has got it then.
    pub from_kernel: bool,
}

impl Arrived {
    /// Whether it asks to stop.
    pub fn asks_to_stop(&self) -> bool {
        matches!(self.number, SIGTERM | SIGINT)
    }

    /// Whether a child died.
    pub fn is_child(&self) -> bool {
        self.number == SIGCHLD
    }
}

/// The signals we take.
pub struct Signals {
    inner: SignalsInfo<WithOrigin>,
}

impl Signals {
    /// Takes every signal that is passed on to a child.
    pub fn all() -> Result<Signals> {
        Signals::of(&[
            SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCHLD,
        ])
    }

    /// Takes those that ask to stop.
    pub fn to_stop() -> Result<Signals> {
        Signals::of(&[SIGTERM, SIGINT])
    }

    fn of(numbers: &[i32]) -> Result<Signals> {
        let inner = SignalsInfo::<WithOrigin>::new(numbers)
            .map_err(|cause| Error::new(ErrorKind::Internal, "take signals").caused_by(cause))?;
        Ok(Signals { inner })
    }

    /// Waits for the next one.
    pub async fn next(&mut self) -> Arrived {
        match self.inner.next().await {
            Some(origin) => Arrived {
                number: origin.signal,
                from_kernel: matches!(origin.cause, Cause::Kernel),
            },
            // The stream ends only when its handle is closed, which nobody does.
            None => std::future::pending().await,
        }
    }

    /// Waits for one that asks to stop.
    pub async fn stop(&mut self) -> Arrived {
        loop {
            let arrived = self.next().await;
            if arrived.asks_to_stop() {
                return arrived;
            }
        }
    }
}
