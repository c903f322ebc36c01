//! Garbage collection of all logs of an agent.

use serde::Serialize;

use crate::error::{Error, Result};
use crate::model::LogId;
use crate::sys::scratch::ScratchDirectory;
use crate::upkeep::collect::RetentionPolicy;
use crate::upkeep::gc::{self, CollectReport};
use crate::upkeep::reindex;
use crate::wire::Parts;

/// Garbage collection stops after this many logs in a row for which the store was unavailable:
/// each of them waits for the retries of several requests.
const MAX_UNAVAILABLE_IN_A_ROW: usize = 5;

/// The result of garbage collection.
#[derive(Debug, Default)]
pub struct GcOutcome {
    /// What was deleted.
    pub report: GcReport,
    /// The errors of logs that were left unchanged.
    pub failures: Vec<Error>,
    /// The first error of a log that this process cannot read.
    pub unreadable: Option<Error>,
}

/// What garbage collection deleted, or would delete.
#[derive(Debug, Default, Serialize)]
pub struct GcReport {
    /// Whether nothing was changed because of `--dry-run`.
    pub dry_run: bool,
    /// Number of logs.
    pub logs: usize,
    /// Number of sessions that expire.
    pub expired: usize,
    /// Number of sessions that are kept although their TTL has passed: archived sessions and
    /// sessions with a named checkpoint.
    pub exempt: usize,
    /// Number of objects deleted.
    pub objects: usize,
    /// Size of these objects.
    pub bytes: u64,
    /// Number of temporary objects of other processes that were deleted.
    pub temporary_objects: usize,
    /// Number of logs that were left unchanged because of an error.
    pub failed: usize,
    /// Number of logs that were not examined, because the store was unavailable.
    pub skipped: usize,
    /// Number of logs that were left unchanged because this process cannot read them.
    pub unreadable: usize,
    /// The logs in which something was done.
    pub collected: Vec<CollectReport>,
}

/// Collects every log of the agent. Passes each report to `on_report` as soon as it is complete.
pub async fn collect_all(
    parts: &Parts,
    policy: &RetentionPolicy,
    dry_run: bool,
    mut on_report: impl FnMut(&CollectReport) -> Result<()>,
) -> Result<GcOutcome> {
    let logs = &parts.logs;
    // A dry run writes nothing, not even the temporary object that determines the store's time.
    let now = if dry_run {
        logs.clock.now()
    } else {
        gc::store_time(logs).await?
    };
    let scratch = ScratchDirectory::new(&*logs.rng);
    let mut outcome = GcOutcome::default();
    let report = &mut outcome.report;
    report.dry_run = dry_run;
    let names = logs.log_names("").await?;
    let total = names.len();
    logs.progress.set_total_logs(total);
    let mut unavailable_in_a_row = 0;
    for name in names {
        let id = logs.id(name);
        report.logs += 1;
        logs.progress.start_log();
        match gc::collect(logs, &id, policy, now, &scratch, dry_run).await {
            Ok(collected) if collected.steps.is_empty() => {
                report.exempt += usize::from(collected.exempt.is_some());
            }
            Ok(collected) => {
                on_report(&collected)?;
                report.expired += usize::from(collected.expires());
                report.exempt += usize::from(collected.exempt.is_some());
                if !dry_run {
                    update_index(parts, &id, &collected).await;
                }
                report.objects += collected.objects;
                report.bytes += collected.bytes;
                report.collected.push(collected);
            }
            Err(error) if error.kind().is_unreadable() => {
                tracing::debug!(%error, session = %id.name, "leaving an unreadable log unchanged");
                report.unreadable += 1;
                outcome.unreadable.get_or_insert(error);
            }
            Err(error) => {
                report.failed += 1;
                unavailable_in_a_row = match error.is_retryable() {
                    true => unavailable_in_a_row + 1,
                    false => 0,
                };
                outcome.failures.push(error);
                if unavailable_in_a_row >= MAX_UNAVAILABLE_IN_A_ROW {
                    report.skipped = total - report.logs;
                    return Ok(outcome);
                }
                continue;
            }
        }
        unavailable_in_a_row = 0;
    }
    match gc::delete_temporary_objects(logs, policy, now, dry_run).await {
        Ok(deleted) => report.temporary_objects = deleted,
        Err(error) => outcome.failures.push(error),
    }
    Ok(outcome)
}

/// Deletes from the index what was deleted from the store.
async fn update_index(parts: &Parts, id: &LogId, collected: &CollectReport) {
    let update = async {
        if collected.objects > 0 {
            parts.index.delete_log(id).await?;
        }
        reindex::catch_up(&parts.logs, &*parts.index, &*parts.profile, id).await
    };
    if let Err(error) = update.await {
        tracing::warn!(%error, session = %id.name, "the index update failed; run \"sessiond reindex\" to update the index");
    }
}
