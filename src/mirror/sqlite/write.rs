//! Writes a restored session to OpenCode's database, before OpenCode starts.
//!
//! One transaction writes all rows of the session, or none.

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

fn is_create_statement(sql: &str) -> bool {
    let upper = sql.trim_start().to_ascii_uppercase();
    let is_create = ["CREATE TABLE ", "CREATE INDEX ", "CREATE UNIQUE INDEX "]
        .iter()
        .any(|prefix| upper.starts_with(prefix));
    is_create && !sql.contains(';') && !upper.contains(" AS SELECT") && !upper.contains("VIRTUAL")
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
    use super::*;

    #[tokio::test]
    async fn a_schema_creates_tables_and_does_nothing_else() {
        for bad in [
            "ATTACH DATABASE '/x' AS y",
            "CREATE TABLE a (b); DROP TABLE c",
            "CREATE TRIGGER t AFTER INSERT ON a BEGIN SELECT 1 END",
            "CREATE TABLE a AS SELECT 1",
        ] {
            let mut connection = SqliteConnection::connect("sqlite::memory:").await.unwrap();
            let schema = Schema {
                sql: vec![bad.to_owned()],
                ..Schema::default()
            };
            assert!(
                create_tables(&mut connection, &schema).await.is_err(),
                "{bad}"
            );
        }
    }
}
