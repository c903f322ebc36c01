//! What sessions amount to, by day, project, model or label.
//!
//! Owns what counts where. A session that says what it cost as a whole counts as that where the whole of it falls into one
//! row; else its answers count one by one, and where the cost of one is unknown, that of the row is.

use std::collections::BTreeMap;

use sqlx::any::AnyRow;
use sqlx::{AnyConnection, Row};

use super::failure::Fault;
use super::list::Statement;
use super::rows::{count, stamp, tokens};
use crate::error::Result;
use crate::index::{By, StatsFilter, StatsRow};

/// Sums of tokens, with the columns of this table.
fn sums(table: &str) -> String {
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

/// What sessions amount to.
pub(super) async fn stats(
    connection: &mut AnyConnection,
    filter: &StatsFilter,
) -> Result<Vec<StatsRow>, Fault> {
    let mut rows: BTreeMap<Key, StatsRow> = BTreeMap::new();
    let whole_sessions = filter.since.is_none()
        && filter.until.is_none()
        && !matches!(filter.by, Some(By::Day | By::Model));
    let said = if whole_sessions {
        sessions(filter)
    } else {
        messages(filter)
    };
    for row in said.fetch(connection).await? {
        let known = count(&row, "unknown")? == 0;
        let stats = StatsRow {
            group: group(&row)?,
            sessions: count(&row, "sessions")?,
            messages: count(&row, "messages")?,
            turns: if whole_sessions {
                Some(count(&row, "turns")?)
            } else {
                None
            },
            tokens: tokens(&row)?,
            cost: if known {
                Some(count(&row, "cost")?)
            } else {
                None
            },
            bytes: if whole_sessions {
                Some(count(&row, "bytes")?)
            } else {
                None
            },
        };
        rows.insert(Key::of(&stats.group), stats);
    }
    // Of a model neither is known.
    if !whole_sessions && filter.by != Some(By::Model) {
        for row in turns(filter).fetch(connection).await? {
            entry(&mut rows, group(&row)?).turns = Some(count(&row, "turns")?);
        }
        for row in bytes(filter).fetch(connection).await? {
            entry(&mut rows, group(&row)?).bytes = Some(count(&row, "bytes")?);
        }
        for row in rows.values_mut() {
            row.turns.get_or_insert(0);
            row.bytes.get_or_insert(0);
        }
    }
    Ok(rows.into_values().collect())
}

/// By name, and what has none at the end.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key(bool, String);

impl Key {
    fn of(group: &Option<String>) -> Key {
        Key(group.is_none(), group.clone().unwrap_or_default())
    }
}

fn entry(rows: &mut BTreeMap<Key, StatsRow>, group: Option<String>) -> &mut StatsRow {
    // Bytes that say nothing cost nothing.
    rows.entry(Key::of(&group)).or_insert(StatsRow {
        group,
        cost: Some(0),
        ..StatsRow::default()
    })
}

fn group(row: &AnyRow) -> Result<Option<String>, Fault> {
    Ok(row.try_get("grp")?)
}

/// What rows are grouped by, where `table` has the time.
fn group_by(filter: &StatsFilter, table: &str) -> String {
    match filter.by {
        None => "CAST(NULL AS TEXT)".to_owned(),
        Some(By::Day) => format!("substr({table}.at, 1, 10)"),
        Some(By::Project) => "s.project".to_owned(),
        Some(By::Model) => format!("{table}.model"),
        Some(By::Label) => {
            "CASE WHEN l.name IS NULL THEN NULL ELSE l.name || '=' || l.value END".to_owned()
        }
    }
}

/// From which sessions, with what of them, and from when to when.
fn say_from(statement: &mut Statement, filter: &StatsFilter, table: Option<(&str, &str)>) {
    statement.say(" FROM sessions AS s");
    if let Some((name, table)) = table {
        statement
            .say(" JOIN ")
            .say(name)
            .say(" AS ")
            .say(table)
            .say(" ON ")
            .say(table)
            .say(".namespace = s.namespace AND ")
            .say(table);
        statement
            .say(".agent = s.agent AND ")
            .say(table)
            .say(".session = s.id");
    }
    if filter.by == Some(By::Label) {
        statement.say(" LEFT JOIN labels AS l ON l.namespace = s.namespace AND l.agent = s.agent AND l.session = s.id");
    }
    statement
        .say(" WHERE s.namespace = ")
        .value(filter.namespace.as_str());
    statement.say(" AND s.status <> 'removed' AND substr(s.id, 1, 1) <> '@'");
    if let Some(agent) = &filter.agent {
        statement.say(" AND s.agent = ").value(agent.as_str());
    }
    let Some((_, table)) = table else { return };
    if let Some(since) = filter.since {
        // What was said since then was shipped since then.
        statement
            .say(" AND s.updated >= ")
            .value(stamp(since))
            .say(" AND ")
            .say(table)
            .say(".at >= ")
            .value(stamp(since));
    }
    if let Some(until) = filter.until {
        statement
            .say(" AND ")
            .say(table)
            .say(".at < ")
            .value(stamp(until));
    }
}

/// From the sums that every session has.
fn sessions(filter: &StatsFilter) -> Statement {
    let group = group_by(filter, "s");
    let mut statement = Statement::new(format!(
        "SELECT {group} AS grp, COUNT(*) AS sessions, {}, CAST(COALESCE(SUM(s.messages), 0) AS BIGINT) AS messages, \
         CAST(COALESCE(SUM(s.turns), 0) AS BIGINT) AS turns, CAST(COALESCE(SUM(s.raw_bytes), 0) AS BIGINT) AS bytes, \
         CAST(COALESCE(SUM(CASE WHEN s.told_cost > s.cost THEN s.told_cost ELSE s.cost END), 0) AS BIGINT) AS cost, \
         CAST(COALESCE(SUM(CASE WHEN s.told_cost IS NULL AND s.uncosted > 0 THEN 1 ELSE 0 END), 0) AS BIGINT) AS unknown",
        sums("s")
    ));
    say_from(&mut statement, filter, None);
    statement.say(" GROUP BY ").say(&group);
    statement
}

/// From the messages themselves.
fn messages(filter: &StatsFilter) -> Statement {
    let group = group_by(filter, "m");
    let mut statement = Statement::new(format!(
        "WITH said AS (SELECT {group} AS grp, COUNT(*) AS messages, {}, CAST(COALESCE(SUM(m.cost), 0) AS BIGINT) AS cost, \
         SUM(CASE WHEN m.input_tokens IS NOT NULL AND m.cost IS NULL THEN 1 ELSE 0 END) AS uncosted, MIN(s.told_cost) AS told, \
         MIN(s.messages) AS all_messages, \
         MIN(s.input_tokens + s.output_tokens + s.cache_read_tokens + s.cache_write_tokens) AS all_tokens",
        sums("m")
    ));
    say_from(&mut statement, filter, Some(("messages", "m")));
    if filter.by == Some(By::Model) {
        statement.say(" AND m.model IS NOT NULL");
    }
    statement.say(" GROUP BY s.agent, s.id, ").say(&group);
    statement.say(
        "), judged AS (SELECT said.*, CASE WHEN said.messages = all_messages OR all_tokens > 0 AND \
         input_tokens + output_tokens + cache_read_tokens + cache_write_tokens = all_tokens THEN told ELSE NULL END AS total FROM said) ",
    );
    statement.say(&format!(
        "SELECT grp, COUNT(*) AS sessions, CAST(SUM(messages) AS BIGINT) AS messages, {}, \
         CAST(SUM(CASE WHEN total > cost THEN total ELSE cost END) AS BIGINT) AS cost, \
         CAST(SUM(CASE WHEN total IS NULL AND uncosted > 0 THEN 1 ELSE 0 END) AS BIGINT) AS unknown FROM judged GROUP BY grp",
        sums("judged")
    ));
    statement
}

fn turns(filter: &StatsFilter) -> Statement {
    let mut statement = Statement::new(
        "SELECT grp, COUNT(*) AS turns FROM (SELECT DISTINCT s.agent, s.id, c.turn, ",
    );
    statement.say(&group_by(filter, "c")).say(" AS grp");
    say_from(&mut statement, filter, Some(("checkpoints", "c")));
    statement.say(" AND c.name = '') AS complete GROUP BY grp");
    statement
}

fn bytes(filter: &StatsFilter) -> Statement {
    let group = group_by(filter, "e");
    let mut statement = Statement::new(format!(
        "SELECT {group} AS grp, CAST(SUM(e.raw_bytes) AS BIGINT) AS bytes"
    ));
    say_from(&mut statement, filter, Some(("entries", "e")));
    statement.say(" AND e.branch = '' GROUP BY ").say(&group);
    statement
}
