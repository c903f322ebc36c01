//! A store decorator that retries reads. Does not retry writes: only the caller can handle an
//! unknown outcome.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::{CreateOutcome, ListPage, Store};
use crate::error::Result;
use crate::sys::{Rng, backoff};

/// Maximum number of attempts. With the delays of the backoff they take about 1.5 seconds: long
/// enough for a short interruption, and short enough to report an outage quickly.
const MAX_ATTEMPTS: u32 = 4;

/// Retries reads that failed with a retryable error.
pub struct RetryingReads {
    inner: Arc<dyn Store>,
    rng: Arc<dyn Rng>,
}

impl RetryingReads {
    /// A store that reads from `inner`.
    pub fn new(inner: Arc<dyn Store>, rng: Arc<dyn Rng>) -> Self {
        RetryingReads { inner, rng }
    }
}

#[async_trait]
impl Store for RetryingReads {
    async fn create(&self, key: &str, body: Bytes) -> Result<CreateOutcome> {
        self.inner.create(key, body).await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        self.inner.put(key, body).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        backoff::retry(&self.rng, MAX_ATTEMPTS, || self.inner.get(key)).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage> {
        backoff::retry(&self.rng, MAX_ATTEMPTS, || self.inner.list(prefix, after)).await
    }

    async fn list_tree(&self, directory: &str) -> Result<ListPage> {
        backoff::retry(&self.rng, MAX_ATTEMPTS, || self.inner.list_tree(directory)).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.inner.delete(key).await
    }

    fn has_atomic_create(&self) -> Option<bool> {
        self.inner.has_atomic_create()
    }

    fn address(&self) -> String {
        self.inner.address()
    }
}
