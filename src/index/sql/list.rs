//! Sessions, a page at a time.
//!
//! Owns the query that a filter makes, and the cursor. Does not own the rows (`rows`).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use jiff::Timestamp;
use sqlx::any::AnyRow;
use sqlx::{Any, AnyConnection, AssertSqlSafe};

use super::failure::Fault;
use super::rows::{self, LONGEST_PROJECT, clip, stamp, text};
use crate::error::{Error, Result};
use crate::index::{Filter, SessionPage, SessionRow};
use crate::model::{AgentName, SessionId};

/// The longest page.
const LONGEST_PAGE: u32 = 1000;

/// SQL with its values, numbered as both databases take them. Only our own words go into the text.
pub(super) struct Statement {
    sql: String,
    values: Vec<Value>,
}

enum Value {
    Text(String),
    Number(i64),
}

impl Statement {
    pub(super) fn new(sql: impl Into<String>) -> Self {
        Statement {
            sql: sql.into(),
            values: Vec::new(),
        }
    }

    /// Adds words of ours.
    pub(super) fn say(&mut self, sql: &str) -> &mut Self {
        self.sql.push_str(sql);
        self
    }

    /// Adds a value.
    pub(super) fn value(&mut self, value: impl Into<String>) -> &mut Self {
        self.bind(Value::Text(value.into()))
    }

    /// Adds a number.
    pub(super) fn number(&mut self, number: i64) -> &mut Self {
        self.bind(Value::Number(number))
    }

    fn bind(&mut self, value: Value) -> &mut Self {
        self.values.push(value);
        // Writing to a String cannot fail.
        let _ = write!(self.sql, "${}", self.values.len());
        self
    }

