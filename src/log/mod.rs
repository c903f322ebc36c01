//! The session log: numbered entries in a bucket, of which each number can be written by exactly one writer.
//!
//! Owns reading, appending, claiming and the ledger that carries the right to write. Does not own what goes into an
//! entry (`capture`), what is made of it (`restore`), or retries.

pub mod chain;
pub mod fence;
pub mod ledger;
pub mod pen;
pub mod probe;
pub mod state;

use std::sync::Arc;

use crate::codec::entry::{self, Entry};
use crate::codec::snapshot;
use crate::error::{Doing, Error, Result};
use crate::model::{AgentName, LogId, LogName, Namespace, Seq, WriterId, keys};
use crate::store::{self, Store};
use crate::sys::{Chance, Clock};

pub use fence::{Fence, Fencing};

/// The logs of one agent in one namespace.
#[derive(Clone)]
pub struct Logs {
    /// Where they are.
    pub store: Arc<dyn Store>,
    /// What keeps writers apart.
    pub fence: Arc<Fencing>,
    /// The tenant.
    pub namespace: Namespace,
    /// The agent.
    pub agent: AgentName,
    /// Tells the time.
    pub clock: Arc<dyn Clock>,
    /// Names writers.
    pub chance: Arc<dyn Chance>,
}

/// A numbered object of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbered {
    /// Its number.
    pub seq: Seq,
    /// Its size as stored.
    pub size: u64,
}

impl Logs {
    /// The log of that name.
    pub fn id(&self, name: LogName) -> LogId {
        LogId { namespace: self.namespace.clone(), agent: self.agent.clone(), name }
    }

    /// Every log of the agent whose name begins with `prefix`.
    pub async fn names(&self, prefix: &str) -> Result<Vec<LogName>> {
        let folder = format!("{}{prefix}", keys::agent_folder(&self.namespace, &self.agent));
        let folders = store::list_folders(&*self.store, &folder).await.doing("list sessions")?;
        // A key that is not ours may stand in the bucket; it is passed over.
        Ok(folders.iter().filter_map(|folder| keys::log_name(folder)).collect())
    }

    /// The numbers of a log's entries from behind `after` on, in order.
    pub async fn entries(&self, id: &LogId, after: Seq) -> Result<Vec<Numbered>> {
        let from = (after > 0).then(|| keys::entry(id, after));
        let objects = store::list_objects(&*self.store, &keys::entries_folder(id), from).await.doing_with(|| format!("list {id}"))?;
        Ok(numbered(&objects, keys::entry_number))
    }

    /// The numbers of a log's snapshots, in order.
    pub async fn snapshots(&self, id: &LogId) -> Result<Vec<Numbered>> {
        let objects =
            store::list_objects(&*self.store, &keys::snapshots_folder(id), None).await.doing_with(|| format!("list snapshots of {id}"))?;
        Ok(numbered(&objects, keys::snapshot_number))
    }

    /// The writers that lost a log and have a branch.
    pub async fn branches(&self, id: &LogId) -> Result<Vec<WriterId>> {
        let folders =
            store::list_folders(&*self.store, &keys::branches_folder(id)).await.doing_with(|| format!("list branches of {id}"))?;
        Ok(folders.iter().filter_map(|folder| keys::folder_name(folder).ok()?.parse().ok()).collect())
    }

    /// The numbers of a branch's entries, in order.
    pub async fn branch_entries(&self, id: &LogId, writer: &WriterId) -> Result<Vec<Numbered>> {
        let objects = store::list_objects(&*self.store, &keys::branch_folder(id, writer), None)
            .await
            .doing_with(|| format!("list branch of {id}"))?;
        Ok(numbered(&objects, keys::entry_number))
    }

    /// Reads one entry of the log; none if it does not exist.
    pub async fn read(&self, id: &LogId, seq: Seq) -> Result<Option<Entry>> {
        self.read_key(id, &keys::entry(id, seq), seq).await
    }

    /// Reads an entry that a listing has shown.
    pub async fn read_listed(&self, id: &LogId, seq: Seq) -> Result<Entry> {
        let gone = || {
            Error::unavailable(format!("read entry {seq} of {id}: it was listed and is gone"))
                .hint("try again: it was collected meanwhile, and a snapshot stands for it")
        };
        self.read(id, seq).await?.ok_or_else(gone)
    }

    /// Reads one entry of a branch; none if it does not exist.
    pub async fn read_branch(&self, id: &LogId, writer: &WriterId, seq: Seq) -> Result<Option<Entry>> {
        self.read_key(id, &keys::branch_entry(id, writer, seq), seq).await
    }

    async fn read_key(&self, id: &LogId, key: &str, seq: Seq) -> Result<Option<Entry>> {
        let Some(stored) = self.store.get(key).await? else { return Ok(None) };
        let entry = entry::decode(key, &stored)?;
        if (&entry.header.session, entry.header.seq) != (&id.name, seq) {
            return Err(Error::corrupt(format!("read {key}: it says it is entry {} of {}", entry.header.seq, entry.header.session)));
        }
        Ok(Some(entry))
    }

    /// Reads one snapshot; none if it does not exist.
    pub async fn read_snapshot(&self, id: &LogId, seq: Seq) -> Result<Option<snapshot::Snapshot>> {
        let key = keys::snapshot(id, seq);
        let Some(stored) = self.store.get(&key).await? else { return Ok(None) };
        Ok(Some(snapshot::Snapshot::open(&key, stored)?))
    }
}

fn numbered(objects: &[store::Object], number: impl Fn(&str) -> Option<Seq>) -> Vec<Numbered> {
    let mut found: Vec<_> = objects.iter().filter_map(|object| Some(Numbered { seq: number(&object.key)?, size: object.size })).collect();
    found.sort_by_key(|object| object.seq);
    found
}
