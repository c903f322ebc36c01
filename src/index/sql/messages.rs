//! Message rows from the parts of an entry.
//!
//! Owns the order of a conversation and the totals. The rows depend only on the files at the head,
//! not on how the log splits them into entries.

use std::collections::BTreeMap;

use sqlx::any::AnyRow;
use sqlx::{Any, AnyConnection, AssertSqlSafe, Row};

use super::error::SqlError;
use super::rows::{
    MAX_KEY_LEN, format_time, log_columns, read_count, read_text, read_tokens, to_bigint, truncate,
    truncate_optional,
};
use super::{IndexOptions, message_texts};
use crate::error::Result;
use crate::index::EntryRecord;
use crate::model::{Digest, LocatedMessage, Message, Part, Prices, Tokens};

/// Maximum number of rows in one statement. SQLite accepts 32766 values, PostgreSQL 65535.
const MAX_ROWS: usize = 200;

const COLUMNS: &str = "namespace, agent, session, position, file, start, len, message_id, parent_id, role, \
     kind, at, model, response_id, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, cost, sub_agent";

const SELECT_FILE: &str = "SELECT len, partial_line_bytes, position, unparsed_lines FROM files \
     WHERE namespace = $1 AND agent = $2 AND session = $3 AND path_sha256 = $4";

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
    /// Whether messages were deleted, so that the totals must be counted again.
    pub has_deletions: bool,
}

/// The effect of applying one part.
pub(super) enum PartOutcome {
    /// The messages of the part are rows now.
    Applied(ParseState),
    /// The part starts within a line whose first bytes are not indexed.
    Gap,
}

/// Inserts the messages of one part.
pub(super) async fn apply_part(
    transaction: &mut AnyConnection,
    (record, options): (&EntryRecord, &IndexOptions),
    part: &Part,
    totals: &mut RunningTotals,
) -> Result<PartOutcome, SqlError> {
    let Some(span) = record.transcripts.spans.get(&part.path) else {
        return Ok(PartOutcome::Applied(ParseState::default()));
    };
    let file = Digest::of(part.path.as_str().as_bytes()).to_string();
    let (len, mut state) = load_state(transaction, record, &file).await?;
    if part.start == len && part.start > 0 && span.start != len - state.partial_line_bytes.min(len)
    {
        return Ok(PartOutcome::Gap);
    }
    if part.start < len {
        state = delete_from(transaction, record, &file, span.start).await?;
    }
    let messages: Vec<&LocatedMessage> = record
        .transcripts
        .messages
        .iter()
        .filter(|located| located.path == part.path)
        .collect();
    for chunk in messages.chunks(MAX_ROWS) {
        insert(
            transaction,
            (record, options),
            &file,
            chunk,
            &mut state,
            totals,
        )
        .await?;
        if options.index_text {
            message_texts::insert(transaction, record, &file, chunk).await?;
        }
    }
    let unparsed_lines = record
        .transcripts
        .unparsed_lines
        .get(&part.path)
        .copied()
        .unwrap_or(0);
    state.unparsed_lines += unparsed_lines;
    totals.unparsed_lines += unparsed_lines;
    state.partial_line_bytes = span.partial_line_bytes;
    Ok(PartOutcome::Applied(state))
}

/// Returns the indexed length of a file and the state of parsing it.
async fn load_state(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    file: &str,
) -> Result<(u64, ParseState), SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    let row = sqlx::query(SELECT_FILE)
        .bind(namespace)
        .bind(agent)
        .bind(id)
        .bind(file)
        .fetch_optional(transaction)
        .await?;
    let Some(row) = row else {
        return Ok((0, ParseState::default()));
    };
    let state = ParseState {
        partial_line_bytes: read_count(&row, "partial_line_bytes")?,
        position: row.try_get("position")?,
        unparsed_lines: read_count(&row, "unparsed_lines")?,
        has_deletions: false,
    };
    Ok((read_count(&row, "len")?, state))
}

