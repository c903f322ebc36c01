//! A conversation at a point of its log: what was said in all its transcripts, and which sub-agent was started where.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::spoken::{Bit, Spoken};
use crate::agent::Profile;
use crate::agent::transcript::Reader;
use crate::codec::entry::Entry;
use crate::error::Result;
use crate::log::Logs;
use crate::log::fork::Renaming;
use crate::log::walk::{Read, Reading, Sink};
use crate::model::{At, Checkpoint, EntryKind, Facts, Fork, LogId, RelPath};

/// A message that is written again was written before within so many.
const RECENT: usize = 64;

/// What was said, file by file, as the log goes on. Only what is shown is kept of it.
pub struct Conversation<'a> {
    profile: &'a dyn Profile,
    full: bool,
    reader: Reader,
    files: BTreeMap<RelPath, Talk>,
    /// What the transcripts say of the session.
    pub facts: Facts,
    /// It ends with a tombstone or a purge.
    pub removed: bool,
}

/// What was said in one file.
#[derive(Debug, Clone, Default)]
struct Talk {
    len: u64,
    position: i64,
    said: Vec<Spoken>,
}

impl Talk {
    /// One more message; or one that was said before and has changed since, as some agents write it again.
    fn hear(&mut self, spoken: Option<Spoken>) {
        let Some(spoken) = spoken else { return };
        let mut recent = self.said.iter_mut().rev().take(RECENT);
        match recent.find(|before| before.name == spoken.name && before.role == spoken.role) {
            Some(before) => *before = Spoken { position: before.position, start: before.start, at: before.at, ..spoken },
            None => self.said.push(spoken),
        }
    }
}

/// A message in its place.
#[derive(Debug, Clone)]
pub struct Shown {
    /// 0 for the session's own conversation, one more for each sub-agent within another.
    pub depth: usize,
    /// The message.
    pub spoken: Spoken,
}

impl Sink for Conversation<'_> {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        let header = &entry.header;
        if header.begins_anew() || header.kind == EntryKind::Snapshot {
            *self = Conversation::new(self.profile, self.full);
        }
        self.removed = header.kind.is_removal();
        self.reader.moved(&header.moves);
        for moved in &header.moves {
            if let Some(talk) = self.files.remove(&moved.from) {
                self.files.insert(moved.to.clone(), talk);
            }
        }
        let told = self.reader.read(self.profile, entry.parts());
        self.facts = std::mem::take(&mut self.facts).then(told.facts);
        for part in &header.parts {
            let Some(span) = told.read.get(&part.path) else { continue };
            let talk = self.files.entry(part.path.clone()).or_default();
            if part.start < talk.len {
                talk.said.retain(|spoken| spoken.start < span.from);
                talk.position = talk.said.last().map_or(0, |last| last.position);
            }
            talk.len = part.end();
        }
        for said in told.said {
            let Some(talk) = self.files.get_mut(&said.path) else { continue };
            talk.position = said.message.at.map_or(0, jiff::Timestamp::as_microsecond).max(talk.position.saturating_add(1));
            talk.hear(Spoken::of(said, talk.position, self.full));
        }
        Ok(())
    }

    fn wants_origin(&self) -> bool {
        true
    }

    fn begin(&mut self, fork: &Fork, renaming: &Renaming) -> Result<()> {
        if let Some(cut) = &fork.cut {
            self.cut(cut);
        }
        let before = std::mem::take(&mut self.files);
        let facts = std::mem::take(&mut self.facts);
        *self = Conversation { facts, ..Conversation::new(self.profile, self.full) };
        for (path, mut talk) in before {
            let path = renaming.path(&path)?;
            let Some(part) = fork.files.iter().find(|part| part.path == path) else { continue };
            talk.len = part.len;
            // With another id its places are others; all of it is before what the fork itself says.
            for spoken in &mut talk.said {
                (spoken.path, spoken.start, spoken.end) = (path.clone(), 0, 0);
            }
            self.files.insert(path, talk);
        }
        Ok(())
    }
}

impl<'a> Conversation<'a> {
    /// Nothing yet. `full` keeps all that there is.
    pub fn new(profile: &'a dyn Profile, full: bool) -> Self {
        Conversation { profile, full, reader: Reader::default(), files: BTreeMap::new(), facts: Facts::default(), removed: false }
    }

