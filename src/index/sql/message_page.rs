//! Pages of the message list.
//!
//! Owns the query and the cursor. A database index yields every page in order, so that no page
//! needs a sort or skips rows, regardless of its position.

use std::collections::{BTreeMap, BTreeSet};

use sqlx::AnyConnection;

use super::error::SqlError;
use super::rows::{self, log_columns, read_text, to_bigint};
use super::statement::Statement;
use crate::error::{Error, Result};
use crate::index::{MessageFilter, MessagePage, MessageRow};
use crate::model::{Digest, LogId};

/// Maximum number of messages in a page.
const MAX_PAGE_LEN: u32 = 1000;

/// The columns that [`rows::read_message`] reads, and `file`.
const COLUMNS: &str = "position, file, start, len, message_id, parent_id, role, kind, at, model, \
     response_id, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, cost, sub_agent";

/// Fetches one page.
pub(super) async fn page(
    connection: &mut AnyConnection,
    log: &LogId,
    filter: &MessageFilter,
    cursor: Option<Cursor>,
) -> Result<MessagePage, SqlError> {
    let mut statement = Statement::new("");
    let limit = query(&mut statement, log, filter, cursor)?;
    let fetched = statement.fetch(connection).await?;
    let has_more = fetched.len() > limit;
    let mut messages = Vec::new();
    for row in fetched.iter().take(limit) {
        messages.push((read_text(row, "file")?, rows::read_message(row)?));
    }
    let next = messages
        .last()
        .filter(|_| has_more)
        .map(|(file, last)| Cursor::new(file, last))
        .transpose()?;
    let paths = read_paths(
        connection,
        log,
        messages.iter().map(|(file, _)| file.clone()).collect(),
    )
    .await?;
    let messages = messages.into_iter().map(|(file, row)| MessageRow {
        path: paths.get(&file).cloned(),
        ..row
    });
    Ok(MessagePage {
        messages: messages.collect(),
        next: next.map(|cursor| cursor.to_text()),
    })
}

/// Appends the query for a page and one more row, which shows whether there is another page.
/// Returns the number of rows in the page.
pub(super) fn query(
    statement: &mut Statement,
    log: &LogId,
    filter: &MessageFilter,
    cursor: Option<Cursor>,
) -> Result<usize> {
    let (namespace, agent, id) = log_columns(log);
    let limit = filter.limit.clamp(1, MAX_PAGE_LEN) as usize;
    statement
        .push("SELECT ")
        .push(COLUMNS)
        .push(" FROM messages WHERE namespace = ")
        .bind_text(namespace);
    statement
        .push(" AND agent = ")
        .bind_text(agent)
        .push(" AND session = ")
        .bind_text(id);
    if let Some(role) = filter.role {
        statement.push(" AND role = ").bind_text(role.as_str());
    }
    // Only the later of the two bounds matters. With both, a database may use the other for its
    // index.
    let since = filter.since.map(jiff::Timestamp::as_microsecond);
    match (cursor, since) {
        (Some(cursor), since) if since.is_none_or(|since| since <= cursor.position) => {
            statement
                .push(" AND (position, file, start) > (")
                .bind_number(cursor.position)
                .push(", ")
                .bind_text(cursor.file);
            statement.push(", ").bind_number(cursor.start).push(")");
        }
        (_, Some(since)) => {
            statement.push(" AND position >= ").bind_number(since);
        }
        _ => {}
    }
    statement
        .push(" ORDER BY position, file, start LIMIT ")
        .push(&(limit + 1).to_string());
    Ok(limit)
}

/// Returns the paths of these files by `path_sha256`.
async fn read_paths(
    connection: &mut AnyConnection,
    log: &LogId,
    files: BTreeSet<String>,
) -> Result<BTreeMap<String, String>, SqlError> {
    if files.is_empty() {
        return Ok(BTreeMap::new());
    }
    let (namespace, agent, id) = log_columns(log);
    let mut statement = Statement::new("SELECT path_sha256, path FROM files WHERE namespace = ");
    statement
        .bind_text(namespace)
        .push(" AND agent = ")
        .bind_text(agent)
        .push(" AND session = ")
        .bind_text(id);
    for (number, file) in files.into_iter().enumerate() {
        statement
            .push(if number == 0 {
                " AND path_sha256 IN ("
            } else {
                ", "
            })
            .bind_text(file);
    }
    statement.push(")");
    statement
        .fetch(connection)
        .await?
        .iter()
        .map(|row| Ok((read_text(row, "path_sha256")?, read_text(row, "path")?)))
        .collect()
}

/// The position of the last message of a page.
pub(super) struct Cursor {
    position: i64,
    file: String,
    start: i64,
}

impl Cursor {
    fn new(file: &str, row: &MessageRow) -> Result<Cursor> {
        Ok(Cursor {
            position: row.position,
            file: file.to_owned(),
            start: to_bigint("offset", row.start)?,
        })
    }

    fn to_text(&self) -> String {
        format!("{}|{}|{}", self.position, self.file, self.start)
    }

    /// Parses the output of [`Cursor::to_text`].
    pub(super) fn parse(text: &str) -> Result<Cursor> {
        let parse = || -> Option<Cursor> {
            let (position, rest) = text.split_once('|')?;
            let (file, start) = rest.split_once('|')?;
            let file: Digest = file.parse().ok()?;
            Some(Cursor {
                position: position.parse().ok()?,
                file: file.to_string(),
                start: start.parse().ok()?,
            })
        };
        parse().ok_or_else(|| {
            Error::usage(format!("invalid --cursor value {text:?}: it is not from a previous page"))
                .hint("use the command after \"next page:\" in the previous output, or pass the JSON field \"next\" as --cursor")
        })
    }
}
