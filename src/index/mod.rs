//! The index: a database that lists and searches sessions.
//!
//! Owns the contract and the row types. The rows are derived from the store. Does not own the
//! entries that they are derived from (`log`) or catching up after an outage (`upkeep`).

pub mod catalog;
pub mod fence;
pub mod search_query;
pub mod sql;

use std::collections::BTreeMap;

use async_trait::async_trait;
use jiff::Timestamp;
use serde::Serialize;

use crate::error::Result;
use crate::model::{
    AgentName, Checkpoint, Digest, EntryHeader, Label, LogId, Namespace, ParsedTranscripts,
    PathState, Seq, SessionMetadata, Ttl, WriterId,
};

pub use catalog::{
    Catalog, GroupBy, MessageFilter, MessagePage, MessageRow, SearchFilter, SearchHit,
    SearchResults, SessionTotals, StatsFilter, StatsRow,
};
pub use fence::{FenceRow, FenceTable};
pub use search_query::SearchQuery;

/// One entry of a log, as input for the index.
#[derive(Debug, Clone)]
pub struct EntryRecord {
    /// The log that the entry belongs to.
    pub log: LogId,
    /// The writer that owns the branch; none for the main log.
    pub branch: Option<WriterId>,
    /// The header of the entry.
    pub header: EntryHeader,
    /// Size of the stored object.
    pub stored_bytes: u64,
    /// SHA-256 of the stored object.
    pub digest: Digest,
    /// The messages and facts parsed from its transcript parts.
    pub transcripts: ParsedTranscripts,
}

/// The effect of recording an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordOutcome {
    /// The index has changed.
    Recorded,
    /// The index had this entry already. Nothing changed.
    AlreadyRecorded,
    /// Entries between the indexed head and this one are missing. Nothing changed.
    Gap {
        /// The head of the log in the index.
        head: Seq,
    },
}

impl RecordOutcome {
    /// Whether entries are missing.
    pub fn is_gap(&self) -> bool {
        matches!(self, RecordOutcome::Gap { .. })
    }
}

/// A row of the session list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct SessionRow {
    /// The namespace.
    pub namespace: String,
    /// The agent.
    pub agent: String,
    /// The session ID, or `@` and a project ID.
    pub id: String,
    /// The agent's name for the project.
    pub project: Option<String>,
    /// The working directory of the agent.
    pub cwd: Option<String>,
    /// The agent's title, or the beginning of the first prompt.
    pub title: Option<String>,
    /// Of a fork: the session it was forked from.
    pub origin: Option<String>,
    /// Of a fork: the number of turns it started with.
    pub origin_turn: Option<u64>,
    /// The model of the last response.
    pub model: Option<String>,
    /// The agent's version.
    pub agent_version: Option<String>,
    /// `created` while the session is empty, then `active`; `completed` or `archived` while it is
    /// closed; `removed` after it was deleted or has expired.
    pub status: String,
    /// The request ID.
    pub request_id: Option<String>,
    /// How long to keep the session after its last change; none for the default of `gc`.
    pub ttl: Option<Ttl>,
    /// The labels.
    pub labels: BTreeMap<String, String>,
    /// The time of the first entry.
    pub created: Timestamp,
    /// The time of the newest entry that wrote content; of the first entry if none did.
    pub updated: Timestamp,
    /// The highest `seq`.
    pub head: Seq,
    /// The writer of the newest entry.
    pub writer: String,
    /// Bytes before compression.
    pub raw_bytes: u64,
    /// Bytes of the stored entries.
    pub stored_bytes: u64,
    /// Totals of the transcripts.
    #[serde(flatten)]
    pub totals: SessionTotals,
    /// The fenced writers that have a branch.
    pub branches: Vec<String>,
}

/// A row of the entry list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EntryRow {
    /// The sequence number.
    pub seq: Seq,
    /// The writer that owns the branch; none for the main log.
    pub branch: Option<String>,
    /// The kind, such as `claim` or `delta`.
    pub kind: String,
    /// The writer of the entry.
    pub writer: String,
    /// The time of the entry.
    pub at: Timestamp,
    /// Bytes before compression.
    pub raw_bytes: u64,
    /// Size of the stored object.
    pub stored_bytes: u64,
    /// SHA-256 of the stored object.
    pub digest: Digest,
}

/// A failed operation of a daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// The namespace.
    pub namespace: Namespace,
    /// The agent.
    pub agent: AgentName,
    /// The session that the operation was for, if it was for one.
    pub session: Option<String>,
    /// The time of the failure.
    pub at: Timestamp,
    /// The number of the attempt; the first is 1.
    pub attempt: u32,
    /// The error message.
    pub message: String,
}

