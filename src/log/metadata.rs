//! The metadata of a session: numbered objects next to its log. The highest number is current.
//!
//! An update reads the newest version, creates the next one, and then deletes the older ones. If
//! two updates run at the same time, the losing one finds that its version exists and is applied
//! again on top of the winner. No update is lost on a store that honors conditional creates. On any
//! other store, the later of two concurrent updates replaces the earlier one.

use super::Logs;
use super::race::{self, LostRaces};
use crate::codec;
use crate::error::{Error, ErrorContext, Result};
use crate::model::limits::{self, MAX_SEQ};
use crate::model::{LogId, SessionMetadata, keys};
use crate::store::{CreateOutcome, Store, list_objects};
use crate::sys::Backoff;

/// Maximum number of attempts to write an update while the store is unavailable.
const MAX_WRITE_ATTEMPTS: u32 = 4;

/// Metadata and its version.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VersionedMetadata {
    /// The number of the object; 0 if there is none.
    pub version: u64,
    /// The metadata.
    pub metadata: SessionMetadata,
}

impl Logs {
    /// The metadata of a session; the default if there is no object.
    pub async fn metadata(&self, id: &LogId) -> Result<VersionedMetadata> {
        race::retry(id, || async {
            let Some(version) = self.list_metadata_versions(id).await?.pop() else {
                return Ok(Some(VersionedMetadata::default()));
            };
            let key = keys::metadata(id, version);
            let Some(bytes) = self.store.get(&key).await? else {
                // Another update replaced and deleted the object after the listing.
                return Ok(None);
            };
            let metadata = codec::metadata::decode(id, &key, &bytes)
                .map_err(|error| error.hint(format!("delete the object {key}: the session keeps its log and loses its labels, request ID and TTL")))?;
            Ok(Some(VersionedMetadata { version, metadata }))
        })
        .await
    }

    /// The versions that exist, in order.
    pub async fn list_metadata_versions(&self, id: &LogId) -> Result<Vec<u64>> {
        let objects = list_objects(&*self.store, &keys::metadata_dir(id), None)
            .await
            .with_context(|| format!("list the metadata of {id}"))?;
        Ok(objects
            .iter()
            .filter_map(|object| keys::metadata_version(&object.key))
            .collect())
    }

    /// Updates the metadata of a session. `change` computes the new metadata from the current
    /// metadata. It runs again after a lost race.
    pub async fn update_metadata(
        &self,
        id: &LogId,
        mut change: impl FnMut(&SessionMetadata) -> Result<SessionMetadata>,
    ) -> Result<VersionedMetadata> {
        if id.name.is_project() {
            return Err(Error::usage(format!(
                "{id} is not a session and has no metadata"
            )));
        }
        // The metadata of an attempt whose outcome may be unknown.
        let mut attempted: Option<SessionMetadata> = None;
        let (mut races, mut backoff) = (LostRaces::default(), Backoff::new(self.rng.clone()));
        loop {
            let current = self.metadata(id).await?;
            if attempted.as_ref() == Some(&current.metadata) {
                return Ok(current);
            }
            let metadata = change(&current.metadata)?;
            metadata.validate()?;
            if metadata == current.metadata {
                return Ok(current);
            }
            if let Some(request_id) = &metadata.request_id
                && metadata.request_id != current.metadata.request_id
            {
                let created = self.create_request_reference(id, request_id).await;
                created.with_context(|| format!("add {id} to request ID {request_id:?}"))?;
            }
            limits::check("version of the metadata", current.version, MAX_SEQ - 1)?;
            let next = VersionedMetadata {
                version: current.version + 1,
                metadata,
            };
            match self.create_metadata(id, &next).await {
                Ok(true) => return Ok(next),
                Ok(false) => races.count(id)?,
                Err(error) => backoff
                    .wait(error, MAX_WRITE_ATTEMPTS)
                    .await
                    .with_context(|| format!("update the metadata of {id}"))?,
            }
            attempted = Some(next.metadata);
        }
    }

    /// Creates a version and deletes the older ones; returns false if another update won.
    async fn create_metadata(&self, id: &LogId, next: &VersionedMetadata) -> Result<bool> {
        let key = keys::metadata(id, next.version);
        let body = codec::metadata::encode(id, &next.metadata)?;
        if self.store.create(&key, body).await? == CreateOutcome::AlreadyExists {
            return Ok(false);
        }
        // Since the listing, other updates may have created this version and a newer one, and
        // deleted this version again. No reader would then read the object that was just created.
        let versions = self.list_metadata_versions(id).await?;
        if versions.last().is_some_and(|last| *last > next.version) {
            return Ok(false);
        }
        for older in versions.iter().filter(|version| **version < next.version) {
            if let Err(error) = self.store.delete(&keys::metadata(id, *older)).await {
                tracing::debug!(%error, "an older version stays until the next update");
            }
        }
        Ok(true)
    }
}
