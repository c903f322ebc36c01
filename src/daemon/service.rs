//! The streaming service: the streamer, its background tasks and the control socket, started and
//! stopped together.
//!
//! Owns the order in which they start and stop. Does not own the lock of the root, which the caller
//! holds, or the restore, which comes first.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use crate::capture::handle::{FinishReport, FlushReport};
use crate::capture::watch::{EventBuffer, InotifyWatcher};
use crate::capture::{
    self, CheckpointPolicy, CompactionQueue, EntryLimits, IndexQueue, MetadataQueue, SessionLimit,
    StaleCheck, StreamCounters, Streamer, StreamerHandle,
};
use crate::daemon::compactor;
use crate::daemon::health::{HealthState, StreamingState};
use crate::daemon::heartbeat::Heartbeat;
use crate::daemon::index_watch::IndexWatch;
use crate::daemon::indexer::{self, Indexer};
use crate::daemon::metadata_writer;
use crate::daemon::socket::{self, DaemonStatus, Request, RequestHandler, Response};
use crate::daemon::state_guard::StateGuard;
use crate::error::{Error, Result};
use crate::log::writer::branch_hint;
use crate::mirror::{Mirror, UpdateMode};
use crate::model::{LogName, SessionId, SessionMetadata};
use crate::sys::output::write_file;
use crate::sys::{Backoff, Counters, Disk};
use crate::wire::Parts;

/// Share of the shutdown deadline that the index may use. Streaming never waits for the index.
const INDEX_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// How long `status` waits for the check of the index.
const INDEX_CHECK_TIMEOUT: Duration = Duration::from_millis(500);

/// Time limit for the fence probe at the start, so that an unresponsive store does not delay the
/// agent. A probe of a responsive store takes a fraction of it.
const FENCE_PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Poll interval for the files of an agent's database. One poll takes two system calls.
const DATABASE_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Pause after the agent's database could not be read.
const DATABASE_RETRY_DELAY: Duration = Duration::from_secs(5);

/// The pause between polls is at least this many times the duration of a poll: at most 5% of one
/// core.
const DATABASE_PAUSE_FACTOR: u32 = 20;

/// The options of the streaming service.
#[derive(Debug, Clone)]
pub struct ServiceOptions {
    /// Maximum time from the first unsaved byte to the start of a flush.
    pub flush_interval: Duration,
    /// The checkpoints to make and to keep.
    pub checkpoints: CheckpointPolicy,
    /// Maximum number of concurrent flushes.
    pub max_concurrent_flushes: usize,
    /// File to create when the session is restored and sessiond is streaming.
    pub ready_file: Option<PathBuf>,
    /// Metadata to set on every session that this process writes.
    pub metadata: SessionMetadata,
    /// The heartbeat to send while everything is durable.
    pub heartbeat: Option<Heartbeat>,
    /// The existing sessions that may be continued.
    pub limit: SessionLimit,
}

/// A running streaming service.
pub struct Service {
    handle: StreamerHandle,
    index_queue: Arc<IndexQueue>,
    metadata_queue: Option<Arc<MetadataQueue>>,
    tasks: Vec<JoinHandle<()>>,
    ready_file: Option<PathBuf>,
    disk: Arc<Disk>,
    mirror: Option<Arc<Mirror>>,
    health: Arc<HealthState>,
    counters: Arc<StreamCounters>,
}

/// The queues between the streamer and the background tasks.
struct Queues {
    index: Arc<IndexQueue>,
    compaction: Arc<CompactionQueue>,
    /// `None` if this process sets no metadata.
    metadata: Option<Arc<MetadataQueue>>,
}

