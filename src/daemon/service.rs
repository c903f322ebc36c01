//! The streaming service: lock, streamer, index follower and control socket, started and stopped together.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use crate::capture::handle::{FinishReport, FlushReport};
use crate::capture::watch::{EventBuffer, InotifyWatcher};
use crate::capture::{self, Feed, Streamer, StreamerHandle};
use crate::daemon::compactor;
use crate::daemon::health::{HealthState, Running};
use crate::daemon::heartbeat::Heartbeat;
use crate::daemon::indexer::{self, Indexer};
use crate::daemon::metadata_writer;
use crate::daemon::socket::{self, Answer, Answers, Request, Status};
use crate::error::{Error, Result};
use crate::mirror::{Depth, Mirror};
use crate::model::{LogName, SessionId, SessionMetadata};
use crate::wire::Parts;

/// The index gets this much of the end for itself; streaming never waits for it.
const INDEX_SHARE: Duration = Duration::from_secs(2);

/// The agent waits this long at most for a store that hangs; a probe of one that answers takes a fraction of it.
const STORE_PATIENCE: Duration = Duration::from_secs(2);

/// How often the files of an agent's database are looked at: two calls to the kernel.
const LOOK: Duration = Duration::from_millis(250);

/// The pause after a database could not be read.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// How to stream.
#[derive(Debug, Clone)]
pub struct Options {
    /// At most this long after the first unsaved byte a flush begins.
    pub flush_interval: Duration,
    /// So many flushes at a time.
    pub parallel: usize,
    /// Made when everything is restored and streaming.
    pub ready_file: Option<PathBuf>,
    /// Said of each session that is written to.
    pub wishes: SessionMetadata,
    /// Who is told while everything is durable.
    pub heartbeat: Option<Heartbeat>,
}

/// A running service.
pub struct Service {
    handle: StreamerHandle,
    feed: Arc<Feed>,
    tasks: Vec<JoinHandle<()>>,
    ready_file: Option<PathBuf>,
    root: PathBuf,
    mirror: Option<Arc<Mirror>>,
    vitals: Arc<HealthState>,
}

impl Service {
    /// Starts streaming. The caller holds the lock of the root.
    pub async fn start(
        parts: &Parts,
        options: Options,
        stale: Vec<LogName>,
        vitals: &Arc<HealthState>,
    ) -> Result<Service> {
        let root = parts.root()?.to_owned();
        // What the store can do is found out now if it answers, and at the first write if not.
        match tokio::time::timeout(
            STORE_PATIENCE,
            parts.logs.fence.choose(&*parts.store, &parts.logs.rng),
        )
        .await
        {
            Ok(Ok(_)) => {}
            Ok(Err(error)) if !error.is_retryable() => return Err(error),
            Ok(Err(error)) => {
                tracing::warn!(%error, "the store does not answer; streaming starts all the same")
            }
            Err(_) => {
                tracing::warn!(waited = ?STORE_PATIENCE, "the store does not answer; streaming starts all the same")
            }
        }
        let feed = Arc::new(Feed::counting(vitals.counts.clone()));
        stale.into_iter().for_each(|name| feed.stale(name));
        let says = options.wishes != SessionMetadata::default();
        if says {
            feed.say_of_each();
        }
        if let Some(mirror) = &parts.mirror
            && let Err(error) = mirror.pull(Depth::Now).await
        {
            tracing::warn!(%error, "the agent's database cannot be read yet; trying again");
        }
        let directory = parts.directory()?;
        let context = capture::Context {
            directory: directory.clone(),
            profile: parts.profile.clone(),
            logs: parts.logs.clone(),
            feed: feed.clone(),
            flush_interval: options.flush_interval,
            parallel: options.parallel,
        };
        let hints = Arc::new(EventBuffer::default());
        let watch = InotifyWatcher::new(
            root.clone(),
            directory.clone(),
            parts.profile.clone(),
            hints.clone(),
        );
        let handle = Streamer::start(context, root.clone(), hints, Box::new(watch))?;
        let answers = Arc::new(AtomicBool::new(true));
        let follower = Indexer {
            feed: feed.clone(),
            index: parts.index.clone(),
            logs: parts.logs.clone(),
            profile: parts.profile.clone(),
            answers: answers.clone(),
        };
        let mut tasks = vec![tokio::spawn(follower.run())];
        tasks.push(tokio::spawn(compactor::run(
            feed.clone(),
            parts.logs.clone(),
        )));
        if says {
            tasks.push(tokio::spawn(metadata_writer::run(
                feed.clone(),
                parts.logs.clone(),
                options.wishes,
            )));
        }
        tasks.extend(
            parts
                .mirror
                .clone()
                .map(|mirror| tokio::spawn(follow(mirror))),
        );
        tasks.push(tokio::spawn(find_stale(
            parts.clone(),
            feed.clone(),
            handle.clone(),
        )));
        let running = Running {
            handle: handle.clone(),
            feed: feed.clone(),
            index_answers: answers.clone(),
            mirror: parts.mirror.clone(),
        };
        let control = Control {
            parts: parts.clone(),
            handle: handle.clone(),
            feed: feed.clone(),
            answers,
            root: root.clone(),
        };
        tasks.push(socket::listen(&root, Arc::new(control))?);
        if let Some(path) = &options.ready_file {
            std::fs::write(path, format!("{}\n", std::process::id()))
                .map_err(|cause| Error::named(format!("write {}", path.display()), cause))?;
        }
        vitals.streaming(running);
        tasks.extend(
            options
                .heartbeat
                .map(|heartbeat| tokio::spawn(heartbeat.run(vitals.clone()))),
        );
        crate::sys::notify_ready::tell("READY=1");
        tracing::info!(root = %root.display(), store = parts.store.address(), index = parts.index.address(), "streaming");
        Ok(Service {
            handle,
            feed,
            tasks,
            ready_file: options.ready_file,
            root,
            mirror: parts.mirror.clone(),
            vitals: vitals.clone(),
        })
    }

