//! Updates the index after a command has changed a log. The store is authoritative: an index that
//! cannot be updated is only reported.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::index::{EntryRecord, RecordOutcome};
use crate::model::{LogId, ParsedTranscripts};
use crate::restore::Restored;
use crate::upkeep::reindex;
use crate::wire::Parts;

/// Time limit for recording a claim. A later indexer records it too.
const RECORD_TIMEOUT: Duration = Duration::from_secs(3);

/// Reads the new entries of a log into the index.
pub async fn update(parts: &Parts, id: &LogId) {
    if let Err(error) = reindex::catch_up(&parts.logs, &*parts.index, &*parts.profile, id).await {
        tracing::warn!(%error, "the index update failed; the next daemon or command that reads the session updates the index, or run \"sessiond reindex\"");
    }
}

/// Indexes a session that the index does not have, because it was unavailable when the session was
/// created. A command that needs no index does not wait for it longer than `RECORD_TIMEOUT`.
pub async fn add_missing(parts: &Parts, id: &LogId) {
    if let Err(error) = try_add_missing(parts, id).await {
        tracing::debug!(%error, "the index was not checked for {id}");
    }
}

/// Like `add_missing`, for a command that needs the index.
pub async fn try_add_missing(parts: &Parts, id: &LogId) -> Result<()> {
    let add = async {
        if parts.index.session(id).await?.is_some() {
            return Ok(0);
        }
        reindex::catch_up(&parts.logs, &*parts.index, &*parts.profile, id).await
    };
    // On the heap: the commands that call this have large futures already.
    match tokio::time::timeout(RECORD_TIMEOUT, Box::pin(add)).await {
        Ok(Ok(0)) => Ok(()),
        Ok(Ok(_)) => {
            tracing::warn!("the index did not contain {id}; added it");
            Ok(())
        }
        Ok(Err(error)) => Err(error),
        Err(_) => Err(Error::unavailable(format!(
            "the index does not respond within {RECORD_TIMEOUT:?}"
        ))),
    }
}

/// Reads the named checkpoints of a session into the index.
pub async fn update_checkpoints(parts: &Parts, id: &LogId) {
    if let Err(error) = reindex::update_named_checkpoints(&parts.logs, &*parts.index, id).await {
        tracing::warn!(%error, "the index update failed; run \"sessiond reindex\" to update the index");
    }
}

/// Connects to the index while the caller does something else, so that a later call does not wait
/// for it.
pub fn connect_early(parts: &Parts) {
    let index = parts.index.clone();
    tokio::spawn(async move {
        // A call that needs the index reports the error.
        let _ = index.connect().await;
    });
}

/// Records the claims of restored logs. Adds a new fork that the index does not have. Other entries
/// that the index lacks are left to the next indexer: the agent that is about to start must not wait
/// for them.
pub async fn record_claims(parts: &Parts, restored: &[Restored]) {
    let record = |restored: &Restored| {
        let claim = restored.claim.as_ref()?;
        Some(EntryRecord {
            log: parts.logs.id(restored.report.session.parse().ok()?),
            branch: None,
            header: claim.header.clone(),
            stored_bytes: claim.bytes.len() as u64,
            digest: claim.digest,
            transcripts: ParsedTranscripts::default(),
        })
    };
    let records: Vec<EntryRecord> = restored.iter().filter_map(record).collect();
    if records.is_empty() {
        return;
    }
    let outcomes = tokio::time::timeout(RECORD_TIMEOUT, parts.index.record_all(&records)).await;
    let outcomes = match outcomes {
        Ok(Ok(outcomes)) => outcomes,
        Ok(Err(error)) => {
            return tracing::warn!(%error, "the index update failed; the daemon will update the index later");
        }
        Err(_) => {
            return tracing::warn!(timeout = ?RECORD_TIMEOUT, "the index does not respond; the daemon updates it later");
        }
    };
    for (record, outcome) in records.iter().zip(outcomes) {
        // The first claim after that of a fork. A longer log is not read again for the index.
        if outcome == (RecordOutcome::Gap { head: 0 }) && record.header.seq == 2 {
            Box::pin(add_missing(parts, &record.log)).await;
        }
    }
}
