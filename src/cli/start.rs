//! What `run` and `daemon` begin with: what operators ask over HTTP, the restore that was asked for, streaming.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use tokio::time::Instant;

use crate::cli::select::Latest;
use crate::cli::{exit, restore, select};
use crate::config::{self, Settings, Stream};
use crate::daemon::health::HealthState;
use crate::daemon::heartbeat::Heartbeat;
use crate::daemon::lock::{self, Lock};
use crate::daemon::probes;
use crate::daemon::service::{self, Service};
use crate::error::{Error, Result};
use crate::model::LogName;
use crate::restore::{Options, RestoreReport};
use crate::sys::outbound::Outbound;
use crate::sys::{Disk, Operation, Owner, SystemClock};
use crate::wire::{PARALLEL, Parts};

/// Fits a platform that gives ten seconds.
const FLUSH_DEADLINE: Duration = Duration::from_secs(8);

/// A second of work is what a crash may cost.
pub const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

/// Once a minute is what services that wait for a call expect.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(60);

/// What to do when the restore fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnRestoreError {
    /// Stop; no command is launched, and nothing is streamed.
    Fail,
    /// Go on all the same, with what is there.
    Continue,
}

/// What is restored before anything is streamed.
#[derive(Debug, clap::Args)]
pub struct First {
    /// Restore this session first (its id, or the beginning of it)
    #[arg(long, visible_alias = "restore", env = "SESSIOND_SESSION", value_name = "ID", conflicts_with_all = ["latest", "request"])]
    pub session: Option<String>,

    /// Restore the session that was written last
    #[arg(long, env = "SESSIOND_LATEST")]
    pub latest: bool,

    /// Restore the session of this request that was written last
    #[arg(long, env = "SESSIOND_REQUEST", value_name = "ID")]
    pub request: Option<String>,

    /// With --latest: only sessions of the project in this directory
    #[arg(
        long,
        env = "SESSIOND_PROJECT",
        value_name = "DIR",
        requires = "latest"
    )]
    pub project: Option<PathBuf>,

    /// Put the session where the agent looks for it when it runs in this directory, from whichever project it was in
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

    /// Whose the files shall be, when run as root [default: the owner of the agent's directory]
    #[arg(long, env = "SESSIOND_OWNER", value_name = "USER:GROUP")]
    pub owner: Option<String>,

    /// What to do when the restore fails
    #[arg(long, env = "SESSIOND_ON_RESTORE_ERROR", default_value = "fail")]
    pub on_restore_error: OnRestoreError,
}

impl First {
    /// Whether anything is to be restored.
    fn asks(&self) -> bool {
        self.session.is_some() || self.latest || self.request.is_some()
    }

    /// Checks what can be checked before anything is started.
    pub fn check(&self) -> Result<()> {
        if self
            .session
            .as_deref()
            .is_some_and(|id| id.trim().is_empty())
        {
            return Err(Error::usage("--session is empty")
                .hint("leave it out where there is no session to restore"));
        }
        Ok(())
    }
}

/// Begins to answer operators, before anything that can take long. With `whatever` an address that cannot be had is no error.
pub async fn vitals(stream: &Stream, whatever: bool) -> Result<Arc<HealthState>> {
    let vitals = HealthState::new(Arc::new(SystemClock));
    match probes::start(stream.http.as_deref(), &vitals).await {
        Err(error) if whatever => {
            tracing::error!(%error, "no /healthz, /readyz and /metrics; going on without, as asked")
        }
        started => started?,
    }
    Ok(vitals)
}

/// How to stream, by the settings.
pub async fn options(settings: &Settings, stream: &Stream) -> Result<service::Options> {
    let flush_interval = config::duration(
        "--flush-interval",
        stream.flush_interval.as_deref(),
        FLUSH_INTERVAL,
    )?;
    let parallel = stream.parallel.unwrap_or(PARALLEL).clamp(1, 1024);
    let interval = config::duration(
        "--heartbeat-interval",
        stream.heartbeat_interval.as_deref(),
        HEARTBEAT_INTERVAL,
    )?;
    let heartbeat = match stream
        .heartbeat_url
        .as_deref()
        .filter(|url| !url.trim().is_empty())
    {
        Some(url) => {
            let server = Outbound::to("--heartbeat-url", url, settings.ca_file.as_deref()).await?;
            Some(Heartbeat::new(server, interval, deadline(stream)?)?)
        }
        None => None,
    };
    Ok(service::Options {
        flush_interval,
        parallel,
        ready_file: stream.ready_file.clone(),
        wishes: stream.wishes()?,
        heartbeat,
    })
}

