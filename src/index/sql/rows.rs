//! Values as columns and back.
//!
//! Owns how numbers, times and names are written in the database, the same in both. Does not own which rows there are.

use std::collections::BTreeMap;

use jiff::Timestamp;
use sqlx::Row;
use sqlx::any::AnyRow;

use super::failure::Fault;
use crate::error::{Error, Result};
use crate::index::catalog::cost_of;
use crate::index::{EntryRow, Failure, FenceRow, MessageRow, SessionRow, Totals};
use crate::model::{FileKind, FileState, LogId, PathState, Tokens, Ttl};

/// Longest text of a fact or message, in bytes; titles and errors are a line.
pub(super) const LONGEST: usize = 4096;

/// Longest project name, in bytes; PostgreSQL takes 2704 bytes into an index row, other columns included.
pub(super) const LONGEST_PROJECT: usize = 1024;

/// The columns that [`session`] reads.
pub(super) const SESSION: &str = "namespace, agent, id, project, cwd, title, model, agent_version, status, request_id, ttl, created, \
                                  updated, head, writer, raw_bytes, stored_bytes, messages, turns, input_tokens, output_tokens, \
                                  cache_read_tokens, cache_write_tokens, cost, uncosted, told_cost, unread";

/// The columns that name a log.
pub(super) fn log_columns(log: &LogId) -> (&str, &str, String) {
    (
        log.namespace.as_str(),
        log.agent.as_str(),
        log.name.to_string(),
    )
}

/// A time as text of one width. Years before 1 have another width and no time of PostgreSQL; no clock shows them.
pub(super) fn stamp(at: Timestamp) -> String {
    // 0001-01-01T00:00:00Z
    let first = Timestamp::from_second(-62_135_596_800).unwrap_or(Timestamp::UNIX_EPOCH);
    format!("{:.6}", at.max(first))
}

/// A number as both databases keep it.
pub(super) fn whole(what: &str, number: u64) -> Result<i64> {
    i64::try_from(number)
        .map_err(|_| Error::corrupt(format!("{what} {number} is more than a database can count")))
}

/// Text as PostgreSQL takes it: no NUL in it, and not without end.
pub(super) fn clip(text: &str, longest: usize) -> String {
    let mut text = text.replace('\0', "");
    text.truncate(text.floor_char_boundary(longest));
    text
}

/// The same for text that may be missing.
pub(super) fn clip_some(text: Option<&str>, longest: usize) -> Option<String> {
    text.map(|text| clip(text, longest))
}

/// A value as PostgreSQL takes it: JSON without NUL.
pub(super) fn json(value: &impl serde::Serialize) -> Result<String> {
    let text = serde_json::to_string(value)
        .map_err(|cause| Error::corrupt("write JSON").caused_by(cause))?;
    Ok(text.replace("\\u0000", ""))
}

/// The word for a kind of file.
pub(super) fn file_kind(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Append => "append",
        FileKind::Whole => "whole",
    }
}

fn damaged(column: &str, text: &str) -> Error {
    Error::corrupt(format!(
        "read column {column}: {text:?} is not what belongs there"
    ))
    .hint("make the rows again: sessiond reindex")
}

/// A text column.
pub(super) fn text(row: &AnyRow, column: &str) -> Result<String, Fault> {
    Ok(row.try_get(column)?)
}

/// A column that counts.
pub(super) fn count(row: &AnyRow, column: &str) -> Result<u64, Fault> {
    let number: i64 = row.try_get(column)?;
    Ok(u64::try_from(number).map_err(|_| damaged(column, &number.to_string()))?)
}

/// A column that counts, where there is something to count.
pub(super) fn maybe_count(row: &AnyRow, column: &str) -> Result<Option<u64>, Fault> {
    let number: Option<i64> = row.try_get(column)?;
    Ok(number
        .map(|number| u64::try_from(number).map_err(|_| damaged(column, &number.to_string())))
        .transpose()?)
}

/// The tokens of a row.
pub(super) fn tokens(row: &AnyRow) -> Result<Tokens, Fault> {
    Ok(Tokens {
        input: count(row, "input_tokens")?,
        output: count(row, "output_tokens")?,
        cache_read: count(row, "cache_read_tokens")?,
        cache_write: count(row, "cache_write_tokens")?,
    })
}

fn small(row: &AnyRow, column: &str) -> Result<u32, Fault> {
    let number = count(row, column)?;
    Ok(u32::try_from(number).map_err(|_| damaged(column, &number.to_string()))?)
}

/// A text column that is read as something narrower.
pub(super) fn parsed<T: std::str::FromStr>(row: &AnyRow, column: &str) -> Result<T, Fault> {
    let text = text(row, column)?;
    Ok(text.parse().map_err(|_| damaged(column, &text))?)
}

/// How long to keep a session, as a number: seconds, or -1 for ever.
pub(super) fn ttl_column(ttl: Ttl) -> Result<i64> {
    match ttl {
        Ttl::Never => Ok(-1),
        Ttl::Seconds(seconds) => whole("seconds", seconds),
    }
}

