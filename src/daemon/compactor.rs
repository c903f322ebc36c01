//! The compactor: merges entries in the background, one log at a time, once a run of entries is
//! complete.

use std::sync::Arc;

use crate::capture::CompactionQueue;
use crate::error::ErrorKind;
use crate::log::Logs;
use crate::sys::{Backoff, Counters, Operation};
use crate::upkeep::compact::compact;

/// Compacts the queued logs forever; drop the future to stop. The only effect of a failed
/// compaction is slower reads.
pub async fn run(queue: Arc<CompactionQueue>, counters: Arc<Counters>, logs: Logs) {
    let mut backoff = Backoff::new(logs.rng.clone());
    loop {
        let (name, seq) = queue.next().await;
        let id = logs.id(name.clone());
        let result = compact(&logs, &id, seq).await;
        if let Err(error) = &result {
            counters.record_error(Operation::Compaction, error.kind());
        }
        match result {
            Ok(written) => {
                backoff.reset();
                if written.segments > 0 {
                    counters.record_compaction(u64::from(written.segments), written.bytes);
                    let (segments, bytes) = (written.segments, written.bytes);
                    tracing::debug!(session = %id.name, seq, segments, bytes, "compacted a log");
                }
            }
            Err(error) if error.is_retryable() => {
                let wait = backoff.delay_after_failure();
                tracing::debug!(%error, retry_in = ?wait, "the compaction failed; retrying");
                queue.retry(name, seq);
                tokio::time::sleep(wait).await;
            }
            // The log stays uncompacted until the next run of entries is complete.
            Err(error) if error.kind() == ErrorKind::Conflict || error.kind().is_unreadable() => {
                tracing::debug!(session = %id.name, %error, "skipped a compaction")
            }
            Err(error) => {
                tracing::warn!(session = %id.name, %error, "the compaction failed; run \"sessiond verify\" to check the log")
            }
        }
    }
}
