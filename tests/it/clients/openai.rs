//! OpenAI's two APIs as far as Codex (responses) and OpenCode (chat completions) call them.
//!
//! Owns their request and response formats.

use serde_json::{Value, json};

use super::model::{Block, Request, Wire, planned};

/// Responds to a request to `/v1/responses`.
pub fn respond(request: &Request, wire: &mut Wire<'_>) -> std::io::Result<()> {
    let items = request.body["input"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let is_answer = |item: &Value| {
        item["role"] == "assistant"
            || item["type"] == "function_call"
            || item["type"] == "reasoning"
    };
    // One response is several consecutive items.
    let responses_after = |from: usize| {
        items[from..]
            .chunk_by(|a, b| is_answer(a) == is_answer(b))
            .filter(|run| is_answer(&run[0]))
            .count()
    };
    let users = items
        .iter()
        .enumerate()
        .filter(|(_, item)| item["role"] == "user");
    let Some(blocks) =
        planned(users.map(|(at, item)| (text(&item["content"]), responses_after(at))))
    else {
        return no_plan(wire);
    };
    let id = format!("resp_{}", uuid::Uuid::new_v4().simple());
    wire.stream()?;
    wire.event("response.created", json!({ "response": { "id": id } }))?;
    for (index, block) in blocks.iter().enumerate() {
        let item = match block {
            Block::Text { text, .. } => {
                json!({ "type": "message", "id": format!("msg_{id}_{index}"), "role": "assistant", "content": [{ "type": "output_text", "text": text }] })
            }
            Block::Call { id, tool, input } => {
                json!({ "type": "function_call", "id": format!("fc_{id}"), "call_id": id, "name": tool, "arguments": input.to_string() })
            }
        };
        if let Block::Text { text, hang: true } = block {
            let mut begun = item;
            begun["content"] = json!([]);
            wire.event(
                "response.output_item.added",
                json!({ "output_index": index, "item": begun }),
            )?;
            wire.event(
                "response.output_text.delta",
                json!({ "output_index": index, "delta": text }),
            )?;
            wire.hang();
            return wire.close();
        }
        wire.event(
            "response.output_item.done",
            json!({ "output_index": index, "item": item }),
        )?;
    }
    let usage = json!({ "input_tokens": 10, "output_tokens": 5, "total_tokens": 15 });
    wire.event(
        "response.completed",
        json!({ "response": { "id": id, "usage": usage } }),
    )?;
    wire.close()
}

/// Responds to a request to `/v1/chat/completions`.
pub fn chat(request: &Request, wire: &mut Wire<'_>) -> std::io::Result<()> {
    let messages = request.body["messages"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let blocks = if request.body["tools"].as_array().is_none_or(Vec::is_empty) {
        Some(vec![Block::Text {
            text: "A title".into(),
            hang: false,
        }])
    } else {
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
        planned(users.map(|(at, message)| (text(&message["content"]), responses_after(at))))
    };
    let Some(blocks) = blocks else {
        return no_plan(wire);
    };
    let chunk = |delta: Value, finish: Option<&str>| {
        let choice = json!({ "index": 0, "delta": delta, "finish_reason": finish });
        let usage = json!({ "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15 });
        json!({ "id": "chat", "object": "chat.completion.chunk", "created": 1, "model": "test", "choices": [choice], "usage": usage })
            .to_string()
    };
    wire.stream()?;
    let mut calls = 0;
    for block in &blocks {
        match block {
            Block::Text { text, hang } => {
                wire.data(&chunk(
                    json!({ "role": "assistant", "content": text }),
                    None,
                ))?;
                if *hang {
                    wire.hang();
                    return wire.close();
                }
            }
            Block::Call { id, tool, input } => {
                let function = json!({ "name": tool, "arguments": input.to_string() });
                let call =
                    json!({ "index": calls, "id": id, "type": "function", "function": function });
                wire.data(&chunk(
                    json!({ "role": "assistant", "tool_calls": [call] }),
                    None,
                ))?;
                calls += 1;
            }
        }
    }
    wire.data(&chunk(
        json!({}),
        Some(if calls > 0 { "tool_calls" } else { "stop" }),
    ))?;
    wire.data("[DONE]")?;
    wire.close()
}

fn no_plan(wire: &mut Wire<'_>) -> std::io::Result<()> {
    wire.reply(400, &json!({ "error": { "type": "invalid_request_error", "message": "no plan says what to do" } }))
}

fn text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts
            .iter()
            .filter_map(|part| part["text"].as_str())
            .collect::<Vec<_>>()
            .join("\n"),
        _ => String::new(),
    }
}

/// The conversation in a request: messages, tool calls and results in order, without the client's
/// own additions.
pub fn conversation(request: &Request) -> Vec<String> {
    let mut said = Vec::new();
    for item in request.body["input"]
        .as_array()
        .or(request.body["messages"].as_array())
        .into_iter()
        .flatten()
    {
        let words = text(&item["content"]);
        match (item["type"].as_str(), item["role"].as_str()) {
            (Some("function_call"), _) => {
                said.push(format!("call {}: {}", item["name"], item["arguments"]))
            }
            (Some("function_call_output"), _) => said.push(format!("result: {}", item["output"])),
            (_, Some("tool")) => said.push(format!("result: {words}")),
            (_, Some("user")) if words.starts_with('<') => {}
            (_, Some(role @ ("user" | "assistant"))) if !words.is_empty() => {
                said.push(format!("{role}: {words}"))
            }
            _ => {}
        }
        for call in item["tool_calls"].as_array().into_iter().flatten() {
            said.push(format!(
                "call {}: {}",
                call["function"]["name"], call["function"]["arguments"]
            ));
        }
    }
    said
}
