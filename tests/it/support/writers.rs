//! Writers without a process: each has a root of its own and flushes when told; they share a store and an index. Owns the
//! places they meet in and what a store can be made to do to them.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use sessiond::agent::Profile;
use sessiond::agent::claude_code::ClaudeCode;
use sessiond::capture::feed::News;
use sessiond::capture::flush::LogFlusher;
use sessiond::capture::scan::survey;
use sessiond::capture::{self, Feed};
use sessiond::codec::entry::Entry;
use sessiond::error::{Error, Result};
use sessiond::index::sql::SqlIndex;
use sessiond::index::{EntryRow, Index, RecordOutcome, SessionRow};
use sessiond::log::fence::FencingPolicy;
use sessiond::log::ledger::Ledger;
use sessiond::log::{Fencing, Logs};
use sessiond::model::{LogId, LogName, LogPoint, PathState, WriterId};
use sessiond::restore::{self, Options, RestoreReport};
use sessiond::store::file::FileStore;
use sessiond::store::s3::{Credentials, S3Settings, S3Store};
use sessiond::store::{Created, Page, Store};
use sessiond::sys::{Disk, SystemClock, SystemRng};
use sessiond::upkeep::reindex::{catch_up, rebuild};

use super::proxy::CountingProxy;
use super::servers::{S3, postgres, s3};

/// The session that most tests are about.
pub const SESSION: &str = "s1";
/// Its transcript.
pub const TRANSCRIPT: &str = "projects/-w/s1.jsonl";

/// All rows of one log.
pub type Rows = (LogId, Option<SessionRow>, Vec<PathState>, Vec<EntryRow>);
/// A file's path and bytes.
pub type Files = BTreeMap<String, Vec<u8>>;

/// Somewhere writers meet: a store and an index.
pub struct Place {
    pub name: &'static str,
    /// What keeps writers apart here.
    pub fence: &'static str,
    pub store: Arc<dyn Store>,
    pub index: Arc<dyn Index>,
    pub index_is_shared: bool,
    /// What must live as long as the place.
    pub keep: Vec<Box<dyn Any + Send + Sync>>,
}

/// A prefix of its own in the bucket that all these share: a new bucket costs the server a second.
pub fn s3_settings(server: &S3, endpoint: String) -> S3Settings {
    static BUCKET: OnceLock<String> = OnceLock::new();
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    S3Settings {
        prefix: format!("p{}", NEXT.fetch_add(1, SeqCst)),
        endpoint: Some(endpoint),
        region: Some("us-east-1".to_owned()),
        credentials: Some(Credentials {
            access_key: server.access_key.clone(),
            secret_key: server.secret_key.clone(),
        }),
        timeout: Duration::from_secs(10),
        ..S3Settings::new(BUCKET.get_or_init(|| server.fresh_bucket()))
    }
}

impl Place {
    /// A directory and an SQLite file.
    pub fn files() -> Place {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(FileStore::open(directory.path().join("store")).unwrap());
        let index = Arc::new(
            SqlIndex::open(&format!("sqlite://{}/index.db", directory.path().display())).unwrap(),
        );
        Place {
            name: "files",
            fence: "store",
            store,
            index,
            index_is_shared: false,
            keep: vec![Box::new(directory)],
        }
    }

    /// A bucket that honours conditions, and an SQLite file.
    pub async fn bucket() -> Option<Place> {
        let server = s3()?;
        let settings = s3_settings(server, server.endpoint.clone());
        let store = Arc::new(S3Store::connect(settings).await.unwrap());
        Some(Place {
            name: "bucket",
            store,
            ..Place::files()
        })
    }

    /// A bucket that ignores conditions, and PostgreSQL.
    pub async fn lax_bucket() -> Option<Place> {
        let (server, database) = (s3()?, postgres()?);
        let proxy = CountingProxy::start(server.addr(), true);
        let settings = s3_settings(server, proxy.endpoint());
        let store = Arc::new(S3Store::connect(settings).await.unwrap());
        let index = Arc::new(SqlIndex::open(&database.fresh_database()).unwrap());
        Some(Place {
            name: "lax bucket",
            fence: "database",
            store,
            index,
            index_is_shared: true,
            keep: vec![Box::new(proxy)],
        })
    }

