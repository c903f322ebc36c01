//! Which objects a log is made of, and which of them to read: pure. An entry stands for one number, a merge for a run of
//! them, a snapshot for everything up to one.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use crate::model::{LogId, Seq, WriterId, keys};

/// What a piece is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SegmentKind {
    /// One entry.
    Entry,
    /// A run of entries as one.
    Merge,
    /// All files after an entry.
    Snapshot,
}

/// An object of a log, as listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Segment {
    /// The first number it stands for.
    pub from: Seq,
    /// The last.
    pub to: Seq,
    /// What it is.
    pub kind: SegmentKind,
    /// Its size as stored.
    pub size: u64,
    /// When it was written, by the store's clock.
    pub modified: Timestamp,
}

/// What tells a piece from all others of its log: its kind, its first and its last number.
pub type Name = (SegmentKind, Seq, Seq);

impl Segment {
    /// What tells it from all others of its log.
    pub fn name(&self) -> Name {
        (self.kind, self.from, self.to)
    }

    /// The entry of that number, of which nothing else is known.
    pub fn entry(seq: Seq) -> Segment {
        Segment {
            from: seq,
            to: seq,
            kind: SegmentKind::Entry,
            size: 0,
            modified: Timestamp::MAX,
        }
    }

    /// Its key.
    pub fn key(&self, id: &LogId) -> String {
        match self.kind {
            SegmentKind::Entry => keys::entry(id, self.to),
            SegmentKind::Merge => keys::merge(id, self.from, self.to),
            SegmentKind::Snapshot => keys::snapshot(id, self.to),
        }
    }

    /// Its key in the log, or in a writer's branch.
    pub fn key_in(&self, id: &LogId, branch: Option<&WriterId>) -> String {
        branch.map_or_else(
            || self.key(id),
            |writer| keys::branch_entry(id, writer, self.to),
        )
    }

    /// Whether it stands for all that `other` stands for, and is not it.
    pub fn contains(&self, other: &Segment) -> bool {
        let wider = self.from <= other.from && other.to <= self.to;
        wider && self.kind != SegmentKind::Entry && self.name() != other.name()
    }
}

/// Which pieces to take where several stand for the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefer {
    /// The longest: the fewest objects.
    Long,
    /// The shortest: every point that can still be gone back to.
    Short,
}

/// The last number that any piece stands for.
pub fn head(pieces: &[Segment]) -> Seq {
    pieces.iter().map(|piece| piece.to).max().unwrap_or(0)
}

/// Picks pieces, one behind the other, that stand for the numbers behind `after` up to `most`, as many of them as any
/// pieces do. A number that is missing is left out here and noticed when they are read. `without` are not taken.
pub fn cover(
    pieces: &[Segment],
    after: Seq,
    most: Seq,
    prefer: Prefer,
    without: &BTreeSet<Name>,
) -> Vec<Segment> {
    let mut usable: Vec<&Segment> = pieces
        .iter()
        .filter(|piece| piece.from > after && piece.to <= most && !without.contains(&piece.name()))
        .collect();
    // Of two that stand for the same, the one that needs nothing before it.
    usable.sort_by_key(|piece| (piece.from, piece.to, std::cmp::Reverse(piece.kind)));
    let end = usable.iter().map(|piece| piece.to).max().unwrap_or(after);
    // From the end: for each number that a piece begins at, the way on that leaves out the least.
    let mut ways: BTreeMap<Seq, Way> = BTreeMap::new();
    for (place, piece) in usable.iter().enumerate().rev() {
        let next = ways.range(piece.to + 1..).next();
        let way = Way {
            missing: next.map_or(end - piece.to, |(from, way)| {
                from - piece.to - 1 + way.missing
            }),
            pieces: 1 + next.map_or(0, |(_, way)| way.pieces),
            place,
        };
        let better = |old: &Way| match prefer {
            Prefer::Long => (way.missing, way.pieces) <= (old.missing, old.pieces),
            Prefer::Short => (way.missing, old.pieces) <= (old.missing, way.pieces),
        };
        if ways.get(&piece.from).is_none_or(better) {
            ways.insert(piece.from, way);
        }
    }
    let mut at = after;
    let mut picked = Vec::new();
    while let Some((_, way)) = ways.range(at + 1..).next() {
        picked.push(*usable[way.place]);
        at = usable[way.place].to;
    }
    picked
}