    /// Reads a session up to a point. `cut` says how long its transcripts were there, if that is not as the entry leaves them.
    pub async fn read(
        logs: &Logs,
        profile: &'a dyn Profile,
        id: &LogId,
        (at, cut): (At, Option<&Checkpoint>),
        full: bool,
    ) -> Result<Read<Conversation<'a>>> {
        let mut read = logs.read_log(id, Reading { at, ..Reading::default() }, || Conversation::new(profile, full)).await?;
        if let Some(point) = cut {
            read.sink.cut(&point.files);
        }
        Ok(read)
    }

    fn cut(&mut self, lengths: &BTreeMap<RelPath, u64>) {
        for (path, talk) in &mut self.files {
            let len = lengths.get(path).copied().unwrap_or(0);
            talk.said.retain(|spoken| spoken.end <= len);
        }
    }

    /// Everything in order, each sub-agent below the call that started it; with `last`, only so many messages of the end.
    pub fn shown(self, last: Option<usize>) -> Vec<Shown> {
        let mut talks: BTreeMap<Option<String>, Vec<Spoken>> = BTreeMap::new();
        for spoken in self.files.into_values().flat_map(|talk| talk.said) {
            talks.entry(spoken.sub_agent.clone()).or_default().push(spoken);
        }
        for talk in talks.values_mut() {
            talk.sort_by(|one, other| (one.position, &one.path, one.start).cmp(&(other.position, &other.path, other.start)));
        }
        let mut shown = Tree::new(talks).all();
        if let Some(last) = last {
            shown.drain(..shown.len().saturating_sub(last));
        }
        shown
    }
}

/// What tools answered, by call: failed, and how much they said.
pub fn answers<'s>(shown: impl Iterator<Item = &'s Spoken>) -> HashMap<String, (bool, usize)> {
    let bits = shown.flat_map(|spoken| &spoken.bits);
    bits.filter_map(|bit| if let Bit::Answer { id, bytes, failed, .. } = bit { Some((id.clone(), (*failed, *bytes))) } else { None })
        .collect()
}

/// Which conversation was started within which other.
struct Tree {
    talks: BTreeMap<Option<String>, Vec<Spoken>>,
    /// Behind which message of which conversation each sub-agent comes.
    below: BTreeMap<(Option<String>, usize), Vec<String>>,
}

impl Tree {
    fn new(talks: BTreeMap<Option<String>, Vec<Spoken>>) -> Tree {
        let mut below: BTreeMap<(Option<String>, usize), Vec<String>> = BTreeMap::new();
        let mut taken: BTreeSet<(Option<String>, usize)> = BTreeSet::new();
        let mut agents: Vec<(&String, &Vec<Spoken>)> = talks.iter().filter_map(|(name, talk)| Some((name.as_ref()?, talk))).collect();
        agents.sort_by_key(|(name, talk)| (talk.first().map(|first| first.position), *name));
        for (name, talk) in agents {
            let place = place(&talks, name, talk, &taken);
            taken.insert(place.clone());
            below.entry(place).or_default().push(name.clone());
        }
        Tree { talks, below }
    }

    fn all(mut self) -> Vec<Shown> {
        let mut shown = Vec::new();
        self.take(None, 0, &mut shown);
        // What was started by nobody that is known, or by one another.
        while let Some(name) = self.talks.keys().next().cloned() {
            self.take(name, 1, &mut shown);
        }
        shown
    }

    fn take(&mut self, name: Option<String>, depth: usize, shown: &mut Vec<Shown>) {
        let Some(talk) = self.talks.remove(&name) else { return };
        for (at, spoken) in talk.into_iter().enumerate() {
            shown.push(Shown { depth, spoken });
            for agent in self.below.remove(&(name.clone(), at)).unwrap_or_default() {
                self.take(Some(agent), depth + 1, shown);
            }
        }
    }
}

/// Behind which message a sub-agent comes: the call that told it what it was told, else whatever was called last before it spoke.
fn place(
    talks: &BTreeMap<Option<String>, Vec<Spoken>>,
    name: &str,
    talk: &[Spoken],
    taken: &BTreeSet<(Option<String>, usize)>,
) -> (Option<String>, usize) {
    let first = talk.first();
    let others = talks.iter().filter(|(other, _)| other.as_deref() != Some(name));
    if let Some(prompt) = first.and_then(|first| first.prompt) {
        let mut starts = others.flat_map(|(other, talk)| {
            let starting = talk.iter().enumerate().filter(move |(_, spoken)| spoken.starts(prompt));
            starting.map(move |(at, _)| (other.clone(), at))
        });
        if let Some(found) = starts.find(|place| !taken.contains(place)) {
            return found;
        }
    }
    let main = talks.get(&None).map_or(&[][..], Vec::as_slice);
    let began = first.map_or(i64::MAX, |first| first.position);
    let called = main.iter().rposition(|spoken| spoken.position <= began && spoken.calls().next().is_some());
    let before = || main.iter().rposition(|spoken| spoken.position <= began);
    (None, called.or_else(before).unwrap_or(0))
}
