//! The objects that a log consists of, and the selection of those to read. Pure.
//!
//! An entry covers one `seq`, a merge covers a range, a snapshot covers everything up to one `seq`.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use crate::model::{LogId, Seq, WriterId, keys};

/// The kind of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SegmentKind {
    /// One entry.
    Entry,
    /// A range of entries.
    Merge,
    /// All files as of one entry.
    Snapshot,
}

/// An object of a log, as listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Segment {
    /// The first `seq` that it covers.
    pub first_seq: Seq,
    /// The last `seq` that it covers.
    pub last_seq: Seq,
    /// Its kind.
    pub kind: SegmentKind,
    /// Its size as stored.
    pub size: u64,
    /// When it was written, by the store's clock.
    pub modified: Timestamp,
}

/// The identity of a segment within its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SegmentId {
    /// The kind of the segment.
    pub kind: SegmentKind,
    /// The first `seq` that it covers.
    pub first_seq: Seq,
    /// The last `seq` that it covers.
    pub last_seq: Seq,
}

impl Segment {
    /// Its identity within the log.
    pub fn id(&self) -> SegmentId {
        SegmentId {
            kind: self.kind,
            first_seq: self.first_seq,
            last_seq: self.last_seq,
        }
    }

    /// The entry `seq`, of which only the number is known.
    pub fn entry(seq: Seq) -> Segment {
        Segment {
            first_seq: seq,
            last_seq: seq,
            kind: SegmentKind::Entry,
            size: 0,
            modified: Timestamp::MAX,
        }
    }

    /// Whether it is a merge or a snapshot.
    pub fn is_compacted(&self) -> bool {
        self.kind != SegmentKind::Entry
    }

    /// Its key in the log.
    pub fn key(&self, id: &LogId) -> String {
        match self.kind {
            SegmentKind::Entry => keys::entry(id, self.last_seq),
            SegmentKind::Merge => keys::merge(id, self.first_seq, self.last_seq),
            SegmentKind::Snapshot => keys::snapshot(id, self.last_seq),
        }
    }

    /// Its key in the log, or in the branch of a writer.
    pub fn key_in(&self, id: &LogId, branch: Option<&WriterId>) -> String {
        branch.map_or_else(
            || self.key(id),
            |writer| keys::branch_entry(id, writer, self.last_seq),
        )
    }

    /// Whether it is compacted, covers all that `other` covers, and is another segment.
    pub fn contains(&self, other: &Segment) -> bool {
        let is_wider = self.first_seq <= other.first_seq && other.last_seq <= self.last_seq;
        is_wider && self.is_compacted() && self.id() != other.id()
    }
}

/// Which segments to read where several cover the same range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// The longest ones: the fewest objects.
    Coarse,
    /// The shortest ones: every point that can still be restored.
    Fine,
}

/// The last `seq` that any segment covers; 0 if there is none.
pub fn head(segments: &[Segment]) -> Seq {
    segments
        .iter()
        .map(|segment| segment.last_seq)
        .max()
        .unwrap_or(0)
}

/// Selects the fewest segments that cover a log.
pub fn select_all(segments: &[Segment]) -> Vec<Segment> {
    select_segments(segments, 0, Seq::MAX, Granularity::Coarse, &BTreeSet::new())
}

/// Selects consecutive segments that cover as much as possible of the range from `after`
/// (exclusive) to `last` (inclusive), without those in `excluded`. A missing `seq` leaves a gap in
/// the selection; the reader reports it.
pub fn select_segments(
    segments: &[Segment],
    after: Seq,
    last: Seq,
    granularity: Granularity,
    excluded: &BTreeSet<SegmentId>,
) -> Vec<Segment> {
    let mut usable: Vec<&Segment> = segments
        .iter()
        .filter(|segment| {
            segment.first_seq > after
                && segment.last_seq <= last
                && !excluded.contains(&segment.id())
        })
        .collect();
    // Of two segments with the same range, the snapshot comes first, because it does not depend on
    // earlier segments.
    usable.sort_by_key(|segment| {
        (
            segment.first_seq,
            segment.last_seq,
            std::cmp::Reverse(segment.kind),
        )
    });
    let end = usable
        .iter()
        .map(|segment| segment.last_seq)
        .max()
        .unwrap_or(after);
    // From the end: for each `seq` at which a segment starts, the path to the end with the fewest
    // gaps.
    let mut paths: BTreeMap<Seq, Path> = BTreeMap::new();
    for (index, segment) in usable.iter().enumerate().rev() {
        let next = paths.range(segment.last_seq + 1..).next();
        let path = Path {
            missing: next.map_or(end - segment.last_seq, |(first_seq, path)| {
                first_seq - segment.last_seq - 1 + path.missing
            }),
            segments: 1 + next.map_or(0, |(_, path)| path.segments),
            index,
        };
        let is_better = |old: &Path| match granularity {
            Granularity::Coarse => (path.missing, path.segments) <= (old.missing, old.segments),
            Granularity::Fine => (path.missing, old.segments) <= (old.missing, path.segments),
        };
        if paths.get(&segment.first_seq).is_none_or(is_better) {
            paths.insert(segment.first_seq, path);
        }
    }
    let mut reached = after;
    let mut selected = Vec::new();
    while let Some((_, path)) = paths.range(reached + 1..).next() {
        selected.push(*usable[path.index]);
        reached = usable[path.index].last_seq;
    }
    selected
}

