//! Messages of a session, a page at a time.
//!
//! Owns the query and the cursor. A page is found in an index of the table, in order, however deep it lies: there is nothing to
//! sort and nothing to pass over.

use std::collections::{BTreeMap, BTreeSet};

use sqlx::AnyConnection;

use super::failure::Fault;
use super::list::Statement;
use super::rows::{self, log_columns, text, whole};
use crate::error::{Error, Result};
use crate::index::{MessageFilter, MessagePage, MessageRow};
use crate::model::{Digest, LogId};

/// The longest page.
const LONGEST_PAGE: u32 = 1000;

const COLUMNS: &str = "position, file, start, len, uuid, parent, role, kind, at, model, answer, input_tokens, output_tokens, \
     cache_read_tokens, cache_write_tokens, cost, sub_agent";

/// One page.
pub(super) async fn page(
    connection: &mut AnyConnection,
    log: &LogId,
    filter: &MessageFilter,
    cursor: Option<Cursor>,
) -> Result<MessagePage, Fault> {
    let mut statement = Statement::new("");
    let limit = query(&mut statement, log, filter, cursor)?;
    let found = statement.fetch(connection).await?;
    let more = found.len() > limit;
    let mut messages = Vec::new();
    for row in found.iter().take(limit) {
        messages.push((text(row, "file")?, rows::message(row)?));
    }
    let next = messages
        .last()
        .filter(|_| more)
        .map(|(file, last)| Cursor::behind(file, last))
        .transpose()?;
    let names = paths(
        connection,
        log,
        messages.iter().map(|(file, _)| file.clone()).collect(),
    )
    .await?;
    let named = messages.into_iter().map(|(file, row)| MessageRow {
        path: names.get(&file).cloned(),
        ..row
    });
    Ok(MessagePage {
        messages: named.collect(),
        next: next.map(|cursor| cursor.to_text()),
    })
}

/// Says the query of a page, and one row more; answers how many make a page.
pub(super) fn query(
    statement: &mut Statement,
    log: &LogId,
    filter: &MessageFilter,
    cursor: Option<Cursor>,
) -> Result<usize> {
    let (namespace, agent, id) = log_columns(log);
    let limit = filter.limit.clamp(1, LONGEST_PAGE) as usize;
    statement
        .say("SELECT ")
        .say(COLUMNS)
        .say(" FROM messages WHERE namespace = ")
        .value(namespace);
    statement
        .say(" AND agent = ")
        .value(agent)
        .say(" AND session = ")
        .value(id);
    if let Some(role) = filter.role {
        statement.say(" AND role = ").value(role.word());
    }
    // Of the two only the later can matter; with both, a database may take the other one for its index.
    let since = filter.since.map(jiff::Timestamp::as_microsecond);
    match (cursor, since) {
        (Some(cursor), since) if since.is_none_or(|since| since <= cursor.position) => {
            statement
                .say(" AND (position, file, start) > (")
                .number(cursor.position)
                .say(", ")
                .value(cursor.file);
            statement.say(", ").number(cursor.start).say(")");
        }
        (_, Some(since)) => {
            statement.say(" AND position >= ").number(since);
        }
        _ => {}
    }
    statement
        .say(" ORDER BY position, file, start LIMIT ")
        .say(&(limit + 1).to_string());
    Ok(limit)
}

/// The paths of these files, by their digests.
pub(super) async fn paths(
    connection: &mut AnyConnection,
    log: &LogId,
    files: BTreeSet<String>,
) -> Result<BTreeMap<String, String>, Fault> {
    if files.is_empty() {
        return Ok(BTreeMap::new());
    }
    let (namespace, agent, id) = log_columns(log);
    let mut statement = Statement::new("SELECT path_sha256, path FROM files WHERE namespace = ");
    statement
        .value(namespace)
        .say(" AND agent = ")
        .value(agent)
        .say(" AND session = ")
        .value(id);
    for (number, file) in files.into_iter().enumerate() {
        statement
            .say(if number == 0 {
                " AND path_sha256 IN ("
            } else {
                ", "
            })
            .value(file);
    }
    statement.say(")");
    statement
        .fetch(connection)
        .await?
        .iter()
        .map(|row| Ok((text(row, "path_sha256")?, text(row, "path")?)))
        .collect()
}

/// The last message of a page.
pub(super) struct Cursor {
    position: i64,
    file: String,
    start: i64,
}

impl Cursor {
    fn behind(file: &str, row: &MessageRow) -> Result<Cursor> {
        Ok(Cursor {
            position: row.position,
            file: file.to_owned(),
            start: whole("offset", row.start)?,
        })
    }

    fn to_text(&self) -> String {
        format!("{}|{}|{}", self.position, self.file, self.start)
    }

    /// Reads what [`Cursor::to_text`] wrote.
    pub(super) fn parse(text: &str) -> Result<Cursor> {
        let read = || -> Option<Cursor> {
            let (position, rest) = text.split_once('|')?;
            let (file, start) = rest.split_once('|')?;
            let file: Digest = file.parse().ok()?;
            Some(Cursor {
                position: position.parse().ok()?,
                file: file.to_string(),
                start: start.parse().ok()?,
            })
        };
        read().ok_or_else(|| {
            Error::usage(format!("read cursor {text:?}"))
                .hint("pass `next` of the page before, or none for the first")
        })
    }
}
