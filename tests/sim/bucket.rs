//! The object store: a map, and each process's connection to it, on which requests fail, arrive
//! late, or lose their reply.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use age::x25519::Identity;
use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;
use sessiond::error::{Error, Result};
use sessiond::model::keys::holds_content;
use sessiond::store::signature::SignaturePolicy;
use sessiond::store::{CreateOutcome, ListPage, Object, Store};

use super::process::ProcessLifetime;
use super::world::{InjectedOutcome, World};

/// Maximum number of entries of a run.
const MAX_ENTRIES: usize = 1000;

/// An object and its writer.
#[derive(Clone)]
pub struct Stored {
    /// The object, decrypted.
    pub bytes: Bytes,
    /// The object as stored.
    pub raw: Bytes,
    /// The volume whose process wrote it.
    pub author: u64,
    /// When it was written, by the store's clock.
    pub modified: Timestamp,
}

pub type Objects = BTreeMap<String, Stored>;

/// Counters of the requests to the bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    pub requests: u64,
    pub writes: u64,
    pub bytes: u64,
}

#[derive(Default)]
struct Inner {
    objects: Objects,
    /// Every entry that was ever written, collected or not: the true log.
    archive: Objects,
    /// How often the log was deleted completely.
    complete_deletions: u64,
    deleted: u64,
    /// Counts changes.
    generation: u64,
    traffic: Traffic,
}

/// The bucket.
pub struct Bucket {
    /// Whether a conditional create fails if the object exists. Some stores ignore the condition.
    is_conditional: bool,
    /// Decrypts what is stored, so that the oracle can read it.
    identity: Option<Identity>,
    inner: Mutex<Inner>,
}

impl Bucket {
    pub fn new(is_conditional: bool, identity: Option<Identity>) -> Arc<Bucket> {
        Arc::new(Bucket {
            is_conditional,
            identity,
            inner: Mutex::default(),
        })
    }

