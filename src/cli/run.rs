//! `run`: restore, stream, run the agent as a child, final flush.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use tokio::time::Instant;

use crate::cli::select::Latest;
use crate::cli::{daemon, exit, print, restore, select};
use crate::config::{self, Settings, Stream};
use crate::daemon::child::Child;
use crate::daemon::lock::{self, Lock};
use crate::daemon::service::Service;
use crate::daemon::signals::Signals;
use crate::error::{Error, Result};
use crate::model::LogName;
use crate::restore::Options;
use crate::sys::{Disk, Owner};
use crate::wire::Parts;

/// The final flush has at least this long after the agent has exited, however long the agent took to stop.
const LEAST_AFTER_EXIT: Duration = Duration::from_secs(1);

/// What to do when the restore fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnRestoreError {
    /// Stop; the command is not launched.
    Fail,
    /// Launch the command all the same, with what is there.
    Continue,
}

/// Restore a session, stream, run a command as a child, flush when it has exited
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond run --session \"$ID\" -- claude --resume \"$ID\"\n\nExits with the command's own code; 8 if the restore failed and it was not launched."
)]
pub struct Args {
    /// Restore this session first (its id, or the beginning of it)
    #[arg(long, env = "SESSIOND_SESSION", value_name = "ID", conflicts_with_all = ["latest", "request"])]
    pub session: Option<String>,

    /// Restore the session that was written last
    #[arg(long, env = "SESSIOND_LATEST")]
    pub latest: bool,

    /// Restore the session of this request that was written last
    #[arg(long, env = "SESSIOND_REQUEST", value_name = "ID")]
    pub request: Option<String>,

    /// With --latest: only sessions of the project in this folder
    #[arg(long, env = "SESSIOND_PROJECT", value_name = "DIR", requires = "latest")]
    pub project: Option<PathBuf>,

    /// Put the session where the agent looks for it when it runs in this folder, from whichever project it was in
    #[arg(long, env = "SESSIOND_CWD", value_name = "DIR")]
    pub cwd: Option<PathBuf>,

    /// The point to go back to: latest, turn, turn:N, seq:N, a time, or a checkpoint's number or name [default: latest]
    #[arg(long, env = "SESSIOND_AT", value_name = "POINT")]
    pub at: Option<String>,

    /// A session that is not stored yet is an error
    #[arg(long, env = "SESSIOND_MUST_EXIST")]
    pub must_exist: bool,

    /// Move local files that differ aside (to .sessiond/aside) instead of stopping
    #[arg(long, env = "SESSIOND_FORCE")]
    pub force: bool,

    /// Give the agent transcripts without torn, glued or empty lines; as they were, they are kept in .sessiond/aside
    #[arg(long, env = "SESSIOND_REPAIR")]
    pub repair: bool,

    /// Whose the files shall be, when run as root [default: the owner of the agent's folder]
    #[arg(long, env = "SESSIOND_OWNER", value_name = "USER:GROUP")]
    pub owner: Option<String>,

    /// What to do when the restore fails
    #[arg(long, env = "SESSIOND_ON_RESTORE_ERROR", default_value = "fail")]
    pub on_restore_error: OnRestoreError,

