//! Listing logs and their segments.

use futures_util::future::try_join;

use super::Logs;
use super::segments::{self, Segment, SegmentKind};
use crate::error::{ErrorContext, Result};
use crate::model::{LogId, LogName, Seq, WriterId, keys};
use crate::store::{self, Store};
use crate::sys::mutation::{Mutation, is_active};

/// An entry of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListedEntry {
    /// Its number.
    pub seq: Seq,
    /// Its size as stored.
    pub size: u64,
}

impl Logs {
    /// The names of the agent's logs that start with `prefix`.
    pub async fn log_names(&self, prefix: &str) -> Result<Vec<LogName>> {
        let directory = format!("{}{prefix}", keys::agent_dir(&self.namespace, &self.agent));
        let directories = store::list_dirs(&*self.store, &directory)
            .await
            .context("list sessions")?;
        // Foreign keys in the bucket are ignored.
        Ok(directories
            .iter()
            .filter_map(|directory| keys::log_name(directory))
            .collect())
    }

    /// The entries of a log after entry `after`, in order.
    pub async fn list_entries(&self, id: &LogId, after: Seq) -> Result<Vec<ListedEntry>> {
        let segments = self.list_entry_segments(id, after).await?;
        let entries = segments.iter().map(|segment| ListedEntry {
            seq: segment.last_seq,
            size: segment.size,
        });
        Ok(entries.collect())
    }

    /// The snapshots and merges of a log.
    pub async fn list_compacted_segments(&self, id: &LogId) -> Result<Vec<Segment>> {
        let (snapshots, merges) = (keys::snapshots_dir(id), keys::merges_dir(id));
        let listed = try_join(
            list_kind(&*self.store, &snapshots, None, SegmentKind::Snapshot),
            list_kind(&*self.store, &merges, None, SegmentKind::Merge),
        );
        let (mut segments, merges) = listed.await.with_context(|| format!("list {id}"))?;
        segments.extend(merges);
        Ok(segments)
    }

    /// All segments of a log.
    pub async fn list_segments(&self, id: &LogId) -> Result<Vec<Segment>> {
        if let Some(segments) = self.list_in_one_page(id).await? {
            return Ok(segments);
        }
        let listed = try_join(
            self.list_compacted_segments(id),
            self.list_entry_segments(id, 0),
        );
        let (mut segments, entries) = listed.await?;
        segments.extend(entries);
        Ok(segments)
    }

    /// The segments that a reader of the head needs: entries that a merge or a snapshot covers are
    /// not listed.
    pub async fn list_newest_segments(&self, id: &LogId) -> Result<Vec<Segment>> {
        let mut segments = self.list_compacted_segments(id).await?;
        // The last `seq` before the first one that only an entry can cover.
        let covered = segments::select_all(&segments)
            .iter()
            .fold(0, |covered, segment| {
                if segment.first_seq == covered + 1 {
                    segment.last_seq
                } else {
                    covered
                }
            });
        segments.extend(self.list_entry_segments(id, covered).await?);
        let selected = segments::select_all(&segments);
        let reached = selected.last().map_or(0, |last| last.last_seq);
        // Where two compacted segments overlap, the selection may need an entry before them.
        if reached == segments::head(&segments) {
            Ok(segments)
        } else {
            self.list_segments(id).await
        }
    }

    /// Like `list_newest_segments`, but sends only one request if the objects of the log fit into one
    /// page.
    pub async fn list_newest_segments_at_once(&self, id: &LogId) -> Result<Vec<Segment>> {
        let Some(mut segments) = self.list_in_one_page(id).await? else {
            return self.list_newest_segments_in_one_round_trip(id).await;
        };
        if is_active(Mutation::IgnoreEntriesAfterMerge)
            && segments.iter().any(Segment::is_compacted)
        {
            segments.retain(Segment::is_compacted);
        }
        Ok(segments)
    }

