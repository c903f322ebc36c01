//! What the transcripts in a log say, entry by entry.
//!
//! Owns what an entry does to what was heard before: a transcript is written anew from a place, gets another name, is
//! forgotten for good, or becomes the beginning of a fork. Does not own what is kept of a message (an `TranscriptVisitor`).

use std::collections::BTreeMap;

use super::fork::SessionRenamer;
use super::read::EntrySink;
use crate::agent::Profile;
use crate::agent::transcript::Reader;
use crate::codec::entry::Entry;
use crate::error::Result;
use crate::model::message::TurnEvent;
use crate::model::{EntryKind, ForkOrigin, LocatedMessage, RelPath, SessionFacts};

/// What keeps of a conversation what it needs.
pub trait TranscriptVisitor {
    /// The next message.
    fn said(&mut self, said: LocatedMessage);

    /// The next mark of a turn.
    fn marked(&mut self, _marked: TurnEvent) {}

    /// A transcript is written anew from there on.
    fn cut(&mut self, path: &RelPath, from: u64);

    /// A transcript has another name.
    fn moved(&mut self, from: &RelPath, to: &RelPath);

    /// What was heard begins a fork: its transcripts have other names, and places in them mean nothing any more.
    fn forked(&mut self, names: &BTreeMap<RelPath, RelPath>);

    /// Nothing of it counts: it begins anew.
    fn clear(&mut self);
}

/// Listens to a log with an ear.
#[derive(Clone)]
pub struct TranscriptReplay<'a, E> {
    profile: &'a dyn Profile,
    reader: Reader,
    /// How long each transcript is, as far as that was heard.
    lengths: BTreeMap<RelPath, u64>,
    /// What the transcripts say of the session.
    pub facts: SessionFacts,
    /// The last entry removed the session.
    pub removed: bool,
    /// What listens.
    pub ear: E,
}

impl<'a, E: TranscriptVisitor> TranscriptReplay<'a, E> {
    /// Nothing heard yet.
    pub fn new(profile: &'a dyn Profile, ear: E) -> Self {
        TranscriptReplay {
            profile,
            reader: Reader::default(),
            lengths: BTreeMap::new(),
            facts: SessionFacts::default(),
            removed: false,
            ear,
        }
    }

    /// Takes the next entry in, whether or not it follows.
    pub fn hear(&mut self, entry: &Entry) {
        let header = &entry.header;
        if header.begins_anew() || header.kind == EntryKind::Snapshot {
            (self.reader, self.lengths, self.facts) = Default::default();
            self.ear.clear();
        }
        self.removed = header.kind.is_removal();
        self.reader.moved(&header.moves);
        for moved in &header.moves {
            if let Some(len) = self.lengths.remove(&moved.from) {
                self.lengths.insert(moved.to.clone(), len);
            }
            self.ear.moved(&moved.from, &moved.to);
        }
        let told = self.reader.read(self.profile, entry.parts());
        for part in header
            .parts
            .iter()
            .filter(|part| told.read.contains_key(&part.path))
        {
            let before = self.lengths.insert(part.path.clone(), part.end());
            if before.is_some_and(|before| part.start < before) {
                self.ear.cut(&part.path, part.start);
            }
        }
        self.facts = std::mem::take(&mut self.facts).then(told.facts);
        told.marks
            .into_iter()
            .for_each(|marked| self.ear.marked(marked));
        told.said.into_iter().for_each(|said| self.ear.said(said));
    }

    /// Nothing behind these lengths counts, and no transcript that has none.
    pub fn cut_to(&mut self, lengths: &BTreeMap<RelPath, u64>) {
        for path in self.lengths.keys() {
            self.ear.cut(path, lengths.get(path).copied().unwrap_or(0));
        }
    }
}

