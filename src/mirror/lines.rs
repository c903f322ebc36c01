//! The lines of a mirrored session: one per version of a row, and one for the schema.
//!
//! A changed row is written again, and its last line is current. A deleted row is written as null.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::tables::{MIGRATIONS, PROJECT, TABLES, is_stored};
use crate::error::{Error, Result};

/// The schema of a database.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Schema {
    /// The statements that create its tables and indexes.
    pub sql: Vec<String>,
    /// The applied migrations, by table.
    pub migrations: BTreeMap<String, Vec<Map<String, Value>>>,
}

/// A line, parsed as far as needed to identify its row.
#[derive(Deserialize)]
pub struct LineHeader<'a> {
    /// The table; none in a schema line.
    pub table: Option<String>,
    /// The primary key of the row.
    pub key: Option<String>,
    /// The row; null if it was deleted.
    #[serde(borrow)]
    pub row: Option<&'a RawValue>,
    /// The schema.
    #[serde(borrow)]
    pub schema: Option<&'a RawValue>,
}

/// The line of a row. `row` is JSON. A part has the role and the model of its message.
pub fn row_line(
    table: &str,
    key: &str,
    role: Option<&str>,
    model: Option<&str>,
    row: &str,
) -> String {
    let quote = |text: &str| Value::from(text).to_string();
    let field = |name: &str, value: Option<&str>| {
        let value = value.map(|value| format!(",\"{name}\":{}", quote(value)));
        value.unwrap_or_default()
    };
    format!(
        "{{\"table\":{},\"key\":{}{}{},\"row\":{row}}}\n",
        quote(table),
        quote(key),
        field("role", role),
        field("model", model),
    )
}

/// The line of a deleted row.
pub fn deleted_row_line(table: &str, key: &str) -> String {
    row_line(table, key, None, None, "null")
}

/// The rows of a session and its sub-agents, by table index and key.
pub type Rows = BTreeMap<(usize, String), Map<String, Value>>;

/// The content of a mirrored session.
#[derive(Debug, Default)]
pub struct SessionRows {
    /// The schema of the database that the rows come from.
    pub schema: Schema,
    /// The rows of its project, by key.
    pub projects: BTreeMap<String, Map<String, Value>>,
    /// The rows.
    pub rows: Rows,
}

impl SessionRows {
    /// Parses the lines of a session. The store is not trusted: only the tables of a session are
    /// accepted, and only rows of this session and its sub-agents.
    pub fn parse(session: &str, bytes: &[u8]) -> Result<SessionRows> {
        let mut parsed = SessionRows::default();
        let lines = bytes
            .split_inclusive(|byte| *byte == b'\n')
            .filter(|line| line.ends_with(b"\n"));
        for line in lines {
            if let Ok(header) = serde_json::from_slice::<LineHeader<'_>>(line) {
                parsed.apply(header)?;
            }
        }
        let ids: BTreeSet<&str> = parsed
            .rows
            .iter()
            .filter(|((table, _), _)| *table == 0)
            .filter_map(|(_, row)| row.get("id")?.as_str())
            .collect();
        let has_owner = |((table, _), row): (&(usize, String), &Map<String, Value>)| {
            row.get(TABLES[*table].1)
                .and_then(Value::as_str)
                .is_some_and(|id| ids.contains(id))
        };
        if !ids.contains(session) {
            return Err(Error::corrupt(format!(
                "the row of session {session} is missing"
            )));
        }
        if !parsed.rows.iter().all(has_owner) {
            return Err(Error::corrupt("a row belongs to another session"));
        }
        let ids: BTreeSet<String> = ids.into_iter().map(str::to_owned).collect();
        parsed.cut_references(&ids);
        Ok(parsed)
    }

    /// Removes references to other sessions, whose IDs are not in `ids`: a row must not become part
    /// of a session that is in the database already.
    fn cut_references(&mut self, ids: &BTreeSet<String>) {
        let text = |row: &Map<String, Value>, column: &str| {
            row.get(column).and_then(Value::as_str).map(str::to_owned)
        };
        let (session, message, part) = (0, 1, 2);
        let messages: BTreeSet<String> = self
            .rows
            .iter()
            .filter(|((table, _), _)| *table == message)
            .filter_map(|(_, row)| text(row, "id"))
            .collect();
        self.rows.retain(|(table, _), row| {
            *table != part || text(row, "message_id").is_some_and(|id| messages.contains(&id))
        });
        let mut projects = BTreeSet::new();
        for ((table, _), row) in &mut self.rows {
            if *table != session {
                continue;
            }
            if text(row, "parent_id").is_some_and(|parent| !ids.contains(&parent)) {
                row.insert("parent_id".to_owned(), Value::Null);
            }
            projects.extend(text(row, "project_id"));
        }
        self.projects
            .retain(|_, row| text(row, "id").is_some_and(|id| projects.contains(&id)));
    }

    fn apply(&mut self, header: LineHeader<'_>) -> Result<()> {
        if let Some(schema) = header.schema {
            self.schema = serde_json::from_str(schema.get())
                .map_err(|cause| Error::corrupt(format!("invalid schema: {cause}")))?;
            for (table, rows) in &mut self.schema.migrations {
                if !MIGRATIONS.contains(&table.as_str()) {
                    return Err(Error::corrupt(format!(
                        "table {table:?} does not contain migrations"
                    )));
                }
                rows.iter_mut().for_each(|row| keep_stored(table, row));
            }
        }
        let (Some(table), Some(key)) = (header.table, header.key) else {
            return Ok(());
        };
        let row = header
            .row
            .map(|row| serde_json::from_str(row.get()))
            .transpose()
            .map_err(|cause| Error::corrupt(format!("invalid row of table {table:?}: {cause}")))?
            .map(|mut row| {
                keep_stored(&table, &mut row);
                row
            });
        match (TABLES.iter().position(|(name, _)| *name == table), row) {
            (Some(table), Some(row)) => {
                self.rows.insert((table, key), row);
            }
            (Some(table), None) => {
                self.rows.remove(&(table, key));
            }
            (None, Some(row)) if table == PROJECT => {
                self.projects.insert(key, row);
            }
            (None, None) if table == PROJECT => {}
            (None, _) => {
                return Err(Error::corrupt(format!(
                    "table {table:?} does not belong to a session"
                )));
            }
        }
        Ok(())
    }
}

