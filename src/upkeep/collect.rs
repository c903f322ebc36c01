//! The decision which steps of garbage collection are due for a log. Pure.
//!
//! All ages are measured by the store's clock, so that a wrong clock of a machine cannot cause an
//! early deletion.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;

use crate::log::segments::{Granularity, Segment, SegmentKind, head, select_segments};
use crate::model::{EntryKind, Seq, WriterId};
use crate::sys::mutation::{Mutation, is_active};

/// How long garbage collection keeps data.
#[derive(Debug, Clone, Copy)]
pub struct RetentionPolicy {
    /// How long every entry can be restored.
    pub history: Duration,
    /// How long a session is kept after its last change; none: forever.
    pub ttl: Option<Duration>,
    /// How long compacted entries and removed sessions are kept.
    pub grace: Duration,
}

/// The purge entry is deleted after this many grace periods. Until then, it prevents a suspended
/// writer from creating entry 1 again next to another writer.
const PURGE_ENTRY_GRACE_PERIODS: u32 = 7;

/// The objects of a log.
#[derive(Debug, Clone, Default)]
pub struct LogListing {
    /// Its segments.
    pub segments: Vec<Segment>,
    /// The branches: fenced writers and their entries.
    pub branches: Vec<(WriterId, Vec<Segment>)>,
    /// The entries that must stay reachable: named checkpoints and the origins of forks.
    pub pinned: Vec<Seq>,
    /// Whether a fork needs the log. If so, the log is kept even if the session was removed.
    pub has_forks: bool,
}

/// A step of garbage collection for one log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GcStep {
    /// Merge the small segments of a session that has not changed for long.
    MergeSmall,
    /// Delete these segments, which others cover.
    DeleteCovered(Vec<Segment>),
    /// Remove the session, because its TTL has passed.
    Expire,
    /// Delete the session permanently, because its grace period has passed.
    Purge,
    /// Delete the remaining objects of a purged session, except the purge entry.
    DeletePurged,
    /// Delete the purge entry.
    DeletePurgeEntry,
}

impl GcStep {
    /// The name in the report.
    pub fn as_str(&self) -> &'static str {
        match self {
            GcStep::MergeSmall => "merge_small",
            GcStep::DeleteCovered(_) => "delete_covered",
            GcStep::Expire => "expire",
            GcStep::Purge => "purge",
            GcStep::DeletePurged => "delete_purged",
            GcStep::DeletePurgeEntry => "delete_purge_entry",
        }
    }
}

impl LogListing {
    /// The time of the last entry, in the log or a branch.
    pub fn changed_at(&self) -> Option<Timestamp> {
        let entries = self
            .segments
            .iter()
            .filter(|segment| segment.kind == SegmentKind::Entry);
        let branches = self.branches.iter().flat_map(|(_, segments)| segments);
        // If no entries are left, the compacted segments are used: they are at least as new as
        // their last entry.
        entries
            .chain(branches)
            .map(|segment| segment.modified)
            .max()
            .or_else(|| self.segments.iter().map(|segment| segment.modified).max())
    }

    /// Whether any step could be due, before the last entry is known.
    pub fn may_be_due(&self, policy: &RetentionPolicy, now: Timestamp) -> bool {
        let oldest = self
            .segments
            .iter()
            .chain(self.branches.iter().flat_map(|(_, segments)| segments))
            .map(|segment| segment.modified)
            .min();
        oldest.is_some_and(|oldest| {
            age(now, oldest)
                >= policy
                    .grace
                    .min(policy.history)
                    .min(policy.ttl.unwrap_or(Duration::MAX))
        })
    }
}

fn age(now: Timestamp, then: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or(Duration::ZERO)
}

