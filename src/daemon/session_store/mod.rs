//! The Agent SDK's `SessionStore` API on a directory of its own: an append writes to a transcript
//! file, and returns once the entries are durable.
//!
//! Owns what each call of the API does. Does not own uploading and restoring, which work as for
//! every other session (`capture`, `restore`), or the HTTP interface (`http`).

mod batch;
pub mod http;
mod key;
pub mod token;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::block_in_place;

pub use self::batch::SummaryUpdate;
use self::batch::{AppendRecord, Batch, BatchOutcome, Summary, TranscriptCache};
pub use self::key::{RequestKey, TranscriptKey, project_id};
use crate::agent::FileClass;
use crate::capture::{IndexQueue, StreamerHandle};
use crate::daemon::service::Service;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::index::{SessionFilter, SessionRow};
use crate::log::ledger::Ledger;
use crate::log::segments;
use crate::log::writer::{WriteTarget, fenced_error};
use crate::model::{FileKind, LogId, ProjectId, RelPath, ResolvedPoint, Seq, SessionId};
use crate::operations::pull;
use crate::operations::restore::{IfMissing, RestoreRequest, RestoreService, SessionSet};
use crate::store::Store;
use crate::sys::lines::complete_lines_len;
use crate::sys::{Directory, Disk, ItemKind, OpenFile};
use crate::upkeep::{reindex, remove};
use crate::wire::Parts;

/// Time limit for an append to become durable. After it, the append fails, but its entries stay in
/// the local file and are uploaded later. The SDK gives up after 60 seconds and does not retry
/// then.
const DURABLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of sessions whose state is kept while no call uses them.
const MAX_IDLE_SESSIONS: usize = 256;

/// Number of sessions per index query.
const PAGE_SIZE: u32 = 500;

/// The session store.
pub struct SessionStore {
    parts: Parts,
    disk: Arc<Disk>,
    handle: StreamerHandle,
    index_queue: Arc<IndexQueue>,
    sessions: Mutex<HashMap<SessionId, Arc<AsyncMutex<SessionState>>>>,
    restore_service: Arc<RestoreService>,
}

/// The state of a session between calls. One call at a time uses it.
#[derive(Default)]
struct SessionState {
    /// The local files are complete and writable. If another writer has taken the session over
    /// since then, the flush reports it.
    is_local: bool,
    /// A client loaded the session after another writer had changed it: the next append continues
    /// from there and takes the session over.
    must_claim: bool,
    transcripts: TranscriptCache,
    copy: Option<Arc<SessionCopy>>,
}

/// A copy of a session whose local files are outdated, for reading. It does not claim the session.
struct SessionCopy {
    head: Seq,
    disk: Disk,
    /// The directory of the store, and the path of the copy in it.
    parent: Arc<Disk>,
    path: String,
}

impl Drop for SessionCopy {
    fn drop(&mut self) {
        remove_copies(&self.parent, &self.path);
    }
}

/// The newest files of a session.
enum SessionFiles {
    Local(Arc<Disk>),
    Copy(Arc<SessionCopy>),
}

impl SessionFiles {
    fn directory(&self) -> &Disk {
        match self {
            SessionFiles::Local(disk) => disk,
            SessionFiles::Copy(copy) => &copy.disk,
        }
    }
}

/// The result of an append.
#[derive(Debug, Serialize)]
pub struct Appended {
    /// Number of entries that were new.
    new_entries: usize,
    /// The current version of the session's summary.
    summary_version: u64,
}

/// The content of an append.
pub struct Append<'a> {
    /// The client's ID of this append; a repeated append has the same ID.
    pub batch_id: Option<&'a str>,
    /// The entries.
    pub entries: &'a [&'a RawValue],
    /// The new summary.
    pub summary: Option<SummaryUpdate<'a>>,
}

/// The complete lines of a transcript at the time of the call.
pub struct TranscriptLines {
    /// The file.
    pub file: Box<dyn OpenFile>,
    /// The length of the complete lines.
    pub len: u64,
    /// Keeps a copy on disk while it is read.
    _files: SessionFiles,
}

/// A session in a list.
#[derive(Debug, Serialize)]
pub struct ListedSession {
    session_id: String,
    mtime: i64,
}

