//! What may go: pure. Ages are told by the store's clock alone, so no machine's clock can make anything go too soon.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;

use crate::log::segments::{Prefer, Segment, SegmentKind, cover, head};
use crate::model::{EntryKind, Seq, WriterId};

/// How long things are kept.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// So far back one can go to any entry.
    pub history: Duration,
    /// A session that has not changed for this long is removed; none: never.
    pub ttl: Option<Duration>,
    /// What stands twice, and what was removed, stays at least this long.
    pub grace: Duration,
}

/// What is left of a session that was deleted for good goes after so many times the grace: its number keeps a writer that
/// sleeps from beginning again at 1 beside another.
const REMAINS: u32 = 7;

/// A log as listed.
#[derive(Debug, Clone, Default)]
pub struct Listed {
    /// What it is made of.
    pub pieces: Vec<Segment>,
    /// The writers that lost it, and their entries.
    pub branches: Vec<(WriterId, Vec<Segment>)>,
    /// Entries that must stay reachable: somebody named them, or another session begins there.
    pub pinned: Vec<Seq>,
    /// Another session begins with this one: it stays although it was removed.
    pub held: bool,
}

/// What to do with a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing changed for long: make one piece of the small ones.
    Squeeze,
    /// Delete these: others stand for them.
    Collect(Vec<Segment>),
    /// Its time has passed: remove it, as a person would.
    Expire,
    /// It was removed long enough ago: delete it for good.
    Purge,
    /// It was deleted for good: delete what is left but the mark.
    Sweep,
    /// Delete the mark too.
    Forget,
}

impl Listed {
    /// When it last changed: an entry was written, to it or to a branch.
    pub fn changed(&self) -> Option<Timestamp> {
        let entries = self
            .pieces
            .iter()
            .filter(|piece| piece.kind == SegmentKind::Entry);
        let branches = self.branches.iter().flat_map(|(_, pieces)| pieces);
        // What is left when all entries are collected was made no sooner.
        entries
            .chain(branches)
            .map(|piece| piece.modified)
            .max()
            .or_else(|| self.pieces.iter().map(|piece| piece.modified).max())
    }

    /// Whether anything could be due, whatever the log ends with.
    pub fn may_be_due(&self, rules: &Rules, now: Timestamp) -> bool {
        let oldest = self
            .pieces
            .iter()
            .chain(self.branches.iter().flat_map(|(_, pieces)| pieces))
            .map(|piece| piece.modified)
            .min();
        oldest.is_some_and(|oldest| {
            age(now, oldest)
                >= rules
                    .grace
                    .min(rules.history)
                    .min(rules.ttl.unwrap_or(Duration::MAX))
        })
    }
}

fn age(now: Timestamp, then: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or(Duration::ZERO)
}

/// What to do with a log that ends with an entry of the kind `last`.
pub fn decide(
    listed: &Listed,
    last: EntryKind,
    ttl: Option<Duration>,
    rules: &Rules,
    now: Timestamp,
) -> Vec<Step> {
    let Some(changed) = listed.changed() else {
        return Vec::new();
    };
    let idle = age(now, changed);
    match last {
        EntryKind::Purge if listed.pieces.len() > 1 || !listed.branches.is_empty() => {
            return vec![Step::Sweep];
        }
        EntryKind::Purge if idle >= rules.grace * REMAINS => return vec![Step::Forget],
        EntryKind::Tombstone if idle >= rules.grace && !listed.held => return vec![Step::Purge],
        EntryKind::Purge | EntryKind::Tombstone => return Vec::new(),
        _ => {}
    }
    if ttl.is_some_and(|ttl| idle >= ttl) {
        return vec![Step::Expire];
    }
    let mut steps = Vec::new();
    let surplus = surplus(listed, rules, now);
    if !surplus.is_empty() {
        steps.push(Step::Collect(surplus));
    }
    if idle >= rules.history {
        steps.push(Step::Squeeze);
    }
    steps
}

/// An entry that was written long after what stands for its number: not the one it stands for. Nobody reads it, and nothing
/// else has its bytes, so it stays as long as the session.
fn is_stray(listed: &Listed, rules: &Rules, entry: &Segment) -> bool {
    let late = |piece: &Segment| {
        piece.contains(entry) && entry.modified > later(piece.modified, rules.grace / 2)
    };
    entry.kind == SegmentKind::Entry && listed.pieces.iter().any(late)
}

