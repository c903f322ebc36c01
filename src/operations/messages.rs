//! The messages of a session as pages: rows of the index with texts from the store, or both from
//! the store where the index does not have what a filter needs.

use std::collections::HashMap;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::history::{ContentFilter, ConversationReader, Extent, MessageContent, MessageList};
use crate::index::{MessageFilter, MessageRow};
use crate::model::{LogId, LogPoint, Prices, ResolvedPoint};
use crate::operations::index::try_add_missing;
use crate::sys::lines::one_line;
use crate::wire::Parts;

/// Maximum length of a text, unless the whole text was asked for, in bytes.
const MAX_TEXT_LEN: usize = 200;

/// How much of the text of a message to return.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TextExtent {
    /// Nothing.
    None,
    /// The beginning, on one line.
    #[default]
    Beginning,
    /// All of it, up to 1 MiB.
    Full,
}

/// The messages to list.
#[derive(Debug, Clone, Default)]
pub struct MessageQuery {
    /// The point up to which to read; the end of the session or of a branch by default.
    pub point: ResolvedPoint,
    /// The rows.
    pub filter: MessageFilter,
    /// What the index does not have.
    pub content: ContentFilter,
    /// How much of the texts to return.
    pub text: TextExtent,
    /// The prices of models.
    pub prices: Prices,
}

/// A message of a page.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct ListedMessage {
    /// Its row in the index.
    #[serde(flatten)]
    pub row: MessageRow,
    /// The turn it belongs to; none if the store was not read.
    pub turn: Option<u64>,
    /// Its text; none if the store has no text for the message, or was not read.
    pub text: Option<String>,
}

/// A page of messages.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct ListedPage {
    /// The messages, in conversation order.
    pub messages: Vec<ListedMessage>,
    /// The cursor of the next page; none for the last page.
    pub next: Option<String>,
}

/// Lists a page of the messages of a session.
pub async fn list(parts: &Parts, id: &LogId, query: &MessageQuery) -> Result<ListedPage> {
    let point = &query.point;
    let is_end = point.at == LogPoint::Latest && point.checkpoint.is_none();
    if is_end && point.branch.is_none() && query.content == ContentFilter::default() {
        return indexed_page(parts, id, query).await;
    }
    let read = read_list(parts, id, query).await?;
    stored_page(
        read.rows(&query.filter, &query.content, &query.prices),
        query,
    )
}

/// A page of the main line, with the beginning of each text if `texts`.
pub async fn page(
    parts: &Parts,
    id: &LogId,
    filter: &MessageFilter,
    texts: bool,
) -> Result<ListedPage> {
    let query = MessageQuery {
        filter: filter.clone(),
        text: match texts {
            true => TextExtent::Beginning,
            false => TextExtent::None,
        },
        ..MessageQuery::default()
    };
    list(parts, id, &query).await
}

/// A page of the main line, from the index.
async fn indexed_page(parts: &Parts, id: &LogId, query: &MessageQuery) -> Result<ListedPage> {
    let filter = &query.filter;
    let mut page = parts.index.messages(id, filter).await?;
    if page.messages.is_empty() && filter.cursor.is_none() {
        if let Err(error) = try_add_missing(parts, id).await {
            tracing::warn!(%error, "the index does not contain all messages of the session");
        }
        page = parts.index.messages(id, filter).await?;
    }
    let mut contents = if query.text == TextExtent::None || page.messages.is_empty() {
        HashMap::new()
    } else {
        let read = read_list(parts, id, query).await.map(MessageList::contents);
        read.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the message texts; listing the messages without them");
            HashMap::new()
        })
    };
    let listed = page.messages.into_iter().map(|row| {
        let key = row.path.clone().map(|path| (path, row.start));
        let content = key.and_then(|key| contents.remove(&key));
        listed(row, content.unwrap_or_default(), query.text)
    });
    Ok(ListedPage {
        messages: listed.collect(),
        next: page.next,
    })
}

/// A page of rows from the store. Its cursor is the number of rows before it.
fn stored_page(
    rows: Vec<(MessageRow, MessageContent)>,
    query: &MessageQuery,
) -> Result<ListedPage> {
    let filter = &query.filter;
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
    let listed = rows.map(|(row, content)| listed(row, content, query.text));
    Ok(ListedPage {
        messages: listed.collect(),
        next,
    })
}

fn listed(row: MessageRow, content: MessageContent, extent: TextExtent) -> ListedMessage {
    let text = content.text.and_then(|text| match extent {
        TextExtent::None => None,
        TextExtent::Beginning => Some(one_line(&text, MAX_TEXT_LEN)),
        TextExtent::Full => Some(text),
    });
    ListedMessage {
        row,
        turn: content.turn,
        text,
    }
}

/// Reads the messages up to the point from the store.
async fn read_list(parts: &Parts, id: &LogId, query: &MessageQuery) -> Result<MessageList> {
    let is_full = query.text == TextExtent::Full;
    let read = ConversationReader::new(&parts.logs, &*parts.profile, id)
        .read(&query.point, Extent::All, || MessageList::new(is_full))
        .await?;
    Ok(read.visitor)
}