/// The steps for a log whose last entry has the kind `last`.
pub fn plan_steps(
    listing: &LogListing,
    last: EntryKind,
    ttl: Option<Duration>,
    policy: &RetentionPolicy,
    now: Timestamp,
) -> Vec<GcStep> {
    let Some(changed) = listing.changed_at() else {
        return Vec::new();
    };
    let idle = age(now, changed);
    match last {
        EntryKind::Purge if listing.segments.len() > 1 || !listing.branches.is_empty() => {
            return vec![GcStep::DeletePurged];
        }
        EntryKind::Purge if idle >= policy.grace * PURGE_ENTRY_GRACE_PERIODS => {
            return vec![GcStep::DeletePurgeEntry];
        }
        EntryKind::Tombstone if idle >= policy.grace && !listing.has_forks => {
            return vec![GcStep::Purge];
        }
        EntryKind::Purge | EntryKind::Tombstone => return Vec::new(),
        _ => {}
    }
    if ttl.is_some_and(|ttl| idle >= ttl) {
        return vec![GcStep::Expire];
    }
    let mut steps = Vec::new();
    let covered = covered_segments(listing, policy, now);
    if !covered.is_empty() {
        steps.push(GcStep::DeleteCovered(covered));
    }
    if idle >= policy.history {
        steps.push(GcStep::MergeSmall);
    }
    steps
}

/// Whether an entry was written long after the segment that covers its number. It is not the entry
/// that was compacted: a suspended writer wrote it late. No reader reads it, but no other object
/// has its bytes, so it is kept as long as the session.
fn is_stray(listing: &LogListing, policy: &RetentionPolicy, entry: &Segment) -> bool {
    let is_late = |segment: &Segment| {
        segment.contains(entry) && entry.modified > later(segment.modified, policy.grace / 2)
    };
    entry.kind == SegmentKind::Entry && listing.segments.iter().any(is_late)
}

