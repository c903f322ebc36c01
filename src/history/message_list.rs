//! The messages of a conversation as rows, with the beginning of their text, read from the store.
//!
//! Owns the rows of a branch, which the index does not have, and the texts, which it does not have
//! either. Every line of a transcript has its own row, as in the index: a message that the agent
//! wrote twice has two.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;

use super::display::{DisplayBlock, DisplayMessage};
use super::reader::ConversationVisitor;
use crate::index::{MessageFilter, MessageRow};
use crate::log::replay::{PerTranscript, TranscriptVisitor};
use crate::model::{FileMove, LocatedMessage, Prices, RelPath, Tokens};

/// A message and the beginning of its text.
#[derive(Debug, Clone)]
struct ListedMessage {
    row: MessageRow,
    /// The usage of its response, which every message of the response repeats.
    usage: Option<Usage>,
    /// None if nothing of the message is displayed.
    text: Option<String>,
}

#[derive(Debug, Clone, Copy)]
struct Usage {
    tokens: Tokens,
    cost: Option<u64>,
    is_complete: bool,
}

/// A visitor that keeps a row of each message. The session ID and offset in a transcript identify
/// a message.
#[derive(Debug, Default)]
pub struct MessageList {
    messages: PerTranscript<ListedMessage>,
}

impl ConversationVisitor for MessageList {
    fn message_count(&self) -> usize {
        self.messages.iter().count()
    }
}

impl TranscriptVisitor for MessageList {
    fn visit_message(&mut self, located: LocatedMessage) {
        let (path, start, len) = (located.path.clone(), located.start, located.len);
        let message = located.message.clone();
        let previous = self
            .messages
            .last(&path)
            .map_or(0, |last| last.row.position);
        let position = message
            .at
            .map_or(0, Timestamp::as_microsecond)
            .max(previous.saturating_add(1));
        let text = DisplayMessage::new(located, position, false);
        let listed = ListedMessage {
            text: text.as_ref().map(beginning),
            usage: message.tokens.map(|tokens| Usage {
                tokens,
                cost: message.cost,
                is_complete: message.is_complete,
            }),
            row: MessageRow {
                position,
                path: Some(path.to_string()),
                start,
                len,
                message_id: message.message_id,
                parent_id: message.parent_id,
                role: message.role.as_str().to_owned(),
                kind: message.kind,
                at: message.at,
                model: message.model,
                response_id: message.response_id,
                tokens: None,
                cost: None,
                sub_agent: message.sub_agent,
            },
        };
        self.messages.push(path, start + len, listed);
    }

    fn truncate(&mut self, path: &RelPath, from: u64) {
        self.messages.truncate(path, from);
    }

    fn apply_move(&mut self, moved: &FileMove) {
        self.messages.apply_move(moved);
    }

    fn start_fork(&mut self, _names: &BTreeMap<RelPath, RelPath>) {
        // The messages of the origin are those of another session.
        self.messages.clear();
    }

    fn clear(&mut self) {
        self.messages.clear();
    }
}

impl MessageList {
    /// The beginning of the text of each message, by transcript and offset.
    pub fn texts(self) -> HashMap<(String, u64), String> {
        self.messages
            .iter()
            .filter_map(|(path, listed)| {
                Some(((path.to_string(), listed.row.start), listed.text.clone()?))
            })
            .collect()
    }

    /// The rows that a filter selects, in conversation order, each with the beginning of its text.
    /// The page of the filter is not applied.
    pub fn rows(
        self,
        filter: &MessageFilter,
        prices: &Prices,
    ) -> Vec<(MessageRow, Option<String>)> {
        let mut all: Vec<(RelPath, ListedMessage)> = self
            .messages
            .iter()
            .map(|(path, listed)| (path.clone(), listed.clone()))
            .collect();
        all.sort_by(|(one_path, one), (other_path, other)| {
            (one.row.position, one_path, one.row.start).cmp(&(
                other.row.position,
                other_path,
                other.row.start,
            ))
        });
        let mut usage = usage_by_response(&all);
        let rows = all.into_iter().map(|(path, listed)| {
            let counted = match &listed.row.response_id {
                Some(response) => usage.remove(response),
                None => listed.usage,
            };
            let model = listed.row.model.as_deref();
            let cost =
                counted.and_then(|usage| usage.cost.or_else(|| prices.cost(model?, usage.tokens)));
            let row = MessageRow {
                path: Some(path.to_string()),
                tokens: counted.map(|usage| usage.tokens),
                cost,
                ..listed.row
            };
            (row, listed.text)
        });
        rows.filter(|(row, _)| {
            let since = filter.since.map(Timestamp::as_microsecond);
            filter.role.is_none_or(|role| role.as_str() == row.role)
                && since.is_none_or(|since| row.position >= since)
        })
        .collect()
    }
}

/// The usage of each response: that of its last complete message.
fn usage_by_response(messages: &[(RelPath, ListedMessage)]) -> HashMap<String, Usage> {
    let mut usage: HashMap<String, Usage> = HashMap::new();
    for (_, listed) in messages {
        let (Some(response), Some(now)) = (&listed.row.response_id, listed.usage) else {
            continue;
        };
        let latest = usage.entry(response.clone()).or_insert(now);
        if now.is_complete {
            *latest = now;
        }
    }
    usage
}

/// Maximum length of a text, in bytes: more than any list shows.
const MAX_TEXT_LEN: usize = 1000;

/// The beginning of the first block that has text.
fn beginning(message: &DisplayMessage) -> String {
    let mut blocks = message.blocks.iter().map(|block| match block {
        DisplayBlock::Text(text) | DisplayBlock::Thinking(text) => text.clone(),
        DisplayBlock::ToolCall { name, input, .. } => format!("{name}: {input}"),
        DisplayBlock::ToolResult { text, .. } => text.clone(),
        DisplayBlock::Other(kind) => format!("[{kind}]"),
    });
    let mut text = blocks
        .find(|text| !text.trim().is_empty())
        .unwrap_or_default();
    text.truncate(text.floor_char_boundary(MAX_TEXT_LEN));
    text
}
