//! What a session's conversation amounts to at a point: its checkpoints, what was running, what was said last.
//!
//! Owns reading that from the log alone. Does not own what is restored (`mod.rs`) or what the index keeps of it.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use crate::agent::Profile;
use crate::agent::transcript::Reader;
use crate::codec::entry::Entry;
use crate::error::{Error, Result};
use crate::log::Logs;
use crate::log::fork::Renaming;
use crate::log::state::State;
use crate::log::walk::{Read, Reading, Sink};
use crate::model::message::Marked;
use crate::model::{At, Checkpoint, FileKind, Fork, LogId, Message, RelPath, Role, Said, Turns};

/// A sub-agent of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SubAgent {
    /// Its id.
    pub id: String,
    /// Its messages.
    pub messages: u64,
    /// When it last said something.
    pub last: Option<Timestamp>,
    /// It had not finished.
    pub active: bool,
}

/// A conversation, as far as it was read.
pub struct Talk<'a> {
    profile: &'a dyn Profile,
    reader: Reader,
    /// Nothing behind these lengths counts.
    cut: Option<BTreeMap<RelPath, u64>>,
    /// What the log amounts to.
    pub state: State,
    /// What was said in the session that this one was forked from.
    before: Spoken,
    spoken: Spoken,
}

/// What was said, by file and place.
#[derive(Default)]
struct Spoken {
    said: BTreeMap<RelPath, BTreeMap<u64, Said>>,
    marks: BTreeMap<RelPath, BTreeMap<u64, Marked>>,
}

impl Spoken {
    /// Nothing behind a place counts.
    fn cut(&mut self, path: &RelPath, at: u64) {
        if let Some(said) = self.said.get_mut(path) {
            said.retain(|_, said| said.start + said.len <= at);
        }
        if let Some(marks) = self.marks.get_mut(path) {
            marks.retain(|end, _| *end <= at);
        }
    }

    fn cut_all(&mut self, cut: &BTreeMap<RelPath, u64>) {
        let paths: Vec<RelPath> = self.said.keys().chain(self.marks.keys()).cloned().collect();
        paths.iter().for_each(|path| self.cut(path, cut.get(path).copied().unwrap_or(0)));
    }

    fn rename(&mut self, from: &RelPath, to: &RelPath) {
        if let Some(said) = self.said.remove(from) {
            self.said.insert(to.clone(), said);
        }
        if let Some(marks) = self.marks.remove(from) {
            self.marks.insert(to.clone(), marks);
        }
    }
}

/// Everything that was said, and the files, at a point.
#[derive(Debug, Default)]
pub struct Heard {
    /// The messages in order, each with what tells it from others: its id, or its bytes' place.
    pub said: Vec<(String, Message)>,
    /// Each file's length, and what tells its content.
    pub files: BTreeMap<RelPath, (u64, String)>,
}

impl Sink for Talk<'_> {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        for moved in &entry.header.moves {
            self.spoken.rename(&moved.from, &moved.to);
        }
        self.state.apply(&entry.header, entry.digest)?;
        // A file that is written anew says anew what it says.
        for part in &entry.header.parts {
            self.spoken.cut(&part.path, part.start);
            if part.start == 0 {
                self.before.cut(&part.path, 0);
            }
        }
        self.reader.moved(&entry.header.moves);
        let told = self.reader.read(self.profile, entry.parts());
        for marked in told.marks {
            self.spoken.marks.entry(marked.path.clone()).or_default().insert(marked.end, marked);
        }
        for said in told.said {
            self.spoken.said.entry(said.path.clone()).or_default().insert(said.start, said);
        }
        Ok(())
    }

    fn wants_origin(&self) -> bool {
        true
    }

    fn begin(&mut self, fork: &Fork, renaming: &Renaming) -> Result<()> {
        let mut before = std::mem::take(&mut self.spoken);
        if let Some(cut) = &fork.cut {
            before.cut_all(cut);
        }
        let paths: Vec<RelPath> = before.said.keys().chain(before.marks.keys()).cloned().collect();
        for path in paths {
            before.rename(&path, &renaming.path(&path)?);
        }
        *self = Talk { before, ..Talk::new(self.profile, self.cut.take()) };
        Ok(())
    }
}

impl<'a> Talk<'a> {
    fn new(profile: &'a dyn Profile, cut: Option<BTreeMap<RelPath, u64>>) -> Self {
        Talk { profile, reader: Reader::default(), cut, state: State::default(), before: Spoken::default(), spoken: Spoken::default() }
    }

