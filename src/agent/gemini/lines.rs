//! What a line of Gemini CLI's chats says. A message that changes is written again, whole, under its id: the last one counts.

use serde_json::Value;

use crate::agent::json::{self, text};
use crate::model::{
    Block, Message, Role, SessionFacts, Tokens, ToolCall, TranscriptLine, TurnBoundary,
};

/// Reads a line; none if it is no JSON object.
pub fn read(line: &[u8]) -> Option<TranscriptLine> {
    let line = json::object(line)?;
    let (message, mark) = match text(&line, "type") {
        Some("user") => user(&line),
        Some("gemini") => answer(&line),
        Some(kind) => (Some(message(&line, Role::System, kind, said(&line))), None),
        // What the session is, and changes to that.
        None => (None, None),
    };
    let facts = SessionFacts {
        model: json::owned(&line, "model"),
        ..SessionFacts::default()
    };
    Some(TranscriptLine {
        message,
        mark,
        facts,
    })
}

fn message(line: &Value, role: Role, kind: &str, blocks: Vec<Block>) -> Message {
    Message {
        uuid: json::owned(line, "id"),
        at: json::time(line, "timestamp"),
        ..Message::new(role, kind, blocks)
    }
}

fn user(line: &Value) -> (Option<Message>, Option<TurnBoundary>) {
    let blocks = said(line);
    let begins =
        |tag: &str| matches!(blocks.first(), Some(Block::Text(said)) if said.starts_with(tag));
    let (role, kind, mark) = match &blocks {
        blocks
            if blocks
                .iter()
                .any(|block| matches!(block, Block::Answer { .. })) =>
        {
            (Role::Tool, "tool_result", None)
        }
        // What the client tells the model about where it is.
        _ if begins("<session_context>") => (Role::System, "context", None),
        _ => (Role::User, "text", Some(TurnBoundary::Start)),
    };
    (Some(message(line, role, kind, blocks)), mark)
}

fn answer(line: &Value) -> (Option<Message>, Option<TurnBoundary>) {
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
        .map(|call| tool(call, at))
        .collect();
    let blocks: Vec<Block> = thoughts
        .chain(said(line))
        .chain(calls.iter().cloned())
        .collect();
    let kind = match blocks.last() {
        Some(Block::ToolCall(_)) => "tool_use",
        Some(Block::Thinking(_)) => "thinking",
        _ => "text",
    };
    // An answer that calls tools is first written without them, and often without a word.
    let ends = calls.is_empty() && blocks.iter().any(|block| matches!(block, Block::Text(_)));
    let took = |key: &str| {
        line.get("tokens")
            .and_then(|tokens| tokens.get(key))
            .and_then(Value::as_u64)
            .unwrap_or(0)
    };
    let tokens = Tokens {
        // What came from a cache counts as input there too, and thoughts cost what output costs.
        input: took("input").saturating_sub(took("cached")),
        output: took("output").saturating_add(took("thoughts")),
        cache_read: took("cached"),
        cache_write: 0,
    };
    let told = Message {
        model: json::owned(line, "model"),
        answer: json::owned(line, "id"),
        tokens: line
            .get("tokens")
            .filter(|tokens| tokens.is_object())
            .map(|_| tokens),
        complete: true,
        ..message(line, Role::Assistant, kind, blocks)
    };
    (
        Some(told),
        ends.then(|| TurnBoundary::End("end_turn".to_owned())),
    )
}

fn tool(call: &Value, started: Option<jiff::Timestamp>) -> Block {
    let word = |key: &str| json::owned(call, key).unwrap_or_default();
    Block::ToolCall(ToolCall {
        id: word("id"),
        name: word("name"),
        input: call.get("args").map(Value::to_string).unwrap_or_default(),
        started,
    })
}

/// The pieces of a message: a text, or a list of parts.
fn said(line: &Value) -> Vec<Block> {
    let part = |part: &Value| match (text(part, "text"), part.get("functionResponse")) {
        (Some(said), _) => Block::Text(said.to_owned()),
        (None, Some(told)) => {
            let response = told.get("response");
            let failed = response.and_then(|response| response.get("error"));
            let output = failed
                .or_else(|| response?.get("output"))
                .map(json::plain)
                .unwrap_or_default();
            Block::Answer {
                id: json::owned(told, "id").unwrap_or_default(),
                text: output,
                failed: failed.is_some(),
            }
        }
        _ => Block::Other("part".to_owned()),
    };
    match line.get("content") {
        Some(Value::String(said)) if !said.is_empty() => vec![Block::Text(said.clone())],
        Some(Value::Array(parts)) => parts.iter().map(part).collect(),
        _ => Vec::new(),
    }
}