fn ttl(row: &AnyRow) -> Result<Option<Ttl>, Fault> {
    let number: Option<i64> = row.try_get("ttl")?;
    Ok(number.map(|number| u64::try_from(number).map_or(Ttl::Never, Ttl::Seconds)))
}

/// A session without its branches and labels.
pub(super) fn session(row: &AnyRow) -> Result<SessionRow, Fault> {
    Ok(SessionRow {
        namespace: text(row, "namespace")?,
        agent: text(row, "agent")?,
        id: text(row, "id")?,
        project: row.try_get("project")?,
        cwd: row.try_get("cwd")?,
        title: row.try_get("title")?,
        model: row.try_get("model")?,
        agent_version: row.try_get("agent_version")?,
        status: text(row, "status")?,
        request_id: row.try_get("request_id")?,
        ttl: ttl(row)?,
        labels: BTreeMap::new(),
        created: parsed(row, "created")?,
        updated: parsed(row, "updated")?,
        head: count(row, "head")?,
        writer: text(row, "writer")?,
        raw_bytes: count(row, "raw_bytes")?,
        stored_bytes: count(row, "stored_bytes")?,
        totals: Totals {
            messages: count(row, "messages")?,
            turns: count(row, "turns")?,
            tokens: tokens(row)?,
            cost: cost_of(
                count(row, "cost")?,
                count(row, "uncosted")?,
                maybe_count(row, "told_cost")?,
            ),
            unread: count(row, "unread")?,
        },
        branches: Vec::new(),
    })
}

/// A message without the path of its file.
pub(super) fn message(row: &AnyRow) -> Result<MessageRow, Fault> {
    let at: Option<String> = row.try_get("at")?;
    Ok(MessageRow {
        position: row.try_get("position")?,
        path: None,
        start: count(row, "start")?,
        len: count(row, "len")?,
        uuid: row.try_get("uuid")?,
        parent: row.try_get("parent")?,
        role: text(row, "role")?,
        kind: text(row, "kind")?,
        at: at
            .map(|at| at.parse().map_err(|_| damaged("at", &at)))
            .transpose()?,
        model: row.try_get("model")?,
        answer: row.try_get("answer")?,
        tokens: match maybe_count(row, "input_tokens")? {
            Some(_) => Some(tokens(row)?),
            None => None,
        },
        cost: maybe_count(row, "cost")?,
        sub_agent: row.try_get("sub_agent")?,
    })
}

/// A file.
pub(super) fn file(row: &AnyRow) -> Result<PathState, Fault> {
    let kind = text(row, "kind")?;
    let kind = match kind.as_str() {
        "append" => FileKind::Append,
        "whole" => FileKind::Whole,
        _ => return Err(damaged("kind", &kind).into()),
    };
    let at = FileState {
        kind,
        len: count(row, "len")?,
        sha256: parsed(row, "sha256")?,
        mode: small(row, "mode")?,
        mtime_ns: row.try_get("mtime_ns")?,
        seq: count(row, "seq")?,
    };
    Ok(PathState {
        path: parsed(row, "path")?,
        at,
    })
}

/// An entry.
pub(super) fn entry(row: &AnyRow) -> Result<EntryRow, Fault> {
    Ok(EntryRow {
        seq: count(row, "seq")?,
        branch: Some(text(row, "branch")?).filter(|branch| !branch.is_empty()),
        kind: text(row, "kind")?,
        writer: text(row, "writer")?,
        at: parsed(row, "at")?,
        raw_bytes: count(row, "raw_bytes")?,
        stored_bytes: count(row, "stored_bytes")?,
        digest: parsed(row, "digest")?,
    })
}

/// A failure.
pub(super) fn failure(row: &AnyRow) -> Result<Failure, Fault> {
    Ok(Failure {
        namespace: parsed(row, "namespace")?,
        agent: parsed(row, "agent")?,
        session: row.try_get("session")?,
        at: parsed(row, "at")?,
        attempt: small(row, "attempt")?,
        message: text(row, "message")?,
    })
}

/// A fence.
pub(super) fn fence(row: &AnyRow) -> Result<FenceRow, Fault> {
    Ok(FenceRow {
        seq: count(row, "seq")?,
        writer: parsed(row, "writer")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_has_one_width_and_sorts_as_text() {
        let times = [
            "-009999-01-02T01:59:59Z",
            "0001-01-01T00:00:00Z",
            "1969-12-31T23:59:59.999999999Z",
            "2026-11-16T04:21:49Z",
            "9999-12-30T22:00:00.9Z",
        ];
        let stamps: Vec<String> = times
            .iter()
            .map(|time| stamp(time.parse().expect("a time")))
            .collect();
        assert!(
            stamps
                .iter()
                .all(|stamp| stamp.len() == "2026-11-16T04:21:49.000000Z".len()),
            "{stamps:?}"
        );
        assert!(stamps.is_sorted(), "{stamps:?}");
        assert_eq!(stamps[3], "2026-11-16T04:21:49.000000Z");
    }

    #[test]
    fn text_is_clipped_between_characters() {
        assert_eq!(clip("a\0ä", 2), "a");
        assert_eq!(clip("ab", 2), "ab");
        assert!(whole("length", u64::MAX).is_err());
    }
}
