//! `search`: full-text search in the index.

use std::path::PathBuf;

use crate::cli::{exit, print, select, time};
use crate::config::{self, Settings};
use crate::error::{Error, Result};
use crate::index::{SearchFilter, SearchHit, SearchQuery};
use crate::wire::Parts;

/// Maximum number of characters of a title.
const MAX_TITLE_LEN: usize = 60;

/// Maximum value of --limit.
const MAX_LIMIT: u32 = 1000;

/// Search the texts of messages, best match first
///
/// All words must occur. "Quotes" search for a phrase, -word excludes a word, and OR separates
/// alternatives. The index must contain the texts: see --index-text.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond search '\"connection refused\" postgres -docker' --since 7d"
)]
pub struct Args {
    /// Search query
    #[arg(value_name = "QUERY", required = true, allow_hyphen_values = true)]
    pub text: String,

    /// Only sessions of the project in this directory
    #[arg(long, value_name = "DIR")]
    pub project: Option<PathBuf>,

    /// Only messages since this time, day or age, such as 2026-05-01 or 2h
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,

    /// Only messages before this time, day or age
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,

    /// Only sessions with this label
    #[arg(long, value_name = "NAME=VALUE")]
    pub label: Option<String>,

    /// Maximum number of matches
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub limit: u32,

    /// Print complete session IDs on a terminal
    #[arg(long)]
    pub full: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Searches and prints the matches.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let query = SearchQuery::parse(&args.text)?;
    let label = config::labels(args.label.as_slice())?.pop();
    let parts = Parts::build(settings, None).await?;
    let now = parts.logs.clock.now();
    let project = args.project.as_deref();
    let filter = SearchFilter {
        namespace: parts.logs.namespace.clone(),
        agent: select::agent_filter(settings, &parts),
        query,
        project: project.map(|directory| select::project_of(&parts, directory)),
        since: time::parse_optional("--since", args.since.as_deref(), now)?,
        until: time::parse_optional("--until", args.until.as_deref(), now)?,
        label: label.map(|label| (label.name, label.value)),
        limit: args.limit,
    };
    let found = parts.index.search(&filter).await?;
    if !found.has_text {
        return Err(Error::not_found(format!(
            "the index contains no message texts for namespace {}",
            parts.logs.namespace
        ))
        .hint("run \"sessiond reindex --index-text\", and stream with --index-text from now on"));
    }
    if args.json {
        print::json(&found)?;
        return Ok(exit::OK);
    }
    if found.hits.is_empty() {
        print::line("no matches")?;
        return Ok(exit::OK);
    }
    let color = print::colors_stdout();
    let ids = select::ShortIds::load(&parts, args.full, found.hits.iter().map(|hit| &*hit.agent));
    let ids = ids.await;
    for hit in &found.hits {
        print::line(render(hit, &ids.shorten(&hit.session), color))?;
    }
    if found.has_more {
        print::line(format_args!(
            "more matches exist; use --limit {} to show more",
            args.limit.saturating_mul(5).min(MAX_LIMIT)
        ))?;
    }
    Ok(exit::OK)
}

/// Two lines: the position of the match, and its text.
fn render(hit: &SearchHit, session: &str, color: bool) -> String {
    let (bold, yellow, reset) = if color {
        ("\x1b[1m", "\x1b[1;33m", "\x1b[0m")
    } else {
        ("", "", "")
    };
    let time = hit.at.map(print::time).unwrap_or_default();
    let agent = hit
        .sub_agent
        .as_deref()
        .map(|name| format!(" in sub-agent {name}"))
        .unwrap_or_default();
    let title = hit
        .title
        .as_deref()
        .or(hit.project.as_deref())
        .unwrap_or_default();
    let title: String = title.chars().take(MAX_TITLE_LEN).collect();
    let text = &hit.snippet.text;
    let mut line = String::new();
    let mut end = 0;
    for (from, to) in &hit.snippet.matches {
        line.push_str(&print::clean(&text[end..*from]));
        line.push_str(yellow);
        line.push_str(&print::clean(&text[*from..*to]));
        line.push_str(reset);
        end = *to;
    }
    line.push_str(&print::clean(&text[end..]));
    format!(
        "{bold}{}{reset}  {time}  {}{}  {}\n    {line}",
        print::clean(session),
        hit.role,
        print::clean(&agent),
        print::clean(&title)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::search_query::Snippet;

    #[test]
    fn matches_are_highlighted_on_a_terminal_and_control_characters_replaced() {
        let hit = SearchHit {
            agent: "claude-code".into(),
            session: "s1".into(),
            project: None,
            title: Some("a\x1b[31mtitle".into()),
            role: "user".into(),
            at: Some("2026-05-01T12:00:00Z".parse().unwrap()),
            message_id: None,
            sub_agent: None,
            snippet: Snippet {
                text: "fix the bug".into(),
                matches: vec![(0, 3), (8, 11)],
            },
        };
        assert_eq!(
            render(&hit, "s1", false),
            "s1  2026-05-01T12:00:00Z  user  a\u{fffd}[31mtitle\n    fix the bug"
        );
        assert!(
            render(&hit, "s1", true).ends_with("    \x1b[1;33mfix\x1b[0m the \x1b[1;33mbug\x1b[0m")
        );
    }
}
