//! The Agent SDK's `SessionStore` on a directory of our own: an append is a file that grew, and is answered when it is durable.
//!
//! Owns what each call of that contract means here. Does not own the way to the bucket and back, which is that of every other
//! session (`capture`, `restore`), nor how a call arrives (`http`).

mod batch;
pub mod http;
mod key;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::block_in_place;
use tokio::time::Instant;

use self::batch::{Append, Ids, Record, Summary, Written};
pub use self::key::{Key, Sent, project};
use crate::agent::FileClass;
use crate::capture::{Feed, StreamerHandle};
use crate::daemon::lock::state_dir;
use crate::daemon::service::Service;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::index::{Filter, SessionRow};
use crate::log::ledger::Ledger;
use crate::log::segments;
use crate::log::writer::{WriteTarget, fenced};
use crate::model::{FileKind, LogId, RelPath, Seq, SessionId};
use crate::restore;
use crate::sys::{Directory, Disk, ItemKind, OpenFile, Operation};
use crate::upkeep::{reindex, remove};
use crate::wire::Parts;

/// An append that is not durable by then is answered so; it is written here and goes out when the store answers. The SDK gives
/// up after 60 seconds and does not ask again then.
const DURABLE_WITHIN: Duration = Duration::from_secs(30);

/// So many sessions are remembered that nobody asks about at the moment.
const MOST_QUIET: usize = 256;

/// Sessions asked of the index at a time.
const PAGE: u32 = 500;

/// The store.
pub struct SessionStore {
    parts: Parts,
    disk: Arc<Disk>,
    handle: StreamerHandle,
    feed: Arc<Feed>,
    sessions: Mutex<HashMap<SessionId, Arc<AsyncMutex<Session>>>>,
    /// A restore clears what an earlier one left: one at a time.
    restoring: AsyncMutex<()>,
}

/// What is known of a session between calls. One call at a time has it.
#[derive(Default)]
struct Session {
    /// Its files are here, and we may write to them: if somebody took it over since, the flush says so.
    here: bool,
    /// It was read since somebody else wrote to it: who appends now goes on from there, and takes it over.
    take: bool,
    ids: Ids,
    copy: Option<Arc<Copy>>,
}

/// A session of which what is here is not the newest: a copy, to read. Nobody loses it by that.
struct Copy {
    head: Seq,
    disk: Disk,
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.disk.root());
    }
}

/// Where to read a session.
enum View {
    Here(Arc<Disk>),
    Copy(Arc<Copy>),
}

impl View {
    fn directory(&self) -> &Disk {
        match self {
            View::Here(disk) => disk,
            View::Copy(copy) => &copy.disk,
        }
    }
}

/// What an append answers.
#[derive(Debug, Serialize)]
pub struct Appended {
    /// Entries that were new.
    new: usize,
    /// The version of the session's summary.
    summary: u64,
}

/// What is sent along with an append.
pub struct Batch<'a> {
    /// The caller's name for it, the same when it is repeated.
    pub id: Option<&'a str>,
    /// The entries.
    pub entries: &'a [&'a RawValue],
    /// What the SDK makes of them, and the version that it began from.
    pub summary: Option<(u64, &'a RawValue)>,
}

/// A transcript to read: whole lines, up to where it ended when it was asked for.
pub struct Lines {
    /// The file.
    pub file: Box<dyn OpenFile>,
    /// So many bytes.
    pub len: u64,
    /// Keeps a copy on disk until it is read.
    _view: View,
}

/// A session as listed.
#[derive(Debug, Serialize)]
pub struct Listed {
    session_id: String,
    mtime: i64,
}

/// A session's summary as listed.
#[derive(Debug, Serialize)]
pub struct Summarised {
    session_id: String,
    mtime: i64,
    version: u64,
    data: Box<RawValue>,
}

impl SessionStore {
    /// The store on the directory that a service streams.
    pub fn new(parts: &Parts, service: &Service) -> Result<SessionStore> {
        let disk = parts.directory()?;
        // What an earlier one left that was killed; we hold the directory's lock.
        let _ = std::fs::remove_dir_all(copies(disk.root()));
        let (handle, feed) = (service.handle(), service.feed());
        Ok(SessionStore {
            parts: parts.clone(),
            disk,
            handle,
            feed,
            sessions: Mutex::default(),
            restoring: AsyncMutex::default(),
        })
    }

    /// Checks a key.
    pub fn key(&self, sent: &Sent) -> Result<Key> {
        Key::read(&*self.parts.profile, sent)
    }

