//! Feeds the index, and lets it catch up by itself after an outage. Nothing waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::agent::Profile;
use crate::capture::Feed;
use crate::capture::feed::News;
use crate::error::{ErrorKind, Result};
use crate::index::{Filter, Index, RecordOutcome};
use crate::log::Logs;
use crate::log::ledger::Ledger;
use crate::log::writer::WriteTarget;
use crate::model::LogName;
use crate::sys::{Backoff, Directory, Operation};
use crate::upkeep::reindex::catch_up;

/// What the follower of the index needs.
pub struct Indexer {
    /// What is new.
    pub feed: Arc<Feed>,
    /// Where it goes.
    pub index: Arc<dyn Index>,
    /// Where it can be read again.
    pub logs: Logs,
    /// How to read it.
    pub profile: Arc<dyn Profile>,
    /// Whether the index answered the last time.
    pub answers: Arc<AtomicBool>,
}

impl Indexer {
    /// Follows for ever; drop it to stop.
    pub async fn run(self) {
        let mut backoff = Backoff::new(self.logs.rng.clone());
        loop {
            let news = self.feed.next().await;
            match self.take(&news).await {
                // Who has the key can make it follow: sessiond reindex.
                Err(error) if error.kind() == ErrorKind::Encrypted => {
                    tracing::debug!(%error, "the index does not follow what cannot be read")
                }
                Ok(()) => {
                    backoff.reset();
                    self.answers.store(true, Ordering::Relaxed);
                    let now = self.logs.clock.now();
                    self.feed
                        .counts()
                        .note(|tally| tally.indexed_at = Some(now));
                }
                Err(error) => {
                    let wait = backoff.wait_after_failure();
                    if backoff.failed() == 1 {
                        tracing::warn!(%error, "the index does not follow; streaming goes on");
                    }
                    self.answers.store(false, Ordering::Relaxed);
                    self.feed.counts().failed(Operation::Index, error.kind());
                    if !error.is_retryable() {
                        tracing::error!(%error, attempt = backoff.failed(), "the index refuses what it is given");
                    }
                    // Only the name of the log is kept; the bucket has the rest.
                    match news {
                        News::Entry(record) => self.feed.stale(record.log.name),
                        News::Stale(name) => self.feed.stale(name),
                        News::Failed(failure) => self.feed.failed(failure),
                    }
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    async fn take(&self, news: &News) -> Result<()> {
        match news {
            News::Entry(record) => {
                if let RecordOutcome::Gap { have } = self.index.record(record).await? {
                    tracing::debug!(session = %record.log.name, have, "the index is behind; reading the bucket");
                    catch_up(&self.logs, &*self.index, &*self.profile, &record.log).await?;
                }
                Ok(())
            }
            News::Stale(name) => catch_up(
                &self.logs,
                &*self.index,
                &*self.profile,
                &self.logs.id(name.clone()),
            )
            .await
            .map(|_| ()),
            News::Failed(failure) => self.index.note_failure(failure).await,
        }
    }
}

/// Marks the logs whose ledger is ahead of the index: an earlier run could not tell it. One query a thousand sessions.
pub async fn mark_stale(
    feed: &Feed,
    index: &dyn Index,
    logs: &Logs,
    directory: &dyn Directory,
    names: &[LogName],
) -> Result<()> {
    let mut heads = std::collections::BTreeMap::new();
    let mut cursor = None;
    loop {
        let filter = Filter {
            namespace: logs.namespace.clone(),
            agent: Some(logs.agent.clone()),
            id_prefix: None,
            project: None,
            status: None,
            request: None,
            labels: Vec::new(),
            limit: 1000,
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
    for name in names {
        let Some(ledger) = Ledger::load(directory, &store, &logs.id(name.clone())) else {
            continue;
        };
        let known = match ledger.log_writer.target {
            // The numbers of a branch are its own; few logs have one.
            WriteTarget::Branch => {
                let entries = index.entries(&ledger.id).await?;
                let ours = entries.iter().filter(|entry| {
                    entry.branch.as_deref() == Some(ledger.log_writer.writer.as_str())
                });
                ours.map(|entry| entry.seq).max()
            }
            // Not listed with the sessions; few as well.
            _ if name.is_project() => index.session(&ledger.id).await?.map(|row| row.head),
            _ => heads.get(&name.to_string()).copied(),
        };
        if known.is_none_or(|known| known < ledger.log_writer.seq) && ledger.log_writer.seq > 0 {
            feed.stale(name.clone());
        }
    }
    Ok(())
}
