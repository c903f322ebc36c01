//! The start of `run` and `daemon`: probes, the restore, streaming.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::BoolishValueParser;

use crate::capture::{CheckpointPolicy, SessionLimit};
use crate::cli::{exit, select};
use crate::config::{self, Settings, StreamConfig};
use crate::daemon::health::HealthState;
use crate::daemon::heartbeat::Heartbeat;
use crate::daemon::probes;
use crate::daemon::service::{Service, ServiceOptions};
use crate::error::{Error, Result};
use crate::model::LogName;
use crate::operations::launch::{Launch, Starter};
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

/// What to do when another writer takes over a session of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnTakeover {
    /// Stop: `run` sends SIGTERM to the command, and flushes when it has exited.
    Stop,
    /// Continue on a branch.
    Continue,
}

/// The reaction to a takeover.
#[derive(Debug, clap::Args)]
pub struct TakeoverArgs {
    /// What to do when another writer takes the session over: stop or continue
    ///
    /// The entries that this process still writes go to a branch, and it ends with exit code 4.
    #[arg(
        long,
        env = "SESSIOND_ON_TAKEOVER",
        value_name = "ACTION",
        default_value = "continue",
        hide_possible_values = true
    )]
    pub on_takeover: OnTakeover,
}

impl TakeoverArgs {
    /// Waits for a takeover that stops this process.
    pub async fn wait(&self, service: &Service) {
        match self.on_takeover {
            OnTakeover::Stop => service.wait_for_takeover().await,
            OnTakeover::Continue => std::future::pending().await,
        }
    }
}

/// The value of `--only` that names no session besides the restored one.
const RESTORED: &str = "restored";

/// The sessions to write to.
#[derive(Debug, clap::Args)]
pub struct LimitArgs {
    /// Sessions to continue: full IDs, or restored for that one [default: all]
    ///
    /// The agent can create files with the ID of any session. With this option, sessiond continues
    /// a session of the store only if it is named here, was restored by this process, or was
    /// written before from this directory. New sessions, such as those of sub-agents, are stored.
    #[arg(long, env = "SESSIOND_ONLY", value_name = "IDS", value_delimiter = ',')]
    pub only: Vec<String>,
}

impl LimitArgs {
    /// Adds the limit to the options of streaming.
    pub fn apply(&self, options: ServiceOptions) -> Result<ServiceOptions> {
        if self.only.is_empty() {
            return Ok(options);
        }
        let named = self.only.iter().filter(|id| *id != RESTORED);
        let sessions = named.map(|id| Ok(LogName::Session(id.parse()?)));
        let sessions: Result<Vec<LogName>> = sessions.collect();
        Ok(ServiceOptions {
            limit: SessionLimit::only(sessions?),
            ..options
        })
    }
}

