//! Pins: objects next to a log that keep a `seq` reachable, for named checkpoints and forks.

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Logs;
use crate::codec::version;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::model::{Checkpoint, LogId, LogName, Seq, keys};
use crate::store::encrypted::policy::ProtectionSummary;
use crate::store::{self, CreateOutcome, Store};

/// A checkpoint with a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedCheckpoint {
    version: u32,
    /// The name.
    pub name: String,
    /// When it was named.
    pub created_at: Timestamp,
    /// The checkpoint.
    #[serde(flatten)]
    pub checkpoint: Checkpoint,
}

#[derive(Serialize, Deserialize)]
struct ForkPin {
    version: u32,
    seq: Seq,
    fork: LogName,
}

/// An object that keeps a `seq` reachable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pin {
    /// A named checkpoint.
    Checkpoint(Box<NamedCheckpoint>),
    /// The origin of a fork.
    Fork {
        /// The forked session.
        fork: LogName,
        /// The entry that it starts from.
        seq: Seq,
    },
    /// An unreadable pin; it may refer to any entry.
    Unknown(String),
}

impl Pin {
    /// The entry that it keeps reachable; none if it is unknown.
    pub fn seq(&self) -> Option<Seq> {
        match self {
            Pin::Checkpoint(named) => named.checkpoint.seq,
            Pin::Fork { seq, .. } => Some(*seq),
            Pin::Unknown(_) => None,
        }
    }

    /// Whether the pin keeps the log even after the session is removed.
    pub fn outlives_session(&self) -> bool {
        !matches!(self, Pin::Checkpoint(_))
    }

    /// Its key.
    pub fn key(&self, id: &LogId) -> String {
        match self {
            Pin::Checkpoint(named) => keys::checkpoint_pin(id, &named.name),
            Pin::Fork { fork, .. } => keys::fork_pin(id, fork),
            Pin::Unknown(key) => key.clone(),
        }
    }
}

impl Logs {
    /// All pins of a log.
    pub async fn pins(&self, id: &LogId) -> Result<Vec<Pin>> {
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
                Pin::Checkpoint(named) => Some(*named),
                Pin::Fork { .. } | Pin::Unknown(_) => None,
            })
            .collect();
        named.sort_by(|one, other| {
            (one.created_at, &one.name).cmp(&(other.created_at, &other.name))
        });
        Ok(named)
    }

    /// Names a checkpoint; returns none if the name is in use. The object is encrypted if the
    /// session is.
    pub async fn name_checkpoint(
        &self,
        id: &LogId,
        name: &str,
        checkpoint: Checkpoint,
    ) -> Result<Option<NamedCheckpoint>> {
        let named = NamedCheckpoint {
            version: version::PIN,
            name: name.to_owned(),
            created_at: self.clock.now(),
            checkpoint,
        };
        let create = async {
            let policy = self.store.policy();
            let log = if policy.depends_on_log(true) {
                self.protection(id, None).await?
            } else {
                ProtectionSummary::default()
            };
            let encryption = policy.for_checkpoint(log)?;
            self.store
                .create_with(&keys::checkpoint_pin(id, name), json(&named)?, encryption)
                .await
        };
        let created = create
            .await
            .with_context(|| format!("name a checkpoint of {id}"))?;
        Ok((created == CreateOutcome::Created).then_some(named))
    }

    /// Pins the entry that a fork starts from.
    pub async fn pin_fork(&self, id: &LogId, seq: Seq, fork: &LogName) -> Result<()> {
        let pin = ForkPin {
            version: version::PIN,
            seq,
            fork: fork.clone(),
        };
        self.store
            .put(&keys::fork_pin(id, fork), json(&pin)?)
            .await
            .with_context(|| format!("pin entry {seq} of {id}"))
    }
}

fn decode(id: &LogId, key: String, bytes: &[u8]) -> Pin {
    let named: Option<NamedCheckpoint> = serde_json::from_slice(bytes)
        .ok()
        .filter(|named: &NamedCheckpoint| named.version == version::PIN);
    let fork: Option<ForkPin> = serde_json::from_slice(bytes)
        .ok()
        .filter(|fork: &ForkPin| fork.version == version::PIN);
    match (named, fork) {
        (Some(named), _) if key == keys::checkpoint_pin(id, &named.name) => {
            Pin::Checkpoint(Box::new(named))
        }
        (_, Some(fork)) if key == keys::fork_pin(id, &fork.fork) => Pin::Fork {
            fork: fork.fork,
            seq: fork.seq,
        },
        _ => {
            tracing::warn!(key, "the pin is damaged or was written by a newer sessiond");
            Pin::Unknown(key)
        }
    }
}

fn json(value: &impl Serialize) -> Result<Bytes> {
    serde_json::to_vec(value)
        .map(Bytes::from)
        .map_err(|cause| Error::new(ErrorKind::Internal, "encode a pin").caused_by(cause))
}
