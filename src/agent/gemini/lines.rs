//! The parser of Gemini CLI's chat lines. Gemini writes a changed message again under the same ID;
//! the last version is current.

use serde_json::Value;

use crate::agent::json::{self, text};
use crate::model::{
    Block, Message, Role, SessionFacts, Tokens, ToolCall, TranscriptLine, TurnBoundary,
};

/// Parses a line; none if it is not a JSON object.
pub fn read(line: &[u8]) -> Option<TranscriptLine> {
    let line = json::object(line)?;
    let (message, boundary) = match text(&line, "type") {
        Some("user") => user(&line),
        Some("gemini") => response(&line),
        Some(kind) => (
            Some(message(&line, Role::System, kind, blocks(&line))),
            None,
        ),
        // Facts about the session.
        None => (None, None),
    };
    let facts = SessionFacts {
        model: json::owned(&line, "model"),
        ..SessionFacts::default()
    };
    Some(TranscriptLine {
        message,
        boundary,
        facts,
        ..TranscriptLine::default()
    })
}

fn message(line: &Value, role: Role, kind: &str, blocks: Vec<Block>) -> Message {
    Message {
        message_id: json::owned(line, "id"),
        at: json::time(line, "timestamp"),
        ..Message::new(role, kind, blocks)
    }
}

fn user(line: &Value) -> (Option<Message>, Option<TurnBoundary>) {
    let blocks = blocks(line);
    let starts_with =
        |tag: &str| matches!(blocks.first(), Some(Block::Text(text)) if text.starts_with(tag));
    let (role, kind, boundary) = match &blocks {
        blocks
            if blocks
                .iter()
                .any(|block| matches!(block, Block::ToolResult { .. })) =>
        {
            (Role::Tool, "tool_result", None)
        }
        // Context that Gemini CLI adds for the model.
        _ if starts_with("<session_context>") => (Role::System, "context", None),
        _ => (Role::User, "text", Some(TurnBoundary::Start)),
    };
    (Some(message(line, role, kind, blocks)), boundary)
}

fn response(line: &Value) -> (Option<Message>, Option<TurnBoundary>) {
    let at = json::time(line, "timestamp");
    let thoughts = line
        .get("thoughts")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let thoughts = thoughts
        .map(|thought| Block::Thinking(json::owned(thought, "description").unwrap_or_default()));
    let calls: Vec<Block> = line
        .get("toolCalls")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .map(|call| tool_call(call, at))
        .collect();
    let content: Vec<Block> = thoughts
        .chain(blocks(line))
        .chain(calls.iter().cloned())
        .collect();
    let kind = match content.last() {
        Some(Block::ToolCall(_)) => "tool_use",
        Some(Block::Thinking(_)) => "thinking",
        _ => "text",
    };
    // Gemini first writes a response without its tool calls, and often without any text.
    let ends_turn = calls.is_empty() && content.iter().any(|block| matches!(block, Block::Text(_)));
    let count = |key: &str| {
        line.get("tokens")
            .and_then(|tokens| tokens.get(key))
            .and_then(Value::as_u64)
            .unwrap_or(0)
    };
    let tokens = Tokens {
        // Gemini counts cached tokens as input, and thoughts are priced as output.
        input: count("input").saturating_sub(count("cached")),
        output: count("output").saturating_add(count("thoughts")),
        cache_read: count("cached"),
        cache_write: 0,
    };
    let message = Message {
        model: json::owned(line, "model"),
        response_id: json::owned(line, "id"),
        tokens: line
            .get("tokens")
            .filter(|tokens| tokens.is_object())
            .map(|_| tokens),
        is_complete: true,
        ..message(line, Role::Assistant, kind, content)
    };
    (
        Some(message),
        ends_turn.then(|| TurnBoundary::End("end_turn".to_owned())),
    )
}

fn tool_call(call: &Value, started: Option<jiff::Timestamp>) -> Block {
    let field = |key: &str| json::owned(call, key).unwrap_or_default();
    Block::ToolCall(ToolCall {
        id: field("id"),
        name: field("name"),
        input: call.get("args").map(Value::to_string).unwrap_or_default(),
        started,
    })
}

/// The content blocks of a message: a text, or a list of parts.
fn blocks(line: &Value) -> Vec<Block> {
    let part = |part: &Value| match (text(part, "text"), part.get("functionResponse")) {
        (Some(text), _) => Block::Text(text.to_owned()),
        (None, Some(result)) => {
            let response = result.get("response");
            let error = response.and_then(|response| response.get("error"));
            let output = error
                .or_else(|| response?.get("output"))
                .map(json::plain)
                .unwrap_or_default();
            Block::ToolResult {
                call_id: json::owned(result, "id").unwrap_or_default(),
                text: output,
                is_error: error.is_some(),
            }
        }
        _ => Block::Other("part".to_owned()),
    };
    match line.get("content") {
        Some(Value::String(text)) if !text.is_empty() => vec![Block::Text(text.clone())],
        Some(Value::Array(parts)) => parts.iter().map(part).collect(),
        _ => Vec::new(),
    }
}
