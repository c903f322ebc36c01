//! The storage of in-process tests: a store and an index, and the checks of their content.

use std::any::Any;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sessiond::agent::Profile;
use sessiond::agent::claude_code::ClaudeCode;
use sessiond::codec::entry::Entry;
use sessiond::error::Result;
use sessiond::index::sql::SqlIndex;
use sessiond::index::{EntryRow, Index, SessionRow};
use sessiond::log::fence::FencingPolicy;
use sessiond::log::{Fencing, Logs};
use sessiond::model::{LogId, LogPoint, PathState, ResolvedPoint, WriterId};
use sessiond::restore::{self, Options};
use sessiond::store::Store;
use sessiond::store::encrypted::EncryptedStore;
use sessiond::store::file::FileStore;
use sessiond::store::s3::{Credentials, S3Settings, S3Store};
use sessiond::sys::{Disk, SystemClock, SystemRng};
use sessiond::upkeep::reindex::rebuild;

use super::files::{Files, files_below};
use super::proxy::CountingProxy;
use super::servers::{S3, postgres, s3};

/// The session that most tests use.
pub const SESSION: &str = "s1";
/// Its transcript.
pub const TRANSCRIPT: &str = "projects/-w/s1.jsonl";

/// All rows of one log.
pub type Rows = (LogId, Option<SessionRow>, Vec<PathState>, Vec<EntryRow>);

/// A store and an index that writers share.
pub struct Storage {
    pub name: &'static str,
    /// What fences writers here: `store` or `database`.
    pub fence: &'static str,
    pub store: Arc<dyn Store>,
    pub index: Arc<SqlIndex>,
    pub index_is_shared: bool,
    /// Values that must live as long as the storage.
    pub guards: Vec<Box<dyn Any + Send + Sync>>,
}

/// Returns the settings for a new prefix in one shared bucket, because creating a bucket takes a
/// second.
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

/// The profile of all in-process tests.
pub fn profile() -> Arc<dyn Profile> {
    Arc::new(ClaudeCode::new(ClaudeCode::NAME.parse().unwrap()))
}

impl Storage {
    /// A directory and an SQLite file.
    pub fn files() -> Storage {
        let directory = tempfile::tempdir().unwrap();
        let storage = Storage::files_in(directory.path());
        Storage {
            guards: vec![Box::new(directory)],
            ..storage
        }
    }

    /// The directory `bucket` and the SQLite file `index.db` in a directory of the caller.
    pub fn files_in(directory: &Path) -> Storage {
        let index = format!("sqlite://{}", directory.join("index.db").display());
        Storage {
            name: "files",
            fence: "store",
            store: Arc::new(FileStore::open(directory.join("bucket")).unwrap()),
            index: Arc::new(SqlIndex::open(&index).unwrap()),
            index_is_shared: false,
            guards: Vec::new(),
        }
    }

    /// A bucket that honors conditional creates, and an SQLite file.
    pub async fn bucket() -> Option<Storage> {
        let server = s3()?;
        let settings = s3_settings(server, server.endpoint.clone());
        Some(Storage {
            name: "bucket",
            store: Arc::new(S3Store::connect(settings).await.unwrap()),
            ..Storage::files()
        })
    }

    /// A bucket that ignores conditional creates, and PostgreSQL.
    pub async fn lax_bucket() -> Option<Storage> {
        let (server, database) = (s3()?, postgres()?);
        let proxy = CountingProxy::start(server.addr(), true);
        let settings = s3_settings(server, proxy.endpoint());
        Some(Storage {
            name: "lax bucket",
            fence: "database",
            store: Arc::new(S3Store::connect(settings).await.unwrap()),
            index: Arc::new(SqlIndex::open(&database.fresh_database()).unwrap()),
            index_is_shared: true,
            guards: vec![Box::new(proxy)],
        })
    }

    /// Puts a decorator between the writers and the store.
    pub fn decorate<S: Store>(
        self,
        decorator: impl FnOnce(Arc<dyn Store>) -> S,
    ) -> (Storage, Arc<S>) {
        let store = Arc::new(decorator(self.store.clone()));
        let storage = Storage {
            store: store.clone(),
            ..self
        };
        (storage, store)
    }

    /// Returns the logs as a new process sees them.
    pub fn logs(&self) -> Logs {
        self.logs_with_fencing(FencingPolicy::Auto)
    }

    pub fn logs_with_fencing(&self, policy: FencingPolicy) -> Logs {
        Logs {
            store: Arc::new(EncryptedStore::without_keys(self.store.clone())),
            fence: Arc::new(Fencing::new(
                policy,
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

    /// Reads the entries of a log from the store.
    pub async fn entries(&self, session: &str) -> Vec<Entry> {
        let (logs, id) = (self.logs(), self.id(session));
        let mut entries = Vec::new();
        for listed in logs.list_entries(&id, 0).await.unwrap() {
            entries.push(logs.read_entry(&id, listed.seq).await.unwrap().unwrap());
        }
        entries
    }

    /// Returns the writers that have a branch.
    pub async fn branches(&self, session: &str) -> Vec<WriterId> {
        self.logs().list_branches(&self.id(session)).await.unwrap()
    }

    /// Restores a log into an empty directory and returns the files.
    pub async fn files_at(
        &self,
        session: &str,
        at: LogPoint,
        branch: Option<WriterId>,
    ) -> Result<Files> {
        let directory = tempfile::tempdir().unwrap();
        let context = restore::RestoreContext {
            directory: Arc::new(Disk::new(directory.path())),
            profile: profile(),
            logs: self.logs(),
        };
        let options = Options {
            point: ResolvedPoint {
                at,
                branch,
                ..ResolvedPoint::default()
            },
            ..Options::default()
        };
        restore::restore(&context, &self.id(session), &options).await?;
        Ok(files_below(directory.path()))
    }

    /// Returns the files at the head of a log.
    pub async fn files_of(&self, session: &str) -> Files {
        self.files_at(session, LogPoint::Latest, None)
            .await
            .unwrap()
    }

    /// Returns the files at the head of a branch.
    pub async fn files_of_branch(&self, session: &str, writer: &WriterId) -> Files {
        self.files_at(session, LogPoint::Latest, Some(writer.clone()))
            .await
            .unwrap()
    }

    /// Returns all index rows of all logs.
    pub async fn rows(&self) -> Vec<Rows> {
        rows(&self.logs(), &*self.index).await
    }

    /// Rebuilds the index from the store.
    pub async fn reindex(&self) {
        let rebuilt = rebuild(&self.logs(), &*self.index, &*profile(), |_, _| {})
            .await
            .unwrap();
        assert_eq!(rebuilt.failed, 0);
    }
}

/// Fails with the first row that differs.
pub fn assert_same_rows(left: &[Rows], right: &[Rows], what: &str) {
    for (left, right) in left.iter().zip(right) {
        assert_eq!(left.1, right.1, "{what}");
        assert_eq!(left.2, right.2, "{what}");
        assert_eq!(left.3, right.3, "{what}");
    }
    let ids = |rows: &[Rows]| rows.iter().map(|rows| rows.0.clone()).collect::<Vec<_>>();
    assert_eq!(ids(left), ids(right), "{what}");
}

/// Returns all index rows of all logs of an agent.
pub async fn rows(logs: &Logs, index: &dyn Index) -> Vec<Rows> {
    let mut all = Vec::new();
    let mut ids = index.logs(&logs.namespace, &logs.agent).await.unwrap();
    ids.sort();
    for id in ids {
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
