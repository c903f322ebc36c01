//! The compaction schedule: which ranges of entries are merged, and when. Pure.
//!
//! It depends only on the `seq`, so that all writers make the same merges without coordination.
//!
//! The newest `NEWEST` entries are not merged. The older ones are kept in at most `SLOTS` segments:
//! if each entry is written at most r times, C(SLOTS + r, r) entries fit (the first write counts).
//! Their segments are the number of entries written in the combinatorial number system: the first
//! covers C(SLOTS + r, r) entries with the largest r that fits, the rest goes into one slot less.
//! With 1,100 entries, each entry is written at most twice; with 18,000, three times.

use crate::model::Seq;

/// Number of the newest entries that are not merged. A session that ends before they are merged
/// never uploads them a second time.
const NEWEST: u64 = 26;

/// Maximum number of segments for the older entries.
const SLOTS: u64 = 46;

/// Maximum number of segments. A reader fetches this many in parallel.
pub const MAX_SEGMENTS: u64 = SLOTS + NEWEST;

/// Number of entries that `slots` segments hold if each entry is written at most `writes` times:
/// C(slots + writes, writes).
fn capacity(slots: u64, writes: u64) -> u64 {
    // Each division is exact, because every intermediate result is a binomial coefficient.
    (1..=writes).fold(1u64, |capacity, step| {
        capacity.saturating_mul(slots + step) / step
    })
}

/// The ranges that the entries 1 to `n` are merged into, in order. The newest entries are in no
/// range, and a range may consist of one entry.
pub fn ranges(n: Seq) -> Vec<(Seq, Seq)> {
    let n = n.saturating_sub(NEWEST);
    let mut ranges = Vec::new();
    let (mut covered, mut slots) = (0, SLOTS);
    while covered < n {
        let remaining = n - covered;
        let mut length = 1;
        // When no slot is left, at most one entry remains.
        for writes in (1..).take_while(|_| slots > 0) {
            let next = capacity(slots, writes);
            if next > remaining {
                break;
            }
            length = next;
        }
        ranges.push((covered + 1, covered + length));
        covered += length;
        slots = slots.saturating_sub(1);
    }
    ranges
}

/// Whether entry `n` makes a range due to be merged.
pub fn is_due(n: Seq) -> bool {
    ranges(n).last().is_some_and(|(first, last)| first < last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_never_exceed_the_slots_and_entries_are_rarely_rewritten() {
        let mut writes: Vec<u32> = vec![0];
        let mut before: Vec<(Seq, Seq)> = Vec::new();
        for n in 1..=24_000 {
            let now = ranges(n);
            let merged = n.saturating_sub(NEWEST);
            let segments = now.len() as u64 + n - merged;
            assert!(
                segments <= MAX_SEGMENTS,
                "{segments} segments after {n} entries"
            );
            assert_eq!(
                now.iter()
                    .fold(0, |at, (from, to)| if at + 1 == *from { *to } else { 0 }),
                merged,
                "the ranges have a gap"
            );
            writes.push(1);
            for (from, to) in now
                .iter()
                .filter(|run| !before.contains(run) && run.0 < run.1)
            {
                // Only the last range is ever new, and it consists of complete ones.
                assert_eq!(*to, merged);
                assert!(before.iter().all(|old| old.1 < *from || *from <= old.0));
                (*from..=*to).for_each(|seq| writes[seq as usize] += 1);
            }
            assert_eq!(is_due(n), now.last().is_some_and(|(from, to)| from < to));
            let most = *writes.iter().max().unwrap();
            assert!(
                most <= if merged < 1128 {
                    2
                } else if merged < 18_424 {
                    3
                } else {
                    4
                },
                "written {most} times after {n}"
            );
            before = now;
        }
    }
}