    /// Appends, and answers when it is durable. None if the summary was made from another one than there is now: nothing is
    /// written then.
    pub async fn append(&self, key: &Key, batch: Batch<'_>) -> Result<Option<Appended>> {
        let session = self.session(key);
        let mut session = session.lock().await;
        if batch.entries.is_empty() {
            return Ok(Some(Appended {
                new: 0,
                summary: self.version(key)?,
            }));
        }
        self.bring(&mut session, key).await?;
        let summary = batch.summary.filter(|_| key.subpath().is_none());
        let now = self.parts.logs.clock.now().as_millisecond();
        let append = Append {
            key,
            batch: batch.id,
            entries: batch.entries,
            summary,
            now,
        };
        // Reads the whole file the first time, and waits for the disk.
        let written = block_in_place(|| session.ids.append(&*self.disk, &append))?;
        let Written::All {
            new,
            files,
            summary,
        } = written
        else {
            return Ok(None);
        };
        self.durable(key, files).await?;
        Ok(Some(Appended { new, summary }))
    }

    /// Waits until files of a session are durable in its log.
    async fn durable(&self, key: &Key, files: Vec<RelPath>) -> Result<()> {
        let flushed =
            tokio::time::timeout(DURABLE_WITHIN, self.handle.wrote(key.name(), files)).await;
        let report = flushed.map_err(|_| {
            Error::unavailable(format!("session {}: not durable after {DURABLE_WITHIN:?}", key.session()))
                .hint("it is written here, and goes out when the store answers; the same append may be sent again")
        })??;
        if report.logs.iter().any(|log| log.is_branch()) {
            return Err(fenced(&self.id(key), None)
                .hint("load the session again to go on from what the other wrote"));
        }
        Ok(())
    }

    /// A transcript; none if there is none.
    pub async fn load(&self, key: &Key) -> Result<Option<Lines>> {
        let session = self.session(key);
        let mut session = session.lock().await;
        let Some(view) = self.view(&mut session, key).await? else {
            return Ok(None);
        };
        let failed = |cause| Error::io(format!("read {}", key.file()), cause);
        let Some(file) = view.directory().open(key.file()).map_err(failed)? else {
            return Ok(None);
        };
        let len = batch::whole(&*file).map_err(failed)?;
        // What was deleted alone is an empty file.
        Ok((len > 0).then_some(Lines {
            file,
            len,
            _view: view,
        }))
    }

    /// The other transcripts of a session.
    pub async fn subkeys(&self, key: &Key) -> Result<Vec<String>> {
        let session = self.session(key);
        let mut session = session.lock().await;
        let Some(view) = self.view(&mut session, key).await? else {
            return Ok(Vec::new());
        };
        let directory = key.directory()?;
        let mut found = Vec::new();
        for path in files_below(view.directory(), &directory)
            .map_err(|cause| Error::io(format!("list {directory}"), cause))?
        {
            let kept =
                self.parts.profile.place(&path) == FileClass::Keep(key.name(), FileKind::Append);
            let filled = view
                .directory()
                .stat(&path)
                .ok()
                .flatten()
                .is_some_and(|stat| stat.size > 0);
            let subpath = path
                .as_str()
                .strip_prefix(directory.as_str())
                .and_then(|rest| rest.strip_prefix('/')?.strip_suffix(".jsonl"));
            found.extend(subpath.filter(|_| kept && filled).map(str::to_owned));
        }
        Ok(found)
    }

    /// The sessions of a project: those here, and those that the index knows from elsewhere.
    pub async fn list(&self, project: &SessionId) -> Result<Vec<Listed>> {
        let mut found = self.here(project)?;
        for row in self.elsewhere(project).await? {
            let updated = row.updated.as_millisecond();
            match found.get_mut(&row.id) {
                None => drop(found.insert(row.id, updated)),
                // Somebody else wrote to it: what is here is older.
                Some(mtime) if self.is_behind(&row) => *mtime = updated.max(*mtime + 1),
                Some(_) => {}
            }
        }
        Ok(found
            .into_iter()
            .map(|(session_id, mtime)| Listed { session_id, mtime })
            .collect())
    }

    /// What the SDK made of the sessions of a project, of those here.
    pub fn summaries(&self, project: &SessionId) -> Result<Vec<Summarised>> {
        let mut found = Vec::new();
        for session_id in self.here(project)?.into_keys() {
            if let Some(Summary {
                version,
                mtime,
                data,
            }) = Record::load(&*self.disk, &key::record(project, &session_id)?)?.summary
            {
                found.push(Summarised {
                    session_id,
                    mtime,
                    version,
                    data,
                });
            }
        }
        Ok(found)
    }

