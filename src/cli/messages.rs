//! `messages`: the messages of a session in the index, with the beginning of their text.

use crate::cli::table::Table;
use crate::cli::{exit, print, select, time};
use crate::config::Settings;
use crate::error::Result;
use crate::history::ContentFilter;
use crate::index::MessageFilter;
use crate::model::{LogId, ResolvedPoint, Role};
use crate::operations::messages::{self, ListedMessage, ListedPage, MessageQuery, TextExtent};
use crate::sessions::find;
use crate::wire::Parts;

/// List the messages of a session with their tokens and cost
///
/// The list comes from the index, the beginning of each text from the store. With --branch, --turn,
/// --tool, --sub-agent or --until, both come from the store.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  sessiond messages 3f2a --role assistant --since 2h\n  sessiond messages 3f2a --turn 4 --tool Bash --full"
)]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// Only messages with this role
    #[arg(long, value_name = "ROLE", value_parser = ["user", "assistant", "system", "tool"])]
    pub role: Option<String>,

    /// Only messages since this time, day or age, such as 2026-05-01 or 2h
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,

    /// Only messages before this time, day or age
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,

    /// Only messages of this turn
    #[arg(long, value_name = "N")]
    pub turn: Option<u64>,

    /// Only calls of this tool, and their results
    #[arg(long, value_name = "NAME")]
    pub tool: Option<String>,

    /// Only messages of this sub-agent
    #[arg(long, value_name = "ID")]
    pub sub_agent: Option<String>,

    /// The branch
    #[arg(long, value_name = "WRITER", help = select::BRANCH_HELP)]
    pub branch: Option<String>,

    /// Do not read the texts from the store
    #[arg(long)]
    pub no_text: bool,

    /// Print whole texts: thinking, tool inputs and results included
    #[arg(long, conflicts_with = "no_text")]
    pub full: bool,

    /// The page.
    #[command(flatten)]
    pub page: select::PageArgs,
}

/// Lists the messages.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let now = parts.logs.clock.now();
    let branch = select::branch(&parts, &id, args.branch.as_deref()).await?;
    let query = MessageQuery {
        point: ResolvedPoint::latest(branch.as_ref()),
        filter: MessageFilter {
            role: Role::ALL
                .into_iter()
                .find(|role| Some(role.as_str()) == args.role.as_deref()),
            since: time::parse_optional("--since", args.since.as_deref(), now)?,
            limit: args.page.limit,
            cursor: args.page.cursor.clone(),
        },
        content: ContentFilter {
            turn: args.turn,
            tool: args.tool,
            sub_agent: args.sub_agent,
            until: time::parse_optional("--until", args.until.as_deref(), now)?,
        },
        text: match (args.no_text, args.full) {
            (true, _) => TextExtent::None,
            (_, true) => TextExtent::Full,
            _ => TextExtent::Beginning,
        },
        prices: settings.prices.clone().with_list(),
    };
    let page = messages::list(&parts, &id, &query).await?;
    if args.page.json {
        print::json(&page)?;
    } else if args.full {
        print_texts(&id, &page)?;
    } else {
        print_page(&id, &page)?;
    }
    Ok(exit::OK)
}

/// Prints each message with its whole text.
fn print_texts(id: &LogId, page: &ListedPage) -> Result<()> {
    if page.messages.is_empty() {
        return print_page(id, page);
    }
    for listed in &page.messages {
        let row = &listed.row;
        let at = row.at.map(print::time).unwrap_or_default();
        let text = listed.text.as_deref().unwrap_or_default();
        print::line(format_args!(
            "{at}  {}  {}",
            row.role,
            print::clean(&row.kind)
        ))?;
        for line in text.lines() {
            print::line(format_args!("  {}", print::clean(line)))?;
        }
        print::line("")?;
    }
    match &page.next {
        Some(next) => print::next_page(next),
        None => Ok(()),
    }
}

fn print_page(id: &LogId, page: &ListedPage) -> Result<()> {
    let session = print::clean(&id.name.to_string());
    if page.messages.is_empty() {
        return print::line(format_args!("no messages in session {session}"));
    }
    let rows: Vec<Vec<String>> = page.messages.iter().map(row).collect();
    Table::new(&[
        "TIME",
        "ROLE",
        "KIND",
        "MODEL",
        "TOKENS",
        "COST",
        "SUB-AGENT",
        "POSITION",
        "TEXT",
    ])
    .flexible(&[8])
    .optional(&[7, 3, 6, 2, 4])
    .print(&rows)?;
    if let Some(next) = &page.next {
        print::next_page(next)?;
    }
    Ok(())
}

fn row(listed: &ListedMessage) -> Vec<String> {
    let row = &listed.row;
    let tokens = row.tokens.map(|tokens| {
        format!(
            "{} in, {} out",
            print::number(tokens.input + tokens.cache_read + tokens.cache_write),
            print::number(tokens.output)
        )
    });
    // The file name identifies the transcript within the session.
    let file = row
        .path
        .as_deref()
        .and_then(|path| path.rsplit('/').next())
        .unwrap_or("?");
    vec![
        row.at.map(print::time).unwrap_or_default(),
        row.role.clone(),
        row.kind.clone(),
        row.model.clone().unwrap_or_default(),
        tokens.unwrap_or_default(),
        row.tokens
            .map(|_| print::cost(row.cost))
            .unwrap_or_default(),
        row.sub_agent.clone().unwrap_or_default(),
        format!("{file}:{}", row.start),
        listed.text.clone().unwrap_or_default(),
    ]
}
