//! Message rows from the parts of an entry.
//!
//! Owns the order of a conversation and the totals. The rows depend only on the files at the head,
//! not on how the log splits them into entries.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use sqlx::any::AnyRow;
use sqlx::{AnyConnection, Row};

use super::bulk::{Bulk, Column, is_postgres, number};
use super::error::SqlError;
use super::rows::{
    MAX_KEY_LEN, format_time, log_columns, read_count, read_parsed, read_text, read_tokens,
    to_bigint, truncate, truncate_optional,
};
use super::{IndexOptions, message_texts};
use crate::error::Result;
use crate::index::EntryRecord;
use crate::model::{Digest, LocatedMessage, LogId, Message, Part, Prices, RelPath, Tokens};

const COLUMNS: [Column; 20] = [
    Column::Text("namespace"),
    Column::Text("agent"),
    Column::Text("session"),
    Column::Number("position"),
    Column::Text("file"),
    Column::Number("start"),
    Column::Number("len"),
    Column::Text("message_id"),
    Column::Text("parent_id"),
    Column::Text("role"),
    Column::Text("kind"),
    Column::Text("at"),
    Column::Text("model"),
    Column::Text("response_id"),
    Column::Number("input_tokens"),
    Column::Number("output_tokens"),
    Column::Number("cache_read_tokens"),
    Column::Number("cache_write_tokens"),
    Column::Number("cost"),
    Column::Text("sub_agent"),
];

const FILE_KEY: [Column; 4] = [
    Column::Text("namespace"),
    Column::Text("agent"),
    Column::Text("session"),
    Column::Text("path_sha256"),
];

const RESPONSE_KEY: [Column; 4] = [
    Column::Text("namespace"),
    Column::Text("agent"),
    Column::Text("session"),
    Column::Text("response_id"),
];

const SELECT_FILE: &str = "files.namespace, files.agent, files.session, files.path_sha256, len, partial_line_bytes, position, \
     unparsed_lines";

const SELECT_USAGE: &str = "messages.namespace, messages.agent, messages.session, messages.response_id, input_tokens, \
     output_tokens, cache_read_tokens, cache_write_tokens, cost";

/// Deletes the messages of a file from an offset on.
const DELETE_FROM_OFFSET: [&str; 2] = [
    "DELETE FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $4 AND start >= $5",
    "DELETE FROM message_texts WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $4 AND start >= $5",
];

const UPDATE_USAGE: &str = "UPDATE messages SET input_tokens = $5, output_tokens = $6, cache_read_tokens = $7, cache_write_tokens = $8, \
     cost = $9 WHERE namespace = $1 AND agent = $2 AND session = $3 AND response_id = $4 AND input_tokens IS NOT NULL";

const SELECT_LAST_POSITION: &str = "SELECT position FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $4 \
     ORDER BY start DESC LIMIT 1";

const RENAME_FILE: [&str; 4] = [
    "DELETE FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $5 AND $4 <> ''",
    "DELETE FROM message_texts WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $5 AND $4 <> ''",
    "UPDATE messages SET file = $5 WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $4",
    "UPDATE message_texts SET file = $5 WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $4",
];

const SELECT_TOTALS: &str = "SELECT COUNT(*) AS messages, CAST(COALESCE(SUM(input_tokens), 0) AS BIGINT) AS input_tokens, \
     CAST(COALESCE(SUM(output_tokens), 0) AS BIGINT) AS output_tokens, \
     CAST(COALESCE(SUM(cache_read_tokens), 0) AS BIGINT) AS cache_read_tokens, \
     CAST(COALESCE(SUM(cache_write_tokens), 0) AS BIGINT) AS cache_write_tokens, \
     CAST(COALESCE(SUM(cost), 0) AS BIGINT) AS cost, \
     CAST(COALESCE(SUM(CASE WHEN input_tokens IS NOT NULL AND cost IS NULL THEN 1 ELSE 0 END), 0) AS BIGINT) \
     AS unpriced_responses, \
     CAST((SELECT COALESCE(SUM(unparsed_lines), 0) FROM files WHERE namespace = $1 AND agent = $2 AND session = $3) AS BIGINT) \
     AS unparsed_lines, \
     CAST(0 AS BIGINT) AS turns FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3";

/// The totals of a session as its row stores them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RunningTotals {
    pub messages: u64,
    pub turns: u64,
    pub tokens: Tokens,
    pub cost: u64,
    pub unpriced_responses: u64,
    pub unparsed_lines: u64,
}

