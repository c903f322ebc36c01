//! Facts about a session that a transcript mentions. Derived, so they can be rebuilt from the
//! store.

use serde::{Deserialize, Serialize};

/// Facts about a session. A field that is none is unknown; an update keeps the known value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionFacts {
    /// The agent's name for the project of the session.
    pub project: Option<String>,
    /// The directory the agent ran in.
    pub cwd: Option<String>,
    /// The session's title.
    pub title: Option<String>,
    /// The beginning of the first prompt, on one line: the title where the agent gives none.
    pub first_prompt: Option<String>,
    /// The model of the last response.
    pub model: Option<String>,
    /// The version of the agent that wrote last.
    pub agent_version: Option<String>,
    /// Cost so far in millionths of a dollar, as the transcript reports it.
    pub cost: Option<u64>,
}

impl SessionFacts {
    /// The title to show: the agent's, or the first prompt.
    pub fn shown_title(&self) -> Option<&str> {
        self.title.as_deref().or(self.first_prompt.as_deref())
    }

    /// These facts with the newer ones in `new`.
    #[must_use]
    pub fn updated_with(self, new: SessionFacts) -> SessionFacts {
        SessionFacts {
            project: new.project.or(self.project),
            cwd: new.cwd.or(self.cwd),
            title: new.title.or(self.title),
            first_prompt: self.first_prompt.or(new.first_prompt),
            model: new.model.or(self.model),
            agent_version: new.agent_version.or(self.agent_version),
            cost: new.cost.or(self.cost),
        }
    }
}
