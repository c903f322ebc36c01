//! The parser of the lines that `mirror` writes for OpenCode's rows. A changed row is written
//! again; only a finished part is a message. A tool call that runs is pending.

use serde_json::Value;

use crate::agent::json::{self, text};
use crate::model::{
    Block, Message, Role, SessionFacts, Tokens, ToolCall, TranscriptLine, TurnBoundary,
};

/// A reported cost of a response from this on is implausible, and counts as unknown. In US dollars.
const MAX_COST: f64 = 1e6;

/// Parses a line and returns the session ID of its row; none if it is not a JSON object.
pub fn read(line: &[u8]) -> Option<(Option<String>, TranscriptLine)> {
    let line = json::object(line)?;
    let none = Value::Null;
    let row = line.get("row").unwrap_or(&none);
    // The content of a message is JSON in one column.
    let data: Value = text(row, "data")
        .and_then(|data| serde_json::from_str(data).ok())
        .unwrap_or_default();
    let session = json::owned(row, "session_id").or_else(|| json::owned(row, "id"));
    let parsed = match text(&line, "table") {
        Some("session") => TranscriptLine {
            facts: facts(row),
            ..TranscriptLine::default()
        },
        Some("message") => TranscriptLine {
            facts: SessionFacts {
                model: json::owned(&data, "modelID"),
                ..SessionFacts::default()
            },
            ..TranscriptLine::default()
        },
        Some("part") => part(&line, row, &data),
        _ => TranscriptLine::default(),
    };
    Some((session, parsed))
}

fn facts(row: &Value) -> SessionFacts {
    SessionFacts {
        project: json::owned(row, "directory"),
        cwd: json::owned(row, "directory"),
        title: json::owned(row, "title"),
        agent_version: json::owned(row, "version"),
        ..SessionFacts::default()
    }
}

fn part(line: &Value, row: &Value, data: &Value) -> TranscriptLine {
    let role = text(line, "role");
    let kind = text(data, "type").unwrap_or_default();
    let content = || text(data, "text").unwrap_or_default().to_owned();
    let is_finished = data
        .get("time")
        .is_some_and(|time| time.get("end").is_some());
    let message = |role, kind: &str, blocks| Message {
        message_id: json::owned(row, "id"),
        parent_id: json::owned(row, "message_id"),
        at: row
            .get("time_updated")
            .and_then(Value::as_i64)
            .and_then(|at| jiff::Timestamp::from_millisecond(at).ok()),
        model: json::owned(line, "model").filter(|_| role != Role::User),
        ..Message::new(role, kind, blocks)
    };
    let (message, boundary) = match (kind, role) {
        ("text", Some("user")) if data.get("synthetic").and_then(Value::as_bool) != Some(true) => (
            message(Role::User, "text", vec![Block::Text(content())]),
            Some(TurnBoundary::Start),
        ),
        ("text", Some("user")) => (
            message(Role::System, "context", vec![Block::Text(content())]),
            None,
        ),
        ("text", _) if is_finished => (
            message(Role::Assistant, "text", vec![Block::Text(content())]),
            None,
        ),
        ("reasoning", _) if is_finished => (
            message(
                Role::Assistant,
                "thinking",
                vec![Block::Thinking(content())],
            ),
            None,
        ),
        ("tool", _) => {
            return match tool_blocks(row, data) {
                Tool::Pending(call) => TranscriptLine {
                    pending_call: Some(call),
                    ..TranscriptLine::default()
                },
                Tool::Finished(blocks) => TranscriptLine {
                    message: Some(message(Role::Assistant, "tool_use", blocks)),
                    ..TranscriptLine::default()
                },
                Tool::Compacted => TranscriptLine::default(),
            };
        }
        ("step-finish", _) => {
            let usage = Message {
                response_id: json::owned(row, "message_id"),
                tokens: data.get("tokens").map(tokens),
                cost: data
                    .get("cost")
                    .and_then(Value::as_f64)
                    .filter(|cost| *cost > 0.0 && *cost < MAX_COST)
                    .map(|cost| (cost * 1e6).round() as u64),
                is_complete: true,
                ..message(Role::System, "usage", Vec::new())
            };
            // After these reasons OpenCode calls the model again.
            let final_reason =
                text(data, "reason").filter(|reason| !matches!(*reason, "tool-calls" | "unknown"));
            (
                usage,
                final_reason.map(|reason| TurnBoundary::End(reason.to_owned())),
            )
        }
        _ => return TranscriptLine::default(),
    };
    TranscriptLine {
        message: Some(message),
        boundary,
        ..TranscriptLine::default()
    }
}

/// The state of a tool call.
enum Tool {
    /// It has no result yet.
    Pending(ToolCall),
    /// The call and its result.
    Finished(Vec<Block>),
    /// OpenCode marked an old result, which an earlier line has, as left out of its requests.
    Compacted,
}

fn tool_blocks(row: &Value, data: &Value) -> Tool {
    let none = Value::Null;
    let state = data.get("state").unwrap_or(&none);
    let id = json::owned(data, "callID").unwrap_or_default();
    let started = row
        .get("time_created")
        .and_then(Value::as_i64)
        .and_then(|at| jiff::Timestamp::from_millisecond(at).ok());
    let input = state.get("input").map(Value::to_string).unwrap_or_default();
    let call = ToolCall {
        id: id.clone(),
        name: json::owned(data, "tool").unwrap_or_default(),
        input,
        started,
    };
    let is_compacted = state
        .get("time")
        .is_some_and(|time| time.get("compacted").is_some());
    let result = |key: &str, is_error| Block::ToolResult {
        call_id: id.clone(),
        text: json::owned(state, key).unwrap_or_default(),
        is_error,
    };
    match text(state, "status") {
        Some("completed" | "error") if is_compacted => Tool::Compacted,
        Some("completed") => Tool::Finished(vec![Block::ToolCall(call), result("output", false)]),
        Some("error") => Tool::Finished(vec![Block::ToolCall(call), result("error", true)]),
        _ => Tool::Pending(call),
    }
}

fn tokens(usage: &Value) -> Tokens {
    let count = |value: &Value, key: &str| value.get(key).and_then(Value::as_u64).unwrap_or(0);
    let none = Value::Null;
    let cache = usage.get("cache").unwrap_or(&none);
    Tokens {
        input: count(usage, "input"),
        output: count(usage, "output").saturating_add(count(usage, "reasoning")),
        cache_read: count(cache, "read"),
        cache_write: count(cache, "write"),
    }
}
