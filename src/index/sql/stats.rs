//! Statistics by day, project, model or label.
//!
//! Owns the assignment of sessions, turns and costs to groups, so that the days add up to the
//! total:
//!
//! - A session counts on the first day of the range on which it has messages; without messages, on
//!   the day it was created.
//! - A turn counts on the day it ended. The end of a turn that a fork inherits is not in the index,
//!   so such a turn counts on the day the fork was created.
//! - The responses have costs of their own. If the agent reports a higher cost for the whole
//!   session, the difference is distributed in proportion to the tokens. Without a report, a
//!   response of unknown cost makes the cost of its group unknown.

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
    if filter.group_by == Some(GroupBy::Day) && filter.since.is_none() && filter.until.is_none() {
        for row in empty_sessions(filter).fetch(connection).await? {
            group_entry(&mut rows, read_group(&row)?).sessions += read_count(&row, "sessions")?;
        }
    }
    // Turns and bytes do not belong to a model.
    if !whole_sessions && filter.group_by != Some(GroupBy::Model) {
        for statement in [ended_turns(filter), inherited_turns(filter)] {
            for row in statement.fetch(connection).await? {
                let turns = read_count(&row, "turns")?;
                if turns > 0 {
                    let group = group_entry(&mut rows, read_group(&row)?);
                    group.turns = Some(group.turns.unwrap_or(0) + turns);
                }
            }
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

/// Returns the grouping expression. `time` and `model` are the columns of the counted rows.
fn group_expression(filter: &StatsFilter, time: &str, model: &str) -> String {
    match filter.group_by {
        None => "CAST(NULL AS TEXT)".to_owned(),
        Some(GroupBy::Day) => format!("substr({time}, 1, 10)"),
        Some(GroupBy::Project) => "s.project".to_owned(),
        Some(GroupBy::Model) => model.to_owned(),
        Some(GroupBy::Label) => {
            "CASE WHEN l.name IS NULL THEN NULL ELSE l.name || '=' || l.value END".to_owned()
        }
    }
}

/// Appends FROM and WHERE: the sessions, joined with a table of their rows.
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
    if let Some((_, table)) = table {
        if let Some(since) = filter.since {
            // A message since then is part of an entry since then.
            statement
                .push(" AND s.updated >= ")
                .bind_text(format_time(since));
        }
        push_range(statement, filter, &format!("{table}.at"));
    }
}

/// Appends the condition that a time is in the range.
fn push_range(statement: &mut Statement, filter: &StatsFilter, time: &str) {
    for (operator, limit) in [(" >= ", filter.since), (" < ", filter.until)] {
        if let Some(limit) = limit {
            statement
                .push(" AND ")
                .push(time)
                .push(operator)
                .bind_text(format_time(limit));
        }
    }
}

/// Sums the totals of the session rows.
fn session_totals(filter: &StatsFilter) -> Statement {
    let group = group_expression(filter, "s.created", "s.model");
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
    let group = group_expression(filter, "m.at", "m.model");
    let mut statement = Statement::new(format!(
        "WITH per_session AS (SELECT s.agent AS agent, s.id AS id, {group} AS group_name, COUNT(*) AS messages, {}, \
         CAST(COALESCE(SUM(m.cost), 0) AS BIGINT) AS cost, \
         SUM(CASE WHEN m.input_tokens IS NOT NULL AND m.cost IS NULL THEN 1 ELSE 0 END) AS unpriced_responses, \
         MIN(s.reported_cost) AS reported_cost, MIN(s.reported_cost - s.cost) AS unassigned_cost, \
         MIN(s.messages) AS all_messages, \
         MIN(s.input_tokens + s.output_tokens + s.cache_read_tokens + s.cache_write_tokens) AS all_tokens",
        token_sums("m")
    ));
    push_from(&mut statement, filter, Some(("messages", "m")));
    if filter.group_by == Some(GroupBy::Model) {
        statement.push(" AND m.model IS NOT NULL");
    }
    statement.push(" GROUP BY s.agent, s.id, ").push(&group);
    // A session has several labels, but only one first day.
    let (one_session, sessions) = match filter.group_by {
        Some(GroupBy::Label) => ("agent, id, group_name", "COUNT(*)"),
        Some(GroupBy::Day) => (
            "agent, id",
            "CAST(SUM(CASE WHEN position = 1 THEN 1 ELSE 0 END) AS BIGINT)",
        ),
        _ => ("agent, id", "COUNT(*)"),
    };
    // Differences of running sums: rounding never adds or loses a part of the cost.
    let order = format!(
        "OVER (PARTITION BY {one_session} ORDER BY CASE WHEN group_name IS NULL THEN 1 ELSE 0 END, group_name \
         ROWS UNBOUNDED PRECEDING)"
    );
    statement.push(&format!(
        "), weighted AS (SELECT per_session.*, \
         CASE WHEN all_tokens > 0 THEN input_tokens + output_tokens + cache_read_tokens + cache_write_tokens \
         ELSE messages END AS weight, \
         CASE WHEN all_tokens > 0 THEN all_tokens ELSE all_messages END AS all_weight FROM per_session), \
         running AS (SELECT weighted.*, ROW_NUMBER() {order} AS position, \
         SUM(weight) {order} AS weight_so_far FROM weighted), \
         priced AS (SELECT running.*, CASE WHEN unassigned_cost > 0 AND all_weight > 0 THEN \
         CAST(unassigned_cost * (weight_so_far * 1.0 / all_weight) AS BIGINT) - \
         CAST(unassigned_cost * ((weight_so_far - weight) * 1.0 / all_weight) AS BIGINT) \
         ELSE 0 END AS assigned_cost FROM running) \
         SELECT group_name, {sessions} AS sessions, CAST(SUM(messages) AS BIGINT) AS messages, {}, \
         CAST(SUM(cost + assigned_cost) AS BIGINT) AS cost, \
         CAST(SUM(CASE WHEN reported_cost IS NULL AND unpriced_responses > 0 THEN 1 ELSE 0 END) AS BIGINT) \
         AS unpriced_sessions FROM priced GROUP BY group_name",
        token_sums("priced")
    ));
    statement
}

/// Counts the sessions without messages, on the day they were created.
fn empty_sessions(filter: &StatsFilter) -> Statement {
    let group = group_expression(filter, "s.created", "s.model");
    let mut statement = Statement::new(format!(
        "SELECT {group} AS group_name, COUNT(*) AS sessions"
    ));
    push_from(&mut statement, filter, None);
    statement.push(" AND s.messages = 0 GROUP BY ").push(&group);
    statement
}

/// Counts the turns whose end is in the index. A turn can end several times: the agent continued,
/// or the turn was rewound.
fn ended_turns(filter: &StatsFilter) -> Statement {
    let group = group_expression(filter, "c.at", "s.model");
    let mut statement = Statement::new(format!("SELECT {group} AS group_name, COUNT(*) AS turns"));
    push_from(&mut statement, filter, Some(("checkpoints", "c")));
    statement
        .push(
            " AND c.name = '' AND c.step = 0 AND c.turn > 0 AND c.turn <= s.turns AND NOT EXISTS \
             (SELECT 1 FROM checkpoints AS later WHERE later.namespace = c.namespace AND later.agent = c.agent \
             AND later.session = c.session AND later.name = '' AND later.step = 0 AND later.turn = c.turn AND later.number > c.number) \
             GROUP BY ",
        )
        .push(&group);
    statement
}

/// Counts the turns whose end is not in the index, on the day their session was created.
fn inherited_turns(filter: &StatsFilter) -> Statement {
    let group = group_expression(filter, "s.created", "s.model");
    let mut statement = Statement::new(format!(
        "SELECT {group} AS group_name, CAST(SUM(s.turns - (SELECT COUNT(DISTINCT c.turn) FROM checkpoints AS c \
         WHERE c.namespace = s.namespace AND c.agent = s.agent AND c.session = s.id AND c.name = '' \
         AND c.step = 0 AND c.turn > 0 AND c.turn <= s.turns)) AS BIGINT) AS turns"
    ));
    push_from(&mut statement, filter, None);
    push_range(&mut statement, filter, "s.created");
    statement.push(" GROUP BY ").push(&group);
    statement
}

fn raw_bytes(filter: &StatsFilter) -> Statement {
    let group = group_expression(filter, "e.at", "s.model");
    let mut statement = Statement::new(format!(
        "SELECT {group} AS group_name, CAST(SUM(e.raw_bytes) AS BIGINT) AS raw_bytes"
    ));
    push_from(&mut statement, filter, Some(("entries", "e")));
    statement.push(" AND e.branch = '' GROUP BY ").push(&group);
    statement
}
