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
use crate::model::message::TurnEvent;
use crate::model::{Block, FileMove, LocatedMessage, Prices, RelPath, Tokens, TurnBoundary};

/// A message and the beginning of its text.
#[derive(Debug, Clone)]
struct ListedMessage {
    row: MessageRow,
    /// The usage of its response, which every message of the response repeats.
    usage: Option<Usage>,
    /// None if nothing of the message is displayed.
    text: Option<String>,
    /// The tool calls in the message: ID and name.
    calls: Vec<(String, String)>,
    /// The calls whose results are in the message.
    results: Vec<String>,
}

/// Selects messages by what only the transcripts have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContentFilter {
    /// Only messages of this turn.
    pub turn: Option<u64>,
    /// Only calls of this tool, and their results.
    pub tool: Option<String>,
    /// Only messages of this sub-agent.
    pub sub_agent: Option<String>,
    /// Only messages before this time.
    pub until: Option<Timestamp>,
}

/// What the store adds to a row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MessageContent {
    /// The turn of the message.
    pub turn: Option<u64>,
    /// The text of the message; none if nothing of it is displayed.
    pub text: Option<String>,
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
    /// The starts and ends of turns, each with the offset of its end: true for a start.
    boundaries: PerTranscript<(u64, bool)>,
    /// The turn that a fork starts in, and whether that turn has ended.
    origin: TurnCount,
    is_full: bool,
}

/// Counts turns by their boundaries. A prompt starts another turn only if the last one has ended.
#[derive(Debug, Clone, Copy, Default)]
struct TurnCount {
    ended: u64,
    has_ended: bool,
}

impl TurnCount {
    fn apply(&mut self, is_start: bool) {
        if is_start {
            self.ended += u64::from(self.has_ended);
        }
        self.has_ended = !is_start;
    }

    fn turn(self) -> u64 {
        self.ended + 1
    }
}

impl ConversationVisitor for MessageList {
    fn message_count(&self) -> usize {
        self.messages.iter().count()
    }
}

impl TranscriptVisitor for MessageList {
    fn visit_turn_event(&mut self, event: TurnEvent) {
        if let Some(boundary) = event.boundary {
            let is_start = boundary == TurnBoundary::Start;
            self.boundaries
                .push(event.path, event.end, (event.end, is_start));
        }
    }

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
        let text = DisplayMessage::new(located, position, self.is_full);
        let (mut calls, mut results) = (Vec::new(), Vec::new());
        for block in &message.blocks {
            match block {
                Block::ToolCall(call) => calls.push((call.id.clone(), call.name.clone())),
                Block::ToolResult { call_id, .. } => results.push(call_id.clone()),
                _ => {}
            }
        }
        let is_full = self.is_full;
        let listed = ListedMessage {
            text: text.as_ref().map(|text| match is_full {
                true => full_text(text),
                false => beginning(text),
            }),
            calls,
            results,
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
        self.boundaries.truncate(path, from);
    }

    fn apply_move(&mut self, moved: &FileMove) {
        self.messages.apply_move(moved);
        self.boundaries.apply_move(moved);
    }

    fn start_fork(&mut self, _names: &BTreeMap<RelPath, RelPath>) {
        // The messages of the origin are those of another session.
        self.messages.clear();
        for (_, (_, is_start)) in self.boundaries.iter() {
            self.origin.apply(*is_start);
        }
        self.boundaries.clear();
    }

    fn clear(&mut self) {
        *self = MessageList::new(self.is_full);
    }
}

impl MessageList {
    /// A list with whole texts, or with their beginnings.
    pub fn new(is_full: bool) -> MessageList {
        MessageList {
            is_full,
            ..MessageList::default()
        }
    }

    /// The turn and the text of each message, by transcript and offset.
    pub fn contents(self) -> HashMap<(String, u64), MessageContent> {
        let turns = self.turns();
        let messages = self.messages.iter().map(|(path, listed)| {
            let key = (path.to_string(), listed.row.start);
            let turn = turns.get(&key).copied();
            let text = listed.text.clone();
            (key, MessageContent { turn, text })
        });
        messages.collect()
    }

