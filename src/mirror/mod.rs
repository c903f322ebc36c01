//! Keeps a directory of files, one a session, in step with OpenCode's database: a row that is new or has changed is a new line,
//! and the last line of a row counts.
//!
//! Owns the files and what is known of them. Reads the database through a connection that cannot write; writes to it only where
//! a session is restored (`settle`).

pub mod rows;
mod settle;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::{Duration, SystemTime};

use futures_util::TryStreamExt;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row, SqliteConnection};
use tokio::sync::Mutex;

use self::rows::{Named, Questions, TABLES};
use crate::error::{Error, Result};
use crate::model::{Digest, SessionId};
use crate::sys::{Clock, Disk, Owner, SystemClock};

/// The directory of the files, beside the database.
const DIR: &str = ".sessiond-mirror";

/// How long to wait for a writer; OpenCode's transactions take milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// A database that has no write-ahead log, and has not changed for so long, is not going to have one.
const MAKING: Duration = Duration::from_secs(10);

/// Rows that changed so long before the newest one known are looked at again: a row has its time before it is committed.
const SLACK_MS: i64 = 10_000;

/// A session that changed so long before the newest one is still at work.
const RECENT_MS: i64 = 60 * 60 * 1000;

/// Lines are written when so many bytes of them are waiting.
const PIECE: usize = 1 << 20;

/// How hard to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Only if the database's files have changed.
    Changed,
    /// At every session that has changed or is at work; the first time, at every row of every session.
    Now,
}

/// The database and the files.
pub struct Mirror {
    data: PathBuf,
    state: Mutex<State>,
    /// Why the database was not read the last time.
    failure: std::sync::Mutex<Option<String>>,
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
    /// Each row by its key, by table: the fingerprint of its last line; 0 where the row is gone.
    rows: [HashMap<Box<str>, u64>; TABLES.len() + 1],
    schema: Option<u64>,
    /// Rows that changed before were looked at.
    since: i64,
}

/// Where the rows of projects are, behind the tables of sessions.
const PROJECTS: usize = TABLES.len();

fn place_of(table: &str) -> Option<usize> {
    if table == rows::PROJECT {
        Some(PROJECTS)
    } else {
        TABLES.iter().position(|(name, _)| *name == table)
    }
}

fn name_of(place: usize) -> &'static str {
    TABLES.get(place).map_or(rows::PROJECT, |(name, _)| name)
}

impl Mirror {
    /// The mirror of the database in OpenCode's directory.
    pub fn new(data: &Path) -> Mirror {
        Mirror {
            data: data.to_owned(),
            state: Mutex::default(),
            failure: std::sync::Mutex::default(),
        }
    }

    /// Where the files are: what is kept.
    pub fn directory(&self) -> PathBuf {
        self.data.join(DIR)
    }

    fn database(&self) -> PathBuf {
        self.data.join("opencode.db")
    }

    fn file(&self, session: &str) -> PathBuf {
        self.directory()
            .join("sessions")
            .join(format!("{session}.jsonl"))
    }

    fn failed(&self, cause: sqlx::Error) -> Error {
        Error::unavailable(format!("read {}", self.database().display())).caused_by(cause)
    }

    fn stamp(&self) -> Stamp {
        ["opencode.db", "opencode.db-wal"].map(|name| {
            let found = std::fs::metadata(self.data.join(name)).ok()?;
            Some((found.len(), found.mtime(), found.mtime_nsec()))
        })
    }

    /// Whether OpenCode is just making the database: it changes to a write-ahead log then, which it cannot while anybody reads, and
    /// gives up. Once it has one, readers and writers never wait for one another.
    fn is_being_made(&self) -> bool {
        let look = || -> std::io::Result<bool> {
            let mut file = File::open(self.database())?;
            let found = file.metadata()?;
            let mut header = [0; 20];
            // What is no database at all is an error, which reading it tells.
            let has_no_wal = found.len() == 0
                || file.read_exact(&mut header).is_ok()
                    && header.starts_with(b"SQLite format 3\0")
                    && header[18..20] != [2, 2];
            Ok(has_no_wal
                && SystemTime::from(SystemClock.now())
                    .duration_since(found.modified()?)
                    .is_ok_and(|age| age < MAKING))
        };
        look().unwrap_or(false)
    }