    /// All segments of a log; none if its objects do not fit into one page.
    async fn list_in_one_page(&self, id: &LogId) -> Result<Option<Vec<Segment>>> {
        let page = self
            .store
            .list_tree(&keys::log_root(id))
            .await
            .with_context(|| format!("list {id}"))?;
        if page.next.is_some() {
            return Ok(None);
        }
        let of = |directory: String, kind| {
            let objects = page.objects.iter().filter(move |object| {
                let name = object.key.strip_prefix(directory.as_str());
                name.is_some_and(|name| !name.contains('/'))
            });
            objects.filter_map(move |object| to_segment(object, kind))
        };
        let mut segments = Vec::new();
        segments.extend(of(keys::snapshots_dir(id), SegmentKind::Snapshot));
        segments.extend(of(keys::merges_dir(id), SegmentKind::Merge));
        segments.extend(of(keys::entries_dir(id), SegmentKind::Entry));
        Ok(Some(segments))
    }

    /// Like `list_newest_segments`, but takes only one round trip if the entries fit into one page.
    async fn list_newest_segments_in_one_round_trip(&self, id: &LogId) -> Result<Vec<Segment>> {
        let directory = keys::entries_dir(id);
        let entries = async {
            self.store
                .list(&directory, None)
                .await
                .with_context(|| format!("list {id}"))
        };
        let (mut segments, entries) = try_join(self.list_compacted_segments(id), entries).await?;
        if entries.next.is_some() {
            return self.list_newest_segments(id).await;
        }
        if segments.is_empty() || !is_active(Mutation::IgnoreEntriesAfterMerge) {
            let entries = entries.objects.iter();
            segments.extend(entries.filter_map(|object| to_segment(object, SegmentKind::Entry)));
        }
        Ok(segments)
    }

    async fn list_entry_segments(&self, id: &LogId, after: Seq) -> Result<Vec<Segment>> {
        let after = (after > 0).then(|| keys::entry(id, after));
        list_kind(
            &*self.store,
            &keys::entries_dir(id),
            after,
            SegmentKind::Entry,
        )
        .await
        .with_context(|| format!("list {id}"))
    }

    /// The segments of a branch, in order.
    pub async fn list_branch_segments(
        &self,
        id: &LogId,
        writer: &WriterId,
    ) -> Result<Vec<Segment>> {
        list_kind(
            &*self.store,
            &keys::branch_dir(id, writer),
            None,
            SegmentKind::Entry,
        )
        .await
        .with_context(|| format!("list branch {writer} of {id}"))
    }

    /// The writers that have a branch of a log.
    pub async fn list_branches(&self, id: &LogId) -> Result<Vec<WriterId>> {
        let directories = store::list_dirs(&*self.store, &keys::branches_dir(id))
            .await
            .with_context(|| format!("list the branches of {id}"))?;
        Ok(directories
            .iter()
            .filter_map(|directory| keys::dir_name(directory).ok()?.parse().ok())
            .collect())
    }
}

/// The segments of one kind in a directory, starting after the key `after`.
async fn list_kind(
    store: &dyn Store,
    directory: &str,
    after: Option<String>,
    kind: SegmentKind,
) -> Result<Vec<Segment>> {
    store::list_mapped(store, directory, after, |object| to_segment(&object, kind)).await
}

/// The segment of an object; none for a foreign object.
fn to_segment(object: &store::Object, kind: SegmentKind) -> Option<Segment> {
    let (first_seq, last_seq) = match kind {
        SegmentKind::Entry => keys::entry_seq(&object.key).map(|seq| (seq, seq)),
        SegmentKind::Merge => keys::merge_range(&object.key),
        SegmentKind::Snapshot => keys::snapshot_seq(&object.key).map(|seq| (1, seq)),
    }?;
    Some(Segment {
        first_seq,
        last_seq,
        kind,
        size: object.size,
        modified: object.modified,
    })
}
