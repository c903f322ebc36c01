//! Full-text search with the engine of each database.
//!
//! Owns the SQL of a search query. Snippets are the same for both databases (`search_query`).

use jiff::Timestamp;
use sqlx::{AnyConnection, Row};

use super::bulk::is_postgres;
use super::error::SqlError;
use super::rows::{MAX_KEY_LEN, format_time, read_text, truncate};
use super::statement::Statement;
use crate::error::Result;
use crate::index::search_query::{Conjunction, SearchQuery};
use crate::index::{SearchFilter, SearchHit, SearchResults};

/// Maximum number of hits.
const MAX_HITS: u32 = 1000;

/// Returns the messages that match, best match first.
pub(super) async fn search(
    connection: &mut AnyConnection,
    filter: &SearchFilter,
) -> Result<SearchResults, SqlError> {
    let limit = filter.limit.clamp(1, MAX_HITS) as usize;
    let rows = query(filter, is_postgres(connection), limit + 1)
        .fetch(connection)
        .await?;
    let has_more = rows.len() > limit;
    let mut hits = Vec::new();
    for row in rows.iter().take(limit) {
        let at: Option<String> = row.try_get("at")?;
        hits.push(SearchHit {
            agent: read_text(row, "agent")?,
            session: read_text(row, "session")?,
            project: row.try_get("project")?,
            title: row.try_get("title")?,
            role: read_text(row, "role")?,
            at: at.and_then(|at| at.parse::<Timestamp>().ok()),
            message_id: row.try_get("message_id")?,
            sub_agent: row.try_get("sub_agent")?,
            snippet: filter.query.snippet(&read_text(row, "text")?),
        });
    }
    let has_text = !hits.is_empty() || has_any_text(connection, filter).await?;
    Ok(SearchResults {
        hits,
        has_more,
        has_text,
    })
}

async fn has_any_text(
    connection: &mut AnyConnection,
    filter: &SearchFilter,
) -> Result<bool, SqlError> {
    let mut statement = Statement::new("SELECT session FROM message_texts WHERE namespace = ");
    statement
        .bind_text(filter.namespace.as_str())
        .push(" LIMIT 1");
    Ok(!statement.fetch(connection).await?.is_empty())
}

fn query(filter: &SearchFilter, postgres: bool, limit: usize) -> Statement {
    let mut statement = Statement::new(
        "SELECT t.agent AS agent, t.session AS session, t.text AS text, m.role AS role, m.at AS at, \
         m.message_id AS message_id, m.sub_agent AS sub_agent, s.project AS project, COALESCE(s.title, s.first_prompt) AS title FROM ",
    );
    // In SQLite a cross join also fixes the order of the join: first the matching texts, then their
    // messages and sessions.
    if postgres {
        statement.push("(SELECT ");
        for (number, alternative) in filter.query.alternatives().iter().enumerate() {
            statement.push(if number == 0 { "" } else { " || " });
            push_tsquery(&mut statement, alternative);
        }
        statement.push(" AS words) AS q CROSS JOIN message_texts AS t");
    } else {
        statement.push("message_texts_fts CROSS JOIN message_texts AS t");
    }
    statement.push(" CROSS JOIN messages AS m CROSS JOIN sessions AS s WHERE ");
    match postgres {
        true => statement.push("t.words @@ q.words"),
        false => statement
            .push("message_texts_fts MATCH ")
            .bind_text(fts5(&filter.query))
            .push(" AND t.number = message_texts_fts.rowid"),
    };
    statement
        .push(" AND t.namespace = ")
        .bind_text(filter.namespace.as_str());
    statement
        .push(" AND m.namespace = t.namespace AND m.agent = t.agent AND m.session = t.session AND m.file = t.file AND m.start = t.start");
    statement.push(" AND s.namespace = t.namespace AND s.agent = t.agent AND s.id = t.session AND s.status <> 'removed'");
    if let Some(agent) = &filter.agent {
        statement.push(" AND t.agent = ").bind_text(agent.as_str());
    }
    if let Some(project) = &filter.project {
        statement
            .push(" AND s.project = ")
            .bind_text(truncate(project, MAX_KEY_LEN));
    }
    if let Some(since) = filter.since {
        statement
            .push(" AND m.at >= ")
            .bind_text(format_time(since));
    }
    if let Some(until) = filter.until {
        statement.push(" AND m.at < ").bind_text(format_time(until));
    }
    if let Some((name, value)) = &filter.label {
        statement.push(" AND EXISTS (SELECT 1 FROM labels AS l WHERE l.namespace = s.namespace AND l.agent = s.agent AND l.session = s.id");
        statement
            .push(" AND l.name = ")
            .bind_text(truncate(name, MAX_KEY_LEN))
            .push(" AND l.value = ")
            .bind_text(truncate(value, MAX_KEY_LEN))
            .push(")");
    }
    let rank = if postgres {
        "ts_rank_cd(t.words, q.words) DESC"
    } else {
        "bm25(message_texts_fts)"
    };
    statement
        .push(" ORDER BY ")
        .push(rank)
        .push(", m.position DESC, t.session, t.file, t.start LIMIT ")
        .push(&limit.to_string());
    statement
}

/// Returns a query in the syntax of SQLite's FTS5. Every phrase is quoted, and words contain only
/// letters and digits.
fn fts5(query: &SearchQuery) -> String {
    let join = |phrases: &[Vec<String>], separator: &str| {
        phrases
            .iter()
            .map(|phrase| format!("\"{}\"", phrase.join(" ")))
            .collect::<Vec<_>>()
            .join(separator)
    };
    let conjunction = |conjunction: &Conjunction| {
        let excluded: String = conjunction
            .excluded
            .iter()
            .map(|phrase| format!(" NOT \"{}\"", phrase.join(" ")))
            .collect();
        format!("(({}){excluded})", join(&conjunction.required, " AND "))
    };
    query
        .alternatives()
        .iter()
        .map(conjunction)
        .collect::<Vec<_>>()
        .join(" OR ")
}

/// Appends a conjunction as a PostgreSQL `tsquery`.
fn push_tsquery(statement: &mut Statement, conjunction: &Conjunction) {
    statement.push("(");
    let required = conjunction
        .required
        .iter()
        .map(|phrase| ("phraseto_tsquery('simple', ", phrase));
    let excluded = conjunction
        .excluded
        .iter()
        .map(|phrase| ("!! phraseto_tsquery('simple', ", phrase));
    for (number, (function, phrase)) in required.chain(excluded).enumerate() {
        statement
            .push(if number == 0 { "" } else { " && " })
            .push(function)
            .bind_text(phrase.join(" "))
            .push(")");
    }
    statement.push(")");
}