/// Drops the columns that are not stored.
fn keep_stored(table: &str, row: &mut Map<String, Value>) {
    row.retain(|column, _| is_stored(table, column));
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSION: &str = "{\"table\":\"session\",\"key\":\"s\",\"row\":{\"id\":\"s\"}}\n";

    #[test]
    fn only_rows_of_the_session_are_accepted() {
        let parse = |line: &str| {
            let parsed = SessionRows::parse("s", format!("{SESSION}{line}\n").as_bytes());
            parsed.map(|parsed| parsed.rows.len())
        };
        assert_eq!(
            parse("{\"table\":\"todo\",\"key\":\"p\",\"row\":{\"id\":\"p\",\"session_id\":\"s\"}}")
                .ok(),
            Some(2)
        );
        assert_eq!(
            parse("{\"table\":\"part\",\"key\":\"p\",\"row\":null}").ok(),
            Some(1)
        );
        assert_eq!(parse("garbage").ok(), Some(1));
        for bad in [
            "{\"table\":\"credential\",\"key\":\"c\",\"row\":{\"id\":\"c\"}}",
            "{\"table\":\"part\",\"key\":\"p\",\"row\":{\"id\":\"p\",\"session_id\":\"another\"}}",
            "{\"table\":\"part\",\"key\":\"p\",\"row\":{\"id\":\"p\"}}",
            "{\"table\":\"session\",\"key\":\"s\",\"row\":null}",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_columns_and_references_of_the_session_are_restored() {
        let lines = concat!(
            r#"{"schema":{"sql":[],"migrations":{"migration":[{"id":"first","time_completed":1,"x":2}]}}}"#,
            "\n",
            r#"{"table":"project","key":"p","row":{"id":"p","worktree":"/w","commands":"{\"start\":\"evil\"}"}}"#,
            "\n",
            r#"{"table":"project","key":"q","row":{"id":"q","worktree":"/"}}"#,
            "\n",
            r#"{"table":"session","key":"s","row":{"id":"s","project_id":"p","parent_id":"mine","permission":"[]"}}"#,
            "\n",
            r#"{"table":"message","key":"m","row":{"id":"m","session_id":"s"}}"#,
            "\n",
            r#"{"table":"part","key":"a","row":{"id":"a","message_id":"m","session_id":"s"}}"#,
            "\n",
            r#"{"table":"part","key":"b","row":{"id":"b","message_id":"of another session","session_id":"s"}}"#,
            "\n",
        );
        let parsed = SessionRows::parse("s", lines.as_bytes()).unwrap();
        let text = |row: &Map<String, Value>| serde_json::to_string(row).unwrap();
        let rows: Vec<String> = parsed.rows.values().map(text).collect();
        assert_eq!(
            rows,
            [
                r#"{"id":"s","parent_id":null,"project_id":"p"}"#,
                r#"{"id":"m","session_id":"s"}"#,
                r#"{"id":"a","message_id":"m","session_id":"s"}"#,
            ]
        );
        let projects: Vec<String> = parsed.projects.values().map(text).collect();
        assert_eq!(projects, [r#"{"id":"p","worktree":"/w"}"#]);
        let migrations: Vec<String> = parsed.schema.migrations["migration"]
            .iter()
            .map(text)
            .collect();
        assert_eq!(migrations, [r#"{"id":"first","time_completed":1}"#]);
        let secrets = r#"{"schema":{"sql":[],"migrations":{"credential":[{"id":"c"}]}}}"#;
        let error = SessionRows::parse("s", format!("{SESSION}{secrets}\n").as_bytes());
        assert!(error.unwrap_err().to_string().contains("\"credential\""));
    }
}