/// Selects sessions for a list. The most recently updated come first.
#[derive(Debug, Clone)]
pub struct SessionFilter {
    /// The namespace.
    pub namespace: Namespace,
    /// Only sessions of this agent.
    pub agent: Option<AgentName>,
    /// Only sessions whose ID starts with this text.
    pub id_prefix: Option<String>,
    /// Only sessions of this project.
    pub project: Option<String>,
    /// Only sessions with this status; none for all that are not removed.
    pub status: Option<String>,
    /// Only sessions with this request ID.
    pub request: Option<String>,
    /// Only sessions that have all of these labels.
    pub labels: Vec<Label>,
    /// Only sessions whose last response has this model.
    pub model: Option<String>,
    /// Only sessions updated at or after this time.
    pub since: Option<Timestamp>,
    /// Only sessions updated before this time.
    pub until: Option<Timestamp>,
    /// Only sessions whose title or first prompt contains this text. ASCII letters match in both
    /// cases.
    pub title: Option<String>,
    /// Maximum number of sessions in the page; at most 1000.
    pub limit: u32,
    /// The `next` value of the previous page; none for the first page.
    pub cursor: Option<String>,
}

/// One page of sessions.
#[derive(Debug, Clone, Default, Serialize, schemars::JsonSchema)]
pub struct SessionPage {
    /// The sessions, most recently updated first.
    pub sessions: Vec<SessionRow>,
    /// The `cursor` of the next page; none for the last page.
    pub next: Option<String>,
}

/// A database that holds the index.
///
/// # Contract
/// For callers:
/// - Any call may fail with `Unavailable`, at any time and for any length of time. Streaming and
///   restoring by ID must work without the index.
/// - `record` and `record_all` are idempotent: recording the same entry several times, also concurrently from several
///   machines, has the effect of recording it once. Callers record the entries of one log in order.
///
/// For implementers:
/// - `record` is one transaction. If `header.predecessor()` of a main-log record is not the indexed
///   head, `record` returns `Gap` (or `AlreadyRecorded` if it has that `seq`) and changes nothing,
///   unless the log starts over with this entry. Branch records may arrive in any order.
/// - `record_all` has the effect of recording the entries one by one, and is one transaction if no
///   outcome is a gap. The number of its statements does not depend on the number of plain entries.
/// - A wrong password, an unknown database and similar mistakes are `Usage` errors with a hint.
///   Errors that a retry can fix are `Unavailable`.
/// - No error and no `address` contains a secret.
#[async_trait]
pub trait Index: Send + Sync + 'static {
    /// Connects, so that the next call does not wait for it.
    async fn connect(&self) -> Result<()>;

    /// Applies one entry to the rows.
    async fn record(&self, record: &EntryRecord) -> Result<RecordOutcome>;

    /// Applies entries to the rows; returns the outcome of each. Those of one log are in order.
    async fn record_all(&self, records: &[EntryRecord]) -> Result<Vec<RecordOutcome>>;

    /// Replaces all named checkpoints of a log.
    async fn replace_named_checkpoints(
        &self,
        log: &LogId,
        named: &[(String, Checkpoint)],
    ) -> Result<()>;

    /// Sets the metadata of a session to this version. Does nothing if the index does not have the
    /// session or has a newer version.
    async fn set_metadata(
        &self,
        log: &LogId,
        version: u64,
        metadata: &SessionMetadata,
    ) -> Result<()>;

    /// Returns one session.
    async fn session(&self, log: &LogId) -> Result<Option<SessionRow>>;

    /// Returns one page of sessions, most recently updated first, without project logs.
    async fn sessions(&self, filter: &SessionFilter) -> Result<SessionPage>;

    /// Returns the files at the head of a log, ordered by path.
    #[cfg_attr(not(debug_assertions), expect(dead_code, reason = "only tests use it"))]
    async fn files(&self, log: &LogId) -> Result<Vec<PathState>>;

    /// Returns the entries of the main log by `seq`, then those of each branch.
    async fn entries(&self, log: &LogId) -> Result<Vec<EntryRow>>;

    /// Returns the newest entries of the main log, newest first.
    async fn newest_entries(&self, log: &LogId, limit: u32) -> Result<Vec<EntryRow>>;

    /// Returns all indexed logs of an agent, including project logs.
    async fn logs(&self, namespace: &Namespace, agent: &AgentName) -> Result<Vec<LogId>>;

    /// Deletes all rows of a log, except its fence.
    async fn delete_log(&self, log: &LogId) -> Result<()>;

    /// Adds a failure and deletes the oldest ones of its namespace beyond 1000.
    async fn record_failure(&self, failure: &Failure) -> Result<()>;

    /// Returns failures, newest first.
    async fn failures(&self, namespace: &Namespace, limit: u32) -> Result<Vec<Failure>>;

    /// Checks that the database responds and has the schema.
    async fn ping(&self) -> Result<()>;

    /// Returns the address for messages, without secrets.
    fn address(&self) -> String;
}
