//! Merges entries in the background, one log at a time, when the streamer has written enough of them.

use std::sync::Arc;

use crate::capture::Feed;
use crate::error::ErrorKind;
use crate::log::Logs;
use crate::sys::{Backoff, Operation};
use crate::upkeep::compact::compact;

/// Merges for ever; drop it to stop. A merge that is not made costs readers time and nothing else.
pub async fn run(feed: Arc<Feed>, logs: Logs) {
    let mut backoff = Backoff::new(logs.rng.clone());
    loop {
        let (name, seq) = feed.ripe().await;
        let id = logs.id(name.clone());
        let done = compact(&logs, &id, seq).await;
        if let Err(error) = &done {
            feed.counts().failed(Operation::Merge, error.kind());
        }
        match done {
            Ok(made) => {
                backoff.reset();
                if made.pieces > 0 {
                    feed.counts().note(|tally| {
                        tally.merges += u64::from(made.pieces);
                        tally.merged += made.bytes;
                    });
                    tracing::debug!(%id, seq, pieces = made.pieces, bytes = made.bytes, "merged");
                }
            }
            Err(error) if error.is_retryable() => {
                let wait = backoff.wait_after_failure();
                tracing::debug!(%error, retry_in = ?wait, "merging again later");
                feed.still_ripe(name, seq);
                tokio::time::sleep(wait).await;
            }
            // It stays as it is until the next run is complete.
            Err(error) if matches!(error.kind(), ErrorKind::Conflict | ErrorKind::Encrypted) => {
                tracing::debug!(%error, "not merged")
            }
            Err(error) => tracing::warn!(%error, "not merged; sessiond verify tells more"),
        }
    }
}
