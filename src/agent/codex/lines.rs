//! The parser of Codex's rollout lines. It ignores unknown fields and line types.

use serde_json::Value;

use crate::agent::json::{self, text};
use crate::model::{
    Block, Message, Role, SessionFacts, Tokens, ToolCall, TranscriptLine, TurnBoundary,
};

/// Parses a line; none if it is not a JSON object.
pub fn read(line: &[u8]) -> Option<TranscriptLine> {
    let line = json::object(line)?;
    let none = Value::Null;
    let payload = line.get("payload").unwrap_or(&none);
    let (message, boundary) = match text(&line, "type") {
        Some("response_item") => (item(&line, payload), None),
        Some("event_msg") => event(&line, payload),
        Some("token_usage_record") => (Some(usage(&line, payload)), None),
        Some("compacted") => {
            let summary = text(payload, "message").map(|text| Block::Text(text.to_owned()));
            (
                Some(message(
                    &line,
                    payload,
                    Role::System,
                    "summary",
                    summary.into_iter().collect(),
                )),
                None,
            )
        }
        _ => (None, None),
    };
    let facts = match text(&line, "type") {
        Some("session_meta" | "turn_context") if !is_sub_agent(payload) => SessionFacts {
            project: json::owned(payload, "cwd"),
            cwd: json::owned(payload, "cwd"),
            model: json::owned(payload, "model"),
            agent_version: json::owned(payload, "cli_version"),
            ..SessionFacts::default()
        },
        _ => SessionFacts::default(),
    };
    // The lines of the responses do not have the model; each turn begins with its own.
    let next_model = text(&line, "type")
        .filter(|kind| *kind == "turn_context")
        .and_then(|_| json::owned(payload, "model"));
    Some(TranscriptLine {
        message,
        boundary,
        facts,
        next_model,
        ..TranscriptLine::default()
    })
}

fn message(line: &Value, payload: &Value, role: Role, kind: &str, blocks: Vec<Block>) -> Message {
    Message {
        message_id: json::owned(payload, "id"),
        at: json::time(line, "timestamp"),
        ..Message::new(role, kind, blocks)
    }
}

/// Whether a line belongs to a sub-agent.
fn is_sub_agent(payload: &Value) -> bool {
    let root = text(payload, "root_turn_id");
    text(payload, "thread_source") == Some("subagent")
        || (root.is_some() && root != text(payload, "turn_id"))
}

/// An item of the input or output of the model.
fn item(line: &Value, payload: &Value) -> Option<Message> {
    let kind = text(payload, "type").unwrap_or_default();
    let (role, kind, blocks) = match kind {
        "message" => {
            let content = payload.get("content").map_or_else(Vec::new, blocks);
            match text(payload, "role") {
                Some("assistant") => (Role::Assistant, "text", content),
                Some("user") if is_prompt(payload, &content) => (Role::User, "text", content),
                // Codex adds context as user messages.
                Some("user") => (Role::System, "context", content),
                role => (Role::System, role.unwrap_or("message"), content),
            }
        }
        "reasoning" => {
            let thoughts = ["summary", "content"]
                .iter()
                .filter_map(|key| payload.get(*key))
                .flat_map(blocks);
            let thoughts = thoughts.map(|block| {
                if let Block::Text(text) = block {
                    Block::Thinking(text)
                } else {
                    block
                }
            });
            (Role::Assistant, "thinking", thoughts.collect())
        }
        _ if kind.ends_with("_call") => {
            // Functions have arguments, custom tools an input, the shell an action.
            let input = ["arguments", "input", "action"]
                .iter()
                .find_map(|key| payload.get(*key));
            let call = ToolCall {
                id: json::owned(payload, "call_id")
                    .or_else(|| json::owned(payload, "id"))
                    .unwrap_or_default(),
                name: json::owned(payload, "name").unwrap_or_else(|| kind.to_owned()),
                input: input.map(json::plain).unwrap_or_default(),
                started: json::time(line, "timestamp"),
            };
            // A tool that runs on the server has no result line.
            let block = if payload.get("call_id").is_some() {
                Block::ToolCall(call)
            } else {
                Block::Other(kind.to_owned())
            };
            (Role::Assistant, "tool_use", vec![block])
        }
        _ if kind.ends_with("_call_output") => {
            let output = payload.get("output");
            let is_error = output
                .and_then(|output| output.get("success"))
                .and_then(Value::as_bool)
                == Some(false);
            let result = output
                .map(|output| json::plain(output.get("content").unwrap_or(output)))
                .unwrap_or_default();
            let id = json::owned(payload, "call_id").unwrap_or_default();
            (
                Role::Tool,
                "tool_result",
                vec![Block::ToolResult {
                    call_id: id,
                    text: result,
                    is_error,
                }],
            )
        }
        other => (Role::System, other, Vec::new()),
    };
    Some(message(line, payload, role, kind, blocks))
}

/// Whether a user message is a prompt. Newer versions mark it; older ones add their own context in
/// tags.
fn is_prompt(payload: &Value, blocks: &[Block]) -> bool {
    let kinds = payload
        .get("internal_chat_message_metadata_passthrough")
        .and_then(|metadata| metadata.get("content_item_kinds"));
    match kinds.and_then(Value::as_array) {
        Some(kinds) => kinds
            .iter()
            .filter_map(Value::as_str)
            .any(|kind| kind.starts_with("user.")),
        None => {
            !matches!(blocks.first(), Some(Block::Text(text)) if text.starts_with('<') || text.starts_with("# AGENTS.md"))
        }
    }
}

/// An event: the start or end of a turn. The turns of sub-agents are not turns of the session.
fn event(line: &Value, payload: &Value) -> (Option<Message>, Option<TurnBoundary>) {
    let kind = text(payload, "type").unwrap_or_default();
    let boundary = match kind {
        "task_started" | "turn_started" => TurnBoundary::Start,
        "task_complete" | "turn_complete" => TurnBoundary::End("end_turn".to_owned()),
        "turn_aborted" => {
            TurnBoundary::End(text(payload, "reason").unwrap_or("aborted").to_owned())
        }
        _ => return (None, None),
    };
    (
        Some(message(line, payload, Role::System, kind, Vec::new())),
        (!is_sub_agent(payload)).then_some(boundary),
    )
}

/// The token usage of a response.
fn usage(line: &Value, payload: &Value) -> Message {
    let count = |key: &str| {
        payload
            .get("usage")
            .and_then(|usage| usage.get(key))
            .and_then(Value::as_u64)
            .unwrap_or(0)
    };
    let (cache_read, cache_write) = (
        count("cached_input_tokens"),
        count("cache_write_input_tokens"),
    );
    let tokens = Tokens {
        // Codex counts cached tokens as input, too.
        input: count("input_tokens")
            .saturating_sub(cache_read)
            .saturating_sub(cache_write),
        output: count("output_tokens"),
        cache_read,
        cache_write,
    };
    Message {
        response_id: json::owned(payload, "response_id"),
        tokens: Some(tokens),
        is_complete: true,
        ..message(line, payload, Role::System, "usage", Vec::new())
    }
}

/// The content blocks of a message.
fn blocks(content: &Value) -> Vec<Block> {
    let block = |item: &Value| match (text(item, "text"), text(item, "type")) {
        (Some(text), _) => Block::Text(text.to_owned()),
        (None, kind) => Block::Other(kind.unwrap_or_default().to_owned()),
    };
    content
        .as_array()
        .map_or_else(Vec::new, |items| items.iter().map(block).collect())
}
