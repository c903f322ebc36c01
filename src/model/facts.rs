//! What a piece of transcript tells about its session. Derived, so it can always be derived again from the bucket.

use serde::{Deserialize, Serialize};

/// What was read in passing; a field that a piece does not mention is none and leaves what is known as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// The agent's name for the project the session belongs to.
    pub project: Option<String>,
    /// The folder the agent ran in.
    pub cwd: Option<String>,
    /// The session's title.
    pub title: Option<String>,
    /// The model that answered last.
    pub model: Option<String>,
    /// The version of the agent that wrote last.
    pub agent_version: Option<String>,
}
