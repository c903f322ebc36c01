//! A SQL statement that is built piece by piece, with its bound values.

use std::fmt::Write as _;

use sqlx::any::AnyRow;
use sqlx::{Any, AnyConnection, AssertSqlSafe};

use super::error::SqlError;
use crate::error::Result;

/// SQL text and its values, with placeholders that both databases accept. Values from outside are
/// always bound; the text holds only constants of this crate.
pub(super) struct Statement {
    sql: String,
    values: Vec<Value>,
}

enum Value {
    Text(String),
    Number(i64),
}

impl Statement {
    /// Starts a statement with this text.
    pub(super) fn new(sql: impl Into<String>) -> Self {
        Statement {
            sql: sql.into(),
            values: Vec::new(),
        }
    }

    /// Appends SQL text.
    pub(super) fn push(&mut self, sql: &str) -> &mut Self {
        self.sql.push_str(sql);
        self
    }

    /// Appends a placeholder and binds a text to it.
    pub(super) fn bind_text(&mut self, text: impl Into<String>) -> &mut Self {
        self.bind(Value::Text(text.into()))
    }

    /// Appends a placeholder and binds a number to it.
    pub(super) fn bind_number(&mut self, number: i64) -> &mut Self {
        self.bind(Value::Number(number))
    }

    fn bind(&mut self, value: Value) -> &mut Self {
        self.values.push(value);
        // Writing to a String cannot fail.
        let _ = write!(self.sql, "${}", self.values.len());
        self
    }

    /// Runs the statement and returns its rows.
    pub(super) async fn fetch(
        self,
        connection: &mut AnyConnection,
    ) -> Result<Vec<AnyRow>, SqlError> {
        let query = sqlx::query::<Any>(AssertSqlSafe(self.sql)).persistent(false);
        let bound = self
            .values
            .into_iter()
            .fold(query, |query, value| match value {
                Value::Text(text) => query.bind(text),
                Value::Number(number) => query.bind(number),
            });
        Ok(bound.fetch_all(connection).await?)
    }
}