/// A path from one `seq` to the end of a log.
struct Path {
    missing: u64,
    segments: usize,
    index: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn segment(kind: SegmentKind, first_seq: Seq, last_seq: Seq) -> Segment {
        Segment {
            first_seq,
            last_seq,
            kind,
            size: 1,
            modified: Timestamp::UNIX_EPOCH,
        }
    }

    fn entries(range: impl Iterator<Item = Seq>) -> Vec<Segment> {
        range
            .map(|seq| segment(SegmentKind::Entry, seq, seq))
            .collect()
    }

    fn selected(segments: &[Segment], last: Seq, granularity: Granularity) -> Vec<(Seq, Seq)> {
        select_segments(segments, 0, last, granularity, &BTreeSet::new())
            .iter()
            .map(|segment| (segment.first_seq, segment.last_seq))
            .collect()
    }

    #[test]
    fn the_longest_segments_that_end_before_the_point_are_selected() {
        let mut segments = entries(1..=9);
        segments.extend([
            segment(SegmentKind::Snapshot, 1, 4),
            segment(SegmentKind::Merge, 5, 7),
            segment(SegmentKind::Merge, 5, 6),
        ]);
        assert_eq!(
            selected(&segments, Seq::MAX, Granularity::Coarse),
            [(1, 4), (5, 7), (8, 8), (9, 9)]
        );
        assert_eq!(
            selected(&segments, 6, Granularity::Coarse),
            [(1, 4), (5, 6)]
        );
        assert_eq!(
            selected(&segments, 3, Granularity::Coarse),
            [(1, 1), (2, 2), (3, 3)]
        );
        assert_eq!(selected(&segments, Seq::MAX, Granularity::Fine).len(), 9);
        let excluded = BTreeSet::from([segment(SegmentKind::Snapshot, 1, 4).id()]);
        assert_eq!(
            select_segments(&segments, 0, 5, Granularity::Coarse, &excluded).len(),
            5
        );
    }

    #[test]
    fn a_late_write_at_a_collected_seq_is_not_selected() {
        let mut segments = entries(8..=9);
        segments.extend([
            segment(SegmentKind::Snapshot, 1, 7),
            segment(SegmentKind::Entry, 3, 3),
        ]);
        assert_eq!(
            selected(&segments, Seq::MAX, Granularity::Coarse),
            [(1, 7), (8, 8), (9, 9)]
        );
    }

    proptest! {
        #[test]
        fn every_seq_is_covered_once_whatever_is_merged_or_collected(
            merges in proptest::collection::vec((1u64..60, 2u64..20), 0..12),
            collected in proptest::collection::btree_set(0usize..12, 0..6),
            last in 1u64..80,
            coarse: bool,
        ) {
            // Nested or disjoint, as the schedule makes them.
            let mut kept: Vec<Segment> = Vec::new();
            for (first, length) in merges {
                let new = segment(SegmentKind::Merge, first, first + length);
                let crosses = |old: &Segment| {
                    !(old.contains(&new)
                        || new.contains(old)
                        || old.last_seq < new.first_seq
                        || new.last_seq < old.first_seq)
                };
                if !kept.iter().any(|old| crosses(old) || *old == new) {
                    kept.push(new);
                }
            }
            // The entries that a merge covers may have been collected.
            let collected: Vec<Segment> = kept
                .iter()
                .enumerate()
                .filter(|(index, _)| collected.contains(index))
                .map(|(_, segment)| *segment)
                .collect();
            let singles = entries(1..=80)
                .into_iter()
                .filter(|entry| !collected.iter().any(|merge| merge.contains(entry)));
            let segments: Vec<Segment> = singles.chain(kept.iter().copied()).collect();
            let is_inside = collected
                .iter()
                .any(|merge| merge.first_seq <= last && last < merge.last_seq);
            let (granularity, opposite) = if coarse {
                (Granularity::Coarse, Granularity::Fine)
            } else {
                (Granularity::Fine, Granularity::Coarse)
            };
            let read = select_segments(&segments, 0, last, granularity, &BTreeSet::new());
            for pair in read.windows(2) {
                prop_assert!(pair[0].last_seq < pair[1].first_seq);
            }
            let covered: u64 = read
                .iter()
                .map(|segment| segment.last_seq - segment.first_seq + 1)
                .sum();
            if !is_inside {
                prop_assert_eq!(covered, last);
            }
            let other = select_segments(&segments, 0, last, opposite, &BTreeSet::new());
            if !is_inside {
                let (fewer, more) = if coarse { (&read, &other) } else { (&other, &read) };
                prop_assert!(fewer.len() <= more.len());
            }
        }
    }
}
