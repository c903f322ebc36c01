//! `messages`: the messages of a session in the index, with the beginning of their text.

use std::collections::HashMap;

use serde::Serialize;

use crate::cli::table::Table;
use crate::cli::{exit, print, select, time};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::history::{ConversationReader, Extent, MessageList};
use crate::index::{MessageFilter, MessageRow};
use crate::model::{LogId, ResolvedPoint, Role, WriterId};
use crate::operations::index::try_add_missing;
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

/// A message of the index with the beginning of its text.
#[derive(Serialize)]
struct ListedMessage {
    #[serde(flatten)]
    row: MessageRow,
    /// None if the store has no text for the message, or if the store was not read.
    text: Option<String>,
}

#[derive(Serialize)]
struct ListedPage {
    messages: Vec<ListedMessage>,
    next: Option<String>,
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
    let page = match &branch {
        Some(writer) => {
            let prices = settings.prices.clone().with_list();
            let read = read_list(&parts, &id, Some(writer)).await?;
            branch_page(read.rows(&filter, &prices), &filter, args.no_text)?
        }
        None => indexed_page(&parts, &id, &filter, args.no_text).await?,
    };
    if args.page.json {
        print::json(&page)?;
    } else {
        print_page(&id, &page)?;
    }
    Ok(exit::OK)
}

/// A page of the main line, from the index.
async fn indexed_page(
    parts: &Parts,
    id: &LogId,
    filter: &MessageFilter,
    no_text: bool,
) -> Result<ListedPage> {
    let mut page = parts.index.messages(id, filter).await?;
    if page.messages.is_empty() && filter.cursor.is_none() {
        if let Err(error) = try_add_missing(parts, id).await {
            tracing::warn!(%error, "the index does not contain all messages of the session");
        }
        page = parts.index.messages(id, filter).await?;
    }
    let texts = if no_text || page.messages.is_empty() {
        HashMap::new()
    } else {
        let read = read_list(parts, id, None).await.map(MessageList::texts);
        read.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the message texts; listing the messages without them");
            HashMap::new()
        })
    };
    let listed = page.messages.into_iter().map(|row| {
        let key = row.path.clone().map(|path| (path, row.start));
        let text = key.and_then(|key| texts.get(&key).cloned());
        ListedMessage::new(row, text)
    });
    Ok(ListedPage {
        messages: listed.collect(),
        next: page.next,
    })
}

/// A page of a branch. Its cursor is the number of rows before it.
fn branch_page(
    rows: Vec<(MessageRow, Option<String>)>,
    filter: &MessageFilter,
    no_text: bool,
) -> Result<ListedPage> {
    let skipped: usize = match filter.cursor.as_deref() {
        None => 0,
        Some(text) => text.parse().map_err(|_| {
            Error::usage(format!(
                "invalid --cursor value {text:?}: expected a number"
            ))
            .hint("use the cursor that the previous page printed")
        })?,
    };
    let limit = filter.limit as usize;
    let end = skipped.saturating_add(limit);
    let next = (rows.len() > end).then(|| end.to_string());
    let rows = rows.into_iter().skip(skipped).take(limit);
    let listed = rows.map(|(row, text)| ListedMessage::new(row, text.filter(|_| !no_text)));
    Ok(ListedPage {
        messages: listed.collect(),
        next,
    })
}

impl ListedMessage {
    fn new(row: MessageRow, text: Option<String>) -> ListedMessage {
        let text = text.map(|text| print::one_line(&text, MAX_TEXT_LEN));
        ListedMessage { row, text }
    }
}

/// Reads the messages of the main line, or of a branch, from the store.
async fn read_list(parts: &Parts, id: &LogId, branch: Option<&WriterId>) -> Result<MessageList> {
    let read = ConversationReader::new(&parts.logs, &*parts.profile, id)
        .read(
            &ResolvedPoint::latest(branch),
            Extent::All,
            MessageList::default,
        )
        .await?;
    Ok(read.visitor)
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