    /// A separate bucket with these objects.
    pub fn of(objects: Objects) -> Arc<Bucket> {
        let inner = Inner {
            objects,
            ..Inner::default()
        };
        Arc::new(Bucket {
            is_conditional: true,
            identity: None,
            inner: Mutex::new(inner),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The object as the log wrote it, without encryption and signature.
    fn decrypt(&self, key: &str, body: &Bytes) -> Bytes {
        let decrypted = match &self.identity {
            Some(identity) if body.starts_with(b"age-encryption.org/v1") => {
                Bytes::from(age::decrypt(identity, body).expect("encrypted to this identity"))
            }
            _ => body.clone(),
        };
        let anyone = SignaturePolicy::default();
        anyone.verify(key, decrypted).expect("nothing is checked")
    }

    /// Checks that every object with content is encrypted, if the run has keys.
    pub fn check_encryption(&self) -> std::result::Result<(), String> {
        let inner = self.inner();
        let mut stored = inner.objects.iter().chain(&inner.archive);
        let plaintext = stored.find(|(key, stored)| {
            holds_content(key) && !stored.raw.starts_with(b"age-encryption.org/v1")
        });
        match plaintext {
            Some((key, _)) if self.identity.is_some() => Err(format!("{key} is plaintext")),
            _ => Ok(()),
        }
    }

    pub fn objects(&self) -> Objects {
        self.inner().objects.clone()
    }

    /// Every entry that was ever written, as first stored.
    pub fn archive(&self) -> Objects {
        self.inner().archive.clone()
    }

    /// How often the log was deleted completely, and how many of its objects were deleted.
    pub fn losses(&self) -> (u64, u64) {
        let inner = self.inner();
        (inner.complete_deletions, inner.deleted)
    }

    pub fn generation(&self) -> u64 {
        self.inner().generation
    }

    pub fn traffic(&self) -> Traffic {
        self.inner().traffic
    }

    fn write(
        &self,
        key: &str,
        body: &Bytes,
        author: u64,
        now: Timestamp,
        only_new: bool,
    ) -> CreateOutcome {
        let mut inner = self.inner();
        if only_new && self.is_conditional && inner.objects.contains_key(key) {
            return CreateOutcome::AlreadyExists;
        }
        let stored = Stored {
            bytes: self.decrypt(key, body),
            raw: body.clone(),
            author,
            modified: now,
        };
        let replaced = inner
            .objects
            .insert(key.to_owned(), stored.clone())
            .is_some();
        // A late write at a collected seq is not part of the log.
        if is_entry(key) && (replaced || !inner.archive.contains_key(key)) {
            inner.archive.insert(key.to_owned(), stored);
        }
        inner.generation += 1;
        CreateOutcome::Created
    }

    fn delete(&self, key: &str) {
        let mut inner = self.inner();
        let has_existed = inner.objects.remove(key).is_some();
        inner.generation += 1;
        // Only the final deletion of a session deletes branches.
        if key.contains("/branch/") {
            inner.archive.remove(key);
        }
        if has_existed && is_segment(key) {
            inner.deleted += 1;
            if !inner.objects.keys().any(|key| is_segment(key)) {
                inner.archive.clear();
                inner.complete_deletions += 1;
            }
        }
    }

    fn list_tree(&self, directory: &str) -> ListPage {
        let inner = self.inner();
        let below = inner
            .objects
            .range::<str, _>((Bound::Included(directory), Bound::Unbounded))
            .take_while(|(key, _)| key.starts_with(directory));
        let objects = below.map(|(key, stored)| Object {
            key: key.clone(),
            size: stored.raw.len() as u64,
            modified: stored.modified,
        });
        ListPage {
            objects: objects.collect(),
            ..ListPage::default()
        }
    }

    fn list(&self, prefix: &str, after: Option<&str>) -> ListPage {
        let inner = self.inner();
        let (mut objects, mut directories) = (Vec::new(), BTreeSet::new());
        let from = after
            .filter(|after| *after > prefix)
            .map_or(Bound::Included(prefix), Bound::Excluded);
        for (key, stored) in inner
            .objects
            .range::<str, _>((from, Bound::Unbounded))
            .take_while(|(key, _)| key.starts_with(prefix))
        {
            let name = &key[prefix.len()..];
            match name.find('/') {
                Some(end) => {
                    directories.insert(key[..prefix.len() + end + 1].to_owned());
                }
                None => objects.push(Object {
                    key: key.clone(),
                    size: stored.raw.len() as u64,
                    modified: stored.modified,
                }),
            }
        }
        ListPage {
            objects,
            directories: directories.into_iter().collect(),
            next: None,
        }
    }
}

fn is_entry(key: &str) -> bool {
    key.contains("/log/") || key.contains("/branch/")
}

fn is_segment(key: &str) -> bool {
    ["/log/", "/merge/", "/snap/"]
        .iter()
        .any(|directory| key.contains(directory))
}

/// One process's connection to the bucket.
pub struct Connection {
    pub bucket: Arc<Bucket>,
    pub world: Arc<World>,
    pub lifetime: Arc<ProcessLifetime>,
}

impl Connection {
    async fn write(
        &self,
        what: &str,
        key: &str,
        body: Bytes,
        only_new: bool,
    ) -> Result<CreateOutcome> {
        let step = self.lifetime.enter().await;
        {
            let mut inner = self.bucket.inner();
            inner.traffic.requests += 1;
            inner.traffic.writes += 1;
            inner.traffic.bytes += body.len() as u64;
            // Stops a process that writes in a loop.
            assert!(inner.archive.len() < MAX_ENTRIES, "too many entries");
        }
        self.world.delay().await;
        let outcome = self.world.write_outcome();
        let author = self.lifetime.volume;
        let reply = match outcome {
            InjectedOutcome::Success => {
                Ok(self
                    .bucket
                    .write(key, &body, author, self.world.now(), only_new))
            }
            InjectedOutcome::Before => Err(unavailable(what, key)),
            InjectedOutcome::After => {
                self.bucket
                    .write(key, &body, author, self.world.now(), only_new);
                Err(unavailable(what, key))
            }
            InjectedOutcome::Late(wait) => {
                let (bucket, world, name, lifetime) = (
                    self.bucket.clone(),
                    self.world.clone(),
                    key.to_owned(),
                    self.lifetime.number,
                );
                // The write takes effect even if the process ends.
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(wait)).await;
                    let did = bucket.write(&name, &body, author, world.now(), only_new);
                    world.note(|| format!("process {lifetime}: late {name}: {did:?}"));
                });
                Err(unavailable(what, key))
            }
        };
        self.world.note(|| {
            format!(
                "process {}: step {step} {what} {key}: {outcome:?} {}",
                self.lifetime.number,
                describe_outcome(&reply)
            )
        });
        self.world.delay().await;
        self.lifetime.leave(step).await;
        reply
    }

