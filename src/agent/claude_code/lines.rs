//! The parser of Claude Code's transcript lines. It ignores unknown fields and line types.

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use crate::model::checkpoint::API_ERROR;
use crate::model::{
    Block, Message, Role, SessionFacts, Tokens, ToolCall, TranscriptLine, TurnBoundary,
};

/// The model name of responses that Claude Code generates itself.
const SYNTHETIC_MODEL: &str = "<synthetic>";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawLine {
    #[serde(rename = "type", default, deserialize_with = "lenient")]
    kind: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    subtype: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    uuid: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    parent_uuid: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    timestamp: Option<Timestamp>,
    #[serde(default, deserialize_with = "lenient")]
    slug: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    cwd: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    version: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    summary: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    custom_title: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    ai_title: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    is_sidechain: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    is_api_error_message: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    is_meta: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    is_compact_summary: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    prompt_source: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    turn_origin: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    attachment: Option<Value>,
    #[serde(rename = "totalCostUSD", default, deserialize_with = "lenient")]
    total_cost: Option<f64>,
    #[serde(default, deserialize_with = "lenient")]
    has_unknown_model_cost: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    agent_id: Option<String>,
    #[serde(rename = "costUSD", default, deserialize_with = "lenient")]
    cost: Option<f64>,
    #[serde(default, deserialize_with = "lenient")]
    content: Option<Value>,
    #[serde(default, deserialize_with = "lenient")]
    message: Option<RawMessage>,
}

