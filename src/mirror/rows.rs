//! The tables of OpenCode's database that make a session, and what a row of them is as a line.
//!
//! Owns which tables are read: those named here and no others, so that accounts, credentials and the secrets of shared
//! sessions never are. Does not own when, or the files (`mirror`).

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

/// A table, and the column that says which session a row belongs to. A session's row comes before its messages, and
/// those before their parts.
pub const TABLES: [(&str, &str); 7] = [
    ("session", "id"),
    ("message", "session_id"),
    ("part", "session_id"),
    ("todo", "session_id"),
    ("session_message", "session_id"),
    ("session_input", "session_id"),
    ("session_context_epoch", "session_id"),
];

/// The row that sessions point to; shared by many, so it is added where it is missing and never changed.
pub const PROJECT: &str = "project";

/// Which migrations the database has seen: OpenCode runs the others.
const MIGRATIONS: [&str; 2] = ["migration", "data_migration"];

/// A session and those of its sub-agents.
pub const FAMILY: &str = "WITH RECURSIVE family(id) AS (SELECT ?1 UNION SELECT session.id FROM session JOIN family ON session.parent_id = family.id) ";

/// A line, as far as it is read to know which row it is.
#[derive(Deserialize)]
pub struct Named<'a> {
    /// The table; none in the line that holds the schema.
    pub table: Option<String>,
    /// The row's primary key.
    pub key: Option<String>,
    /// The row; null if it is gone.
    #[serde(borrow)]
    pub row: Option<&'a RawValue>,
    /// How to make the database.
    #[serde(borrow)]
    pub schema: Option<&'a RawValue>,
}

/// A name within SQL.
pub fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The columns of a table and, of these, the primary key; nothing if there is no such table.
pub async fn columns(
    database: &mut SqliteConnection,
    table: &str,
) -> sqlx::Result<(Vec<String>, Vec<String>)> {
    let found = sqlx::query("SELECT name, pk FROM pragma_table_info(?1) ORDER BY cid")
        .bind(table)
        .fetch_all(database)
        .await?;
    let (mut all, mut key) = (Vec::new(), BTreeMap::new());
    for column in found {
        let (name, place): (String, i64) = (column.try_get(0)?, column.try_get(1)?);
        if place > 0 {
            key.insert(place, name.clone());
        }
        all.push(name);
    }
    Ok((all, key.into_values().collect()))
}

/// A row as JSON, made by the database itself: the same row is always the same text.
fn as_json(table: &str, columns: &[String]) -> String {
    let pairs: Vec<String> = columns
        .iter()
        .map(|column| {
            format!(
                "'{}', {}.{}",
                column.replace('\'', "''"),
                quoted(table),
                quoted(column)
            )
        })
        .collect();
    format!("json_object({})", pairs.join(", "))
}

/// A table that the database has.
struct Found {
    rank: usize,
    name: String,
    owner: &'static str,
    columns: Vec<String>,
    key: String,
}

async fn found(database: &mut SqliteConnection) -> sqlx::Result<Vec<Found>> {
    let mut all = Vec::new();
    for (rank, (table, owner)) in TABLES.iter().enumerate() {
        let (columns, key) = columns(database, table).await?;
        if !columns.is_empty() && !key.is_empty() {
            let name = quoted(table);
            let key: Vec<String> = key
                .iter()
                .map(|column| format!("{name}.{}", quoted(column)))
                .collect();
            all.push(Found {
                rank,
                key: format!("CAST({} AS TEXT)", key.join(" || '/' || ")),
                name,
                owner,
                columns,
            });
        }
    }
    Ok(all)
}

fn joined(selects: impl Iterator<Item = String>, order: &str) -> String {
    format!(
        "{FAMILY} {} {order}",
        selects.collect::<Vec<_>>().join(" UNION ALL ")
    )
}

/// What is asked of the rows of a family, ?1.
pub struct Questions {
    /// The table, the key, who speaks, and the row, of those that changed since ?2. In the order in which they were made: what was said
    /// first comes first, so that a point between two turns is one between two lines.
    pub changed: String,
    /// How many rows there are in each table.
    pub counts: String,
    /// The table and the key of every row.
    pub keys: String,
}

