//! What a transcript says, in words that fit every agent. Derived from bytes that are kept anyway.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::{RelPath, SessionFacts};

/// A message with more tokens than this does not say the truth: a million of the largest contexts there are.
const MOST_TOKENS: u64 = 1_000_000_000_000;

/// Nor one that cost more, in millionths of a dollar.
pub const MOST_COST: u64 = 1_000_000_000_000;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A person, or whoever prompts.
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

    /// The word for it, on the command line and in the index.
    pub fn word(self) -> &'static str {
        match self {
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::System => "system",
            Role::Tool => "tool",
        }
    }
}

/// What an answer took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tokens {
    /// Read anew.
    pub input: u64,
    /// Written.
    pub output: u64,
    /// Read from a cache.
    pub cache_read: u64,
    /// Put into a cache.
    pub cache_write: u64,
}

impl Tokens {
    /// Whether a model can have taken so many; what cannot be is unknown, and keeps no sum from being right.
    pub fn is_plausible(&self) -> bool {
        [self.input, self.output, self.cache_read, self.cache_write]
            .iter()
            .all(|count| *count < MOST_TOKENS)
    }

    /// Both together.
    pub fn and(self, other: Tokens) -> Tokens {
        Tokens {
            input: self.input.saturating_add(other.input),
            output: self.output.saturating_add(other.output),
            cache_read: self.cache_read.saturating_add(other.cache_read),
            cache_write: self.cache_write.saturating_add(other.cache_write),
        }
    }

    /// All but the other's.
    pub fn without(self, other: Tokens) -> Tokens {
        Tokens {
            input: self.input.saturating_sub(other.input),
            output: self.output.saturating_sub(other.output),
            cache_read: self.cache_read.saturating_sub(other.cache_read),
            cache_write: self.cache_write.saturating_sub(other.cache_write),
        }
    }
}

/// A piece of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    /// What was said.
    Text(String),
    /// What was thought.
    Thinking(String),
    /// A tool is called.
    ToolCall(ToolCall),
    /// A tool has answered.
    Answer {
        /// The call it answers.
        id: String,
        /// What it said.
        text: String,
        /// It failed.
        failed: bool,
    },
    /// Something else, by its kind.
    Other(String),
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Its id, which its answer names.
    pub id: String,
    /// The tool.
    pub name: String,
    /// What it was given, as JSON.
    pub input: String,
    /// When.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<Timestamp>,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Its id, unique within its session only.
    pub uuid: Option<String>,
    /// The message it answers.
    pub parent: Option<String>,
    /// Who speaks.
    pub role: Role,
    /// What it is, in the agent's words where there is no other: `text`, `thinking`, `tool_use`, `tool_result`, …
    pub kind: String,
    /// When.
    pub at: Option<Timestamp>,
    /// The model that answered.
    pub model: Option<String>,
    /// The answer it is a piece of: what an answer took is told with each of its pieces and counts once.
    pub answer: Option<String>,
    /// What that answer took.
    pub tokens: Option<Tokens>,
    /// The answer was complete when that was counted.
    pub complete: bool,
    /// What it cost, in millionths of a dollar, where the transcript says so.
    pub cost: Option<u64>,
    /// The sub-agent that speaks or is spoken to.
    pub sub_agent: Option<String>,
    /// What it is made of.
    pub blocks: Vec<Block>,
}

impl Message {
    /// A message of which no more is known.
    pub fn new(role: Role, kind: &str, blocks: Vec<Block>) -> Message {
        Message {
            uuid: None,
            parent: None,
            role,
            kind: kind.to_owned(),
            at: None,
            model: None,
            answer: None,
            tokens: None,
            complete: false,
            cost: None,
            sub_agent: None,
            blocks,
        }
    }

    /// What was said, without what was thought and done.
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

    /// What it is about, in a few words.
    pub fn summary(&self) -> String {
        let words = self.blocks.iter().map(|block| match block {
            Block::Text(text) | Block::Thinking(text) => text.clone(),
            Block::ToolCall(call) => format!("{} {}", call.name, call.input),
            Block::Answer { text, failed, .. } => {
                format!("{}{text}", if *failed { "failed: " } else { "" })
            }
            Block::Other(kind) => format!("[{kind}]"),
        });
        let words = words.collect::<Vec<_>>().join(" ");
        if words.is_empty() {
            format!("[{}]", self.kind)
        } else {
            words
        }
    }
}

/// What a line means for the turns of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TurnBoundary {
    /// Somebody prompts: a turn begins.
    Start,
    /// The agent has answered: a turn is complete. Why it stopped.
    End(String),
}

/// What one line of a transcript says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TranscriptLine {
    /// The message it is.
    pub message: Option<Message>,
    /// What it means for the turns.
    pub mark: Option<TurnBoundary>,
    /// What it tells about the session.
    pub facts: SessionFacts,
}

/// A message and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedMessage {
    /// The file.
    pub path: RelPath,
    /// Its first byte.
    pub start: u64,
    /// Its bytes.
    pub len: u64,
    /// What it says.
    pub message: Message,
}

/// What the parts of an entry say.
#[derive(Debug, Clone, Default)]
pub struct ParsedTranscripts {
    /// About the session.
    pub facts: SessionFacts,
    /// The messages, in the order of their files and bytes.
    pub said: Vec<LocatedMessage>,
    /// What the session's own transcript means for its turns.
    pub marks: Vec<TurnEvent>,
    /// Each transcript that was read: where reading began, and how many bytes of an unfinished line it ends with.
    pub read: BTreeMap<RelPath, Span>,
    /// Lines that could not be read, by file.
    pub unread: BTreeMap<RelPath, u64>,
}

/// How much of a transcript was read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Span {
    /// The first byte of the first line.
    pub from: u64,
    /// Bytes behind the last whole line.
    pub open: u64,
}

/// Something that matters to the turns of a session.
#[derive(Debug, Clone)]
pub struct TurnEvent {
    /// The transcript.
    pub path: RelPath,
    /// Behind its last byte.
    pub end: u64,
    /// When.
    pub at: Option<Timestamp>,
    /// The message.
    pub uuid: Option<String>,
    /// The answer it is a piece of.
    pub answer: Option<String>,
    /// What it means.
    pub mark: Option<TurnBoundary>,
    /// Tools that it calls.
    pub calls: Vec<ToolCall>,
    /// Tools that it answers for, and what they said.
    pub answers: Vec<(String, String)>,
}
