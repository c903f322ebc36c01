//! A small world for capture: an agent's directory, a bucket in a directory, and decorators that count, fail and hang.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use sessiond::agent::Profile;
use sessiond::agent::claude_code::ClaudeCode;
use sessiond::capture::watch::{EventBuffer, InotifyWatcher, NullWatcher, Watcher};
use sessiond::capture::{self, Feed, Streamer, StreamerHandle};
use sessiond::error::{Error, Result};
use sessiond::index::Index;
use sessiond::index::sql::SqlIndex;
use sessiond::log::fence::FencingPolicy;
use sessiond::log::{Fencing, Logs};
use sessiond::model::{FileStat, LogId, LogPoint, RelPath, Seq, WriterId};
use sessiond::restore;
use sessiond::store::file::FileStore;
use sessiond::store::{Created, Page, Store};
use sessiond::sys::{Directory, Disk, Item, Meta, OpenFile, Owner, SystemClock, SystemRng};
use tokio::sync::watch;

/// Files by path below the root.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A bucket and a directory of an agent.
pub struct World {
    temp: tempfile::TempDir,
    pub store: Arc<FaultyStore>,
    index: Arc<dyn Index>,
    pub profile: Arc<dyn Profile>,
    pub feed: Arc<Feed>,
}

impl World {
    pub fn new() -> World {
        World::at(&std::env::temp_dir())
    }

    /// The same in memory, where the machine has such a directory: thousands of flushes need no disk.
    pub fn in_memory() -> World {
        let memory = Path::new("/dev/shm");
        if memory.is_dir() {
            World::at(memory)
        } else {
            World::new()
        }
    }

    fn at(place: &Path) -> World {
        let temp = tempfile::Builder::new()
            .prefix("sessiond-it-")
            .tempdir_in(place)
            .unwrap();
        std::fs::create_dir(temp.path().join("root")).unwrap();
        let store = Arc::new(FaultyStore::new(Arc::new(
            FileStore::open(temp.path().join("bucket")).unwrap(),
        )));
        let index = SqlIndex::open(&format!(
            "sqlite://{}",
            temp.path().join("index.db").display()
        ))
        .unwrap();
        World {
            temp,
            store,
            index: Arc::new(index),
            profile: Arc::new(ClaudeCode::new("claude-code".parse().unwrap())),
            feed: Arc::new(Feed::default()),
        }
    }

    /// The agent's directory.
    pub fn root(&self) -> PathBuf {
        self.temp.path().join("root")
    }

