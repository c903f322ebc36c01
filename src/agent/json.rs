//! Reading lines of JSON of which little is promised: what is not there, or is of another type, tells nothing.

use jiff::Timestamp;
use serde_json::Value;

/// The line, if it is an object.
pub fn object(line: &[u8]) -> Option<Value> {
    serde_json::from_slice(line).ok().filter(Value::is_object)
}

/// The text under a key.
pub fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key).and_then(Value::as_str)
}

/// The same, to keep.
pub fn owned(value: &Value, key: &str) -> Option<String> {
    text(value, key).map(str::to_owned)
}

/// The time under a key.
pub fn time(value: &Value, key: &str) -> Option<Timestamp> {
    text(value, key)?.parse().ok()
}

/// A value as text: a string as it is, the texts of a list of blocks, anything else as JSON.
pub fn plain(value: &Value) -> String {
    match value {
        Value::String(said) => said.clone(),
        Value::Array(items) if items.iter().any(|item| text(item, "text").is_some()) => items
            .iter()
            .filter_map(|item| text(item, "text"))
            .collect::<Vec<_>>()
            .join("\n"),
        other => other.to_string(),
    }
}
