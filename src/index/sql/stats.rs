//! Statistics by day, project, model or label.
//!
//! Owns the assignment of costs to groups. If all of a session falls into one group and the agent
//! reports its cost, that cost counts. Otherwise the costs of its responses count, and a response
//! of unknown cost makes the cost of the group unknown.

use std::collections::BTreeMap;

use sqlx::any::AnyRow;
use sqlx::{AnyConnection, Row};

use super::error::SqlError;
use super::rows::{format_time, read_count, read_tokens};
use super::statement::Statement;
use crate::error::Result;
use crate::index::{GroupBy, StatsFilter, StatsRow};

/// Returns the SQL that sums the token columns of a table.
fn token_sums(table: &str) -> String {
    let sum =
        |column: &str| format!("CAST(COALESCE(SUM({table}.{column}), 0) AS BIGINT) AS {column}");
    [
        "input_tokens",
        "output_tokens",
        "cache_read_tokens",
        "cache_write_tokens",
    ]
    .map(sum)
    .join(", ")
}

/// Returns one row per group.
pub(super) async fn stats(
    connection: &mut AnyConnection,
    filter: &StatsFilter,
) -> Result<Vec<StatsRow>, SqlError> {
    let mut rows: BTreeMap<Key, StatsRow> = BTreeMap::new();
    let whole_sessions = filter.since.is_none()
        && filter.until.is_none()
        && !matches!(filter.group_by, Some(GroupBy::Day | GroupBy::Model));
    let statement = if whole_sessions {
        session_totals(filter)
    } else {
        message_totals(filter)
    };
    for row in statement.fetch(connection).await? {
        let has_cost = read_count(&row, "unpriced_sessions")? == 0;
        let stats = StatsRow {
            group: read_group(&row)?,
            sessions: read_count(&row, "sessions")?,
            messages: read_count(&row, "messages")?,
            turns: if whole_sessions {
                Some(read_count(&row, "turns")?)
            } else {
                None
            },
            tokens: read_tokens(&row)?,
            cost: if has_cost {
                Some(read_count(&row, "cost")?)
            } else {
                None
            },
            raw_bytes: if whole_sessions {
                Some(read_count(&row, "raw_bytes")?)
            } else {
                None
            },
        };
        rows.insert(Key::of(&stats.group), stats);
    }
    // Turns and bytes do not belong to a model.
    if !whole_sessions && filter.group_by != Some(GroupBy::Model) {
        for row in turns(filter).fetch(connection).await? {
            group_entry(&mut rows, read_group(&row)?).turns = Some(read_count(&row, "turns")?);
        }
        for row in raw_bytes(filter).fetch(connection).await? {
            group_entry(&mut rows, read_group(&row)?).raw_bytes =
                Some(read_count(&row, "raw_bytes")?);
        }
        for row in rows.values_mut() {
            row.turns.get_or_insert(0);
            row.raw_bytes.get_or_insert(0);
        }
    }
    Ok(rows.into_values().collect())
}

/// Orders groups by name, and the group without a name last.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key(bool, String);

impl Key {
    fn of(group: &Option<String>) -> Key {
        Key(group.is_none(), group.clone().unwrap_or_default())
    }
}

fn group_entry(rows: &mut BTreeMap<Key, StatsRow>, group: Option<String>) -> &mut StatsRow {
    // Bytes without messages cost nothing.
    rows.entry(Key::of(&group)).or_insert(StatsRow {
        group,
        cost: Some(0),
        ..StatsRow::default()
    })
}

fn read_group(row: &AnyRow) -> Result<Option<String>, SqlError> {
    Ok(row.try_get("group_name")?)
}

/// Returns the grouping expression. `table` has the time and the model.
fn group_expression(filter: &StatsFilter, table: &str) -> String {
    match filter.group_by {
        None => "CAST(NULL AS TEXT)".to_owned(),
        Some(GroupBy::Day) => format!("substr({table}.at, 1, 10)"),
        Some(GroupBy::Project) => "s.project".to_owned(),
        Some(GroupBy::Model) => format!("{table}.model"),
        Some(GroupBy::Label) => {
            "CASE WHEN l.name IS NULL THEN NULL ELSE l.name || '=' || l.value END".to_owned()
        }
    }
}

