//! A store that lets only so many requests through at a time, whoever makes them.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{Created, Page, Store};
use crate::error::{Error, ErrorKind, Result};

/// Bounds the requests in flight, and with them the memory of their bodies.
pub struct ConcurrencyLimited {
    inner: Arc<dyn Store>,
    slots: Semaphore,
}

impl ConcurrencyLimited {
    /// Lets `at_once` requests through.
    pub fn new(inner: Arc<dyn Store>, at_once: usize) -> Self {
        ConcurrencyLimited {
            inner,
            slots: Semaphore::new(at_once.max(1)),
        }
    }

    async fn slot(&self) -> Result<SemaphorePermit<'_>> {
        self.slots.acquire().await.map_err(|cause| {
            Error::new(ErrorKind::Internal, "wait for a request slot").caused_by(cause)
        })
    }
}

#[async_trait]
impl Store for ConcurrencyLimited {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created> {
        let _slot = self.slot().await?;
        self.inner.create(key, body).await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        let _slot = self.slot().await?;
        self.inner.put(key, body).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        let _slot = self.slot().await?;
        self.inner.get(key).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        let _slot = self.slot().await?;
        self.inner.list(prefix, after).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        let _slot = self.slot().await?;
        self.inner.delete(key).await
    }

    fn fences_by_itself(&self) -> Option<bool> {
        self.inner.fences_by_itself()
    }

    fn address(&self) -> String {
        self.inner.address()
    }
}
