//! A cache of the small entries that this process wrote last, so that the compactor does not have
//! to read them from the store.
//!
//! Holds acknowledged entries only, up to a size limit. Restore and verify always read from the
//! store.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::model::{LogId, Seq};

/// Maximum size of the cache: several hundred entries of a busy session.
const MAX_BYTES: usize = 512 << 10;

/// Maximum size of a cached entry: a larger one would displace many.
const MAX_ENTRY_BYTES: usize = 32 << 10;

#[derive(Debug, Default)]
struct Cache {
    entries: VecDeque<(LogId, Seq, Bytes)>,
    bytes: usize,
}

/// The entries that this process wrote last.
#[derive(Debug, Default)]
pub struct RecentEntries(Mutex<Cache>);

impl RecentEntries {
    fn lock(&self) -> MutexGuard<'_, Cache> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an acknowledged entry.
    pub fn insert(&self, id: &LogId, seq: Seq, bytes: &Bytes) {
        if bytes.len() > MAX_ENTRY_BYTES {
            return;
        }
        let mut cache = self.lock();
        cache.bytes += bytes.len();
        cache.entries.push_back((id.clone(), seq, bytes.clone()));
        while cache.bytes > MAX_BYTES
            && let Some((_, _, oldest)) = cache.entries.pop_front()
        {
            cache.bytes -= oldest.len();
        }
    }

    /// Returns an entry, if it is cached.
    pub fn get(&self, id: &LogId, seq: Seq) -> Option<Bytes> {
        let cache = self.lock();
        let found = cache
            .entries
            .iter()
            .rev()
            .find(|(log, entry, _)| (log, *entry) == (id, seq));
        found.map(|(_, _, bytes)| bytes.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_small_entries_are_cached() {
        let recent = RecentEntries::default();
        let id = |name: &str| LogId {
            namespace: "n".parse().unwrap(),
            agent: "a".parse().unwrap(),
            name: name.parse().unwrap(),
        };
        for seq in 1..=100 {
            recent.insert(&id("s1"), seq, &Bytes::from(vec![seq as u8; 16 << 10]));
        }
        recent.insert(&id("s1"), 101, &Bytes::from(vec![0; MAX_ENTRY_BYTES + 1]));
        let cached: Vec<Seq> = (1..=101)
            .filter(|seq| recent.get(&id("s1"), *seq).is_some())
            .collect();
        assert_eq!(cached, (69..=100).collect::<Vec<_>>());
        assert_eq!(recent.get(&id("s1"), 100).unwrap()[0], 100);
        assert_eq!(recent.get(&id("s2"), 100), None);
    }
}