/// Appends FROM and WHERE: the sessions, joined with a table of their rows, within the time range.
fn push_from(statement: &mut Statement, filter: &StatsFilter, table: Option<(&str, &str)>) {
    statement.push(" FROM sessions AS s");
    if let Some((name, table)) = table {
        statement
            .push(" JOIN ")
            .push(name)
            .push(" AS ")
            .push(table)
            .push(" ON ")
            .push(table)
            .push(".namespace = s.namespace AND ")
            .push(table);
        statement
            .push(".agent = s.agent AND ")
            .push(table)
            .push(".session = s.id");
    }
    if filter.group_by == Some(GroupBy::Label) {
        statement.push(" LEFT JOIN labels AS l ON l.namespace = s.namespace AND l.agent = s.agent AND l.session = s.id");
    }
    statement
        .push(" WHERE s.namespace = ")
        .bind_text(filter.namespace.as_str());
    statement.push(" AND s.status <> 'removed' AND substr(s.id, 1, 1) <> '@'");
    if let Some(agent) = &filter.agent {
        statement.push(" AND s.agent = ").bind_text(agent.as_str());
    }
    let Some((_, table)) = table else { return };
    if let Some(since) = filter.since {
        // A message since then is part of an entry since then.
        statement
            .push(" AND s.updated >= ")
            .bind_text(format_time(since))
            .push(" AND ")
            .push(table)
            .push(".at >= ")
            .bind_text(format_time(since));
    }
    if let Some(until) = filter.until {
        statement
            .push(" AND ")
            .push(table)
            .push(".at < ")
            .bind_text(format_time(until));
    }
}

/// Sums the totals of the session rows.
fn session_totals(filter: &StatsFilter) -> Statement {
    let group = group_expression(filter, "s");
    let mut statement = Statement::new(format!(
        "SELECT {group} AS group_name, COUNT(*) AS sessions, {}, CAST(COALESCE(SUM(s.messages), 0) AS BIGINT) AS messages, \
         CAST(COALESCE(SUM(s.turns), 0) AS BIGINT) AS turns, CAST(COALESCE(SUM(s.raw_bytes), 0) AS BIGINT) AS raw_bytes, \
         CAST(COALESCE(SUM(CASE WHEN s.reported_cost > s.cost THEN s.reported_cost ELSE s.cost END), 0) AS BIGINT) AS cost, \
         CAST(COALESCE(SUM(CASE WHEN s.reported_cost IS NULL AND s.unpriced_responses > 0 THEN 1 ELSE 0 END), 0) AS BIGINT) \
         AS unpriced_sessions",
        token_sums("s")
    ));
    push_from(&mut statement, filter, None);
    statement.push(" GROUP BY ").push(&group);
    statement
}

/// Sums over the messages in the time range.
fn message_totals(filter: &StatsFilter) -> Statement {
    let group = group_expression(filter, "m");
    let mut statement = Statement::new(format!(
        "WITH per_session AS (SELECT {group} AS group_name, COUNT(*) AS messages, {}, CAST(COALESCE(SUM(m.cost), 0) AS BIGINT) AS cost, \
         SUM(CASE WHEN m.input_tokens IS NOT NULL AND m.cost IS NULL THEN 1 ELSE 0 END) AS unpriced_responses, \
         MIN(s.reported_cost) AS reported_cost, \
         MIN(s.messages) AS all_messages, \
         MIN(s.input_tokens + s.output_tokens + s.cache_read_tokens + s.cache_write_tokens) AS all_tokens",
        token_sums("m")
    ));
    push_from(&mut statement, filter, Some(("messages", "m")));
    if filter.group_by == Some(GroupBy::Model) {
        statement.push(" AND m.model IS NOT NULL");
    }
    statement.push(" GROUP BY s.agent, s.id, ").push(&group);
    statement.push(
        "), priced AS (SELECT per_session.*, CASE WHEN per_session.messages = all_messages OR all_tokens > 0 AND \
         input_tokens + output_tokens + cache_read_tokens + cache_write_tokens = all_tokens \
         THEN reported_cost ELSE NULL END AS total FROM per_session) ",
    );
    statement.push(&format!(
        "SELECT group_name, COUNT(*) AS sessions, CAST(SUM(messages) AS BIGINT) AS messages, {}, \
         CAST(SUM(CASE WHEN total > cost THEN total ELSE cost END) AS BIGINT) AS cost, \
         CAST(SUM(CASE WHEN total IS NULL AND unpriced_responses > 0 THEN 1 ELSE 0 END) AS BIGINT) \
         AS unpriced_sessions FROM priced GROUP BY group_name",
        token_sums("priced")
    ));
    statement
}

fn turns(filter: &StatsFilter) -> Statement {
    let mut statement = Statement::new(
        "SELECT group_name, COUNT(*) AS turns FROM (SELECT DISTINCT s.agent, s.id, c.turn, ",
    );
    statement
        .push(&group_expression(filter, "c"))
        .push(" AS group_name");
    push_from(&mut statement, filter, Some(("checkpoints", "c")));
    statement.push(" AND c.name = '') AS complete GROUP BY group_name");
    statement
}

fn raw_bytes(filter: &StatsFilter) -> Statement {
    let group = group_expression(filter, "e");
    let mut statement = Statement::new(format!(
        "SELECT {group} AS group_name, CAST(SUM(e.raw_bytes) AS BIGINT) AS raw_bytes"
    ));
    push_from(&mut statement, filter, Some(("entries", "e")));
    statement.push(" AND e.branch = '' GROUP BY ").push(&group);
    statement
}
