//! The probe for conditional creates: a store that ignores the condition and returns success cannot
//! fence.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};

use crate::error::{ErrorContext, ErrorKind, Result};
use crate::model::keys;
use crate::store::{CreateOutcome, Store};
use crate::sys::Rng;

/// Number of concurrent creates of one key. A store that ignores conditions lets all of them
/// succeed; a store that checks without a lock lets two of them succeed.
const RACERS: usize = 8;

/// The stored result of the probe.
#[derive(Debug, Serialize, Deserialize)]
struct ProbeRecord {
    version: u32,
    conditional_create: bool,
}

/// Whether the store's `create` is atomic. The store is probed once; the result is an object in the
/// store.
pub async fn has_conditional_create(store: &dyn Store, rng: &Arc<dyn Rng>) -> Result<bool> {
    if let Some(known) = store.has_atomic_create() {
        return Ok(known);
    }
    let stored = store
        .get(&keys::probe_record())
        .await
        .context("check whether the store supports conditional creates")?;
    if let Some(record) =
        stored.and_then(|bytes| serde_json::from_slice::<ProbeRecord>(&bytes).ok())
    {
        return Ok(record.conditional_create);
    }
    let conditional_create = race(store, rng)
        .await
        .context("probe the store for conditional creates")?;
    let record = serde_json::to_vec(&ProbeRecord {
        version: 1,
        conditional_create,
    })
    .unwrap_or_default();
    match store.put(&keys::probe_record(), Bytes::from(record)).await {
        // A process without permission to write outside its namespace repeats the probe at each
        // start.
        Err(error) if error.kind() == ErrorKind::Usage => {
            tracing::debug!(%error, "saving the result of the store test failed")
        }
        put => put.context("store the result of the store probe")?,
    }
    Ok(conditional_create)
}

async fn race(store: &dyn Store, rng: &Arc<dyn Rng>) -> Result<bool> {
    let key = keys::probe(&format!("{:016x}", rng.next()));
    let racers =
        (0..RACERS).map(|racer| store.create(&key, Bytes::from(format!("racer {racer}\n"))));
    let outcomes = join_all(racers).await;
    // One more create after the race must fail.
    let late = store.create(&key, Bytes::from_static(b"late\n")).await;
    store.delete(&key).await?;
    let mut winners = 0;
    for outcome in outcomes {
        winners += usize::from(outcome? == CreateOutcome::Created);
    }
    Ok(winners == 1 && late? == CreateOutcome::AlreadyExists)
}