    async fn read<T>(
        &self,
        what: &str,
        key: &str,
        read: impl FnOnce(&Bucket) -> T + Send,
    ) -> Result<T> {
        let step = self.lifetime.enter().await;
        self.bucket.inner().traffic.requests += 1;
        self.world.delay().await;
        let reply = if self.world.read_fails() {
            Err(unavailable(what, key))
        } else {
            Ok(read(&self.bucket))
        };
        self.world.note(|| {
            format!(
                "process {}: step {step} {what} {key}: {}",
                self.lifetime.number,
                if reply.is_ok() { "ok" } else { "fails" }
            )
        });
        self.world.delay().await;
        self.lifetime.leave(step).await;
        reply
    }
}

fn describe_outcome(reply: &Result<CreateOutcome>) -> String {
    reply
        .as_ref()
        .map_or_else(|_| "fails".to_owned(), |created| format!("{created:?}"))
}

fn unavailable(what: &str, key: &str) -> Error {
    Error::unavailable(format!("{what} {key}: the store did not answer"))
}

#[async_trait]
impl Store for Connection {
    async fn create(&self, key: &str, body: Bytes) -> Result<CreateOutcome> {
        self.write("create", key, body, true).await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        self.write("put", key, body, false).await.map(|_| ())
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        self.read("get", key, |bucket| {
            bucket
                .inner()
                .objects
                .get(key)
                .map(|stored| stored.raw.clone())
        })
        .await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage> {
        self.read("list", prefix, |bucket| bucket.list(prefix, after))
            .await
    }

    async fn list_tree(&self, directory: &str) -> Result<ListPage> {
        self.read("list", directory, |bucket| bucket.list_tree(directory))
            .await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.read("delete", key, |bucket| bucket.delete(key)).await
    }

    fn has_atomic_create(&self) -> Option<bool> {
        None
    }

    fn address(&self) -> String {
        "sim://bucket".to_owned()
    }
}

/// The bucket at one moment, without faults, as a restore on a new machine reads it.
pub struct Plain(pub Arc<Bucket>);

#[async_trait]
impl Store for Plain {
    async fn create(&self, key: &str, body: Bytes) -> Result<CreateOutcome> {
        Ok(self.0.write(key, &body, 0, Timestamp::UNIX_EPOCH, true))
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        self.0.write(key, &body, 0, Timestamp::UNIX_EPOCH, false);
        Ok(())
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        Ok(self
            .0
            .inner()
            .objects
            .get(key)
            .map(|stored| stored.bytes.clone()))
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage> {
        Ok(self.0.list(prefix, after))
    }

    async fn list_tree(&self, directory: &str) -> Result<ListPage> {
        Ok(self.0.list_tree(directory))
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.0.delete(key);
        Ok(())
    }

    fn has_atomic_create(&self) -> Option<bool> {
        Some(true)
    }

    fn address(&self) -> String {
        "sim://bucket".to_owned()
    }
}
