//! What was said, to search in it: the one table that each engine has in its own way.
//!
//! Owns the table and what is put into it. What is deleted from it is deleted with its messages (`messages`, `record`); SQLite
//! keeps its words in step by itself, PostgreSQL has them in the row.

use sqlx::{Any, AnyConnection, AssertSqlSafe};

use super::failure::Fault;
use super::rows::{clip, log_columns, whole};
use crate::error::Result;
use crate::index::{EntryRecord, words};
use crate::model::{LocatedMessage, Role};

/// Longest text of a message that is kept, in bytes: more than people write, and less than what PostgreSQL takes as words.
const LONGEST_TEXT: usize = 64 << 10;

/// SQLite's way: rows have numbers, and the words of each number are in a table of its full-text engine.
pub(super) const SQLITE: &str = "
CREATE TABLE IF NOT EXISTS texts (
    number        INTEGER PRIMARY KEY,
    namespace     TEXT NOT NULL,
    agent         TEXT NOT NULL,
    session       TEXT NOT NULL,
    file          TEXT NOT NULL,
    start         BIGINT NOT NULL,
    body          TEXT NOT NULL,
    UNIQUE (namespace, agent, session, file, start)
);
CREATE VIRTUAL TABLE IF NOT EXISTS texts_words USING fts5(
    body, content = 'texts', content_rowid = 'number', tokenize = \"unicode61 remove_diacritics 0\"
);
CREATE TRIGGER IF NOT EXISTS texts_come AFTER INSERT ON texts BEGIN
    INSERT INTO texts_words (rowid, body) VALUES (new.number, new.body);
END;
CREATE TRIGGER IF NOT EXISTS texts_go AFTER DELETE ON texts BEGIN
    INSERT INTO texts_words (texts_words, rowid, body) VALUES ('delete', old.number, old.body);
END;
";

/// PostgreSQL's way: the words are in the row, with an index on them. They are made from `words::plain`, as its own parser
/// takes a path or an address for one word.
pub(super) const POSTGRES: &str = "
CREATE TABLE IF NOT EXISTS texts (
    namespace     bytewise_text NOT NULL,
    agent         bytewise_text NOT NULL,
    session       bytewise_text NOT NULL,
    file          bytewise_text NOT NULL,
    start         BIGINT NOT NULL,
    body          TEXT NOT NULL,
    words         TSVECTOR NOT NULL,
    PRIMARY KEY (namespace, agent, session, file, start)
);
CREATE INDEX IF NOT EXISTS texts_by_word ON texts USING GIN (words);
";

/// Whether this is PostgreSQL.
pub(super) fn is_postgres(connection: &AnyConnection) -> bool {
    connection.backend_name() == "PostgreSQL"
}

/// What people and agents said, of these messages of a file.
pub(super) async fn insert(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    file: &str,
    said: &[&LocatedMessage],
) -> Result<(), Fault> {
    let (namespace, agent, id) = log_columns(&record.log);
    let spoken = said
        .iter()
        .filter(|said| matches!(said.message.role, Role::User | Role::Assistant));
    let texts: Vec<(i64, String)> = spoken
        .map(|said| {
            Ok((
                whole("offset", said.start)?,
                clip(&said.message.text(), LONGEST_TEXT),
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
        "INSERT INTO texts (namespace, agent, session, file, start, body{words_column}) VALUES {}",
        rows.join(", ")
    );
    let mut query = sqlx::query::<Any>(AssertSqlSafe(sql))
        .persistent(false)
        .bind(namespace)
        .bind(agent)
        .bind(id)
        .bind(file);
    for (start, text) in texts {
        let plain = postgres.then(|| words::plain(&text));
        query = query.bind(start).bind(text);
        if let Some(plain) = plain {
            query = query.bind(plain);
        }
    }
    query.execute(transaction).await?;
    Ok(())
}
