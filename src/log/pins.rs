//! Points of a log that must stay reachable: checkpoints that have a name, and where forks begin. One small object each,
//! beside the log.

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Logs;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::model::{Checkpoint, LogId, LogName, Seq, keys};
use crate::store::{self, Created};

const VERSION: u32 = 1;

/// A checkpoint that somebody gave a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    v: u32,
    /// The name.
    pub name: String,
    /// When it was given.
    pub made: Timestamp,
    /// The point.
    #[serde(flatten)]
    pub point: Checkpoint,
}

#[derive(Serialize, Deserialize)]
struct ForkPin {
    v: u32,
    seq: Seq,
    fork: LogName,
}

/// What must stay reachable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pin {
    /// A checkpoint with a name.
    Named(Box<Named>),
    /// Another session begins here.
    ForkOrigin {
        /// The other session.
        fork: LogName,
        /// The entry.
        seq: Seq,
    },
    /// One that this build cannot read; it may mean any entry.
    Unknown(String),
}

impl Pin {
    /// The entry that must stay reachable.
    pub fn seq(&self) -> Option<Seq> {
        match self {
            Pin::Named(named) => named.point.seq,
            Pin::ForkOrigin { seq, .. } => Some(*seq),
            Pin::Unknown(_) => None,
        }
    }

    /// Whether the log must stay although it was removed.
    pub fn holds_all(&self) -> bool {
        !matches!(self, Pin::Named(_))
    }

    /// Its key.
    pub fn key(&self, id: &LogId) -> String {
        match self {
            Pin::Named(named) => keys::named_point(id, &named.name),
            Pin::ForkOrigin { fork, .. } => keys::fork_pin(id, fork),
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
            let Some(bytes) = self.store.get(&object.key).await? else {
                continue;
            };
            let named: Option<Named> = serde_json::from_slice(&bytes)
                .ok()
                .filter(|named: &Named| named.v == VERSION);
            let fork: Option<ForkPin> = serde_json::from_slice(&bytes)
                .ok()
                .filter(|fork: &ForkPin| fork.v == VERSION);
            pins.push(match (named, fork) {
                (Some(named), _) if object.key == keys::named_point(id, &named.name) => {
                    Pin::Named(Box::new(named))
                }
                (_, Some(fork)) if object.key == keys::fork_pin(id, &fork.fork) => {
                    Pin::ForkOrigin {
                        fork: fork.fork,
                        seq: fork.seq,
                    }
                }
                _ => {
                    tracing::warn!(key = object.key, "this is damaged, or of a newer sessiond");
                    Pin::Unknown(object.key)
                }
            });
        }
        Ok(pins)
    }

    /// The checkpoints of a log that have a name, by time.
    pub async fn named_points(&self, id: &LogId) -> Result<Vec<Named>> {
        let pins = self.pins(id).await?.into_iter();
        let mut named: Vec<Named> = pins
            .filter_map(|pin| {
                if let Pin::Named(named) = pin {
                    Some(*named)
                } else {
                    None
                }
            })
            .collect();
        named.sort_by(|one, other| (one.made, &one.name).cmp(&(other.made, &other.name)));
        Ok(named)
    }

    /// Gives a point a name; none if the name is taken.
    pub async fn name_point(
        &self,
        id: &LogId,
        name: &str,
        point: Checkpoint,
    ) -> Result<Option<Named>> {
        let named = Named {
            v: VERSION,
            name: name.to_owned(),
            made: self.clock.now(),
            point,
        };
        let created = self
            .store
            .create(&keys::named_point(id, name), json(&named)?)
            .await
            .with_context(|| format!("name a point of {id}"))?;
        Ok((created == Created::New).then_some(named))
    }

    /// Holds the entry that a fork begins with.
    pub async fn pin_fork(&self, id: &LogId, seq: Seq, fork: &LogName) -> Result<()> {
        let pin = ForkPin {
            v: VERSION,
            seq,
            fork: fork.clone(),
        };
        self.store
            .put(&keys::fork_pin(id, fork), json(&pin)?)
            .await
            .with_context(|| format!("hold entry {seq} of {id}"))
    }
}

fn json(value: &impl Serialize) -> Result<Bytes> {
    serde_json::to_vec(value)
        .map(Bytes::from)
        .map_err(|cause| Error::new(ErrorKind::Internal, "write a pin").caused_by(cause))
}
