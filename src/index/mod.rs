//! The index: a view of the bucket that a database can search.
//!
//! Owns the contract and the rows. Does not own what the rows say (they follow from entries) or catching up after an
//! outage (`upkeep`).

pub mod catalog;
pub mod sql;
pub mod words;

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
    By, Catalog, Found, Hit, MessageFilter, MessagePage, MessageRow, SearchFilter, StatsFilter,
    StatsRow, Totals,
};
pub use words::{Snippet, Words};

/// One entry of a log, as the index takes it in.
#[derive(Debug, Clone)]
pub struct EntryRecord {
    /// The log it belongs to.
    pub log: LogId,
    /// The writer whose branch it is on; none on the log itself.
    pub branch: Option<WriterId>,
    /// What the entry says of itself.
    pub header: EntryHeader,
    /// Bytes as stored.
    pub stored: u64,
    /// SHA-256 of the entry as stored.
    pub digest: Digest,
    /// What its bytes say.
    pub told: ParsedTranscripts,
}

/// What taking in a record did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordOutcome {
    /// The rows are new.
    New,
    /// It was there already; nothing changed.
    Already,
    /// Entries before it are missing: the index knows the log up to `have`. Nothing changed.
    Gap {
        /// The last number the index knows.
        have: Seq,
    },
}

/// A session (or project log) as listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SessionRow {
    /// The tenant.
    pub namespace: String,
    /// The agent.
    pub agent: String,
    /// The session's id.
    pub id: String,
    /// The agent's name for its project.
    pub project: Option<String>,
    /// The directory the agent ran in.
    pub cwd: Option<String>,
    /// Its title.
    pub title: Option<String>,
    /// The model that answered last.
    pub model: Option<String>,
    /// The agent's version.
    pub agent_version: Option<String>,
    /// `created` until it has bytes, then `active`; `completed` or `archived` if somebody said so and nobody wrote since;
    /// `removed` once it was deleted or has expired.
    pub status: String,
    /// The request it belongs to.
    pub request_id: Option<String>,
    /// How long it is kept after its last change; none: as the collector is told.
    pub ttl: Option<Ttl>,
    /// What people call it.
    pub labels: BTreeMap<String, String>,
    /// Time of the first entry.
    pub created: Timestamp,
    /// Time of the newest entry.
    pub updated: Timestamp,
    /// Number of the newest entry.
    pub head: Seq,
    /// Who wrote it.
    pub writer: String,
    /// Bytes shipped, before compression.
    pub raw_bytes: u64,
    /// Bytes stored in entries.
    pub stored_bytes: u64,
    /// What its transcripts amount to.
    #[serde(flatten)]
    pub totals: Totals,
    /// Writers that lost the session and have a branch.
    pub branches: Vec<String>,
}

/// An entry as listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EntryRow {
    /// Its number.
    pub seq: Seq,
    /// The writer whose branch it is on; none on the log itself.
    pub branch: Option<String>,
    /// `claim` or `delta`.
    pub kind: String,
    /// Who wrote it.
    pub writer: String,
    /// When.
    pub at: Timestamp,
    /// Bytes before compression.
    pub raw_bytes: u64,
    /// Bytes as stored.
    pub stored_bytes: u64,
    /// SHA-256 as stored.
    pub digest: Digest,
}

/// What failed, which attempt it was, when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// The tenant.
    pub namespace: Namespace,
    /// The agent.
    pub agent: AgentName,
    /// The session it was about, if it was about one.
    pub session: Option<String>,
    /// When.
    pub at: Timestamp,
    /// Which attempt it was; the first is 1.
    pub attempt: u32,
    /// The error, as a person reads it.
    pub message: String,
}

/// Which sessions to list. Newest change first.
#[derive(Debug, Clone)]
pub struct Filter {
    /// The tenant.
    pub namespace: Namespace,
    /// Only this agent's.
    pub agent: Option<AgentName>,
    /// Only those whose id begins so.
    pub id_prefix: Option<String>,
    /// Only those of this project.
    pub project: Option<String>,
    /// Only those in this status; none: all that are not removed.
    pub status: Option<String>,
    /// Only those of this request.
    pub request: Option<String>,
    /// Only those that have all of these labels.
    pub labels: Vec<Label>,
    /// At most so many.
    pub limit: u32,
    /// Go on behind a page.
    pub cursor: Option<String>,
}

/// One page of sessions.
#[derive(Debug, Clone, Default, Serialize)]
pub struct SessionPage {
    /// The sessions, newest change first.
    pub sessions: Vec<SessionRow>,
    /// Pass this as `cursor` for the next page.
    pub next: Option<String>,
}

/// The head of a log as the database fences it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FenceRow {
    /// The number last reserved.
    pub seq: Seq,
    /// By whom.
    pub writer: WriterId,
}

/// A database that keeps the index.
///
/// # Contract
/// For those who call:
/// - Any call may fail with `Unavailable` at any time and for ever; nothing that matters rests on it (except a fence,
///   where the store cannot).
/// - `record` is idempotent: the same record any number of times, also at once from several machines, gives the rows
///   of one. Records of one log go in in order.
///
/// For those who implement:
/// - `record` is one transaction. A main-log record whose `header.follows()` is not the head that the index knows
///   answers `Gap` (or `Already`, if its number is there) and changes nothing, unless it begins anew. A branch record needs
///   no order.
/// - Wrong password, unknown database and the like are `Usage` with a hint; what may pass is `Unavailable`.
/// - No error and no `address` holds a secret.
#[async_trait]
pub trait Index: Send + Sync + 'static {
    /// Takes in one entry.
    async fn record(&self, record: &EntryRecord) -> Result<RecordOutcome>;

    /// The checkpoints of a log that have a name: these and no others.
    async fn name_points(&self, log: &LogId, named: &[(String, Checkpoint)]) -> Result<()>;

    /// Takes in what people said of a session, in the object of that number. Nothing changes if the index does not know the
    /// session, or has heard a later word.
    async fn say(&self, log: &LogId, number: u64, wishes: &SessionMetadata) -> Result<()>;

    /// One session.
    async fn session(&self, log: &LogId) -> Result<Option<SessionRow>>;

    /// Sessions, newest change first, a page at a time. Project logs are not listed.
    async fn sessions(&self, filter: &Filter) -> Result<SessionPage>;

    /// The files at a log's head, by path.
    async fn files(&self, log: &LogId) -> Result<Vec<PathState>>;

    /// The entries of a log and its branches: the log first, then branches by writer, each by number.
    async fn entries(&self, log: &LogId) -> Result<Vec<EntryRow>>;

    /// Every log the index knows of an agent, project logs too.
    async fn logs(&self, namespace: &Namespace, agent: &AgentName) -> Result<Vec<LogId>>;

    /// Forgets all rows of a log (not its fence).
    async fn forget(&self, log: &LogId) -> Result<()>;

    /// Keeps a failure; the oldest beyond 1000 of a namespace go.
    async fn note_failure(&self, failure: &Failure) -> Result<()>;

    /// The newest failures first.
    async fn failures(&self, namespace: &Namespace, limit: u32) -> Result<Vec<Failure>>;

    /// The fence of a log.
    async fn fence(&self, log: &LogId) -> Result<Option<FenceRow>>;

    /// Moves the fence from exactly `from` to `to`; false if it was not at `from`.
    async fn move_fence(&self, log: &LogId, from: Option<&FenceRow>, to: &FenceRow)
    -> Result<bool>;

    /// Answers if the database does.
    async fn ping(&self) -> Result<()>;

    /// Where it is, for people; no secret in it.
    fn address(&self) -> String;
}
