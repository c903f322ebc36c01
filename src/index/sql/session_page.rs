//! Pages of the session list.
//!
//! Owns the query of a filter, and the cursor. Does not own the conversion of rows (`rows`).

use std::collections::BTreeMap;

use jiff::Timestamp;
use sqlx::AnyConnection;

use super::error::SqlError;
use super::rows::{self, MAX_KEY_LEN, format_time, read_text, truncate};
use super::statement::Statement;
use crate::error::{Error, Result};
use crate::index::{SessionFilter, SessionPage, SessionRow};
use crate::model::{AgentName, SessionId};

/// Maximum number of sessions in a page.
const MAX_PAGE_LEN: u32 = 1000;

/// Fetches one page.
pub(super) async fn page(
    connection: &mut AnyConnection,
    filter: &SessionFilter,
    cursor: Option<Cursor>,
) -> Result<SessionPage, SqlError> {
    let prefix = filter.id_prefix.as_deref().unwrap_or_default();
    if !prefix
        .bytes()
        .all(|byte| byte.is_ascii_graphic() && byte != b'~')
    {
        // No session ID contains such a character.
        return Ok(SessionPage::default());
    }
    let limit = filter.limit.clamp(1, MAX_PAGE_LEN) as usize;
    let mut sessions: Vec<SessionRow> = query(filter, prefix, cursor, limit + 1)
        .fetch(connection)
        .await?
        .iter()
        .map(rows::read_session)
        .collect::<Result<_, _>>()?;
    let has_more = sessions.len() > limit;
    sessions.truncate(limit);
    let next = sessions
        .last()
        .filter(|_| has_more)
        .map(|last| Cursor::new(last).to_text());
    add_branches(connection, filter.namespace.as_str(), &mut sessions).await?;
    add_labels(connection, filter.namespace.as_str(), &mut sessions).await?;
    Ok(SessionPage { sessions, next })
}

fn query(filter: &SessionFilter, prefix: &str, cursor: Option<Cursor>, limit: usize) -> Statement {
    let mut statement = Statement::new(format!(
        "SELECT {} FROM sessions WHERE namespace = ",
        rows::SESSION_COLUMNS
    ));
    statement.bind_text(filter.namespace.as_str());
    if let Some(agent) = &filter.agent {
        statement.push(" AND agent = ").bind_text(agent.as_str());
    }
    if let Some(project) = &filter.project {
        statement
            .push(" AND project = ")
            .bind_text(truncate(project, MAX_KEY_LEN));
    }
    match &filter.status {
        Some(status) => statement
            .push(" AND status = ")
            .bind_text(truncate(status, MAX_KEY_LEN)),
        None => statement.push(" AND status <> 'removed'"),
    };
    if let Some(request) = &filter.request {
        statement
            .push(" AND request_id = ")
            .bind_text(truncate(request, MAX_KEY_LEN));
    }
    push_content_filters(&mut statement, filter);
    for label in &filter.labels {
        statement.push(" AND EXISTS (SELECT 1 FROM labels WHERE labels.namespace = sessions.namespace AND labels.agent = sessions.agent");
        statement
            .push(" AND labels.session = sessions.id AND labels.name = ")
            .bind_text(truncate(&label.name, MAX_KEY_LEN));
        statement
            .push(" AND labels.value = ")
            .bind_text(truncate(&label.value, MAX_KEY_LEN))
            .push(")");
    }
    if !prefix.is_empty() {
        // '~' sorts after every character of a session ID.
        statement
            .push(" AND id >= ")
            .bind_text(prefix)
            .push(" AND id < ")
            .bind_text(format!("{prefix}~"));
    }
    // SQLite prefers to walk all sessions in order over sorting the few that match the prefix. No
    // database index has the order of an expression, so it prevents that.
    let order = if prefix.is_empty() {
        "updated"
    } else {
        "updated || ''"
    };
    if let Some(Cursor { updated, agent, id }) = cursor {
        statement
            .push(" AND ")
            .push(order)
            .push(" <= ")
            .bind_text(updated.clone());
        statement
            .push(" AND (updated < ")
            .bind_text(updated)
            .push(" OR (agent, id) > (")
            .bind_text(agent)
            .push(", ")
            .bind_text(id)
            .push("))");
    }
    statement
        .push(" AND substr(id, 1, 1) <> '@' ORDER BY ")
        .push(order)
        .push(" DESC, agent, id LIMIT ")
        .push(&limit.to_string());
    statement
}

