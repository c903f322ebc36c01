//! Writes a restored session to OpenCode's database, before OpenCode starts.
//!
//! One transaction writes all rows of the session, or none.

use std::sync::LazyLock;

use regex_lite::Regex;
use serde_json::{Map, Value};
use sqlx::query::Query;
use sqlx::sqlite::SqliteArguments;
use sqlx::{AssertSqlSafe, Connection, Sqlite, SqliteConnection};

use super::{FAMILY, has_table, quote};
use crate::error::Error;
use crate::mirror::lines::{Schema, SessionRows};
use crate::mirror::tables::{PROJECT, TABLES};

/// Replaces the rows of a session and its sub-agents.
pub async fn replace_session(
    connection: &mut SqliteConnection,
    session: &str,
    rows: &SessionRows,
) -> sqlx::Result<()> {
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    if !has_table(&mut transaction, "session").await? {
        create_tables(&mut transaction, &rows.schema).await?;
    }
    for (table, owner) in TABLES.iter().rev() {
        if has_table(&mut transaction, table).await? {
            let sql = format!(
                "{FAMILY} DELETE FROM {} WHERE {owner} IN family",
                quote(table)
            );
            sqlx::query(AssertSqlSafe(sql))
                .bind(session)
                .execute(&mut *transaction)
                .await?;
        }
    }
    for row in rows.projects.values() {
        insert(&mut transaction, "INSERT OR IGNORE", PROJECT, row).await?;
    }
    for ((table, _), row) in &rows.rows {
        insert(&mut transaction, "INSERT", TABLES[*table].0, row).await?;
    }
    transaction.commit().await
}

/// Explains an error of `replace_session`.
pub fn classify(session: &str, cause: sqlx::Error) -> Error {
    let text = cause.to_string();
    if text.contains("UNIQUE constraint") {
        return Error::conflict(format!(
            "the database already contains message IDs of session {session} in another session: {text}"
        ))
        .hint(
            "restore it with another XDG_DATA_HOME: sessions cannot share messages in one database",
        );
    }
    if text.contains("no column named") || text.contains("no such table") {
        return Error::conflict(format!(
            "the session was written by a newer OpenCode than this database: {text}"
        ))
        .hint("upgrade opencode, start it once, and restore again");
    }
    Error::unavailable("write the rows").caused_by(cause)
}

/// Creates the tables of an empty database. The store is not trusted: each statement must create one
/// table or index and do nothing else.
async fn create_tables(connection: &mut SqliteConnection, schema: &Schema) -> sqlx::Result<()> {
    for sql in &schema.sql {
        if !is_create_statement(sql) {
            return Err(sqlx::Error::Protocol(format!(
                "not a CREATE TABLE or CREATE INDEX statement: {sql:.60}"
            )));
        }
        sqlx::query(AssertSqlSafe(sql.clone()))
            .execute(&mut *connection)
            .await?;
    }
    for (table, rows) in &schema.migrations {
        for row in rows {
            insert(connection, "INSERT", table, row).await?;
        }
    }
    Ok(())
}

/// One table or index: its name, and then the definition in parentheses. A table is not created from
/// a query, and no column computes its values.
fn is_create_statement(sql: &str) -> bool {
    static FORM: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let name = r#"(?:[A-Za-z_][A-Za-z0-9_]*|`[^`]+`|"[^"]+"|\[[^\]]+\])"#;
        let table = format!(r"TABLE\s+{name}\s*\(");
        let index = format!(r"(?:UNIQUE\s+)?INDEX\s+{name}\s+ON\s+{name}\s*\(");
        Regex::new(&format!(r"(?is)^\s*CREATE\s+(?:{table}|{index})")).ok()
    });
    // A long default value would be content that no row of the session has.
    static COMPUTED: LazyLock<Option<Regex>> = LazyLock::new(|| {
        Regex::new(r#"(?is)\bGENERATED\b|\bAS\s*\(|\bDEFAULT\s*(?:\(|'[^']{17}|"[^"]{17})|;"#).ok()
    });
    let matches = |regex: &Option<Regex>| regex.as_ref().is_none_or(|regex| regex.is_match(sql));
    FORM.as_ref().is_some_and(|form| form.is_match(sql)) && !matches(&COMPUTED)
}

async fn insert(
    connection: &mut SqliteConnection,
    verb: &str,
    table: &str,
    row: &Map<String, Value>,
) -> sqlx::Result<()> {
    let columns: Vec<String> = row.keys().map(|column| quote(column)).collect();
    let parameters: Vec<String> = (1..=row.len()).map(|number| format!("?{number}")).collect();
    let sql = format!(
        "{verb} INTO {} ({}) VALUES ({})",
        quote(table),
        columns.join(", "),
        parameters.join(", ")
    );
    let query = row.values().fold(sqlx::query(AssertSqlSafe(sql)), bind);
    query.execute(connection).await.map(|_| ())
}

fn bind<'q>(
    query: Query<'q, Sqlite, SqliteArguments>,
    value: &Value,
) -> Query<'q, Sqlite, SqliteArguments> {
    match value {
        Value::Null => query.bind(None::<String>),
        Value::Bool(value) => query.bind(i64::from(*value)),
        Value::Number(number) => match number.as_i64() {
            Some(number) => query.bind(number),
            None => query.bind(number.as_f64()),
        },
        Value::String(text) => query.bind(text.clone()),
        other => query.bind(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::is_create_statement;

    #[test]
    fn only_empty_tables_and_indexes_are_created() {
        for good in [
            "CREATE TABLE session (id TEXT PRIMARY KEY, cost REAL DEFAULT 0 NOT NULL)",
            "CREATE TABLE `part` (\n\t`id` text PRIMARY KEY,\n\t`data` text NOT NULL DEFAULT '{}'\n)",
            "CREATE UNIQUE INDEX `part_idx` ON `part` (`session_id`,`id`)",
        ] {
            assert!(is_create_statement(good), "{good}");
        }
        for bad in [
            "CREATE TABLE credential AS SELECT 'key' AS id",
            "CREATE TABLE credential AS\nSELECT 'key' AS id",
            "CREATE TABLE credential AS VALUES ('key', 'secret')",
            "CREATE TABLE credential/**/AS/**/SELECT 1",
            "CREATE TABLE main.credential (id); INSERT INTO credential VALUES (1)",
            "CREATE VIRTUAL TABLE x USING fts5(a)",
            "CREATE TRIGGER t AFTER INSERT ON session BEGIN SELECT 1; END",
            "CREATE TABLE session (id TEXT, permission TEXT AS ('[]'))",
            "CREATE TABLE session (id TEXT, permission TEXT DEFAULT '[{\"action\":\"allow\"}]')",
            "CREATE TABLE project (id TEXT, commands TEXT DEFAULT (char(123)))",
            "DROP TABLE session",
        ] {
            assert!(!is_create_statement(bad), "{bad}");
        }
    }
}
