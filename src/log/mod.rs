//! The session log: numbered entries in an object store. Exactly one writer can create each number.
//!
//! Owns reading, appending, claiming and the ledger. Does not own the content of an entry
//! (`capture`), the files that a restore builds from it (`restore`), or the retries of a flush.

pub mod append;
pub mod assemble;
mod attempt;
pub mod branches;
pub mod chain;
mod claim;
pub mod errors;
pub mod fence;
mod fetch;
pub mod foreign_files;
pub mod fork;
pub mod ledger;
mod lineage;
mod listing;
pub mod merge;
pub mod metadata;
mod options;
pub mod pins;
pub mod probe;
mod protection;
pub mod protection_order;
pub mod race;
pub mod read;
mod recent;
mod recovery;
pub mod replay;
mod requests;
pub mod schedule;
pub mod segments;
pub mod sink;
pub mod state;
pub mod turns;
pub mod uploads;
pub mod witness;
pub mod writer;

use std::sync::Arc;

use bytes::Bytes;

use crate::codec::entry::{self, Entry};
use crate::codec::snapshot;
use crate::error::{Error, Result};
use crate::model::{AgentName, ForkOrigin, LogId, LogName, Namespace, Seq, WriterId, keys};
use crate::store::Store;
use crate::store::encrypted::EncryptedStore;
use crate::store::encrypted::policy::Protection;
use crate::sys::{Clock, Progress, Rng};

use segments::{Segment, SegmentKind};

pub use fence::{Fence, Fencing};
pub use recent::RecentEntries;

/// The logs of one agent in one namespace.
#[derive(Clone)]
pub struct Logs {
    /// The store that holds them.
    pub store: Arc<EncryptedStore>,
    /// The fence between writers.
    pub fence: Arc<Fencing>,
    /// The namespace.
    pub namespace: Namespace,
    /// The agent.
    pub agent: AgentName,
    /// The source of time.
    pub clock: Arc<dyn Clock>,
    /// The source of randomness, for writer IDs and backoff.
    pub rng: Arc<dyn Rng>,
    /// The entries that this process wrote last.
    pub recent: Arc<RecentEntries>,
    /// The progress of long operations.
    pub progress: Arc<Progress>,
}

impl Logs {
    /// The ID of a log.
    pub fn id(&self, name: LogName) -> LogId {
        LogId {
            namespace: self.namespace.clone(),
            agent: self.agent.clone(),
            name,
        }
    }

    /// Reads one entry of the log; none if it does not exist.
    pub async fn read_entry(&self, id: &LogId, seq: Seq) -> Result<Option<Entry>> {
        self.read_segment(id, &Segment::entry(seq), None).await
    }

    /// The point that a session was forked from; none if it is not a fork. The first entry of a
    /// fork is never compacted.
    pub async fn fork_origin(&self, id: &LogId) -> Result<Option<ForkOrigin>> {
        let mut first = self.read_entry(id, 1).await?;
        if first.is_none() {
            // With the database as the fence, the first entry may have another number.
            let listed = self.store.list(&keys::entries_dir(id), None).await?;
            let objects = listed.objects.iter();
            if let Some(seq) = objects
                .filter_map(|object| keys::entry_seq(&object.key))
                .next()
            {
                first = self.read_entry(id, seq).await?;
            }
        }
        Ok(first.and_then(|entry| entry.header.fork))
    }

    /// Reads one entry of a branch; none if it does not exist.
    pub async fn read_branch_entry(
        &self,
        id: &LogId,
        writer: &WriterId,
        seq: Seq,
    ) -> Result<Option<Entry>> {
        self.read_segment(id, &Segment::entry(seq), Some(writer))
            .await
    }

    /// Reads a segment of a log, or of a branch; none if it does not exist (any more).
    pub async fn read_segment(
        &self,
        id: &LogId,
        segment: &Segment,
        branch: Option<&WriterId>,
    ) -> Result<Option<Entry>> {
        let key = segment.key_in(id, branch);
        let Some(stored) = self.store.get(&key).await? else {
            return Ok(None);
        };
        decode(id, segment, &key, &stored).map(Some)
    }

    /// Reads a segment for the compactor as stored, and how it is protected. Entries that this
    /// process wrote recently are not requested from the store.
    pub async fn fetch_for_compaction(
        &self,
        id: &LogId,
        segment: &Segment,
    ) -> Result<Option<(Bytes, Protection)>> {
        let recent = self
            .recent
            .get(id, segment.last_seq)
            .filter(|_| !segment.is_compacted())
            .map(|written| (written, self.store.policy().default_protection()));
        match recent {
            Some(recent) => Ok(Some(recent)),
            None => self.store.get_with_protection(&segment.key(id)).await,
        }
    }
}

/// Decodes a segment that was fetched.
pub fn decode_segment(id: &LogId, segment: &Segment, stored: &[u8]) -> Result<Entry> {
    decode(id, segment, &segment.key(id), stored)
}

/// Decodes a segment and checks that it is the one that its key names.
fn decode(id: &LogId, segment: &Segment, key: &str, stored: &[u8]) -> Result<Entry> {
    let entry = if segment.kind == SegmentKind::Snapshot {
        snapshot::decode(key, stored)?
    } else {
        entry::decode(key, stored)?
    };
    check_segment(id, segment, key, entry)
}

/// Like `decode`; none if the segment has more than `max` raw bytes.
fn decode_up_to(
    id: &LogId,
    segment: &Segment,
    key: &str,
    stored: &[u8],
    max: u64,
) -> Result<Option<Entry>> {
    let entry = if segment.kind == SegmentKind::Snapshot {
        snapshot::decode_up_to(key, stored, max)?
    } else {
        entry::decode_up_to(key, stored, max)?
    };
    entry
        .map(|entry| check_segment(id, segment, key, entry))
        .transpose()
}

fn check_segment(id: &LogId, segment: &Segment, key: &str, entry: Entry) -> Result<Entry> {
    let header = &entry.header;
    let first_seq = header
        .covers
        .as_ref()
        .map_or(header.seq, |covers| covers.first_seq);
    id.check_owner(key, &header.log_id())?;
    if (first_seq, header.seq) != (segment.first_seq, segment.last_seq) {
        return Err(Error::corrupt(format!(
            "its header names entry {} of {}",
            header.seq, header.session
        ))
        .context(format_args!("read {key}")));
    }
    Ok(entry)
}
