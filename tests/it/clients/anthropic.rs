//! The Messages API as far as Claude Code calls it.
//!
//! Owns its request and response formats.

use serde_json::{Value, json};

use super::model::{Block, Request, Wire, planned};

/// The model's summary of a conversation.
pub const SUMMARY: &str = "SUMMARY of the conversation.";

/// Responds to one request.
pub fn answer(request: &Request, wire: &mut Wire<'_>) -> std::io::Result<()> {
    if request.path.contains("count_tokens") {
        return wire.reply(200, &json!({ "input_tokens": 100 }));
    }
    let Some(blocks) = blocks(&request.body) else {
        return wire
            .reply(400, &json!({ "type": "error", "error": { "type": "invalid_request_error", "message": "no plan says what to do" } }));
    };
    let stop = if blocks
        .iter()
        .any(|block| matches!(block, Block::Call { .. }))
    {
        "tool_use"
    } else {
        "end_turn"
    };
    let mut message = json!({
        "id": format!("msg_{}", uuid::Uuid::new_v4().simple()), "type": "message", "role": "assistant", "model": request.body["model"],
        "content": [], "stop_reason": null, "stop_sequence": null, "usage": { "input_tokens": 10, "output_tokens": 1 },
    });
    if request.body["stream"] != true {
        message["content"] = blocks.iter().map(complete_block).collect();
        message["stop_reason"] = json!(stop);
        return wire.reply(200, &message);
    }
    wire.stream()?;
    wire.event("message_start", json!({ "message": message }))?;
    for (index, block) in blocks.iter().enumerate() {
        let (begin, delta) = match block {
            Block::Text { text, .. } => (
                json!({ "type": "text", "text": "" }),
                json!({ "type": "text_delta", "text": text }),
            ),
            Block::Call { id, tool, input } => (
                json!({ "type": "tool_use", "id": id, "name": tool, "input": {} }),
                json!({ "type": "input_json_delta", "partial_json": input.to_string() }),
            ),
        };
        wire.event(
            "content_block_start",
            json!({ "index": index, "content_block": begin }),
        )?;
        wire.event(
            "content_block_delta",
            json!({ "index": index, "delta": delta }),
        )?;
        if matches!(block, Block::Text { hang: true, .. }) {
            wire.hang();
            return wire.close();
        }
        wire.event("content_block_stop", json!({ "index": index }))?;
    }
    wire.event("message_delta", json!({ "delta": { "stop_reason": stop, "stop_sequence": null }, "usage": { "output_tokens": 42 } }))?;
    wire.event("message_stop", json!({}))?;
    wire.close()
}

/// The blocks of the response; none without a plan.
fn blocks(body: &Value) -> Option<Vec<Block>> {
    let text = |text: &str| {
        vec![Block::Text {
            text: text.to_owned(),
            hang: false,
        }]
    };
    let messages = body["messages"].as_array()?;
    let last_message = messages.last().map(texts).unwrap_or_default().join("\n");
    if last_message.contains("detailed summary") {
        return Some(text(&format!("<summary>{SUMMARY}</summary>")));
    }
    if body["tools"].as_array().is_none_or(Vec::is_empty) {
        return Some(text("{\"title\":\"A title\"}"));
    }
    let responses_after = |from: usize| {
        messages[from..]
            .iter()
            .filter(|message| message["role"] == "assistant")
            .count()
    };
    let users = messages
        .iter()
        .enumerate()
        .filter(|(_, message)| message["role"] == "user");
    planned(users.flat_map(|(at, message)| {
        texts(message)
            .into_iter()
            .map(move |text| (text, responses_after(at)))
    }))
}

/// A complete block of a response that is not streamed.
fn complete_block(block: &Block) -> Value {
    match block {
        Block::Text { text, .. } => json!({ "type": "text", "text": text }),
        Block::Call { id, tool, input } => {
            json!({ "type": "tool_use", "id": id, "name": tool, "input": input })
        }
    }
}

fn parts(content: &Value) -> Vec<Value> {
    match content {
        Value::String(text) => vec![json!({ "type": "text", "text": text })],
        Value::Array(parts) => parts.clone(),
        _ => Vec::new(),
    }
}

fn texts(message: &Value) -> Vec<String> {
    parts(&message["content"])
        .iter()
        .filter_map(|part| part["text"].as_str().map(str::to_owned))
        .collect()
}

/// The conversation in a request: messages, tool calls and results in order, without the client's
/// own additions.
pub fn conversation(request: &Request) -> Vec<String> {
    let mut said = Vec::new();
    for message in request.body["messages"].as_array().into_iter().flatten() {
        let role = message["role"].as_str().unwrap_or_default();
        for part in parts(&message["content"])
            .iter()
            .filter(|_| role != "system")
        {
            let line = match part["type"].as_str() {
                Some("text")
                    if part["text"]
                        .as_str()
                        .is_some_and(|text| text.starts_with("<system-reminder>")) =>
                {
                    continue;
                }
                Some("text") => format!("{role}: {}", part["text"].as_str().unwrap_or_default()),
                Some("tool_use") => format!("call {}: {}", part["name"], part["input"]),
                Some("tool_result") => {
                    format!(
                        "result: {}",
                        parts(&part["content"])
                            .iter()
                            .map(|part| part["text"].to_string())
                            .collect::<Vec<_>>()
                            .join(" ")
                    )
                }
                other => format!("{role} {other:?}"),
            };
            said.push(line);
        }
    }
    said
}