/// The session to restore before streaming starts.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Restore options")]
pub struct RestoreArgs {
    /// Session to restore first: ID or unambiguous prefix [default: none]
    #[arg(
        long,
        env = "SESSIOND_SESSION",
        value_name = "ID",
        conflicts_with = "latest"
    )]
    pub session: Option<String>,

    /// Restore the most recently changed session first
    #[arg(long)]
    pub latest: bool,

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

    /// Continue after the last stored entry if the index knows a later one
    ///
    /// The log lost its newest entries, for example because objects were deleted. The rows of the
    /// index are replaced, and "sessiond doctor" lists the rollback.
    #[arg(long)]
    pub accept_rollback: bool,

    /// Owner of new files (user:group) [default: owner of the directory]
    ///
    /// Applies if sessiond runs as root. It then accesses the directory with the rights of this
    /// user only.
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

    /// The restore before the start.
    fn starter<'a>(
        &self,
        parts: &'a Parts,
        restorer: &'a RestoreService,
        request_id: Option<&str>,
    ) -> Result<Starter<'a>> {
        let cwd = self.cwd.as_deref();
        Ok(Starter {
            parts,
            restorer,
            selector: select::selector(
                parts,
                self.session.as_deref(),
                self.latest,
                self.project.as_deref(),
                request_id,
            ),
            if_missing: match self.must_exist.unwrap_or(false) {
                true => IfMissing::Fail,
                false => IfMissing::Skip,
            },
            request: RestoreRequest {
                point: select::at(self.at.as_deref())?,
                project: cwd
                    .map(|directory| select::target_project(parts, directory))
                    .transpose()?,
                force: self.force,
                repair: self.repair.unwrap_or(false),
                accept_rollback: self.accept_rollback,
                ..RestoreRequest::new(SessionSet::All)
            },
        })
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
    let checkpoints = CheckpointPolicy {
        interval: config::checkpoint_interval(
            "--checkpoint-every",
            flush.checkpoint_every.as_deref(),
        )?,
        keep: config::checkpoint_retention(
            "--keep-checkpoints",
            flush.keep_checkpoints.as_deref(),
        )?,
    };
    Ok(ServiceOptions {
        flush_interval,
        checkpoints,
        max_concurrent_flushes: flush
            .parallel
            .unwrap_or(DEFAULT_CONCURRENT_FLUSHES)
            .clamp(1, MAX_PARALLEL),
        ready_file: probes.ready_file.clone(),
        metadata: stream.metadata.parse()?,
        heartbeat,
        limit: SessionLimit::default(),
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
    /// The session with which the agent starts.
    pub launch: Launch,
}

/// Why streaming did not start.
pub struct NotStarted {
    /// The error.
    pub error: Error,
    /// The exit code.
    pub code: u8,
    /// The session with which the agent starts nevertheless; none if the settings are invalid.
    pub launch: Option<Launch>,
}

impl NotStarted {
    fn new(error: Error, launch: Option<Launch>) -> NotStarted {
        NotStarted {
            code: exit::of(error.kind()),
            error,
            launch,
        }
    }
}

/// Restores and starts streaming.
pub async fn prepare(
    settings: &Settings,
    restore: &RestoreArgs,
    stream: &StreamConfig,
    mut options: ServiceOptions,
    health: &Arc<HealthState>,
) -> Result<Streaming, NotStarted> {
    let parts = Parts::build(settings, stream.flush.parallel).await;
    let parts = parts.and_then(|parts| select::with_owner(parts, restore.owner.as_deref()));
    let parts = parts.map_err(|error| NotStarted::new(error, None))?;
    let unknown = Launch::unknown(&parts.profile);
    let failed = |launch: &Launch| {
        let launch = Some(launch.clone());
        move |error| NotStarted::new(error, launch)
    };
    let restorer = open_restorer(&parts, health).map_err(failed(&unknown))?;
    let request_id = stream.metadata.request.as_deref();
    let starter = restore.starter(&parts, &restorer, request_id);
    let starter = starter.map_err(failed(&unknown))?;
    if starter.selector.is_some() {
        health.set_restoring();
    }
    let (launch, restored) = match starter.restore().await {
        Ok(restored) => restored,
        Err(error) if restore.continues_on_error() => {
            tracing::error!(%error, "the restore failed; continuing without it");
            (starter.without_restore().await, Vec::new())
        }
        Err(error) => {
            return Err(NotStarted {
                error,
                code: exit::NOT_RESTORED,
                launch: None,
            });
        }
    };
    options.limit.add(restored.iter().cloned());
    options.limit.add(launch.session().map(LogName::Session));
    let service = Service::start(&parts, options, restored, health)
        .await
        .map_err(failed(&launch))?;
    Ok(Streaming {
        service,
        restore: restorer,
        launch,
    })
}

/// Starts streaming without a restore, for the final flush of a daemon that is stopped while it
/// starts. Nothing reports it as ready: the agent must not start.
pub async fn prepare_without_restore(
    settings: &Settings,
    restore: &RestoreArgs,
    stream: &StreamConfig,
    options: ServiceOptions,
) -> Result<Streaming, NotStarted> {
    let options = ServiceOptions {
        ready_file: None,
        heartbeat: None,
        ..options
    };
    let health = HealthState::new(Arc::new(SystemClock));
    let start = async {
        let parts = Parts::build(settings, stream.flush.parallel).await?;
        let parts = select::with_owner(parts, restore.owner.as_deref())?;
        let restore = open_restorer(&parts, &health)?;
        let service = Service::start(&parts, options, Vec::new(), &health).await?;
        let launch = Launch::unknown(&parts.profile);
        Ok(Streaming {
            service,
            restore,
            launch,
        })
    };
    start.await.map_err(|error| NotStarted::new(error, None))
}

fn open_restorer(parts: &Parts, health: &HealthState) -> Result<RestoreService> {
    let counters = health.counters.clone();
    RestoreService::open(parts, counters, IndexUpdate::Deferred)
}
