//! `run`: restore, stream, run the agent as a child, final flush.

use std::ffi::OsString;
use std::time::Duration;

use tokio::time::Instant;

use crate::cli::start::{self, First, OnRestoreError, Streaming};
use crate::cli::{daemon, exit, print};
use crate::config::{Settings, Stream};
use crate::daemon::child::Child;
use crate::daemon::signals::Signals;
use crate::error::Result;

/// The final flush has at least this long after the agent has exited, however long the agent took to stop.
const LEAST_AFTER_EXIT: Duration = Duration::from_secs(1);

/// Restore a session, stream, run a command as a child, flush when it has exited
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond run --session \"$ID\" -- claude --resume \"$ID\"\n\nExits with the command's own code; 8 if the restore failed and it was not launched."
)]
pub struct Args {
    /// What to restore first.
    #[command(flatten)]
    pub first: First,

    /// How to stream.
    #[command(flatten)]
    pub stream: Stream,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let deadline = start::deadline(&args.stream)?;
    args.first.check()?;
    let options = start::options(settings, &args.stream).await?;
    let vitals = start::vitals(
        &args.stream,
        args.first.on_restore_error == OnRestoreError::Continue,
    )
    .await?;
    // From here on a signal is ours: one that comes during the restore stops us, not a half-written directory.
    let mut signals = Signals::all()?;
    let prepared = tokio::select! {
        prepared = start::prepare(settings, &args.first, &args.stream, options, &vitals) => prepared,
        stop = signals.stop() => {
            tracing::info!(signal = stop.number, "stopped before the command was launched");
            return Ok(128 + u8::try_from(stop.number).unwrap_or(0));
        }
    };
    let streaming = match prepared {
        Ok(streaming) => Some(streaming),
        Err((error, _)) if args.first.on_restore_error == OnRestoreError::Continue => {
            tracing::error!(%error, "nothing is streamed; launching the command all the same, as asked");
            vitals.without();
            None
        }
        Err((error, code)) => {
            print::error(
                &error
                    .context("run")
                    .hint("--on-restore-error continue launches the command all the same"),
            );
            return Ok(code);
        }
    };
    let mut child = match Child::start(&args.command) {
        Ok(child) => child,
        Err((why, error)) => {
            print::error(&error);
            if let Some(streaming) = streaming {
                stop(streaming, Instant::now() + deadline, &mut signals, false).await?;
            }
            return Ok(exit::of_command(why));
        }
    };
    tracing::debug!(pid = child.id(), "launched");
    let mut stop_asked = None;
    let code = loop {
        let arrived = signals.next().await;
        if arrived.is_child() {
            if let Some(code) = child.reap() {
                break code;
            }
            continue;
        }
        if arrived.asks_to_stop() {
            stop_asked.get_or_insert_with(Instant::now);
        }
        child.forward(arrived);
    };
    if let Some(streaming) = streaming {
        // The agent wrote its last lines after the signal; only now is everything there. The platform's patience counts
        // from the signal.
        let now = Instant::now();
        let until = stop_asked.map_or(now + deadline, |asked: Instant| {
            (asked + deadline).max(now + LEAST_AFTER_EXIT)
        });
        stop(streaming, until, &mut signals, stop_asked.is_some()).await?;
    }
    Ok(u8::try_from(code).unwrap_or(exit::FAILED))
}

/// The final flush.
async fn stop(
    streaming: Streaming,
    until: Instant,
    signals: &mut Signals,
    asked: bool,
) -> Result<()> {
    let flushed = daemon::final_flush(streaming.service, until, signals, asked).await?;
    if !flushed {
        tracing::error!(
            "the command's last bytes are not durable; they are still in {}",
            streaming.disk.root().display()
        );
    }
    daemon::hand_over(&streaming.disk, streaming.owner);
    Ok(())
}
