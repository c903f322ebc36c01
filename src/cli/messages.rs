//! `messages`: the messages of a session in the index, with the beginning of their text.

use std::collections::HashMap;

use serde::Serialize;

use crate::cli::table::Table;
use crate::cli::{exit, print, select, time};
use crate::config::Settings;
use crate::error::Result;
use crate::history::{Conversation, ConversationReader, DisplayBlock, DisplayMessage, Extent};
use crate::index::{MessageFilter, MessageRow};
use crate::model::{LogId, ResolvedPoint, Role};
use crate::operations::index::try_add_missing;
use crate::sessions::find;
use crate::wire::Parts;

/// Maximum length of a shown text, in bytes.
const MAX_TEXT_LEN: usize = 200;

/// List the messages of a session with their tokens and cost
///
/// The list comes from the index, the beginning of each text from the store.
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
struct MessageList {
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
    let mut page = parts.index.messages(&id, &filter).await?;
    if page.messages.is_empty() && args.page.cursor.is_none() {
        if let Err(error) = try_add_missing(&parts, &id).await {
            tracing::warn!(%error, "the index does not contain all messages of the session");
        }
        page = parts.index.messages(&id, &filter).await?;
    }
    let texts = if args.no_text || page.messages.is_empty() {
        HashMap::new()
    } else {
        texts(&parts, &id).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the message texts; listing the messages without them");
            HashMap::new()
        })
    };
    let messages: Vec<ListedMessage> = page
        .messages
        .into_iter()
        .map(|row| ListedMessage {
            text: texts.get(&(row.position, row.role.clone())).cloned(),
            row,
        })
        .collect();
    let page = MessageList {
        messages,
        next: page.next,
    };
    if args.page.json {
        print::json(&page)?;
    } else {
        print_page(&id, &page)?;
    }
    Ok(exit::OK)
}

/// The beginning of the text of each message, by position and role.
async fn texts(parts: &Parts, id: &LogId) -> Result<HashMap<(i64, String), String>> {
    let read = ConversationReader::new(&parts.logs, &*parts.profile, id)
        .read(&ResolvedPoint::default(), Extent::All, || {
            Conversation::new(false)
        })
        .await?;
    let messages = read.visitor.threaded(None).into_iter();
    Ok(messages
        .map(|threaded| {
            let message = threaded.message;
            let key = (message.position, message.role.as_str().to_owned());
            (key, beginning(&message))
        })
        .collect())
}

/// The beginning of the first block that has text.
fn beginning(message: &DisplayMessage) -> String {
    let mut blocks = message.blocks.iter().map(|block| match block {
        DisplayBlock::Text(text) | DisplayBlock::Thinking(text) => text.clone(),
        DisplayBlock::ToolCall { name, input, .. } => format!("{name}: {input}"),
        DisplayBlock::ToolResult { text, .. } => text.clone(),
        DisplayBlock::Other(kind) => format!("[{kind}]"),
    });
    let text = blocks.find(|text| !text.trim().is_empty());
    print::one_line(&text.unwrap_or_default(), MAX_TEXT_LEN)
}

fn print_page(id: &LogId, page: &MessageList) -> Result<()> {
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