impl RunningTotals {
    pub(super) fn read(row: &AnyRow) -> Result<RunningTotals, SqlError> {
        Ok(RunningTotals {
            messages: read_count(row, "messages")?,
            turns: read_count(row, "turns")?,
            tokens: read_tokens(row)?,
            cost: read_count(row, "cost")?,
            unpriced_responses: read_count(row, "unpriced_responses")?,
            unparsed_lines: read_count(row, "unparsed_lines")?,
        })
    }
}

/// The state of parsing one transcript.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ParseState {
    /// Bytes after the last newline.
    pub partial_line_bytes: u64,
    /// Position of the last message.
    pub position: i64,
    /// Number of lines that could not be parsed.
    pub unparsed_lines: u64,
}

/// What the index knows of a log, as far as the entries to record need it.
#[derive(Default)]
pub(super) struct Known {
    /// The files, by the SHA-256 of their path.
    pub files: BTreeMap<String, FileState>,
    /// The usage of responses.
    usage: BTreeMap<String, ResponseUsage>,
}

/// The indexed part of a file.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FileState {
    /// Its length.
    pub len: u64,
    /// The state of parsing it.
    pub parse: ParseState,
}

/// The SHA-256 of a path.
pub(super) fn path_sha256(path: &RelPath) -> String {
    Digest::of(path.as_str().as_bytes()).to_string()
}

/// Reads what the index knows of the files and responses of these records.
pub(super) async fn load(
    connection: &mut AnyConnection,
    records: &[&EntryRecord],
    options: &IndexOptions,
) -> Result<BTreeMap<LogId, Known>, SqlError> {
    let mut known: BTreeMap<LogId, Known> = BTreeMap::new();
    let (mut files, mut responses) = (BTreeSet::new(), BTreeSet::new());
    for record in records {
        known.entry(record.log.clone()).or_default();
        let spans = &record.transcripts.spans;
        let parsed = record.header.parts.iter();
        let parsed = parsed.filter(|part| spans.contains_key(&part.path));
        files.extend(parsed.map(|part| (&record.log, path_sha256(&part.path))));
        let usage = record.transcripts.messages.iter();
        let usage = usage.filter_map(|located| response_usage(&located.message, options));
        responses.extend(usage.map(|(response, _)| (&record.log, response)));
    }
    for row in select(connection, &FILE_KEY, files, SELECT_FILE, "files", "").await? {
        let state = FileState {
            len: read_count(&row, "len")?,
            parse: ParseState {
                partial_line_bytes: read_count(&row, "partial_line_bytes")?,
                position: row.try_get("position")?,
                unparsed_lines: read_count(&row, "unparsed_lines")?,
            },
        };
        let files = &mut known.entry(read_log(&row)?).or_default().files;
        files.insert(read_text(&row, "path_sha256")?, state);
    }
    let with_usage = " AND messages.input_tokens IS NOT NULL";
    for row in select(
        connection,
        &RESPONSE_KEY,
        responses,
        SELECT_USAGE,
        "messages",
        with_usage,
    )
    .await?
    {
        let cost: Option<i64> = row.try_get("cost")?;
        let usage = ResponseUsage {
            tokens: read_tokens(&row)?,
            cost: cost.and_then(|cost| u64::try_from(cost).ok()),
        };
        let responses = &mut known.entry(read_log(&row)?).or_default().usage;
        responses.insert(read_text(&row, "response_id")?, usage);
    }
    Ok(known)
}

/// Selects the rows with these keys.
async fn select(
    connection: &mut AnyConnection,
    columns: &'static [Column],
    keys: BTreeSet<(&LogId, String)>,
    select: &str,
    table: &str,
    suffix: &str,
) -> Result<Vec<AnyRow>, SqlError> {
    let mut bulk = Bulk::new(columns);
    for (log, key) in keys {
        let (namespace, agent, id) = log_columns(log);
        bulk.push(vec![namespace.into(), agent.into(), id.into(), key.into()]);
    }
    bulk.select_from(connection, select, table, suffix).await
}

fn read_log(row: &AnyRow) -> Result<LogId, SqlError> {
    Ok(LogId {
        namespace: read_parsed(row, "namespace")?,
        agent: read_parsed(row, "agent")?,
        name: read_parsed(row, "session")?,
    })
}

/// New rows of messages and their texts, and corrected rows, before they are written.
pub(super) struct NewMessages {
    messages: Bulk,
    texts: Bulk,
    corrections: BTreeMap<(LogId, String), ResponseUsage>,
    is_postgres: bool,
}