/// The summary of a session.
#[derive(Debug, Serialize)]
pub struct SessionSummary {
    session_id: String,
    mtime: i64,
    version: u64,
    data: Box<RawValue>,
}

impl SessionStore {
    /// Creates the store on the directory that `service` streams and `restore_service` has locked.
    pub fn new(
        parts: &Parts,
        service: &Service,
        restore_service: Arc<RestoreService>,
    ) -> SessionStore {
        let disk = restore_service.disk().clone();
        // A killed process may have left copies.
        remove_copies(&disk, COPIES);
        SessionStore {
            parts: parts.clone(),
            disk,
            handle: service.handle(),
            index_queue: service.index_queue(),
            sessions: Mutex::default(),
            restore_service,
        }
    }

    /// Checks a key.
    pub fn key(&self, key: &RequestKey) -> Result<TranscriptKey> {
        TranscriptKey::parse(&*self.parts.profile, key)
    }

    /// Appends entries, and returns once they are durable. Returns `None` and writes nothing if the
    /// summary is based on an outdated version.
    pub async fn append(
        &self,
        key: &TranscriptKey,
        append: Append<'_>,
    ) -> Result<Option<Appended>> {
        let session = self.session(key);
        let mut session = session.lock().await;
        if append.entries.is_empty() {
            return Ok(Some(Appended {
                new_entries: 0,
                summary_version: self.record(key)?.summary_version(),
            }));
        }
        self.make_local(&mut session, key).await?;
        let batch = Batch {
            key,
            id: append.batch_id,
            entries: append.entries,
            summary: append.summary.filter(|_| key.subpath().is_none()),
            now_ms: self.parts.logs.clock.now().as_millisecond(),
        };
        // The first append reads the complete file, and every append waits for the disk.
        let outcome = block_in_place(|| session.transcripts.append(&*self.disk, &batch))?;
        let BatchOutcome::Complete {
            new_entries,
            files,
            summary_version,
        } = outcome
        else {
            return Ok(None);
        };
        self.flush(key, files).await?;
        Ok(Some(Appended {
            new_entries,
            summary_version,
        }))
    }

    /// Waits until files of a session are durable in its log.
    async fn flush(&self, key: &TranscriptKey, files: Vec<RelPath>) -> Result<()> {
        let flush = self.handle.flush_files(key.log_name(), files);
        let flushed = tokio::time::timeout(DURABLE_TIMEOUT, flush).await;
        let report = flushed.map_err(|_| {
            let session = key.session();
            Error::unavailable(format!(
                "session {session} is not durable after {DURABLE_TIMEOUT:?}"
            ))
            .hint(
                "repeat the append; its entries are in a local file and are uploaded once the \
                 store responds",
            )
        })??;
        if report.logs.iter().any(|log| log.is_branch()) {
            return Err(fenced_error(&self.id(key), None)
                .hint("load the session again to continue from the other writer's entries"));
        }
        Ok(())
    }

    /// The lines of a transcript; `None` if it does not exist.
    pub async fn load(&self, key: &TranscriptKey) -> Result<Option<TranscriptLines>> {
        let session = self.session(key);
        let mut session = session.lock().await;
        let Some(files) = self.newest_files(&mut session, key).await? else {
            return Ok(None);
        };
        let failed = |cause| Error::io(format!("read {}", key.path()), cause);
        let Some(file) = files.directory().open(key.path()).map_err(failed)? else {
            return Ok(None);
        };
        let size = file.stat().map_err(failed)?.size;
        let len = complete_lines_len(&*file, size).map_err(failed)?;
        // A deleted transcript of a session that still exists is an empty file.
        Ok((len > 0).then_some(TranscriptLines {
            file,
            len,
            _files: files,
        }))
    }

    /// The subpaths of a session's other transcripts.
    pub async fn subkeys(&self, key: &TranscriptKey) -> Result<Vec<String>> {
        let session = self.session(key);
        let mut session = session.lock().await;
        let Some(files) = self.newest_files(&mut session, key).await? else {
            return Ok(Vec::new());
        };
        let directory = key.directory()?;
        let transcript = FileClass::Stored(key.log_name(), FileKind::Append);
        let mut subpaths = Vec::new();
        for path in list_files(files.directory(), &directory)
            .map_err(|cause| Error::io(format!("list {directory}"), cause))?
        {
            let is_transcript = self.parts.profile.classify(&path) == transcript;
            let has_content = files
                .directory()
                .stat(&path)
                .ok()
                .flatten()
                .is_some_and(|stat| stat.size > 0);
            let subpath = path
                .as_str()
                .strip_prefix(directory.as_str())
                .and_then(|rest| rest.strip_prefix('/')?.strip_suffix(".jsonl"));
            if let Some(subpath) = subpath.filter(|_| is_transcript && has_content) {
                subpaths.push(subpath.to_owned());
            }
        }
        Ok(subpaths)
    }

