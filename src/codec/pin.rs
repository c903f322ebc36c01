//! Encoding of the pins of a log: `pins/checkpoint.<name>.json` and `pins/fork.<session>.json`.

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::owner::Owner;
use super::version::{self, invalid};
use crate::error::{Error, ErrorKind, Result};
use crate::model::limits::MAX_SEQ;
use crate::model::{Checkpoint, LogId, LogName, Seq, keys};

/// A checkpoint with a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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

impl NamedCheckpoint {
    /// Names a checkpoint.
    pub fn new(name: &str, created_at: Timestamp, checkpoint: Checkpoint) -> Self {
        NamedCheckpoint {
            version: version::PIN,
            name: name.to_owned(),
            created_at,
            checkpoint,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct ForkPin {
    version: u32,
    seq: Seq,
    fork: LogName,
}

/// A pin with the log that it belongs to.
#[derive(Serialize, Deserialize)]
struct Object<T> {
    #[serde(flatten)]
    owner: Owner,
    #[serde(flatten)]
    pin: T,
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
}

/// Encodes a named checkpoint of the log `id`.
pub fn encode_checkpoint(id: &LogId, named: &NamedCheckpoint) -> Result<Bytes> {
    encode(id, named)
}

/// Encodes the origin of a fork in the log `id`.
pub fn encode_fork(id: &LogId, seq: Seq, fork: &LogName) -> Result<Bytes> {
    encode(
        id,
        &ForkPin {
            version: version::PIN,
            seq,
            fork: fork.clone(),
        },
    )
}

fn encode(id: &LogId, pin: &impl Serialize) -> Result<Bytes> {
    let owner = id.into();
    serde_json::to_vec(&Object { owner, pin })
        .map(Bytes::from)
        .map_err(|cause| Error::new(ErrorKind::Internal, "encode a pin").caused_by(cause))
}

/// Decodes the pin at `key`, by its format version.
pub fn decode(id: &LogId, key: &str, bytes: &[u8]) -> Result<Pin> {
    match version::read(key, bytes, version::PIN)? {
        1 => decode_v1(id, key, bytes),
        other => Err(version::unknown(key, other)),
    }
}

fn decode_v1(id: &LogId, key: &str, bytes: &[u8]) -> Result<Pin> {
    let damaged = || invalid(key, "it is damaged");
    let owner: Owner = serde_json::from_slice(bytes).map_err(|_| damaged())?;
    id.check_owner(key, &owner.into())?;
    let named = serde_json::from_slice::<NamedCheckpoint>(bytes)
        .ok()
        .filter(|named| key == keys::checkpoint_pin(id, &named.name));
    if let Some(named) = named {
        let checked = named.checkpoint.check_limits();
        checked.map_err(|error| invalid(key, error))?;
        return Ok(Pin::Checkpoint(Box::new(named)));
    }
    let fork = serde_json::from_slice::<ForkPin>(bytes)
        .ok()
        .filter(|pin| key == keys::fork_pin(id, &pin.fork) && pin.seq <= MAX_SEQ);
    match fork {
        Some(ForkPin { fork, seq, .. }) => Ok(Pin::Fork { fork, seq }),
        None => Err(damaged()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_pin_is_distinguished_from_a_damaged_one() {
        let id = LogId {
            namespace: "n".parse().unwrap(),
            agent: "a".parse().unwrap(),
            name: "s".parse().unwrap(),
        };
        let fork: LogName = "f".parse().unwrap();
        let key = keys::fork_pin(&id, &fork);
        let bytes = encode_fork(&id, 7, &fork).unwrap();
        assert_eq!(
            decode(&id, &key, &bytes).unwrap(),
            Pin::Fork { fork, seq: 7 }
        );
        let newer = decode(&id, &key, br#"{"version":2,"range":[1,2]}"#).unwrap_err();
        assert_eq!(newer.kind(), ErrorKind::NewerFormat);
        // The last two are a pin of another fork and one of another namespace.
        for damaged in [
            "",
            "{}",
            r#"{"version":1}"#,
            r#"{"version":1,"namespace":"n","agent":"a","session":"s","seq":7,"fork":"g"}"#,
            r#"{"version":1,"namespace":"other","agent":"a","session":"s","seq":7,"fork":"f"}"#,
        ] {
            let error = decode(&id, &key, damaged.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{damaged}");
        }
    }
}
