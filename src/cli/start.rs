//! The start of `run` and `daemon`: probes, the restore, streaming.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::BoolishValueParser;

use crate::cli::{exit, select};
use crate::config::{self, Settings, StreamConfig};
use crate::daemon::health::HealthState;
use crate::daemon::heartbeat::Heartbeat;
use crate::daemon::probes;
use crate::daemon::service::{Service, ServiceOptions};
use crate::error::{Error, Result};
use crate::model::LogName;
use crate::operations::restore::{
    IfMissing, IndexUpdate, RestoreRequest, RestoreService, SessionSet,
};
use crate::sys::SystemClock;
use crate::sys::outbound::OutboundEndpoint;
use crate::wire::{DEFAULT_CONCURRENT_FLUSHES, Parts};

/// Leaves two of the ten seconds that Docker gives a container to stop.
const FLUSH_DEADLINE: Duration = Duration::from_secs(8);

/// A crash of the machine loses at most about one second of work.
pub const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

/// Monitoring services expect a heartbeat once per minute.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum value of --parallel.
const MAX_PARALLEL: usize = 1024;

/// What to do if the restore fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnRestoreError {
    /// Stop: start no command, and stream nothing.
    Fail,
    /// Continue with the local files.
    Continue,
}

/// The session to restore before streaming starts.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Restore options")]
pub struct RestoreArgs {
    /// Session to restore first: ID or unambiguous prefix [default: none]
    #[arg(long, env = "SESSIOND_SESSION", value_name = "ID", conflicts_with_all = ["latest", "request"])]
    pub session: Option<String>,

    /// Restore the most recently changed session first
    #[arg(long)]
    pub latest: bool,

    /// Restore the latest session with this request ID first [default: none]
    #[arg(long, env = "SESSIOND_REQUEST", value_name = "ID")]
    pub request: Option<String>,

    /// With --latest: only sessions of the project in this directory
    #[arg(long, value_name = "DIR", requires = "latest")]
    pub project: Option<PathBuf>,

    /// Working directory of the agent; the session moves to its project
    #[arg(long, env = "SESSIOND_CWD", value_name = "DIR")]
    pub cwd: Option<PathBuf>,

    /// The point
    #[arg(long, value_name = "POINT", help = select::AT_HELP)]
    pub at: Option<String>,

    /// Fail if the session does not exist [default: start a new one]
    #[arg(
        long,
        env = "SESSIOND_MUST_EXIST",
        num_args = 0,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new()
    )]
    pub must_exist: Option<bool>,

    /// Move local files that differ to .sessiond/aside instead of failing
    #[arg(long)]
    pub force: bool,

    /// Repair damaged transcripts; keep the originals in .sessiond/aside
    #[arg(
        long,
        env = "SESSIOND_REPAIR",
        num_args = 0,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new()
    )]
    pub repair: Option<bool>,

    /// Owner of restored files (user:group) [default: owner of the directory]
    ///
    /// Applies if sessiond runs as root.
    #[arg(long, env = "SESSIOND_OWNER", value_name = "USER:GROUP")]
    pub owner: Option<String>,

    /// What to do if the restore fails: fail or continue
    #[arg(
        long,
        env = "SESSIOND_ON_RESTORE_ERROR",
        value_name = "ACTION",
        default_value = "fail",
        hide_possible_values = true
    )]
    pub on_restore_error: OnRestoreError,
}

impl RestoreArgs {
    /// Checks the arguments before anything is started.
    pub fn check(&self) -> Result<()> {
        let session = self.session.as_deref();
        if session.is_some_and(|id| id.trim().is_empty()) {
            return Err(Error::usage("invalid --session value \"\": it is empty")
                .hint("omit --session to start without a restore"));
        }
        Ok(())
    }

    /// Whether the command starts even if the restore fails.
    pub fn continues_on_error(&self) -> bool {
        self.on_restore_error == OnRestoreError::Continue
    }

    /// The request; none if no session is to be restored.
    fn request(&self, parts: &Parts) -> Result<Option<RestoreRequest>> {
        let selector = select::selector(
            parts,
            self.session.as_deref(),
            self.latest,
            self.project.as_deref(),
            self.request.as_deref(),
        );
        let Some(selector) = selector else {
            return Ok(None);
        };
        let cwd = self.cwd.as_deref();
        Ok(Some(RestoreRequest {
            if_missing: match self.must_exist.unwrap_or(false) {
                true => IfMissing::Fail,
                false => IfMissing::Skip,
            },
            point: select::at(self.at.as_deref())?,
            project: cwd
                .map(|directory| select::target_project(parts, directory))
                .transpose()?,
            force: self.force,
            repair: self.repair.unwrap_or(false),
            ..RestoreRequest::new(SessionSet::Selected(selector))
        }))
    }
}