    /// Every kind there is on this machine.
    pub async fn all() -> Vec<Place> {
        let mut all = vec![Place::files()];
        all.extend(Place::bucket().await);
        all.extend(Place::lax_bucket().await);
        all
    }

    /// The same place with something between the writers and the store.
    pub fn through<S: Store>(self, between: impl FnOnce(Arc<dyn Store>) -> S) -> (Place, Arc<S>) {
        let store = Arc::new(between(self.store.clone()));
        (
            Place {
                store: store.clone(),
                ..self
            },
            store,
        )
    }

    /// Logs as a new process would see them.
    pub fn logs(&self) -> Logs {
        self.logs_fenced(FencingPolicy::Auto)
    }

    pub fn logs_fenced(&self, wanted: FencingPolicy) -> Logs {
        Logs {
            store: self.store.clone(),
            fence: Arc::new(Fencing::new(
                wanted,
                self.index.clone(),
                self.index_is_shared,
            )),
            namespace: "team".parse().unwrap(),
            agent: ClaudeCode::NAME.parse().unwrap(),
            clock: Arc::new(SystemClock),
            rng: Arc::new(SystemRng),
            recent: Arc::default(),
            progress: Arc::default(),
        }
    }

    pub fn id(&self, session: &str) -> LogId {
        self.logs().id(session.parse().unwrap())
    }

    /// The entries of a session's log, as they are in the bucket.
    pub async fn entries(&self, session: &str) -> Vec<Entry> {
        let (logs, id) = (self.logs(), self.id(session));
        let mut all = Vec::new();
        for found in logs.entries(&id, 0).await.unwrap() {
            all.push(logs.read(&id, found.seq).await.unwrap().unwrap());
        }
        all
    }

    /// The writers that have a branch.
    pub async fn branches(&self, session: &str) -> Vec<WriterId> {
        self.logs().branches(&self.id(session)).await.unwrap()
    }

    /// What a restore into an empty directory gives.
    pub async fn files_at(
        &self,
        session: &str,
        at: LogPoint,
        branch: Option<WriterId>,
    ) -> Result<Files> {
        let directory = tempfile::tempdir().unwrap();
        let context = restore::Context {
            directory: Arc::new(Disk::new(directory.path())),
            profile: profile(),
            logs: self.logs(),
        };
        restore::restore(
            &context,
            &self.id(session),
            &Options {
                at,
                branch,
                ..Options::default()
            },
        )
        .await?;
        Ok(files_in(directory.path()))
    }

    pub async fn files_of(&self, session: &str) -> Files {
        self.files_at(session, LogPoint::Latest, None)
            .await
            .unwrap()
    }

    pub async fn files_of_branch(&self, session: &str, writer: &WriterId) -> Files {
        self.files_at(session, LogPoint::Latest, Some(writer.clone()))
            .await
            .unwrap()
    }

    /// All rows of all logs.
    pub async fn rows(&self) -> Vec<Rows> {
        rows(&self.logs(), &*self.index).await
    }

    pub async fn reindex(&self) {
        let rebuilt = rebuild(&self.logs(), &*self.index, &*profile(), |_, _| {})
            .await
            .unwrap();
        assert_eq!(rebuilt.failed, 0);
    }
}

/// Fails with the first row that differs.
pub fn assert_same_rows(one: &[Rows], two: &[Rows], what: &str) {
    for (one, two) in one.iter().zip(two) {
        assert_eq!(one.1, two.1, "{what}");
        assert_eq!(one.2, two.2, "{what}");
        assert_eq!(one.3, two.3, "{what}");
    }
    let ids = |rows: &[Rows]| rows.iter().map(|rows| rows.0.clone()).collect::<Vec<_>>();
    assert_eq!(ids(one), ids(two), "{what}");
}

/// All rows of all logs of an agent.
pub async fn rows(logs: &Logs, index: &dyn Index) -> Vec<Rows> {
    let mut all = Vec::new();
    let mut known = index.logs(&logs.namespace, &logs.agent).await.unwrap();
    known.sort();
    for id in known {
        let mut entries = index.entries(&id).await.unwrap();
        entries.sort_by_key(|row| (row.branch.clone(), row.seq));
        all.push((
            id.clone(),
            index.session(&id).await.unwrap(),
            index.files(&id).await.unwrap(),
            entries,
        ));
    }
    all
}

