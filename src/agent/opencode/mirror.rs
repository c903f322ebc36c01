//! Keeps a folder of files, one a session, in step with OpenCode's database: a row that is new or has changed is a new line,
//! and the last line of a row counts.
//!
//! Owns the files and what is known of them. Reads the database through a connection that cannot write; writes to it only where
//! a session is restored (`settle`).

mod settle;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::TryStreamExt;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row, SqliteConnection};
use tokio::sync::Mutex;

use super::rows::{self, Named, TABLES};
use crate::error::{Error, Result};
use crate::model::Digest;
use crate::sys::{Disk, Owner};

/// The folder of the files, beside the database.
const FOLDER: &str = ".sessiond-mirror";

/// How long to wait for a writer; OpenCode's transactions take milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Rows that changed so long before the newest one known are looked at again: clocks of two writers need not agree.
const SLACK_MS: i64 = 60_000;

/// A session that changed so long before the newest one is still at work.
const RECENT_MS: i64 = 60 * 60 * 1000;

/// Lines are written when so many bytes of them are waiting.
const PIECE: usize = 1 << 20;

/// How hard to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Only if the database's files have changed.
    Changed,
    /// At every session that has changed or is at work.
    Now,
    /// At every row of every session.
    All,
}

/// The database and the files.
pub struct Mirror {
    data: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What the database's files looked like before they were read last.
    stamp: Option<Stamp>,
    /// When each session changed last, and by which event.
    changed: HashMap<String, (i64, i64)>,
    /// What is known of the files of sessions that are at work.
    known: HashMap<String, Known>,
}

type Stamp = [Option<(u64, i64, i64)>; 2];

/// What the file of a session holds.
#[derive(Default)]
struct Known {
    /// Each row by table and key: the fingerprint of its last line; none where the row is gone.
    rows: BTreeMap<(String, String), Option<u64>>,
    schema: Option<u64>,
    /// Rows that changed before were looked at.
    since: i64,
}

impl Mirror {
    /// The mirror of the database in OpenCode's folder.
    pub fn new(data: &Path) -> Mirror {
        Mirror { data: data.to_owned(), state: Mutex::default() }
    }

    /// Where the files are: what is kept.
    pub fn folder(&self) -> PathBuf {
        self.data.join(FOLDER)
    }

    fn database(&self) -> PathBuf {
        self.data.join("opencode.db")
    }

    fn file(&self, session: &str) -> PathBuf {
        self.folder().join("sessions").join(format!("{session}.jsonl"))
    }

    fn failed(&self, cause: sqlx::Error) -> Error {
        Error::unavailable(format!("read {}", self.database().display())).because(cause)
    }

    fn stamp(&self) -> Stamp {
        ["opencode.db", "opencode.db-wal"].map(|name| {
            let found = std::fs::metadata(self.data.join(name)).ok()?;
            Some((found.len(), found.mtime(), found.mtime_nsec()))
        })
    }

    async fn connect(&self) -> Result<SqliteConnection> {
        let options = SqliteConnectOptions::new().filename(self.database()).read_only(true).foreign_keys(false).busy_timeout(PATIENCE);
        options.disable_statement_logging().connect().await.map_err(|cause| self.failed(cause))
    }

    /// Whether the database can be read and is one that we know, if there is one; answers how many sessions it holds.
    pub async fn check(&self) -> Result<usize> {
        if !self.database().exists() {
            return Ok(0);
        }
        let mut database = self.connect().await?;
        let found = sessions(&mut database).await;
        let _ = database.close().await;
        match found.map_err(|cause| self.failed(cause))? {
            Some(sessions) => Ok(sessions.len()),
            None => Err(Error::unavailable(format!("read {}: it has no table of sessions", self.database().display()))),
        }
    }

    /// Brings the files up to what the database holds.
    pub async fn pull(&self, depth: Depth) -> Result<()> {
        let mut state = self.state.lock().await;
        let stamp = self.stamp();
        if stamp[0].is_none() || (depth == Depth::Changed && state.stamp == Some(stamp)) {
            return Ok(());
        }
        let mut database = self.connect().await?;
        let pulled = self.pull_from(&mut database, &mut state, depth).await;
        let _ = database.close().await;
        pulled?;
        state.stamp = Some(stamp);
        Ok(())
    }

