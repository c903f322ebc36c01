//! The files of a custom agent, as patterns.

use serde::Deserialize;

/// The `[profile]` table: the files of a custom agent, as patterns.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct Patterns {
    /// The files to store. `{session}` stands for the session ID, `*` for any characters within a
    /// name, `**` for any directories.
    pub sessions: Vec<String>,
    /// The stored files that are append-only transcripts.
    pub append: Vec<String>,
    /// The files never to read or write.
    pub never: Vec<String>,
}

impl Default for Patterns {
    /// Each top-level directory and each top-level file is a session.
    fn default() -> Self {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        Patterns {
            sessions: list(&["{session}/**", "{session}.jsonl", "{session}"]),
            append: list(&["**/*.jsonl", "**/*.ndjson"]),
            never: Vec::new(),
        }
    }
}
