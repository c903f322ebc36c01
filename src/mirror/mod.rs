//! The mirror of OpenCode's database: one file per session, one line per version of a row.
//!
//! Owns the files and their update from the database, and the reverse after a restore. Does not own
//! the database (`database`, `sqlite`) or the upload of the files (`capture`).

pub mod database;
pub mod files;
pub mod lines;
mod mirrored_rows;
pub mod sqlite;
pub mod tables;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};

use tokio::sync::Mutex;

use self::database::{DatabaseSnapshot, DatabaseStamp, LastChange, SessionDatabase, SessionInfo};
use self::files::{DiskFiles, MirrorFiles};
use self::lines::SessionRows;
use self::mirrored_rows::{LineWriter, MirroredRows};
use self::sqlite::SqliteDatabase;
use crate::error::{Error, ErrorContext, Result};
use crate::model::SessionId;
use crate::sys::Disk;
use crate::sys::mutation::{Mutation, is_active};

/// The directory of the mirror, in the agent's directory.
const DIRECTORY: &str = ".sessiond-mirror";

/// Rows that changed this long before the last known change are read again: a row gets its time
/// before its transaction is committed.
const COMMIT_DELAY_MS: i64 = 10_000;

/// A session is active if it changed at most this long before the newest one. Not every change of a
/// row updates the session, so active sessions are read on every change of the database.
const ACTIVE_PERIOD_MS: i64 = 60 * 60 * 1000;

/// Which sessions to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdateMode {
    /// None, if the database files have not changed since the last update.
    IfChanged,
    /// All active sessions; on the first update, all sessions.
    Always,
    /// As `Always`, and every row of them, whatever its time says.
    Complete,
}

/// The mirror of a database.
pub struct Mirror {
    directory: Disk,
    database: Arc<dyn SessionDatabase>,
    files: Arc<dyn MirrorFiles>,
    state: Mutex<State>,
    /// The error of the last update.
    failure: std::sync::Mutex<Option<String>>,
}

#[derive(Default)]
struct State {
    /// The state of the database files before the last update.
    stamp: Option<DatabaseStamp>,
    /// The last change of each session at the last update.
    last_changes: HashMap<String, LastChange>,
    /// The rows of active sessions.
    mirrored: HashMap<String, MirroredRows>,
}

impl Mirror {
    /// The mirror of the database in OpenCode's directory.
    pub fn open(data: &Disk) -> Mirror {
        let directory = data.subdirectory(DIRECTORY);
        let files = DiskFiles {
            directory: directory.clone(),
        };
        let database = SqliteDatabase::new(data.clone());
        Mirror::new(directory, Arc::new(database), Arc::new(files))
    }

    /// A mirror of any database in any files.
    pub fn new(
        directory: Disk,
        database: Arc<dyn SessionDatabase>,
        files: Arc<dyn MirrorFiles>,
    ) -> Mirror {
        Mirror {
            directory,
            database,
            files,
            state: Mutex::default(),
            failure: std::sync::Mutex::default(),
        }
    }

    /// The directory of the files, which sessiond streams.
    pub fn directory(&self) -> Disk {
        self.directory.clone()
    }

    /// Checks that the database is readable, and returns the number of its sessions.
    pub async fn count_sessions(&self) -> Result<usize> {
        if self.database.stamp().is_none() {
            return Ok(0);
        }
        let mut snapshot = self.database.snapshot().await?;
        let sessions = snapshot.sessions().await;
        snapshot.close().await;
        match sessions? {
            Some(sessions) => Ok(sessions.len()),
            None => Err(Error::unavailable("the database has no table \"session\"")
                .context(format!("read {}", self.database.name()))),
        }
    }

    /// Whether the database has a session.
    pub async fn has_session(&self, session: &str) -> bool {
        let Ok(mut snapshot) = self.database.snapshot().await else {
            return false;
        };
        let sessions = snapshot.sessions().await;
        snapshot.close().await;
        matches!(sessions, Ok(Some(sessions)) if sessions.contains_key(session))
    }

    /// The error of the last update, if it failed.
    pub fn failure(&self) -> Option<String> {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Writes the changes of the database to the files.
    pub async fn update_files(&self, mode: UpdateMode) -> Result<()> {
        let result = self.try_update_files(mode).await;
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) =
            result.as_ref().err().map(ToString::to_string);
        result
    }

    async fn try_update_files(&self, mode: UpdateMode) -> Result<()> {
        let mut state = self.state.lock().await;
        let Some(stamp) = self.database.stamp() else {
            return Ok(());
        };
        if mode == UpdateMode::IfChanged && state.stamp.as_ref() == Some(&stamp) {
            return Ok(());
        }
        // When its creation ends, the database changes again.
        if self.database.is_being_created() {
            return Ok(());
        }
        let mut snapshot = self.database.snapshot().await?;
        let result = self.update_from(&mut *snapshot, &mut state, mode).await;
        snapshot.close().await;
        result?;
        state.stamp = Some(stamp);
        Ok(())
    }