impl Service {
    /// Starts streaming. The caller holds the lock of the root. `stale` names the logs whose
    /// entries the index may lack.
    pub async fn start(
        parts: &Parts,
        options: ServiceOptions,
        stale: Vec<LogName>,
        health: &Arc<HealthState>,
    ) -> Result<Service> {
        let disk = parts.directory()?;
        probe_fence(parts).await?;
        let has_metadata = options.metadata != SessionMetadata::default();
        let queues = Queues {
            index: Arc::default(),
            compaction: Arc::default(),
            metadata: has_metadata.then(Arc::default),
        };
        for name in stale {
            queues.index.push_stale(name);
        }
        if let Some(mirror) = &parts.mirror
            && let Err(error) = mirror.update_files(UpdateMode::Always).await
        {
            tracing::warn!(%error, "the agent's database is unreadable; retrying");
        }
        let counters = Arc::new(StreamCounters::new(health.counters.clone()));
        let handle = start_streamer(parts, &options, &queues, &counters)?;
        let index_reachable = Arc::new(AtomicBool::new(true));
        let mut tasks = start_tasks(parts, options.metadata, &queues, health, &index_reachable);
        let check = queues.index.start_check();
        let detect = detect_stale_logs(parts.clone(), queues.index.clone(), handle.clone(), check);
        tasks.push(tokio::spawn(detect));
        let index_watch = Arc::new(IndexWatch::new(
            parts,
            handle.clone(),
            queues.index.clone(),
            health.counters.clone(),
            index_reachable.clone(),
        )?);
        tasks.push(tokio::spawn(index_watch.clone().run()));
        let control = ControlHandler {
            parts: parts.clone(),
            handle: handle.clone(),
            index_queue: queues.index.clone(),
            index_reachable: index_reachable.clone(),
            index_watch,
            root: disk.root().to_owned(),
        };
        let state = StateGuard::start(disk.clone(), Arc::new(control), counters.clone())?;
        tasks.push(tokio::spawn(state.run()));
        if let Some(path) = &options.ready_file {
            write_file(path, None, |out| {
                writeln!(out, "{}", std::process::id())
                    .map_err(|cause| Error::user_path(format!("write {}", path.display()), cause))
            })?;
        }
        health.set_streaming(StreamingState {
            handle: handle.clone(),
            index_queue: queues.index.clone(),
            index_reachable,
            mirror: parts.mirror.clone(),
        });
        if let Some(heartbeat) = options.heartbeat {
            tasks.push(tokio::spawn(heartbeat.run(health.clone())));
        }
        notify_service_manager(NotifyState::Ready);
        tracing::info!(
            root = %disk.root().display(),
            store = parts.store.address(),
            index = parts.index.address(),
            "streaming"
        );
        Ok(Service {
            handle,
            index_queue: queues.index,
            metadata_queue: queues.metadata,
            tasks,
            ready_file: options.ready_file,
            disk,
            mirror: parts.mirror.clone(),
            health: health.clone(),
            counters,
        })
    }

    /// Waits until another writer owns a session of this process. The last entries are on a branch.
    pub async fn wait_for_takeover(&self) {
        let mut branches = self.counters.branches();
        // The sender lives as long as this service.
        let _ = branches.wait_for(|branches| !branches.is_empty()).await;
    }

    /// Sends commands to the streaming loop.
    pub fn handle(&self) -> StreamerHandle {
        self.handle.clone()
    }

    /// The queue of the index.
    pub fn index_queue(&self) -> Arc<IndexQueue> {
        self.index_queue.clone()
    }

    /// The counters of the process.
    pub fn counters(&self) -> Arc<Counters> {
        self.health.counters.clone()
    }

    /// Runs the final flush after the agent has exited, then updates the index, all before
    /// `deadline`.
    pub async fn stop(self, deadline: Instant) -> Result<FinishReport> {
        let started = Instant::now();
        notify_service_manager(NotifyState::Stopping);
        self.health.set_stopping();
        if let Some(mirror) = &self.mirror {
            match timeout_at(deadline, mirror.update_files(UpdateMode::Complete)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::error!(%error, "uploading the last changes of the agent's database failed")
                }
                Err(_) => tracing::error!(
                    "the deadline passed: the last changes of the agent's database are not uploaded"
                ),
            }
        }
        let report = self.handle.finish(deadline).await;
        // The sessions come before the index, which can be rebuilt.
        if let Ok(report) = &report {
            log_final_flush(report, started);
        }
        if let Some(queue) = &self.metadata_queue
            && !metadata_writer::wait_until_idle(queue, deadline).await
        {
            tracing::error!(
                "the deadline passed before the metadata of some sessions was written; set it with \"sessiond label\" and \"sessiond ttl\""
            );
        }
        let index_deadline = deadline.min(Instant::now() + INDEX_SHUTDOWN_TIMEOUT);
        let idle = timeout_at(index_deadline, self.index_queue.wait_until_idle()).await;
        if idle.is_err() {
            tracing::warn!(
                "the index is behind; the next start updates it, or run \"sessiond reindex\""
            );
        }
        self.tasks.iter().for_each(JoinHandle::abort);
        socket::remove(&self.disk);
        if let Some(path) = &self.ready_file {
            let _ = std::fs::remove_file(path);
        }
        report
    }
}

