//! Which runs of numbers are merged, and when: pure, a function of the number alone, so that every writer makes the same
//! merges and none has to remember what another did.
//!
//! With at most `SLOTS` pieces at a time, each entry written at most r times, C(SLOTS + r, r) entries fit (the first write
//! counts). The pieces behind n entries are n written in the combinatorial number system: the first stands for
//! C(SLOTS + r, r) entries with the largest r that fits, the rest goes into one slot less. For 5,000 entries that is each
//! entry written three times.

use crate::model::Seq;

/// Pieces at a time. One more entry comes while a merge is made, and one more reader's bound than that is 32.
pub const SLOTS: u64 = 30;

/// How many entries `slots` pieces hold, if each is written at most `writes` times: C(slots + writes, writes).
fn fit(slots: u64, writes: u64) -> u64 {
    // Each step divides without a rest: it is a binomial coefficient itself.
    (1..=writes).fold(1u64, |fit, step| fit.saturating_mul(slots + step) / step)
}

/// The runs that the entries 1 to `n` should be merged into, in order.
pub fn runs(n: Seq) -> Vec<(Seq, Seq)> {
    let mut runs = Vec::new();
    let (mut before, mut slots) = (0, SLOTS);
    while before < n {
        let left = n - before;
        let mut length = 1;
        // With no slot left there is one entry at most.
        for writes in (1..).take_while(|_| slots > 0) {
            let next = fit(slots, writes);
            if next > left {
                break;
            }
            length = next;
        }
        runs.push((before + 1, before + length));
        before += length;
        slots = slots.saturating_sub(1);
    }
    runs
}

/// Whether entry `n` completes a run.
pub fn is_due(n: Seq) -> bool {
    runs(n).last().is_some_and(|(from, to)| from < to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_never_more_pieces_than_slots_and_no_entry_is_written_often() {
        let mut writes: Vec<u32> = vec![0];
        let mut before: Vec<(Seq, Seq)> = Vec::new();
        for n in 1..=12_000 {
            let now = runs(n);
            assert!(
                now.len() as u64 <= SLOTS,
                "{} pieces after {n} entries",
                now.len()
            );
            assert_eq!(
                now.iter()
                    .fold(0, |at, (from, to)| if at + 1 == *from { *to } else { 0 }),
                n,
                "the runs have a gap"
            );
            writes.push(1);
            for (from, to) in now
                .iter()
                .filter(|run| !before.contains(run) && run.0 < run.1)
            {
                // Only the last run is ever new, and it swallows whole ones.
                assert_eq!(*to, n);
                assert!(before.iter().all(|old| old.1 < *from || *from <= old.0));
                (*from..=*to).for_each(|seq| writes[seq as usize] += 1);
            }
            assert_eq!(is_due(n), now.last().is_some_and(|(from, to)| from < to));
            let most = *writes.iter().max().unwrap();
            assert!(
                most <= if n < 496 {
                    2
                } else if n < 5456 {
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