    /// Speaks to what streams.
    pub fn handle(&self) -> StreamerHandle {
        self.handle.clone()
    }

    /// Where the index hears of what is written.
    pub fn feed(&self) -> Arc<Feed> {
        self.feed.clone()
    }

    /// The agent is gone: the last look, the last entries, then the index, all before `deadline`.
    pub async fn stop(self, deadline: Instant) -> Result<FinishReport> {
        let began = Instant::now();
        crate::sys::notify_ready::tell("STOPPING=1");
        self.vitals.stopping();
        if let Some(mirror) = &self.mirror {
            match timeout_at(deadline, mirror.pull(Depth::Now)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::error!(%error, "the agent's database was not read to its end")
                }
                Err(_) => {
                    tracing::error!("out of time: the agent's database was not read to its end")
                }
            }
        }
        let report = self.handle.finish(deadline).await;
        // Before the index, which can learn it again.
        report.iter().for_each(|report| say(report, began));
        if !metadata_writer::finished(&self.feed, deadline).await {
            tracing::error!(
                "out of time: labels and the like were not said of every session; sessiond label does it"
            );
        }
        let drained = timeout_at(
            deadline.min(Instant::now() + INDEX_SHARE),
            self.feed.emptied(),
        )
        .await;
        if drained.is_err() {
            tracing::warn!(
                "the index is behind; it catches up with the next run, or by sessiond reindex"
            );
        }
        self.tasks.iter().for_each(JoinHandle::abort);
        let _ = std::fs::remove_file(socket::path(&self.root));
        if let Some(path) = &self.ready_file {
            let _ = std::fs::remove_file(path);
        }
        report
    }
}

fn say(report: &FinishReport, began: Instant) {
    for left in &report.left {
        let error = left.last_error.as_deref().unwrap_or("out of time");
        tracing::error!(
            session = left.session,
            bytes = left.lag_bytes,
            error,
            "not durable"
        );
    }
    if report.left.is_empty() {
        tracing::info!(took = ?began.elapsed(), "everything is durable");
    }
}

/// Keeps the files in step with the agent's database; looking takes a twentieth of one core at most.
async fn follow(mirror: Arc<Mirror>) {
    loop {
        let began = Instant::now();
        let pulled = mirror.pull(Depth::Changed).await;
        let mut pause = LOOK.max(began.elapsed() * 20);
        if let Err(error) = pulled {
            tracing::warn!(%error, "the agent's database cannot be read; trying again");
            pause = pause.max(LOOK_AGAIN);
        }
        tokio::time::sleep(pause).await;
    }
}

/// Finds the sessions that an earlier run wrote and the index has not heard of.
async fn find_stale(parts: Parts, feed: Arc<Feed>, handle: StreamerHandle) {
    let Ok(directory) = parts.directory() else {
        return;
    };
    let mut backoff = crate::sys::Backoff::new(parts.logs.rng.clone());
    loop {
        let Ok(statuses) = handle.status().await else {
            return;
        };
        let names: Vec<LogName> = statuses
            .iter()
            .filter_map(|status| status.session.parse().ok())
            .collect();
        match indexer::mark_stale(&feed, &*parts.index, &parts.logs, &*directory, &names).await {
            Ok(()) => return,
            Err(error) if error.is_retryable() => {
                tokio::time::sleep(backoff.wait_after_failure()).await
            }
            Err(error) => return tracing::error!(%error, "the index cannot be asked"),
        }
    }
}

struct Control {
    parts: Parts,
    handle: StreamerHandle,
    feed: Arc<Feed>,
    answers: Arc<AtomicBool>,
    root: PathBuf,
}

#[async_trait::async_trait]
impl Answers for Control {
    async fn answer(&self, request: Request) -> Answer {
        let answer = match request {
            Request::Flush { session } => self.flush(session).await.map(Answer::Flushed),
            Request::Status => self
                .status()
                .await
                .map(|status| Answer::Status(Box::new(status))),
        };
        answer.unwrap_or_else(|error| Answer::failed(&error))
    }
}

impl Control {
    async fn flush(&self, session: Option<SessionId>) -> Result<FlushReport> {
        if let Some(mirror) = &self.parts.mirror {
            mirror.pull(Depth::Now).await?;
        }
        self.handle.flush(session).await
    }

    async fn status(&self) -> Result<Status> {
        Ok(Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            ready: true,
            agent: self.parts.logs.agent.to_string(),
            namespace: self.parts.logs.namespace.to_string(),
            root: self.root.display().to_string(),
            store: self.parts.store.address(),
            index: self.parts.index.address(),
            index_answers: self.answers.load(Ordering::Relaxed),
            index_waiting: self.feed.len(),
            fencing: self.parts.logs.fence.word().to_owned(),
            database_error: self
                .parts
                .mirror
                .as_ref()
                .and_then(|mirror| mirror.failure()),
            sessions: self.handle.status().await?,
        })
    }
}
