//! The log that a small object belongs to: the fields `namespace`, `agent` and `session`. They have
//! the same names in the header of an entry.

use serde::{Deserialize, Serialize};

use crate::model::{AgentName, LogId, LogName, Namespace};

/// The owner of an object, as it is stored.
#[derive(Serialize, Deserialize)]
pub(super) struct Owner {
    namespace: Namespace,
    agent: AgentName,
    session: LogName,
}

impl From<&LogId> for Owner {
    fn from(id: &LogId) -> Owner {
        Owner {
            namespace: id.namespace.clone(),
            agent: id.agent.clone(),
            session: id.name.clone(),
        }
    }
}

impl From<Owner> for LogId {
    fn from(owner: Owner) -> LogId {
        LogId {
            namespace: owner.namespace,
            agent: owner.agent,
            name: owner.session,
        }
    }
}
