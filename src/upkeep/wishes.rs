//! What people said of a session, kept beside its log: how long to keep it.

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::{Doing, Error, Kind, Result};
use crate::log::Logs;
use crate::model::{LogId, keys};

/// The version of the object.
const VERSION: u32 = 1;

/// How long a session is kept after its last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ttl {
    /// For ever.
    Never,
    /// So many seconds.
    Seconds(u64),
}

impl Ttl {
    /// The time; none is for ever.
    pub fn duration(self) -> Option<Duration> {
        match self {
            Ttl::Never => None,
            Ttl::Seconds(seconds) => Some(Duration::from_secs(seconds)),
        }
    }
}

/// What people said of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wishes {
    v: u32,
    /// How long to keep it; none: as the collector is told.
    pub ttl: Option<Ttl>,
}

/// Reads them; nothing was said where there are none.
pub async fn read(logs: &Logs, id: &LogId) -> Result<Wishes> {
    let key = keys::wishes(id);
    let Some(bytes) = logs.store.get(&key).await? else { return Ok(Wishes { v: VERSION, ttl: None }) };
    let wishes: Option<Wishes> = serde_json::from_slice(&bytes).ok();
    wishes.filter(|wishes| wishes.v == VERSION).ok_or_else(|| {
        Error::corrupt(format!("read {key}: it is damaged, or of a newer sessiond")).hint("sessiond ttl ID TIME writes it anew")
    })
}

/// Says how long to keep a session; none takes that back.
pub async fn say_ttl(logs: &Logs, id: &LogId, ttl: Option<Ttl>) -> Result<()> {
    let bytes =
        serde_json::to_vec(&Wishes { v: VERSION, ttl }).map_err(|cause| Error::new(Kind::Internal, "write wishes").because(cause))?;
    logs.store.put(&keys::wishes(id), Bytes::from(bytes)).await.doing_with(|| format!("say how long to keep {id}"))
}
