//! `messages`: the messages of a session in the index, with the beginning of their text.

use crate::cli::table::Table;
use crate::cli::{exit, print, select, time};
use crate::config::Settings;
use crate::error::Result;
use crate::index::MessageFilter;
use crate::model::{LogId, Role};
use crate::operations::messages::{ListedMessage, ListedPage, branch_page, page};
use crate::sessions::find;
use crate::wire::Parts;

/// Maximum length of a shown text, in bytes.
const MAX_TEXT_LEN: usize = 200;

/// List the messages of a session with their tokens and cost
///
/// The list comes from the index, the beginning of each text from the store. With --branch, both
/// come from the store.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond messages 3f2a --role assistant --since 2h")]
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

    /// The branch
    #[arg(long, value_name = "WRITER", help = select::BRANCH_HELP)]
    pub branch: Option<String>,

    /// Do not read the texts from the store
    #[arg(long)]
    pub no_text: bool,

    /// The page.
    #[command(flatten)]
    pub page: select::PageArgs,
}

/// Lists the messages.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let filter = MessageFilter {
        role: Role::ALL
            .into_iter()
            .find(|role| Some(role.as_str()) == args.role.as_deref()),
        since: time::parse_optional("--since", args.since.as_deref(), parts.logs.clock.now())?,
        limit: args.page.limit,
        cursor: args.page.cursor.clone(),
    };
    let branch = select::branch(&parts, &id, args.branch.as_deref()).await?;
    let mut page = match &branch {
        Some(writer) => {
            let prices = settings.prices.clone().with_list();
            branch_page(&parts, &id, writer, &filter, &prices).await?
        }
        None => page(&parts, &id, &filter, !args.no_text).await?,
    };
    for listed in &mut page.messages {
        let text = listed.text.take().filter(|_| !args.no_text);
        listed.text = text.map(|text| print::one_line(&text, MAX_TEXT_LEN));
    }
    if args.page.json {
        print::json(&page)?;
    } else {
        print_page(&id, &page)?;
    }
    Ok(exit::OK)
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