    /// Another agent's directory, or a place for anything else.
    pub fn directory(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    pub fn logs(&self) -> Logs {
        Logs {
            store: self.store.clone(),
            fence: Arc::new(Fencing::new(FencingPolicy::Auto, self.index.clone(), false)),
            namespace: "test".parse().unwrap(),
            agent: self.profile.name().clone(),
            clock: Arc::new(SystemClock),
            rng: Arc::new(SystemRng),
            recent: Arc::default(),
            progress: Arc::default(),
        }
    }

    pub fn id(&self, name: &str) -> LogId {
        self.logs().id(name.parse().unwrap())
    }

    pub fn context(&self) -> capture::Context {
        self.context_of(Arc::new(Disk::new(self.root())))
    }

    pub fn context_of(&self, directory: Arc<dyn Directory>) -> capture::Context {
        capture::Context {
            directory,
            profile: self.profile.clone(),
            logs: self.logs(),
            feed: self.feed.clone(),
            flush_interval: Duration::from_millis(200),
            parallel: 8,
        }
    }

    /// Streams the agent's directory as the daemon does.
    pub fn stream(&self) -> StreamerHandle {
        self.stream_at(self.root(), self.context())
    }

    pub fn stream_at(&self, root: PathBuf, context: capture::Context) -> StreamerHandle {
        let hints = Arc::new(EventBuffer::default());
        let watch = InotifyWatcher::new(
            root.clone(),
            context.directory.clone(),
            self.profile.clone(),
            hints.clone(),
        );
        Streamer::start(context, root, hints, Box::new(watch)).unwrap()
    }

    /// Streams without any event of the file system.
    pub fn stream_unwatched(&self) -> StreamerHandle {
        let watch: Box<dyn Watcher> = Box::new(NullWatcher);
        Streamer::start(
            self.context(),
            self.root(),
            Arc::new(EventBuffer::default()),
            watch,
        )
        .unwrap()
    }

    /// Streams with the events that the test makes itself.
    pub fn stream_told(&self, hints: Arc<EventBuffer>) -> StreamerHandle {
        struct Told;
        impl Watcher for Told {
            fn refresh(&mut self) -> Option<String> {
                None
            }
        }
        Streamer::start(self.context(), self.root(), hints, Box::new(Told)).unwrap()
    }

    pub fn write(&self, path: &str, bytes: impl AsRef<[u8]>) {
        write(&self.root().join(path), bytes);
    }

    pub fn append(&self, path: &str, bytes: impl AsRef<[u8]>) {
        append(&self.root().join(path), bytes);
    }

    /// What a restore of a log brings back; none if the bucket does not have it.
    pub async fn stored(&self, name: &str) -> Option<Files> {
        self.stored_on(name, None).await
    }

    pub async fn stored_on(&self, name: &str, branch: Option<WriterId>) -> Option<Files> {
        self.stored_as(
            name,
            restore::Options {
                branch,
                ..restore::Options::default()
            },
        )
        .await
    }

    /// What a restore of an earlier point brings back.
    pub async fn stored_at(&self, name: &str, seq: Seq) -> Files {
        self.stored_as(
            name,
            restore::Options {
                at: LogPoint::Seq(seq),
                ..restore::Options::default()
            },
        )
        .await
        .unwrap()
    }

    async fn stored_as(&self, name: &str, options: restore::Options) -> Option<Files> {
        let target = tempfile::tempdir_in(self.temp.path()).unwrap();
        let context = restore::Context {
            directory: Arc::new(Disk::new(target.path())),
            profile: self.profile.clone(),
            logs: self.logs(),
        };
        match restore::restore(&context, &self.id(name), &options).await {
            Ok(_) => Some(files_below(target.path())),
            Err(error) if error.kind() == sessiond::error::ErrorKind::NotFound => None,
            Err(error) => panic!("{name} cannot be restored: {error}"),
        }
    }

    /// The stored bytes of one file; none if the bucket does not have it.
    pub async fn stored_file(&self, name: &str, path: &str) -> Option<Vec<u8>> {
        self.stored(name).await?.remove(path)
    }

    /// Waits until the bucket has these bytes of a file, without asking for a flush.
    pub async fn wait_for(&self, name: &str, path: &str, bytes: &[u8], within: Duration) {
        let deadline = tokio::time::Instant::now() + within;
        loop {
            let stored = self.stored_file(name, path).await;
            if stored.as_deref() == Some(bytes) {
                return;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "{path} of {name} is not stored after {within:?}: {:?}",
                stored.map(|b| b.len())
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The numbers of a log's entries, which must have no gap.
    pub async fn numbers(&self, name: &str) -> usize {
        let entries = self.logs().entries(&self.id(name), 0).await.unwrap();
        let numbers: Vec<u64> = entries.iter().map(|entry| entry.seq).collect();
        assert_eq!(
            numbers,
            (1..=numbers.len() as u64).collect::<Vec<_>>(),
            "the numbers of {name} have a gap"
        );
        numbers.len()
    }

    /// Bytes of a log's entries before compression: what was uploaded of its files.
    pub async fn uploaded(&self, name: &str) -> u64 {
        let (logs, id) = (self.logs(), self.id(name));
        let mut bytes = 0;
        for entry in logs.entries(&id, 0).await.unwrap() {
            bytes += logs
                .read(&id, entry.seq)
                .await
                .unwrap()
                .unwrap()
                .header
                .body_len();
        }
        bytes
    }

    pub async fn branches(&self, name: &str) -> Vec<WriterId> {
        self.logs().branches(&self.id(name)).await.unwrap()
    }

    /// What a volume looks like that was lost in part: the agent's files are there, the right to write is not.
    pub fn lose_ledgers(&self) {
        let _ = std::fs::remove_dir_all(self.root().join(".sessiond"));
    }
}

pub fn write(path: &Path, bytes: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

pub fn append(path: &Path, bytes: impl AsRef<[u8]>) {
    use std::io::Write;
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .unwrap()
        .write_all(bytes.as_ref())
        .unwrap();
}

/// Every regular file below a directory, without our own state.
pub fn files_below(root: &Path) -> Files {
    let mut files = Files::new();
    let mut open = vec![root.to_owned()];
    while let Some(directory) = open.pop() {
        for item in std::fs::read_dir(&directory)
            .unwrap()
            .map(|item| item.unwrap())
        {
            let kind = item.file_type().unwrap();
            if kind.is_dir() && item.file_name() != ".sessiond" {
                open.push(item.path());
            } else if kind.is_file() {
                let name = item
                    .path()
                    .strip_prefix(root)
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_owned();
                files.insert(name, std::fs::read(item.path()).unwrap());
            }
        }
    }
    files
}

type Refuse = Box<dyn Fn(&str) -> bool + Send + Sync>;

/// A store that counts its requests, and fails or hangs as it is told.
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    requests: AtomicU64,
    writes: AtomicU64,
    uploaded: AtomicU64,
    refuse: Mutex<Option<Refuse>>,
    /// Writes wait while this is true.
    hold: watch::Sender<bool>,
    /// Writes arrive, and nobody hears of it.
    mute: AtomicBool,
    /// What a round trip takes.
    distance: Mutex<Duration>,
}

impl FaultyStore {
    fn new(inner: Arc<dyn Store>) -> Self {
        FaultyStore {
            inner,
            requests: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            uploaded: AtomicU64::new(0),
            refuse: Mutex::default(),
            hold: watch::Sender::new(false),
            mute: AtomicBool::new(false),
            distance: Mutex::default(),
        }
    }

    /// All requests so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }

    /// Writes so far, also those that failed.
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }

    /// Bytes of all writes so far.
    pub fn uploaded(&self) -> u64 {
        self.uploaded.load(Ordering::SeqCst)
    }

    /// Requests for keys that hold this text fail from now on.
    pub fn refuse(&self, text: &str) {
        let text = text.to_owned();
        *self.refuse.lock().unwrap() = Some(Box::new(move |key| key.contains(&text)));
    }

    /// Writes arrive from now on, and their answers are lost.
    pub fn mute(&self) {
        self.mute.store(true, Ordering::SeqCst);
    }

    pub fn recover(&self) {
        *self.refuse.lock().unwrap() = None;
        self.mute.store(false, Ordering::SeqCst);
    }

    /// Writes hang from now on, until `release`.
    pub fn hold(&self) {
        self.hold.send_replace(true);
    }

    pub fn release(&self) {
        self.hold.send_replace(false);
    }

    /// Each request takes this long from now on.
    pub fn be_far(&self, distance: Duration) {
        *self.distance.lock().unwrap() = distance;
    }

    async fn admit(&self, key: &str, writes: bool) -> Result<()> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let distance = *self.distance.lock().unwrap();
        if !distance.is_zero() {
            tokio::time::sleep(distance).await;
        }
        if writes {
            self.writes.fetch_add(1, Ordering::SeqCst);
            let _ = self.hold.subscribe().wait_for(|hold| !hold).await;
        }
        if self
            .refuse
            .lock()
            .unwrap()
            .as_ref()
            .is_some_and(|refuse| refuse(key))
        {
            return Err(Error::unavailable(format!(
                "ask for {key}: the test says no"
            )));
        }
        Ok(())
    }
}

#[async_trait]
impl Store for FaultyStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created> {
        self.admit(key, true).await?;
        self.uploaded.fetch_add(body.len() as u64, Ordering::SeqCst);
        let created = self.inner.create(key, body).await;
        let lost = self.mute.load(Ordering::SeqCst);
        if lost {
            Err(Error::unavailable(format!(
                "create {key}: the answer was lost"
            )))
        } else {
            created
        }
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        self.admit(key, true).await?;
        self.uploaded.fetch_add(body.len() as u64, Ordering::SeqCst);
        self.inner.put(key, body).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        self.admit(key, false).await?;
        self.inner.get(key).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        self.admit(prefix, false).await?;
        self.inner.list(prefix, after).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.admit(key, true).await?;
        self.inner.delete(key).await
    }

    fn fences_by_itself(&self) -> Option<bool> {
        self.inner.fences_by_itself()
    }

    fn address(&self) -> String {
        self.inner.address()
    }
}

/// A directory that counts the bytes read from the agent's files, refuses to open one of them, and hangs as it is told.
pub struct CountingDirectory {
    inner: Disk,
    read: Arc<AtomicU64>,
    closed: Mutex<Option<String>>,
    /// Who lists waits while somebody else has it.
    gate: Mutex<()>,
}

impl CountingDirectory {
    pub fn new(root: PathBuf) -> Self {
        CountingDirectory {
            inner: Disk::new(root),
            read: Arc::default(),
            closed: Mutex::default(),
            gate: Mutex::default(),
        }
    }

