//! Many rows with one statement: the rows are one JSON document, which the database expands.
//!
//! Owns the SQL that expands it, which differs between the databases. The text of a statement does
//! not depend on the number of its rows, so each connection prepares it once.

use std::fmt::Write as _;

use serde_json::Value;
use sqlx::any::AnyRow;
use sqlx::{Any, AnyConnection, AssertSqlSafe};

use super::error::SqlError;
use crate::error::{Error, Result};

/// Maximum size of the document of one statement, in bytes, unless one row alone is larger.
const MAX_DOCUMENT_LEN: usize = 1 << 20;

/// A column of the rows: its name, and its type in the document.
#[derive(Debug, Clone, Copy)]
pub(super) enum Column {
    /// A text or NULL.
    Text(&'static str),
    /// A BIGINT or NULL.
    Number(&'static str),
    /// In PostgreSQL, the words of a text, for the full-text index.
    Words(&'static str),
}

impl Column {
    const fn name(self) -> &'static str {
        match self {
            Column::Text(name) | Column::Number(name) | Column::Words(name) => name,
        }
    }

    /// The expression that reads the column from the array `value`.
    fn expression(self, position: usize) -> String {
        let name = self.name();
        match self {
            Column::Text(_) => format!("bulk.value ->> {position} AS {name}"),
            Column::Number(_) => format!("CAST(bulk.value ->> {position} AS BIGINT) AS {name}"),
            Column::Words(_) => {
                format!("to_tsvector('simple', bulk.value ->> {position}) AS {name}")
            }
        }
    }
}

/// Rows of the same columns.
#[derive(Debug)]
pub(super) struct Bulk {
    columns: &'static [Column],
    document: String,
}

impl Bulk {
    pub(super) const fn new(columns: &'static [Column]) -> Bulk {
        Bulk {
            columns,
            document: String::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.document.is_empty()
    }

    /// Whether the next row belongs to another statement.
    pub(super) fn is_full(&self) -> bool {
        self.document.len() >= MAX_DOCUMENT_LEN
    }

    /// Adds a row, with a value for each column.
    pub(super) fn push(&mut self, row: Vec<Value>) {
        debug_assert_eq!(row.len(), self.columns.len());
        let separator = if self.document.is_empty() { '[' } else { ',' };
        // Writing to a String cannot fail.
        let _ = write!(self.document, "{separator}{}", Value::Array(row));
    }

    /// The derived table of the rows, named `new`.
    fn table(&self, postgres: bool) -> String {
        let columns = self.columns.iter().enumerate();
        let columns: Vec<String> = columns.map(|(at, column)| column.expression(at)).collect();
        let source = match postgres {
            true => "jsonb_array_elements(CAST($1 AS jsonb)) AS bulk(value)",
            false => "json_each($1) AS bulk",
        };
        format!("(SELECT {} FROM {source}) AS new", columns.join(", "))
    }

    /// The names of the columns.
    fn names(&self) -> String {
        let names: Vec<&str> = self.columns.iter().map(|column| column.name()).collect();
        names.join(", ")
    }

    fn take_document(&mut self) -> String {
        let mut document = std::mem::take(&mut self.document);
        document.push(']');
        document
    }

    /// Inserts the rows and removes them from here. `conflict` is the clause for existing rows.
    pub(super) async fn insert_into(
        &mut self,
        connection: &mut AnyConnection,
        table: &str,
        conflict: &str,
    ) -> Result<(), SqlError> {
        if self.is_empty() {
            return Ok(());
        }
        let (rows, names) = (self.table(is_postgres(connection)), self.names());
        // Without the condition, SQLite would parse the conflict clause as part of a join.
        let sql = format!(
            "INSERT INTO {table} ({names}) SELECT {names} FROM {rows} WHERE true{conflict}"
        );
        sqlx::query::<Any>(AssertSqlSafe(sql))
            .bind(self.take_document())
            .execute(connection)
            .await?;
        Ok(())
    }

    /// Selects the rows of a table that equal one of these rows in all columns. `suffix` is the end
    /// of the statement.
    pub(super) async fn select_from(
        mut self,
        connection: &mut AnyConnection,
        select: &str,
        table: &str,
        suffix: &str,
    ) -> Result<Vec<AnyRow>, SqlError> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.table(is_postgres(connection));
        let equal = |column: &Column| format!("{table}.{0} = new.{0}", column.name());
        let equal: Vec<String> = self.columns.iter().map(equal).collect();
        // A cross join makes SQLite look up each row, instead of scanning the table.
        let sql = format!(
            "SELECT {select} FROM {rows} CROSS JOIN {table} WHERE {}{suffix}",
            equal.join(" AND ")
        );
        let query = sqlx::query::<Any>(AssertSqlSafe(sql)).bind(self.take_document());
        Ok(query.fetch_all(connection).await?)
    }
}

/// The clause that replaces existing rows: all columns that are not part of the key.
pub(super) fn replace_on_conflict(columns: &[Column], key_len: usize) -> String {
    let (key, others) = columns.split_at(key_len);
    let key: Vec<&str> = key.iter().map(|column| column.name()).collect();
    let set = |column: &Column| format!("{0} = excluded.{0}", column.name());
    let set: Vec<String> = others.iter().map(set).collect();
    format!(
        " ON CONFLICT ({}) DO UPDATE SET {}",
        key.join(", "),
        set.join(", ")
    )
}

/// A number for a BIGINT column.
pub(super) fn number(what: &str, number: u64) -> Result<Value> {
    i64::try_from(number)
        .map(Value::from)
        .map_err(|_| Error::corrupt(format!("invalid {what} {number}: it exceeds 2^63-1")))
}

/// Whether the connection is to PostgreSQL.
pub(super) fn is_postgres(connection: &AnyConnection) -> bool {
    connection.backend_name() == "PostgreSQL"
}