/// When the final flush gives up.
pub fn deadline(stream: &Stream) -> Result<Duration> {
    config::duration(
        "--flush-deadline",
        stream.flush_deadline.as_deref(),
        FLUSH_DEADLINE,
    )
}

/// What streams.
pub struct Streaming {
    /// The service.
    pub service: Service,
    /// The agent's directory.
    pub disk: Arc<Disk>,
    /// Whose the files are.
    pub owner: Option<Owner>,
    _lock: Lock,
}

/// Restores and starts streaming; an error comes with the exit code it means.
pub async fn prepare(
    settings: &Settings,
    first: &First,
    stream: &Stream,
    options: service::Options,
    vitals: &Arc<HealthState>,
) -> Result<Streaming, (Error, u8)> {
    let plain = |error: Error| {
        let code = exit::of(error.kind());
        (error, code)
    };
    let parts = Parts::make(settings, stream.parallel)
        .await
        .map_err(plain)?;
    let disk = parts.directory().map_err(plain)?;
    let owner = select::owner(first.owner.as_deref(), &disk).map_err(plain)?;
    let lock = lock::take(disk.root(), owner).map_err(plain)?;
    let stale = match restored(&parts, first, owner, vitals).await {
        Ok(names) => names,
        Err(error) if first.on_restore_error == OnRestoreError::Continue => {
            tracing::error!(%error, "the restore failed; going on without, as asked");
            Vec::new()
        }
        Err(error) => return Err((error, exit::NOT_RESTORED)),
    };
    let service = Service::start(&parts, options, stale, vitals)
        .await
        .map_err(plain)?;
    Ok(Streaming {
        service,
        disk,
        owner,
        _lock: lock,
    })
}

/// Restores what was asked for, and counts that.
async fn restored(
    parts: &Parts,
    first: &First,
    owner: Option<Owner>,
    vitals: &HealthState,
) -> Result<Vec<LogName>> {
    if first.asks() {
        vitals.restoring();
    }
    let began = Instant::now();
    let done = restore_first(parts, first, owner).await;
    match &done {
        Err(error) => vitals.counts.failed(Operation::Restore, error.kind()),
        Ok(reports) if reports.is_empty() => {}
        Ok(reports) => {
            let bytes = reports.iter().map(|report| report.bytes).sum();
            vitals
                .counts
                .note(|tally| tally.restored(bytes, began.elapsed(), vitals.clock.now()));
        }
    }
    done?.iter().map(|report| report.session.parse()).collect()
}

/// There is no such session.
fn nothing(parts: &Parts, first: &First) -> Result<Vec<RestoreReport>> {
    if first.asks() && first.must_exist {
        return Err(select::nothing(
            parts,
            first.session.as_deref(),
            first.request.as_deref(),
        ));
    }
    if first.asks() {
        tracing::info!(
            session = first.session.as_deref().unwrap_or("latest"),
            "nothing stored yet; starting afresh"
        );
    }
    Ok(Vec::new())
}

async fn restore_first(
    parts: &Parts,
    first: &First,
    owner: Option<Owner>,
) -> Result<Vec<RestoreReport>> {
    let latest = Latest {
        latest: first.latest,
        project: first.project.as_deref(),
        request: first.request.as_deref(),
    };
    let project = first
        .cwd
        .as_deref()
        .map(|cwd| select::next_project(parts, cwd))
        .transpose()?;
    let point = select::point(first.at.as_deref())?;
    let Some(id) = select::session(parts, first.session.as_deref(), latest).await? else {
        return nothing(parts, first);
    };
    let (force, repair) = (first.force, first.repair);
    let options = Options {
        project,
        force,
        repair,
        dry_run: false,
        claim: true,
        owner,
        ..Options::default()
    };
    let reports = match restore::session(parts, &id, &point, &options).await {
        Err(error) if select::is_missing(parts, first.session.as_deref(), &error).await? => {
            return nothing(parts, first);
        }
        done => done?,
    };
    for report in &reports {
        tracing::info!(
            session = report.session,
            entry = report.seq,
            files = report.written(),
            bytes = report.bytes,
            "restored"
        );
        for repaired in &report.repaired {
            tracing::warn!(path = %repaired.path, changes = repaired.changes.len(), original = ?repaired.original, "repaired");
        }
    }
    Ok(reports)
}
