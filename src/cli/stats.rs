//! `stats`: what sessions amount to.

use std::io::IsTerminal;

use serde::Serialize;

use crate::cli::{exit, print, when};
use crate::config::Settings;
use crate::error::Result;
use crate::index::{By, StatsFilter, StatsRow};
use crate::wire::Parts;

/// The widest bar, in characters.
const BAR: usize = 24;

/// Count sessions, messages, turns, tokens, cost and bytes
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond stats --by day --since 14d")]
pub struct Args {
    /// A row for each: day, project, model or label
    #[arg(long, env = "SESSIOND_BY", value_name = "WHAT", value_parser = ["day", "project", "model", "label"])]
    pub by: Option<String>,

    /// Only what was said from then on: a time, a day, or 2h for two hours ago
    #[arg(long, env = "SESSIOND_SINCE", value_name = "TIME")]
    pub since: Option<String>,

    /// Only what was said before
    #[arg(long, env = "SESSIOND_UNTIL", value_name = "TIME")]
    pub until: Option<String>,

    /// Print them as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct Stats {
    rows: Vec<StatsRow>,
    total: StatsRow,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::make(settings, None).await?;
    let now = parts.logs.clock.now();
    let by = args.by.as_deref().map(|by| match by {
        "day" => By::Day,
        "project" => By::Project,
        "model" => By::Model,
        _ => By::Label,
    });
    let all = StatsFilter {
        namespace: parts.logs.namespace.clone(),
        // Every agent's, unless one is named.
        agent: settings.agent.as_ref().map(|_| parts.logs.agent.clone()),
        by: None,
        since: when::maybe("--since", args.since.as_deref(), now)?,
        until: when::maybe("--until", args.until.as_deref(), now)?,
    };
    // Not the sum of the rows: a session can be in several.
    let total = parts
        .index
        .stats(&all)
        .await?
        .pop()
        .unwrap_or_else(|| StatsRow {
            cost: Some(0),
            ..StatsRow::default()
        });
    let rows = if by.is_some() {
        parts.index.stats(&StatsFilter { by, ..all }).await?
    } else {
        Vec::new()
    };
    let stats = Stats { rows, total };
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
        "SHIPPED",
        "",
    ];
    print::table(&heading, &table(&stats, bars))?;
    Ok(exit::OK)
}

fn table(stats: &Stats, bars: bool) -> Vec<Vec<String>> {
    let most = stats.rows.iter().map(all_tokens).max().unwrap_or(0);
    let mut rows: Vec<Vec<String>> = stats
        .rows
        .iter()
        .map(|stats| {
            row(
                stats,
                "(none)",
                if bars {
                    bar(all_tokens(stats), most)
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
        bytes,
    } = stats;
    vec![
        group.clone().unwrap_or_else(|| unnamed.to_owned()),
        sessions.to_string(),
        messages.to_string(),
        turns.map(|turns| turns.to_string()).unwrap_or_default(),
        print::count(tokens.input),
        print::count(tokens.output),
        print::count(tokens.cache_read),
        print::count(tokens.cache_write),
        print::cost(*cost),
        bytes.map(print::bytes).unwrap_or_default(),
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

/// A bar as long as its share of the longest, to an eighth of a character.
fn bar(value: u64, most: u64) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    if value == 0 || most == 0 {
        return String::new();
    }
    let eighths = ((value as f64 / most as f64) * (BAR * 8) as f64)
        .round()
        .max(1.0) as usize;
    format!("{}{}", "█".repeat(eighths / 8), PARTS[eighths % 8])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Tokens;

    #[test]
    fn bars_are_as_long_as_their_share() {
        assert_eq!(bar(8, 8).chars().count(), BAR);
        assert_eq!(
            (
                bar(1, 1000).as_str(),
                bar(0, 8).as_str(),
                bar(0, 0).as_str()
            ),
            ("▏", "", "")
        );
        assert_eq!(bar(4, 8), "█".repeat(BAR / 2));
    }

    #[test]
    fn what_is_not_known_is_not_shown_as_nothing() {
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
                bytes: Some(0),
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
            (BAR, "total")
        );
    }
}
