//! Replaying the transcripts of a log, entry by entry.
//!
//! Owns the effect of an entry on earlier messages: it can truncate, rename or discard a
//! transcript, or make it the start of a fork. Does not own which part of a message is kept (a
//! `TranscriptVisitor`).

use std::collections::BTreeMap;

use super::fork::SessionRenamer;
use super::sink::EntrySink;
use crate::agent::Profile;
use crate::agent::transcript::TranscriptReader;
use crate::codec::entry::Entry;
use crate::error::Result;
use crate::model::message::TurnEvent;
use crate::model::{EntryKind, FileMove, ForkOrigin, LocatedMessage, RelPath, SessionFacts};

/// Receives the messages of a conversation and keeps what it needs.
pub trait TranscriptVisitor {
    /// Receives the next message.
    fn visit_message(&mut self, message: LocatedMessage);

    /// Receives the next turn event.
    fn visit_turn_event(&mut self, _event: TurnEvent) {}

    /// A transcript is rewritten from offset `from`: everything after that offset is discarded.
    fn truncate(&mut self, path: &RelPath, from: u64);

    /// A transcript has a new path.
    fn apply_move(&mut self, moved: &FileMove);

    /// The messages so far start a fork: its transcripts have new paths, and offsets in the old
    /// ones are invalid.
    fn start_fork(&mut self, names: &BTreeMap<RelPath, RelPath>);

    /// All messages so far are discarded.
    fn clear(&mut self);
}

/// Replays a log for a visitor.
#[derive(Clone)]
pub struct TranscriptReplay<'a, V> {
    profile: &'a dyn Profile,
    reader: TranscriptReader,
    /// The length of each transcript, as far as it was replayed.
    lengths: BTreeMap<RelPath, u64>,
    /// Facts about the session.
    pub facts: SessionFacts,
    /// Whether the last entry removed the session.
    pub removed: bool,
    /// The visitor.
    pub visitor: V,
}

impl<'a, V: TranscriptVisitor> TranscriptReplay<'a, V> {
    /// A replay before the first entry.
    pub fn new(profile: &'a dyn Profile, visitor: V) -> Self {
        TranscriptReplay {
            profile,
            reader: TranscriptReader::default(),
            lengths: BTreeMap::new(),
            facts: SessionFacts::default(),
            removed: false,
            visitor,
        }
    }

    /// Replays an entry, whether or not it follows the previous one.
    pub fn visit_entry(&mut self, entry: &Entry) {
        let header = &entry.header;
        if header.resets_log() || header.kind == EntryKind::Snapshot {
            (self.reader, self.lengths, self.facts) = Default::default();
            self.visitor.clear();
        }
        self.removed = header.kind.is_removal();
        self.reader.move_files(&header.moves);
        FileMove::apply_all(&header.moves, &mut self.lengths);
        for moved in &header.moves {
            self.visitor.apply_move(moved);
        }
        let parsed = self.reader.read(self.profile, entry.parts());
        for part in header
            .parts
            .iter()
            .filter(|part| parsed.spans.contains_key(&part.path))
        {
            let before = self.lengths.insert(part.path.clone(), part.end());
            if before.is_some_and(|before| part.start < before) {
                self.visitor.truncate(&part.path, part.start);
            }
        }
        self.facts = std::mem::take(&mut self.facts).updated_with(parsed.facts);
        for event in parsed.turn_events {
            self.visitor.visit_turn_event(event);
        }
        for message in parsed.messages {
            self.visitor.visit_message(message);
        }
    }

    /// Truncates all transcripts to these lengths; a transcript without a length is discarded.
    pub fn truncate_to(&mut self, lengths: &BTreeMap<RelPath, u64>) {
        for path in self.lengths.keys() {
            let length = lengths.get(path).copied().unwrap_or(0);
            self.visitor.truncate(path, length);
        }
    }
}

