//! Messages of a transcript, in a form common to all agents. They are derived from transcripts, so
//! they can be rebuilt from the store.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::{RelPath, SessionFacts};

/// Upper bound of a plausible token count of one message: a million of the largest contexts.
const MAX_TOKENS: u64 = 1_000_000_000_000;

/// Upper bound of a plausible cost, in millionths of a dollar.
pub const MAX_COST: u64 = 1_000_000_000_000;

/// The author of a message.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A person or program that prompts the agent.
    User,
    /// The model.
    Assistant,
    /// The agent itself.
    System,
    /// A tool that was called.
    Tool,
}

impl Role {
    /// Every role.
    pub const ALL: [Role; 4] = [Role::User, Role::Assistant, Role::System, Role::Tool];

    /// The name on the command line and in the index.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::System => "system",
            Role::Tool => "tool",
        }
    }
}

/// Token usage of a response.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct Tokens {
    /// Input tokens that no cache provided.
    pub input: u64,
    /// Output tokens.
    pub output: u64,
    /// Input tokens read from a cache.
    pub cache_read: u64,
    /// Input tokens written to a cache.
    pub cache_write: u64,
}

impl Tokens {
    /// Whether the counts are plausible. Implausible usage counts as unknown, so that it does not
    /// distort totals.
    pub fn is_plausible(&self) -> bool {
        [self.input, self.output, self.cache_read, self.cache_write]
            .iter()
            .all(|count| *count < MAX_TOKENS)
    }

    /// The sum of both.
    #[must_use]
    pub fn plus(self, other: Tokens) -> Tokens {
        Tokens {
            input: self.input.saturating_add(other.input),
            output: self.output.saturating_add(other.output),
            cache_read: self.cache_read.saturating_add(other.cache_read),
            cache_write: self.cache_write.saturating_add(other.cache_write),
        }
    }

    /// The difference of both, at least 0 each.
    #[must_use]
    pub fn minus(self, other: Tokens) -> Tokens {
        Tokens {
            input: self.input.saturating_sub(other.input),
            output: self.output.saturating_sub(other.output),
            cache_read: self.cache_read.saturating_sub(other.cache_read),
            cache_write: self.cache_write.saturating_sub(other.cache_write),
        }
    }
}

/// A content block of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    /// Text.
    Text(String),
    /// Reasoning of the model.
    Thinking(String),
    /// A tool call.
    ToolCall(ToolCall),
    /// A tool result.
    ToolResult {
        /// ID of the call.
        call_id: String,
        /// What the tool returned.
        text: String,
        /// Whether the tool failed.
        is_error: bool,
    },
    /// Any other block, by its kind.
    Other(String),
}

/// A tool call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ToolCall {
    /// ID of the call; its result refers to it.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// The arguments, as JSON; empty where only the call itself is stored.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub input: String,
    /// Start time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<Timestamp>,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// ID of the message, unique within its session only.
    pub message_id: Option<String>,
    /// ID of the message that this one replies to.
    pub parent_id: Option<String>,
    /// The author.
    pub role: Role,
    /// The kind, in the agent's terms where there is no common one: `text`, `thinking`, `tool_use`,
    /// `tool_result`, …
    pub kind: String,
    /// Time of the message.
    pub at: Option<Timestamp>,
    /// The model that responded.
    pub model: Option<String>,
    /// The response that the message belongs to. Agents repeat a response's usage in each of its
    /// messages; it counts once.
    pub response_id: Option<String>,
    /// Token usage of that response.
    pub tokens: Option<Tokens>,
    /// Whether the response was complete when its usage was recorded.
    pub is_complete: bool,
    /// Cost in millionths of a dollar, where the transcript has it.
    pub cost: Option<u64>,
    /// The sub-agent that the message is from or for.
    pub sub_agent: Option<String>,
    /// The content.
    pub blocks: Vec<Block>,
}

impl Message {
    /// A message without any optional field.
    pub fn new(role: Role, kind: &str, blocks: Vec<Block>) -> Message {
        Message {
            message_id: None,
            parent_id: None,
            role,
            kind: kind.to_owned(),
            at: None,
            model: None,
            response_id: None,
            tokens: None,
            is_complete: false,
            cost: None,
            sub_agent: None,
            blocks,
        }
    }

