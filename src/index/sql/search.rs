//! Full-text search, by each database's own engine.
//!
//! Owns the query that words make. What is shown of a text is the same for both (`words`).

use jiff::Timestamp;
use sqlx::{AnyConnection, Row};

use super::failure::Fault;
use super::list::Statement;
use super::rows::{LONGEST_PROJECT, clip, stamp, text};
use super::texts::is_postgres;
use crate::error::Result;
use crate::index::words::{Alternative, Words};
use crate::index::{Found, Hit, SearchFilter};

/// The most that is found at a time.
const MOST_FOUND: u32 = 1000;

/// The messages that hold the words, the best first.
pub(super) async fn search(
    connection: &mut AnyConnection,
    filter: &SearchFilter,
) -> Result<Found, Fault> {
    let limit = filter.limit.clamp(1, MOST_FOUND) as usize;
    let found = query(filter, is_postgres(connection), limit + 1)
        .fetch(connection)
        .await?;
    let more = found.len() > limit;
    let mut hits = Vec::new();
    for row in found.iter().take(limit) {
        let at: Option<String> = row.try_get("at")?;
        hits.push(Hit {
            agent: text(row, "agent")?,
            session: text(row, "session")?,
            project: row.try_get("project")?,
            title: row.try_get("title")?,
            role: text(row, "role")?,
            at: at.and_then(|at| at.parse::<Timestamp>().ok()),
            uuid: row.try_get("uuid")?,
            sub_agent: row.try_get("sub_agent")?,
            snippet: filter.words.snippet(&text(row, "body")?),
        });
    }
    let indexed = !hits.is_empty() || any_text(connection, filter).await?;
    Ok(Found {
        hits,
        more,
        indexed,
    })
}

async fn any_text(connection: &mut AnyConnection, filter: &SearchFilter) -> Result<bool, Fault> {
    let mut statement = Statement::new("SELECT session FROM texts WHERE namespace = ");
    statement.value(filter.namespace.as_str()).say(" LIMIT 1");
    Ok(!statement.fetch(connection).await?.is_empty())
}

fn query(filter: &SearchFilter, postgres: bool, limit: usize) -> Statement {
    let mut statement = Statement::new(
        "SELECT t.agent AS agent, t.session AS session, t.body AS body, m.role AS role, m.at AS at, m.uuid AS uuid, \
         m.sub_agent AS sub_agent, s.project AS project, s.title AS title FROM ",
    );
    // For SQLite a cross join is also an order: first what holds the words, then what is known of it.
    if postgres {
        statement.say("(SELECT ");
        for (number, alternative) in filter.words.alternatives().iter().enumerate() {
            statement.say(if number == 0 { "" } else { " || " });
            say_tsquery(&mut statement, alternative);
        }
        statement.say(" AS words) AS q CROSS JOIN texts AS t");
    } else {
        statement.say("texts_words CROSS JOIN texts AS t");
    }
    statement.say(" CROSS JOIN messages AS m CROSS JOIN sessions AS s WHERE ");
    match postgres {
        true => statement.say("t.words @@ q.words"),
        false => statement
            .say("texts_words MATCH ")
            .value(fts5(&filter.words))
            .say(" AND t.number = texts_words.rowid"),
    };
    statement
        .say(" AND t.namespace = ")
        .value(filter.namespace.as_str());
    statement
        .say(" AND m.namespace = t.namespace AND m.agent = t.agent AND m.session = t.session AND m.file = t.file AND m.start = t.start");
    statement.say(" AND s.namespace = t.namespace AND s.agent = t.agent AND s.id = t.session AND s.status <> 'removed'");
    if let Some(agent) = &filter.agent {
        statement.say(" AND t.agent = ").value(agent.as_str());
    }
    if let Some(project) = &filter.project {
        statement
            .say(" AND s.project = ")
            .value(clip(project, LONGEST_PROJECT));
    }
    if let Some(since) = filter.since {
        statement.say(" AND m.at >= ").value(stamp(since));
    }
    if let Some(until) = filter.until {
        statement.say(" AND m.at < ").value(stamp(until));
    }
    if let Some((name, value)) = &filter.label {
        statement.say(" AND EXISTS (SELECT 1 FROM labels AS l WHERE l.namespace = s.namespace AND l.agent = s.agent AND l.session = s.id");
        statement
            .say(" AND l.name = ")
            .value(clip(name, LONGEST_PROJECT))
            .say(" AND l.value = ")
            .value(clip(value, LONGEST_PROJECT))
            .say(")");
    }
    let rank = if postgres {
        "ts_rank_cd(t.words, q.words) DESC"
    } else {
        "bm25(texts_words)"
    };
    statement
        .say(" ORDER BY ")
        .say(rank)
        .say(", m.position DESC, t.session, t.file, t.start LIMIT ")
        .say(&limit.to_string());
    statement
}

/// A search as SQLite's engine takes it. Every phrase is quoted, and words hold nothing but letters and digits.
fn fts5(words: &Words) -> String {
    let phrases = |phrases: &[Vec<String>], between: &str| {
        phrases
            .iter()
            .map(|phrase| format!("\"{}\"", phrase.join(" ")))
            .collect::<Vec<_>>()
            .join(between)
    };
    let alternative = |one: &Alternative| {
        let without: String = one
            .without
            .iter()
            .map(|phrase| format!(" NOT \"{}\"", phrase.join(" ")))
            .collect();
        format!("(({}){without})", phrases(&one.with, " AND "))
    };
    words
        .alternatives()
        .iter()
        .map(alternative)
        .collect::<Vec<_>>()
        .join(" OR ")
}

/// The same for PostgreSQL.
fn say_tsquery(statement: &mut Statement, one: &Alternative) {
    statement.say("(");
    let with = one
        .with
        .iter()
        .map(|phrase| ("phraseto_tsquery('simple', ", phrase));
    let without = one
        .without
        .iter()
        .map(|phrase| ("!! phraseto_tsquery('simple', ", phrase));
    for (number, (make, phrase)) in with.chain(without).enumerate() {
        statement
            .say(if number == 0 { "" } else { " && " })
            .say(make)
            .value(phrase.join(" "))
            .say(")");
    }
    statement.say(")");
}
