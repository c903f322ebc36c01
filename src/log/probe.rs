//! Finds out whether a store honours conditions: some ignore them and answer 200, and such a store cannot fence.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};

use crate::error::{ErrorContext, ErrorKind, Result};
use crate::model::keys;
use crate::store::{Created, Store};
use crate::sys::Rng;

/// So many creates race for one key: a store that ignores conditions lets all of them win, and one that checks without
/// a lock lets two.
const RACERS: usize = 8;

/// What is remembered with the store.
#[derive(Debug, Serialize, Deserialize)]
struct ProbeRecord {
    v: u32,
    conditional_create: bool,
}

/// Whether `create` is atomic there. Asked once per store: the answer is remembered beside the data.
pub async fn conditional_create(store: &dyn Store, rng: &Arc<dyn Rng>) -> Result<bool> {
    if let Some(known) = store.fences_by_itself() {
        return Ok(known);
    }
    let remembered = store
        .get(&keys::store_facts())
        .await
        .context("ask the store what it can do")?;
    if let Some(facts) =
        remembered.and_then(|bytes| serde_json::from_slice::<ProbeRecord>(&bytes).ok())
    {
        return Ok(facts.conditional_create);
    }
    let honoured = race(store, rng)
        .await
        .context("probe the store for conditional creates")?;
    let facts = serde_json::to_vec(&ProbeRecord {
        v: 1,
        conditional_create: honoured,
    })
    .unwrap_or_default();
    match store.put(&keys::store_facts(), Bytes::from(facts)).await {
        // Who may only write to a namespace asks each time.
        Err(error) if error.kind() == ErrorKind::Usage => {
            tracing::debug!(%error, "what the store can do is not remembered")
        }
        put => put.context("remember what the store can do")?,
    }
    Ok(honoured)
}

async fn race(store: &dyn Store, rng: &Arc<dyn Rng>) -> Result<bool> {
    let key = keys::probe(&format!("{:016x}", rng.next()));
    let racers =
        (0..RACERS).map(|racer| store.create(&key, Bytes::from(format!("racer {racer}\n"))));
    let answers = join_all(racers).await;
    // One more after the race: it must lose.
    let late = store.create(&key, Bytes::from_static(b"late\n")).await;
    store.delete(&key).await?;
    let mut winners = 0;
    for answer in answers {
        winners += usize::from(answer? == Created::New);
    }
    Ok(winners == 1 && late? == Created::Exists)
}
