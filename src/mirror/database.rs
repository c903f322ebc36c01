//! The interface to the agent's database. SQLite implements it; the simulation does so in memory.

use std::collections::{HashMap, HashSet};

use async_trait::async_trait;

use super::lines::SessionRows;
use crate::error::Result;

/// The state of the database files: it changes with every transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatabaseStamp(pub [Option<(u64, i64)>; 2]);

/// A session in the database.
#[derive(Debug, Clone)]
pub struct SessionInfo {
    /// The session that started it, if it belongs to a sub-agent.
    pub parent: Option<String>,
    /// Its last change.
    pub last_change: LastChange,
}

/// The last change of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastChange {
    /// The time, in milliseconds since 1970.
    pub time_ms: i64,
    /// The number of its last event; none if the database has no events.
    pub event_seq: Option<i64>,
}

/// A row of a session.
#[derive(Debug, Clone)]
pub struct MirrorRow {
    /// The index of the table.
    pub table: usize,
    /// The primary key.
    pub key: String,
    /// The role of the message that a part belongs to.
    pub role: Option<String>,
    /// The model of the message that a part belongs to.
    pub model: Option<String>,
    /// The row as JSON. The same row always has the same text.
    pub json: String,
}

/// The agent's database.
///
/// # Contract
/// - `snapshot` does not block the agent, and the agent does not block it for long.
/// - `replace_session` is one transaction: it writes all rows of the session, or none.
#[async_trait]
pub trait SessionDatabase: Send + Sync {
    /// The name of the database in messages.
    fn name(&self) -> String;

    /// The state of the database files; none if there is no database.
    fn stamp(&self) -> Option<DatabaseStamp>;

    /// Whether the agent is creating the database. A reader would make that fail.
    fn is_being_created(&self) -> bool;

    /// Starts a read transaction.
    async fn snapshot(&self) -> Result<Box<dyn DatabaseSnapshot>>;

    /// Replaces the rows of a session and its sub-agents. Creates the database if there is none.
    async fn replace_session(&self, session: &str, rows: &SessionRows) -> Result<()>;
}

/// A database at one moment. The rows of a session include those of its sub-agents.
#[async_trait]
pub trait DatabaseSnapshot: Send {
    /// All sessions by ID; none if the database has no table of sessions yet.
    async fn sessions(&mut self) -> Result<Option<HashMap<String, SessionInfo>>>;

    /// The line with the schema.
    async fn schema_line(&mut self) -> Result<String>;

    /// The project of a session.
    async fn project(&mut self, session: &str) -> Result<Option<MirrorRow>>;

    /// Passes the rows that changed at `since_ms` or later to `add`, in the order of their creation:
    /// a point between two turns is then a point between two lines.
    async fn changed_rows(
        &mut self,
        session: &str,
        since_ms: i64,
        add: &mut (dyn FnMut(MirrorRow) -> Result<()> + Send),
    ) -> Result<()>;

    /// The number of rows in each table, by table index.
    async fn row_counts(&mut self, session: &str) -> Result<Vec<(usize, usize)>>;

    /// The table index and the key of every row.
    async fn row_keys(&mut self, session: &str) -> Result<HashSet<(usize, String)>>;

    /// The time of the last change of a row, in milliseconds since 1970.
    async fn last_row_change_ms(&mut self, session: &str) -> Result<i64>;

    /// Ends the read transaction.
    async fn close(self: Box<Self>);
}
