//! Lenient access to JSON: a field that is missing or has another type is none.

use jiff::Timestamp;
use serde_json::Value;

/// Parses a JSON object.
pub fn object(line: &[u8]) -> Option<Value> {
    serde_json::from_slice(line).ok().filter(Value::is_object)
}

/// The string under a key.
pub fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key).and_then(Value::as_str)
}

/// The string under a key, owned.
pub fn owned(value: &Value, key: &str) -> Option<String> {
    text(value, key).map(str::to_owned)
}

/// The time under a key.
pub fn time(value: &Value, key: &str) -> Option<Timestamp> {
    text(value, key)?.parse().ok()
}

/// A value as text: a string as it is, a list of blocks as its texts, anything else as JSON.
pub fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) if items.iter().any(|item| text(item, "text").is_some()) => items
            .iter()
            .filter_map(|item| text(item, "text"))
            .collect::<Vec<_>>()
            .join("\n"),
        other => other.to_string(),
    }
}
