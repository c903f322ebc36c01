//! The small entries that this process wrote last, so that who merges them need not ask the store for each.
//!
//! Owns bytes that were acknowledged, and no more of them than a bound. Whoever restores or verifies reads the store.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::model::{LogId, Seq};

/// All that is kept: several hundred entries of a busy session.
const MOST: usize = 512 << 10;

/// A larger entry is read again: it would take the place of many.
const SMALL: usize = 32 << 10;

#[derive(Debug, Default)]
struct Kept {
    entries: VecDeque<(LogId, Seq, Bytes)>,
    bytes: usize,
}

/// What was written last.
#[derive(Debug, Default)]
pub struct RecentEntries(Mutex<Kept>);

impl RecentEntries {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An entry is in the log.
    pub fn keep(&self, id: &LogId, seq: Seq, bytes: &Bytes) {
        if bytes.len() > SMALL {
            return;
        }
        let mut kept = self.lock();
        kept.bytes += bytes.len();
        kept.entries.push_back((id.clone(), seq, bytes.clone()));
        while kept.bytes > MOST
            && let Some((_, _, oldest)) = kept.entries.pop_front()
        {
            kept.bytes -= oldest.len();
        }
    }

    /// The entry, if it is one of the last.
    pub fn get(&self, id: &LogId, seq: Seq) -> Option<Bytes> {
        let kept = self.lock();
        let found = kept
            .entries
            .iter()
            .rev()
            .find(|(log, number, _)| (log, *number) == (id, seq));
        found.map(|(_, _, bytes)| bytes.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_small_entries_are_kept_and_no_more() {
        let recent = RecentEntries::default();
        let id = |name: &str| LogId {
            namespace: "n".parse().unwrap(),
            agent: "a".parse().unwrap(),
            name: name.parse().unwrap(),
        };
        for seq in 1..=100 {
            recent.keep(&id("s1"), seq, &Bytes::from(vec![seq as u8; 16 << 10]));
        }
        recent.keep(&id("s1"), 101, &Bytes::from(vec![0; SMALL + 1]));
        let kept: Vec<Seq> = (1..=101)
            .filter(|seq| recent.get(&id("s1"), *seq).is_some())
            .collect();
        assert_eq!(kept, (69..=100).collect::<Vec<_>>());
        assert_eq!(recent.get(&id("s1"), 100).unwrap()[0], 100);
        assert_eq!(recent.get(&id("s2"), 100), None);
    }
}
