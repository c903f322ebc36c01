//! Pins: objects next to a log that keep a `seq` reachable, for named checkpoints and forks.

use super::Logs;
use crate::codec::pin::{self, NamedCheckpoint, Pin};
use crate::error::{ErrorContext, ErrorKind, Result};
use crate::model::{Checkpoint, LogId, LogName, Seq, keys};
use crate::store::encrypted::policy::ProtectionSummary;
use crate::store::{self, CreateOutcome, Store};

/// A pin as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredPin {
    /// A pin that this sessiond reads.
    Readable(Pin),
    /// A pin that is damaged or that a newer sessiond wrote, with its key. It may refer to any
    /// entry.
    Unreadable(String),
}

impl StoredPin {
    /// The entry that it keeps reachable; none if it is unreadable.
    pub fn seq(&self) -> Option<Seq> {
        match self {
            StoredPin::Readable(Pin::Checkpoint(named)) => named.checkpoint.seq,
            StoredPin::Readable(Pin::Fork { seq, .. }) => Some(*seq),
            StoredPin::Unreadable(_) => None,
        }
    }

    /// Whether the pin keeps the log even after the session is removed.
    pub fn outlives_session(&self) -> bool {
        !matches!(self, StoredPin::Readable(Pin::Checkpoint(_)))
    }

    /// Its key.
    pub fn key(&self, id: &LogId) -> String {
        match self {
            StoredPin::Readable(Pin::Checkpoint(named)) => keys::checkpoint_pin(id, &named.name),
            StoredPin::Readable(Pin::Fork { fork, .. }) => keys::fork_pin(id, fork),
            StoredPin::Unreadable(key) => key.clone(),
        }
    }
}

impl Logs {
    /// All pins of a log.
    pub async fn pins(&self, id: &LogId) -> Result<Vec<StoredPin>> {
        let objects = store::list_objects(&*self.store, &keys::pins_dir(id), None).await;
        let mut pins = Vec::new();
        for object in objects.with_context(|| format!("list the pins of {id}"))? {
            if let Some(bytes) = self.store.get(&object.key).await? {
                pins.push(decode(id, object.key, &bytes));
            }
        }
        Ok(pins)
    }

    /// The named checkpoints of a log, ordered by time.
    pub async fn named_checkpoints(&self, id: &LogId) -> Result<Vec<NamedCheckpoint>> {
        let pins = self.pins(id).await?.into_iter();
        let mut named: Vec<NamedCheckpoint> = pins
            .filter_map(|pin| match pin {
                StoredPin::Readable(Pin::Checkpoint(named)) => Some(*named),
                StoredPin::Readable(Pin::Fork { .. }) | StoredPin::Unreadable(_) => None,
            })
            .collect();
        named.sort_by(|one, other| {
            (one.created_at, &one.name).cmp(&(other.created_at, &other.name))
        });
        Ok(named)
    }

    /// The checkpoint of this name; none if there is none. An error if it is unreadable.
    pub async fn named_checkpoint(
        &self,
        id: &LogId,
        name: &str,
    ) -> Result<Option<NamedCheckpoint>> {
        let key = keys::checkpoint_pin(id, name);
        let Some(bytes) = self.store.get(&key).await? else {
            return Ok(None);
        };
        Ok(match pin::decode(id, &key, &bytes)? {
            Pin::Checkpoint(named) => Some(*named),
            Pin::Fork { .. } => None,
        })
    }

    /// Names a checkpoint; returns none if the name is in use. The object is encrypted if the
    /// session is.
    pub async fn name_checkpoint(
        &self,
        id: &LogId,
        name: &str,
        checkpoint: Checkpoint,
    ) -> Result<Option<NamedCheckpoint>> {
        let named = NamedCheckpoint::new(name, self.clock.now(), checkpoint);
        let create = async {
            let policy = self.store.policy();
            let log = if policy.depends_on_log(true) {
                self.protection(id, None).await?
            } else {
                ProtectionSummary::default()
            };
            let encryption = policy.for_checkpoint(log)?;
            self.store
                .create_with(
                    &keys::checkpoint_pin(id, name),
                    pin::encode_checkpoint(id, &named)?,
                    encryption,
                )
                .await
        };
        let created = create
            .await
            .with_context(|| format!("name a checkpoint of {id}"))?;
        Ok((created == CreateOutcome::Created).then_some(named))
    }

    /// Pins the entry that a fork starts from.
    pub async fn pin_fork(&self, id: &LogId, seq: Seq, fork: &LogName) -> Result<()> {
        self.store
            .put(&keys::fork_pin(id, fork), pin::encode_fork(id, seq, fork)?)
            .await
            .with_context(|| format!("pin entry {seq} of {id}"))
    }
}

fn decode(id: &LogId, key: String, bytes: &[u8]) -> StoredPin {
    match pin::decode(id, &key, bytes) {
        Ok(pin) => return StoredPin::Readable(pin),
        Err(error) if error.kind() == ErrorKind::NewerFormat => {
            tracing::warn!(%error, "a newer sessiond wrote the pin; it protects every entry");
        }
        Err(error) => tracing::warn!(%error, "the pin is damaged; it protects every entry"),
    }
    StoredPin::Unreadable(key)
}
