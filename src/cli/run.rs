//! `run`: restore, stream, run the agent as a child process, final flush.

use std::ffi::OsString;
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use crate::cli::daemon::FinalFlush;
use crate::cli::logging::TerminalSilence;
use crate::cli::start::{self, LimitArgs, NotStarted, RestoreArgs, Streaming, TakeoverArgs};
use crate::cli::{daemon, exit, print};
use crate::config::{self, Settings, StreamConfig};
use crate::daemon::child::Child;
use crate::daemon::child_environment::ChildEnvironment;
use crate::daemon::signals::Signals;
use crate::error::{Error, Result};
use crate::operations::launch::{self, Launch};

/// Minimum time for the final flush after the agent has exited, even if the deadline has passed.
const MIN_FLUSH_TIME: Duration = Duration::from_secs(1);

/// Restore a session, stream, and run a command as a child process
///
/// Forwards signals to the command. When the command has exited, flushes, and exits with the same
/// code. Exits with 8 if the restore fails; the command is then not started.
///
/// {session-args} in the command becomes the agent's arguments for the session: those of a new
/// session on the first start, those that resume it on every other start. The command also gets
/// SESSIOND_SESSION_ID, and SESSIOND_RESTORED (1 if the session existed before, otherwise 0).
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond run --request \"$JOB\" -- claude {session-args} -p \"$PROMPT\"
  sessiond run --request \"$JOB\" --agent codex -- codex exec {session-args} \"$PROMPT\"
  sessiond run --session \"$ID\" -- claude {session-args}")]
pub struct Args {
    /// Command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,

    /// Kill the command if it still runs this long after SIGTERM [default: never]
    ///
    /// Use less than --flush-deadline, which also starts with the signal, so that the final flush can
    /// follow. SIGINT does not count: agents use it to interrupt a turn.
    #[arg(long, env = "SESSIOND_KILL_AFTER", value_name = "TIME")]
    pub kill_after: Option<String>,

    /// Variables that the command gets although sessiond uses them: NAME or PREFIX*
    ///
    /// The command gets no SESSIOND_ variable with settings of the store, the index or keys. If the
    /// store is in S3, it gets no AWS credentials, and if the index is in PostgreSQL, no PG variable.
    /// An agent that calls AWS itself, such as Claude Code on Bedrock, needs --pass-env 'AWS_*'.
    #[arg(
        long,
        env = "SESSIOND_PASS_ENV",
        value_name = "NAMES",
        value_delimiter = ','
    )]
    pub pass_env: Vec<String>,

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

/// Runs the command.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let deadline = start::flush_deadline(&args.stream)?;
    let kill_after = args.kill_after.as_deref();
    let patience = Patience {
        after_signal: kill_after
            .map(|text| config::duration("--kill-after", Some(text), Duration::MAX))
            .transpose()?,
        after_takeover: deadline,
    };
    args.restore.check()?;
    let options = start::options(settings, &args.stream).await?;
    let options = args.limit.apply(options)?;
    let continues_on_error = args.restore.continues_on_error();
    let health = start::start_probes(&args.stream, continues_on_error).await?;
    // A signal during the restore must stop it cleanly, without a partially written directory.
    let mut signals = Signals::for_child()?;
    let prepared = tokio::select! {
        prepared = Box::pin(start::prepare(settings, &args.restore, &args.stream, options, &health)) => prepared,
        signal = signals.termination() => {
            tracing::info!(signal = signal.number, "stopped before the command was started");
            return Ok(128 + u8::try_from(signal.number).unwrap_or(0));
        }
    };
    let (streaming, launch) = match prepared {
        Ok(streaming) => {
            let launch = streaming.launch.clone();
            (Some(streaming), Some(launch))
        }
        Err(NotStarted { error, launch, .. }) if continues_on_error => {
            tracing::error!(%error, "starting the command without streaming");
            health.set_not_streaming();
            (None, launch)
        }
        Err(NotStarted { error, code, .. }) => {
            print::error(
                &error
                    .context("start the command")
                    .hint("use --on-restore-error continue to start the command anyway"),
            );
            return Ok(code);
        }
    };
    // From here on, the terminal belongs to the command.
    let silence = TerminalSilence::start();
    let environment = child_environment(settings, args.pass_env);
    let mut child = match start_child(&args.command, &environment, launch.as_ref()) {
        Ok(child) => child,
        Err((code, error)) => {
            drop(silence);
            print::error(&error);
            if let Some(streaming) = streaming {
                stop(streaming, Instant::now() + deadline, &mut signals, false).await?;
            }
            return Ok(code);
        }
    };
    tracing::debug!(pid = child.id(), "started the command");
    let takeover = async {
        match &streaming {
            Some(streaming) => args.takeover.wait(&streaming.service).await,
            None => std::future::pending().await,
        }
    };
    let (code, terminated_at) = wait_for(&mut child, &mut signals, takeover, patience).await;
    drop(silence);
    if let Some(streaming) = streaming {
        // The agent writes its last lines after the signal, so only now is everything on disk. The
        // stop timeout of the platform starts with the signal.
        let now = Instant::now();
        let deadline = terminated_at.map_or(now + deadline, |at| {
            (at + deadline).max(now + MIN_FLUSH_TIME)
        });
        let is_terminated = terminated_at.is_some();
        let ended = stop(streaming, deadline, &mut signals, is_terminated).await?;
        if ended == FinalFlush::Fenced {
            return Ok(exit::FENCED);
        }
    }
    Ok(u8::try_from(code).unwrap_or(exit::FAILED))
}