fn later(time: Timestamp, by: Duration) -> Timestamp {
    time.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// The segments that others cover and that are older than the history to keep.
fn covered_segments(
    listing: &LogListing,
    policy: &RetentionPolicy,
    now: Timestamp,
) -> Vec<Segment> {
    let segments = &listing.segments;
    let recent = segments.iter().filter(|segment| {
        segment.kind == SegmentKind::Entry && age(now, segment.modified) < policy.history
    });
    let history_start: Seq = recent
        .map(|segment| segment.first_seq)
        .min()
        .map_or(head(segments), |first| first - 1);
    // A branch continues from an entry of the main log, which must stay restorable.
    let branch_points = listing
        .branches
        .iter()
        .filter_map(|(_, branch)| branch.first())
        .map(|first| first.first_seq - 1);
    let mut kept: BTreeSet<Segment> = BTreeSet::new();
    for seq in branch_points
        .chain(listing.pinned.iter().copied())
        .filter(|seq| *seq > 0)
    {
        kept.extend(select_segments(
            segments,
            0,
            seq,
            Granularity::Coarse,
            &BTreeSet::new(),
        ));
    }
    // The segments that a restore reads are kept. Only these count as covering others, so that two
    // segments cannot both be deleted because each covers the other.
    let read = select_segments(segments, 0, Seq::MAX, Granularity::Coarse, &BTreeSet::new());
    kept.extend(&read);
    let covers = |segment: &Segment, other: &Segment| {
        segment.contains(other)
            && segment.last_seq <= history_start
            && (age(now, segment.modified) >= policy.grace
                || is_active(Mutation::CollectWithoutGrace))
            && !is_stray(listing, policy, other)
    };
    let mut covered: Vec<Segment> = segments
        .iter()
        .filter(|other| !kept.contains(other) && read.iter().any(|segment| covers(segment, other)))
        .copied()
        .collect();
    // Deleted oldest first, so that a reader that finds an entry also finds all later entries.
    covered.sort_by_key(|segment| (segment.last_seq, segment.first_seq));
    covered
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    const POLICY: RetentionPolicy = RetentionPolicy {
        history: Duration::from_secs(7 * 24 * 60 * 60),
        ttl: Some(Duration::from_secs(30 * 24 * 60 * 60)),
        grace: DAY,
    };

    fn day(day: i64) -> Timestamp {
        Timestamp::from_second(day * 24 * 60 * 60).unwrap()
    }

    fn segment(kind: SegmentKind, from: Seq, to: Seq, written: i64) -> Segment {
        Segment {
            first_seq: from,
            last_seq: to,
            kind,
            size: 1,
            modified: day(written),
        }
    }

    fn entry(seq: Seq, written: i64) -> Segment {
        segment(SegmentKind::Entry, seq, seq, written)
    }

    fn steps(listing: &LogListing, now: i64) -> Vec<GcStep> {
        plan_steps(listing, EntryKind::Delta, POLICY.ttl, &POLICY, day(now))
    }

    #[test]
    fn covered_segments_are_deleted_after_the_history() {
        let snapshot = segment(SegmentKind::Snapshot, 1, 2, 2);
        let listing = LogListing {
            segments: vec![entry(1, 1), entry(2, 2), entry(3, 9), snapshot],
            ..LogListing::default()
        };
        assert_eq!(steps(&listing, 8), []);
        assert_eq!(
            steps(&listing, 9),
            [GcStep::DeleteCovered(vec![entry(1, 1), entry(2, 2)])]
        );
        // Entry 2 was the newest until a moment within the history, so it can still be restored.
        let young = LogListing {
            segments: vec![
                entry(1, 1),
                entry(2, 8),
                entry(3, 9),
                segment(SegmentKind::Snapshot, 1, 2, 8),
            ],
            ..listing.clone()
        };
        assert_eq!(steps(&young, 14), []);
        // A reader may not know a segment that was just written.
        let fresh = LogListing {
            segments: vec![
                entry(1, 1),
                entry(2, 2),
                segment(SegmentKind::Snapshot, 1, 2, 9),
                entry(3, 9),
            ],
            ..listing
        };
        assert_eq!(steps(&fresh, 9), []);
        assert_eq!(
            steps(&fresh, 10),
            [GcStep::DeleteCovered(vec![entry(1, 1), entry(2, 2)])]
        );
    }

    #[test]
    fn a_smaller_merge_is_deleted_with_the_entries_of_a_larger_one() {
        let merges = [
            segment(SegmentKind::Snapshot, 1, 2, 2),
            segment(SegmentKind::Merge, 3, 4, 2),
            segment(SegmentKind::Snapshot, 1, 4, 3),
        ];
        let listing = LogListing {
            segments: merges.iter().copied().chain([entry(5, 3)]).collect(),
            ..LogListing::default()
        };
        assert_eq!(
            steps(&listing, 20),
            [
                GcStep::DeleteCovered(vec![merges[0], merges[1]]),
                GcStep::MergeSmall
            ]
        );
    }

    #[test]
    fn pinned_entries_and_forked_sessions_are_kept() {
        let snapshot = segment(SegmentKind::Snapshot, 1, 5, 6);
        let segments: Vec<Segment> = (1..=5).map(|seq| entry(seq, 1)).chain([snapshot]).collect();
        let listing = LogListing {
            segments: segments.clone(),
            pinned: vec![3],
            ..LogListing::default()
        };
        assert_eq!(
            steps(&listing, 9)[0],
            GcStep::DeleteCovered(vec![entry(4, 1), entry(5, 1)])
        );
        let held = LogListing {
            segments: vec![entry(1, 1), entry(2, 1)],
            has_forks: true,
            ..LogListing::default()
        };
        assert_eq!(
            plan_steps(&held, EntryKind::Tombstone, None, &POLICY, day(20)),
            []
        );
    }

    #[test]
    fn the_entry_before_a_branch_is_kept() {
        let writer: WriterId = "w".parse().unwrap();
        let segments = vec![
            entry(1, 1),
            entry(2, 1),
            entry(3, 1),
            segment(SegmentKind::Snapshot, 1, 3, 1),
        ];
        let listing = LogListing {
            segments,
            branches: vec![(writer, vec![entry(3, 1)])],
            ..LogListing::default()
        };
        assert_eq!(
            steps(&listing, 10),
            [GcStep::DeleteCovered(vec![entry(3, 1)]), GcStep::MergeSmall]
        );
    }

    #[test]
    fn a_late_write_at_a_compacted_number_is_never_deleted() {
        let listing = LogListing {
            segments: vec![
                segment(SegmentKind::Snapshot, 1, 5, 1),
                entry(6, 1),
                entry(3, 19),
            ],
            ..LogListing::default()
        };
        assert_eq!(steps(&listing, 40), [GcStep::MergeSmall]);
    }

    #[test]
    fn a_removal_has_three_steps_and_a_change_cancels_it() {
        let listing = LogListing {
            segments: vec![entry(1, 1), entry(2, 1)],
            ..LogListing::default()
        };
        let at =
            |last: EntryKind, now: i64| plan_steps(&listing, last, POLICY.ttl, &POLICY, day(now));
        assert_eq!(at(EntryKind::Delta, 30), [GcStep::MergeSmall]);
        assert_eq!(at(EntryKind::Delta, 31), [GcStep::Expire]);
        assert_eq!(
            plan_steps(&listing, EntryKind::Delta, None, &POLICY, day(1000)),
            [GcStep::MergeSmall]
        );
        assert_eq!(at(EntryKind::Tombstone, 1), []);
        assert_eq!(at(EntryKind::Tombstone, 2), [GcStep::Purge]);
        assert_eq!(at(EntryKind::Purge, 2), [GcStep::DeletePurged]);
        let mark = LogListing {
            segments: vec![entry(3, 2)],
            ..LogListing::default()
        };
        assert_eq!(
            plan_steps(&mark, EntryKind::Purge, POLICY.ttl, &POLICY, day(8)),
            []
        );
        assert_eq!(
            plan_steps(&mark, EntryKind::Purge, POLICY.ttl, &POLICY, day(9)),
            [GcStep::DeletePurgeEntry]
        );
        assert_eq!(
            plan_steps(&mark, EntryKind::Claim, POLICY.ttl, &POLICY, day(9)),
            [GcStep::MergeSmall]
        );
    }

    const HOUR: i64 = 60 * 60;

    /// A time in hours.
    fn hour(hour: i64) -> Timestamp {
        Timestamp::from_second(hour * HOUR).unwrap()
    }

    #[derive(Debug, Clone)]
    struct Generated {
        listing: LogListing,
        strays: Vec<Segment>,
        policy: RetentionPolicy,
        now: Timestamp,
    }

    /// A possible log: entries, merges and snapshots written some time later, covered segments that
    /// were deleted, branches, and late writes of suspended writers.
    fn generated() -> impl Strategy<Value = Generated> {
        let gaps = proptest::collection::vec(0i64..72, 1..24);
        let compacted =
            proptest::collection::vec((0usize..24, 1usize..12, 0i64..100, any::<bool>()), 0..8);
        let gone = proptest::collection::vec(any::<bool>(), 32);
        let branches = proptest::collection::vec(1u64..24, 0..3);
        let late = proptest::collection::vec((1u64..24, 1i64..200), 0..2);
        let policy = (1u64..15 * 24, 1u64..72).prop_map(|(history, grace)| RetentionPolicy {
            history: Duration::from_secs(history * HOUR as u64),
            ttl: None,
            grace: Duration::from_secs(grace * HOUR as u64),
        });
        (gaps, compacted, gone, branches, late, policy, 0i64..800).prop_map(
            |(gaps, compacted, gone, branches, late, policy, wait)| {
                let mut at = 0;
                let written: Vec<i64> = gaps
                    .iter()
                    .map(|gap| {
                        at += gap;
                        at
                    })
                    .collect();
                let last = written.len();
                let mut made: Vec<Segment> = Vec::new();
                for (first, more, after, whole) in compacted {
                    let (from, to) = (
                        if whole { 1 } else { first % last + 1 },
                        (first % last + 1 + more).min(last),
                    );
                    let kind = if from == 1 {
                        SegmentKind::Snapshot
                    } else {
                        SegmentKind::Merge
                    };
                    let new = Segment {
                        first_seq: from as Seq,
                        last_seq: to as Seq,
                        kind,
                        size: 1,
                        modified: hour(written[to - 1] + after),
                    };
                    let crosses = |old: &Segment| {
                        !(old.contains(&new)
                            || new.contains(old)
                            || old.last_seq < new.first_seq
                            || new.last_seq < old.first_seq)
                    };
                    if from < to && !made.iter().any(|old| crosses(old) || old.id() == new.id()) {
                        made.push(new);
                    }
                }
                let entries = (1..).zip(&written).map(|(seq, at)| Segment {
                    size: 1,
                    modified: hour(*at),
                    ..Segment::entry(seq)
                });
                // Covered segments may have been deleted.
                let all: Vec<Segment> = entries.chain(made.iter().copied()).collect();
                let is_covered_by_later =
                    |segment: &Segment| made.iter().any(|other| other.contains(segment));
                let mut segments: Vec<Segment> = all
                    .iter()
                    .zip(&gone)
                    .filter(|(segment, gone)| !(**gone && is_covered_by_later(segment)))
                    .map(|(segment, _)| *segment)
                    .collect();
                segments.extend(all.iter().skip(gone.len()));
                // A suspended writer wrote at a compacted number, long after.
                let mut strays = Vec::new();
                for (seq, after) in late {
                    let covering = made.iter().filter(|segment| {
                        segments.contains(segment)
                            && segment.first_seq <= seq
                            && seq <= segment.last_seq
                    });
                    let Some(newest) = covering.map(|segment| segment.modified).max() else {
                        continue;
                    };
                    if segments
                        .iter()
                        .any(|segment| segment.id() == Segment::entry(seq).id())
                    {
                        continue;
                    }
                    let stray = Segment {
                        size: 1,
                        modified: later(
                            later(newest, policy.grace / 2),
                            Duration::from_secs((after * HOUR) as u64),
                        ),
                        ..Segment::entry(seq)
                    };
                    segments.push(stray);
                    strays.push(stray);
                }
                let newest = segments
                    .iter()
                    .map(|segment| segment.modified)
                    .max()
                    .unwrap();
                let branch = |first: u64| {
                    (
                        "w".parse::<WriterId>().unwrap(),
                        vec![Segment {
                            size: 1,
                            modified: newest,
                            ..Segment::entry(first)
                        }],
                    )
                };
                let branches = branches
                    .into_iter()
                    .filter(|first| *first <= last as u64 + 1)
                    .map(branch)
                    .collect();
                let now = later(newest, Duration::from_secs((wait * HOUR) as u64));
                Generated {
                    listing: LogListing {
                        segments,
                        branches,
                        ..LogListing::default()
                    },
                    strays,
                    policy,
                    now,
                }
            },
        )
    }

    /// The numbers that a restore of entry `last` reads.
    fn numbers(segments: &[Segment], most: Seq) -> Vec<Seq> {
        select_segments(segments, 0, most, Granularity::Coarse, &BTreeSet::new())
            .iter()
            .flat_map(|segment| segment.first_seq..=segment.last_seq)
            .collect()
    }

    proptest! {
        #[test]
        fn deleted_segments_are_never_needed(generated in generated()) {
            let Generated { listing, strays, policy, now } = generated;
            for step in plan_steps(&listing, EntryKind::Delta, None, &policy, now) {
                let GcStep::DeleteCovered(collected) = step else {
                    continue;
                };
                let left: Vec<Segment> = listing.segments.iter().filter(|segment| !collected.contains(segment)).copied().collect();
                prop_assert_eq!(left.len() + collected.len(), listing.segments.len());
                for segment in &collected {
                    prop_assert!(!strays.contains(segment), "a late write is deleted: {:?}", segment);
                    prop_assert!(
                        left.iter().any(|other| other.contains(segment) && age(now, other.modified) >= policy.grace),
                        "no segment that is old enough covers {:?}", segment
                    );
                }
                let end = head(&listing.segments);
                prop_assert_eq!(numbers(&left, Seq::MAX), numbers(&listing.segments, Seq::MAX));
                // Every point of the history, and the one that was the newest when it started.
                let young = |segment: &&Segment| segment.kind == SegmentKind::Entry && age(now, segment.modified) < policy.history;
                let first = listing.segments.iter().filter(young).map(|segment| segment.first_seq).min().unwrap_or(end + 1);
                let bases = listing.branches.iter().map(|(_, segments)| segments[0].first_seq - 1);
                for point in (first - 1..=end).chain(bases) {
                    prop_assert_eq!(numbers(&left, point), numbers(&listing.segments, point), "entry {} can no longer be restored", point);
                }
            }
        }
    }
}
