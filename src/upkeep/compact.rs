//! Compaction: merges ranges of entries, so that a restore reads few objects.
//!
//! Owns which segments are merged. Does not own deletion (`gc`): a merge is an additional object,
//! so any process may write it at any time, more than once, or never.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::stream::{self, StreamExt};

use crate::codec::entry::Entry;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::chain::EntryChain;
use crate::log::merge::Merger;
use crate::log::protection_order::ProtectionOrder;
use crate::log::read::EntrySink;
use crate::log::schedule;
use crate::log::segments::{Granularity, Segment, select_segments};
use crate::log::{Logs, decode_segment};
use crate::model::{EntryKind, LogId, Seq, keys};
use crate::store::encrypted::policy::{Protection, ProtectionSummary};
use crate::sys::blocking;

/// Maximum stored size of segments that are merged into one. A larger segment is fetched in
/// parallel with others, and rewriting it to save one object would cost more than it saves. About 4
/// MiB of transcript.
const MAX_MERGED_STORED_BYTES: u64 = 1 << 20;

/// Maximum raw size of a merged segment: bounds the memory of its writer and readers.
const MAX_MERGED_RAW_BYTES: u64 = 8 << 20;

/// The first segment of a session is not merged while it is this many times larger than the others.
const LARGE_START_FACTOR: u64 = 4;

/// Number of concurrent reads. It is low, because flushes have priority.
const CONCURRENT_READS: usize = 2;

/// Number of concurrent reads of small objects while compaction lags behind: during one read from a
/// distant store, the agent may write three entries.
const CONCURRENT_READS_LAGGING: usize = 6;

/// Compaction lags behind if a restore reads this many times the segments of the schedule.
const LAGGING_FACTOR: u64 = 2;

/// Maximum size of a small object, of which several are in memory at the same time.
const SMALL_OBJECT: u64 = 64 << 10;

/// The segments that were written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CompactionOutcome {
    /// Number of merges and snapshots.
    pub segments: u32,
    /// Their stored size.
    pub bytes: u64,
}

/// Writes the segments that the schedule requires for the entries up to `upto`, all of which must
/// be durable. A range that cannot be merged does not prevent the others.
pub async fn compact(logs: &Logs, id: &LogId, upto: Seq) -> Result<CompactionOutcome> {
    let (mut written, mut conflict) = (CompactionOutcome::default(), None);
    let segments = logs.list_newest_segments(id).await?;
    for (from, to) in schedule::ranges(upto)
        .into_iter()
        .filter(|(from, to)| from < to)
    {
        for (from, to) in groups(&segments, from, to) {
            match merge_segments(logs, id, &segments, from, to)
                .await
                .with_context(|| format!("merge entries {from} to {to} of {id}"))
            {
                Ok(more) => written.add(more),
                // The first entry of a fork cannot be merged, but those after it can.
                Err(error) if error.kind() == ErrorKind::Conflict && from == 1 && to > 2 => {
                    match merge_segments(logs, id, &segments, 2, to).await {
                        Ok(more) => written.add(more),
                        Err(again) if is_unmergeable(&again) => conflict = Some(error),
                        Err(error) => return Err(error),
                    }
                }
                Err(error) if is_unmergeable(&error) => conflict = Some(error),
                Err(error) => return Err(error),
            }
        }
    }
    conflict.map_or(Ok(written), Err)
}

/// Whether a range stays unmerged: its segments cannot be merged, or this process cannot read them.
fn is_unmergeable(error: &Error) -> bool {
    error.kind() == ErrorKind::Conflict || error.kind().is_unreadable()
}

/// The ranges within a range that are merged, each as large as one segment may be. Pure.
fn groups(segments: &[Segment], from: Seq, to: Seq) -> Vec<(Seq, Seq)> {
    let read = select_segments(segments, 0, Seq::MAX, Granularity::Coarse, &BTreeSet::new());
    let within = read
        .into_iter()
        .filter(|segment| from <= segment.first_seq && segment.last_seq <= to);
    let mut groups: Vec<Vec<Segment>> = Vec::new();
    for segment in within {
        let size = |group: &[Segment]| group.iter().map(|segment| segment.size).sum::<u64>();
        match groups.last_mut() {
            Some(group) if size(group) + segment.size <= MAX_MERGED_STORED_BYTES => {
                group.push(segment)
            }
            _ => groups.push(vec![segment]),
        }
    }
    if from == 1 {
        for group in &mut groups {
            let all: u64 = group.iter().map(|segment| segment.size).sum();
            // A small claim may precede the large segment.
            if let Some(at) = group
                .iter()
                .position(|segment| segment.size > LARGE_START_FACTOR * (all - segment.size))
            {
                group.drain(..=at);
            }
        }
    }
    let several = groups.iter().filter(|group| group.len() > 1);
    several
        .filter_map(|group| Some((group.first()?.first_seq, group.last()?.last_seq)))
        .collect()
}