    pub(super) async fn fetch(self, connection: &mut AnyConnection) -> Result<Vec<AnyRow>, Fault> {
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

/// One page.
pub(super) async fn page(
    connection: &mut AnyConnection,
    filter: &Filter,
    cursor: Option<Cursor>,
) -> Result<SessionPage, Fault> {
    let prefix = filter.id_prefix.as_deref().unwrap_or_default();
    if !prefix
        .bytes()
        .all(|byte| byte.is_ascii_graphic() && byte != b'~')
    {
        // No id holds such a character.
        return Ok(SessionPage::default());
    }
    let limit = filter.limit.clamp(1, LONGEST_PAGE) as usize;
    let mut sessions: Vec<SessionRow> = query(filter, prefix, cursor, limit + 1)
        .fetch(connection)
        .await?
        .iter()
        .map(rows::session)
        .collect::<Result<_, _>>()?;
    let more = sessions.len() > limit;
    sessions.truncate(limit);
    let next = sessions
        .last()
        .filter(|_| more)
        .map(|last| Cursor::behind(last).to_text());
    add_branches(connection, filter.namespace.as_str(), &mut sessions).await?;
    add_labels(connection, filter.namespace.as_str(), &mut sessions).await?;
    Ok(SessionPage { sessions, next })
}

fn query(filter: &Filter, prefix: &str, cursor: Option<Cursor>, limit: usize) -> Statement {
    let mut statement = Statement::new(format!(
        "SELECT {} FROM sessions WHERE namespace = ",
        rows::SESSION
    ));
    statement.value(filter.namespace.as_str());
    if let Some(agent) = &filter.agent {
        statement.say(" AND agent = ").value(agent.as_str());
    }
    if let Some(project) = &filter.project {
        statement
            .say(" AND project = ")
            .value(clip(project, LONGEST_PROJECT));
    }
    match &filter.status {
        Some(status) => statement
            .say(" AND status = ")
            .value(clip(status, LONGEST_PROJECT)),
        None => statement.say(" AND status <> 'removed'"),
    };
    if let Some(request) = &filter.request {
        statement
            .say(" AND request_id = ")
            .value(clip(request, LONGEST_PROJECT));
    }
    for label in &filter.labels {
        statement.say(" AND EXISTS (SELECT 1 FROM labels WHERE labels.namespace = sessions.namespace AND labels.agent = sessions.agent");
        statement
            .say(" AND labels.session = sessions.id AND labels.name = ")
            .value(clip(&label.name, LONGEST_PROJECT));
        statement
            .say(" AND labels.value = ")
            .value(clip(&label.value, LONGEST_PROJECT))
            .say(")");
    }
    if !prefix.is_empty() {
        // '~' comes behind every character of an id.
        statement
            .say(" AND id >= ")
            .value(prefix)
            .say(" AND id < ")
            .value(format!("{prefix}~"));
    }
    // SQLite would rather walk all sessions in order than sort the few that begin so; an expression is no index's order.
    let newest = if prefix.is_empty() {
        "updated"
    } else {
        "updated || ''"
    };
    if let Some(Cursor { updated, agent, id }) = cursor {
        statement
            .say(" AND ")
            .say(newest)
            .say(" <= ")
            .value(updated.clone());
        statement
            .say(" AND (updated < ")
            .value(updated)
            .say(" OR (agent, id) > (")
            .value(agent)
            .say(", ")
            .value(id)
            .say("))");
    }
    statement
        .say(" AND substr(id, 1, 1) <> '@' ORDER BY ")
        .say(newest)
        .say(" DESC, agent, id LIMIT ")
        .say(&limit.to_string());
    statement
}

/// The beginning of a query about these sessions. For SQLite a cross join with them is also an order: first the sessions, then
/// the few rows of each.
fn wanted(sessions: &[SessionRow]) -> Statement {
    let mut statement = Statement::new("WITH wanted (agent, id) AS (VALUES ".to_owned());
    for (number, session) in sessions.iter().enumerate() {
        statement
            .say(if number == 0 { "(" } else { ", (" })
            .value(&session.agent)
            .say(", ")
            .value(&session.id)
            .say(")");
    }
    statement.say(")");
    statement
}

/// Fills in the labels of all of these sessions of one namespace, in one query.
pub(super) async fn add_labels(
    connection: &mut AnyConnection,
    namespace: &str,
    sessions: &mut [SessionRow],
) -> Result<(), Fault> {
    if sessions.is_empty() {
        return Ok(());
    }
    let mut statement = wanted(sessions);
    statement.say(" SELECT labels.agent AS agent, labels.session AS session, labels.name AS name, labels.value AS value ");
    statement
        .say("FROM wanted CROSS JOIN labels WHERE labels.namespace = ")
        .value(namespace);
    statement.say(" AND labels.agent = wanted.agent AND labels.session = wanted.id");
    let mut labels: BTreeMap<(String, String), BTreeMap<String, String>> = BTreeMap::new();
    for row in statement.fetch(connection).await? {
        let of = labels
            .entry((text(&row, "agent")?, text(&row, "session")?))
            .or_default();
        of.insert(text(&row, "name")?, text(&row, "value")?);
    }
    for session in sessions {
        session.labels = labels
            .remove(&(session.agent.clone(), session.id.clone()))
            .unwrap_or_default();
    }
    Ok(())
}

/// Fills in the branches of all of these sessions of one namespace, in one query.
pub(super) async fn add_branches(
    connection: &mut AnyConnection,
    namespace: &str,
    sessions: &mut [SessionRow],
) -> Result<(), Fault> {
    if sessions.is_empty() {
        return Ok(());
    }
    let mut statement = wanted(sessions);
    statement.say(" SELECT DISTINCT entries.agent AS agent, entries.session AS session, entries.branch AS branch ");
    statement
        .say("FROM wanted CROSS JOIN entries WHERE entries.namespace = ")
        .value(namespace);
    statement.say(
        " AND entries.agent = wanted.agent AND entries.session = wanted.id AND entries.branch > ''",
    );
    let mut branches: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for row in statement.fetch(connection).await? {
        branches
            .entry((text(&row, "agent")?, text(&row, "session")?))
            .or_default()
            .push(text(&row, "branch")?);
    }
    for session in sessions {
        session.branches = branches
            .remove(&(session.agent.clone(), session.id.clone()))
            .unwrap_or_default();
        session.branches.sort();
    }
    Ok(())
}

/// The last session of a page.
pub(super) struct Cursor {
    updated: String,
    agent: String,
    id: String,
}

impl Cursor {
    fn behind(row: &SessionRow) -> Cursor {
        Cursor {
            updated: stamp(row.updated),
            agent: row.agent.clone(),
            id: row.id.clone(),
        }
    }

    fn to_text(&self) -> String {
        format!("{}|{}|{}", self.updated, self.agent, self.id)
    }

    /// Reads what [`Cursor::to_text`] wrote.
    pub(super) fn parse(text: &str) -> Result<Cursor> {
        let read = || -> Option<Cursor> {
            let (updated, rest) = text.split_once('|')?;
            let (agent, id) = rest.split_once('|')?;
            let updated: Timestamp = updated.parse().ok()?;
            let (agent, id): (AgentName, SessionId) = (agent.parse().ok()?, id.parse().ok()?);
            Some(Cursor {
                updated: stamp(updated),
                agent: agent.into(),
                id: id.into(),
            })
        };
        read().ok_or_else(|| {
            Error::usage(format!("read cursor {text:?}"))
                .hint("pass `next` of the page before, or none for the first")
        })
    }
}
