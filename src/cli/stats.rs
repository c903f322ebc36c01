//! `stats`: totals of sessions.

use std::io::IsTerminal;

use crate::cli::table::Table;
use crate::cli::{exit, print, select, time};
use crate::config::Settings;
use crate::error::Result;
use crate::index::{GroupBy, StatsFilter, StatsRow};
use crate::operations::stats::{Stats, stats};
use crate::wire::Parts;

/// Width of the longest bar, in characters.
const BAR_WIDTH: usize = 24;

/// Count sessions, messages, turns, tokens, cost and bytes
///
/// Rewound turns are not counted. Token usage is counted once per response.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond stats --by day --since 14d")]
pub struct Args {
    /// Group by day, project, model or label [default: one row]
    #[arg(long, value_name = "GROUP", value_parser = ["day", "project", "model", "label"], hide_possible_values = true)]
    pub by: Option<String>,

    /// Only messages since this time, day or age, such as 2026-05-01 or 2h
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,

    /// Only messages before this time, day or age
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Prints the totals.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let now = parts.logs.clock.now();
    let group_by = args.by.as_deref().map(|by| match by {
        "day" => GroupBy::Day,
        "project" => GroupBy::Project,
        "model" => GroupBy::Model,
        _ => GroupBy::Label,
    });
    let all = StatsFilter {
        namespace: parts.logs.namespace.clone(),
        agent: select::agent_filter(settings, &parts),
        group_by: None,
        since: time::parse_optional("--since", args.since.as_deref(), now)?,
        until: time::parse_optional("--until", args.until.as_deref(), now)?,
    };
    let stats = stats(&*parts.index, all, group_by).await?;
    if args.json {
        print::json(&stats)?;
        return Ok(exit::OK);
    }
    let bars = std::io::stdout().is_terminal();
    let heading = args.by.as_deref().unwrap_or("all").to_uppercase();
    let heading = [
        &heading,
        "SESSIONS",
        "MESSAGES",
        "TURNS",
        "INPUT",
        "OUTPUT",
        "CACHE READ",
        "CACHE WRITE",
        "COST",
        "SIZE",
        "",
    ];
    Table::new(&heading)
        .flexible(&[0])
        .optional(&[10, 7, 6, 9, 3])
        .print(&table(&stats, bars))?;
    Ok(exit::OK)
}

fn table(stats: &Stats, bars: bool) -> Vec<Vec<String>> {
    let max = stats.rows.iter().map(all_tokens).max().unwrap_or(0);
    let mut rows: Vec<Vec<String>> = stats
        .rows
        .iter()
        .map(|stats| {
            row(
                stats,
                "(none)",
                if bars {
                    bar(all_tokens(stats), max)
                } else {
                    String::new()
                },
            )
        })
        .collect();
    rows.push(row(&stats.total, "total", String::new()));
    rows
}

fn row(stats: &StatsRow, unnamed: &str, bar: String) -> Vec<String> {
    let StatsRow {
        group,
        sessions,
        messages,
        turns,
        tokens,
        cost,
        raw_bytes,
    } = stats;
    vec![
        group.clone().unwrap_or_else(|| unnamed.to_owned()),
        sessions.to_string(),
        messages.to_string(),
        turns.map(|turns| turns.to_string()).unwrap_or_default(),
        print::number(tokens.input),
        print::number(tokens.output),
        print::number(tokens.cache_read),
        print::number(tokens.cache_write),
        print::cost(*cost),
        raw_bytes.map(print::bytes).unwrap_or_default(),
        bar,
    ]
}

fn all_tokens(stats: &StatsRow) -> u64 {
    let tokens = stats.tokens;
    tokens
        .input
        .saturating_add(tokens.output)
        .saturating_add(tokens.cache_read)
        .saturating_add(tokens.cache_write)
}

/// A bar whose length is the share of `value` in `max`, to an eighth of a character.
fn bar(value: u64, max: u64) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    if value == 0 || max == 0 {
        return String::new();
    }
    let eighths = ((value as f64 / max as f64) * (BAR_WIDTH * 8) as f64)
        .round()
        .max(1.0) as usize;
    format!("{}{}", "█".repeat(eighths / 8), PARTS[eighths % 8])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Tokens;

    #[test]
    fn a_bar_is_as_long_as_its_share() {
        assert_eq!(bar(8, 8).chars().count(), BAR_WIDTH);
        assert_eq!(
            (
                bar(1, 1000).as_str(),
                bar(0, 8).as_str(),
                bar(0, 0).as_str()
            ),
            ("▏", "", "")
        );
        assert_eq!(bar(4, 8), "█".repeat(BAR_WIDTH / 2));
    }

    #[test]
    fn an_unknown_value_is_not_shown_as_zero() {
        let rows = vec![
            StatsRow {
                group: Some("m1".into()),
                sessions: 2,
                tokens: Tokens {
                    input: 1200,
                    ..Tokens::default()
                },
                cost: None,
                ..StatsRow::default()
            },
            StatsRow {
                group: None,
                cost: Some(0),
                turns: Some(0),
                raw_bytes: Some(0),
                ..StatsRow::default()
            },
        ];
        let shown = table(
            &Stats {
                rows,
                total: StatsRow::default(),
            },
            true,
        );
        assert_eq!(
            shown[0][..10],
            ["m1", "2", "0", "", "1.2k", "0", "0", "0", "?", ""]
        );
        assert_eq!(
            shown[1][..10],
            [
                "(none)", "0", "0", "0", "0", "0", "0", "0", "$0.0000", "0 B"
            ]
        );
        assert_eq!(
            (shown[0][10].chars().count(), shown[2][0].as_str()),
            (BAR_WIDTH, "total")
        );
    }
}