    async fn pull_from(&self, database: &mut SqliteConnection, state: &mut State, depth: Depth) -> Result<()> {
        let failed = |cause| self.failed(cause);
        // All of it as it was at one moment.
        sqlx::query("BEGIN").execute(&mut *database).await.map_err(failed)?;
        let Some(sessions) = sessions(database).await.map_err(failed)? else { return Ok(()) };
        let first = state.changed.is_empty();
        // Not every table tells that it has changed: what is at work is looked at whenever something is.
        let recent = sessions.values().map(|session| session.changed.0).max().unwrap_or(0).saturating_sub(RECENT_MS);
        let mut looked_at = BTreeSet::new();
        for (id, session) in &sessions {
            let changed = state.changed.get(id) != Some(&session.changed) || session.changed.0 >= recent;
            if depth == Depth::All || first || session.changed.1 < 0 || changed {
                looked_at.insert(root(&sessions, id));
            }
        }
        let schema = rows::schema(database).await.map_err(failed)?;
        for id in &looked_at {
            let known = match state.known.remove(id) {
                Some(known) if depth != Depth::All => known,
                // Read anew: what stands in the file is what was kept.
                _ => Known::load(&self.file(id)).map_err(|cause| Error::io(format!("read {}", self.file(id).display()), cause))?,
            };
            let known = self.pull_session(database, id, known, &schema).await?;
            state.known.insert(id.clone(), known);
        }
        state.known.retain(|id, _| looked_at.contains(id));
        state.changed = sessions.into_iter().map(|(id, session)| (id, session.changed)).collect();
        Ok(())
    }

    async fn pull_session(&self, database: &mut SqliteConnection, id: &str, mut known: Known, schema: &str) -> Result<Known> {
        let failed = |cause| self.failed(cause);
        let mut out = Lines { mirror: self, session: id, waiting: String::new() };
        let print = Digest::of(schema.as_bytes()).short();
        if known.schema != Some(print) {
            out.add(schema)?;
            known.schema = Some(print);
        }
        if let Some((key, row)) = rows::project(database, id).await.map_err(failed)? {
            known.take(rows::PROJECT, key, |key| rows::line(rows::PROJECT, key, None, &row), &mut out)?;
        }
        let since = known.since.saturating_sub(SLACK_MS).max(0);
        let mut present: [BTreeSet<String>; TABLES.len()] = Default::default();
        let sql = rows::select(database).await.map_err(failed)?;
        let mut found = sqlx::query(AssertSqlSafe(sql)).bind(id).bind(since).fetch(&mut *database);
        while let Some(row) = found.try_next().await.map_err(failed)? {
            let get = || -> sqlx::Result<(i64, String, Option<String>, Option<String>)> {
                Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?))
            };
            let (rank, key, role, row) = get().map_err(failed)?;
            let Some(((table, _), present)) = usize::try_from(rank).ok().and_then(|rank| Some((TABLES.get(rank)?, present.get_mut(rank)?)))
            else {
                continue;
            };
            present.insert(key.clone());
            if let Some(row) = row {
                known.take(table, key, |key| rows::line(table, key, role.as_deref(), &row), &mut out)?;
            }
        }
        drop(found);
        for ((table, _), present) in TABLES.iter().zip(&present) {
            for key in known.gone(table, present) {
                out.add(&rows::line(table, &key, None, "null"))?;
                known.rows.insert(((*table).to_owned(), key), None);
            }
        }
        out.write()?;
        known.since = newest(database, id).await.map_err(failed)?.max(known.since);
        Ok(known)
    }
}

/// A session in the database.
struct Session {
    parent: Option<String>,
    changed: (i64, i64),
}

/// Every session; none if the database has no such table yet.
async fn sessions(database: &mut SqliteConnection) -> sqlx::Result<Option<HashMap<String, Session>>> {
    if rows::columns(database, "session").await?.0.is_empty() {
        return Ok(None);
    }
    // Each change of a session is an event with a number; where that is not so, every session may have changed.
    let sql = match rows::columns(database, "event_sequence").await?.0.is_empty() {
        true => "SELECT id, parent_id, time_updated, -1 FROM session",
        false => {
            "SELECT session.id, parent_id, time_updated, coalesce(event_sequence.seq, 0) FROM session \
             LEFT JOIN event_sequence ON event_sequence.aggregate_id = session.id"
        }
    };
    let found = sqlx::query(sql).fetch_all(database).await?;
    let session = |row: &sqlx::sqlite::SqliteRow| {
        Ok((row.try_get(0)?, Session { parent: row.try_get(1)?, changed: (row.try_get(2)?, row.try_get(3)?) }))
    };
    found.iter().map(session).collect::<sqlx::Result<_>>().map(Some)
}

