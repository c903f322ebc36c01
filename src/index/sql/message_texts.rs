//! The table `message_texts` for full-text search, which differs between the databases.
//!
//! Owns the table and the inserts. Rows are deleted together with their messages (`messages`,
//! `record`). In SQLite, triggers keep the full-text index up to date; in PostgreSQL it is a
//! column.

use sqlx::{Any, AnyConnection, AssertSqlSafe};

use super::error::SqlError;
use super::rows::{log_columns, to_bigint, truncate};
use crate::error::Result;
use crate::index::{EntryRecord, search_query};
use crate::model::{LocatedMessage, Role};

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

/// Whether the connection is to PostgreSQL.
pub(super) fn is_postgres(connection: &AnyConnection) -> bool {
    connection.backend_name() == "PostgreSQL"
}

/// Inserts the text of prompts and responses among these messages of a file.
pub(super) async fn insert(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    file: &str,
    messages: &[&LocatedMessage],
) -> Result<(), SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    let texts: Vec<(i64, String)> = messages
        .iter()
        .filter(|located| matches!(located.message.role, Role::User | Role::Assistant))
        .map(|located| {
            Ok((
                to_bigint("offset", located.start)?,
                truncate(&located.message.text(), MAX_TEXT_LEN),
            ))
        })
        .filter(|text| {
            text.as_ref()
                .map_or(true, |(_, text)| !text.trim().is_empty())
        })
        .collect::<Result<_>>()?;
    if texts.is_empty() {
        return Ok(());
    }
    let postgres = is_postgres(transaction);
    let row = |row: usize| match postgres {
        true => format!(
            "($1, $2, $3, $4, ${}, ${}, to_tsvector('simple', ${}))",
            row * 3 + 5,
            row * 3 + 6,
            row * 3 + 7
        ),
        false => format!("($1, $2, $3, $4, ${}, ${})", row * 2 + 5, row * 2 + 6),
    };
    let rows: Vec<String> = (0..texts.len()).map(row).collect();
    let words_column = if postgres { ", words" } else { "" };
    let sql = format!(
        "INSERT INTO message_texts (namespace, agent, session, file, start, text{words_column}) \
         VALUES {}",
        rows.join(", ")
    );
    let mut query = sqlx::query::<Any>(AssertSqlSafe(sql))
        .persistent(false)
        .bind(namespace)
        .bind(agent)
        .bind(id)
        .bind(file);
    for (start, text) in texts {
        let words = postgres.then(|| search_query::plain_words(&text));
        query = query.bind(start).bind(text);
        if let Some(words) = words {
            query = query.bind(words);
        }
    }
    query.execute(transaction).await?;
    Ok(())
}