/// Appends the conditions on columns that no database index has.
fn push_content_filters(statement: &mut Statement, filter: &SessionFilter) {
    if let Some(model) = &filter.model {
        statement
            .push(" AND model = ")
            .bind_text(truncate(model, MAX_KEY_LEN));
    }
    if let Some(since) = filter.since {
        statement
            .push(" AND updated >= ")
            .bind_text(format_time(since));
    }
    if let Some(until) = filter.until {
        statement
            .push(" AND updated < ")
            .bind_text(format_time(until));
    }
    if let Some(text) = &filter.title {
        // The characters with a meaning in a pattern stand for themselves.
        let escaped = text
            .replace('!', "!!")
            .replace('%', "!%")
            .replace('_', "!_");
        // PostgreSQL converts all letters to lower case, SQLite only those of ASCII.
        let (ascii, all) = (escaped.to_ascii_lowercase(), escaped.to_lowercase());
        let column = "lower(COALESCE(title, first_prompt, '')) LIKE ";
        statement.push(" AND (").push(column);
        statement.bind_text(format!("%{ascii}%"));
        statement.push(" ESCAPE '!' OR ").push(column);
        statement.bind_text(format!("%{all}%")).push(" ESCAPE '!')");
    }
}

/// Starts a query on these sessions. In SQLite a cross join also fixes the order of the join: first
/// the sessions, then the few rows of each.
fn select_sessions(sessions: &[SessionRow]) -> Statement {
    let mut statement = Statement::new("WITH wanted (agent, id) AS (VALUES ".to_owned());
    for (number, session) in sessions.iter().enumerate() {
        statement
            .push(if number == 0 { "(" } else { ", (" })
            .bind_text(&session.agent)
            .push(", ")
            .bind_text(&session.id)
            .push(")");
    }
    statement.push(")");
    statement
}

/// Adds the labels of these sessions of one namespace, in one query.
pub(super) async fn add_labels(
    connection: &mut AnyConnection,
    namespace: &str,
    sessions: &mut [SessionRow],
) -> Result<(), SqlError> {
    if sessions.is_empty() {
        return Ok(());
    }
    let mut statement = select_sessions(sessions);
    statement.push(" SELECT labels.agent AS agent, labels.session AS session, labels.name AS name, labels.value AS value ");
    statement
        .push("FROM wanted CROSS JOIN labels WHERE labels.namespace = ")
        .bind_text(namespace);
    statement.push(" AND labels.agent = wanted.agent AND labels.session = wanted.id");
    let mut labels: BTreeMap<(String, String), BTreeMap<String, String>> = BTreeMap::new();
    for row in statement.fetch(connection).await? {
        let session = labels
            .entry((read_text(&row, "agent")?, read_text(&row, "session")?))
            .or_default();
        session.insert(read_text(&row, "name")?, read_text(&row, "value")?);
    }
    for session in sessions {
        session.labels = labels
            .remove(&(session.agent.clone(), session.id.clone()))
            .unwrap_or_default();
    }
    Ok(())
}

/// Adds the branches of these sessions of one namespace, in one query.
pub(super) async fn add_branches(
    connection: &mut AnyConnection,
    namespace: &str,
    sessions: &mut [SessionRow],
) -> Result<(), SqlError> {
    if sessions.is_empty() {
        return Ok(());
    }
    let mut statement = select_sessions(sessions);
    statement.push(" SELECT DISTINCT entries.agent AS agent, entries.session AS session, entries.branch AS branch ");
    statement
        .push("FROM wanted CROSS JOIN entries WHERE entries.namespace = ")
        .bind_text(namespace);
    statement.push(
        " AND entries.agent = wanted.agent AND entries.session = wanted.id AND entries.branch > ''",
    );
    let mut branches: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for row in statement.fetch(connection).await? {
        branches
            .entry((read_text(&row, "agent")?, read_text(&row, "session")?))
            .or_default()
            .push(read_text(&row, "branch")?);
    }
    for session in sessions {
        session.branches = branches
            .remove(&(session.agent.clone(), session.id.clone()))
            .unwrap_or_default();
        session.branches.sort();
    }
    Ok(())
}

/// The position of the last session of a page.
pub(super) struct Cursor {
    updated: String,
    agent: String,
    id: String,
}

impl Cursor {
    fn new(row: &SessionRow) -> Cursor {
        Cursor {
            updated: format_time(row.updated),
            agent: row.agent.clone(),
            id: row.id.clone(),
        }
    }

    fn to_text(&self) -> String {
        format!("{}|{}|{}", self.updated, self.agent, self.id)
    }

    /// Parses the output of [`Cursor::to_text`].
    pub(super) fn parse(text: &str) -> Result<Cursor> {
        let parse = || -> Option<Cursor> {
            let (updated, rest) = text.split_once('|')?;
            let (agent, id) = rest.split_once('|')?;
            let updated: Timestamp = updated.parse().ok()?;
            let (agent, id): (AgentName, SessionId) = (agent.parse().ok()?, id.parse().ok()?);
            Some(Cursor {
                updated: format_time(updated),
                agent: agent.into(),
                id: id.into(),
            })
        };
        parse().ok_or_else(|| {
            Error::usage(format!("invalid --cursor value {text:?}: it is not from a previous page"))
                .hint("use the command after \"next page:\" in the previous output, or pass the JSON field \"next\" as --cursor")
        })
    }
}