    /// The sessions of a project: the local ones, and those that the index lists.
    pub async fn list(&self, project: &ProjectId) -> Result<Vec<ListedSession>> {
        let mut mtimes = self.local_sessions(project)?;
        for row in self.indexed_sessions(project).await? {
            let updated = row.updated.as_millisecond();
            match mtimes.get_mut(&row.id) {
                // The local files are the newest, and this project has no transcript among them: it
                // was deleted, and the index has not recorded that yet.
                None if self.is_local(&row) => {}
                None => drop(mtimes.insert(row.id, updated)),
                // Another writer has changed the session since.
                Some(mtime) if self.is_outdated(&row) => *mtime = updated.max(*mtime + 1),
                Some(_) => {}
            }
        }
        Ok(mtimes
            .into_iter()
            .map(|(session_id, mtime)| ListedSession { session_id, mtime })
            .collect())
    }

    /// The summaries of a project's local sessions.
    pub fn summaries(&self, project: &ProjectId) -> Result<Vec<SessionSummary>> {
        let mut summaries = Vec::new();
        for session_id in self.local_sessions(project)?.into_keys() {
            let path = key::record_path(project, &session_id)?;
            let summary = AppendRecord::load(&*self.disk, &path)?.summary;
            summaries.extend(summary.map(|summary| SessionSummary::new(session_id, summary)));
        }
        Ok(summaries)
    }

    /// The summary of a session; `None` if there is none.
    pub async fn summary(&self, key: &TranscriptKey) -> Result<Option<SessionSummary>> {
        let session = self.session(key);
        let mut session = session.lock().await;
        // The client bases its next append on this summary, so it must be the newest one.
        self.make_local(&mut session, key).await?;
        let summary = self.record(key)?.summary;
        Ok(summary.map(|summary| SessionSummary::new(key.session().to_string(), summary)))
    }

    /// Deletes a transcript, or a complete session. `sessiond undelete` restores a session within
    /// the grace period.
    pub async fn delete(&self, key: &TranscriptKey) -> Result<()> {
        let session = self.session(key);
        let mut session = session.lock().await;
        let id = self.id(key);
        let state = self.parts.logs.read_state(&id).await?;
        let is_stored = state.seq > 0 && state.removed.is_none();
        let directory = format!("{}/", key.directory()?);
        let is_deleted = |path: &RelPath| {
            *path == *key.path() || key.subpath().is_none() && path.as_str().starts_with(&directory)
        };
        let has_other_transcripts = state.files.iter().any(|(path, file)| {
            file.len > 0 && path.name().ends_with(".jsonl") && !is_deleted(path)
        });
        if is_stored && (key.subpath().is_some() || has_other_transcripts) {
            // The log continues without the deleted files.
            self.make_local(&mut session, key).await?;
            let truncated = self
                .truncate_files(key)
                .map_err(|cause| Error::io(format!("truncate {}", key.path()), cause))?;
            return self.flush(key, truncated).await;
        }
        self.handle.hold(key.log_name()).await?;
        let removed = self.remove_session(key, &id, is_stored).await;
        *session = SessionState::default();
        self.handle.release(key.log_name()).await?;
        removed?;
        if is_stored
            && let Err(error) = reindex::catch_up(
                &self.parts.logs,
                &*self.parts.index,
                &*self.parts.profile,
                &id,
            )
            .await
        {
            tracing::warn!(%error, "the index update failed; retrying in the background");
            self.index_queue.push_stale(key.log_name());
        }
        Ok(())
    }