    /// The text blocks, joined; without reasoning, tool calls and results.
    pub fn text(&self) -> String {
        let texts = self.blocks.iter().filter_map(|block| {
            if let Block::Text(text) = block {
                Some(text.as_str())
            } else {
                None
            }
        });
        texts.collect::<Vec<_>>().join("\n")
    }

    /// All blocks in one text.
    pub fn summary(&self) -> String {
        let blocks = self.blocks.iter().map(|block| match block {
            Block::Text(text) | Block::Thinking(text) => text.clone(),
            Block::ToolCall(call) => format!("{} {}", call.name, call.input),
            Block::ToolResult { text, is_error, .. } => {
                format!("{}{text}", if *is_error { "failed: " } else { "" })
            }
            Block::Other(kind) => format!("[{kind}]"),
        });
        let summary = blocks.collect::<Vec<_>>().join(" ");
        if summary.is_empty() {
            format!("[{}]", self.kind)
        } else {
            summary
        }
    }
}

/// The start or end of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TurnBoundary {
    /// A user prompt.
    Start,
    /// The end of the agent's response, with the reason why it stopped.
    End(String),
}

/// One parsed line of a transcript.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TranscriptLine {
    /// The message, if the line is one.
    pub message: Option<Message>,
    /// The start or end of a turn, if the line is one.
    pub boundary: Option<TurnBoundary>,
    /// Facts about the session.
    pub facts: SessionFacts,
    /// A file outside of the session's directories that belongs to the session.
    pub named_file: Option<RelPath>,
    /// The model that responds from this line on, where messages do not have it.
    pub next_model: Option<String>,
    /// Whether the line belongs to a sub-agent.
    pub is_sub_agent: bool,
    /// A tool call that has no result yet and becomes a message together with its result.
    pub pending_call: Option<ToolCall>,
}

/// A message and its position in a transcript.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedMessage {
    /// The file.
    pub path: RelPath,
    /// Offset of its first byte.
    pub start: u64,
    /// Length of its line.
    pub len: u64,
    /// The message.
    pub message: Message,
}

/// The parsed transcripts of one entry.
#[derive(Debug, Clone, Default)]
pub struct ParsedTranscripts {
    /// Facts about the session.
    pub facts: SessionFacts,
    /// Whether the session's own transcript was read from its first byte: it is new or rewritten.
    pub is_from_start: bool,
    /// The messages, in the order of their files and bytes.
    pub messages: Vec<LocatedMessage>,
    /// The turn events of the session's own transcript.
    pub turn_events: Vec<TurnEvent>,
    /// The range that was parsed of each transcript.
    pub spans: BTreeMap<RelPath, ParsedSpan>,
    /// Number of lines that could not be parsed, by file.
    pub unparsed_lines: BTreeMap<RelPath, u64>,
    /// The files outside of the session's directories that the lines name.
    pub named_files: BTreeSet<RelPath>,
}

/// The parsed range of a transcript.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParsedSpan {
    /// Offset of the first line.
    pub start: u64,
    /// Bytes after the last newline.
    pub partial_line_bytes: u64,
}

/// A line of a transcript that matters to the turns of a session.
#[derive(Debug, Clone)]
pub struct TurnEvent {
    /// The transcript.
    pub path: RelPath,
    /// Offset after the line.
    pub end: u64,
    /// Time of the message.
    pub at: Option<Timestamp>,
    /// ID of the message.
    pub message_id: Option<String>,
    /// The response that the message belongs to.
    pub response_id: Option<String>,
    /// The start or end of a turn, if it is one.
    pub boundary: Option<TurnBoundary>,
    /// Tool calls in the message.
    pub calls: Vec<ToolCall>,
    /// Tool results in the message: call ID and text.
    pub tool_results: Vec<(String, String)>,
    /// Whether the line belongs to a sub-agent, whose tool calls are no steps of the turn.
    pub is_sub_agent: bool,
}
