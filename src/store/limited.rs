//! A store decorator that limits the number of concurrent requests.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{CreateOutcome, ListPage, Store};
use crate::error::{Error, ErrorKind, Result};

/// Limits the requests in flight, and thereby the memory for their bodies.
pub struct ConcurrencyLimited {
    inner: Arc<dyn Store>,
    permits: Semaphore,
}

impl ConcurrencyLimited {
    /// A store that sends at most `max_requests` requests at a time.
    pub fn new(inner: Arc<dyn Store>, max_requests: usize) -> Self {
        ConcurrencyLimited {
            inner,
            permits: Semaphore::new(max_requests.max(1)),
        }
    }

    async fn permit(&self) -> Result<SemaphorePermit<'_>> {
        self.permits.acquire().await.map_err(|cause| {
            Error::new(ErrorKind::Internal, "wait for a request permit").caused_by(cause)
        })
    }
}

#[async_trait]
impl Store for ConcurrencyLimited {
    async fn create(&self, key: &str, body: Bytes) -> Result<CreateOutcome> {
        let _permit = self.permit().await?;
        self.inner.create(key, body).await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        let _permit = self.permit().await?;
        self.inner.put(key, body).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        let _permit = self.permit().await?;
        self.inner.get(key).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage> {
        let _permit = self.permit().await?;
        self.inner.list(prefix, after).await
    }

    async fn list_tree(&self, directory: &str) -> Result<ListPage> {
        let _permit = self.permit().await?;
        self.inner.list_tree(directory).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        let _permit = self.permit().await?;
        self.inner.delete(key).await
    }

    fn has_atomic_create(&self) -> Option<bool> {
        self.inner.has_atomic_create()
    }

    fn address(&self) -> String {
        self.inner.address()
    }
}