/// The session that a person began: sub-agents have sessions of their own.
fn root(sessions: &HashMap<String, Session>, id: &str) -> String {
    let mut at = id;
    // Not for ever, whatever the rows say.
    for _ in 0..sessions.len() {
        match sessions.get(at).and_then(|session| session.parent.as_deref()).filter(|parent| sessions.contains_key(*parent)) {
            Some(parent) => at = parent,
            None => break,
        }
    }
    at.to_owned()
}

/// When the newest row of a session changed.
async fn newest(database: &mut SqliteConnection, id: &str) -> sqlx::Result<i64> {
    let sql = format!("{} SELECT coalesce(max(time_updated), 0) FROM part WHERE session_id IN family", rows::FAMILY);
    sqlx::query_scalar(AssertSqlSafe(sql)).bind(id).fetch_one(database).await
}

impl Known {
    /// What a file holds. A line that was not finished is cut off: its row will be written again.
    fn load(path: &Path) -> std::io::Result<Known> {
        let mut known = Known::default();
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(known),
            Err(cause) => return Err(cause),
        };
        let mut reader = BufReader::new(&file);
        let (mut line, mut whole) = (Vec::new(), 0);
        loop {
            line.clear();
            if reader.read_until(b'\n', &mut line)? == 0 || !line.ends_with(b"\n") {
                break;
            }
            whole += line.len() as u64;
            let Ok(named) = serde_json::from_slice::<Named<'_>>(&line) else { continue };
            match (named.table, named.key) {
                (Some(table), Some(key)) => {
                    let print = named.row.map(|_| Digest::of(&line).short());
                    known.rows.insert((table, key), print);
                }
                _ if named.schema.is_some() => known.schema = Some(Digest::of(&line).short()),
                _ => {}
            }
        }
        if file.metadata()?.len() > whole {
            file.set_len(whole)?;
        }
        Ok(known)
    }

    /// A row as it is now: a line if it is not what the file holds already.
    fn take(&mut self, table: &str, key: String, line: impl FnOnce(&str) -> String, out: &mut Lines<'_>) -> Result<()> {
        let line = line(&key);
        let print = Some(Digest::of(line.as_bytes()).short());
        if self.rows.insert((table.to_owned(), key), print) == Some(print) {
            return Ok(());
        }
        out.add(&line)
    }

    /// Rows that are in the file and no longer in the database.
    fn gone(&self, table: &str, present: &BTreeSet<String>) -> Vec<String> {
        let here = self.rows.iter().filter(|((of, key), print)| of == table && print.is_some() && !present.contains(key));
        here.map(|((_, key), _)| key.clone()).collect()
    }
}

/// Lines on their way to a session's file.
struct Lines<'a> {
    mirror: &'a Mirror,
    session: &'a str,
    waiting: String,
}

impl Lines<'_> {
    fn add(&mut self, line: &str) -> Result<()> {
        self.waiting.push_str(line);
        if self.waiting.len() > PIECE { self.write() } else { Ok(()) }
    }

    fn write(&mut self) -> Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let path = self.mirror.file(self.session);
        let append = || -> std::io::Result<()> {
            // As root: for the agent's user, as everything in its folder.
            let owner = rustix::process::geteuid().is_root().then(|| Disk::new(&self.mirror.data).owner()).transpose()?;
            Disk::new(self.mirror.folder().join("sessions")).make(owner)?;
            let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
            give(&file, owner)?;
            file.write_all(self.waiting.as_bytes())
        };
        append().map_err(|cause| Error::io(format!("write {}", path.display()), cause))?;
        self.waiting.clear();
        Ok(())
    }
}

fn give(file: &File, owner: Option<Owner>) -> std::io::Result<()> {
    owner.map_or(Ok(()), |owner| std::os::unix::fs::fchown(file, Some(owner.uid), Some(owner.gid)))
}