impl<E: TranscriptVisitor> EntrySink for TranscriptReplay<'_, E> {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        self.hear(entry);
        Ok(())
    }

    fn wants_origin(&self) -> bool {
        true
    }

    fn begin(&mut self, fork: &ForkOrigin, renaming: &SessionRenamer) -> Result<()> {
        if let Some(cut) = &fork.cut {
            self.cut_to(cut);
        }
        let names: Result<BTreeMap<RelPath, RelPath>> = self
            .lengths
            .keys()
            .map(|path| Ok((path.clone(), renaming.path(path)?)))
            .collect();
        let names = names?;
        self.ear.forked(&names);
        self.reader = Reader::default();
        self.lengths = fork
            .files
            .iter()
            .filter(|part| names.values().any(|name| *name == part.path))
            .map(|part| (part.path.clone(), part.len))
            .collect();
        Ok(())
    }
}

/// What was heard, by transcript, each thing with the place behind its last byte; 0 where that is in another session's file.
#[derive(Debug, Clone)]
pub struct PerTranscript<T>(BTreeMap<RelPath, Vec<(u64, T)>>);

impl<T> Default for PerTranscript<T> {
    fn default() -> Self {
        PerTranscript(BTreeMap::new())
    }
}

impl<T> PerTranscript<T> {
    /// The next thing in a transcript.
    pub fn push(&mut self, path: RelPath, end: u64, heard: T) {
        self.0.entry(path).or_default().push((end, heard));
    }

    /// The last thing in a transcript.
    pub fn last(&self, path: &RelPath) -> Option<&T> {
        self.0.get(path)?.last().map(|(_, heard)| heard)
    }

    /// What was heard of a transcript, the newest first.
    pub fn recent(&mut self, path: &RelPath) -> impl Iterator<Item = &mut T> {
        self.0
            .get_mut(path)
            .into_iter()
            .flat_map(|heard| heard.iter_mut().rev().map(|(_, heard)| heard))
    }

    /// See `TranscriptVisitor::cut`.
    pub fn cut(&mut self, path: &RelPath, from: u64) {
        if let Some(heard) = self.0.get_mut(path) {
            heard.retain(|(end, _)| *end <= from && from > 0);
        }
    }

    /// See `TranscriptVisitor::moved`.
    pub fn moved(&mut self, from: &RelPath, to: &RelPath) {
        if let Some(heard) = self.0.remove(from) {
            self.0.insert(to.clone(), heard);
        }
    }

    /// See `TranscriptVisitor::forked`.
    pub fn forked(&mut self, names: &BTreeMap<RelPath, RelPath>) {
        let all = std::mem::take(&mut self.0).into_iter();
        self.0 = all
            .filter_map(|(path, heard)| {
                Some((
                    names.get(&path)?.clone(),
                    heard.into_iter().map(|(_, heard)| (0, heard)).collect(),
                ))
            })
            .collect();
    }

    /// See `TranscriptVisitor::clear`.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Everything, by transcript and then in order.
    pub fn iter(&self) -> impl Iterator<Item = (&RelPath, &T)> {
        self.0
            .iter()
            .flat_map(|(path, heard)| heard.iter().map(move |(_, heard)| (path, heard)))
    }

    /// Everything, by transcript and then in order.
    pub fn into_all(self) -> impl Iterator<Item = T> {
        self.0.into_values().flatten().map(|(_, heard)| heard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transcript_that_is_cut_keeps_what_is_whole_before() {
        let (path, other): (RelPath, RelPath) =
            ("p/a.jsonl".parse().unwrap(), "p/b.jsonl".parse().unwrap());
        let mut heard = PerTranscript::default();
        [10, 20, 30]
            .into_iter()
            .for_each(|end| heard.push(path.clone(), end, end));
        heard.push(other.clone(), 15, 15);
        heard.cut(&path, 25);
        assert_eq!(
            heard.iter().map(|(_, end)| *end).collect::<Vec<_>>(),
            [10, 20, 15]
        );
        heard.forked(&BTreeMap::from([
            (path.clone(), other.clone()),
            (other, path.clone()),
        ]));
        heard.cut(&path, 3);
        assert_eq!(
            heard.last(&path),
            Some(&15),
            "a place in the origin says nothing about the fork"
        );
        heard.cut(&path, 0);
        assert_eq!(heard.into_all().collect::<Vec<_>>(), [10, 20]);
    }
}