    /// The turn of each message, by transcript and offset. A message of a sub-agent belongs to the
    /// turn of the message before it.
    fn turns(&self) -> HashMap<(String, u64), u64> {
        let mut boundaries: BTreeMap<&RelPath, Vec<(u64, bool)>> = BTreeMap::new();
        for (path, boundary) in self.boundaries.iter() {
            boundaries.entry(path).or_default().push(*boundary);
        }
        let mut messages: Vec<(&RelPath, &ListedMessage)> = self.messages.iter().collect();
        messages.sort_by_key(|(path, listed)| (listed.row.position, *path, listed.row.start));
        let (mut count, mut turns) = (self.origin, HashMap::new());
        let mut applied: BTreeMap<&RelPath, usize> = BTreeMap::new();
        for (path, listed) in messages {
            let row = &listed.row;
            let known = boundaries.get(path).map_or(&[][..], Vec::as_slice);
            let next = applied.entry(path).or_default();
            let mut turn = count.turn();
            while let Some((end, is_start)) = known.get(*next) {
                // The boundary is the line of the message itself, or one before it.
                if *end > row.start + row.len + MAX_LINE_END_LEN {
                    break;
                }
                count.apply(*is_start);
                turn = count.turn();
                *next += 1;
            }
            turns.insert((path.to_string(), row.start), turn);
        }
        turns
    }

    /// The rows that the filters select, in conversation order. The page of the filter is not
    /// applied.
    pub fn rows(
        self,
        filter: &MessageFilter,
        content: &ContentFilter,
        prices: &Prices,
    ) -> Vec<(MessageRow, MessageContent)> {
        let turns = self.turns();
        let names: HashMap<String, String> = self
            .messages
            .iter()
            .flat_map(|(_, listed)| listed.calls.iter().cloned())
            .collect();
        let uses_tool = |listed: &ListedMessage, tool: &str| {
            let results = listed.results.iter().filter_map(|id| names.get(id));
            let calls = listed.calls.iter().map(|(_, name)| name);
            calls.chain(results).any(|name| name == tool)
        };
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
            let is_of_tool = content
                .tool
                .as_deref()
                .is_none_or(|tool| uses_tool(&listed, tool));
            let turn = turns.get(&(path.to_string(), listed.row.start)).copied();
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
            let text = listed.text;
            (row, MessageContent { turn, text }, is_of_tool)
        });
        rows.filter(|(row, found, is_of_tool)| {
            let since = filter.since.map(Timestamp::as_microsecond);
            let until = content.until.map(Timestamp::as_microsecond);
            let sub_agent = content.sub_agent.as_deref();
            *is_of_tool
                && filter.role.is_none_or(|role| role.as_str() == row.role)
                && since.is_none_or(|since| row.position >= since)
                && until.is_none_or(|until| row.position < until)
                && (content.turn.is_none() || found.turn == content.turn)
                && (sub_agent.is_none() || row.sub_agent.as_deref() == sub_agent)
        })
        .map(|(row, found, _)| (row, found))
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

/// Maximum length of a whole text, in bytes.
const MAX_FULL_LEN: usize = 1 << 20;

/// Maximum number of bytes after a record on its line: whitespace and a newline.
const MAX_LINE_END_LEN: u64 = 4;

/// All blocks.
fn full_text(message: &DisplayMessage) -> String {
    let blocks = message.blocks.iter().map(block_text);
    let mut text = blocks.collect::<Vec<_>>().join("\n");
    text.truncate(text.floor_char_boundary(MAX_FULL_LEN));
    text
}

fn block_text(block: &DisplayBlock) -> String {
    match block {
        DisplayBlock::Text(text) | DisplayBlock::Thinking(text) => text.clone(),
        DisplayBlock::ToolCall { name, input, .. } => format!("{name}: {input}"),
        DisplayBlock::ToolResult { text, .. } => text.clone(),
        DisplayBlock::Other(kind) => format!("[{kind}]"),
    }
}

/// The beginning of the first block that has text.
fn beginning(message: &DisplayMessage) -> String {
    let mut blocks = message.blocks.iter().map(block_text);
    let mut text = blocks
        .find(|text| !text.trim().is_empty())
        .unwrap_or_default();
    text.truncate(text.floor_char_boundary(MAX_TEXT_LEN));
    text
}