impl Questions {
    /// The statements, for the tables that the database has.
    pub async fn of(database: &mut SqliteConnection) -> sqlx::Result<Questions> {
        let tables = found(database).await?;
        let changed = tables.iter().map(|Found { rank, name, owner, columns, key }| {
            let table = TABLES[*rank].0;
            let has = |column: &str| columns.iter().any(|known| known == column);
            // A part does not say whose words it holds.
            let role = match table {
                "part" => "(SELECT json_extract(message.data, '$.role') FROM message WHERE message.id = part.message_id)",
                _ => "NULL",
            };
            let time = if has("time_created") && table != "session" { format!("{name}.time_created") } else { "0".to_owned() };
            let since = if has("time_updated") { format!("{name}.time_updated >= ?2") } else { "?2 >= 0".to_owned() };
            let row = format!("CAST({} AS BLOB)", as_json(table, columns));
            format!("SELECT {rank}, {key}, {role}, {row}, {time} FROM {name} WHERE {name}.{owner} IN family AND {since}")
        });
        let counts = |Found {
                          rank, name, owner, ..
                      }: &Found| {
            format!("SELECT {rank}, count(*) FROM {name} WHERE {owner} IN family")
        };
        let keys = |Found {
                        rank,
                        name,
                        owner,
                        key,
                        ..
                    }: &Found| {
            format!("SELECT {rank}, {key} FROM {name} WHERE {owner} IN family")
        };
        Ok(Questions {
            changed: joined(changed, "ORDER BY 5, 1, 2"),
            counts: joined(tables.iter().map(counts), ""),
            keys: joined(tables.iter().map(keys), ""),
        })
    }
}

/// A row as a line.
pub fn line(table: &str, key: &str, role: Option<&str>, row: &str) -> String {
    let text = |text: &str| serde_json::Value::from(text).to_string();
    let role = role
        .map(|role| format!(",\"role\":{}", text(role)))
        .unwrap_or_default();
    format!(
        "{{\"table\":{},\"key\":{}{role},\"row\":{row}}}\n",
        text(table),
        text(key)
    )
}

/// The line that says how the database is made: its tables and indexes, and the migrations it has seen. No row of anybody's.
pub async fn schema(database: &mut SqliteConnection) -> sqlx::Result<String> {
    const MADE: &str = "SELECT json_group_array(sql) FROM (SELECT sql FROM sqlite_schema WHERE type IN ('table', 'index') \
         AND sql IS NOT NULL AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY rowid)";
    let made: String = sqlx::query_scalar(MADE).fetch_one(&mut *database).await?;
    let mut seen = Vec::new();
    for table in MIGRATIONS {
        let (columns, _) = columns(database, table).await?;
        if !columns.is_empty() {
            let rows = format!(
                "SELECT json_group_array(json({})) FROM {table}",
                as_json(table, &columns)
            );
            let rows: String = sqlx::query_scalar(AssertSqlSafe(rows))
                .fetch_one(&mut *database)
                .await?;
            seen.push(format!("\"{table}\":{rows}"));
        }
    }
    Ok(format!(
        "{{\"schema\":{{\"sql\":{made},\"seen\":{{{}}}}}}}\n",
        seen.join(",")
    ))
}

/// The line of the project that a session belongs to.
pub async fn project(
    database: &mut SqliteConnection,
    session: &str,
) -> sqlx::Result<Option<(String, String)>> {
    let (columns, _) = columns(database, PROJECT).await?;
    if columns.is_empty() {
        return Ok(None);
    }
    let sql = format!(
        "SELECT project.id, {} FROM project JOIN session ON session.project_id = project.id WHERE session.id = ?1",
        as_json(PROJECT, &columns)
    );
    let found = sqlx::query(AssertSqlSafe(sql))
        .bind(session)
        .fetch_optional(database)
        .await?;
    found
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .transpose()
}
