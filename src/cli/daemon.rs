//! `daemon`: the same as a sidecar: restore if that is asked for, stream, final flush.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};
use tokio::time::Instant;

use crate::cli::start::{self, First};
use crate::cli::{exit, print};
use crate::config::{Settings, Stream};
use crate::daemon::service::Service;
use crate::daemon::signals::Signals;
use crate::error::{Error, Result};
use crate::sys::{Disk, Owner};

/// How often a process is looked for that is not our child.
const LOOK_FOR_PID: Duration = Duration::from_millis(200);

/// Stream the agent's directory until told to stop, then flush
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond daemon --store 's3://bucket/agents' --index postgres://sessiond@db/sessiond\n\nAs a sidecar that restores first; /readyz answers 200 when the agent may start:\n  sessiond daemon --restore \"$ID\" --http 0.0.0.0:9464\n\nSIGTERM or SIGINT starts the final flush; a second one gives up (exit code 9)."
)]
pub struct Args {
    /// Flush and stop when this process is gone; after SIGTERM, wait for it first
    #[arg(long, env = "SESSIOND_WAIT_PID", value_name = "PID")]
    pub wait_pid: Option<i32>,

    /// What to restore first.
    #[command(flatten)]
    pub first: First,

    /// How to stream.
    #[command(flatten)]
    pub stream: Stream,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let deadline = start::deadline(&args.stream)?;
    args.first.check()?;
    let pid = match args.wait_pid {
        Some(number) if number < 1 => {
            return Err(Error::usage(format!(
                "--wait-pid {number}: no process has that number"
            )));
        }
        Some(number) => Pid::from_raw(number),
        None => None,
    };
    let options = start::options(settings, &args.stream).await?;
    let vitals = start::vitals(&args.stream, false).await?;
    let mut signals = Signals::to_stop()?;
    let prepared = tokio::select! {
        prepared = start::prepare(settings, &args.first, &args.stream, options, &vitals) => prepared,
        stop = signals.stop() => {
            tracing::info!(signal = stop.number, "stopped before streaming began");
            return Ok(exit::OK);
        }
    };
    let streaming = match prepared {
        Ok(streaming) => streaming,
        Err((error, code)) => {
            print::error(&error);
            return Ok(code);
        }
    };
    let mut asked = false;
    let mut until = None;
    tokio::select! {
        stop = signals.stop() => {
            tracing::info!(signal = stop.number, "stopping");
            asked = true;
            until = Some(Instant::now() + deadline);
        }
        () = gone(pid) => tracing::info!("the process that was waited for is gone"),
    }
    if let (Some(until), Some(_)) = (until, pid) {
        // The agent writes once more after its signal: flush when it is gone, or when a second is left.
        let patience = until.checked_sub(Duration::from_secs(1)).unwrap_or(until);
        tokio::select! {
            () = gone(pid) => {}
            () = tokio::time::sleep_until(patience) => tracing::warn!("the process that was waited for is still there; flushing"),
            _ = signals.stop() => return Ok(give_up()),
        }
    }
    let until = until.unwrap_or_else(|| Instant::now() + deadline);
    let flushed = final_flush(streaming.service, until, &mut signals, asked).await?;
    hand_over(&streaming.disk, streaming.owner);
    Ok(if flushed { exit::OK } else { exit::GAVE_UP })
}

/// As root: leaves our own directory to whoever owns the agent's, so that the next one may run as that user.
pub fn hand_over(disk: &Disk, owner: Option<Owner>) {
    if let Some(owner) = owner
        && let Err(cause) = disk.give_state(owner)
    {
        tracing::warn!(%cause, "sessiond's own directory was not handed over");
    }
}

/// The final flush; false if something is not durable. A second request to stop gives up.
pub async fn final_flush(
    service: Service,
    until: Instant,
    signals: &mut Signals,
    mut asked: bool,
) -> Result<bool> {
    let stopping = service.stop(until);
    tokio::pin!(stopping);
    let report = loop {
        tokio::select! {
            report = &mut stopping => break report?,
            stop = signals.stop() => {
                if asked {
                    give_up();
                    return Ok(false);
                }
                tracing::info!(signal = stop.number, "already flushing; once more gives up");
                asked = true;
            }
        }
    };
    Ok(report.left.is_empty())
}

fn give_up() -> u8 {
    tracing::error!(
        "asked twice to stop: giving up; what is not durable is still in the agent's directory"
    );
    exit::GAVE_UP
}

/// Waits until a process is gone; for ever if there is none to wait for. The kernel tells, so nothing wakes in between.
async fn gone(pid: Option<Pid>) {
    let Some(pid) = pid else {
        return std::future::pending().await;
    };
    let waited = tokio::task::spawn_blocking(move || {
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        while poll(&mut [PollFd::new(&process, PollFlags::IN)], None) == Err(Errno::INTR) {}
        Ok(())
    });
    match waited.await {
        Ok(Ok(()) | Err(Errno::SRCH)) => {}
        // A kernel that cannot tell is asked.
        _ => {
            while test_kill_process(pid) != Err(Errno::SRCH) {
                tokio::time::sleep(LOOK_FOR_PID).await;
            }
        }
    }
}