fn later(time: Timestamp, by: Duration) -> Timestamp {
    time.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// What others stand for, and is older than the history that one can go back in.
fn surplus(listed: &Listed, rules: &Rules, now: Timestamp) -> Vec<Segment> {
    let pieces = &listed.pieces;
    let young = pieces.iter().filter(|piece| {
        piece.kind == SegmentKind::Entry && age(now, piece.modified) < rules.history
    });
    let past: Seq = young
        .map(|piece| piece.from)
        .min()
        .map_or(head(pieces), |first| first - 1);
    // Who lost the session goes on from the entry before its first: that point must stay.
    let left = listed
        .branches
        .iter()
        .filter_map(|(_, branch)| branch.first())
        .map(|first| first.from - 1);
    let mut kept: BTreeSet<Segment> = BTreeSet::new();
    for base in left
        .chain(listed.pinned.iter().copied())
        .filter(|base| *base > 0)
    {
        kept.extend(cover(pieces, 0, base, Prefer::Long, &BTreeSet::new()));
    }
    // What a restore reads stays in any case; only that stands for others, so that no two of them lean on one another.
    let read = cover(pieces, 0, Seq::MAX, Prefer::Long, &BTreeSet::new());
    kept.extend(&read);
    let stands = |piece: &Segment, other: &Segment| {
        piece.contains(other)
            && piece.to <= past
            && age(now, piece.modified) >= rules.grace
            && !is_stray(listed, rules, other)
    };
    let mut surplus: Vec<Segment> = pieces
        .iter()
        .filter(|other| !kept.contains(other) && read.iter().any(|piece| stands(piece, other)))
        .copied()
        .collect();
    // The oldest first: whoever finds an entry finds all that follow it.
    surplus.sort_by_key(|piece| (piece.to, piece.from));
    surplus
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    const RULES: Rules = Rules {
        history: Duration::from_secs(7 * 24 * 60 * 60),
        ttl: Some(Duration::from_secs(30 * 24 * 60 * 60)),
        grace: DAY,
    };

    fn day(day: i64) -> Timestamp {
        Timestamp::from_second(day * 24 * 60 * 60).unwrap()
    }

    fn piece(kind: SegmentKind, from: Seq, to: Seq, written: i64) -> Segment {
        Segment {
            from,
            to,
            kind,
            size: 1,
            modified: day(written),
        }
    }

    fn entry(seq: Seq, written: i64) -> Segment {
        piece(SegmentKind::Entry, seq, seq, written)
    }

    fn steps(listed: &Listed, now: i64) -> Vec<Step> {
        decide(listed, EntryKind::Delta, RULES.ttl, &RULES, day(now))
    }

    #[test]
    fn what_others_stand_for_goes_when_it_is_history() {
        let snapshot = piece(SegmentKind::Snapshot, 1, 2, 2);
        let listed = Listed {
            pieces: vec![entry(1, 1), entry(2, 2), entry(3, 9), snapshot],
            ..Listed::default()
        };
        assert_eq!(steps(&listed, 8), []);
        assert_eq!(
            steps(&listed, 9),
            [Step::Collect(vec![entry(1, 1), entry(2, 2)])]
        );
        // One can still go back to entry 2, which was the newest for longer than that.
        let young = Listed {
            pieces: vec![
                entry(1, 1),
                entry(2, 8),
                entry(3, 9),
                piece(SegmentKind::Snapshot, 1, 2, 8),
            ],
            ..listed.clone()
        };
        assert_eq!(steps(&young, 14), []);
        // What was made just now may be unknown to somebody who is reading.
        let fresh = Listed {
            pieces: vec![
                entry(1, 1),
                entry(2, 2),
                piece(SegmentKind::Snapshot, 1, 2, 9),
                entry(3, 9),
            ],
            ..listed
        };
        assert_eq!(steps(&fresh, 9), []);
        assert_eq!(
            steps(&fresh, 10),
            [Step::Collect(vec![entry(1, 1), entry(2, 2)])]
        );
    }

    #[test]
    fn a_smaller_merge_goes_with_what_a_larger_one_stands_for() {
        let merges = [
            piece(SegmentKind::Snapshot, 1, 2, 2),
            piece(SegmentKind::Merge, 3, 4, 2),
            piece(SegmentKind::Snapshot, 1, 4, 3),
        ];
        let listed = Listed {
            pieces: merges.iter().copied().chain([entry(5, 3)]).collect(),
            ..Listed::default()
        };
        assert_eq!(
            steps(&listed, 20),
            [Step::Collect(vec![merges[0], merges[1]]), Step::Squeeze]
        );
    }

    #[test]
    fn what_somebody_named_or_forked_stays() {
        let snapshot = piece(SegmentKind::Snapshot, 1, 5, 6);
        let pieces: Vec<Segment> = (1..=5).map(|seq| entry(seq, 1)).chain([snapshot]).collect();
        let listed = Listed {
            pieces: pieces.clone(),
            pinned: vec![3],
            ..Listed::default()
        };
        assert_eq!(
            steps(&listed, 9)[0],
            Step::Collect(vec![entry(4, 1), entry(5, 1)])
        );
        let held = Listed {
            pieces: vec![entry(1, 1), entry(2, 1)],
            held: true,
            ..Listed::default()
        };
        assert_eq!(
            decide(&held, EntryKind::Tombstone, None, &RULES, day(20)),
            []
        );
    }

    #[test]
    fn the_point_that_a_branch_left_from_stays() {
        let writer: WriterId = "w".parse().unwrap();
        let pieces = vec![
            entry(1, 1),
            entry(2, 1),
            entry(3, 1),
            piece(SegmentKind::Snapshot, 1, 3, 1),
        ];
        let listed = Listed {
            pieces,
            branches: vec![(writer, vec![entry(3, 1)])],
            ..Listed::default()
        };
        assert_eq!(
            steps(&listed, 10),
            [Step::Collect(vec![entry(3, 1)]), Step::Squeeze]
        );
    }

    #[test]
    fn a_late_write_at_a_collected_number_is_never_collected() {
        let listed = Listed {
            pieces: vec![
                piece(SegmentKind::Snapshot, 1, 5, 1),
                entry(6, 1),
                entry(3, 19),
            ],
            ..Listed::default()
        };
        assert_eq!(steps(&listed, 40), [Step::Squeeze]);
    }

    #[test]
    fn removal_has_three_steps_and_a_change_stops_it() {
        let listed = Listed {
            pieces: vec![entry(1, 1), entry(2, 1)],
            ..Listed::default()
        };
        let at = |last: EntryKind, now: i64| decide(&listed, last, RULES.ttl, &RULES, day(now));
        assert_eq!(at(EntryKind::Delta, 30), [Step::Squeeze]);
        assert_eq!(at(EntryKind::Delta, 31), [Step::Expire]);
        assert_eq!(
            decide(&listed, EntryKind::Delta, None, &RULES, day(1000)),
            [Step::Squeeze]
        );
        assert_eq!(at(EntryKind::Tombstone, 1), []);
        assert_eq!(at(EntryKind::Tombstone, 2), [Step::Purge]);
        assert_eq!(at(EntryKind::Purge, 2), [Step::Sweep]);
        let mark = Listed {
            pieces: vec![entry(3, 2)],
            ..Listed::default()
        };
        assert_eq!(
            decide(&mark, EntryKind::Purge, RULES.ttl, &RULES, day(8)),
            []
        );
        assert_eq!(
            decide(&mark, EntryKind::Purge, RULES.ttl, &RULES, day(9)),
            [Step::Forget]
        );
        assert_eq!(
            decide(&mark, EntryKind::Claim, RULES.ttl, &RULES, day(9)),
            [Step::Squeeze]
        );
    }

    const HOUR: i64 = 60 * 60;

    /// Hours, to say when something was written.
    fn hour(hour: i64) -> Timestamp {
        Timestamp::from_second(hour * HOUR).unwrap()
    }

    #[derive(Debug, Clone)]
    struct Generated {
        listed: Listed,
        strays: Vec<Segment>,
        rules: Rules,
        now: Timestamp,
    }

    /// A log as it can be found: entries that come one after the other, merges and snapshots made of them some time later,
    /// of what those stand for some collected already, branches, and writes of somebody who had slept.
    fn generated() -> impl Strategy<Value = Generated> {
        let gaps = proptest::collection::vec(0i64..72, 1..24);
        let composites =
            proptest::collection::vec((0usize..24, 1usize..12, 0i64..100, any::<bool>()), 0..8);
        let gone = proptest::collection::vec(any::<bool>(), 32);
        let branches = proptest::collection::vec(1u64..24, 0..3);
        let late = proptest::collection::vec((1u64..24, 1i64..200), 0..2);
        let rules = (1u64..15 * 24, 1u64..72).prop_map(|(history, grace)| Rules {
            history: Duration::from_secs(history * HOUR as u64),
            ttl: None,
            grace: Duration::from_secs(grace * HOUR as u64),
        });
        (gaps, composites, gone, branches, late, rules, 0i64..800).prop_map(
            |(gaps, composites, gone, branches, late, rules, wait)| {
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
                for (first, more, after, whole) in composites {
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
                        from: from as Seq,
                        to: to as Seq,
                        kind,
                        size: 1,
                        modified: hour(written[to - 1] + after),
                    };
                    let crosses = |old: &Segment| {
                        !(old.contains(&new)
                            || new.contains(old)
                            || old.to < new.from
                            || new.to < old.from)
                    };
                    if from < to
                        && !made
                            .iter()
                            .any(|old| crosses(old) || old.name() == new.name())
                    {
                        made.push(new);
                    }
                }
                let entries = (1..).zip(&written).map(|(seq, at)| Segment {
                    size: 1,
                    modified: hour(*at),
                    ..Segment::entry(seq)
                });
                // What another piece stands for may be gone.
                let all: Vec<Segment> = entries.chain(made.iter().copied()).collect();
                let stood_for = |piece: &Segment| made.iter().any(|other| other.contains(piece));
                let mut pieces: Vec<Segment> = all
                    .iter()
                    .zip(&gone)
                    .filter(|(piece, gone)| !(**gone && stood_for(piece)))
                    .map(|(piece, _)| *piece)
                    .collect();
                pieces.extend(all.iter().skip(gone.len()));
                // Somebody who had slept wrote at a number that was collected, long after.
                let mut strays = Vec::new();
                for (seq, after) in late {
                    let covering = made.iter().filter(|piece| {
                        pieces.contains(piece) && piece.from <= seq && seq <= piece.to
                    });
                    let Some(newest) = covering.map(|piece| piece.modified).max() else {
                        continue;
                    };
                    if pieces
                        .iter()
                        .any(|piece| piece.name() == (SegmentKind::Entry, seq, seq))
                    {
                        continue;
                    }
                    let stray = Segment {
                        size: 1,
                        modified: later(
                            later(newest, rules.grace / 2),
                            Duration::from_secs((after * HOUR) as u64),
                        ),
                        ..Segment::entry(seq)
                    };
                    pieces.push(stray);
                    strays.push(stray);
                }
                let newest = pieces.iter().map(|piece| piece.modified).max().unwrap();
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
                    listed: Listed {
                        pieces,
                        branches,
                        ..Listed::default()
                    },
                    strays,
                    rules,
                    now,
                }
            },
        )
    }

    /// The numbers that a restore of the point behind `most` gets.
    fn numbers(pieces: &[Segment], most: Seq) -> Vec<Seq> {
        cover(pieces, 0, most, Prefer::Long, &BTreeSet::new())
            .iter()
            .flat_map(|piece| piece.from..=piece.to)
            .collect()
    }

    proptest! {
        #[test]
        fn what_is_collected_is_missed_by_nobody(generated in generated()) {
            let Generated { listed, strays, rules, now } = generated;
            for step in decide(&listed, EntryKind::Delta, None, &rules, now) {
                let Step::Collect(collected) = step else {
                    continue;
                };
                let left: Vec<Segment> = listed.pieces.iter().filter(|piece| !collected.contains(piece)).copied().collect();
                prop_assert_eq!(left.len() + collected.len(), listed.pieces.len());
                for piece in &collected {
                    prop_assert!(!strays.contains(piece), "a late write is deleted: {:?}", piece);
                    prop_assert!(
                        left.iter().any(|other| other.contains(piece) && age(now, other.modified) >= rules.grace),
                        "nothing that is old enough stands for {:?}", piece
                    );
                }
                let end = head(&listed.pieces);
                prop_assert_eq!(numbers(&left, Seq::MAX), numbers(&listed.pieces, Seq::MAX));
                // Every point of the history, and the one that was the newest when it began.
                let young = |piece: &&Segment| piece.kind == SegmentKind::Entry && age(now, piece.modified) < rules.history;
                let first = listed.pieces.iter().filter(young).map(|piece| piece.from).min().unwrap_or(end + 1);
                let bases = listed.branches.iter().map(|(_, pieces)| pieces[0].from - 1);
                for point in (first - 1..=end).chain(bases) {
                    prop_assert_eq!(numbers(&left, point), numbers(&listed.pieces, point), "the point behind entry {} is lost", point);
                }
            }
        }
    }
}
