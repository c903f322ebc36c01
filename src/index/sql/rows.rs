//! Conversion between values and columns.
//!
//! Owns how both databases represent numbers, times and names. Does not own the queries.

use std::collections::BTreeMap;

use jiff::Timestamp;
use sqlx::Row;
use sqlx::any::AnyRow;

use super::error::SqlError;
use crate::error::{Error, Result};
use crate::index::catalog::total_cost;
use crate::index::{EntryRow, Failure, FenceRow, MessageRow, SessionRow, SessionTotals};
use crate::model::{FileKind, FileState, LogId, PathState, Tokens, Ttl};

/// Maximum length of a title, an error message or a similar text, in bytes.
pub(super) const MAX_FIELD_LEN: usize = 4096;

/// Maximum length of a text in a database index, in bytes. PostgreSQL accepts 2704 bytes per index
/// row, for all columns together.
pub(super) const MAX_KEY_LEN: usize = 1024;

/// The columns that [`read_session`] reads.
pub(super) const SESSION_COLUMNS: &str = "namespace, agent, id, project, cwd, COALESCE(title, first_prompt) AS title, origin, origin_turn, model, \
     agent_version, status, request_id, ttl, created, updated, head, writer, raw_bytes, stored_bytes, \
     messages, turns, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, cost, \
     unpriced_responses, reported_cost, unparsed_lines";

/// Returns the values of the columns that identify a log.
pub(super) fn log_columns(log: &LogId) -> (&str, &str, String) {
    (
        log.namespace.as_str(),
        log.agent.as_str(),
        log.name.to_string(),
    )
}

/// Formats a time as text of a fixed width. Years before 1 would be wider, and PostgreSQL cannot
/// cast them, so they become year 1.
pub(super) fn format_time(at: Timestamp) -> String {
    // 0001-01-01T00:00:00Z
    let first = Timestamp::from_second(-62_135_596_800).unwrap_or(Timestamp::UNIX_EPOCH);
    format!("{:.6}", at.max(first))
}

/// Converts a number to a BIGINT column.
pub(super) fn to_bigint(what: &str, number: u64) -> Result<i64> {
    i64::try_from(number)
        .map_err(|_| Error::corrupt(format!("invalid {what} {number}: it exceeds 2^63-1")))
}

/// Truncates a text to `max_len` bytes and removes NUL characters, which PostgreSQL rejects.
pub(super) fn truncate(text: &str, max_len: usize) -> String {
    let mut text = text.replace('\0', "");
    text.truncate(text.floor_char_boundary(max_len));
    text
}

/// Truncates an optional text like [`truncate`].
pub(super) fn truncate_optional(text: Option<&str>, max_len: usize) -> Option<String> {
    text.map(|text| truncate(text, max_len))
}

/// Serializes a value as JSON without NUL characters, which PostgreSQL rejects.
pub(super) fn to_json(value: &impl serde::Serialize) -> Result<String> {
    let text = serde_json::to_string(value)
        .map_err(|cause| Error::corrupt("serialize a checkpoint as JSON").caused_by(cause))?;
    Ok(text.replace("\\u0000", ""))
}

/// Returns the column value of a file kind.
pub(super) fn file_kind_column(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Append => "append",
        FileKind::Whole => "whole",
    }
}

fn invalid_value(column: &str, text: &str) -> Error {
    Error::corrupt(format!("invalid value {text:?} in column {column}"))
        .hint("run \"sessiond reindex\" to rebuild the index")
}

/// Reads a text column.
pub(super) fn read_text(row: &AnyRow, column: &str) -> Result<String, SqlError> {
    Ok(row.try_get(column)?)
}

/// Reads a column that holds a number of 0 or more.
pub(super) fn read_count(row: &AnyRow, column: &str) -> Result<u64, SqlError> {
    let number: i64 = row.try_get(column)?;
    Ok(u64::try_from(number).map_err(|_| invalid_value(column, &number.to_string()))?)
}

/// Reads a column that holds a number of 0 or more, or NULL.
pub(super) fn read_optional_count(row: &AnyRow, column: &str) -> Result<Option<u64>, SqlError> {
    let number: Option<i64> = row.try_get(column)?;
    Ok(number
        .map(|number| u64::try_from(number).map_err(|_| invalid_value(column, &number.to_string())))
        .transpose()?)
}

/// Reads the token columns.
pub(super) fn read_tokens(row: &AnyRow) -> Result<Tokens, SqlError> {
    Ok(Tokens {
        input: read_count(row, "input_tokens")?,
        output: read_count(row, "output_tokens")?,
        cache_read: read_count(row, "cache_read_tokens")?,
        cache_write: read_count(row, "cache_write_tokens")?,
    })
}

fn read_u32(row: &AnyRow, column: &str) -> Result<u32, SqlError> {
    let number = read_count(row, column)?;
    Ok(u32::try_from(number).map_err(|_| invalid_value(column, &number.to_string()))?)
}

/// Reads a text column and parses it.
pub(super) fn read_parsed<T: std::str::FromStr>(row: &AnyRow, column: &str) -> Result<T, SqlError> {
    let text = read_text(row, column)?;
    Ok(text.parse().map_err(|_| invalid_value(column, &text))?)
}

/// Returns the column value of a TTL: seconds, or -1 for `never`.
pub(super) fn ttl_column(ttl: Ttl) -> Result<i64> {
    match ttl {
        Ttl::Never => Ok(-1),
        Ttl::Seconds(seconds) => to_bigint("seconds", seconds),
    }
}