impl NewMessages {
    pub(super) fn new(connection: &AnyConnection) -> NewMessages {
        let is_postgres = is_postgres(connection);
        NewMessages {
            messages: Bulk::new(&COLUMNS),
            texts: message_texts::no_rows(is_postgres),
            corrections: BTreeMap::new(),
            is_postgres,
        }
    }

    /// Writes all rows.
    pub(super) async fn write(&mut self, connection: &mut AnyConnection) -> Result<(), SqlError> {
        self.write_inserts(connection).await?;
        for ((log, response), usage) in std::mem::take(&mut self.corrections) {
            let (namespace, agent, id) = log_columns(&log);
            let mut update = sqlx::query(UPDATE_USAGE)
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .bind(response);
            for number in usage.columns()? {
                update = update.bind(number);
            }
            update.execute(&mut *connection).await?;
        }
        Ok(())
    }

    async fn write_inserts(&mut self, connection: &mut AnyConnection) -> Result<(), SqlError> {
        self.messages
            .insert_into(connection, "messages", "")
            .await?;
        self.texts
            .insert_into(connection, "message_texts", "")
            .await
    }

    /// Adds the messages of one part of an entry; returns the state of parsing its file. The caller
    /// has deleted the rows that the part replaces.
    pub(super) async fn add_part(
        &mut self,
        connection: &mut AnyConnection,
        (record, options): (&EntryRecord, &IndexOptions),
        part: &Part,
        known: &mut Known,
        totals: &mut RunningTotals,
    ) -> Result<ParseState, SqlError> {
        let Some(span) = record.transcripts.spans.get(&part.path) else {
            return Ok(ParseState::default());
        };
        let file = path_sha256(&part.path);
        let mut state = known.files.get(&file).copied().unwrap_or_default().parse;
        let messages = record.transcripts.messages.iter();
        let messages: Vec<&LocatedMessage> = messages
            .filter(|located| located.path == part.path)
            .collect();
        let mut usage = self.update_usage((record, options), &messages, known, totals);
        for located in messages {
            let response = truncate_optional(located.message.response_id.as_deref(), MAX_KEY_LEN);
            let counted = match &response {
                Some(response) => usage.remove(response),
                None => ResponseUsage::of_message(&located.message, &options.prices),
            };
            state.position = (located.message.at)
                .map_or(0, jiff::Timestamp::as_microsecond)
                .max(state.position.saturating_add(1));
            totals.messages += 1;
            if let Some(usage) = counted {
                usage.add_to(totals);
            }
            let row = message_row(
                &record.log,
                (&file, state.position),
                located,
                response,
                counted,
            )?;
            self.messages.push(row);
            if options.index_text
                && let Some(row) =
                    message_texts::row(&record.log, &file, located, self.is_postgres)?
            {
                self.texts.push(row);
            }
            if self.messages.is_full() || self.texts.is_full() {
                self.write_inserts(connection).await?;
            }
        }
        let unparsed_lines = record.transcripts.unparsed_lines.get(&part.path);
        let unparsed_lines = unparsed_lines.copied().unwrap_or(0);
        state.unparsed_lines += unparsed_lines;
        totals.unparsed_lines += unparsed_lines;
        state.partial_line_bytes = span.partial_line_bytes;
        Ok(state)
    }

    /// Corrects the usage of known responses, and returns the usage of the others, which are known
    /// from now on. Every message of a response repeats its usage; the last complete one is correct,
    /// and is counted once.
    fn update_usage(
        &mut self,
        (record, options): (&EntryRecord, &IndexOptions),
        messages: &[&LocatedMessage],
        known: &mut Known,
        totals: &mut RunningTotals,
    ) -> BTreeMap<String, ResponseUsage> {
        let mut usage: BTreeMap<String, (ResponseUsage, bool)> = BTreeMap::new();
        for message in messages.iter().map(|located| &located.message) {
            let Some((response, now)) = response_usage(message, options) else {
                continue;
            };
            let latest = usage.entry(response).or_insert((now, message.is_complete));
            if message.is_complete {
                *latest = (now, true);
            }
        }
        let mut new = BTreeMap::new();
        for (response, (now, is_complete)) in usage {
            let Some(before) = known.usage.get_mut(&response) else {
                known.usage.insert(response.clone(), now);
                new.insert(response, now);
                continue;
            };
            if is_complete && now != *before {
                before.remove_from(totals);
                now.add_to(totals);
                *before = now;
                self.corrections.insert((record.log.clone(), response), now);
            }
        }
        new
    }
}

