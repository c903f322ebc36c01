//! The metadata writer: sets labels, request ID and TTL on every session that this process writes.
//!
//! It works in the background, once per session, and retries until the metadata is durable.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::capture::{IndexQueue, MetadataQueue};
use crate::log::Logs;
use crate::model::SessionMetadata;
use crate::sys::{Backoff, Counters, Operation};

/// Maximum pause between two attempts. It is short, because the object is small and the agent may
/// exit soon.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(2);

/// Poll interval while waiting for the queue to become idle.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Writes the metadata of the queued sessions forever; drop the future to stop.
pub async fn run(
    queue: Arc<MetadataQueue>,
    index_queue: Arc<IndexQueue>,
    counters: Arc<Counters>,
    logs: Logs,
    metadata: SessionMetadata,
) {
    let mut backoff = Backoff::new(logs.rng.clone());
    loop {
        let name = queue.next().await;
        let id = logs.id(name.clone());
        let result = logs
            .update_metadata(&id, |current| Ok(current.updated_with(&metadata)))
            .await;
        if let Err(error) = &result {
            counters.record_error(Operation::Metadata, error.kind());
        }
        match result {
            Ok(written) => {
                backoff.reset();
                tracing::debug!(session = %id.name, version = written.version, "wrote the metadata of a session");
                index_queue.push_stale(name);
            }
            Err(error) if error.is_retryable() => {
                let wait = backoff.delay_after_failure().min(MAX_RETRY_DELAY);
                tracing::debug!(%error, retry_in = ?wait, "the metadata write failed; retrying");
                queue.retry(name);
                tokio::time::sleep(wait).await;
            }
            Err(error) => {
                tracing::error!(session = %id.name, %error, "writing the metadata of a session failed")
            }
        }
    }
}

/// Waits until all metadata is written; returns false if the deadline comes first.
pub async fn wait_until_idle(queue: &MetadataQueue, deadline: Instant) -> bool {
    while !queue.is_idle() {
        if Instant::now() >= deadline {
            return false;
        }
        tokio::time::sleep(IDLE_POLL_INTERVAL).await;
    }
    true
}