/// Merges the entries `from` to `to`, all of which must be durable.
#[cfg_attr(not(debug_assertions), expect(dead_code, reason = "only tests use it"))]
pub async fn merge_range(logs: &Logs, id: &LogId, from: Seq, to: Seq) -> Result<CompactionOutcome> {
    let segments = logs.list_segments(id).await?;
    merge_segments(logs, id, &segments, from, to)
        .await
        .with_context(|| format!("merge entries {from} to {to} of {id}"))
}

/// Merges each run of segments up to entry `upto` whose stored size is below `small`.
pub async fn merge_small_segments(
    logs: &Logs,
    id: &LogId,
    upto: Seq,
    small: u64,
) -> Result<CompactionOutcome> {
    let mut written = CompactionOutcome::default();
    let segments = logs.list_newest_segments(id).await?;
    let selected = select_segments(&segments, 0, upto, Granularity::Coarse, &BTreeSet::new());
    for small_segments in selected.split(|segment| segment.size >= small) {
        if let [first, .., last] = small_segments {
            match merge_segments(logs, id, &segments, first.first_seq, last.last_seq)
                .await
                .with_context(|| format!("merge the small segments of {id}"))
            {
                Ok(more) => written.add(more),
                // The segments stay readable without the merge.
                Err(error) if error.kind() == ErrorKind::Conflict => {
                    tracing::debug!(%error, "small segments stay unmerged")
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(written)
}

/// Merges the segments within a range.
async fn merge_segments(
    logs: &Logs,
    id: &LogId,
    segments: &[Segment],
    from: Seq,
    to: Seq,
) -> Result<CompactionOutcome> {
    // Only the segments that a restore reads. A segment that starts before the range and overlaps
    // it is left out: no reader could use a merge that overlaps it.
    let read = select_segments(segments, 0, Seq::MAX, Granularity::Coarse, &BTreeSet::new());
    let is_lagging = read.len() as u64 > LAGGING_FACTOR * schedule::MAX_SEGMENTS;
    let selected: Vec<Segment> = read
        .into_iter()
        .filter(|segment| from <= segment.first_seq)
        .collect();
    let within = selected
        .iter()
        .filter(|segment| segment.last_seq <= to)
        .count();
    let Some(from) = selected
        .first()
        .map(|first| first.first_seq)
        .filter(|_| within > 1)
    else {
        return Ok(CompactionOutcome::default());
    };
    let all_small = selected
        .iter()
        .take(within)
        .all(|segment| segment.size <= SMALL_OBJECT);
    let concurrency = if is_lagging && all_small {
        CONCURRENT_READS_LAGGING
    } else {
        CONCURRENT_READS
    };
    let mut builder = SegmentBuilder {
        logs,
        id,
        from,
        merger: Merger::default(),
        protections: BTreeMap::new(),
        replaced: ProtectionSummary::default(),
        merged: 0,
        to: 0,
        written: CompactionOutcome::default(),
    };
    let mut order = ProtectionOrder::after(logs, id, segments, from.saturating_sub(1)).await?;
    let mut chain = EntryChain::starting_anywhere(id.to_string());
    let mut reads = stream::iter(selected)
        .map(|segment| async move { (segment, logs.fetch_for_compaction(id, &segment).await) })
        .buffered(concurrency);
    while let Some((segment, read)) = reads.next().await {
        let deleted = || {
            Error::unavailable(format!(
                "{} was deleted after it was listed",
                segment.key(id)
            ))
        };
        let read = read.and_then(|read| read.ok_or_else(deleted));
        // Decoded one by one, because few stored bytes can have many raw bytes.
        let read = match read {
            Ok((stored, protection)) => {
                let is_encrypted = protection.is_encrypted();
                builder.protections.insert(segment.last_seq, protection);
                order
                    .push(&segment, None, is_encrypted)
                    .await
                    .and_then(|()| blocking(|| decode_segment(id, &segment, &stored)))
            }
            Err(error) => Err(error),
        };
        // Entries after the range are read too, until all entries of the range are confirmed.
        match chain.push(segment.last_seq, read)? {
            Some(entry) if entry.header.seq > to => return builder.finish().await,
            Some(entry) => builder.push(&entry).await?,
            None => {}
        }
    }
    while let Some(entry) = chain.pop()?.filter(|entry| entry.header.seq <= to) {
        builder.push(&entry).await?;
    }
    builder.finish().await
}

/// Merges segments, and starts the next segment when one has reached its maximum size.
struct SegmentBuilder<'a> {
    logs: &'a Logs,
    id: &'a LogId,
    from: Seq,
    merger: Merger,
    /// How each segment that was read is protected, by its last `seq`.
    protections: BTreeMap<Seq, Protection>,
    /// How the segments that the merger holds are protected.
    replaced: ProtectionSummary,
    /// Number of segments that the merger holds.
    merged: u32,
    to: Seq,
    written: CompactionOutcome,
}

impl SegmentBuilder<'_> {
    async fn push(&mut self, entry: &Entry) -> Result<()> {
        let protection = self.protections.remove(&entry.header.seq);
        let is_full = self.merger.size() + entry.header.body_len() > MAX_MERGED_RAW_BYTES
            || !self.merger.has_room_for(&entry.header);
        if self.merged > 0 && (is_full || self.becomes_encrypted(protection)) {
            self.write().await?;
        }
        self.merger.apply_entry(entry)?;
        if let Some(protection) = protection {
            self.replaced.add(protection);
        }
        self.merged += 1;
        self.to = entry.header.seq;
        Ok(())
    }

    /// Whether the session became encrypted with the next segment, so that a merge must not include
    /// both sides.
    fn becomes_encrypted(&self, next: Option<Protection>) -> bool {
        self.replaced.has_plaintext
            && next.is_some_and(Protection::is_encrypted)
            && !self.logs.store.policy().merges_plaintext_with_encrypted()
    }

    async fn finish(mut self) -> Result<CompactionOutcome> {
        self.write().await?;
        Ok(self.written)
    }

    async fn write(&mut self) -> Result<()> {
        let (merger, replaced, merged, from) = (
            std::mem::take(&mut self.merger),
            std::mem::take(&mut self.replaced),
            std::mem::take(&mut self.merged),
            self.from,
        );
        self.from = self.to + 1;
        // A single segment already exists.
        let Some(encoded) = (if merged > 1 {
            blocking(|| merger.finish(from))?
        } else {
            None
        }) else {
            return Ok(());
        };
        let seq = encoded.header.seq;
        let key = if encoded.header.kind == EntryKind::Snapshot {
            keys::snapshot(self.id, seq)
        } else {
            keys::merge(self.id, from, seq)
        };
        // The merge keeps the recipients of the segments that it replaces.
        let policy = self.logs.store.policy();
        let encryption = policy
            .for_compacted(replaced)
            .with_context(|| format!("write {key}"))?;
        self.written.add(CompactionOutcome {
            segments: 1,
            bytes: encoded.bytes.len() as u64,
        });
        // Another process may have written the same segment.
        self.logs
            .store
            .create_with(&key, encoded.bytes, encryption)
            .await?;
        Ok(())
    }
}

impl CompactionOutcome {
    fn add(&mut self, more: CompactionOutcome) {
        self.segments += more.segments;
        self.bytes += more.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_segment_is_not_rewritten_for_small_ones() {
        let segments = |sizes: &[u64]| -> Vec<Segment> {
            (1..)
                .zip(sizes)
                .map(|(seq, size)| Segment {
                    size: *size,
                    ..Segment::entry(seq)
                })
                .collect()
        };
        let all = |sizes: &[u64]| groups(&segments(sizes), 1, sizes.len() as Seq);
        assert_eq!(all(&[100, 100, 100]), [(1, 3)]);
        // A claim, and a transcript that existed before.
        assert_eq!(all(&[100, 900_000, 2000, 2000, 2000]), [(3, 5)]);
        assert_eq!(all(&[100, 900_000]), []);
        // The other segments have grown enough.
        assert_eq!(all(&[100, 9000, 2000, 2000, 2000]), [(1, 5)]);
        // Segments of the maximum size.
        assert_eq!(
            all(&[
                MAX_MERGED_STORED_BYTES,
                MAX_MERGED_STORED_BYTES,
                MAX_MERGED_STORED_BYTES / 2,
                MAX_MERGED_STORED_BYTES / 2,
                MAX_MERGED_STORED_BYTES / 2,
                MAX_MERGED_STORED_BYTES / 2
            ]),
            [(3, 4), (5, 6)]
        );
        // Later ranges are bounded by their number, not by the sizes.
        assert_eq!(
            groups(&segments(&[100, 100, 900_000, 2000, 2000]), 3, 5),
            [(3, 5)]
        );
    }
}
