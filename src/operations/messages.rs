//! One page of the messages of a session: rows of the index, with the beginning of their text from
//! the store.

use std::collections::HashMap;

use serde::Serialize;

use super::index::try_add_missing;
use crate::error::{Error, Result};
use crate::history::{ConversationReader, Extent, MessageList};
use crate::index::{MessageFilter, MessageRow};
use crate::model::{LogId, Prices, ResolvedPoint, WriterId};
use crate::wire::Parts;

/// A message of the index with the beginning of its text.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct ListedMessage {
    /// The row.
    #[serde(flatten)]
    pub row: MessageRow,
    /// None if the store has no text for the message, or if the store was not read.
    pub text: Option<String>,
}

/// A page of messages.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct ListedPage {
    /// The messages, in conversation order.
    pub messages: Vec<ListedMessage>,
    /// The `cursor` of the next page; none for the last page.
    pub next: Option<String>,
}

/// A page of the main line, from the index. With `texts`, the store is read too.
pub async fn page(
    parts: &Parts,
    id: &LogId,
    filter: &MessageFilter,
    texts: bool,
) -> Result<ListedPage> {
    let mut page = parts.index.messages(id, filter).await?;
    if page.messages.is_empty() && filter.cursor.is_none() {
        if let Err(error) = try_add_missing(parts, id).await {
            tracing::warn!(%error, "the index does not contain all messages of the session");
        }
        page = parts.index.messages(id, filter).await?;
    }
    let texts = if !texts || page.messages.is_empty() {
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
        ListedMessage { row, text }
    });
    Ok(ListedPage {
        messages: listed.collect(),
        next: page.next,
    })
}

/// A page of a branch, from the store. Its cursor is the number of rows before it.
pub async fn branch_page(
    parts: &Parts,
    id: &LogId,
    branch: &WriterId,
    filter: &MessageFilter,
    prices: &Prices,
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
    let read = read_list(parts, id, Some(branch)).await?;
    let rows = read.rows(filter, prices);
    let limit = filter.limit as usize;
    let end = skipped.saturating_add(limit);
    let next = (rows.len() > end).then(|| end.to_string());
    let rows = rows.into_iter().skip(skipped).take(limit);
    Ok(ListedPage {
        messages: rows
            .map(|(row, text)| ListedMessage { row, text })
            .collect(),
        next,
    })
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
