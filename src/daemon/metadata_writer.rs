//! Says of each session that is written to what this process was told to say of all of them: labels, request, how long to
//! keep it. In the background, once for each, and again until it is durable.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::capture::Feed;
use crate::log::Logs;
use crate::model::SessionMetadata;
use crate::sys::{Backoff, Operation};

/// The longest pause between two tries: what is said here is small, and an agent may be gone soon.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Says for ever; drop it to stop.
pub async fn run(feed: Arc<Feed>, logs: Logs, wishes: SessionMetadata) {
    let mut backoff = Backoff::new(logs.rng.clone());
    loop {
        let name = feed.unsaid().await;
        let id = logs.id(name.clone());
        let done = logs.say(&id, |before| Ok(before.then(&wishes))).await;
        if let Err(error) = &done {
            feed.counts().failed(Operation::Label, error.kind());
        }
        match done {
            Ok(said) => {
                backoff.reset();
                tracing::debug!(%id, number = said.number, "said");
                feed.stale(name);
            }
            Err(error) if error.is_retryable() => {
                let wait = backoff.wait_after_failure().min(LONGEST_PAUSE);
                tracing::debug!(%error, retry_in = ?wait, "saying it again later");
                feed.still_unsaid(name);
                tokio::time::sleep(wait).await;
            }
            Err(error) => tracing::error!(%error, "labels and the like were not said"),
        }
    }
}

/// Waits until all is said, or until `deadline`.
pub async fn finished(feed: &Feed, deadline: Instant) -> bool {
    while !feed.all_said() {
        if Instant::now() >= deadline {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    true
}