    /// Listing hangs until this is dropped.
    pub fn hang(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap()
    }

    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::SeqCst)
    }

    /// Files whose path holds this text cannot be opened any more; none opens all again.
    pub fn close(&self, text: Option<&str>) {
        *self.closed.lock().unwrap() = text.map(str::to_owned);
    }
}

struct CountingFile {
    inner: Box<dyn OpenFile>,
    read: Arc<AtomicU64>,
}

impl OpenFile for CountingFile {
    fn stat(&self) -> io::Result<FileStat> {
        self.inner.stat()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let got = self.inner.read_at(buffer, offset)?;
        self.read.fetch_add(got as u64, Ordering::SeqCst);
        Ok(got)
    }
}

impl Directory for CountingDirectory {
    fn list(&self, directory: Option<&RelPath>) -> io::Result<Vec<Item>> {
        let _gate = self.gate.lock().unwrap();
        self.inner.list(directory)
    }

    fn stat(&self, path: &RelPath) -> io::Result<Option<FileStat>> {
        self.inner.stat(path)
    }

    fn open(&self, path: &RelPath) -> io::Result<Option<Box<dyn OpenFile>>> {
        if self
            .closed
            .lock()
            .unwrap()
            .as_ref()
            .is_some_and(|text| path.as_str().contains(text))
        {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let file = self.inner.open(path)?;
        Ok(file.map(|inner| {
            Box::new(CountingFile {
                inner,
                read: self.read.clone(),
            }) as Box<dyn OpenFile>
        }))
    }

    fn read(&self, path: &RelPath) -> io::Result<Option<Vec<u8>>> {
        self.inner.read(path)
    }

    fn replace(&self, path: &RelPath, bytes: &[u8], durable: bool) -> io::Result<()> {
        self.inner.replace(path, bytes, durable)
    }

    fn write_at(&self, path: &RelPath, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.inner.write_at(path, offset, bytes)
    }

    fn finish(&self, path: &RelPath, meta: &Meta) -> io::Result<()> {
        self.inner.finish(path, meta)
    }

    fn rename(&self, from: &RelPath, to: &RelPath, owner: Option<Owner>) -> io::Result<()> {
        self.inner.rename(from, to, owner)
    }

    fn remove(&self, path: &RelPath) -> io::Result<()> {
        self.inner.remove(path)
    }
}