pub fn profile() -> Arc<dyn Profile> {
    Arc::new(ClaudeCode::new(ClaudeCode::NAME.parse().unwrap()))
}

/// The files below a root, without ours.
pub fn files_in(root: &Path) -> Files {
    let mut files = Files::new();
    let mut open = vec![root.to_owned()];
    while let Some(directory) = open.pop() {
        let Ok(names) = std::fs::read_dir(&directory) else {
            continue;
        };
        for name in names.flatten() {
            let path = name.path();
            if name.file_name() == ".sessiond" {
                continue;
            }
            if name.file_type().unwrap().is_dir() {
                open.push(path);
            } else {
                files.insert(
                    path.strip_prefix(root)
                        .unwrap()
                        .to_str()
                        .unwrap()
                        .to_owned(),
                    std::fs::read(&path).unwrap(),
                );
            }
        }
    }
    files
}

/// Copies a directory and all in it.
pub fn copy_dir(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp")
        .arg("-a")
        .arg(from)
        .arg(to)
        .status()
        .unwrap();
    assert!(status.success());
}

/// One volume and the sessiond on it.
pub struct Writer {
    pub root: PathBuf,
    context: capture::Context,
    index: Arc<dyn Index>,
    shipments: BTreeMap<LogName, LogFlusher>,
    _folder: tempfile::TempDir,
}

impl Writer {
    pub fn new(place: &Place) -> Writer {
        Writer::with(place, place.logs())
    }

    pub fn with(place: &Place, logs: Logs) -> Writer {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let context = capture::Context {
            directory: Arc::new(Disk::new(&root)),
            profile: profile(),
            logs,
            feed: Arc::new(Feed::default()),
            flush_interval: Duration::from_millis(10),
            parallel: 4,
        };
        Writer {
            root,
            context,
            index: place.index.clone(),
            shipments: BTreeMap::new(),
            _folder: directory,
        }
    }

    /// Another machine with a copy of this one's volume.
    pub fn copied(&self, place: &Place) -> Writer {
        let copy = Writer::new(place);
        std::fs::remove_dir(&copy.root).unwrap();
        copy_dir(&self.root, &copy.root);
        copy
    }

    pub fn logs(&self) -> &Logs {
        &self.context.logs
    }