/// Starts the probes before anything that can take long. With `is_optional`, an unusable address is
/// logged and is not an error.
pub async fn start_probes(stream: &StreamConfig, is_optional: bool) -> Result<Arc<HealthState>> {
    let health = HealthState::new(Arc::new(SystemClock));
    match probes::start(stream.probes.http.as_deref(), &health).await {
        Err(error) if is_optional => {
            tracing::error!(%error, "continuing without /healthz, /readyz and /metrics")
        }
        started => started?,
    }
    Ok(health)
}

/// Checks the settings of streaming. Connects to nothing.
pub async fn check(settings: &Settings, stream: &StreamConfig) -> Result<()> {
    options(settings, stream).await?;
    if let Some(address) = &stream.probes.http {
        probes::parse_address(address.trim())?;
    }
    Ok(())
}

/// The options of streaming.
pub async fn options(settings: &Settings, stream: &StreamConfig) -> Result<ServiceOptions> {
    let (flush, probes) = (&stream.flush, &stream.probes);
    let flush_interval = config::duration(
        "--flush-interval",
        flush.flush_interval.as_deref(),
        FLUSH_INTERVAL,
    )?;
    let heartbeat_interval = config::duration(
        "--heartbeat-interval",
        probes.heartbeat_interval.as_deref(),
        HEARTBEAT_INTERVAL,
    )?;
    let max_lag = flush_deadline(stream)?;
    let heartbeat = match &probes.heartbeat_url {
        Some(url) => {
            let ca_file = settings.network.ca_file.as_deref();
            let endpoint = OutboundEndpoint::new("--heartbeat-url", url, ca_file).await?;
            Some(Heartbeat::new(endpoint, heartbeat_interval, max_lag)?)
        }
        None => None,
    };
    Ok(ServiceOptions {
        flush_interval,
        max_concurrent_flushes: flush
            .parallel
            .unwrap_or(DEFAULT_CONCURRENT_FLUSHES)
            .clamp(1, MAX_PARALLEL),
        ready_file: probes.ready_file.clone(),
        metadata: stream.metadata.parse()?,
        heartbeat,
    })
}

/// The deadline of the final flush.
pub fn flush_deadline(stream: &StreamConfig) -> Result<Duration> {
    config::duration(
        "--flush-deadline",
        stream.flush.flush_deadline.as_deref(),
        FLUSH_DEADLINE,
    )
}

/// A started stream.
pub struct Streaming {
    /// The service.
    pub service: Service,
    /// Keeps the agent's directory locked.
    pub restore: RestoreService,
}

/// Restores and starts streaming. An error comes with its exit code.
pub async fn prepare(
    settings: &Settings,
    restore: &RestoreArgs,
    stream: &StreamConfig,
    options: ServiceOptions,
    health: &Arc<HealthState>,
) -> Result<Streaming, (Error, u8)> {
    let with_code = |error: Error| {
        let code = exit::of(error.kind());
        (error, code)
    };
    let parts = Parts::build(settings, stream.flush.parallel);
    let parts = parts.await.map_err(with_code)?;
    let restorer = open_restorer(&parts, restore, health).map_err(with_code)?;
    let stale = match restore_first(&parts, restore, &restorer, health).await {
        Ok(names) => names,
        Err(error) if restore.continues_on_error() => {
            tracing::error!(%error, "the restore failed; continuing without it");
            Vec::new()
        }
        Err(error) => return Err((error, exit::NOT_RESTORED)),
    };
    let service = Service::start(&parts, options, stale, health)
        .await
        .map_err(with_code)?;
    Ok(Streaming {
        service,
        restore: restorer,
    })
}

fn open_restorer(
    parts: &Parts,
    restore: &RestoreArgs,
    health: &HealthState,
) -> Result<RestoreService> {
    let owner = select::owner(restore.owner.as_deref(), &*parts.directory()?)?;
    let counters = health.counters.clone();
    RestoreService::open(parts, owner, counters, IndexUpdate::Deferred)
}

/// Restores the selected session. Returns the restored logs.
async fn restore_first(
    parts: &Parts,
    restore: &RestoreArgs,
    restorer: &RestoreService,
    health: &HealthState,
) -> Result<Vec<LogName>> {
    let Some(request) = restore.request(parts)? else {
        return Ok(Vec::new());
    };
    health.set_restoring();
    let summary = restorer.restore(&request).await?;
    if summary.is_empty() {
        let session = restore.session.as_deref().unwrap_or("latest");
        tracing::info!(
            session,
            "the session does not exist yet; starting a new one"
        );
    }
    summary.log();
    summary.log_names()
}
