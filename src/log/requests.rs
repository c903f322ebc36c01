//! Request references: small objects from which the sessions of a request ID are found without the
//! index.
//!
//! A reference is written before the metadata that it belongs to, so a session with a request ID
//! always has one. The metadata is authoritative: a session whose request ID has changed keeps the
//! old reference, and readers ignore it.

use super::Logs;
use crate::error::{ErrorContext, Result};
use crate::model::{LogId, LogName, keys};
use crate::store::{Store, list_objects};

impl Logs {
    /// Writes the reference of a request ID to a session, unless it exists.
    pub(super) async fn create_request_reference(
        &self,
        id: &LogId,
        request_id: &str,
    ) -> Result<()> {
        // The key says everything; the content is for people.
        let body = serde_json::json!({ "request_id": request_id, "session": id.name.to_string() });
        let key = keys::request_reference(id, request_id);
        self.store.create(&key, body.to_string().into()).await?;
        Ok(())
    }

    /// The sessions that have or had a request ID, ordered by ID.
    pub async fn referenced_sessions(&self, request_id: &str) -> Result<Vec<LogId>> {
        let directory = keys::request_dir(&self.namespace, &self.agent, request_id);
        let objects = list_objects(&*self.store, &directory, None)
            .await
            .with_context(|| format!("list the sessions of request ID {request_id:?}"))?;
        Ok(objects
            .iter()
            .filter_map(|object| keys::referenced_session(&object.key))
            .map(|session| self.id(LogName::Session(session)))
            .collect())
    }
}