#[derive(Deserialize)]
struct RawMessage {
    #[serde(default, deserialize_with = "lenient")]
    id: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    model: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    content: Option<Value>,
    #[serde(default, deserialize_with = "lenient")]
    stop_reason: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    usage: Option<Usage>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Usage {
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

/// Deserializes a field of an unexpected type as none, so that the other fields can be read.
pub(super) fn lenient<'de, D: serde::Deserializer<'de>, T: serde::de::DeserializeOwned>(
    from: D,
) -> Result<Option<T>, D::Error> {
    Ok(serde_json::from_value(Value::deserialize(from)?).ok())
}

/// Parses a line; none if it is not a JSON object.
pub fn read(line: &[u8]) -> Option<TranscriptLine> {
    let raw: RawLine = serde_json::from_slice(line)
        .ok()
        .filter(|_| line.trim_ascii_start().starts_with(b"{"))?;
    let is_sub_agent = raw.is_sidechain == Some(true);
    let facts = if is_sub_agent {
        SessionFacts::default()
    } else {
        facts(&raw)
    };
    let (message, boundary) = match raw.kind.as_deref() {
        Some("user") => user(&raw),
        Some("assistant") => assistant(&raw),
        Some("system") => (Some(system(&raw)), None),
        Some("attachment") => (Some(attachment(&raw)), None),
        _ => (None, None),
    };
    Some(TranscriptLine {
        message,
        boundary: boundary.filter(|_| !is_sub_agent),
        is_sub_agent,
        facts,
        named_file: raw.slug.as_deref().and_then(|slug| {
            let sub_agent = raw.agent_id.as_deref().filter(|_| is_sub_agent);
            super::plan_path(slug, sub_agent)
        }),
        ..TranscriptLine::default()
    })
}

fn facts(raw: &RawLine) -> SessionFacts {
    let model = raw
        .message
        .as_ref()
        .and_then(|message| message.model.clone())
        .filter(|model| model != SYNTHETIC_MODEL);
    SessionFacts {
        project: None,
        cwd: raw.cwd.clone(),
        title: raw
            .custom_title
            .clone()
            .or_else(|| raw.ai_title.clone())
            .or_else(|| raw.summary.clone()),
        model,
        agent_version: raw.version.clone(),
        // The total of the session so far, written when Claude Code exits.
        cost: raw
            .total_cost
            .filter(|_| raw.has_unknown_model_cost != Some(true))
            .map(millionths),
        ..SessionFacts::default()
    }
}

fn millionths(dollars: f64) -> u64 {
    // The cast saturates: a negative number becomes 0.
    (dollars * 1e6).round() as u64
}

fn message(raw: &RawLine, role: Role, kind: &str, blocks: Vec<Block>) -> Message {
    Message {
        message_id: raw.uuid.clone(),
        parent_id: raw.parent_uuid.clone(),
        at: raw.timestamp,
        cost: raw.cost.map(millionths),
        sub_agent: raw
            .agent_id
            .clone()
            .filter(|_| raw.is_sidechain == Some(true)),
        ..Message::new(role, kind, blocks)
    }
}

/// Prefixes of user messages that are not prompts.
const NON_PROMPT_PREFIXES: [&str; 4] = [
    "<command-",
    "<local-command-",
    "<bash-",
    "<task-notification",
];

fn user(raw: &RawLine) -> (Option<Message>, Option<TurnBoundary>) {
    let content = raw
        .message
        .as_ref()
        .and_then(|message| message.content.as_ref());
    let blocks = content.map_or_else(Vec::new, |content| blocks(content, raw.timestamp));
    let has_tool_result = blocks
        .iter()
        .any(|block| matches!(block, Block::ToolResult { .. }));
    let starts_with = |prefix: &str| matches!(blocks.first(), Some(Block::Text(first)) if first.starts_with(prefix));
    let is_notification = raw.turn_origin.as_deref() == Some("task_notification");
    let (role, kind, boundary) = match raw {
        _ if has_tool_result => (Role::Tool, "tool_result", None),
        raw if raw.is_compact_summary == Some(true) => (Role::System, "summary", None),
        raw if raw.is_meta == Some(true) => (Role::System, "meta", None),
        _ if starts_with("[Request interrupted") => (
            Role::User,
            "interruption",
            Some(TurnBoundary::End("interrupted".to_owned())),
        ),
        // A background sub-agent has finished, and the agent responds to it.
        _ if is_notification => (Role::System, "task_notification", Some(TurnBoundary::Start)),
        raw if raw.prompt_source.is_some() => (Role::User, "text", Some(TurnBoundary::Start)),
        _ if NON_PROMPT_PREFIXES.iter().any(|prefix| starts_with(prefix)) => {
            (Role::User, "command", None)
        }
        _ => (Role::User, "text", Some(TurnBoundary::Start)),
    };
    (Some(message(raw, role, kind, blocks)), boundary)
}

fn attachment(raw: &RawLine) -> Message {
    let field = |key: &str| {
        raw.attachment
            .as_ref()
            .and_then(|attachment| attachment.get(key))
    };
    match field("type").and_then(Value::as_str) {
        // A prompt that was entered while the agent was working.
        Some("queued_command") => {
            let blocks =
                field("prompt").map_or_else(Vec::new, |prompt| blocks(prompt, raw.timestamp));
            message(raw, Role::User, "queued", blocks)
        }
        kind => message(raw, Role::System, kind.unwrap_or("attachment"), Vec::new()),
    }
}

fn assistant(raw: &RawLine) -> (Option<Message>, Option<TurnBoundary>) {
    let Some(response) = &raw.message else {
        return (None, None);
    };
    let blocks = response
        .content
        .as_ref()
        .map_or_else(Vec::new, |content| blocks(content, raw.timestamp));
    let kind = match blocks.first() {
        Some(Block::Thinking(_)) => "thinking".to_owned(),
        Some(Block::ToolCall(_)) => "tool_use".to_owned(),
        Some(Block::Other(kind)) => kind.clone(),
        _ => "text".to_owned(),
    };
    let is_synthetic = response.model.as_deref() == Some(SYNTHETIC_MODEL);
    // Each block of a response is a separate line, and each line has the stop reason. A synthetic
    // response does not end a turn. After these reasons Claude Code calls the model again.
    let final_reason = response
        .stop_reason
        .as_deref()
        .filter(|reason| !matches!(*reason, "tool_use" | "pause_turn" | "max_tokens"));
    // Claude Code writes an API error as a response after its last retry, and then stops.
    let final_reason = match raw.is_api_error_message {
        Some(true) => Some(API_ERROR),
        _ => final_reason.filter(|_| !is_synthetic),
    };
    let boundary = final_reason
        .filter(|_| kind == "text")
        .map(|reason| TurnBoundary::End(reason.to_owned()));
    let kind = match raw.is_api_error_message {
        Some(true) => API_ERROR.to_owned(),
        _ => kind,
    };
    let tokens = response.usage.as_ref().map(|usage| Tokens {
        input: usage.input_tokens.unwrap_or(0),
        output: usage.output_tokens.unwrap_or(0),
        cache_read: usage.cache_read_input_tokens.unwrap_or(0),
        cache_write: usage.cache_creation_input_tokens.unwrap_or(0),
    });
    let message = Message {
        model: response.model.clone().filter(|_| !is_synthetic),
        response_id: response.id.clone(),
        tokens: tokens.filter(|_| !is_synthetic),
        is_complete: response.stop_reason.is_some(),
        ..message(raw, Role::Assistant, &kind, blocks)
    };
    (Some(message), boundary)
}

fn system(raw: &RawLine) -> Message {
    let text = raw
        .content
        .as_ref()
        .and_then(Value::as_str)
        .map(|text| Block::Text(text.to_owned()));
    message(
        raw,
        Role::System,
        raw.subtype.as_deref().unwrap_or("system"),
        text.into_iter().collect(),
    )
}

fn blocks(content: &Value, at: Option<Timestamp>) -> Vec<Block> {
    match content {
        Value::String(text) => vec![Block::Text(text.clone())],
        Value::Array(items) => items.iter().map(|item| block(item, at)).collect(),
        _ => Vec::new(),
    }
}

fn block(item: &Value, at: Option<Timestamp>) -> Block {
    let text = |key: &str| {
        item.get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    match item.get("type").and_then(Value::as_str).unwrap_or_default() {
        "text" => Block::Text(text("text")),
        "thinking" => Block::Thinking(text("thinking")),
        "tool_use" | "server_tool_use" => {
            let input = item.get("input").map(Value::to_string).unwrap_or_default();
            Block::ToolCall(ToolCall {
                id: text("id"),
                name: text("name"),
                input,
                started: at,
            })
        }
        "tool_result" => {
            let is_error = item
                .get("is_error")
                .and_then(Value::as_bool)
                .unwrap_or(false);
            Block::ToolResult {
                call_id: text("tool_use_id"),
                text: item.get("content").map_or_else(String::new, result_text),
                is_error,
            }
        }
        // The result of a tool that ran on the server, such as a web search.
        kind if kind.ends_with("_tool_result") => Block::ToolResult {
            call_id: text("tool_use_id"),
            text: item.get("content").map_or_else(String::new, result_text),
            is_error: false,
        },
        kind => Block::Other(kind.to_owned()),
    }
}

/// The text of a tool result: a string, or a list of blocks.
fn result_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let texts = items.iter().filter_map(|item| item.get("text")?.as_str());
            texts.collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}
