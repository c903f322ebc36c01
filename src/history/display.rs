//! One message, reduced to what is displayed of it.
//!
//! A session is far larger than what a person reads of it. Only the displayed part is kept in
//! memory.

use std::hash::{DefaultHasher, Hash, Hasher};

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use crate::model::{Block, LocatedMessage, Message, Role};

/// Maximum length of a tool's input or result in the short display, in bytes.
const MAX_SHORT_LEN: usize = 400;

/// The input fields that describe a tool call best, the best first.
const DESCRIPTIVE_FIELDS: [&str; 10] = [
    "command",
    "file_path",
    "notebook_path",
    "path",
    "pattern",
    "query",
    "url",
    "skill",
    "description",
    "prompt",
];

/// A message for display.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct DisplayMessage {
    /// Its position in the conversation, as in the index.
    pub position: i64,
    /// Its ID.
    pub message_id: Option<String>,
    /// Its author.
    pub role: Role,
    /// Its kind.
    pub kind: String,
    /// Its time.
    pub at: Option<Timestamp>,
    /// The model that wrote it.
    pub model: Option<String>,
    /// The sub-agent that wrote or received it.
    pub sub_agent: Option<String>,
    /// A hash of its ID, or of its position if it has none.
    #[serde(skip)]
    pub key: u64,
    /// A hash of its text, if it is a prompt.
    #[serde(skip)]
    pub prompt_hash: Option<u64>,
    /// Its content.
    #[serde(rename = "content")]
    pub blocks: Vec<DisplayBlock>,
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DisplayBlock {
    /// Text.
    Text(String),
    /// The model's thinking.
    Thinking(String),
    /// A tool call.
    ToolCall {
        /// Its ID.
        id: String,
        /// The tool.
        name: String,
        /// Its input: complete, or the most descriptive field.
        input: String,
        /// A hash of the prompt of the sub-agent, if the call starts one.
        #[serde(skip)]
        prompt_hash: Option<u64>,
    },
    /// A tool result.
    ToolResult {
        /// ID of the call.
        call_id: String,
        /// The result: complete, or its beginning.
        text: String,
        /// Size of the complete result in bytes.
        bytes: usize,
        /// Whether the tool failed.
        is_error: bool,
    },
    /// Anything else, by its kind.
    Other(String),
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl DisplayMessage {
    /// What is displayed of a message; none if nothing is. With `verbose`, everything is.
    pub fn new(located: LocatedMessage, position: i64, verbose: bool) -> Option<DisplayMessage> {
        let LocatedMessage {
            path,
            start,
            message,
            ..
        } = located;
        // The agent adds system messages for the model. Of these, only summaries and notifications
        // are part of the conversation.
        let is_shown = matches!(message.kind.as_str(), "summary" | "task_notification");
        if !verbose && message.role == Role::System && !is_shown {
            return None;
        }
        let prompt_hash = (message.role == Role::User).then(|| hash(message.text()));
        let key = message
            .message_id
            .as_deref()
            .map_or_else(|| hash((path.as_str(), start)), hash);
        let Message {
            message_id,
            role,
            kind,
            at,
            model,
            sub_agent,
            blocks,
            ..
        } = message;
        let blocks: Vec<DisplayBlock> = blocks
            .into_iter()
            .filter_map(|block| DisplayBlock::new(block, verbose))
            .collect();
        if !verbose && blocks.is_empty() {
            return None;
        }
        Some(DisplayMessage {
            position,
            message_id,
            role,
            kind,
            at,
            model,
            sub_agent,
            key,
            prompt_hash,
            blocks,
        })
    }

    /// The IDs of its tool calls.
    pub fn calls(&self) -> impl Iterator<Item = &str> {
        self.blocks.iter().filter_map(|block| match block {
            DisplayBlock::ToolCall { id, .. } => Some(id.as_str()),
            _ => None,
        })
    }

    /// The hashes of the prompts of the sub-agents that its calls start.
    pub fn agent_prompts(&self) -> impl Iterator<Item = u64> {
        self.blocks.iter().filter_map(|block| match block {
            DisplayBlock::ToolCall { prompt_hash, .. } => *prompt_hash,
            _ => None,
        })
    }
}

impl DisplayBlock {
    fn new(block: Block, verbose: bool) -> Option<DisplayBlock> {
        match block {
            Block::Text(text) if text.trim().is_empty() => None,
            Block::Text(text) => Some(DisplayBlock::Text(text)),
            Block::Thinking(text) if verbose && !text.trim().is_empty() => {
                Some(DisplayBlock::Thinking(text))
            }
            Block::Thinking(_) => None,
            Block::ToolCall(call) => {
                let input: Option<Value> = serde_json::from_str(&call.input).ok();
                let prompt_hash = input
                    .as_ref()
                    .and_then(|input| input.get("prompt")?.as_str())
                    .map(|prompt| hash(prompt.to_owned()));
                let input = if verbose {
                    call.input
                } else {
                    shorten(&describe(input.as_ref(), &call.input))
                };
                Some(DisplayBlock::ToolCall {
                    id: call.id,
                    name: call.name,
                    input,
                    prompt_hash,
                })
            }
            Block::ToolResult {
                call_id,
                text,
                is_error,
            } => {
                let bytes = text.len();
                Some(DisplayBlock::ToolResult {
                    call_id,
                    text: if verbose { text } else { shorten(&text) },
                    bytes,
                    is_error,
                })
            }
            Block::Other(kind) => Some(DisplayBlock::Other(kind)),
        }
    }
}

/// The most descriptive field of a tool's input, or the input as it is.
fn describe(input: Option<&Value>, text: &str) -> String {
    let best = DESCRIPTIVE_FIELDS
        .iter()
        .find_map(|field| input?.get(field)?.as_str());
    match best {
        Some(best) => best.to_owned(),
        None if text == "{}" => String::new(),
        None => text.to_owned(),
    }
}

fn shorten(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_SHORT_LEN)].to_owned()
}
