//! The handle of a running streamer: its commands and their results.

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::tracked_log::{LogStatus, StreamSummary};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{LogName, RelPath, SessionId, WriterId};

/// The result of a flush.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq)]
pub struct FlushReport {
    /// The logs that were flushed or requested.
    pub logs: Vec<LogStatus>,
}

/// The result of the final flush.
#[derive(Debug, Clone, Default)]
pub struct FinishReport {
    /// The logs with changes that are not durable.
    pub not_durable: Vec<LogStatus>,
    /// The logs whose last entries are on a branch, because another writer owns them.
    pub fenced: Vec<(LogName, WriterId)>,
    /// Why the agent's directory could not be read completely: some changes may not be known.
    pub unread: Vec<String>,
}

impl FinishReport {
    /// Whether everything that is on disk is durable.
    pub fn is_durable(&self) -> bool {
        self.not_durable.is_empty() && self.unread.is_empty()
    }
}

pub(super) enum Command {
    Flush(Option<SessionId>, oneshot::Sender<Result<FlushReport>>),
    FlushFiles(LogName, Vec<RelPath>, oneshot::Sender<Result<FlushReport>>),
    Hold(LogName, oneshot::Sender<()>),
    Release(LogName),
    Status(oneshot::Sender<Vec<LogStatus>>),
    Summary(oneshot::Sender<StreamSummary>),
    Finish(Instant, oneshot::Sender<FinishReport>),
}

/// A handle of a running streamer.
#[derive(Clone)]
pub struct StreamerHandle {
    commands: mpsc::Sender<Command>,
}

impl StreamerHandle {
    pub(super) fn new(commands: mpsc::Sender<Command>) -> StreamerHandle {
        StreamerHandle { commands }
    }

    /// Scans the root and returns when all its changes are durable, or those of one session.
    pub async fn flush(&self, session: Option<SessionId>) -> Result<FlushReport> {
        self.call(|reply| Command::Flush(session, reply)).await?
    }

    /// Returns when the given files of one log are durable. Does not scan for other changes.
    pub async fn flush_files(&self, name: LogName, paths: Vec<RelPath>) -> Result<FlushReport> {
        self.call(|reply| Command::FlushFiles(name, paths, reply))
            .await?
    }

    /// Gives the caller exclusive access to a log, its files and its ledger until `release`.
    /// Returns when no flush of the log is running.
    pub async fn hold(&self, name: LogName) -> Result<()> {
        self.call(|reply| Command::Hold(name, reply)).await
    }

    /// Returns a log to the streamer, which starts again from the ledger.
    pub async fn release(&self, name: LogName) -> Result<()> {
        self.send(Command::Release(name)).await
    }

    /// The status of every log.
    pub async fn status(&self) -> Result<Vec<LogStatus>> {
        self.call(Command::Status).await
    }

    /// The status of all logs together. Also serves as a liveness check of the streamer.
    pub async fn summary(&self) -> Result<StreamSummary> {
        self.call(Command::Summary).await
    }

    /// Flushes everything, including partial lines, and stops the streamer. Call it after the agent
    /// has exited. Returns at `deadline` at the latest.
    pub async fn finish(&self, deadline: Instant) -> Result<FinishReport> {
        self.call(|reply| Command::Finish(deadline, reply)).await
    }

    async fn call<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T> {
        let (reply, result) = oneshot::channel();
        self.send(command(reply)).await?;
        result.await.map_err(|_| stopped())
    }

    async fn send(&self, command: Command) -> Result<()> {
        self.commands.send(command).await.map_err(|_| stopped())
    }
}

fn stopped() -> Error {
    Error::new(ErrorKind::Internal, "the streamer has stopped")
}
