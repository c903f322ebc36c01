//! The table `message_texts` for full-text search, which differs between the databases.
//!
//! Owns the table and its rows. Rows are deleted together with their messages (`messages`,
//! `record`). In SQLite, triggers keep the full-text index up to date; in PostgreSQL it is a
//! column.

use serde_json::Value;

use super::bulk::{Bulk, Column, number};
use super::rows::{log_columns, truncate};
use crate::error::Result;
use crate::index::search_query;
use crate::model::{LocatedMessage, LogId, Role};

/// Maximum length of an indexed message, in bytes: longer than prompts are, and below the limit of
/// PostgreSQL's `tsvector`.
const MAX_TEXT_LEN: usize = 64 << 10;

/// The table in SQLite, with an FTS5 index that refers to it by row number.
pub(super) const SQLITE: &str = "
CREATE TABLE IF NOT EXISTS message_texts (
    number        INTEGER PRIMARY KEY,
    namespace     TEXT NOT NULL,
    agent         TEXT NOT NULL,
    session       TEXT NOT NULL,
    file          TEXT NOT NULL,
    start         BIGINT NOT NULL,
    text          TEXT NOT NULL,
    UNIQUE (namespace, agent, session, file, start)
);
CREATE VIRTUAL TABLE IF NOT EXISTS message_texts_fts USING fts5(
    text, content = 'message_texts', content_rowid = 'number',
    tokenize = \"unicode61 remove_diacritics 0\"
);
CREATE TRIGGER IF NOT EXISTS message_texts_insert AFTER INSERT ON message_texts BEGIN
    INSERT INTO message_texts_fts (rowid, text) VALUES (new.number, new.text);
END;
CREATE TRIGGER IF NOT EXISTS message_texts_delete AFTER DELETE ON message_texts BEGIN
    INSERT INTO message_texts_fts (message_texts_fts, rowid, text)
    VALUES ('delete', old.number, old.text);
END;
";

/// The table in PostgreSQL, with an indexed column of words. The words come from
/// `search_query::plain_words`, because PostgreSQL's own parser treats a path or a URL as one word.
pub(super) const POSTGRES: &str = "
CREATE TABLE IF NOT EXISTS message_texts (
    namespace     bytewise_text NOT NULL,
    agent         bytewise_text NOT NULL,
    session       bytewise_text NOT NULL,
    file          bytewise_text NOT NULL,
    start         BIGINT NOT NULL,
    text          TEXT NOT NULL,
    words         TSVECTOR NOT NULL,
    PRIMARY KEY (namespace, agent, session, file, start)
);
CREATE INDEX IF NOT EXISTS message_texts_by_word ON message_texts USING GIN (words);
";

/// The columns of a row. PostgreSQL has one more.
const COLUMNS: [Column; 7] = [
    Column::Text("namespace"),
    Column::Text("agent"),
    Column::Text("session"),
    Column::Text("file"),
    Column::Number("start"),
    Column::Text("text"),
    Column::Words("words"),
];

/// No rows yet.
pub(super) fn no_rows(postgres: bool) -> Bulk {
    Bulk::new(if postgres { &COLUMNS } else { &COLUMNS[..6] })
}

/// The row of a message of a file; none if it is neither a prompt nor a response, or has no text.
pub(super) fn row(
    log: &LogId,
    file: &str,
    located: &LocatedMessage,
    postgres: bool,
) -> Result<Option<Vec<Value>>> {
    if !matches!(located.message.role, Role::User | Role::Assistant) {
        return Ok(None);
    }
    let text = truncate(&located.message.text(), MAX_TEXT_LEN);
    if text.trim().is_empty() {
        return Ok(None);
    }
    let (namespace, agent, id) = log_columns(log);
    let words = postgres.then(|| search_query::plain_words(&text));
    let mut row = vec![
        namespace.into(),
        agent.into(),
        id.into(),
        file.into(),
        number("offset", located.start)?,
        text.into(),
    ];
    row.extend(words.map(Value::from));
    Ok(Some(row))
}
