//! Updates the index after a command has changed a log. The store is authoritative: an index that
//! cannot be updated is only reported.

use std::time::Duration;

use crate::index::EntryRecord;
use crate::model::{LogId, ParsedTranscripts};
use crate::restore::Restored;
use crate::upkeep::reindex;
use crate::wire::Parts;

/// Time limit for recording a claim. A later indexer records it too.
const RECORD_TIMEOUT: Duration = Duration::from_secs(3);

/// Reads the new entries of a log into the index.
pub async fn update(parts: &Parts, id: &LogId) {
    if let Err(error) = reindex::catch_up(&parts.logs, &*parts.index, &*parts.profile, id).await {
        tracing::warn!(%error, "the index update failed; run \"sessiond reindex\" to update the index");
    }
}

/// Reads the named checkpoints of a session into the index.
pub async fn update_checkpoints(parts: &Parts, id: &LogId) {
    if let Err(error) = reindex::update_named_checkpoints(&parts.logs, &*parts.index, id).await {
        tracing::warn!(%error, "the index update failed; run \"sessiond reindex\" to update the index");
    }
}

/// Records the claims of restored logs. Entries before them that the index lacks are left to the
/// next indexer: the agent that is about to start must not wait for them.
pub async fn record_claims(parts: &Parts, restored: &[Restored]) {
    for Restored { report, claim } in restored {
        let (Some(claim), Ok(name)) = (claim, report.session.parse()) else {
            continue;
        };
        let record = EntryRecord {
            log: parts.logs.id(name),
            branch: None,
            header: claim.header.clone(),
            stored_bytes: claim.bytes.len() as u64,
            digest: claim.digest,
            transcripts: ParsedTranscripts::default(),
        };
        match tokio::time::timeout(RECORD_TIMEOUT, parts.index.record(&record)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, "the index update failed; the daemon will update the index later");
                return;
            }
            Err(_) => {
                tracing::warn!(timeout = ?RECORD_TIMEOUT, "the index does not respond; the daemon updates it later");
                return;
            }
        }
    }
}