/// A way from some number to the end.
struct Way {
    missing: u64,
    pieces: usize,
    place: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(kind: SegmentKind, from: Seq, to: Seq) -> Segment {
        Segment {
            from,
            to,
            kind,
            size: 1,
            modified: Timestamp::UNIX_EPOCH,
        }
    }

    fn entries(range: impl Iterator<Item = Seq>) -> Vec<Segment> {
        range
            .map(|seq| piece(SegmentKind::Entry, seq, seq))
            .collect()
    }

    fn picked(pieces: &[Segment], most: Seq, prefer: Prefer) -> Vec<(Seq, Seq)> {
        cover(pieces, 0, most, prefer, &BTreeSet::new())
            .iter()
            .map(|piece| (piece.from, piece.to))
            .collect()
    }

    #[test]
    fn the_longest_pieces_that_end_in_time_are_read() {
        let mut pieces = entries(1..=9);
        pieces.extend([
            piece(SegmentKind::Snapshot, 1, 4),
            piece(SegmentKind::Merge, 5, 7),
            piece(SegmentKind::Merge, 5, 6),
        ]);
        assert_eq!(
            picked(&pieces, Seq::MAX, Prefer::Long),
            [(1, 4), (5, 7), (8, 8), (9, 9)]
        );
        assert_eq!(picked(&pieces, 6, Prefer::Long), [(1, 4), (5, 6)]);
        assert_eq!(picked(&pieces, 3, Prefer::Long), [(1, 1), (2, 2), (3, 3)]);
        assert_eq!(picked(&pieces, Seq::MAX, Prefer::Short).len(), 9);
        let without = BTreeSet::from([(SegmentKind::Snapshot, 1, 4)]);
        assert_eq!(cover(&pieces, 0, 5, Prefer::Long, &without).len(), 5);
    }

    #[test]
    fn a_late_write_at_a_collected_number_is_not_read() {
        let mut pieces = entries(8..=9);
        pieces.extend([
            piece(SegmentKind::Snapshot, 1, 7),
            piece(SegmentKind::Entry, 3, 3),
        ]);
        assert_eq!(
            picked(&pieces, Seq::MAX, Prefer::Long),
            [(1, 7), (8, 8), (9, 9)]
        );
    }

    proptest! {
        #[test]
        fn whatever_is_merged_or_gone_every_number_is_read_once(
            merges in proptest::collection::vec((1u64..60, 2u64..20), 0..12),
            gone in proptest::collection::btree_set(0usize..12, 0..6),
            most in 1u64..80,
            long: bool,
        ) {
            // Nested or apart, as the schedule makes them.
            let mut kept: Vec<Segment> = Vec::new();
            for (from, length) in merges {
                let new = piece(SegmentKind::Merge, from, from + length);
                let crosses = |old: &Segment| !(old.contains(&new) || new.contains(old) || old.to < new.from || new.to < old.from);
                if !kept.iter().any(|old| crosses(old) || *old == new) {
                    kept.push(new);
                }
            }
            // What a merge stands for may be collected.
            let collected: Vec<Segment> = kept.iter().enumerate().filter(|(at, _)| gone.contains(at)).map(|(_, piece)| *piece).collect();
            let singles = entries(1..=80).into_iter().filter(|entry| !collected.iter().any(|merge| merge.contains(entry)));
            let pieces: Vec<Segment> = singles.chain(kept.iter().copied()).collect();
            let inside = collected.iter().any(|merge| merge.from <= most && most < merge.to);
            let prefer = if long { Prefer::Long } else { Prefer::Short };
            let read = cover(&pieces, 0, most, prefer, &BTreeSet::new());
            for pair in read.windows(2) {
                prop_assert!(pair[0].to < pair[1].from);
            }
            let numbers: u64 = read.iter().map(|piece| piece.to - piece.from + 1).sum();
            if !inside {
                prop_assert_eq!(numbers, most);
            }
            let other = cover(&pieces, 0, most, if long { Prefer::Short } else { Prefer::Long }, &BTreeSet::new());
            if !inside {
                let (fewer, more) = if long { (&read, &other) } else { (&other, &read) };
                prop_assert!(fewer.len() <= more.len());
            }
        }
    }
}
