//! `daemon`: restore, stream until stopped, final flush.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};
use tokio::time::{Instant, timeout_at};

use crate::cli::start::{self, LimitArgs, RestoreArgs, TakeoverArgs};
use crate::cli::{exit, print};
use crate::config::{Settings, StreamConfig};
use crate::daemon::service::{Service, ServiceOptions};
use crate::daemon::signals::Signals;
use crate::error::{Error, Result};

/// How often a process is checked on a kernel that does not report its exit.
const PID_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Part of the deadline that is reserved for the final flush while the daemon waits for a process.
const FLUSH_RESERVE: Duration = Duration::from_secs(1);

/// Stream the agent's directory until stopped, then flush
///
/// SIGTERM or SIGINT starts the final flush, also while the daemon starts. A second signal ends it
/// early, with exit code 9. As a sidecar that restores first, /readyz returns 200 once the agent may start.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond daemon --store 's3://bucket/agents' --index postgres://sessiond@db/sessiond
  sessiond daemon --session \"$ID\" --http 0.0.0.0:9464")]
pub struct Args {
    /// Flush and exit when this process has exited [default: none]
    ///
    /// After SIGTERM, the daemon waits for the process to exit before it starts the final flush.
    #[arg(long, env = "SESSIOND_WAIT_PID", value_name = "PID")]
    pub wait_pid: Option<i32>,

    /// The reaction to a takeover.
    #[command(flatten)]
    pub takeover: TakeoverArgs,

    /// The sessions to write to.
    #[command(flatten)]
    pub limit: LimitArgs,

    /// The session to restore.
    #[command(flatten)]
    pub restore: RestoreArgs,

    /// How to stream.
    #[command(flatten)]
    pub stream: StreamConfig,
}

/// Runs the daemon.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let flush_deadline = start::flush_deadline(&args.stream)?;
    args.restore.check()?;
    let pid = match args.wait_pid {
        Some(number) if number < 1 => {
            return Err(Error::usage(format!(
                "invalid --wait-pid value {number}: a process ID is positive"
            )));
        }
        Some(number) => Pid::from_raw(number),
        None => None,
    };
    let mut signals = Signals::for_termination()?;
    let options = start::options(settings, &args.stream).await?;
    let options = args.limit.apply(options)?;
    let health = start::start_probes(&args.stream, false).await?;
    let prepare = start::prepare(
        settings,
        &args.restore,
        &args.stream,
        options.clone(),
        &health,
    );
    let prepared = tokio::select! {
        prepared = Box::pin(prepare) => prepared,
        signal = signals.termination() => {
            tracing::info!(signal = signal.number, "stopping before streaming started; flushing");
            let deadline = Instant::now() + flush_deadline;
            return flush_unstarted(settings, &args, options, deadline, &mut signals).await;
        }
    };
    let streaming = match prepared {
        Ok(streaming) => streaming,
        Err(failure) => {
            print::error(&failure.error);
            return Ok(failure.code);
        }
    };
    let mut deadline = None;
    tokio::select! {
        signal = signals.termination() => {
            tracing::info!(signal = signal.number, "stopping");
            deadline = Some(Instant::now() + flush_deadline);
        }
        () = exit_of(pid) => tracing::info!("the --wait-pid process has exited; stopping"),
        () = args.takeover.wait(&streaming.service) => {
            tracing::error!("another writer took the session over; stopping");
        }
    }
    if let (Some(deadline), Some(_)) = (deadline, pid) {
        // The agent still writes after it gets the signal: flush when it has exited.
        let latest = deadline.checked_sub(FLUSH_RESERVE).unwrap_or(deadline);
        tokio::select! {
            () = exit_of(pid) => {}
            () = tokio::time::sleep_until(latest) => {
                tracing::warn!("the --wait-pid process is still running; flushing");
            }
            _ = signals.termination() => return Ok(abort_flush()),
        }
    }
    let is_terminated = deadline.is_some();
    let deadline = deadline.unwrap_or_else(|| Instant::now() + flush_deadline);
    let ended = final_flush(streaming.service, deadline, &mut signals, is_terminated).await?;
    Ok(ended.exit_code())
}

/// How the final flush ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinalFlush {
    /// Everything is durable.
    Durable,
    /// Everything is durable, but another writer owns a session, and its last entries are on a
    /// branch.
    Fenced,
    /// Something is not durable.
    NotDurable,
}

impl FinalFlush {
    /// The exit code of a process without a child.
    pub fn exit_code(self) -> u8 {
        match self {
            FinalFlush::Durable => exit::OK,
            FinalFlush::Fenced => exit::FENCED,
            FinalFlush::NotDurable => exit::NOT_DURABLE,
        }
    }
}

/// Uploads what is in the agent's directory if the daemon is stopped before it streams, for example
/// while its restore waits for a slow store. An earlier process may have left bytes that are not
/// durable. Restores nothing.
async fn flush_unstarted(
    settings: &Settings,
    args: &Args,
    options: ServiceOptions,
    deadline: Instant,
    signals: &mut Signals,
) -> Result<u8> {
    let start = start::prepare_without_restore(settings, &args.restore, &args.stream, options);
    let streaming = tokio::select! {
        started = timeout_at(deadline, start) => match started {
            Ok(Ok(streaming)) => streaming,
            Ok(Err(failure)) => {
                print::error(&failure.error);
                return Ok(failure.code);
            }
            Err(_) => {
                tracing::error!("the deadline passed before the final flush started");
                return Ok(exit::NOT_DURABLE);
            }
        },
        _ = signals.termination() => return Ok(abort_flush()),
    };
    let ended = final_flush(streaming.service, deadline, signals, true).await?;
    Ok(ended.exit_code())
}

/// Runs the final flush. A second termination signal ends it.
pub async fn final_flush(
    service: Service,
    deadline: Instant,
    signals: &mut Signals,
    mut is_terminated: bool,
) -> Result<FinalFlush> {
    let flush = service.stop(deadline);
    tokio::pin!(flush);
    let report = loop {
        tokio::select! {
            report = &mut flush => break report?,
            signal = signals.termination() => {
                if is_terminated {
                    abort_flush();
                    return Ok(FinalFlush::NotDurable);
                }
                tracing::info!(signal = signal.number, "the final flush is running; a second signal stops it");
                is_terminated = true;
            }
        }
    };
    Ok(match (report.is_durable(), report.fenced.is_empty()) {
        (false, _) => FinalFlush::NotDurable,
        (true, false) => FinalFlush::Fenced,
        (true, true) => FinalFlush::Durable,
    })
}

fn abort_flush() -> u8 {
    tracing::error!(
        "a second signal ended the final flush; bytes that are not durable are still in the agent's directory"
    );
    exit::NOT_DURABLE
}

/// Waits until a process has exited. Without a process, waits forever.
async fn exit_of(pid: Option<Pid>) {
    let Some(pid) = pid else {
        return std::future::pending().await;
    };
    let wait = tokio::task::spawn_blocking(move || {
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        while poll(&mut [PollFd::new(&process, PollFlags::IN)], None) == Err(Errno::INTR) {}
        Ok(())
    });
    match wait.await {
        Ok(Ok(()) | Err(Errno::SRCH)) => {}
        // A kernel without pidfd: poll.
        _ => {
            while test_kill_process(pid) != Err(Errno::SRCH) {
                tokio::time::sleep(PID_CHECK_INTERVAL).await;
            }
        }
    }
}
