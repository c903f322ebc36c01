//! What a line of Claude Code's transcripts says. Only what is named here is read; everything else is passed over.

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use crate::model::{
    Block, Message, Role, SessionFacts, Tokens, ToolCall, TranscriptLine, TurnBoundary,
};

/// What the client calls answers that it makes up itself.
const SYNTHETIC: &str = "<synthetic>";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
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

/// A field of another type than we know tells nothing, and does not keep the others from being read.
pub(super) fn lenient<'de, D: serde::Deserializer<'de>, T: serde::de::DeserializeOwned>(
    from: D,
) -> Result<Option<T>, D::Error> {
    Ok(serde_json::from_value(Value::deserialize(from)?).ok())
}

/// Reads a line; none if it is no JSON object.
pub fn read(line: &[u8]) -> Option<TranscriptLine> {
    let raw: Raw = serde_json::from_slice(line)
        .ok()
        .filter(|_| line.trim_ascii_start().starts_with(b"{"))?;
    let side = raw.is_sidechain == Some(true);
    let facts = if side {
        SessionFacts::default()
    } else {
        facts(&raw)
    };
    let (message, mark) = match raw.kind.as_deref() {
        Some("user") => user(&raw),
        Some("assistant") => assistant(&raw),
        Some("system") => (Some(system(&raw)), None),
        Some("attachment") => (Some(attachment(&raw)), None),
        _ => (None, None),
    };
    Some(TranscriptLine {
        message,
        mark: mark.filter(|_| !side),
        facts,
    })
}

fn facts(raw: &Raw) -> SessionFacts {
    let model = raw
        .message
        .as_ref()
        .and_then(|message| message.model.clone())
        .filter(|model| model != SYNTHETIC);
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
        // Written when the client exits, for the whole session so far.
        cost: raw
            .total_cost
            .filter(|_| raw.has_unknown_model_cost != Some(true))
            .map(millionths),
    }
}

fn millionths(dollars: f64) -> u64 {
    // A cast saturates: what is less than nothing is nothing.
    (dollars * 1e6).round() as u64
}

fn base(raw: &Raw, role: Role, kind: &str, blocks: Vec<Block>) -> Message {
    Message {
        uuid: raw.uuid.clone(),
        parent: raw.parent_uuid.clone(),
        at: raw.timestamp,
        cost: raw.cost.map(millionths),
        sub_agent: raw
            .agent_id
            .clone()
            .filter(|_| raw.is_sidechain == Some(true)),
        ..Message::new(role, kind, blocks)
    }
}

/// How lines begin that stand where a prompt stands and are none.
const NO_PROMPTS: [&str; 4] = [
    "<command-",
    "<local-command-",
    "<bash-",
    "<task-notification",
];

fn user(raw: &Raw) -> (Option<Message>, Option<TurnBoundary>) {
    let content = raw
        .message
        .as_ref()
        .and_then(|message| message.content.as_ref());
    let blocks = content.map_or_else(Vec::new, |content| blocks(content, raw.timestamp));
    let answers = blocks
        .iter()
        .any(|block| matches!(block, Block::Answer { .. }));
    let begins =
        |text: &str| matches!(blocks.first(), Some(Block::Text(first)) if first.starts_with(text));
    let notified = raw.turn_origin.as_deref() == Some("task_notification");
    let (role, kind, mark) = match raw {
        _ if answers => (Role::Tool, "tool_result", None),
        raw if raw.is_compact_summary == Some(true) => (Role::System, "summary", None),
        raw if raw.is_meta == Some(true) => (Role::System, "meta", None),
        _ if begins("[Request interrupted") => (
            Role::User,
            "interruption",
            Some(TurnBoundary::End("interrupted".to_owned())),
        ),
        // A sub-agent in the background has finished, and the agent answers to that.
        _ if notified => (Role::System, "task_notification", Some(TurnBoundary::Start)),
        raw if raw.prompt_source.is_some() => (Role::User, "text", Some(TurnBoundary::Start)),
        _ if NO_PROMPTS.iter().any(|text| begins(text)) => (Role::User, "command", None),
        _ => (Role::User, "text", Some(TurnBoundary::Start)),
    };
    (Some(base(raw, role, kind, blocks)), mark)
}

fn attachment(raw: &Raw) -> Message {
    let said = |key: &str| {
        raw.attachment
            .as_ref()
            .and_then(|attachment| attachment.get(key))
    };
    match said("type").and_then(Value::as_str) {
        // A prompt that was given while the agent was at work.
        Some("queued_command") => {
            let blocks =
                said("prompt").map_or_else(Vec::new, |prompt| blocks(prompt, raw.timestamp));
            base(raw, Role::User, "queued", blocks)
        }
        kind => base(raw, Role::System, kind.unwrap_or("attachment"), Vec::new()),
    }
}

fn assistant(raw: &Raw) -> (Option<Message>, Option<TurnBoundary>) {
    let Some(said) = &raw.message else {
        return (None, None);
    };
    let blocks = said
        .content
        .as_ref()
        .map_or_else(Vec::new, |content| blocks(content, raw.timestamp));
    let kind = match blocks.first() {
        Some(Block::Thinking(_)) => "thinking".to_owned(),
        Some(Block::ToolCall(_)) => "tool_use".to_owned(),
        Some(Block::Other(kind)) => kind.clone(),
        _ => "text".to_owned(),
    };
    let made_up = said.model.as_deref() == Some(SYNTHETIC);
    // An answer comes in lines, a block each, and each says why it stopped. What the client makes up completes nothing, and
    // where the model had no room to go on, the client asks again.
    let ends = said
        .stop_reason
        .as_deref()
        .filter(|reason| !matches!(*reason, "tool_use" | "pause_turn" | "max_tokens"));
    let mark = ends
        .filter(|_| kind == "text" && !made_up)
        .map(|reason| TurnBoundary::End(reason.to_owned()));
    let tokens = said.usage.as_ref().map(|usage| Tokens {
        input: usage.input_tokens.unwrap_or(0),
        output: usage.output_tokens.unwrap_or(0),
        cache_read: usage.cache_read_input_tokens.unwrap_or(0),
        cache_write: usage.cache_creation_input_tokens.unwrap_or(0),
    });
    let message = Message {
        model: said.model.clone().filter(|_| !made_up),
        answer: said.id.clone(),
        tokens: tokens.filter(|_| !made_up),
        complete: said.stop_reason.is_some(),
        ..base(raw, Role::Assistant, &kind, blocks)
    };
    (Some(message), mark)
}

fn system(raw: &Raw) -> Message {
    let text = raw
        .content
        .as_ref()
        .and_then(Value::as_str)
        .map(|text| Block::Text(text.to_owned()));
    base(
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
            let failed = item
                .get("is_error")
                .and_then(Value::as_bool)
                .unwrap_or(false);
            Block::Answer {
                id: text("tool_use_id"),
                text: item.get("content").map_or_else(String::new, plain),
                failed,
            }
        }
        kind => Block::Other(kind.to_owned()),
    }
}

/// The text of a tool's answer: a string, or blocks.
fn plain(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let texts = items.iter().filter_map(|item| item.get("text")?.as_str());
            texts.collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}
