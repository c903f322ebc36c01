//! The row of a session while entries are recorded: read with a lock, changed in memory, written
//! once.
//!
//! Owns the columns that entries determine. Metadata has its own columns (`metadata`).

use std::collections::BTreeMap;

use serde_json::Value;
use sqlx::any::AnyRow;
use sqlx::{AnyConnection, Row};

use super::bulk::{Bulk, Column, is_postgres, number, replace_on_conflict};
use super::error::SqlError;
use super::messages::RunningTotals;
use super::rows::{
    MAX_FIELD_LEN, MAX_KEY_LEN, format_time, log_columns, read_count, read_optional_count,
    read_parsed, read_text, truncate_optional,
};
use super::{IndexOptions, metadata};
use crate::error::Result;
use crate::index::EntryRecord;
use crate::model::{LogId, SessionFacts};

/// The columns that identify a session.
const KEY: [Column; 3] = [
    Column::Text("namespace"),
    Column::Text("agent"),
    Column::Text("id"),
];

/// The columns that entries determine; the first three are the key.
const COLUMNS: [Column; 28] = [
    KEY[0],
    KEY[1],
    KEY[2],
    Column::Text("project"),
    Column::Text("cwd"),
    Column::Text("title"),
    Column::Text("first_prompt"),
    Column::Text("origin"),
    Column::Number("origin_turn"),
    Column::Text("model"),
    Column::Text("agent_version"),
    Column::Text("status"),
    Column::Text("created"),
    Column::Text("updated"),
    Column::Number("head"),
    Column::Text("writer"),
    Column::Number("raw_bytes"),
    Column::Number("stored_bytes"),
    Column::Number("messages"),
    Column::Number("turns"),
    Column::Number("input_tokens"),
    Column::Number("output_tokens"),
    Column::Number("cache_read_tokens"),
    Column::Number("cache_write_tokens"),
    Column::Number("cost"),
    Column::Number("unpriced_responses"),
    Column::Number("reported_cost"),
    Column::Number("unparsed_lines"),
];

const SELECT: &str = "sessions.namespace, sessions.agent, sessions.id, project, cwd, title, first_prompt, origin, origin_turn, model, \
     agent_version, status, created, updated, head, writer, raw_bytes, stored_bytes, messages, turns, input_tokens, output_tokens, \
     cache_read_tokens, cache_write_tokens, cost, unpriced_responses, reported_cost, unparsed_lines, closed_status, closed_raw_bytes";

/// Locks the rows in a fixed order, so that two processes cannot wait for each other. A transaction
/// of SQLite that writes is alone.
const LOCK: &str =
    " ORDER BY sessions.namespace, sessions.agent, sessions.id FOR UPDATE OF sessions";

/// The row of a session.
#[derive(Default)]
pub(super) struct SessionState {
    /// Whether the table has the row.
    is_stored: bool,
    is_changed: bool,
    status: String,
    created: String,
    updated: String,
    pub(super) head: u64,
    writer: String,
    pub(super) raw_bytes: u64,
    pub(super) stored_bytes: u64,
    pub(super) closed: Option<metadata::ClosedColumns>,
    pub(super) totals: RunningTotals,
    facts: SessionFacts,
    origin: Option<String>,
    origin_turn: Option<u64>,
}

impl SessionState {
    fn read(row: &AnyRow) -> Result<SessionState, SqlError> {
        Ok(SessionState {
            is_stored: true,
            is_changed: false,
            status: read_text(row, "status")?,
            created: read_text(row, "created")?,
            updated: read_text(row, "updated")?,
            head: read_count(row, "head")?,
            writer: read_text(row, "writer")?,
            raw_bytes: read_count(row, "raw_bytes")?,
            stored_bytes: read_count(row, "stored_bytes")?,
            closed: metadata::ClosedColumns::read(row)?,
            totals: RunningTotals::read(row)?,
            facts: SessionFacts {
                project: row.try_get("project")?,
                cwd: row.try_get("cwd")?,
                title: row.try_get("title")?,
                first_prompt: row.try_get("first_prompt")?,
                model: row.try_get("model")?,
                agent_version: row.try_get("agent_version")?,
                cost: read_optional_count(row, "reported_cost")?,
            },
            origin: row.try_get("origin")?,
            origin_turn: read_optional_count(row, "origin_turn")?,
        })
    }

    /// Forgets what a purge deletes.
    pub(super) fn clear(&mut self) {
        self.closed = None;
        self.facts.title = None;
        self.facts.first_prompt = None;
        self.origin = None;
        self.origin_turn = None;
    }

    /// Applies an entry of the main log, except for its files and messages. `added` are the raw and
    /// the stored bytes that it adds.
    pub(super) fn apply(
        &mut self,
        (record, options): (&EntryRecord, &IndexOptions),
        (added_raw_bytes, added_stored_bytes): (u64, u64),
    ) {
        let header = &record.header;
        let at = format_time(header.at);
        // A row with head 0 comes from branches. The main log determines the times, even if a
        // branch was recorded first. A log that starts over determines them again, because its
        // earlier entries may be deleted.
        let is_first = self.head == 0 || header.resets_log();
        self.updated = self.updated_at(record, &at, is_first);
        if is_first {
            let covers = header.covers.as_ref();
            self.created = covers.map_or(at, |covers| format_time(covers.first_at));
        }
        self.raw_bytes = self.raw_bytes.saturating_add(added_raw_bytes);
        self.stored_bytes = self.stored_bytes.saturating_add(added_stored_bytes);
        self.status = match header.kind.is_removal() {
            true => "removed".to_owned(),
            false => metadata::status(self.raw_bytes, self.closed.as_ref()).to_owned(),
        };
        self.head = header.seq;
        self.writer = header.writer.to_string();
        self.apply_facts(record, options);
        if let Some(fork) = &header.fork {
            self.origin = Some(fork.session.to_string());
            self.origin_turn = Some(fork.turn);
        }
        self.is_changed = true;
    }

