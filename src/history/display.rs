//! One message, as much of it as is shown.
//!
//! Owns what is left out: a session is far larger than what a person reads of it, and only that is kept in memory.

use std::hash::{DefaultHasher, Hash, Hasher};

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use crate::model::{Block, LocatedMessage, Message, Role};

/// What is kept of a tool's input or answer where it is folded, in bytes.
const FOLDED: usize = 400;

/// Names of what says most about a call, where a tool has them, the best first.
const TELLING: [&str; 10] = [
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

/// A message as it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DisplayMessage {
    /// Orders a conversation, as in the index.
    pub position: i64,
    /// Its id.
    pub uuid: Option<String>,
    /// Who speaks.
    pub role: Role,
    /// What it is.
    pub kind: String,
    /// When.
    pub at: Option<Timestamp>,
    /// The model that answered.
    pub model: Option<String>,
    /// The sub-agent that speaks or is spoken to.
    pub sub_agent: Option<String>,
    /// Tells it from all others, as far as anything does.
    #[serde(skip)]
    pub name: u64,
    /// Tells what was said from anything else, where somebody prompts.
    #[serde(skip)]
    pub prompt: Option<u64>,
    /// What it is made of.
    #[serde(rename = "content")]
    pub bits: Vec<DisplayBlock>,
}

/// A piece of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DisplayBlock {
    /// What was said.
    Text(String),
    /// What was thought.
    Thought(String),
    /// A tool is called.
    ToolCall {
        /// Its id.
        id: String,
        /// The tool.
        name: String,
        /// What it was given: all of it, or what says most.
        input: String,
        /// Tells what a sub-agent was told, if this starts one.
        #[serde(skip)]
        prompt: Option<u64>,
    },
    /// A tool has answered.
    Answer {
        /// The call.
        id: String,
        /// What it said: all of it, or the beginning.
        text: String,
        /// How long that is, in bytes.
        bytes: usize,
        /// It failed.
        failed: bool,
    },
    /// Something else, by its kind.
    Other(String),
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl DisplayMessage {
    /// What is shown of a message; none if nothing is. `full` shows all.
    pub fn of(said: LocatedMessage, position: i64, full: bool) -> Option<DisplayMessage> {
        let LocatedMessage {
            path,
            start,
            message,
            ..
        } = said;
        // What the agent itself adds for the model is no part of the conversation; that it was summarised or told something is.
        let told = matches!(message.kind.as_str(), "summary" | "task_notification");
        if !full && message.role == Role::System && !told {
            return None;
        }
        let prompt = (message.role == Role::User).then(|| hash(message.text()));
        let name = message
            .uuid
            .as_deref()
            .map_or_else(|| hash((path.as_str(), start)), hash);
        let Message {
            uuid,
            role,
            kind,
            at,
            model,
            sub_agent,
            blocks,
            ..
        } = message;
        let bits: Vec<DisplayBlock> = blocks
            .into_iter()
            .filter_map(|block| bit(block, full))
            .collect();
        if !full && bits.is_empty() {
            return None;
        }
        Some(DisplayMessage {
            position,
            uuid,
            role,
            kind,
            at,
            model,
            sub_agent,
            name,
            prompt,
            bits,
        })
    }

    /// The calls it makes.
    pub fn calls(&self) -> impl Iterator<Item = &str> {
        self.bits.iter().filter_map(|bit| {
            if let DisplayBlock::ToolCall { id, .. } = bit {
                Some(id.as_str())
            } else {
                None
            }
        })
    }

    /// Whether it starts a sub-agent with this prompt.
    pub fn starts(&self, with: u64) -> bool {
        self.bits
            .iter()
            .any(|bit| matches!(bit, DisplayBlock::ToolCall { prompt: Some(prompt), .. } if *prompt == with))
    }
}

fn bit(block: Block, full: bool) -> Option<DisplayBlock> {
    match block {
        Block::Text(text) if text.trim().is_empty() => None,
        Block::Text(text) => Some(DisplayBlock::Text(text)),
        Block::Thinking(text) if full && !text.trim().is_empty() => {
            Some(DisplayBlock::Thought(text))
        }
        Block::Thinking(_) => None,
        Block::ToolCall(call) => {
            let input: Option<Value> = serde_json::from_str(&call.input).ok();
            let prompt = input
                .as_ref()
                .and_then(|input| input.get("prompt")?.as_str())
                .map(|prompt| hash(prompt.to_owned()));
            let input = if full {
                call.input
            } else {
                clip(&telling(input.as_ref(), &call.input))
            };
            Some(DisplayBlock::ToolCall {
                id: call.id,
                name: call.name,
                input,
                prompt,
            })
        }
        Block::Answer { id, text, failed } => {
            let bytes = text.len();
            Some(DisplayBlock::Answer {
                id,
                text: if full { text } else { clip(&text) },
                bytes,
                failed,
            })
        }
        Block::Other(kind) => Some(DisplayBlock::Other(kind)),
    }
}

/// What says most about a call.
fn telling(input: Option<&Value>, text: &str) -> String {
    let best = TELLING.iter().find_map(|key| input?.get(key)?.as_str());
    best.map_or_else(
        || {
            if text == "{}" {
                String::new()
            } else {
                text.to_owned()
            }
        },
        str::to_owned,
    )
}

fn clip(text: &str) -> String {
    text[..text.floor_char_boundary(FOLDED)].to_owned()
}
