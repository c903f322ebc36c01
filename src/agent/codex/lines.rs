//! What a line of Codex's rollouts says. Only what is named here is read; everything else is passed over.

use serde_json::Value;

use crate::agent::json::{self, text};
use crate::model::{
    Block, Message, Role, SessionFacts, Tokens, ToolCall, TranscriptLine, TurnBoundary,
};

/// Reads a line; none if it is no JSON object.
pub fn read(line: &[u8]) -> Option<TranscriptLine> {
    let line = json::object(line)?;
    let none = Value::Null;
    let payload = line.get("payload").unwrap_or(&none);
    let (message, mark) = match text(&line, "type") {
        Some("response_item") => (item(&line, payload), None),
        Some("event_msg") => event(&line, payload),
        Some("token_usage_record") => (Some(usage(&line, payload)), None),
        Some("compacted") => {
            let said = text(payload, "message").map(|said| Block::Text(said.to_owned()));
            (
                Some(message(
                    &line,
                    payload,
                    Role::System,
                    "summary",
                    said.into_iter().collect(),
                )),
                None,
            )
        }
        _ => (None, None),
    };
    let facts = match text(&line, "type") {
        Some("session_meta" | "turn_context") if !is_sub_agents(payload) => SessionFacts {
            project: json::owned(payload, "cwd"),
            cwd: json::owned(payload, "cwd"),
            model: json::owned(payload, "model"),
            agent_version: json::owned(payload, "cli_version"),
            ..SessionFacts::default()
        },
        _ => SessionFacts::default(),
    };
    Some(TranscriptLine {
        message,
        mark,
        facts,
    })
}

fn message(line: &Value, payload: &Value, role: Role, kind: &str, blocks: Vec<Block>) -> Message {
    Message {
        uuid: json::owned(payload, "id"),
        at: json::time(line, "timestamp"),
        ..Message::new(role, kind, blocks)
    }
}

/// Whether a line is of a sub-agent, as far as it says.
fn is_sub_agents(payload: &Value) -> bool {
    let root = text(payload, "root_turn_id");
    text(payload, "thread_source") == Some("subagent")
        || (root.is_some() && root != text(payload, "turn_id"))
}

/// What the model was given or gave.
fn item(line: &Value, payload: &Value) -> Option<Message> {
    let kind = text(payload, "type").unwrap_or_default();
    let (role, kind, blocks) = match kind {
        "message" => {
            let blocks = payload.get("content").map_or_else(Vec::new, said);
            match text(payload, "role") {
                Some("assistant") => (Role::Assistant, "text", blocks),
                Some("user") if is_prompt(payload, &blocks) => (Role::User, "text", blocks),
                // What Codex itself tells the model, in whoever's name.
                Some("user") => (Role::System, "context", blocks),
                role => (Role::System, role.unwrap_or("message"), blocks),
            }
        }
        "reasoning" => {
            let thought = ["summary", "content"]
                .iter()
                .filter_map(|key| payload.get(*key))
                .flat_map(said);
            let thought = thought.map(|block| {
                if let Block::Text(text) = block {
                    Block::Thinking(text)
                } else {
                    block
                }
            });
            (Role::Assistant, "thinking", thought.collect())
        }
        _ if kind.ends_with("_call") => {
            // Functions are given arguments, custom tools an input, the shell an action.
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
            // What the server does itself is never answered in a line of its own.
            let block = if payload.get("call_id").is_some() {
                Block::ToolCall(call)
            } else {
                Block::Other(kind.to_owned())
            };
            (Role::Assistant, "tool_use", vec![block])
        }
        _ if kind.ends_with("_call_output") => {
            let output = payload.get("output");
            let failed = output
                .and_then(|output| output.get("success"))
                .and_then(Value::as_bool)
                == Some(false);
            let said = output
                .map(|output| json::plain(output.get("content").unwrap_or(output)))
                .unwrap_or_default();
            let id = json::owned(payload, "call_id").unwrap_or_default();
            (
                Role::Tool,
                "tool_result",
                vec![Block::Answer {
                    id,
                    text: said,
                    failed,
                }],
            )
        }
        other => (Role::System, other, Vec::new()),
    };
    Some(message(line, payload, role, kind, blocks))
}

/// Whether a person said it. Newer versions say so; older ones put what they add themselves between tags.
fn is_prompt(payload: &Value, blocks: &[Block]) -> bool {
    let kinds = payload
        .get("internal_chat_message_metadata_passthrough")
        .and_then(|told| told.get("content_item_kinds"));
    match kinds.and_then(Value::as_array) {
        Some(kinds) => kinds
            .iter()
            .filter_map(Value::as_str)
            .any(|kind| kind.starts_with("user.")),
        None => {
            !matches!(blocks.first(), Some(Block::Text(said)) if said.starts_with('<') || said.starts_with("# AGENTS.md"))
        }
    }
}

/// What happened: where turns begin and end. Those of sub-agents are not the session's.
fn event(line: &Value, payload: &Value) -> (Option<Message>, Option<TurnBoundary>) {
    let kind = text(payload, "type").unwrap_or_default();
    let mark = match kind {
        "task_started" | "turn_started" => TurnBoundary::Start,
        "task_complete" | "turn_complete" => TurnBoundary::End("end_turn".to_owned()),
        "turn_aborted" => {
            TurnBoundary::End(text(payload, "reason").unwrap_or("aborted").to_owned())
        }
        _ => return (None, None),
    };
    (
        Some(message(line, payload, Role::System, kind, Vec::new())),
        (!is_sub_agents(payload)).then_some(mark),
    )
}

/// What an answer took.
fn usage(line: &Value, payload: &Value) -> Message {
    let took = |key: &str| {
        payload
            .get("usage")
            .and_then(|usage| usage.get(key))
            .and_then(Value::as_u64)
            .unwrap_or(0)
    };
    let (cache_read, cache_write) = (
        took("cached_input_tokens"),
        took("cache_write_input_tokens"),
    );
    let tokens = Tokens {
        // Codex counts what came from a cache, or went there, as input too.
        input: took("input_tokens")
            .saturating_sub(cache_read)
            .saturating_sub(cache_write),
        output: took("output_tokens"),
        cache_read,
        cache_write,
    };
    let answer = json::owned(payload, "response_id");
    Message {
        answer,
        tokens: Some(tokens),
        complete: true,
        ..message(line, payload, Role::System, "usage", Vec::new())
    }
}

/// The pieces of a message.
fn said(content: &Value) -> Vec<Block> {
    let piece = |item: &Value| match (text(item, "text"), text(item, "type")) {
        (Some(said), _) => Block::Text(said.to_owned()),
        (None, kind) => Block::Other(kind.unwrap_or_default().to_owned()),
    };
    content
        .as_array()
        .map_or_else(Vec::new, |items| items.iter().map(piece).collect())
}
