//! The `[profile]` table of a custom agent.

use serde::Deserialize;

/// The `[profile]` table: the files of a custom agent, as patterns, and its arguments.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Patterns {
    /// The files to store. `{session}` stands for the session ID, `*` for any characters within a
    /// name, `**` for any directories.
    pub sessions: Vec<String>,
    /// The stored files that are append-only transcripts.
    pub append: Vec<String>,
    /// The files never to read or write.
    pub never: Vec<String>,
    /// The arguments with which the agent starts a session with the ID `{session}`. Empty if the
    /// agent chooses the ID.
    pub new_session_args: Vec<String>,
    /// The arguments with which the agent resumes `{session}`.
    pub resume_args: Vec<String>,
}

impl Default for Patterns {
    /// Each top-level directory and each top-level file is a session.
    fn default() -> Self {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        Patterns {
            sessions: list(&["{session}/**", "{session}.jsonl", "{session}"]),
            append: list(&["**/*.jsonl", "**/*.ndjson"]),
            never: Vec::new(),
            new_session_args: Vec::new(),
            resume_args: Vec::new(),
        }
    }
}
