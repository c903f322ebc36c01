//! `search`: what people and agents said, where the index keeps it.

use std::path::PathBuf;

use crate::cli::{exit, print, select, when};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::index::{Hit, SearchFilter, Words};
use crate::wire::Parts;

/// Search what people and agents said, the best first
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond search '\"connection refused\" postgres -docker' --since 7d\n\nWords must all be there; \"in this order\", -without, this or that. Needs an index with text: --index-text."
)]
pub struct Args {
    /// The words
    #[arg(value_name = "TEXT", required = true, allow_hyphen_values = true)]
    pub text: String,

    /// Only in sessions of the project in this directory
    #[arg(long, env = "SESSIOND_PROJECT", value_name = "DIR")]
    pub project: Option<PathBuf>,

    /// Only what was said from then on: a time, a day, or 2h for two hours ago
    #[arg(long, env = "SESSIOND_SINCE", value_name = "TIME")]
    pub since: Option<String>,

    /// Only what was said before
    #[arg(long, env = "SESSIOND_UNTIL", value_name = "TIME")]
    pub until: Option<String>,

    /// Only in sessions with this label
    #[arg(long, env = "SESSIOND_LABEL", value_name = "NAME=VALUE")]
    pub label: Option<String>,

    /// At most so many
    #[arg(long, env = "SESSIOND_LIMIT", value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub limit: u32,

    /// Print them as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let words = Words::read(&args.text)?;
    let parts = Parts::make(settings, None).await?;
    let now = parts.logs.clock.now();
    let filter = SearchFilter {
        namespace: parts.logs.namespace.clone(),
        // Every agent's, unless one is named.
        agent: settings.agent.as_ref().map(|_| parts.logs.agent.clone()),
        words,
        project: args
            .project
            .as_deref()
            .map(|directory| select::project_of(&parts, directory)),
        since: when::maybe("--since", args.since.as_deref(), now)?,
        until: when::maybe("--until", args.until.as_deref(), now)?,
        label: args.label.as_deref().map(label).transpose()?,
        limit: args.limit,
    };
    let found = parts.index.search(&filter).await?;
    if !found.indexed {
        return Err(Error::not_found(format!(
            "search: the index holds no text of namespace {}",
            parts.logs.namespace
        ))
        .hint(
            "run what streams with --index-text (or index-text = true in the configuration); \
             sessiond reindex --index-text does it for what is stored",
        ));
    }
    if args.json {
        print::json(&found)?;
        return Ok(exit::OK);
    }
    let colour = print::colour();
    for hit in &found.hits {
        print::line(show(hit, colour))?;
    }
    if found.hits.is_empty() {
        print::line("nothing found")?;
    } else if found.more {
        print::line(format_args!(
            "there is more: --limit {}",
            args.limit.saturating_mul(5).min(1000)
        ))?;
    }
    Ok(exit::OK)
}

fn label(text: &str) -> Result<(String, String)> {
    let (name, value) = text
        .split_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| Error::usage(format!("read --label {text:?}")).hint("NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Two lines: where it is, and what was found.
fn show(hit: &Hit, colour: bool) -> String {
    let (bold, yellow, end) = if colour {
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
    let title: String = title.chars().take(60).collect();
    let text = &hit.snippet.text;
    let mut line = String::new();
    let mut at = 0;
    for (from, to) in &hit.snippet.marks {
        line.push_str(&print::clean(&text[at..*from]));
        line.push_str(yellow);
        line.push_str(&print::clean(&text[*from..*to]));
        line.push_str(end);
        at = *to;
    }
    line.push_str(&print::clean(&text[at..]));
    format!(
        "{bold}{}{end}  {time}  {}{}  {}\n    {line}",
        print::clean(&hit.session),
        hit.role,
        print::clean(&agent),
        print::clean(&title)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Snippet;

    #[test]
    fn what_was_found_is_marked_on_a_terminal_and_plays_no_tricks() {
        let hit = Hit {
            agent: "claude-code".into(),
            session: "s1".into(),
            project: None,
            title: Some("a\x1b[31mtitle".into()),
            role: "user".into(),
            at: Some("2026-05-01T12:00:00Z".parse().unwrap()),
            uuid: None,
            sub_agent: None,
            snippet: Snippet {
                text: "fix the bug".into(),
                marks: vec![(0, 3), (8, 11)],
            },
        };
        assert_eq!(
            show(&hit, false),
            "s1  2026-05-01 12:00:00  user  a\u{fffd}[31mtitle\n    fix the bug"
        );
        assert!(show(&hit, true).ends_with("    \x1b[1;33mfix\x1b[0m the \x1b[1;33mbug\x1b[0m"));
        assert!(
            label("team=a=b").unwrap() == ("team".into(), "a=b".into())
                && label("=x").is_err()
                && label("x").is_err()
        );
    }
}
