//! What a line that was made of a row says. A row that changes is written again: only what is finished is a message.

use serde_json::Value;

use crate::agent::json::{self, text};
use crate::model::{
    Block, Message, Role, SessionFacts, Tokens, ToolCall, TranscriptLine, TurnBoundary,
};

/// Reads a line: the session that its row belongs to, and what it says; none if it is no JSON object.
pub fn read(line: &[u8]) -> Option<(Option<String>, TranscriptLine)> {
    let line = json::object(line)?;
    let none = Value::Null;
    let row = line.get("row").unwrap_or(&none);
    // What a message is made of stands in a column, as JSON.
    let data: Value = text(row, "data")
        .and_then(|data| serde_json::from_str(data).ok())
        .unwrap_or_default();
    let of = json::owned(row, "session_id").or_else(|| json::owned(row, "id"));
    let read = match text(&line, "table") {
        Some("session") => TranscriptLine {
            facts: about(row),
            ..TranscriptLine::default()
        },
        Some("message") => TranscriptLine {
            facts: SessionFacts {
                model: json::owned(&data, "modelID"),
                ..SessionFacts::default()
            },
            ..TranscriptLine::default()
        },
        Some("part") => part(text(&line, "role"), row, &data),
        _ => TranscriptLine::default(),
    };
    Some((of, read))
}

fn about(row: &Value) -> SessionFacts {
    SessionFacts {
        project: json::owned(row, "directory"),
        cwd: json::owned(row, "directory"),
        title: json::owned(row, "title"),
        agent_version: json::owned(row, "version"),
        ..SessionFacts::default()
    }
}

fn part(role: Option<&str>, row: &Value, data: &Value) -> TranscriptLine {
    let kind = text(data, "type").unwrap_or_default();
    let said = || text(data, "text").unwrap_or_default().to_owned();
    let finished = data
        .get("time")
        .is_some_and(|time| time.get("end").is_some());
    let message = |role, kind: &str, blocks| Message {
        uuid: json::owned(row, "id"),
        parent: json::owned(row, "message_id"),
        at: row
            .get("time_updated")
            .and_then(Value::as_i64)
            .and_then(|at| jiff::Timestamp::from_millisecond(at).ok()),
        ..Message::new(role, kind, blocks)
    };
    let (message, mark) = match (kind, role) {
        ("text", Some("user")) if data.get("synthetic").and_then(Value::as_bool) != Some(true) => (
            message(Role::User, "text", vec![Block::Text(said())]),
            Some(TurnBoundary::Start),
        ),
        ("text", Some("user")) => (
            message(Role::System, "context", vec![Block::Text(said())]),
            None,
        ),
        ("text", _) if finished => (
            message(Role::Assistant, "text", vec![Block::Text(said())]),
            None,
        ),
        ("reasoning", _) if finished => (
            message(Role::Assistant, "thinking", vec![Block::Thinking(said())]),
            None,
        ),
        ("tool", _) => (message(Role::Assistant, "tool_use", tool(row, data)), None),
        ("step-finish", _) => {
            let took = Message {
                answer: json::owned(row, "message_id"),
                tokens: data.get("tokens").map(tokens),
                cost: data
                    .get("cost")
                    .and_then(Value::as_f64)
                    .filter(|cost| *cost > 0.0)
                    .map(|cost| (cost * 1e6).round() as u64),
                complete: true,
                ..message(Role::System, "usage", Vec::new())
            };
            // Any other reason, and the model is asked again.
            let ends =
                text(data, "reason").filter(|reason| !matches!(*reason, "tool-calls" | "unknown"));
            (
                took,
                ends.map(|reason| TurnBoundary::End(reason.to_owned())),
            )
        }
        _ => return TranscriptLine::default(),
    };
    TranscriptLine {
        message: Some(message),
        mark,
        facts: SessionFacts::default(),
    }
}

/// A call, and its answer once there is one.
fn tool(row: &Value, data: &Value) -> Vec<Block> {
    let none = Value::Null;
    let state = data.get("state").unwrap_or(&none);
    let id = json::owned(data, "callID").unwrap_or_default();
    let started = row
        .get("time_created")
        .and_then(Value::as_i64)
        .and_then(|at| jiff::Timestamp::from_millisecond(at).ok());
    let input = state.get("input").map(Value::to_string).unwrap_or_default();
    let call = Block::ToolCall(ToolCall {
        id: id.clone(),
        name: json::owned(data, "tool").unwrap_or_default(),
        input,
        started,
    });
    let answer = |key: &str, failed| Block::Answer {
        id: id.clone(),
        text: json::owned(state, key).unwrap_or_default(),
        failed,
    };
    match text(state, "status") {
        Some("completed") => vec![call, answer("output", false)],
        Some("error") => vec![call, answer("error", true)],
        _ => vec![call],
    }
}

fn tokens(took: &Value) -> Tokens {
    let of = |value: &Value, key: &str| value.get(key).and_then(Value::as_u64).unwrap_or(0);
    let none = Value::Null;
    let cache = took.get("cache").unwrap_or(&none);
    Tokens {
        input: of(took, "input"),
        output: of(took, "output").saturating_add(of(took, "reasoning")),
        cache_read: of(cache, "read"),
        cache_write: of(cache, "write"),
    }
}