/// Deletes the messages of a file from an offset on; returns the state of parsing it then.
async fn delete_from(
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
        has_deletions: true,
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

/// Corrects the usage of responses that have rows already, and returns the usage of the others.
/// Every message of a response repeats its usage; the last complete one is correct, and is counted
/// once.
async fn update_usage(
    transaction: &mut AnyConnection,
    (record, options): (&EntryRecord, &IndexOptions),
    messages: &[&LocatedMessage],
    totals: &mut RunningTotals,
) -> Result<BTreeMap<String, ResponseUsage>, SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    let mut usage: BTreeMap<String, (ResponseUsage, bool)> = BTreeMap::new();
    for message in messages.iter().map(|located| &located.message) {
        let (Some(response), Some(now)) = (
            truncate_optional(message.response_id.as_deref(), MAX_KEY_LEN),
            ResponseUsage::of_message(message, &options.prices),
        ) else {
            continue;
        };
        let latest = usage.entry(response).or_insert((now, message.is_complete));
        if message.is_complete {
            *latest = (now, true);
        }
    }
    for (response, before) in recorded_usage(transaction, record, &usage).await? {
        if let Some((now, true)) = usage.remove(&response)
            && now != before
        {
            before.remove_from(totals);
            now.add_to(totals);
            let mut update = sqlx::query(UPDATE_USAGE)
                .bind(namespace)
                .bind(agent)
                .bind(&id)
                .bind(response);
            for number in now.columns()? {
                update = update.bind(number);
            }
            update.execute(&mut *transaction).await?;
        }
    }
    let new = usage.into_iter();
    Ok(new
        .map(|(response, (usage, _))| (response, usage))
        .collect())
}

async fn insert(
    transaction: &mut AnyConnection,
    (record, options): (&EntryRecord, &IndexOptions),
    file: &str,
    messages: &[&LocatedMessage],
    state: &mut ParseState,
    totals: &mut RunningTotals,
) -> Result<(), SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    let mut usage = update_usage(transaction, (record, options), messages, totals).await?;
    let width = COLUMNS.split(',').count();
    let row = |row: usize| {
        let values: Vec<String> = (1..=width)
            .map(|column| format!("${}", row * width + column))
            .collect();
        format!("({})", values.join(", "))
    };
    let rows: Vec<String> = (0..messages.len()).map(row).collect();
    let sql = format!(
        "INSERT INTO messages ({COLUMNS}) VALUES {}",
        rows.join(", ")
    );
    let mut query = sqlx::query::<Any>(AssertSqlSafe(sql)).persistent(false);
    for located in messages {
        let message = &located.message;
        state.position = message
            .at
            .map_or(0, jiff::Timestamp::as_microsecond)
            .max(state.position.saturating_add(1));
        totals.messages += 1;
        let response = truncate_optional(message.response_id.as_deref(), MAX_KEY_LEN);
        let counted = match &response {
            Some(response) => usage.remove(response),
            None => ResponseUsage::of_message(message, &options.prices),
        };
        if let Some(usage) = counted {
            usage.add_to(totals);
        }
        query = query
            .bind(namespace)
            .bind(agent)
            .bind(id.clone())
            .bind(state.position)
            .bind(file)
            .bind(to_bigint("offset", located.start)?)
            .bind(to_bigint("length", located.len)?)
            .bind(truncate_optional(
                message.message_id.as_deref(),
                MAX_KEY_LEN,
            ))
            .bind(truncate_optional(message.parent_id.as_deref(), MAX_KEY_LEN))
            .bind(message.role.as_str())
            .bind(truncate(&message.kind, MAX_KEY_LEN))
            .bind(message.at.map(format_time))
            .bind(truncate_optional(message.model.as_deref(), MAX_KEY_LEN))
            .bind(response);
        for number in counted.map_or(Ok([None; 5]), ResponseUsage::columns)? {
            query = query.bind(number);
        }
        query = query.bind(truncate_optional(message.sub_agent.as_deref(), MAX_KEY_LEN));
    }
    query.execute(transaction).await?;
    Ok(())
}

/// Returns the usage of those responses that are in the table already.
async fn recorded_usage(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    responses: &BTreeMap<String, (ResponseUsage, bool)>,
) -> Result<Vec<(String, ResponseUsage)>, SqlError> {
    if responses.is_empty() {
        return Ok(Vec::new());
    }
    let (namespace, agent, id) = log_columns(&record.log);
    let placeholders: Vec<String> = (0..responses.len())
        .map(|at| format!("${}", at + 4))
        .collect();
    let sql = format!(
        "SELECT response_id, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, cost FROM messages \
         WHERE namespace = $1 AND agent = $2 AND session = $3 AND input_tokens IS NOT NULL AND response_id IN ({})",
        placeholders.join(", ")
    );
    let mut query = sqlx::query::<Any>(AssertSqlSafe(sql))
        .persistent(false)
        .bind(namespace)
        .bind(agent)
        .bind(id);
    for response in responses.keys() {
        query = query.bind(response.clone());
    }
    let read = |row: &AnyRow| {
        let cost: Option<i64> = row.try_get("cost")?;
        Ok((
            read_text(row, "response_id")?,
            ResponseUsage {
                tokens: read_tokens(row)?,
                cost: cost.and_then(|cost| u64::try_from(cost).ok()),
            },
        ))
    };
    query
        .fetch_all(transaction)
        .await?
        .iter()
        .map(read)
        .collect()
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
