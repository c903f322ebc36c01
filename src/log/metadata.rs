//! What people said of a session, in numbered objects beside its log: the newest counts.
//!
//! A change reads the newest, writes the next number if nobody has it, and then deletes what is older. So of two that change
//! it at once one finds its number taken, and says it again on top of the other. Nothing is lost on a store that honours
//! conditions; on one that does not, the later of two changes in the same moment wins.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::Logs;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::model::{LogId, SessionMetadata, keys};
use crate::store::{Created, list_objects};
use crate::sys::Backoff;

/// The version of the object.
const VERSION: u32 = 1;

/// Somebody may say something between our look and our word; so often we look again.
const MOST_RACES: u32 = 20;

/// So often a word is written that the store does not answer.
const TRIES: u32 = 4;

/// What was said, and which of the objects says it; 0 where there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VersionedMetadata {
    /// The number of the object.
    pub number: u64,
    /// What it says.
    pub wishes: SessionMetadata,
}

#[derive(Serialize, Deserialize)]
struct Object {
    v: u32,
    #[serde(flatten)]
    wishes: SessionMetadata,
}

impl Logs {
    /// What people said of a session; nothing was said where there is no such object.
    pub async fn said(&self, id: &LogId) -> Result<VersionedMetadata> {
        for _ in 0..MOST_RACES {
            let Some(number) = self.wishes(id).await?.pop() else {
                return Ok(VersionedMetadata::default());
            };
            let key = keys::wishes(id, number);
            // Somebody may have said something newer and deleted it.
            let Some(bytes) = self.store.get(&key).await? else {
                continue;
            };
            let object: Option<Object> = serde_json::from_slice(&bytes).ok();
            let wishes = object
                .filter(|object| object.v == VERSION && object.wishes.check().is_ok())
                .map(|object| object.wishes);
            let damaged =
                || Error::corrupt(format!("read {key}: it is damaged, or of a newer sessiond"));
            return Ok(VersionedMetadata {
                number,
                wishes: wishes
                    .ok_or_else(|| damaged().hint("upgrade sessiond, or delete that object"))?,
            });
        }
        Err(busy(id))
    }

    /// The numbers of the objects that say something of a session, in order.
    pub async fn wishes(&self, id: &LogId) -> Result<Vec<u64>> {
        let objects = list_objects(&*self.store, &keys::wishes_dir(id), None)
            .await
            .with_context(|| format!("list wishes of {id}"))?;
        Ok(objects
            .iter()
            .filter_map(|object| keys::wishes_number(&object.key))
            .collect())
    }

    /// Says something of a session: `change` makes of what was said what is said from now on. It may be asked again.
    pub async fn say(
        &self,
        id: &LogId,
        mut change: impl FnMut(&SessionMetadata) -> Result<SessionMetadata>,
    ) -> Result<VersionedMetadata> {
        if id.name.is_project() {
            return Err(Error::usage(format!(
                "{id} is no session: nothing can be said of it"
            )));
        }
        let mut tried: Option<SessionMetadata> = None;
        let mut backoff = Backoff::new(self.rng.clone());
        for _ in 0..MOST_RACES {
            let before = self.said(id).await?;
            // An earlier try of ours may have arrived unheard of.
            if tried.as_ref() == Some(&before.wishes) {
                return Ok(before);
            }
            let wishes = change(&before.wishes)?;
            wishes.check()?;
            if wishes == before.wishes {
                return Ok(before);
            }
            let said = VersionedMetadata {
                number: before.number + 1,
                wishes,
            };
            let bytes = serde_json::to_vec(&Object {
                v: VERSION,
                wishes: said.wishes.clone(),
            })
            .map_err(|cause| Error::new(ErrorKind::Internal, "write wishes").caused_by(cause))?;
            let created = self
                .store
                .create(&keys::wishes(id, said.number), Bytes::from(bytes))
                .await;
            tried = Some(said.wishes.clone());
            match created {
                Ok(Created::Exists) => continue,
                Ok(Created::New) => {}
                Err(error) if error.is_retryable() && backoff.failed() + 1 < TRIES => {
                    tokio::time::sleep(backoff.wait_after_failure()).await;
                    continue;
                }
                Err(error) => return Err(error.context(format_args!("say something of {id}"))),
            }
            // The number may have been another's, and deleted for a newer one, since we looked: then nobody reads ours.
            let numbers = self.wishes(id).await?;
            if numbers.last().is_some_and(|last| *last > said.number) {
                continue;
            }
            for older in numbers.iter().filter(|number| **number < said.number) {
                if let Err(error) = self.store.delete(&keys::wishes(id, *older)).await {
                    tracing::debug!(%error, "an older wish stays; the next one deletes it");
                }
            }
            return Ok(said);
        }
        Err(busy(id))
    }
}

fn busy(id: &LogId) -> Error {
    Error::unavailable(format!("say something of {id}: others keep doing so")).hint("try again")
}
