//! What a piece of transcript tells about its session. Derived, so it can always be derived again from the bucket.

use serde::{Deserialize, Serialize};

/// What was read in passing; a field that a piece does not mention is none and leaves what is known as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionFacts {
    /// The agent's name for the project the session belongs to.
    pub project: Option<String>,
    /// The directory the agent ran in.
    pub cwd: Option<String>,
    /// The session's title.
    pub title: Option<String>,
    /// The model that answered last.
    pub model: Option<String>,
    /// The version of the agent that wrote last.
    pub agent_version: Option<String>,
    /// What the session has cost so far, in millionths of a dollar, as its own transcript says.
    pub cost: Option<u64>,
}

impl SessionFacts {
    /// What is known after more was read.
    pub fn then(self, new: SessionFacts) -> SessionFacts {
        SessionFacts {
            project: new.project.or(self.project),
            cwd: new.cwd.or(self.cwd),
            title: new.title.or(self.title),
            model: new.model.or(self.model),
            agent_version: new.agent_version.or(self.agent_version),
            cost: new.cost.or(self.cost),
        }
    }
}
