//! The session log: numbered entries in a bucket, of which each number can be written by exactly one writer.
//!
//! Owns reading, appending, claiming and the ledger that carries the right to write. Does not own what goes into an
//! entry (`capture`), what is made of it (`restore`), or retries.

pub mod assemble;
pub mod chain;
pub mod fence;
pub mod fork;
pub mod ledger;
pub mod merge;
pub mod metadata;
pub mod pins;
pub mod probe;
pub mod read;
mod recent;
pub mod replay;
pub mod schedule;
pub mod segments;
pub mod state;
pub mod writer;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::codec::entry::{self, Entry};
use crate::codec::snapshot;
use crate::error::{Error, ErrorContext, Result};
use crate::model::{AgentName, LogId, LogName, Namespace, Seq, WriterId, keys};
use crate::store::{self, Store};
use crate::sys::{Clock, Progress, Rng};

use segments::{Prefer, Segment, SegmentKind};

pub use fence::{Fence, Fencing};
pub use recent::RecentEntries;

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
    pub rng: Arc<dyn Rng>,
    /// What was written here last.
    pub recent: Arc<RecentEntries>,
    /// How far long work has come.
    pub progress: Arc<Progress>,
}

/// A numbered object of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListedEntry {
    /// Its number.
    pub seq: Seq,
    /// Its size as stored.
    pub size: u64,
}

impl Logs {
    /// The log of that name.
    pub fn id(&self, name: LogName) -> LogId {
        LogId {
            namespace: self.namespace.clone(),
            agent: self.agent.clone(),
            name,
        }
    }

    /// Every log of the agent whose name begins with `prefix`.
    pub async fn names(&self, prefix: &str) -> Result<Vec<LogName>> {
        let directory = format!("{}{prefix}", keys::agent_dir(&self.namespace, &self.agent));
        let directories = store::list_dirs(&*self.store, &directory)
            .await
            .context("list sessions")?;
        // A key that is not ours may stand in the bucket; it is passed over.
        Ok(directories
            .iter()
            .filter_map(|directory| keys::log_name(directory))
            .collect())
    }

    /// The numbers of a log's entries from behind `after` on, in order.
    pub async fn entries(&self, id: &LogId, after: Seq) -> Result<Vec<ListedEntry>> {
        Ok(self
            .entry_pieces(id, after)
            .await?
            .iter()
            .map(|piece| ListedEntry {
                seq: piece.to,
                size: piece.size,
            })
            .collect())
    }

    /// The snapshots and merges of a log.
    pub async fn composites(&self, id: &LogId) -> Result<Vec<Segment>> {
        let (snapshots, merges) = (keys::snapshots_dir(id), keys::merges_dir(id));
        let listed = futures_util::future::try_join(
            store::list_objects(&*self.store, &snapshots, None),
            store::list_objects(&*self.store, &merges, None),
        );
        let (snapshots, merges) = listed.await.with_context(|| format!("list {id}"))?;
        let snapshots = snapshots
            .iter()
            .filter_map(|object| piece(object, SegmentKind::Snapshot));
        Ok(snapshots
            .chain(
                merges
                    .iter()
                    .filter_map(|object| piece(object, SegmentKind::Merge)),
            )
            .collect())
    }

    /// All pieces of a log.
    pub async fn pieces(&self, id: &LogId) -> Result<Vec<Segment>> {
        let (mut pieces, entries) =
            futures_util::future::try_join(self.composites(id), self.entry_pieces(id, 0)).await?;
        pieces.extend(entries);
        Ok(pieces)
    }

    /// The pieces that a reader of the end needs: entries that a merge or a snapshot stands for are not listed.
    pub async fn newest_pieces(&self, id: &LogId) -> Result<Vec<Segment>> {
        let mut pieces = self.composites(id).await?;
        let covered = segments::cover(&pieces, 0, Seq::MAX, Prefer::Long, &BTreeSet::new());
        // Up to the first number that only an entry can stand for.
        let to = covered.iter().fold(
            0,
            |to, piece| if piece.from == to + 1 { piece.to } else { to },
        );
        pieces.extend(self.entry_pieces(id, to).await?);
        let read = segments::cover(&pieces, 0, Seq::MAX, Prefer::Long, &BTreeSet::new());
        let whole = read.last().map_or(0, |last| last.to) == segments::head(&pieces);
        // Where two cross, the way on may begin with an entry before them.
        if whole {
            Ok(pieces)
        } else {
            self.pieces(id).await
        }
    }

