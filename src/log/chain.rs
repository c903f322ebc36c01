//! The chain of entries that makes up a log. Pure.
//!
//! Each entry names its predecessor by number and digest. An entry that no other entry links to is
//! not part of the log; a missing entry is damage.
//!
//! With the database as the fence, a writer may die between reserving a `seq` and writing its
//! entry. The next writer skips that `seq`, but the delayed write may still arrive. The dead writer
//! may have skipped other numbers itself. So an entry is only *confirmed* once the same writer has
//! written the next entry: the first write was acknowledged by then, and every later writer sees
//! it. All predecessors of a confirmed entry are confirmed too. After the last confirmed entry, the
//! newest entry determines the chain. A claim after a rollback skips missing and unreadable entries
//! in the same way.

use std::collections::VecDeque;

use crate::codec::entry::Entry;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Digest, EntryKind, Seq};
use crate::sys::mutation::{Mutation, is_active};

/// Maximum raw bytes of entries that are not released yet. Without damage, an entry waits only for
/// the next one of its writer.
const MAX_PENDING_BYTES: usize = 128 << 20;

/// Links entries, which arrive ordered by `seq`, into a chain.
#[derive(Debug)]
pub struct EntryChain {
    /// The log or branch, for errors.
    name: String,
    /// The last entry that was released.
    last: Seq,
    digest: Option<Digest>,
    /// Entries that are not released yet.
    pending: VecDeque<Entry>,
    /// Their raw bytes.
    pending_bytes: usize,
    /// The newest `seq` that is known to be confirmed.
    confirmed: Seq,
    /// The first `seq` after the pending entries that is missing or unreadable.
    damaged: Option<(Seq, Error)>,
    /// The entry that was rejected because of its header.
    rejected: Option<Seq>,
    /// The predecessor of the rejected entry, if it skips entries that were released.
    skips_back_to: Option<Seq>,
    /// Whether the chain may start at any entry.
    starts_anywhere: bool,
}

impl EntryChain {
    /// A chain that continues after entry `last`. The digest is none before the first entry, or if
    /// it is unknown.
    pub fn new(name: impl Into<String>, last: Seq, digest: Option<Digest>) -> Self {
        EntryChain {
            name: name.into(),
            last,
            digest,
            pending: VecDeque::new(),
            pending_bytes: 0,
            confirmed: 0,
            damaged: None,
            rejected: None,
            skips_back_to: None,
            starts_anywhere: false,
        }
    }

    /// A chain that starts with the first entry that arrives.
    pub fn starting_anywhere(name: impl Into<String>) -> Self {
        EntryChain {
            starts_anywhere: true,
            ..EntryChain::new(name, 0, None)
        }
    }