    async fn update_from(
        &self,
        snapshot: &mut dyn DatabaseSnapshot,
        state: &mut State,
        mode: UpdateMode,
    ) -> Result<()> {
        let Some(sessions) = snapshot.sessions().await? else {
            return Ok(());
        };
        let selected = select_sessions(&sessions, &state.last_changes);
        let schema = snapshot.schema_line().await?;
        let mut failure = None;
        for id in &selected {
            let mirrored = match state.mirrored.remove(id) {
                Some(mirrored) => Ok(mirrored),
                None => MirroredRows::load(&*self.files, id),
            };
            let updated = match mirrored {
                Ok(mirrored) => {
                    self.update_session(snapshot, id, mirrored, &schema, mode)
                        .await
                }
                Err(error) => Err(error),
            };
            match updated {
                Ok(mirrored) => drop(state.mirrored.insert(id.clone(), mirrored)),
                // A failure of one session does not stop the others.
                Err(error) => failure = Some(error),
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        state.mirrored.retain(|id, _| selected.contains(id));
        state.last_changes = sessions
            .into_iter()
            .map(|(id, session)| (id, session.last_change))
            .collect();
        Ok(())
    }

    async fn update_session(
        &self,
        snapshot: &mut dyn DatabaseSnapshot,
        id: &str,
        mut mirrored: MirroredRows,
        schema: &str,
        mode: UpdateMode,
    ) -> Result<MirroredRows> {
        let mut writer = LineWriter::new(&*self.files, id);
        mirrored.update_schema(schema, &mut writer)?;
        if let Some(project) = snapshot.project(id).await? {
            mirrored.update(&project, &mut writer)?;
        }
        let since_ms = match mode {
            UpdateMode::Complete => 0,
            UpdateMode::IfChanged | UpdateMode::Always => mirrored
                .last_change_ms
                .saturating_sub(COMMIT_DELAY_MS)
                .max(0),
        };
        snapshot
            .changed_rows(id, since_ms, &mut |row| mirrored.update(&row, &mut writer))
            .await?;
        let counts = snapshot.row_counts(id).await?;
        if !mirrored.has_counts(&counts) && since_ms > 0 {
            // A row can be new and have an old time: an imported session, or a clock that was set
            // back.
            snapshot
                .changed_rows(id, 0, &mut |row| mirrored.update(&row, &mut writer))
                .await?;
        }
        if !mirrored.has_counts(&counts) && !is_active(Mutation::ForgetDeletedRows) {
            let present = snapshot.row_keys(id).await?;
            mirrored.delete_missing(&present, &mut writer)?;
        }
        writer.flush()?;
        let last_change_ms = snapshot.last_row_change_ms(id).await?;
        mirrored.last_change_ms = mirrored.last_change_ms.max(last_change_ms);
        Ok(mirrored)
    }

    /// Writes the file of a restored session to the database, before the agent starts. Creates the
    /// database if there is none.
    pub async fn update_database(&self, session: &str) -> Result<()> {
        let name = self.files.name(session);
        let Some(bytes) = self
            .read_file(session)
            .map_err(|cause| Error::io(format!("read {name}"), cause))?
        else {
            return Ok(());
        };
        let rows = SessionRows::parse(session, &bytes).with_context(|| format!("read {name}"))?;
        let written = self.database.replace_session(session, &rows).await;
        let mut state = self.state.lock().await;
        state.stamp = None;
        state.last_changes.remove(session);
        state.mirrored.remove(session);
        drop(state);
        written.with_context(|| format!("write session {session} to {}", self.database.name()))
    }

    fn read_file(&self, session: &str) -> std::io::Result<Option<Vec<u8>>> {
        let Some(file) = self.files.open(session)? else {
            return Ok(None);
        };
        let mut bytes = vec![0; file.stat()?.size as usize];
        let mut filled = 0;
        while filled < bytes.len() {
            match file.read_at(&mut bytes[filled..], filled as u64)? {
                0 => break,
                count => filled += count,
            }
        }
        bytes.truncate(filled);
        Ok(Some(bytes))
    }
}

/// Selects the sessions to read: those that changed and those that are active. A sub-agent's session
/// selects the session that started it.
fn select_sessions(
    sessions: &HashMap<String, SessionInfo>,
    last_changes: &HashMap<String, LastChange>,
) -> BTreeSet<String> {
    let active_since = sessions
        .values()
        .map(|session| session.last_change.time_ms)
        .max()
        .unwrap_or(0)
        .saturating_sub(ACTIVE_PERIOD_MS);
    let is_selected = |id: &str, session: &SessionInfo| {
        last_changes.is_empty()
            || session.last_change.event_seq.is_none()
            || session.last_change.time_ms >= active_since
            || last_changes.get(id) != Some(&session.last_change)
    };
    sessions
        .iter()
        .filter(|(id, session)| is_selected(id, session))
        .map(|(id, _)| top_level_session(sessions, id))
        // The ID becomes a file name.
        .filter(|id| SessionId::is_file_name(id))
        .collect()
}

/// The session that started a sub-agent's session, through all levels.
fn top_level_session(sessions: &HashMap<String, SessionInfo>, id: &str) -> String {
    let mut current = id;
    // The bound ends a cycle of parents.
    for _ in 0..sessions.len() {
        let parent = sessions
            .get(current)
            .and_then(|session| session.parent.as_deref())
            .filter(|parent| sessions.contains_key(*parent));
        match parent {
            Some(parent) => current = parent,
            None => break,
        }
    }
    current.to_owned()
}