/// Finds out whether the store can fence. If the store is unavailable, the first write does.
async fn probe_fence(parts: &Parts) -> Result<()> {
    let probe = parts.logs.fence.choose(&*parts.store, &parts.logs.rng);
    match timeout(FENCE_PROBE_TIMEOUT, probe).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) if !error.is_retryable() => Err(error),
        Ok(Err(error)) => {
            tracing::warn!(%error, "the store is unavailable; streaming starts anyway");
            Ok(())
        }
        Err(_) => {
            tracing::warn!(
                waited = ?FENCE_PROBE_TIMEOUT,
                "the store is unresponsive; streaming starts anyway"
            );
            Ok(())
        }
    }
}

fn start_streamer(
    parts: &Parts,
    options: &ServiceOptions,
    queues: &Queues,
    counters: &Arc<StreamCounters>,
) -> Result<StreamerHandle> {
    let directory = parts.directory()?;
    let root = directory.resolved_root().to_owned();
    let events = Arc::new(EventBuffer::default());
    let watcher = InotifyWatcher::new(
        root.clone(),
        directory.clone(),
        parts.profile.clone(),
        events.clone(),
    );
    let context = capture::CaptureContext {
        directory,
        profile: parts.profile.clone(),
        logs: parts.logs.clone(),
        index_queue: queues.index.clone(),
        compaction_queue: queues.compaction.clone(),
        metadata_queue: queues.metadata.clone(),
        counters: counters.clone(),
        flush_interval: options.flush_interval,
        checkpoints: options.checkpoints,
        max_concurrent_flushes: options.max_concurrent_flushes,
        limits: EntryLimits::default(),
        session_limit: options.limit.clone(),
    };
    Streamer::start(context, root, events, Box::new(watcher))
}

/// Starts the indexer, the compactor, the metadata writer and the mirror.
fn start_tasks(
    parts: &Parts,
    metadata: SessionMetadata,
    queues: &Queues,
    health: &HealthState,
    index_reachable: &Arc<AtomicBool>,
) -> Vec<JoinHandle<()>> {
    let indexer = Indexer {
        queue: queues.index.clone(),
        counters: health.counters.clone(),
        index: parts.index.clone(),
        logs: parts.logs.clone(),
        profile: parts.profile.clone(),
        reachable: index_reachable.clone(),
    };
    let mut tasks = vec![
        tokio::spawn(indexer.run()),
        tokio::spawn(compactor::run(
            queues.compaction.clone(),
            health.counters.clone(),
            parts.logs.clone(),
        )),
    ];
    if let Some(queue) = &queues.metadata {
        tasks.push(tokio::spawn(metadata_writer::run(
            queue.clone(),
            queues.index.clone(),
            health.counters.clone(),
            parts.logs.clone(),
            metadata,
        )));
    }
    if let Some(mirror) = &parts.mirror {
        tasks.push(tokio::spawn(follow_database(mirror.clone())));
    }
    tasks
}

/// Sends a state to systemd, if it started this process (`$NOTIFY_SOCKET`).
fn notify_service_manager(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "notifying the service manager failed");
    }
}