    /// The time of the newest content. A claim changes nothing that a user sees, so it does not
    /// make a session the latest one.
    fn updated_at(&self, record: &EntryRecord, at: &str, is_first: bool) -> String {
        match record.header.written_at().map(format_time) {
            Some(written_at) if is_first || self.raw_bytes == 0 => written_at,
            Some(written_at) => written_at.max(self.updated.clone()),
            None if is_first => at.to_owned(),
            None => self.updated.clone(),
        }
    }

    /// Replaces the facts that the entry knows.
    fn apply_facts(&mut self, record: &EntryRecord, options: &IndexOptions) {
        let new = &record.transcripts.facts;
        let key = |text: &Option<String>| truncate_optional(text.as_deref(), MAX_KEY_LEN);
        let field = |text: &Option<String>| truncate_optional(text.as_deref(), MAX_FIELD_LEN);
        let text = |text: &Option<String>| field(text).filter(|_| !options.omit_text);
        let known = std::mem::take(&mut self.facts);
        let first_prompt = text(&new.first_prompt);
        self.facts = SessionFacts {
            project: key(&new.project).or(known.project),
            cwd: field(&new.cwd).or(known.cwd),
            title: text(&new.title).or(known.title),
            first_prompt: match record.transcripts.is_from_start {
                true => first_prompt,
                false => known.first_prompt.or(first_prompt),
            },
            model: field(&new.model).or(known.model),
            agent_version: field(&new.agent_version).or(known.agent_version),
            cost: new.cost.or(known.cost),
        };
    }

    fn row(&self, log: &LogId) -> Result<Vec<Value>> {
        let (namespace, agent, id) = log_columns(log);
        let optional =
            |what, value: Option<u64>| value.map(|value| number(what, value)).transpose();
        let (facts, totals) = (&self.facts, &self.totals);
        Ok(vec![
            namespace.into(),
            agent.into(),
            id.into(),
            facts.project.clone().into(),
            facts.cwd.clone().into(),
            facts.title.clone().into(),
            facts.first_prompt.clone().into(),
            self.origin.clone().into(),
            optional("turn", self.origin_turn)?.into(),
            facts.model.clone().into(),
            facts.agent_version.clone().into(),
            self.status.clone().into(),
            self.created.clone().into(),
            self.updated.clone().into(),
            number("sequence number", self.head)?,
            self.writer.clone().into(),
            number("length", self.raw_bytes)?,
            number("stored length", self.stored_bytes)?,
            number("messages", totals.messages)?,
            number("turns", totals.turns)?,
            number("tokens", totals.tokens.input)?,
            number("tokens", totals.tokens.output)?,
            number("tokens", totals.tokens.cache_read)?,
            number("tokens", totals.tokens.cache_write)?,
            number("cost", totals.cost)?,
            number("responses", totals.unpriced_responses)?,
            optional("cost", facts.cost)?.into(),
            number("lines", totals.unparsed_lines)?,
        ])
    }
}

/// Reads and locks the rows of sessions. Those without a row are missing in the result.
pub(super) async fn lock(
    connection: &mut AnyConnection,
    logs: impl Iterator<Item = &LogId>,
) -> Result<BTreeMap<LogId, SessionState>, SqlError> {
    let mut keys = Bulk::new(&KEY);
    for log in logs {
        let (namespace, agent, id) = log_columns(log);
        keys.push(vec![namespace.into(), agent.into(), id.into()]);
    }
    let lock = if is_postgres(connection) { LOCK } else { "" };
    let rows = keys
        .select_from(connection, SELECT, "sessions", lock)
        .await?;
    let read = |row: &AnyRow| {
        let log = LogId {
            namespace: read_parsed(row, "namespace")?,
            agent: read_parsed(row, "agent")?,
            name: read_parsed(row, "id")?,
        };
        Ok((log, SessionState::read(row)?))
    };
    rows.iter().map(read).collect()
}

/// Writes the changed rows. A new row that another process has inserted meanwhile is a conflict: the
/// state in memory is not based on it.
pub(super) async fn write<'a>(
    connection: &mut AnyConnection,
    sessions: impl Iterator<Item = (&'a LogId, &'a mut SessionState)>,
) -> Result<(), SqlError> {
    let (mut new, mut stored) = (Bulk::new(&COLUMNS), Bulk::new(&COLUMNS));
    for (log, session) in sessions.filter(|(_, session)| session.is_changed) {
        let rows = if session.is_stored {
            &mut stored
        } else {
            &mut new
        };
        rows.push(session.row(log)?);
        session.is_stored = true;
        session.is_changed = false;
    }
    new.insert_into(connection, "sessions", "").await?;
    let replace = replace_on_conflict(&COLUMNS, KEY.len());
    stored.insert_into(connection, "sessions", &replace).await
}
