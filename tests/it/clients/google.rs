//! The Gemini API as far as Gemini CLI calls it.
//!
//! Owns its request and response formats.

use serde_json::{Value, json};

use super::model::{Block, Request, Wire, planned};

/// What the path of every request begins with.
pub const PATH: &str = "/v1beta/models/";

/// Answers a request to `…:streamGenerateContent`.
pub fn answer(request: &Request, wire: &mut Wire<'_>) -> std::io::Result<()> {
    let contents = contents(request);
    let answers = |from: usize| {
        contents[from..]
            .iter()
            .filter(|content| content["role"] == "model")
            .count()
    };
    let users = contents
        .iter()
        .enumerate()
        .filter(|(_, content)| content["role"] == "user");
    let is_stream = request.path.contains(":streamGenerateContent");
    let blocks = planned(users.map(|(at, content)| (text(content), answers(at))));
    let Some(blocks) = blocks.filter(|_| is_stream) else {
        let error = json!({ "code": 400, "status": "INVALID_ARGUMENT", "message": "no plan says what to do" });
        return wire.reply(400, &json!({ "error": error }));
    };
    wire.stream()?;
    let last = blocks.len().saturating_sub(1);
    for (index, block) in blocks.iter().enumerate() {
        let (part, hangs) = match block {
            Block::Text { text, hang } => (json!({ "text": text }), *hang),
            Block::Call { id, tool, input } => {
                let call = json!({ "id": id, "name": tool, "args": input });
                (json!({ "functionCall": call }), false)
            }
        };
        let finish = (index == last && !hangs).then_some("STOP");
        let candidate = json!({ "index": 0, "content": { "role": "model", "parts": [part] }, "finishReason": finish });
        let usage =
            json!({ "promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15 });
        let chunk = json!({ "candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini-2.5-pro" });
        wire.data(&chunk.to_string())?;
        if hangs {
            wire.hang();
            return wire.close();
        }
    }
    wire.close()
}

fn contents(request: &Request) -> Vec<Value> {
    let contents = request.body["contents"].as_array();
    contents.cloned().unwrap_or_default()
}

fn parts(content: &Value) -> impl Iterator<Item = &Value> {
    content["parts"].as_array().into_iter().flatten()
}

fn text(content: &Value) -> String {
    let texts: Vec<&str> = parts(content)
        .filter_map(|part| part["text"].as_str())
        .collect();
    texts.join("\n")
}

/// The conversation that a request carries: what was said, called and answered, in order, without what the client adds of its own.
pub fn conversation(request: &Request) -> Vec<String> {
    let mut said = Vec::new();
    for content in contents(request) {
        let role = if content["role"] == "model" {
            "assistant"
        } else {
            "user"
        };
        for part in parts(&content) {
            let (call, result) = (&part["functionCall"], &part["functionResponse"]);
            if let Some(words) = part["text"].as_str().filter(|words| !words.is_empty()) {
                if !words.starts_with('<') {
                    said.push(format!("{role}: {words}"));
                }
            } else if call.is_object() {
                said.push(format!("call {}: {}", call["name"], call["args"]));
            } else if result.is_object() {
                // A client that resumed sends a result twice.
                let result = format!("result: {}", result["response"]);
                if said.last() != Some(&result) {
                    said.push(result);
                }
            }
        }
    }
    said
}
