//! Makes the database hold what the file of a session says: after a restore, before OpenCode launches.
//!
//! One transaction: all rows of the session, or none. What comes from a bucket is not trusted: only the tables of a session
//! are written, and only rows of that session and its sub-agents.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;

use serde::Deserialize;
use serde_json::{Map, Value};
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteConnectOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Sqlite, SqliteConnection};

use super::rows::{self, FAMILY, Named, PROJECT, TABLES, quoted};
use super::{Mirror, PATIENCE, give};
use crate::error::{Error, ErrorContext, Result};
use crate::sys::Owner;

type Rows = BTreeMap<(usize, String), Map<String, Value>>;

/// How a database is made.
#[derive(Default, Deserialize)]
struct Schema {
    sql: Vec<String>,
    /// The migrations it has seen, by table.
    seen: BTreeMap<String, Vec<Map<String, Value>>>,
}

/// What the file of a session amounts to.
#[derive(Default)]
struct SessionRows {
    schema: Schema,
    project: BTreeMap<String, Map<String, Value>>,
    rows: Rows,
}

impl Mirror {
    /// Puts a session into the database, as its file has it; makes the database if there is none.
    pub async fn push(&self, session: &str, owner: Option<Owner>) -> Result<()> {
        let path = self.file(session);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(cause) => return Err(Error::io(format!("read {}", path.display()), cause)),
        };
        let told = read(session, &bytes).with_context(|| format!("read {}", path.display()))?;
        let database = self.database();
        let failed = |cause| Error::io(format!("make {}", database.display()), cause);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&database)
            .map_err(failed)?;
        give(&file, owner).map_err(failed)?;
        drop(file);
        let options = SqliteConnectOptions::new()
            .filename(&database)
            .foreign_keys(false)
            .busy_timeout(PATIENCE);
        let mut connection = options
            .disable_statement_logging()
            .connect()
            .await
            .map_err(|cause| self.failed(cause))?;
        let written = write(&mut connection, session, &told).await;
        let _ = connection.close().await;
        // What was read of it before is no longer so.
        let mut state = self.state.lock().await;
        state.stamp = None;
        state.changed.remove(session);
        state.known.remove(session);
        drop(state);
        written
            .map_err(|cause| explained(session, cause))
            .with_context(|| format!("write session {session} to {}", database.display()))
    }

    /// Whether the database has the session.
    pub async fn has(&self, session: &str) -> bool {
        let Ok(mut connection) = self.connect().await else {
            return false;
        };
        let found = sqlx::query("SELECT 1 FROM session WHERE id = ?1")
            .bind(session)
            .fetch_optional(&mut connection)
            .await;
        let _ = connection.close().await;
        matches!(found, Ok(Some(_)))
    }
}

fn explained(session: &str, cause: sqlx::Error) -> Error {
    let said = cause.to_string();
    if said.contains("UNIQUE constraint") {
        return Error::conflict(format!("another session holds messages of {session}"))
            .caused_by(cause)
            .hint("a fork shares its messages' ids with the session it began with: restore it in a home of its own");
    }
    if said.contains("no column named") || said.contains("no such table") {
        return Error::conflict(
            "a newer OpenCode wrote the session than the one whose database this is",
        )
        .caused_by(cause)
        .hint("upgrade opencode, start it once, and restore again");
    }
    Error::unavailable("write rows").caused_by(cause)
}

/// The last line of each row, and the last schema.
fn read(session: &str, bytes: &[u8]) -> Result<SessionRows> {
    let mut told = SessionRows::default();
    let wrong = |what: &str| Error::corrupt(format!("{what} is not what a session is made of"));
    for line in bytes
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|line| line.ends_with(b"\n"))
    {
        let Ok(named) = serde_json::from_slice::<Named<'_>>(line) else {
            continue;
        };
        if let Some(schema) = named.schema {
            told.schema = serde_json::from_str(schema.get())
                .map_err(|cause| wrong("the schema").caused_by(cause))?;
        }
        let (Some(table), Some(key)) = (named.table, named.key) else {
            continue;
        };
        let row = named
            .row
            .map(|row| serde_json::from_str(row.get()))
            .transpose()
            .map_err(|cause| wrong("a row").caused_by(cause))?;
        match (TABLES.iter().position(|(known, _)| *known == table), row) {
            (Some(table), Some(row)) => {
                told.rows.insert((table, key), row);
            }
            (Some(table), None) => {
                told.rows.remove(&(table, key));
            }
            (None, Some(row)) if table == PROJECT => {
                told.project.insert(key, row);
            }
            (None, _) if table == PROJECT => {}
            (None, _) => return Err(wrong(&format!("a row of table {table:?}"))),
        }
    }
    let ids: BTreeSet<&str> = told
        .rows
        .iter()
        .filter(|((table, _), _)| *table == 0)
        .filter_map(|(_, row)| row.get("id")?.as_str())
        .collect();
    let owned = |((table, _), row): (&(usize, String), &Map<String, Value>)| {
        row.get(TABLES[*table].1)
            .and_then(Value::as_str)
            .is_some_and(|id| ids.contains(id))
    };
    if !ids.contains(session) || !told.rows.iter().all(owned) {
        return Err(wrong("a row of another session"));
    }
    Ok(told)
}

