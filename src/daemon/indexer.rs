//! The indexer: sends the entries to the index, and catches up after an outage. No flush waits for
//! it.
//!
//! Does not own how long entries wait for others (`capture::index_queue`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::agent::Profile;
use crate::capture::{IndexQueue, IndexTask};
use crate::error::Result;
use crate::index::{EntryRecord, Index, SessionFilter};
use crate::log::Logs;
use crate::log::ledger::Ledger;
use crate::log::writer::WriteTarget;
use crate::model::{LogId, LogName};
use crate::store::Store;
use crate::sys::{Backoff, Counters, Directory, Operation};
use crate::upkeep::reindex::catch_up;

/// Number of sessions per index query.
const PAGE_SIZE: u32 = 1000;

/// Executes the tasks of the index queue.
pub struct Indexer {
    /// The tasks to execute.
    pub queue: Arc<IndexQueue>,
    /// The counters of the process.
    pub counters: Arc<Counters>,
    /// The index.
    pub index: Arc<dyn Index>,
    /// The logs to read missing entries from.
    pub logs: Logs,
    /// The profile that parses the transcripts.
    pub profile: Arc<dyn Profile>,
    /// Whether the last update succeeded.
    pub reachable: Arc<AtomicBool>,
}

impl Indexer {
    /// Executes tasks forever; drop the future to stop.
    pub async fn run(self) {
        let mut backoff = Backoff::new(self.logs.rng.clone());
        loop {
            let task = self.queue.next().await;
            match self.execute(&task).await {
                // A process that can read the log can index it: `sessiond reindex`.
                Err(error) if error.kind().is_unreadable() => {
                    tracing::debug!(%error, "skipped an unreadable log")
                }
                Ok(()) => {
                    backoff.reset();
                    self.reachable.store(true, Ordering::Relaxed);
                    let now = self.logs.clock.now();
                    self.counters.record_index_update(now);
                }
                Err(error) => {
                    let wait = backoff.delay_after_failure();
                    if backoff.failures() == 1 {
                        tracing::warn!(%error, "the index update failed; retrying, streaming continues");
                    }
                    self.reachable.store(false, Ordering::Relaxed);
                    self.counters.record_error(Operation::Index, error.kind());
                    if !error.is_retryable() {
                        tracing::error!(%error, attempt = backoff.failures(), "the index rejected an update");
                    }
                    self.queue.retry(task, !error.is_retryable());
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    async fn execute(&self, task: &IndexTask) -> Result<()> {
        match task {
            IndexTask::Entries(records) => self.record(records).await,
            IndexTask::StaleLog(name) => self.catch_up(&self.logs.id(name.clone())).await,
            IndexTask::Failure(failure) => self.index.record_failure(failure).await,
        }
    }

    async fn record(&self, records: &[EntryRecord]) -> Result<()> {
        let outcomes = self.index.record_all(records).await?;
        let with_gap = records.iter().zip(outcomes);
        let with_gap = with_gap.filter(|(_, outcome)| outcome.is_gap());
        let behind: BTreeSet<&LogId> = with_gap.map(|(record, _)| &record.log).collect();
        for log in behind {
            tracing::debug!(session = %log.name, "the index is behind; catching up from the store");
            match self.catch_up(log).await {
                Err(error) if error.kind().is_unreadable() => {
                    tracing::debug!(%error, "skipped an unreadable log")
                }
                caught_up => caught_up?,
            }
        }
        Ok(())
    }

    async fn catch_up(&self, log: &LogId) -> Result<()> {
        let (index, profile) = (&*self.index, &*self.profile);
        catch_up(&self.logs, index, profile, log).await.map(|_| ())
    }
}

/// Queues the logs whose ledger is ahead of the index, because an earlier process could not update
/// it.
pub async fn queue_stale_logs(
    queue: &IndexQueue,
    index: &dyn Index,
    logs: &Logs,
    directory: &dyn Directory,
    names: &[LogName],
) -> Result<()> {
    let mut heads = std::collections::BTreeMap::new();
    let mut cursor = None;
    loop {
        let filter = SessionFilter {
            namespace: logs.namespace.clone(),
            agent: Some(logs.agent.clone()),
            id_prefix: None,
            project: None,
            status: None,
            request: None,
            labels: Vec::new(),
            model: None,
            since: None,
            until: None,
            title: None,
            limit: PAGE_SIZE,
            cursor: cursor.take(),
        };
        let page = index.sessions(&filter).await?;
        heads.extend(page.sessions.into_iter().map(|row| (row.id, row.head)));
        match page.next {
            Some(next) => cursor = Some(next),
            None => break,
        }
    }
    let store = logs.store.address();
    let mut stale = Vec::new();
    for name in names {
        let Some(ledger) = Ledger::load(directory, &store, &logs.id(name.clone())) else {
            continue;
        };
        let indexed = match ledger.log_writer.target {
            // A branch has its own sequence numbers. Few logs have a branch.
            WriteTarget::Branch => {
                let entries = index.entries(&ledger.id).await?;
                let on_branch = entries.iter().filter(|entry| {
                    entry.branch.as_deref() == Some(ledger.log_writer.writer.as_str())
                });
                on_branch.map(|entry| entry.seq).max()
            }
            // Projects are not listed with the sessions. There are few of them.
            _ if name.is_project() => index.session(&ledger.id).await?.map(|row| row.head),
            _ => heads.get(&name.to_string()).copied(),
        };
        let head = ledger.log_writer.seq;
        if head > 0 && indexed.is_none_or(|indexed| indexed < head) {
            stale.push(name.clone());
        }
    }
    queue.push_all_stale(stale);
    Ok(())
}