fn log_final_flush(report: &FinishReport, started: Instant) {
    for log in &report.not_durable {
        let error = log.last_error.as_deref().unwrap_or("the deadline passed");
        tracing::error!(
            session = log.session,
            bytes = log.lag_bytes,
            error,
            "the final flush left bytes that are not durable"
        );
    }
    for (name, writer) in &report.fenced {
        tracing::error!(
            session = %name,
            branch = %writer,
            "another writer took the session over; the last entries are on a branch; {}",
            branch_hint(name, writer)
        );
    }
    for error in &report.unread {
        tracing::error!(
            error,
            "the final flush could not read the whole directory; files in it may not be durable"
        );
    }
    if report.is_durable() && report.fenced.is_empty() {
        tracing::info!(elapsed = ?started.elapsed(), "everything is durable");
    }
}

/// Copies the changes of the agent's database to the mirror's files, forever.
async fn follow_database(mirror: Arc<Mirror>) {
    loop {
        let started = Instant::now();
        let pulled = mirror.update_files(UpdateMode::IfChanged).await;
        let mut pause = DATABASE_POLL_INTERVAL.max(started.elapsed() * DATABASE_PAUSE_FACTOR);
        if let Err(error) = pulled {
            tracing::warn!(%error, "the agent's database is unreadable; retrying");
            pause = pause.max(DATABASE_RETRY_DELAY);
        }
        tokio::time::sleep(pause).await;
    }
}

/// Queues the logs that an earlier process wrote and the index lacks.
async fn detect_stale_logs(
    parts: Parts,
    queue: Arc<IndexQueue>,
    handle: StreamerHandle,
    check: StaleCheck,
) {
    let mut check = Some(check);
    let Ok(directory) = parts.directory() else {
        return;
    };
    let mut backoff = Backoff::new(parts.logs.rng.clone());
    loop {
        check.get_or_insert_with(|| queue.start_check());
        let Ok(statuses) = handle.status().await else {
            return;
        };
        let names: Vec<LogName> = statuses
            .iter()
            .filter_map(|status| status.session.parse().ok())
            .collect();
        let queued =
            indexer::queue_stale_logs(&queue, &*parts.index, &parts.logs, &*directory, &names);
        match queued.await {
            Ok(()) => return,
            Err(error) if error.is_retryable() => {
                // Until the next attempt, the status says that the index is unreachable.
                check = None;
                tokio::time::sleep(backoff.delay_after_failure()).await
            }
            Err(error) => {
                return tracing::error!(%error, "checking the index for missing entries failed");
            }
        }
    }
}

/// Carries out the requests on the control socket.
struct ControlHandler {
    parts: Parts,
    handle: StreamerHandle,
    index_queue: Arc<IndexQueue>,
    index_reachable: Arc<AtomicBool>,
    index_watch: Arc<IndexWatch>,
    root: PathBuf,
}

#[async_trait::async_trait]
impl RequestHandler for ControlHandler {
    async fn handle(&self, request: Request) -> Response {
        let response = match request {
            Request::Flush { session } => self.flush(session).await.map(Response::Flushed),
            Request::Status => self
                .status()
                .await
                .map(|status| Response::Status(Box::new(status))),
        };
        response.unwrap_or_else(|error| Response::failed(&error))
    }
}

impl ControlHandler {
    async fn flush(&self, session: Option<SessionId>) -> Result<FlushReport> {
        if let Some(mirror) = &self.parts.mirror {
            mirror.update_files(UpdateMode::Always).await?;
        }
        let report = self.handle.flush(session).await?;
        self.index_queue.hurry();
        Ok(report)
    }

    async fn status(&self) -> Result<DaemonStatus> {
        // A slow index delays no status.
        let _ = timeout(INDEX_CHECK_TIMEOUT, self.index_watch.check()).await;
        let database_error = self
            .parts
            .mirror
            .as_ref()
            .and_then(|mirror| mirror.failure());
        Ok(DaemonStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            ready: true,
            agent: self.parts.logs.agent.to_string(),
            namespace: self.parts.logs.namespace.to_string(),
            root: self.root.display().to_string(),
            store: self.parts.store.address(),
            index: self.parts.index.address(),
            index_reachable: self.index_reachable.load(Ordering::Relaxed),
            index_backlog: self.index_queue.unfinished(),
            index_losses: self.index_watch.losses(),
            fencing: self.parts.logs.fence.as_str().to_owned(),
            database_error,
            sessions: self.handle.status().await?,
        })
    }
}