    /// Truncates the local files of a key. A file that is removed from the directory would stay in
    /// the log.
    fn truncate_files(&self, key: &TranscriptKey) -> std::io::Result<Vec<RelPath>> {
        let mut paths = vec![key.path().clone()];
        if let (None, Ok(directory)) = (key.subpath(), key.directory()) {
            paths.extend(list_files(&*self.disk, &directory)?);
        }
        let mut truncated = Vec::new();
        for path in paths {
            if self.disk.stat(&path)?.is_some() {
                self.disk.write_at(&path, 0, b"")?;
                truncated.push(path);
            }
        }
        Ok(truncated)
    }

    /// Marks the session as removed, and removes its local files.
    async fn remove_session(&self, key: &TranscriptKey, id: &LogId, is_stored: bool) -> Result<()> {
        if is_stored {
            remove::remove(&self.parts.logs, id).await?;
        }
        let paths = match key.subpath() {
            None => vec![key.main_transcript()?, key.directory()?, Ledger::path(id)?],
            Some(_) => vec![key.path().clone()],
        };
        paths
            .iter()
            .try_for_each(|path| self.disk.remove(path))
            .map_err(|cause| Error::io(format!("remove {}", key.path()), cause))
    }

    fn id(&self, key: &TranscriptKey) -> LogId {
        self.parts.logs.id(key.log_name())
    }

