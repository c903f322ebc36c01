//! Speaks to a running streamer: what can be asked of it, and what it answers.

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::tracked_log::{LogStatus, StreamSummary};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{LogName, RelPath, SessionId};

/// What a flush answers.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq)]
pub struct FlushReport {
    /// The logs that were written or waited for.
    pub logs: Vec<LogStatus>,
}

/// What the final flush left behind.
#[derive(Debug, Clone, Default)]
pub struct FinishReport {
    /// Logs that are not durable to their end.
    pub left: Vec<LogStatus>,
}

pub(super) enum Command {
    Flush(Option<SessionId>, oneshot::Sender<Result<FlushReport>>),
    Wrote(LogName, Vec<RelPath>, oneshot::Sender<Result<FlushReport>>),
    Hold(LogName, oneshot::Sender<()>),
    Release(LogName),
    Status(oneshot::Sender<Vec<LogStatus>>),
    StreamSummary(oneshot::Sender<StreamSummary>),
    Finish(Instant, oneshot::Sender<FinishReport>),
}

/// Speaks to a running streamer.
#[derive(Clone)]
pub struct StreamerHandle {
    commands: mpsc::Sender<Command>,
}

impl StreamerHandle {
    pub(super) fn new(commands: mpsc::Sender<Command>) -> StreamerHandle {
        StreamerHandle { commands }
    }

    /// Makes all durable that is on disk now (of one session, if named), and answers when it is.
    pub async fn flush(&self, session: Option<SessionId>) -> Result<FlushReport> {
        self.ask(|reply| Command::Flush(session, reply)).await?
    }

    /// The same for files of one log that the caller has just written: nothing else is looked at.
    pub async fn wrote(&self, name: LogName, paths: Vec<RelPath>) -> Result<FlushReport> {
        self.ask(|reply| Command::Wrote(name, paths, reply)).await?
    }

    /// Keeps the streamer from a log until `release`, and has it forget what it knows: the caller writes to the log, its files
    /// and its ledger. Answers when no flush of it is under way.
    pub async fn hold(&self, name: LogName) -> Result<()> {
        self.ask(|reply| Command::Hold(name, reply)).await
    }

    /// Gives a log back to the streamer, which begins anew from its ledger.
    pub async fn release(&self, name: LogName) -> Result<()> {
        self.send(Command::Release(name)).await
    }

    /// How every log stands.
    pub async fn status(&self) -> Result<Vec<LogStatus>> {
        self.ask(Command::Status).await
    }

    /// How all of them stand together. Who is answered knows that the streamer is not stuck.
    pub async fn overview(&self) -> Result<StreamSummary> {
        self.ask(Command::StreamSummary).await
    }

    /// The agent is gone: makes everything durable, unfinished lines too, and stops; gives up at `deadline`.
    pub async fn finish(&self, deadline: Instant) -> Result<FinishReport> {
        self.ask(|reply| Command::Finish(deadline, reply)).await
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply)).await?;
        answer.await.map_err(|_| gone())
    }

    async fn send(&self, command: Command) -> Result<()> {
        self.commands.send(command).await.map_err(|_| gone())
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Internal, "ask the streamer: it has stopped")
}
