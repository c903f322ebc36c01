//! Which entries make a log: pure. Each entry names the one before by number and digest; what is not linked in does
//! not count, what is missing is noticed.
//!
//! A number can hold an entry that nobody links to: where the database fences, a writer may die between reserving a
//! number and writing it, the next one passes over the number, and the dead one's write may still arrive; it may itself
//! have passed over others. So an entry is only certain once its writer has written behind it: it was told then that the
//! entry stands, and whoever takes the session over later sees it. What comes before a certain entry is certain too.
//! Behind the last one the newest entry decides. In the same way a claim passes over what is missing or cannot be read,
//! once somebody has gone back to the point before it.

use std::collections::VecDeque;

use crate::codec::entry::Entry;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Digest, EntryKind, Seq};

/// Puts entries, given in the order of their numbers, into a chain.
#[derive(Debug)]
pub struct EntryChain {
    what: String,
    last: Seq,
    digest: Option<Digest>,
    held: VecDeque<Entry>,
    /// The newest number that is known to be certain.
    certain: Seq,
    /// The first number behind the held ones that is missing or cannot be read.
    damaged: Option<(Seq, Error)>,
    /// The entry that was refused because of what it says.
    refused: Option<Seq>,
    /// The entry that the refused one follows, if it passes over entries that had come out already.
    passed_from: Option<Seq>,
    /// Nothing is certain yet, not even what the first entry follows.
    open: bool,
}

impl EntryChain {
    /// A chain that goes on behind entry `last`, whose digest is `digest` (none before the first, or if unknown).
    pub fn new(what: impl Into<String>, last: Seq, digest: Option<Digest>) -> Self {
        EntryChain {
            what: what.into(),
            last,
            digest,
            held: VecDeque::new(),
            certain: 0,
            damaged: None,
            refused: None,
            passed_from: None,
            open: false,
        }
    }

    /// A chain that begins with whatever comes first.
    pub fn anywhere(what: impl Into<String>) -> Self {
        EntryChain {
            open: true,
            ..EntryChain::new(what, 0, None)
        }
    }