impl<V: TranscriptVisitor> EntrySink for TranscriptReplay<'_, V> {
    fn apply_entry(&mut self, entry: &Entry) -> Result<()> {
        self.visit_entry(entry);
        Ok(())
    }

    fn needs_fork_origin(&self) -> bool {
        true
    }

    fn start_fork(&mut self, fork: &ForkOrigin, renamer: &SessionRenamer) -> Result<()> {
        if let Some(lengths) = &fork.transcript_lengths {
            self.truncate_to(lengths);
        }
        let names: Result<BTreeMap<RelPath, RelPath>> = self
            .lengths
            .keys()
            .map(|path| Ok((path.clone(), renamer.path(path)?)))
            .collect();
        let names = names?;
        self.visitor.start_fork(&names);
        self.reader = TranscriptReader::default();
        self.lengths = fork
            .files
            .iter()
            .filter(|part| names.values().any(|name| *name == part.path))
            .map(|part| (part.path.clone(), part.len))
            .collect();
        Ok(())
    }
}

/// Items by transcript, each with the offset of its end; 0 if the item is in a file of the origin
/// of a fork.
#[derive(Debug, Clone)]
pub struct PerTranscript<T>(BTreeMap<RelPath, Vec<(u64, T)>>);

impl<T> Default for PerTranscript<T> {
    fn default() -> Self {
        PerTranscript(BTreeMap::new())
    }
}

impl<T> PerTranscript<T> {
    /// Adds the next item of a transcript.
    pub fn push(&mut self, path: RelPath, end: u64, item: T) {
        self.0.entry(path).or_default().push((end, item));
    }

    /// The last item of a transcript.
    pub fn last(&self, path: &RelPath) -> Option<&T> {
        self.0.get(path)?.last().map(|(_, item)| item)
    }

    /// The items of a transcript, the newest first.
    pub fn recent(&mut self, path: &RelPath) -> impl Iterator<Item = &mut T> {
        self.0
            .get_mut(path)
            .into_iter()
            .flat_map(|items| items.iter_mut().rev().map(|(_, item)| item))
    }

    /// See `TranscriptVisitor::truncate`.
    pub fn truncate(&mut self, path: &RelPath, from: u64) {
        let Some(items) = self.0.get_mut(path) else {
            return;
        };
        if from == 0 {
            items.clear();
        }
        // The items are in order, so only the discarded ones are visited.
        while items.pop_if(|(end, _)| *end > from).is_some() {}
    }

    /// See `TranscriptVisitor::rename`.
    pub fn apply_move(&mut self, moved: &FileMove) {
        moved.apply(&mut self.0);
    }

    /// See `TranscriptVisitor::start_fork`.
    pub fn start_fork(&mut self, names: &BTreeMap<RelPath, RelPath>) {
        let all = std::mem::take(&mut self.0).into_iter();
        self.0 = all
            .filter_map(|(path, items)| {
                let items = items.into_iter().map(|(_, item)| (0, item)).collect();
                Some((names.get(&path)?.clone(), items))
            })
            .collect();
    }

    /// See `TranscriptVisitor::clear`.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// All items, by transcript and then in order.
    pub fn iter(&self) -> impl Iterator<Item = (&RelPath, &T)> {
        self.0
            .iter()
            .flat_map(|(path, items)| items.iter().map(move |(_, item)| (path, item)))
    }

    /// All items, by transcript and then in order.
    pub fn into_all(self) -> impl Iterator<Item = T> {
        self.0.into_values().flatten().map(|(_, item)| item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_transcript_keeps_the_items_before() {
        let (path, other): (RelPath, RelPath) =
            ("p/a.jsonl".parse().unwrap(), "p/b.jsonl".parse().unwrap());
        let mut items = PerTranscript::default();
        [10, 20, 30]
            .into_iter()
            .for_each(|end| items.push(path.clone(), end, end));
        items.push(other.clone(), 15, 15);
        items.truncate(&path, 25);
        assert_eq!(
            items.iter().map(|(_, end)| *end).collect::<Vec<_>>(),
            [10, 20, 15]
        );
        items.start_fork(&BTreeMap::from([
            (path.clone(), other.clone()),
            (other, path.clone()),
        ]));
        items.truncate(&path, 3);
        assert_eq!(
            items.last(&path),
            Some(&15),
            "an offset in the origin means nothing in the fork"
        );
        items.truncate(&path, 0);
        assert_eq!(items.into_all().collect::<Vec<_>>(), [10, 20]);
    }
}
