//! The probe for conditional creates: a store that ignores the condition and returns success cannot
//! fence.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};

use crate::codec::version;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::model::keys;
use crate::store::{CreateOutcome, Store, delete_temporary};
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
    let stored = stored.map(|bytes| decode(&bytes));
    if let Some(Ok(record)) = stored {
        return Ok(record.conditional_create);
    }
    let conditional_create = race(store, rng)
        .await
        .context("probe the store for conditional creates")?;
    if let Some(Err(error)) = stored
        && error.kind() == ErrorKind::NewerFormat
    {
        // The result of a newer sessiond stays; this one repeats the probe at each start.
        tracing::debug!(%error, "the result of the store probe is not stored");
        return Ok(conditional_create);
    }
    let record = serde_json::to_vec(&ProbeRecord {
        version: version::PROBE,
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

fn decode(bytes: &[u8]) -> Result<ProbeRecord> {
    let key = keys::probe_record();
    match version::read(&key, bytes, version::PROBE)? {
        1 => serde_json::from_slice(bytes)
            .map_err(|cause| Error::corrupt(cause.to_string()).context(format_args!("read {key}"))),
        other => Err(version::unknown(&key, other)),
    }
}

async fn race(store: &dyn Store, rng: &Arc<dyn Rng>) -> Result<bool> {
    let key = keys::probe(&format!("{:016x}", rng.next()));
    let racers =
        (0..RACERS).map(|racer| store.create(&key, Bytes::from(format!("racer {racer}\n"))));
    let outcomes = join_all(racers).await;
    // One more create after the race must fail.
    let late = store.create(&key, Bytes::from_static(b"late\n")).await;
    delete_temporary(store, &key).await?;
    let mut winners = 0;
    for outcome in outcomes {
        winners += usize::from(outcome? == CreateOutcome::Created);
    }
    Ok(winners == 1 && late? == CreateOutcome::AlreadyExists)
}