    pub fn append(&self, path: &str, text: &str) {
        use std::io::Write as _;
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut file = std::fs::File::options()
            .create(true)
            .append(true)
            .open(path)
            .unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    /// Writes another file and gives it the name, as programs do.
    pub fn replace(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let beside = path.with_extension("tmp");
        std::fs::write(&beside, text).unwrap();
        std::fs::rename(beside, path).unwrap();
    }

    pub fn files(&self) -> Files {
        files_in(&self.root)
    }

    /// Flushes every log once; answers bytes and entries made durable.
    pub async fn flush(&mut self) -> Result<(u64, u32)> {
        let found = survey(&*self.context.directory, &*self.context.profile, None)?;
        let mut done = (0, 0);
        for (name, files) in found.logs {
            let id = self.context.logs.id(name.clone());
            let shipment = self
                .shipments
                .entry(name)
                .or_insert_with(|| LogFlusher::new(id));
            shipment
                .hints
                .extend(files.into_iter().map(|file| file.path));
            let shipped = shipment.flush(&self.context, false).await?;
            done = (done.0 + shipped.bytes, done.1 + shipped.entries);
        }
        Ok(done)
    }

    /// The process ends and another starts on the same volume.
    pub fn restart(&mut self) {
        self.shipments.clear();
    }

    pub async fn restore(&mut self, session: &str, options: Options) -> Result<RestoreReport> {
        self.restart();
        let context = restore::Context {
            directory: self.context.directory.clone(),
            profile: self.context.profile.clone(),
            logs: self.context.logs.clone(),
        };
        let id = self.context.logs.id(session.parse()?);
        let report = restore::restore(&context, &id, &options).await?;
        self.context.feed.stale(id.name);
        Ok(report)
    }

    /// Restores the head and takes the session over.
    pub async fn take_over(&mut self, session: &str) -> Result<RestoreReport> {
        self.restore(
            session,
            Options {
                claim: true,
                ..Options::default()
            },
        )
        .await
    }

    pub fn ledger(&self, session: &str) -> Option<Ledger> {
        let id = self.context.logs.id(session.parse().unwrap());
        Ledger::load(
            &*self.context.directory,
            &self.context.logs.store.address(),
            &id,
        )
    }

    /// `main`, `branch`, `unclaimed`, or nothing if there is no ledger.
    pub fn target(&self, session: &str) -> String {
        self.ledger(session)
            .map(|ledger| format!("{:?}", ledger.log_writer.target).to_lowercase())
            .unwrap_or_default()
    }

    /// Tells the index all that there is to tell, as the daemon does.
    pub async fn tell_index(&self) {
        while let Some(news) = self.context.feed.try_next() {
            let log = match news {
                News::Entry(record) => match self.index.record(&record).await.unwrap() {
                    RecordOutcome::Gap { .. } => record.log,
                    _ => continue,
                },
                News::Stale(name) => self.context.logs.id(name),
                News::Failed(failure) => {
                    self.index.note_failure(&failure).await.unwrap();
                    continue;
                }
            };
            catch_up(
                &self.context.logs,
                &*self.index,
                &*self.context.profile,
                &log,
            )
            .await
            .unwrap();
        }
    }
}

/// Each writer's entries in a log stand together: once another has written, it never writes again.
pub fn assert_not_interleaved(entries: &[Entry], what: &str) {
    let mut gone = BTreeSet::new();
    for pair in entries.windows(2) {
        if pair[0].header.writer != pair[1].header.writer {
            gone.insert(pair[0].header.writer.clone());
        }
        assert!(
            !gone.contains(&pair[1].header.writer),
            "{what}: entry {} is by a writer that had lost",
            pair[1].header.seq
        );
    }
}

/// What a store in between does to each request that changes something.
type Meddle = Arc<dyn Fn(&str) -> VerifyReport + Send + Sync>;

/// What becomes of a request.
pub enum VerifyReport {
    Pass,
    /// Done, and the answer lost.
    LoseReply,
    /// Not done.
    Fail,
}

/// A store that counts requests, and lets a test meddle with writes.
pub struct Meddled {
    inner: Arc<dyn Store>,
    meddle: Mutex<Option<Meddle>>,
    pub reads: AtomicUsize,
    pub writes: AtomicUsize,
    pub lists: AtomicUsize,
}

impl Meddled {
    pub fn new(inner: Arc<dyn Store>) -> Meddled {
        let zero = || AtomicUsize::new(0);
        Meddled {
            inner,
            meddle: Mutex::new(None),
            reads: zero(),
            writes: zero(),
            lists: zero(),
        }
    }

    pub fn meddle(&self, meddle: impl Fn(&str) -> VerifyReport + Send + Sync + 'static) {
        *self.meddle.lock().unwrap() = Some(Arc::new(meddle));
    }

    pub fn leave_alone(&self) {
        *self.meddle.lock().unwrap() = None;
    }

    fn verdict(&self, key: &str) -> VerifyReport {
        self.writes.fetch_add(1, SeqCst);
        // Not under the lock: it may itself write.
        let meddle = self.meddle.lock().unwrap().clone();
        meddle.map_or(VerifyReport::Pass, |meddle| meddle(key))
    }

    async fn write<T: Send>(
        &self,
        key: &str,
        write: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        match self.verdict(key) {
            VerifyReport::Pass => write.await,
            VerifyReport::LoseReply => write.await.and_then(|_| {
                Err(Error::unavailable(format!(
                    "write {key}: the answer is lost"
                )))
            }),
            VerifyReport::Fail => Err(Error::unavailable(format!("write {key}: refused"))),
        }
    }
}

#[async_trait]
impl Store for Meddled {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created> {
        self.write(key, self.inner.create(key, body)).await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        self.write(key, self.inner.put(key, body)).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        self.reads.fetch_add(1, SeqCst);
        self.inner.get(key).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        self.lists.fetch_add(1, SeqCst);
        self.inner.list(prefix, after).await
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

/// Dice that fall the same way again.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}