    async fn connect(&self) -> Result<SqliteConnection> {
        let options = SqliteConnectOptions::new()
            .filename(self.database())
            .read_only(true)
            .foreign_keys(false)
            .busy_timeout(PATIENCE);
        options
            .disable_statement_logging()
            .connect()
            .await
            .map_err(|cause| self.failed(cause))
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
            None => Err(Error::unavailable(format!(
                "read {}: it has no table of sessions",
                self.database().display()
            ))),
        }
    }

    /// Why the database cannot be read, if so.
    pub fn failure(&self) -> Option<String> {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Brings the files up to what the database holds.
    pub async fn pull(&self, depth: Depth) -> Result<()> {
        let pulled = self.try_pull(depth).await;
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) =
            pulled.as_ref().err().map(ToString::to_string);
        pulled
    }

    async fn try_pull(&self, depth: Depth) -> Result<()> {
        let mut state = self.state.lock().await;
        let stamp = self.stamp();
        if stamp[0].is_none() || (depth == Depth::Changed && state.stamp == Some(stamp)) {
            return Ok(());
        }
        // A reader would be in its way; the next change tells.
        if self.is_being_made() {
            return Ok(());
        }
        let mut database = self.connect().await?;
        let pulled = self.pull_from(&mut database, &mut state).await;
        let _ = database.close().await;
        pulled?;
        state.stamp = Some(stamp);
        Ok(())
    }

    async fn pull_from(&self, database: &mut SqliteConnection, state: &mut State) -> Result<()> {
        let failed = |cause| self.failed(cause);
        // All of it as it was at one moment.
        sqlx::query("BEGIN")
            .execute(&mut *database)
            .await
            .map_err(failed)?;
        let Some(sessions) = sessions(database).await.map_err(failed)? else {
            return Ok(());
        };
        let first = state.changed.is_empty();
        // Not every table tells that it has changed: what is at work is looked at whenever something is.
        let recent = sessions
            .values()
            .map(|session| session.changed.0)
            .max()
            .unwrap_or(0)
            .saturating_sub(RECENT_MS);
        let mut looked_at = BTreeSet::new();
        for (id, session) in &sessions {
            let changed =
                state.changed.get(id) != Some(&session.changed) || session.changed.0 >= recent;
            if first || session.changed.1 < 0 || changed {
                looked_at.insert(root(&sessions, id));
            }
        }
        let schema = rows::schema(database).await.map_err(failed)?;
        // An id becomes the name of a file.
        looked_at.retain(|id| SessionId::is_name(id));
        let mut failure = None;
        for id in &looked_at {
            let known = match state.known.remove(id) {
                Some(known) => Ok(known),
                None => Known::load(&self.file(id))
                    .map_err(|cause| Error::io(format!("read {}", self.file(id).display()), cause)),
            };
            let pulled = match known {
                Ok(known) => self.pull_session(database, id, known, &schema).await,
                Err(error) => Err(error),
            };
            match pulled {
                Ok(known) => drop(state.known.insert(id.clone(), known)),
                // One that fails does not hold up the others.
                Err(error) => failure = Some(error),
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        state.known.retain(|id, _| looked_at.contains(id));
        state.changed = sessions
            .into_iter()
            .map(|(id, session)| (id, session.changed))
            .collect();
        Ok(())
    }

    async fn pull_session(
        &self,
        database: &mut SqliteConnection,
        id: &str,
        mut known: Known,
        schema: &str,
    ) -> Result<Known> {
        let failed = |cause| self.failed(cause);
        let mut out = Lines {
            mirror: self,
            session: id,
            waiting: String::new(),
        };
        let print = print_of(schema.as_bytes());
        if known.schema != Some(print) {
            out.add(schema)?;
            known.schema = Some(print);
        }
        if let Some((key, row)) = rows::project(database, id).await.map_err(failed)? {
            known.take(
                PROJECTS,
                &key,
                &rows::line(rows::PROJECT, &key, None, &row),
                &mut out,
            )?;
        }
        let since = known.since.saturating_sub(SLACK_MS).max(0);
        let asked = Questions::of(database).await.map_err(failed)?;
        let mut changed = sqlx::query(AssertSqlSafe(asked.changed))
            .bind(id)
            .bind(since)
            .fetch(&mut *database);
        while let Some(row) = changed.try_next().await.map_err(failed)? {
            let get = || -> sqlx::Result<(i64, String, Option<String>, Vec<u8>)> {
                Ok((
                    row.try_get(0)?,
                    row.try_get(1)?,
                    row.try_get(2)?,
                    row.try_get(3)?,
                ))
            };
            let (place, key, role, row) = get().map_err(failed)?;
            // SQLite takes any bytes for text.
            let row = String::from_utf8_lossy(&row);
            let place = usize::try_from(place).unwrap_or(PROJECTS);
            known.take(
                place,
                &key,
                &rows::line(name_of(place), &key, role.as_deref(), &row),
                &mut out,
            )?;
        }
        drop(changed);
        if known.misses(&pairs(database, asked.counts, id).await.map_err(failed)?) {
            let present: HashSet<(i64, String)> = pairs(database, asked.keys, id)
                .await
                .map_err(failed)?
                .into_iter()
                .collect();
            known.forget(&present, &mut out)?;
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
async fn sessions(
    database: &mut SqliteConnection,
) -> sqlx::Result<Option<HashMap<String, Session>>> {
    if rows::columns(database, "session").await?.0.is_empty() {
        return Ok(None);
    }
    // Each change of a session is an event with a number; where that is not so, every session may have changed.
    let sql = match rows::columns(database, "event_sequence")
        .await?
        .0
        .is_empty()
    {
        true => "SELECT id, parent_id, time_updated, -1 FROM session",
        false => {
            "SELECT session.id, parent_id, time_updated, coalesce(event_sequence.seq, 0) FROM session \
             LEFT JOIN event_sequence ON event_sequence.aggregate_id = session.id"
        }
    };
    let found = sqlx::query(sql).fetch_all(database).await?;
    let session = |row: &sqlx::sqlite::SqliteRow| {
        Ok((
            row.try_get(0)?,
            Session {
                parent: row.try_get(1)?,
                changed: (row.try_get(2)?, row.try_get(3)?),
            },
        ))
    };
    found
        .iter()
        .map(session)
        .collect::<sqlx::Result<_>>()
        .map(Some)
}

/// The session that a person began: sub-agents have sessions of their own.
fn root(sessions: &HashMap<String, Session>, id: &str) -> String {
    let mut at = id;
    // Not for ever, whatever the rows say.
    for _ in 0..sessions.len() {
        match sessions
            .get(at)
            .and_then(|session| session.parent.as_deref())
            .filter(|parent| sessions.contains_key(*parent))
        {
            Some(parent) => at = parent,
            None => break,
        }
    }
    at.to_owned()
}

/// When the newest row of a session changed.
async fn newest(database: &mut SqliteConnection, id: &str) -> sqlx::Result<i64> {
    let sql = format!(
        "{} SELECT coalesce(max(time_updated), 0) FROM part WHERE session_id IN family",
        rows::FAMILY
    );
    sqlx::query_scalar(AssertSqlSafe(sql))
        .bind(id)
        .fetch_one(database)
        .await
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
            let Ok(named) = serde_json::from_slice::<Named<'_>>(&line) else {
                continue;
            };
            match (named.table.as_deref().and_then(place_of), named.key) {
                (Some(place), Some(key)) => {
                    let print = named.row.map_or(0, |_| print_of(&line));
                    known.rows[place].insert(key.into(), print);
                }
                _ if named.schema.is_some() => known.schema = Some(print_of(&line)),
                _ => {}
            }
        }
        if file.metadata()?.len() > whole {
            file.set_len(whole)?;
        }
        Ok(known)
    }

    /// A row as it is now: a line if it is not what the file holds already.
    fn take(&mut self, place: usize, key: &str, line: &str, out: &mut Lines<'_>) -> Result<()> {
        let print = print_of(line.as_bytes());
        if self.rows[place].insert(key.into(), print) == Some(print) {
            Ok(())
        } else {
            out.add(line)
        }
    }

    /// Whether rows are gone, given how many there are in each table.
    fn misses(&self, counts: &[(i64, i64)]) -> bool {
        counts.iter().any(|(place, count)| {
            let here = usize::try_from(*place)
                .ok()
                .and_then(|place| self.rows.get(place));
            here.is_some_and(|rows| {
                rows.values().filter(|print| **print != 0).count() as i64 != *count
            })
        })
    }

    /// Writes of the rows that are not there any more that they are gone.
    fn forget(&mut self, present: &HashSet<(i64, String)>, out: &mut Lines<'_>) -> Result<()> {
        for (place, (table, _)) in TABLES.iter().enumerate() {
            let mut gone: Vec<Box<str>> = Vec::new();
            for (key, print) in &mut self.rows[place] {
                if *print != 0 && !present.contains(&(place as i64, key.to_string())) {
                    *print = 0;
                    gone.push(key.clone());
                }
            }
            gone.sort();
            gone.iter()
                .try_for_each(|key| out.add(&rows::line(table, key, None, "null")))?;
        }
        Ok(())
    }
}

/// The fingerprint of a line; never 0, which is that of a row that is gone.
fn print_of(line: &[u8]) -> u64 {
    Digest::of(line).short().max(1)
}

/// The answer to a question of two columns, the first of them a table.
async fn pairs<T>(
    database: &mut SqliteConnection,
    sql: String,
    id: &str,
) -> sqlx::Result<Vec<(i64, T)>>
where
    T: for<'r> sqlx::Decode<'r, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
{
    let found = sqlx::query(AssertSqlSafe(sql))
        .bind(id)
        .fetch_all(database)
        .await?;
    found
        .iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .collect()
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
        if self.waiting.len() > PIECE {
            self.write()
        } else {
            Ok(())
        }
    }

    fn write(&mut self) -> Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let path = self.mirror.file(self.session);
        let append = || -> std::io::Result<()> {
            // As root: for the agent's user, as everything in its directory.
            let owner = rustix::process::geteuid()
                .is_root()
                .then(|| Disk::new(&self.mirror.data).owner())
                .transpose()?;
            Disk::new(self.mirror.directory().join("sessions")).make(owner)?;
            let mut file = OpenOptions::new()
                .append(true)
                .create(true)
                .mode(0o600)
                .open(&path)?;
            give(&file, owner)?;
            file.write_all(self.waiting.as_bytes())
        };
        append().map_err(|cause| Error::io(format!("write {}", path.display()), cause))?;
        self.waiting.clear();
        Ok(())
    }
}

fn give(file: &File, owner: Option<Owner>) -> std::io::Result<()> {
    owner.map_or(Ok(()), |owner| {
        std::os::unix::fs::fchown(file, Some(owner.uid), Some(owner.gid))
    })
}