fn read_ttl(row: &AnyRow) -> Result<Option<Ttl>, SqlError> {
    let number: Option<i64> = row.try_get("ttl")?;
    Ok(number.map(|number| u64::try_from(number).map_or(Ttl::Never, Ttl::Seconds)))
}

/// Reads a session without its branches and labels.
pub(super) fn read_session(row: &AnyRow) -> Result<SessionRow, SqlError> {
    Ok(SessionRow {
        namespace: read_text(row, "namespace")?,
        agent: read_text(row, "agent")?,
        id: read_text(row, "id")?,
        project: row.try_get("project")?,
        cwd: row.try_get("cwd")?,
        title: row.try_get("title")?,
        origin: row.try_get("origin")?,
        origin_turn: read_optional_count(row, "origin_turn")?,
        model: row.try_get("model")?,
        agent_version: row.try_get("agent_version")?,
        status: read_text(row, "status")?,
        request_id: row.try_get("request_id")?,
        ttl: read_ttl(row)?,
        labels: BTreeMap::new(),
        created: read_parsed(row, "created")?,
        updated: read_parsed(row, "updated")?,
        head: read_count(row, "head")?,
        writer: read_text(row, "writer")?,
        raw_bytes: read_count(row, "raw_bytes")?,
        stored_bytes: read_count(row, "stored_bytes")?,
        totals: SessionTotals {
            messages: read_count(row, "messages")?,
            turns: read_count(row, "turns")?,
            tokens: read_tokens(row)?,
            cost: total_cost(
                read_count(row, "cost")?,
                read_count(row, "unpriced_responses")?,
                read_optional_count(row, "reported_cost")?,
            ),
            unparsed_lines: read_count(row, "unparsed_lines")?,
        },
        branches: Vec::new(),
    })
}

/// Reads a message without the path of its transcript.
pub(super) fn read_message(row: &AnyRow) -> Result<MessageRow, SqlError> {
    let at: Option<String> = row.try_get("at")?;
    Ok(MessageRow {
        position: row.try_get("position")?,
        path: None,
        start: read_count(row, "start")?,
        len: read_count(row, "len")?,
        message_id: row.try_get("message_id")?,
        parent_id: row.try_get("parent_id")?,
        role: read_text(row, "role")?,
        kind: read_text(row, "kind")?,
        at: at
            .map(|at| at.parse().map_err(|_| invalid_value("at", &at)))
            .transpose()?,
        model: row.try_get("model")?,
        response_id: row.try_get("response_id")?,
        tokens: match read_optional_count(row, "input_tokens")? {
            Some(_) => Some(read_tokens(row)?),
            None => None,
        },
        cost: read_optional_count(row, "cost")?,
        sub_agent: row.try_get("sub_agent")?,
    })
}

/// Reads a file.
pub(super) fn read_file(row: &AnyRow) -> Result<PathState, SqlError> {
    let kind = read_text(row, "kind")?;
    let kind = match kind.as_str() {
        "append" => FileKind::Append,
        "whole" => FileKind::Whole,
        _ => return Err(invalid_value("kind", &kind).into()),
    };
    let at = FileState {
        kind,
        len: read_count(row, "len")?,
        sha256: read_parsed(row, "sha256")?,
        mode: read_u32(row, "mode")?,
        mtime_ns: row.try_get("mtime_ns")?,
        seq: read_count(row, "seq")?,
    };
    Ok(PathState {
        path: read_parsed(row, "path")?,
        state: at,
    })
}

/// Reads an entry.
pub(super) fn read_entry(row: &AnyRow) -> Result<EntryRow, SqlError> {
    Ok(EntryRow {
        seq: read_count(row, "seq")?,
        branch: Some(read_text(row, "branch")?).filter(|branch| !branch.is_empty()),
        kind: read_text(row, "kind")?,
        writer: read_text(row, "writer")?,
        at: read_parsed(row, "at")?,
        raw_bytes: read_count(row, "raw_bytes")?,
        stored_bytes: read_count(row, "stored_bytes")?,
        digest: read_parsed(row, "digest")?,
    })
}

/// Reads a failure.
pub(super) fn read_failure(row: &AnyRow) -> Result<Failure, SqlError> {
    Ok(Failure {
        namespace: read_parsed(row, "namespace")?,
        agent: read_parsed(row, "agent")?,
        session: row.try_get("session")?,
        at: read_parsed(row, "at")?,
        attempt: read_u32(row, "attempt")?,
        message: read_text(row, "message")?,
    })
}

/// Reads a fence.
pub(super) fn read_fence(row: &AnyRow) -> Result<FenceRow, SqlError> {
    Ok(FenceRow {
        seq: read_count(row, "seq")?,
        writer: read_parsed(row, "writer")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_fixed_width_and_sort_as_text() {
        let times = [
            "-009999-01-02T01:59:59Z",
            "0001-01-01T00:00:00Z",
            "1969-12-31T23:59:59.999999999Z",
            "2026-11-16T04:21:49Z",
            "9999-12-30T22:00:00.9Z",
        ];
        let formatted: Vec<String> = times
            .iter()
            .map(|time| format_time(time.parse().expect("a time")))
            .collect();
        assert!(
            formatted
                .iter()
                .all(|time| time.len() == "2026-11-16T04:21:49.000000Z".len()),
            "{formatted:?}"
        );
        assert!(formatted.is_sorted(), "{formatted:?}");
        assert_eq!(formatted[3], "2026-11-16T04:21:49.000000Z");
    }

    #[test]
    fn text_is_truncated_between_characters() {
        assert_eq!(truncate("a\0ä", 2), "a");
        assert_eq!(truncate("ab", 2), "ab");
        assert!(to_bigint("length", u64::MAX).is_err());
    }
}