    /// The same in one round trip where the log is not long: what has few entries, or had its history collected, is listed
    /// from its beginning at once.
    pub async fn few_pieces(&self, id: &LogId) -> Result<Vec<Segment>> {
        let directory = keys::entries_dir(id);
        let entries = async {
            self.store
                .list(&directory, None)
                .await
                .with_context(|| format!("list {id}"))
        };
        let (mut pieces, entries) =
            futures_util::future::try_join(self.composites(id), entries).await?;
        if entries.next.is_some() {
            return self.newest_pieces(id).await;
        }
        pieces.extend(
            entries
                .objects
                .iter()
                .filter_map(|object| piece(object, SegmentKind::Entry)),
        );
        Ok(pieces)
    }

    async fn entry_pieces(&self, id: &LogId, after: Seq) -> Result<Vec<Segment>> {
        let from = (after > 0).then(|| keys::entry(id, after));
        let objects = store::list_objects(&*self.store, &keys::entries_dir(id), from)
            .await
            .with_context(|| format!("list {id}"))?;
        Ok(objects
            .iter()
            .filter_map(|object| piece(object, SegmentKind::Entry))
            .collect())
    }

    /// The pieces of a branch, in order.
    pub async fn branch_pieces(&self, id: &LogId, writer: &WriterId) -> Result<Vec<Segment>> {
        let objects = store::list_objects(&*self.store, &keys::branch_dir(id, writer), None)
            .await
            .with_context(|| format!("list branch of {id}"))?;
        Ok(objects
            .iter()
            .filter_map(|object| piece(object, SegmentKind::Entry))
            .collect())
    }

    /// The writers that lost a log and have a branch.
    pub async fn branches(&self, id: &LogId) -> Result<Vec<WriterId>> {
        let directories = store::list_dirs(&*self.store, &keys::branches_dir(id))
            .await
            .with_context(|| format!("list branches of {id}"))?;
        Ok(directories
            .iter()
            .filter_map(|directory| keys::dir_name(directory).ok()?.parse().ok())
            .collect())
    }

    /// Reads one entry of the log; none if it does not exist.
    pub async fn read(&self, id: &LogId, seq: Seq) -> Result<Option<Entry>> {
        self.read_piece(id, &Segment::entry(seq), None).await
    }

    /// Reads a piece that a listing has shown, of a log or of a writer's branch; none if it was collected meanwhile.
    pub async fn read_piece(
        &self,
        id: &LogId,
        piece: &Segment,
        branch: Option<&WriterId>,
    ) -> Result<Option<Entry>> {
        let key = piece.key_in(id, branch);
        let Some(stored) = self.store.get(&key).await? else {
            return Ok(None);
        };
        decode(id, piece, &key, &stored).map(Some)
    }

    /// The same for who only merges: what was written here of late needs not be asked for.
    pub async fn read_to_merge(&self, id: &LogId, piece: &Segment) -> Result<Option<Entry>> {
        match self
            .recent
            .get(id, piece.to)
            .filter(|_| piece.kind == SegmentKind::Entry)
        {
            Some(written) => decode(id, piece, &piece.key(id), &written).map(Some),
            None => self.read_piece(id, piece, None).await,
        }
    }

    /// Reads one entry of a branch; none if it does not exist.
    pub async fn read_branch(
        &self,
        id: &LogId,
        writer: &WriterId,
        seq: Seq,
    ) -> Result<Option<Entry>> {
        self.read_piece(id, &Segment::entry(seq), Some(writer))
            .await
    }
}

fn decode(id: &LogId, piece: &Segment, key: &str, stored: &[u8]) -> Result<Entry> {
    let entry = if piece.kind == SegmentKind::Snapshot {
        snapshot::decode(key, stored)?
    } else {
        entry::decode(key, stored)?
    };
    let header = &entry.header;
    let from = header
        .covers
        .as_ref()
        .map_or(header.seq, |covers| covers.from);
    if (&header.session, from, header.seq) != (&id.name, piece.from, piece.to) {
        return Err(Error::corrupt(format!(
            "read {key}: it says it is entry {} of {}",
            header.seq, header.session
        )));
    }
    Ok(entry)
}

fn piece(object: &store::Object, kind: SegmentKind) -> Option<Segment> {
    let (from, to) = match kind {
        SegmentKind::Entry => keys::entry_number(&object.key).map(|seq| (seq, seq)),
        SegmentKind::Merge => keys::merge_range(&object.key),
        SegmentKind::Snapshot => keys::snapshot_number(&object.key).map(|seq| (1, seq)),
    }?;
    Some(Segment {
        from,
        to,
        kind,
        size: object.size,
        modified: object.modified,
    })
}