/// The environment of the command.
fn child_environment(settings: &Settings, pass: Vec<String>) -> ChildEnvironment {
    let has_scheme = |url: &Option<String>, scheme: &str| {
        url.as_ref().is_some_and(|url| url.starts_with(scheme))
    };
    ChildEnvironment {
        uses_aws: has_scheme(&settings.store.url, "s3:"),
        uses_postgres: has_scheme(&settings.index.url, "postgres"),
        pass,
    }
}

/// Starts the command with the arguments and variables of the session. An error comes with its exit
/// code.
fn start_child(
    command: &[OsString],
    environment: &ChildEnvironment,
    launch: Option<&Launch>,
) -> Result<Child, (u8, Error)> {
    let (command, variables) = match launch {
        Some(launch) => {
            let expanded = launch.expand(command);
            let expanded = expanded.map_err(|error| (exit::of(error.kind()), error))?;
            (expanded, launch.variables().to_vec())
        }
        None => (launch::without_placeholder(command), Vec::new()),
    };
    Child::start(&command, environment, &variables)
        .map_err(|(failure, error)| (exit::of_command(failure), error))
}

/// How long a command may run after it was asked to terminate.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// After a signal; none: without limit.
    after_signal: Option<Duration>,
    /// After another writer took the session over.
    after_takeover: Duration,
}

/// Forwards signals until the child exits. Returns its exit code, and the time of the first signal
/// that asked it to terminate. After a takeover, the child is asked to terminate. It is killed if it
/// has not exited in time.
async fn wait_for(
    child: &mut Child,
    signals: &mut Signals,
    takeover: impl Future<Output = ()>,
    patience: Patience,
) -> (i32, Option<Instant>) {
    let mut terminated_at = None;
    let mut kill_at = None;
    tokio::pin!(takeover);
    loop {
        let kill = async {
            match kill_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let signal = tokio::select! {
            signal = signals.next() => signal,
            () = &mut takeover, if terminated_at.is_none() => {
                tracing::error!("another writer took the session over; stopping the command");
                child.send(Signal::TERM);
                terminated_at = Some(Instant::now());
                kill_at = Some(Instant::now() + patience.after_takeover);
                continue;
            }
            () = kill => {
                tracing::error!("the command ignores SIGTERM; killing it");
                child.send(Signal::KILL);
                kill_at = None;
                continue;
            }
        };
        if signal.is_child_exit() {
            if let Some(code) = child.reap() {
                return (code, terminated_at);
            }
            continue;
        }
        if signal.is_termination() {
            let at = *terminated_at.get_or_insert_with(Instant::now);
            // An agent uses Ctrl-C to interrupt a turn, so SIGINT does not ask it to exit.
            if signal.number == Signal::TERM.as_raw() {
                kill_at = kill_at.or(patience.after_signal.map(|patience| at + patience));
            }
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
) -> Result<FinalFlush> {
    let Streaming {
        service, restore, ..
    } = streaming;
    let ended = daemon::final_flush(service, deadline, signals, is_terminated).await?;
    if ended == FinalFlush::NotDurable {
        tracing::error!(
            root = %restore.disk().root().display(),
            "the last bytes of the command are not durable; they are still in the agent's directory"
        );
    }
    Ok(ended)
}