    /// What the SDK made of a session so far; none if it made nothing.
    pub async fn summary(&self, key: &Key) -> Result<Option<Summarised>> {
        let session = self.session(key);
        let mut session = session.lock().await;
        // As for an append: the summary that it goes on from is that of whoever wrote last.
        self.bring(&mut session, key).await?;
        let summary = Record::load(&*self.disk, &key.record()?)?.summary;
        let session_id = key.session().to_string();
        Ok(summary.map(
            |Summary {
                 version,
                 mtime,
                 data,
             }| Summarised {
                session_id,
                mtime,
                version,
                data,
            },
        ))
    }

    /// Deletes a transcript, or a whole session; `sessiond undelete` brings the latter back within the grace period.
    pub async fn delete(&self, key: &Key) -> Result<()> {
        let session = self.session(key);
        let mut session = session.lock().await;
        let id = self.id(key);
        let state = self.parts.logs.read_state(&id).await?;
        let stored = state.seq > 0 && state.removed.is_none();
        let directory = format!("{}/", key.directory()?);
        let own = |path: &RelPath| {
            *path == *key.file() || key.subpath().is_none() && path.as_str().starts_with(&directory)
        };
        let in_use = |(path, file): &(&RelPath, &crate::model::FileState)| {
            file.len > 0 && path.name().ends_with(".jsonl")
        };
        let others = state
            .files
            .iter()
            .filter(in_use)
            .any(|(path, _)| !own(path));
        if stored && (key.subpath().is_some() || others) {
            // The log goes on without it.
            self.bring(&mut session, key).await?;
            let emptied = self
                .empty(key)
                .map_err(|cause| Error::io(format!("empty {}", key.file()), cause))?;
            return self.durable(key, emptied).await;
        }
        self.handle.hold(key.name()).await?;
        let done = self.forget(key, &id, stored).await;
        *session = Session::default();
        self.handle.release(key.name()).await?;
        done?;
        if stored
            && let Err(error) = reindex::catch_up(
                &self.parts.logs,
                &*self.parts.index,
                &*self.parts.profile,
                &id,
            )
            .await
        {
            tracing::warn!(%error, "the index was not told; it catches up by itself");
            self.feed.stale(key.name());
        }
        Ok(())
    }

    /// Empties the files of a key that are here: what is gone from the directory would stay in the log.
    fn empty(&self, key: &Key) -> std::io::Result<Vec<RelPath>> {
        let mut paths = vec![key.file().clone()];
        if let (None, Ok(directory)) = (key.subpath(), key.directory()) {
            paths.extend(files_below(&*self.disk, &directory)?);
        }
        let mut emptied = Vec::new();
        for path in paths {
            if self.disk.stat(&path)?.is_some() {
                self.disk.write_at(&path, 0, b"")?;
                emptied.push(path);
            }
        }
        Ok(emptied)
    }

    async fn forget(&self, key: &Key, id: &LogId, stored: bool) -> Result<()> {
        if stored {
            remove::remove(&self.parts.logs, id).await?;
        }
        let paths = match key.subpath() {
            None => vec![key.transcript()?, key.directory()?, Ledger::path(id)?],
            Some(_) => vec![key.file().clone()],
        };
        paths
            .iter()
            .try_for_each(|path| self.disk.remove(path))
            .map_err(|cause| Error::io(format!("remove {}", key.file()), cause))
    }

    fn id(&self, key: &Key) -> LogId {
        self.parts.logs.id(key.name())
    }

