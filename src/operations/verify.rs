//! Verifies one log, or all logs of an agent, and compares them with the index.

use std::collections::BTreeSet;

use crate::error::{ErrorKind, Result};
use crate::index::EntryRow;
use crate::log::witness::NEWEST_ENTRIES;
use crate::model::{LogId, LogName};
use crate::sessions::find;
use crate::sys::scratch::ScratchDirectory;
use crate::verify::{self, VerifyReport};
use crate::wire::Parts;

/// Verifies the session `id`, or every log of the agent. Passes each report to `on_report` as soon
/// as it is complete, and stops at the first log that cannot be checked.
pub async fn verify(
    parts: &Parts,
    id: Option<&str>,
    deep: bool,
    mut on_report: impl FnMut(&VerifyReport) -> Result<()>,
) -> Result<Vec<VerifyReport>> {
    let logs = &parts.logs;
    let mut index = IndexedLogs {
        parts,
        is_available: parts.witness.is_on(),
    };
    let ids = match id {
        Some(id) => vec![index.find(id).await?],
        None => {
            let names = logs.log_names("").await?;
            let stored = names.into_iter().map(|name| logs.id(name)).collect();
            index.add_lost(stored).await
        }
    };
    let scratch = ScratchDirectory::new(&*logs.rng);
    let mut reports = Vec::new();
    logs.progress.set_total_logs(ids.len());
    for id in &ids {
        logs.progress.start_log();
        let known = index.newest_entries(id).await;
        let report = verify::verify((logs, &*parts.profile), id, &known, &scratch, deep).await?;
        on_report(&report)?;
        reports.push(report);
    }
    Ok(reports)
}

/// The logs that the index knows. After the first failure, it is not asked again.
struct IndexedLogs<'a> {
    parts: &'a Parts,
    is_available: bool,
}

impl IndexedLogs<'_> {
    async fn ask<T: Default>(&mut self, answer: impl Future<Output = Result<T>>) -> T {
        if !self.is_available {
            return T::default();
        }
        answer.await.unwrap_or_else(|error| {
            tracing::warn!(%error, "the index does not answer; verifying the store alone");
            self.is_available = false;
            T::default()
        })
    }

    async fn newest_entries(&mut self, id: &LogId) -> Vec<EntryRow> {
        let index = &*self.parts.index;
        self.ask(index.newest_entries(id, NEWEST_ENTRIES)).await
    }

    /// Whether the index knows entries of a log that the store does not have.
    async fn is_lost(&mut self, id: &LogId) -> bool {
        let known = self.newest_entries(id).await;
        verify::is_lost(&known)
    }

    /// The session with this ID in the store, or one that only the index knows.
    async fn find(&mut self, id: &str) -> Result<LogId> {
        let found = find::by_id(&self.parts.logs, id).await;
        if let Err(error) = &found
            && error.kind() == ErrorKind::NotFound
            && let Ok(name) = id.trim().parse::<LogName>()
        {
            let lost = self.parts.logs.id(name);
            if self.is_lost(&lost).await {
                return Ok(lost);
            }
        }
        found
    }

    /// Adds the logs that only the index knows.
    async fn add_lost(&mut self, mut stored: Vec<LogId>) -> Vec<LogId> {
        let logs = &self.parts.logs;
        let index = &*self.parts.index;
        let indexed = self.ask(index.logs(&logs.namespace, &logs.agent)).await;
        let names: BTreeSet<String> = stored.iter().map(|id| id.name.to_string()).collect();
        for id in indexed {
            if !names.contains(&id.name.to_string()) && self.is_lost(&id).await {
                stored.push(id);
            }
        }
        stored
    }
}