/// The usage of the response that a message belongs to.
fn response_usage(message: &Message, options: &IndexOptions) -> Option<(String, ResponseUsage)> {
    let response = truncate_optional(message.response_id.as_deref(), MAX_KEY_LEN)?;
    Some((
        response,
        ResponseUsage::of_message(message, &options.prices)?,
    ))
}

fn message_row(
    log: &LogId,
    (file, position): (&str, i64),
    located: &LocatedMessage,
    response: Option<String>,
    usage: Option<ResponseUsage>,
) -> Result<Vec<Value>> {
    let (namespace, agent, id) = log_columns(log);
    let message = &located.message;
    let key = |text: Option<&str>| truncate_optional(text, MAX_KEY_LEN);
    let mut row = vec![
        namespace.into(),
        agent.into(),
        id.into(),
        position.into(),
        file.into(),
        number("offset", located.start)?,
        number("length", located.len)?,
        key(message.message_id.as_deref()).into(),
        key(message.parent_id.as_deref()).into(),
        message.role.as_str().into(),
        truncate(&message.kind, MAX_KEY_LEN).into(),
        message.at.map(format_time).into(),
        key(message.model.as_deref()).into(),
        response.into(),
    ];
    let usage = usage.map_or(Ok([None; 5]), ResponseUsage::columns)?;
    row.extend(usage.map(Value::from));
    row.push(key(message.sub_agent.as_deref()).into());
    Ok(row)
}

/// Deletes the messages of a file from an offset on; returns the state of parsing it then.
pub(super) async fn delete_from(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    file: &str,
    offset: u64,
) -> Result<ParseState, SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    for sql in DELETE_FROM_OFFSET {
        sqlx::query(sql)
            .bind(namespace)
            .bind(agent)
            .bind(&id)
            .bind(file)
            .bind(to_bigint("length", offset)?)
            .execute(&mut *transaction)
            .await?;
    }
    let last = sqlx::query(SELECT_LAST_POSITION)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(file)
        .fetch_optional(transaction)
        .await?;
    Ok(ParseState {
        position: last.map_or(Ok(0), |row| row.try_get("position"))?,
        unparsed_lines: 0,
        partial_line_bytes: 0,
    })
}

/// Token usage of a response, and its cost if that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ResponseUsage {
    tokens: Tokens,
    cost: Option<u64>,
}

impl ResponseUsage {
    fn of_message(message: &Message, prices: &Prices) -> Option<ResponseUsage> {
        let tokens = message.tokens?;
        Some(ResponseUsage {
            tokens,
            cost: message
                .cost
                .or_else(|| prices.cost(message.model.as_deref()?, tokens)),
        })
    }

    fn add_to(self, totals: &mut RunningTotals) {
        totals.tokens = totals.tokens.plus(self.tokens);
        totals.cost = totals.cost.saturating_add(self.cost.unwrap_or(0));
        totals.unpriced_responses += u64::from(self.cost.is_none());
    }

    fn remove_from(self, totals: &mut RunningTotals) {
        totals.tokens = totals.tokens.minus(self.tokens);
        totals.cost = totals.cost.saturating_sub(self.cost.unwrap_or(0));
        totals.unpriced_responses = totals
            .unpriced_responses
            .saturating_sub(u64::from(self.cost.is_none()));
    }

    /// Returns the values of the token and cost columns.
    fn columns(self) -> Result<[Option<i64>; 5]> {
        let Tokens {
            input,
            output,
            cache_read,
            cache_write,
        } = self.tokens;
        let number = |number: u64| to_bigint("tokens", number).map(Some);
        Ok([
            number(input)?,
            number(output)?,
            number(cache_read)?,
            number(cache_write)?,
            self.cost.map(|cost| to_bigint("cost", cost)).transpose()?,
        ])
    }
}

/// Moves the messages of a file to its new path.
pub(super) async fn rename_file(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    from: &str,
    to: &str,
) -> Result<(), SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    for sql in RENAME_FILE {
        sqlx::query(sql)
            .bind(namespace)
            .bind(agent)
            .bind(&id)
            .bind(from)
            .bind(to)
            .execute(&mut *transaction)
            .await?;
    }
    Ok(())
}

/// Computes the totals from all rows, after rows were deleted.
pub(super) async fn recount(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    turns: u64,
) -> Result<RunningTotals, SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    let row = sqlx::query(SELECT_TOTALS)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .fetch_one(transaction)
        .await?;
    Ok(RunningTotals {
        turns,
        ..RunningTotals::read(&row)?
    })
}