    fn session(&self, key: &TranscriptKey) -> Arc<AsyncMutex<SessionState>> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if sessions.len() > MAX_IDLE_SESSIONS {
            // A session that a client loaded to continue it must stay.
            sessions.retain(|_, session| {
                Arc::strong_count(session) > 1
                    || session.try_lock().is_ok_and(|session| session.must_claim)
            });
        }
        sessions.entry(key.session().clone()).or_default().clone()
    }

    fn record(&self, key: &TranscriptKey) -> Result<AppendRecord> {
        AppendRecord::load(&*self.disk, &key.record_path()?)
    }

    fn ledger(&self, id: &LogId) -> Option<Ledger> {
        Ledger::load(&*self.disk, &self.parts.logs.store.address(), id)
    }

    /// Whether the local transcripts contain everything that was uploaded. If a user removed some
    /// of them, the session must be restored before it continues.
    fn has_all_files(&self, ledger: &Ledger) -> bool {
        let mut appended = ledger
            .files
            .iter()
            .filter(|(_, cursor)| cursor.kind == FileKind::Append);
        let size = |path| {
            self.disk
                .stat(path)
                .ok()
                .flatten()
                .map_or(0, |stat| stat.size)
        };
        appended.all(|(path, cursor)| size(path) >= cursor.len)
    }

    /// Makes the files of a session local and writable: restores and claims it if the local files
    /// are incomplete, or if a client has loaded a newer state.
    async fn make_local(&self, session: &mut SessionState, key: &TranscriptKey) -> Result<()> {
        let id = self.id(key);
        let has_all_files = || {
            self.ledger(&id)
                .is_some_and(|ledger| self.has_all_files(&ledger))
        };
        if !session.is_local && (session.must_claim || !has_all_files()) {
            self.handle.hold(key.log_name()).await?;
            // A local file that differs is on a branch already, and is moved aside.
            let request = RestoreRequest {
                if_missing: IfMissing::Skip,
                force: true,
                with_projects: false,
                ..RestoreRequest::new(SessionSet::Exact(id))
            };
            let restored = self.restore_service.restore(&request).await;
            self.handle.release(key.log_name()).await?;
            let summary = restored?;
            summary.log();
            if !summary.is_empty() {
                self.index_queue.push_stale(key.log_name());
            }
        }
        *session = SessionState {
            is_local: true,
            must_claim: false,
            copy: None,
            transcripts: std::mem::take(&mut session.transcripts),
        };
        Ok(())
    }

    /// The newest files of a session; `None` if the session does not exist.
    async fn newest_files(
        &self,
        session: &mut SessionState,
        key: &TranscriptKey,
    ) -> Result<Option<SessionFiles>> {
        let id = self.id(key);
        let logs = &self.parts.logs;
        let head = segments::head(&logs.list_newest_segments(&id).await?);
        let is_newest = |ledger: Ledger| {
            ledger.log_writer.target != WriteTarget::Branch
                && ledger.log_writer.seq >= head
                && self.has_all_files(&ledger)
        };
        if self.ledger(&id).map_or(head == 0, is_newest) {
            return Ok(Some(SessionFiles::Local(self.disk.clone())));
        }
        session.is_local = false;
        session.must_claim = true;
        if let Some(copy) = session.copy.as_ref().filter(|copy| copy.head == head) {
            return Ok(Some(SessionFiles::Copy(copy.clone())));
        }
        let path = format!("{COPIES}/{:016x}", logs.rng.next());
        let copy = Arc::new(SessionCopy {
            head,
            disk: self.disk.subdirectory(&path),
            parent: self.disk.clone(),
            path,
        });
        let directory = Arc::new(copy.disk.clone());
        match pull::copy(&self.parts, &id, ResolvedPoint::default(), directory).await {
            Ok(_) => {
                session.copy = Some(copy.clone());
                Ok(Some(SessionFiles::Copy(copy)))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The local sessions of a project, with the modification time of each.
    fn local_sessions(&self, project: &ProjectId) -> Result<HashMap<String, i64>> {
        let failed = |cause| Error::io("list the local sessions", cause);
        let directory = key::project_directory(project)?;
        let mut mtimes = HashMap::new();
        for item in self.disk.list(Some(&directory)).map_err(failed)? {
            let Some(session) = item.name.strip_suffix(".jsonl") else {
                continue;
            };
            let path = key::transcript_path(project, session)?;
            let stat = self
                .disk
                .stat(&path)
                .map_err(failed)?
                .filter(|stat| stat.size > 0);
            if let Some(stat) = stat.filter(|_| self.parts.profile.is_transcript(&path)) {
                mtimes.insert(session.to_owned(), stat.mtime_ns / 1_000_000);
            }
        }
        Ok(mtimes)
    }

    /// The sessions of a project that the index lists.
    async fn indexed_sessions(&self, project: &ProjectId) -> Result<Vec<SessionRow>> {
        let logs = &self.parts.logs;
        let mut filter = SessionFilter {
            namespace: logs.namespace.clone(),
            agent: Some(logs.agent.clone()),
            id_prefix: None,
            project: Some(project.to_string()),
            status: None,
            request: None,
            labels: Vec::new(),
            model: None,
            since: None,
            until: None,
            title: None,
            limit: PAGE_SIZE,
            cursor: None,
        };
        let mut rows = Vec::new();
        loop {
            let page = self
                .parts
                .index
                .sessions(&filter)
                .await
                .context("list the sessions of a project")?;
            rows.extend(page.sessions);
            match page.next {
                Some(next) => filter.cursor = Some(next),
                None => return Ok(rows),
            }
        }
    }

    /// Whether the local files of a session are complete and as new as its log.
    fn is_local(&self, row: &SessionRow) -> bool {
        let name = row.id.parse();
        let ledger = name
            .ok()
            .and_then(|name| self.ledger(&self.parts.logs.id(name)));
        ledger.is_some_and(|ledger| self.has_all_files(&ledger)) && !self.is_outdated(row)
    }

    /// Whether the local files of a session are older than its log.
    fn is_outdated(&self, row: &SessionRow) -> bool {
        let ledger = row
            .id
            .parse()
            .ok()
            .and_then(|name| self.ledger(&self.parts.logs.id(name)));
        ledger.is_none_or(|ledger| {
            ledger.log_writer.target == WriteTarget::Branch || ledger.log_writer.seq < row.head
        })
    }
}

impl SessionSummary {
    fn new(session_id: String, summary: Summary) -> SessionSummary {
        SessionSummary {
            session_id,
            mtime: summary.mtime,
            version: summary.version,
            data: summary.data,
        }
    }
}

/// The directory of copies, below the root.
const COPIES: &str = ".sessiond/copies";

fn remove_copies(disk: &Disk, path: &str) {
    if let Ok(path) = path.parse() {
        let _ = disk.remove(&path);
    }
}

/// The files below a directory, sorted.
fn list_files(directory: &dyn Directory, start: &RelPath) -> std::io::Result<Vec<RelPath>> {
    let mut pending = vec![start.clone()];
    let mut files = Vec::new();
    while let Some(parent) = pending.pop() {
        for item in directory.list(Some(&parent))? {
            match (parent.join(&item.name), item.kind) {
                (Ok(path), ItemKind::Directory) => pending.push(path),
                (Ok(path), ItemKind::File) => files.push(path),
                _ => {}
            }
        }
    }
    files.sort();
    Ok(files)
}