    /// Takes in what was read at the next number; answers an entry that has become certain.
    pub fn push(&mut self, seq: Seq, read: Result<Entry>) -> Result<Option<Entry>> {
        let entry = match read {
            Ok(entry) => entry,
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.damaged.get_or_insert((seq, error));
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        // What cannot be read between the entry before and this one was passed over.
        let follows = link(&entry);
        self.damaged.take_if(|(seq, _)| *seq > follows);
        let is_first = self.open && self.held.iter().all(|held| held.header.seq > follows);
        if follows > self.last && !is_first && self.held(follows).is_none() {
            let missing = Error::corrupt(format!("read {}: entry {follows} is missing", self.what));
            self.damaged.get_or_insert((follows, missing));
        }
        if self.damaged.is_some() {
            return Ok(None);
        }
        let header = &entry.header;
        if header.kind.is_composite() {
            self.certain = header.seq;
        } else if header.kind == EntryKind::Delta
            && self
                .held(follows)
                .is_some_and(|held| held.header.writer == header.writer)
        {
            self.certain = self.certain.max(follows);
        }
        self.held.push_back(entry);
        match self.newest_certain() {
            Some(certain) => self.release(certain),
            None => Ok(None),
        }
    }

    /// Nothing more comes: answers the rest, one after the other.
    pub fn pop(&mut self) -> Result<Option<Entry>> {
        let newest = self.held.back().map_or(0, |newest| newest.header.seq);
        // What is certain first: nothing that comes can pass over it.
        self.release(self.newest_certain().unwrap_or(newest))
    }

    /// The newest held entry behind which its own writer has written. What stands for many entries was made when all of
    /// them were certain.
    fn newest_certain(&self) -> Option<Seq> {
        self.held(self.certain).map(|held| held.header.seq)
    }

    /// The held entry of that number.
    fn held(&self, seq: Seq) -> Option<&Entry> {
        let at = self
            .held
            .binary_search_by_key(&seq, |held| held.header.seq)
            .ok()?;
        self.held.get(at)
    }

    /// The first of the held entries that `on` builds on; what stands before it was passed over.
    fn release(&mut self, on: Seq) -> Result<Option<Entry>> {
        let (mut first, mut at) = (on, on);
        while let Some(linked) = self.held(at) {
            first = at;
            at = link(linked);
        }
        while self
            .held
            .front()
            .is_some_and(|front| front.header.seq < first)
        {
            self.held.pop_front();
        }
        let Some(entry) = self.held.pop_front() else {
            return self
                .damaged
                .take()
                .map_or(Ok(None), |(_, error)| Err(error));
        };
        let header = &entry.header;
        if std::mem::take(&mut self.open) {
            self.last = header.follows();
        }
        if header.begins_anew() {
            self.last = header.seq;
            self.digest = Some(entry.digest);
            return Ok(Some(entry));
        }
        if header.follows() < self.last {
            self.refused = Some(header.seq);
            // Only a mark passes over others.
            self.passed_from =
                (!matches!(header.kind, EntryKind::Delta)).then_some(header.follows());
            return Err(Error::corrupt(format!(
                "read {}: entry {} was written by two",
                self.what, header.seq
            )));
        }
        if self.last > 0 && self.digest.is_some() && header.prev != self.digest {
            self.refused = Some(header.seq);
            return Err(Error::corrupt(format!(
                "read {}: entry {} does not follow entry {}",
                self.what, header.seq, self.last
            )));
        }
        self.last = header.seq;
        self.digest = Some(entry.digest);
        Ok(Some(entry))
    }

    /// The entry that the refused one follows, if that one is a mark that passes over what was certain: whoever wrote it
    /// could not restore that, whatever it looks like here.
    pub fn passed_from(&self) -> Option<Seq> {
        self.passed_from
    }

    /// The entry that was refused because of what it says, if one was.
    pub fn refused(&self) -> Option<Seq> {
        self.refused
    }
}

/// The number of the entry that this one builds on; 0 for none.
fn link(entry: &Entry) -> Seq {
    if entry.header.begins_anew() {
        0
    } else {
        entry.header.follows()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::entry::{decode, encode};
    use crate::model::{EntryHeader, EntryKind};

    fn entry(seq: Seq, prev: Option<Digest>, after: Option<Seq>, writer: &str) -> Entry {
        let header = EntryHeader {
            v: 1,
            kind: EntryKind::Claim,
            agent: "a".parse().unwrap(),
            session: "s".parse().unwrap(),
            seq,
            writer: writer.parse().unwrap(),
            at: "2026-05-01T12:00:00Z".parse().unwrap(),
            prev,
            after,
            covers: None,
            moves: vec![],
            parts: vec![],
            checkpoints: Vec::new(),
            fork: None,
            back_to: None,
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
    fn a_whole_chain_comes_out_in_order() {
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
    fn a_missing_entry_a_wrong_link_and_a_late_stranger() {
        let one = entry(1, None, None, "w");
        let two = entry(2, Some(one.digest), None, "w");
        let three = entry(3, Some(two.digest), None, "w");
        assert!(
            run(&[&one, &three])
                .unwrap_err()
                .to_string()
                .contains("entry 2 is missing")
        );
        let other = entry(2, Some(three.digest), None, "w");
        assert!(
            run(&[&one, &other])
                .unwrap_err()
                .to_string()
                .contains("does not follow")
        );
        // Number 2 was reserved by a writer that died; its late write is not part of the log.
        let claim = entry(3, Some(one.digest), Some(1), "v");
        assert_eq!(run(&[&one, &claim]).unwrap(), [1, 3]);
        assert_eq!(run(&[&one, &two, &claim]).unwrap(), [1, 3]);
    }

    #[test]
    fn a_late_stranger_that_passed_over_an_entry_takes_nothing_away() {
        // Both claims were written after entry 1; number 3 arrived when 4 had gone on from 2.
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
        // However many of them there are.
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
    fn a_claim_that_passes_over_what_was_certain_is_told_from_one_that_is_wrong() {
        let one = entry(1, None, None, "w");
        let mut two = entry(2, Some(one.digest), None, "w");
        two.header.kind = EntryKind::Delta;
        let mut three = entry(3, Some(two.digest), None, "w");
        three.header.kind = EntryKind::Delta;
        // Whoever salvages goes on from entry 1, for entry 2 has bytes that do not have their digest.
        let claim = entry(4, Some(one.digest), Some(1), "v");
        let mut wrong = claim.clone();
        wrong.header.kind = EntryKind::Delta;
        for (last, passed_from) in [(&claim, Some(1)), (&wrong, None)] {
            let mut chain = EntryChain::new("session s", 0, None);
            let mut refused = false;
            for entry in [&one, &two, &three, last] {
                refused |= chain.push(entry.header.seq, Ok(entry.clone())).is_err();
            }
            while !refused {
                match chain.pop() {
                    Ok(entry) => assert!(entry.is_some(), "it was not refused"),
                    Err(_) => refused = true,
                }
            }
            assert_eq!(
                (chain.refused(), chain.passed_from()),
                (Some(4), passed_from)
            );
        }
    }

    #[test]
    fn an_entry_is_certain_once_its_writer_has_written_behind_it() {
        let mut chain = EntryChain::new("session s", 0, None);
        let mut before = entry(1, None, None, "w");
        assert!(chain.push(1, Ok(before.clone())).unwrap().is_none());
        for seq in 2..20 {
            let mut next = entry(seq, Some(before.digest), None, "w");
            next.header.kind = EntryKind::Delta;
            assert_eq!(
                chain
                    .push(seq, Ok(next.clone()))
                    .unwrap()
                    .map(|entry| entry.header.seq),
                Some(seq - 1)
            );
            before = next;
        }
    }

    #[test]
    fn what_cannot_be_read_counts_until_a_claim_passes_over_it() {
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
        let mut passed = EntryChain::new("session s", 0, None);
        passed.held = chain.held.clone();
        passed.damaged = Some((3, Error::corrupt("read entry 3")));
        passed
            .push(20, Ok(entry(20, Some(two.digest), Some(2), "v")))
            .unwrap();
        for expected in [1, 2] {
            assert_eq!(chain.pop().unwrap().unwrap().header.seq, expected);
            assert_eq!(passed.pop().unwrap().unwrap().header.seq, expected);
        }
        assert_eq!(chain.pop().unwrap_err().to_string(), "read entry 3");
        assert_eq!(passed.pop().unwrap().unwrap().header.seq, 20);
    }
}