    /// Adds the result of reading the next `seq`; returns an entry that is now confirmed.
    pub fn push(&mut self, seq: Seq, read: Result<Entry>) -> Result<Option<Entry>> {
        let entry = match read {
            Ok(entry) => entry,
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.damaged.get_or_insert((seq, error));
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        // The entry skips everything between its predecessor and itself, readable or not.
        let predecessor = linked(&entry);
        self.damaged.take_if(|(seq, _)| *seq > predecessor);
        let is_first = self.starts_anywhere
            && self
                .pending
                .iter()
                .all(|pending| pending.header.seq > predecessor);
        if predecessor > self.last && !is_first && self.pending(predecessor).is_none() {
            let missing =
                Error::corrupt(format!("entry {predecessor} of {} is missing", self.name));
            self.damaged.get_or_insert((predecessor, missing));
        }
        if self.damaged.is_some() {
            return Ok(None);
        }
        let header = &entry.header;
        if header.kind.is_compacted() {
            // A merge or a snapshot is made of confirmed entries.
            self.confirmed = header.seq;
        } else if header.kind == EntryKind::Delta
            && self
                .pending(predecessor)
                .is_some_and(|pending| pending.header.writer == header.writer)
        {
            self.confirmed = self.confirmed.max(predecessor);
        }
        self.pending_bytes += entry.body.len();
        if self.pending_bytes > MAX_PENDING_BYTES {
            return Err(Error::corrupt(format!(
                "too many entries of {} before entry {seq} are unconfirmed",
                self.name
            )));
        }
        self.pending.push_back(entry);
        let confirmed = if is_active(Mutation::TrustNewestEntry) {
            let newest = self.pending.back().filter(|_| self.pending.len() > 4);
            newest.map(|newest| newest.header.seq)
        } else {
            self.newest_confirmed()
        };
        match confirmed {
            Some(confirmed) => self.release(confirmed),
            None => Ok(None),
        }
    }

    /// Returns the remaining entries, one per call, after the last one was pushed.
    pub fn pop(&mut self) -> Result<Option<Entry>> {
        let newest = self.pending.back().map_or(0, |newest| newest.header.seq);
        // Confirmed entries first: no later entry can skip them.
        self.release(self.newest_confirmed().unwrap_or(newest))
    }

    /// The newest pending entry that is confirmed.
    fn newest_confirmed(&self) -> Option<Seq> {
        self.pending(self.confirmed)
            .map(|pending| pending.header.seq)
    }

    /// The pending entry `seq`.
    fn pending(&self, seq: Seq) -> Option<&Entry> {
        let index = self
            .pending
            .binary_search_by_key(&seq, |pending| pending.header.seq)
            .ok()?;
        self.pending.get(index)
    }

    /// Releases the first pending entry that leads to `target`, and drops the skipped ones before
    /// it.
    fn release(&mut self, target: Seq) -> Result<Option<Entry>> {
        let (mut first, mut seq) = (target, target);
        while let Some(pending) = self.pending(seq) {
            first = seq;
            seq = linked(pending);
        }
        while self
            .pending
            .front()
            .is_some_and(|front| front.header.seq < first)
        {
            self.pop_pending();
        }
        let Some(entry) = self.pop_pending() else {
            return self
                .damaged
                .take()
                .map_or(Ok(None), |(_, error)| Err(error));
        };
        let header = &entry.header;
        if std::mem::take(&mut self.starts_anywhere) {
            self.last = header.predecessor();
        }
        if !header.resets_log() {
            self.check_link(&entry)?;
        }
        self.last = entry.header.seq;
        self.digest = Some(entry.digest);
        Ok(Some(entry))
    }

    fn pop_pending(&mut self) -> Option<Entry> {
        let entry = self.pending.pop_front()?;
        self.pending_bytes -= entry.body.len();
        Some(entry)
    }

    /// Checks that an entry follows the last one that was released.
    fn check_link(&mut self, entry: &Entry) -> Result<()> {
        let header = &entry.header;
        if header.predecessor() < self.last {
            self.rejected = Some(header.seq);
            // A delta never skips entries.
            self.skips_back_to = (header.kind != EntryKind::Delta).then_some(header.predecessor());
            return Err(Error::corrupt(format!(
                "two writers claimed entry {} of {}",
                header.seq, self.name
            )));
        }
        if self.last > 0 && self.digest.is_some() && header.prev_digest != self.digest {
            self.rejected = Some(header.seq);
            return Err(Error::corrupt(format!(
                "entry {} of {} does not follow entry {}",
                header.seq, self.name, self.last
            )));
        }
        Ok(())
    }

    /// The predecessor of the rejected entry, if the rejected entry has no parts (such as a claim)
    /// and skips confirmed entries. Its writer could not restore the skipped entries, even if they
    /// are readable here.
    pub fn skips_back_to(&self) -> Option<Seq> {
        self.skips_back_to
    }

    /// The entry that was rejected because of its header.
    pub fn rejected(&self) -> Option<Seq> {
        self.rejected
    }
}

/// The entry that this one links to; 0 if none.
fn linked(entry: &Entry) -> Seq {
    if entry.header.resets_log() {
        0
    } else {
        entry.header.predecessor()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::entry::{decode, encode};
    use crate::model::{EntryHeader, EntryKind};

    fn entry(seq: Seq, prev: Option<Digest>, after: Option<Seq>, writer: &str) -> Entry {
        let header = EntryHeader {
            version: 1,
            kind: EntryKind::Claim,
            namespace: "n".parse().unwrap(),
            agent: "a".parse().unwrap(),
            session: "s".parse().unwrap(),
            seq,
            writer: writer.parse().unwrap(),
            at: "2026-05-01T12:00:00Z".parse().unwrap(),
            prev_digest: prev,
            prev_seq: after,
            covers: None,
            moves: vec![],
            parts: vec![],
            checkpoints: Vec::new(),
            keep_checkpoints: None,
            fork: None,
            rollback_to: None,
            rollback_checkpoint: None,
            adopted: Vec::new(),
        };
        decode("x", &encode::<Vec<u8>>(header, &[]).unwrap().bytes).unwrap()
    }

    fn run(entries: &[&Entry]) -> Result<Vec<Seq>> {
        let mut chain = EntryChain::new("session s", 0, None);
        let mut out = Vec::new();
        for entry in entries {
            out.extend(
                chain
                    .push(entry.header.seq, Ok((*entry).clone()))?
                    .map(|entry| entry.header.seq),
            );
        }
        while let Some(entry) = chain.pop()? {
            out.push(entry.header.seq);
        }
        Ok(out)
    }

    #[test]
    fn a_complete_chain_is_released_in_order() {
        let mut all: Vec<Entry> = Vec::new();
        for seq in 1..=9 {
            all.push(entry(seq, all.last().map(|entry| entry.digest), None, "w"));
        }
        assert_eq!(
            run(&all.iter().collect::<Vec<_>>()).unwrap(),
            (1..=9).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_missing_entry_a_wrong_link_and_a_delayed_write() {
        let one = entry(1, None, None, "w");
        let two = entry(2, Some(one.digest), None, "w");
        let three = entry(3, Some(two.digest), None, "w");
        assert!(
            run(&[&one, &three])
                .unwrap_err()
                .to_string()
                .contains("entry 2 of session s is missing")
        );
        let other = entry(2, Some(three.digest), None, "w");
        assert!(
            run(&[&one, &other])
                .unwrap_err()
                .to_string()
                .contains("does not follow")
        );
        // A writer reserved entry 2 and died; its delayed write is not part of the log.
        let claim = entry(3, Some(one.digest), Some(1), "v");
        assert_eq!(run(&[&one, &claim]).unwrap(), [1, 3]);
        assert_eq!(run(&[&one, &two, &claim]).unwrap(), [1, 3]);
    }

    #[test]
    fn a_delayed_write_that_skips_an_entry_removes_nothing() {
        // Both claims were made after entry 1; entry 3 arrived after entry 4 had continued from 2.
        let one = entry(1, None, None, "w");
        let two = entry(2, Some(one.digest), None, "v");
        let late = entry(3, Some(one.digest), Some(1), "v");
        let four = entry(4, Some(two.digest), Some(2), "u");
        let five = entry(5, Some(four.digest), None, "u");
        assert_eq!(run(&[&one, &two, &four]).unwrap(), [1, 2, 4]);
        assert_eq!(run(&[&one, &two, &late, &four]).unwrap(), [1, 2, 4]);
        assert_eq!(
            run(&[&one, &two, &late, &four, &five]).unwrap(),
            [1, 2, 4, 5]
        );
        assert_eq!(run(&[&one, &two, &late]).unwrap(), [1, 3]);
        // Any number of them.
        let many: Vec<Entry> = (3..30)
            .map(|seq| entry(seq, Some(one.digest), Some(1), "v"))
            .collect();
        let last = entry(30, Some(two.digest), Some(2), "u");
        let all: Vec<&Entry> = [&one, &two]
            .into_iter()
            .chain(&many)
            .chain([&last])
            .collect();
        assert_eq!(run(&all).unwrap(), [1, 2, 30]);
    }

    #[test]
    fn a_claim_that_skips_confirmed_entries_differs_from_a_wrong_delta() {
        let one = entry(1, None, None, "w");
        let mut two = entry(2, Some(one.digest), None, "w");
        two.header.kind = EntryKind::Delta;
        let mut three = entry(3, Some(two.digest), None, "w");
        three.header.kind = EntryKind::Delta;
        // A salvage continues from entry 1, because the bytes of entry 2 do not match their digest.
        let claim = entry(4, Some(one.digest), Some(1), "v");
        let mut wrong = claim.clone();
        wrong.header.kind = EntryKind::Delta;
        for (last, skips_back_to) in [(&claim, Some(1)), (&wrong, None)] {
            let mut chain = EntryChain::new("session s", 0, None);
            let mut rejected = false;
            for entry in [&one, &two, &three, last] {
                rejected |= chain.push(entry.header.seq, Ok(entry.clone())).is_err();
            }
            while !rejected {
                match chain.pop() {
                    Ok(entry) => assert!(entry.is_some(), "the entry is not rejected"),
                    Err(_) => rejected = true,
                }
            }
            assert_eq!(
                (chain.rejected(), chain.skips_back_to()),
                (Some(4), skips_back_to)
            );
        }
    }

    #[test]
    fn an_entry_is_confirmed_once_its_writer_has_written_the_next() {
        let mut chain = EntryChain::new("session s", 0, None);
        let mut previous = entry(1, None, None, "w");
        assert!(chain.push(1, Ok(previous.clone())).unwrap().is_none());
        for seq in 2..20 {
            let mut next = entry(seq, Some(previous.digest), None, "w");
            next.header.kind = EntryKind::Delta;
            assert_eq!(
                chain
                    .push(seq, Ok(next.clone()))
                    .unwrap()
                    .map(|entry| entry.header.seq),
                Some(seq - 1)
            );
            previous = next;
        }
    }

    #[test]
    fn an_unreadable_entry_is_damage_until_a_claim_skips_it() {
        let one = entry(1, None, None, "w");
        let two = entry(2, Some(one.digest), None, "w");
        let mut chain = EntryChain::new("session s", 0, None);
        chain.push(1, Ok(one.clone())).unwrap();
        chain.push(2, Ok(two.clone())).unwrap();
        chain.push(3, Err(Error::corrupt("read entry 3"))).unwrap();
        for seq in 4..20 {
            assert!(
                chain
                    .push(seq, Ok(entry(seq, Some(two.digest), None, "w")))
                    .unwrap()
                    .is_none()
            );
        }
        let mut skipped = EntryChain::new("session s", 0, None);
        skipped.pending = chain.pending.clone();
        skipped.damaged = Some((3, Error::corrupt("read entry 3")));
        skipped
            .push(20, Ok(entry(20, Some(two.digest), Some(2), "v")))
            .unwrap();
        for expected in [1, 2] {
            assert_eq!(chain.pop().unwrap().unwrap().header.seq, expected);
            assert_eq!(skipped.pop().unwrap().unwrap().header.seq, expected);
        }
        assert_eq!(chain.pop().unwrap_err().to_string(), "read entry 3");
        assert_eq!(skipped.pop().unwrap().unwrap().header.seq, 20);
    }
}