    fn session(&self, key: &Key) -> Arc<AsyncMutex<Session>> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if sessions.len() > MOST_QUIET {
            // Not one that somebody has read to go on from it.
            sessions.retain(|_, session| {
                Arc::strong_count(session) > 1
                    || session.try_lock().is_ok_and(|session| session.take)
            });
        }
        sessions.entry(key.session().clone()).or_default().clone()
    }

    fn version(&self, key: &Key) -> Result<u64> {
        Ok(Record::load(&*self.disk, &key.record()?)?
            .summary
            .map_or(0, |summary| summary.version))
    }

    fn ledger(&self, id: &LogId) -> Option<Ledger> {
        Ledger::load(&*self.disk, &self.parts.logs.store.address(), id)
    }

    /// Whether what was shipped is still here: a directory that somebody emptied in part must not be gone on from.
    fn is_whole(&self, ledger: &Ledger) -> bool {
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

    /// Sees that the files of a session are here to be written to: from its log, if only that has them, or a newer state that
    /// was read before.
    async fn bring(&self, session: &mut Session, key: &Key) -> Result<()> {
        let id = self.id(key);
        if !session.here
            && (session.take
                || !self
                    .ledger(&id)
                    .is_some_and(|ledger| self.is_whole(&ledger)))
        {
            let _one = self.restoring.lock().await;
            self.handle.hold(key.name()).await?;
            let context = restore::Context {
                directory: self.disk.clone(),
                profile: self.parts.profile.clone(),
                logs: self.parts.logs.clone(),
            };
            // What is here and differs is on a branch already, and is moved aside.
            let options = restore::Options {
                claim: true,
                force: true,
                ..restore::Options::default()
            };
            let began = Instant::now();
            let restored = restore::restore(&context, &id, &options).await;
            self.handle.release(key.name()).await?;
            match restored {
                Ok(report) => {
                    let now = self.parts.logs.clock.now();
                    self.feed
                        .counts()
                        .note(|tally| tally.restored(report.bytes, began.elapsed(), now));
                    tracing::info!(
                        session = report.session,
                        entry = report.seq,
                        files = report.written(),
                        "taken over"
                    );
                    self.feed.stale(key.name());
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    self.feed.counts().failed(Operation::Restore, error.kind());
                    return Err(error);
                }
            }
        }
        *session = Session {
            here: true,
            take: false,
            copy: None,
            ids: std::mem::take(&mut session.ids),
        };
        Ok(())
    }

    /// Where the newest state of a session is to be read; none if there is none.
    async fn view(&self, session: &mut Session, key: &Key) -> Result<Option<View>> {
        let id = self.id(key);
        let logs = &self.parts.logs;
        let head = segments::head(&logs.newest_pieces(&id).await?);
        let newest = |ledger: Ledger| {
            ledger.log_writer.target != WriteTarget::Branch
                && ledger.log_writer.seq >= head
                && self.is_whole(&ledger)
        };
        let current = self.ledger(&id).map_or(head == 0, newest);
        if current {
            return Ok(Some(View::Here(self.disk.clone())));
        }
        session.here = false;
        session.take = true;
        if let Some(copy) = session.copy.as_ref().filter(|copy| copy.head == head) {
            return Ok(Some(View::Copy(copy.clone())));
        }
        let place = copies(self.disk.root()).join(format!("{:016x}", logs.rng.next()));
        let copy = Arc::new(Copy {
            head,
            disk: Disk::new(&place),
        });
        let context = restore::Context {
            directory: Arc::new(Disk::new(place)),
            profile: self.parts.profile.clone(),
            logs: logs.clone(),
        };
        match restore::restore(&context, &id, &restore::Options::default()).await {
            Ok(_) => {
                session.copy = Some(copy.clone());
                Ok(Some(View::Copy(copy)))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The sessions of a project that are here, and when each was written to.
    fn here(&self, project: &SessionId) -> Result<HashMap<String, i64>> {
        let failed = |cause| Error::io("list the sessions here", cause);
        let directory = key::sessions(project)?;
        let mut found = HashMap::new();
        for item in self.disk.list(Some(&directory)).map_err(failed)? {
            let Some(session) = item.name.strip_suffix(".jsonl") else {
                continue;
            };
            let path = key::transcript(project, session)?;
            let stat = self
                .disk
                .stat(&path)
                .map_err(failed)?
                .filter(|stat| stat.size > 0);
            if let Some(stat) = stat.filter(|_| self.parts.profile.is_transcript(&path)) {
                found.insert(session.to_owned(), stat.mtime_ns / 1_000_000);
            }
        }
        Ok(found)
    }

    async fn elsewhere(&self, project: &SessionId) -> Result<Vec<SessionRow>> {
        let logs = &self.parts.logs;
        let mut filter = Filter {
            namespace: logs.namespace.clone(),
            agent: Some(logs.agent.clone()),
            id_prefix: None,
            project: Some(project.to_string()),
            status: None,
            request: None,
            labels: Vec::new(),
            limit: PAGE,
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

    fn is_behind(&self, row: &SessionRow) -> bool {
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

fn copies(root: &Path) -> PathBuf {
    state_dir(root).join("copies")
}

fn files_below(directory: &dyn Directory, from: &RelPath) -> std::io::Result<Vec<RelPath>> {
    let mut open = vec![from.clone()];
    let mut found = Vec::new();
    while let Some(at) = open.pop() {
        for item in directory.list(Some(&at))? {
            match (at.join(&item.name), item.kind) {
                (Ok(path), ItemKind::Directory) => open.push(path),
                (Ok(path), ItemKind::File) => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    Ok(found)
}
