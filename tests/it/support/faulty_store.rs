//! A store that counts requests and injects faults.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use sessiond::error::{Error, Result};
use sessiond::store::{CreateOutcome, ListPage, Store};
use tokio::sync::watch;

/// What happens to one write.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum WriteFault {
    /// The write succeeds.
    None,
    /// The write succeeds, and the response is lost.
    LoseResponse,
    /// The write fails.
    Fail,
}

type FaultRule = Arc<dyn Fn(&str) -> WriteFault + Send + Sync>;

/// Wraps a store; counts requests, and fails, holds or delays them.
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    requests: AtomicU64,
    reads: AtomicU64,
    lists: AtomicU64,
    writes: AtomicU64,
    uploaded: AtomicU64,
    /// Requests for keys that contain this text fail.
    failing_key: Mutex<Option<String>>,
    fault_rule: Mutex<Option<FaultRule>>,
    /// Writes wait while this is true.
    hold: watch::Sender<bool>,
    latency: Mutex<Duration>,
}

impl FaultyStore {
    pub fn new(inner: Arc<dyn Store>) -> FaultyStore {
        FaultyStore {
            inner,
            requests: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            lists: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            uploaded: AtomicU64::new(0),
            failing_key: Mutex::default(),
            fault_rule: Mutex::default(),
            hold: watch::Sender::new(false),
            latency: Mutex::default(),
        }
    }

    /// Number of requests so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(SeqCst)
    }

    /// Number of GET requests so far.
    pub fn reads(&self) -> u64 {
        self.reads.load(SeqCst)
    }

    /// Number of LIST requests so far.
    pub fn lists(&self) -> u64 {
        self.lists.load(SeqCst)
    }

    /// Number of writes so far, including failed ones.
    pub fn writes(&self) -> u64 {
        self.writes.load(SeqCst)
    }

    /// Bytes of all writes so far.
    pub fn uploaded(&self) -> u64 {
        self.uploaded.load(SeqCst)
    }

    /// From now on, requests for keys that contain `text` fail.
    pub fn fail_requests(&self, text: &str) {
        *self.failing_key.lock().unwrap() = Some(text.to_owned());
    }

    /// From now on, writes succeed and their responses are lost.
    pub fn lose_responses(&self) {
        self.inject(|_| WriteFault::LoseResponse);
    }

    /// From now on, `rule` decides the fate of each write by its key. It may write itself.
    pub fn inject(&self, rule: impl Fn(&str) -> WriteFault + Send + Sync + 'static) {
        *self.fault_rule.lock().unwrap() = Some(Arc::new(rule));
    }

    /// Ends all faults, except held writes and latency.
    pub fn recover(&self) {
        *self.failing_key.lock().unwrap() = None;
        *self.fault_rule.lock().unwrap() = None;
    }

    /// From now on, writes wait for [`FaultyStore::release`].
    pub fn hold(&self) {
        self.hold.send_replace(true);
    }

    pub fn release(&self) {
        self.hold.send_replace(false);
    }

    /// From now on, each request takes this long.
    pub fn set_latency(&self, latency: Duration) {
        *self.latency.lock().unwrap() = latency;
    }

    async fn admit(&self, key: &str, counter: &AtomicU64) -> Result<()> {
        self.requests.fetch_add(1, SeqCst);
        counter.fetch_add(1, SeqCst);
        let latency = *self.latency.lock().unwrap();
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        if std::ptr::eq(counter, &self.writes) {
            let _ = self.hold.subscribe().wait_for(|hold| !hold).await;
        }
        let failing_key = self.failing_key.lock().unwrap().clone();
        match failing_key {
            Some(text) if key.contains(&text) => {
                Err(Error::unavailable(format!("the test fails {key}")))
            }
            _ => Ok(()),
        }
    }

    async fn write<T: Send>(
        &self,
        key: &str,
        len: usize,
        write: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        self.admit(key, &self.writes).await?;
        self.uploaded.fetch_add(len as u64, SeqCst);
        let rule = self.fault_rule.lock().unwrap().clone();
        let fault = rule.map_or(WriteFault::None, |rule| rule(key));
        match fault {
            WriteFault::None => write.await,
            WriteFault::LoseResponse => write.await.and_then(|_| {
                let statement = format!("the test lost the response for {key}");
                Err(Error::unavailable(statement))
            }),
            WriteFault::Fail => Err(Error::unavailable(format!("the test fails {key}"))),
        }
    }
}

#[async_trait]
impl Store for FaultyStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<CreateOutcome> {
        let len = body.len();
        self.write(key, len, self.inner.create(key, body)).await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        let len = body.len();
        self.write(key, len, self.inner.put(key, body)).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        self.admit(key, &self.reads).await?;
        self.inner.get(key).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage> {
        self.admit(prefix, &self.lists).await?;
        self.inner.list(prefix, after).await
    }

    async fn list_tree(&self, directory: &str) -> Result<ListPage> {
        self.admit(directory, &self.lists).await?;
        self.inner.list_tree(directory).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.admit(key, &self.writes).await?;
        self.inner.delete(key).await
    }

    fn has_atomic_create(&self) -> Option<bool> {
        self.inner.has_atomic_create()
    }

    fn address(&self) -> String {
        self.inner.address()
    }
}
