//! A store that reads again what failed in passing. Writes are left alone: what a failed write means, only its caller knows.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::{Created, Page, Store};
use crate::error::Result;
use crate::sys::{Backoff, Rng};

/// So often a read is tried in all: with the back-off's steps about a second and a half, enough for a hiccup, and short
/// enough to be told of an outage.
const TRIES: u32 = 4;

/// Reads again what failed in passing.
pub struct RetryingReads {
    inner: Arc<dyn Store>,
    rng: Arc<dyn Rng>,
}

impl RetryingReads {
    /// Reads from `inner`.
    pub fn new(inner: Arc<dyn Store>, rng: Arc<dyn Rng>) -> Self {
        RetryingReads { inner, rng }
    }

    async fn again<T, F: Future<Output = Result<T>>>(
        &self,
        mut read: impl FnMut() -> F,
    ) -> Result<T> {
        let mut backoff = Backoff::new(self.rng.clone());
        loop {
            match read().await {
                Err(error) if error.is_retryable() && backoff.failed() + 1 < TRIES => {
                    let wait = backoff.wait_after_failure();
                    tracing::debug!(%error, attempt = backoff.failed(), retry_in = ?wait, "reading again");
                    tokio::time::sleep(wait).await;
                }
                done => return done,
            }
        }
    }
}

#[async_trait]
impl Store for RetryingReads {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created> {
        self.inner.create(key, body).await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        self.inner.put(key, body).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        self.again(|| self.inner.get(key)).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        self.again(|| self.inner.list(prefix, after)).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.inner.delete(key).await
    }

    fn fences_by_itself(&self) -> Option<bool> {
        self.inner.fences_by_itself()
    }

    fn address(&self) -> String {
        self.inner.address()
    }
}
