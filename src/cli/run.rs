//! `run`: restore, stream, run the agent as a child process, final flush.

use std::ffi::OsString;
use std::time::Duration;

use tokio::time::Instant;

use crate::cli::start::{self, RestoreArgs, Streaming};
use crate::cli::{daemon, exit, print};
use crate::config::{Settings, StreamConfig};
use crate::daemon::child::Child;
use crate::daemon::signals::Signals;
use crate::error::Result;

/// Minimum time for the final flush after the agent has exited, even if the deadline has passed.
const MIN_FLUSH_TIME: Duration = Duration::from_secs(1);

/// Restore a session, stream, and run a command as a child process
///
/// Forwards signals to the command. When the command has exited, flushes, and exits with the same
/// code. Exits with 8 if the restore fails; the command is then not started.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond run --session \"$ID\" -- claude --resume \"$ID\"")]
pub struct Args {
    /// Command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,

    /// The session to restore.
    #[command(flatten)]
    pub restore: RestoreArgs,

    /// How to stream.
    #[command(flatten)]
    pub stream: StreamConfig,
}

/// Runs the command.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let deadline = start::flush_deadline(&args.stream)?;
    args.restore.check()?;
    let options = start::options(settings, &args.stream).await?;
    let continues_on_error = args.restore.continues_on_error();
    let health = start::start_probes(&args.stream, continues_on_error).await?;
    // A signal during the restore must stop it cleanly, without a partially written directory.
    let mut signals = Signals::for_child()?;
    let prepared = tokio::select! {
        prepared = start::prepare(settings, &args.restore, &args.stream, options, &health) => prepared,
        signal = signals.termination() => {
            tracing::info!(signal = signal.number, "stopped before the command was started");
            return Ok(128 + u8::try_from(signal.number).unwrap_or(0));
        }
    };
    let streaming = match prepared {
        Ok(streaming) => Some(streaming),
        Err((error, _)) if continues_on_error => {
            tracing::error!(%error, "starting the command without streaming");
            health.set_not_streaming();
            None
        }
        Err((error, code)) => {
            print::error(
                &error
                    .context("start the command")
                    .hint("use --on-restore-error continue to start the command anyway"),
            );
            return Ok(code);
        }
    };
    let mut child = match Child::start(&args.command) {
        Ok(child) => child,
        Err((failure, error)) => {
            print::error(&error);
            if let Some(streaming) = streaming {
                stop(streaming, Instant::now() + deadline, &mut signals, false).await?;
            }
            return Ok(exit::of_command(failure));
        }
    };
    tracing::debug!(pid = child.id(), "started the command");
    let (code, terminated_at) = wait_for(&mut child, &mut signals).await;
    if let Some(streaming) = streaming {
        // The agent writes its last lines after the signal, so only now is everything on disk. The
        // stop timeout of the platform starts with the signal.
        let now = Instant::now();
        let deadline = terminated_at.map_or(now + deadline, |at| {
            (at + deadline).max(now + MIN_FLUSH_TIME)
        });
        stop(streaming, deadline, &mut signals, terminated_at.is_some()).await?;
    }
    Ok(u8::try_from(code).unwrap_or(exit::FAILED))
}

/// Forwards signals until the child exits. Returns its exit code, and the time of the first signal
/// that asked it to terminate.
async fn wait_for(child: &mut Child, signals: &mut Signals) -> (i32, Option<Instant>) {
    let mut terminated_at = None;
    loop {
        let signal = signals.next().await;
        if signal.is_child_exit() {
            if let Some(code) = child.reap() {
                return (code, terminated_at);
            }
            continue;
        }
        if signal.is_termination() {
            terminated_at.get_or_insert_with(Instant::now);
        }
        child.forward(signal);
    }
}

/// Runs the final flush.
async fn stop(
    streaming: Streaming,
    deadline: Instant,
    signals: &mut Signals,
    is_terminated: bool,
) -> Result<()> {
    let Streaming { service, restore } = streaming;
    let is_durable = daemon::final_flush(service, deadline, signals, is_terminated).await?;
    if !is_durable {
        tracing::error!(
            root = %restore.disk().root().display(),
            "the last bytes of the command are not durable; they are still in the agent's directory"
        );
    }
    daemon::hand_over_state(restore.disk(), restore.owner());
    Ok(())
}