async fn write(
    database: &mut SqliteConnection,
    session: &str,
    told: &SessionRows,
) -> sqlx::Result<()> {
    let mut transaction = database.begin_with("BEGIN IMMEDIATE").await?;
    if rows::columns(&mut transaction, "session")
        .await?
        .0
        .is_empty()
    {
        make(&mut transaction, &told.schema).await?;
    }
    // What the session has now goes, so that it has what the file says and no more.
    for (table, owner) in TABLES.iter().rev() {
        if !rows::columns(&mut transaction, table).await?.0.is_empty() {
            let sql = format!(
                "{FAMILY} DELETE FROM {} WHERE {owner} IN family",
                quoted(table)
            );
            sqlx::query(AssertSqlSafe(sql))
                .bind(session)
                .execute(&mut *transaction)
                .await?;
        }
    }
    for row in told.project.values() {
        insert(&mut transaction, "INSERT OR IGNORE", PROJECT, row).await?;
    }
    for ((table, _), row) in &told.rows {
        insert(&mut transaction, "INSERT", TABLES[*table].0, row).await?;
    }
    transaction.commit().await
}

/// Makes the tables of a database that has none. One statement each, which makes a table or an index and does nothing else.
async fn make(database: &mut SqliteConnection, schema: &Schema) -> sqlx::Result<()> {
    let plain = |sql: &str| {
        let start = sql.trim_start().to_ascii_uppercase();
        let makes = ["CREATE TABLE ", "CREATE INDEX ", "CREATE UNIQUE INDEX "]
            .iter()
            .any(|what| start.starts_with(what));
        makes && !sql.contains(';') && !start.contains(" AS SELECT") && !start.contains("VIRTUAL")
    };
    for sql in &schema.sql {
        if !plain(sql) {
            return Err(sqlx::Error::Protocol(format!(
                "not a statement that makes a table: {sql:.60}"
            )));
        }
        sqlx::query(AssertSqlSafe(sql.clone()))
            .execute(&mut *database)
            .await?;
    }
    for (table, seen) in &schema.seen {
        for row in seen {
            insert(database, "INSERT", table, row).await?;
        }
    }
    Ok(())
}

async fn insert(
    database: &mut SqliteConnection,
    how: &str,
    table: &str,
    row: &Map<String, Value>,
) -> sqlx::Result<()> {
    let columns: Vec<String> = row.keys().map(|column| quoted(column)).collect();
    let places: Vec<String> = (1..=row.len()).map(|at| format!("?{at}")).collect();
    let sql = format!(
        "{how} INTO {} ({}) VALUES ({})",
        quoted(table),
        columns.join(", "),
        places.join(", ")
    );
    let query = row.values().fold(sqlx::query(AssertSqlSafe(sql)), bind);
    query.execute(database).await.map(|_| ())
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

    const SESSION: &str = "{\"table\":\"session\",\"key\":\"s\",\"row\":{\"id\":\"s\"}}\n";

    #[test]
    fn only_rows_of_the_session_are_taken() {
        let told = |more: &str| {
            read("s", format!("{SESSION}{more}\n").as_bytes()).map(|told| told.rows.len())
        };
        assert_eq!(
            told("{\"table\":\"part\",\"key\":\"p\",\"row\":{\"id\":\"p\",\"session_id\":\"s\"}}")
                .ok(),
            Some(2)
        );
        assert_eq!(
            told("{\"table\":\"part\",\"key\":\"p\",\"row\":null}").ok(),
            Some(1)
        );
        assert_eq!(told("garbage").ok(), Some(1));
        for bad in [
            "{\"table\":\"credential\",\"key\":\"c\",\"row\":{\"id\":\"c\"}}",
            "{\"table\":\"part\",\"key\":\"p\",\"row\":{\"id\":\"p\",\"session_id\":\"another\"}}",
            "{\"table\":\"part\",\"key\":\"p\",\"row\":{\"id\":\"p\"}}",
            "{\"table\":\"session\",\"key\":\"s\",\"row\":null}",
        ] {
            assert!(told(bad).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_schema_makes_tables_and_nothing_else() {
        for bad in [
            "ATTACH DATABASE '/x' AS y",
            "CREATE TABLE a (b); DROP TABLE c",
            "CREATE TRIGGER t AFTER INSERT ON a BEGIN SELECT 1 END",
            "CREATE TABLE a AS SELECT 1",
        ] {
            let mut database = SqliteConnection::connect("sqlite::memory:").await.unwrap();
            let schema = Schema {
                sql: vec![bad.to_owned()],
                ..Schema::default()
            };
            assert!(make(&mut database, &schema).await.is_err(), "{bad}");
        }
    }
}