    fn messages(&self) -> impl Iterator<Item = (&RelPath, &Said)> {
        let all = self.before.said.iter().chain(&self.spoken.said);
        all.flat_map(|(path, said)| said.values().map(move |said| (path, said)))
    }

    /// How far the turns have come, and what was running.
    pub fn turns(&self) -> Turns {
        let mut turns = Turns::default();
        for marks in self.before.marks.values().chain(self.spoken.marks.values()) {
            let marks: Vec<Marked> = marks.values().cloned().collect();
            turns.take(&marks, &BTreeMap::new());
        }
        turns
    }

    /// How many messages there are, by who spoke.
    pub fn roles(&self) -> BTreeMap<Role, u64> {
        self.messages().fold(BTreeMap::new(), |mut roles, (_, said)| {
            *roles.entry(said.message.role).or_default() += 1;
            roles
        })
    }

    /// The sub-agents, by id.
    pub fn sub_agents(&self) -> Vec<SubAgent> {
        let mut agents: BTreeMap<&str, SubAgent> = BTreeMap::new();
        for (_, Said { message, .. }) in self.messages() {
            let Some(id) = message.sub_agent.as_deref() else { continue };
            let agent = agents.entry(id).or_insert(SubAgent { id: id.to_owned(), messages: 0, last: None, active: true });
            agent.messages += 1;
            agent.last = message.at.or(agent.last);
            if message.role != Role::System {
                agent.active = !(message.role == Role::Assistant && message.kind == "text" && message.complete);
            }
        }
        agents.into_values().collect()
    }

    /// The last text that somebody said, sub-agents left out.
    pub fn last_text(&self) -> Option<(Role, String)> {
        let own = self.messages().filter(|(path, _)| self.profile.is_transcript(path)).map(|(_, said)| &said.message);
        let spoken =
            own.filter(|message| matches!(message.role, Role::User | Role::Assistant)).map(|message| (message.role, message.text()));
        spoken.filter(|(_, text)| !text.trim().is_empty()).last()
    }
}

/// Reads a conversation up to a point; what is damaged behind it is in the answer.
pub async fn read<'a>(logs: &Logs, profile: &'a dyn Profile, id: &LogId, at: At, cut: Option<&Checkpoint>) -> Result<Read<Talk<'a>>> {
    let cut = cut.map(|point| point.files.clone());
    let mut read = logs.read_log(id, Reading { at, ..Reading::default() }, || Talk::new(profile, cut.clone())).await?;
    if read.head == 0 {
        return Err(super::find::unknown(id));
    }
    if read.seq == 0 && read.damage.is_none() {
        return Err(Error::not_found(format!("{id} has no entry as early as {at}")));
    }
    if let Some(cut) = &cut {
        read.sink.spoken.cut_all(cut);
    }
    Ok(read)
}

/// Hears everything that was said up to a point.
pub async fn hear_all(logs: &Logs, profile: &dyn Profile, id: &LogId, at: At, cut: Option<&Checkpoint>) -> Result<Heard> {
    let talk = read(logs, profile, id, at, cut).await?.sound()?;
    let mut said: Vec<(RelPath, u64, Message)> =
        talk.messages().map(|(path, said)| (path.clone(), said.start, said.message.clone())).collect();
    said.sort_by_key(|(path, start, message)| (message.at, path.clone(), *start));
    let keep = |path: &RelPath| cut.and_then(|point| point.files.get(path)).copied();
    let files = talk.state.files.into_iter().filter(|(path, file)| file.kind == FileKind::Whole || cut.is_none() || keep(path).is_some());
    let files = files.map(|(path, file)| {
        let len = keep(&path).unwrap_or(file.len).min(file.len);
        // A transcript only grows; whatever else it does, it has another digest then.
        let told = if len == file.len { file.sha256.to_string() } else { format!("{len} bytes") };
        (path, (len, told))
    });
    let key = |path: &RelPath, start: u64, message: &Message| {
        let own = message.uuid.clone().unwrap_or_else(|| format!("{path}:{start}"));
        format!("{}/{own}", message.sub_agent.as_deref().unwrap_or_default())
    };
    let said = said.into_iter().map(|(path, start, message)| (key(&path, start, &message), message));
    Ok(Heard { said: said.collect(), files: files.collect() })
}