    /// How to stream.
    #[command(flatten)]
    pub stream: Stream,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let deadline = config::duration("--flush-deadline", args.stream.flush_deadline.as_deref(), daemon::FLUSH_DEADLINE)?;
    args.stream.wishes()?;
    if args.session.as_deref().is_some_and(|id| id.trim().is_empty()) {
        return Err(Error::usage("run: --session is empty").hint("leave it out where there is no session to restore"));
    }
    // From here on a signal is ours: one that comes during the restore stops us, not a half-written folder.
    let mut signals = Signals::all()?;
    let prepared = tokio::select! {
        prepared = prepare(settings, &args) => prepared,
        stop = signals.stop() => {
            tracing::info!(signal = stop.number, "stopped before the command was launched");
            return Ok(128 + u8::try_from(stop.number).unwrap_or(0));
        }
    };
    let streaming = match prepared {
        Ok(streaming) => Some(streaming),
        Err((error, _)) if args.on_restore_error == OnRestoreError::Continue => {
            tracing::error!(%error, "nothing is streamed; launching the command all the same, as asked");
            None
        }
        Err((error, code)) => {
            print::error(&error.doing("run").hint("--on-restore-error continue launches the command all the same"));
            return Ok(code);
        }
    };
    let mut child = match Child::start(&args.command) {
        Ok(child) => child,
        Err((why, error)) => {
            print::error(&error);
            if let Some(streaming) = streaming {
                streaming.stop(Instant::now() + deadline, &mut signals, false).await?;
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
        let until = stop_asked.map_or(now + deadline, |asked: Instant| (asked + deadline).max(now + LEAST_AFTER_EXIT));
        streaming.stop(until, &mut signals, stop_asked.is_some()).await?;
    }
    Ok(u8::try_from(code).unwrap_or(exit::FAILED))
}

/// What runs beside the command.
struct Streaming {
    service: Service,
    disk: Arc<Disk>,
    owner: Option<Owner>,
    _lock: Lock,
}

impl Streaming {
    async fn stop(self, until: Instant, signals: &mut Signals, asked: bool) -> Result<()> {
        let flushed = daemon::final_flush(self.service, until, signals, asked).await?;
        if !flushed {
            tracing::error!("the command's last bytes are not durable; they are still in {}", self.disk.root().display());
        }
        daemon::hand_over(&self.disk, self.owner);
        Ok(())
    }
}

/// Restores and starts streaming; an error comes with the exit code it means.
async fn prepare(settings: &Settings, args: &Args) -> Result<Streaming, (Error, u8)> {
    let plain = |error: Error| {
        let code = exit::of(error.kind());
        (error, code)
    };
    let parts = Parts::make(settings, args.stream.parallel).await.map_err(plain)?;
    let disk = parts.folder().map_err(plain)?;
    let owner = select::owner(args.owner.as_deref(), &disk).map_err(plain)?;
    let lock = lock::take(disk.root(), owner).map_err(plain)?;
    let stale = match restore_first(&parts, args, owner).await {
        Ok(names) => names,
        Err(error) if args.on_restore_error == OnRestoreError::Continue => {
            tracing::error!(%error, "the restore failed; going on without, as asked");
            Vec::new()
        }
        Err(error) => return Err((error, exit::NOT_RESTORED)),
    };
    let options = daemon::options(&args.stream).map_err(plain)?;
    let service = Service::start(&parts, options, stale).await.map_err(plain)?;
    Ok(Streaming { service, disk, owner, _lock: lock })
}

/// There is no such session.
fn nothing(parts: &Parts, args: &Args) -> Result<Vec<LogName>> {
    let asked = args.session.is_some() || args.latest || args.request.is_some();
    if asked && args.must_exist {
        return Err(select::nothing(parts, args.session.as_deref(), args.request.as_deref()));
    }
    if asked {
        tracing::info!(session = args.session.as_deref().unwrap_or("latest"), "nothing stored yet; starting afresh");
    }
    Ok(Vec::new())
}

async fn restore_first(parts: &Parts, args: &Args, owner: Option<Owner>) -> Result<Vec<LogName>> {
    let latest = Latest { latest: args.latest, project: args.project.as_deref(), request: args.request.as_deref() };
    let project = args.cwd.as_deref().map(|cwd| select::next_project(parts, cwd)).transpose()?;
    let point = select::point(args.at.as_deref())?;
    let Some(id) = select::session(parts, args.session.as_deref(), latest).await? else { return nothing(parts, args) };
    let (force, repair) = (args.force, args.repair);
    let options = Options { project, force, repair, dry_run: false, claim: true, owner, ..Options::default() };
    let reports = match restore::session(parts, &id, &point, &options).await {
        Err(error) if select::is_missing(parts, args.session.as_deref(), &error).await? => return nothing(parts, args),
        done => done?,
    };
    for report in &reports {
        tracing::info!(session = report.session, entry = report.seq, files = report.written(), bytes = report.bytes, "restored");
        for repaired in &report.repaired {
            tracing::warn!(path = %repaired.path, changes = repaired.changes.len(), original = ?repaired.original, "repaired");
        }
    }
    reports.iter().map(|report| report.session.parse().map_err(|error: Error| error)).collect()
}
