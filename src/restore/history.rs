//! What can be read of a session's conversation, however damaged its log is: for a prompt, where it cannot be restored.
//!
//! Owns what is read of a damaged log. Does not own how it is told (`prose`). Writes nothing and claims nothing.

use std::collections::BTreeSet;

use super::point::Goal;
use super::prose::Prose;
use crate::agent::Profile;
use crate::agent::transcript::Reader;
use crate::codec::entry::Entry;
use crate::error::{Doing, Kind, Result};
use crate::log::Logs;
use crate::log::fork::Renaming;
use crate::log::pieces::{self, Name, Prefer, cover};
use crate::log::state::State;
use crate::log::walk::{Reading, Sink};
use crate::model::{At, Facts, FileKind, Fork, LogId, Seq, Version};

/// What was heard of a session.
pub struct History {
    /// The end of the conversation.
    pub prose: Prose,
    /// What is known of the session.
    pub facts: Facts,
    /// Up to this entry the log is sound.
    pub sound_to: Seq,
    /// The last entry of all.
    pub head: Seq,
}

impl History {
    /// The version of the agent that wrote last.
    pub fn version(&self) -> Option<Version> {
        self.facts.agent_version.as_deref().and_then(|version| version.parse().ok())
    }
}

/// Listens to a log.
struct Listener<'a> {
    profile: &'a dyn Profile,
    reader: Reader,
    prose: Prose,
    facts: Facts,
    /// What contradicts the rules is noticed by it, and read around where that is possible.
    state: State,
}

impl Sink for Listener<'_> {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        self.state.apply(&entry.header, entry.digest)?;
        self.hear(entry);
        Ok(())
    }

    fn wants_origin(&self) -> bool {
        true
    }

    fn begin(&mut self, fork: &Fork, renaming: &Renaming) -> Result<()> {
        for (path, len) in fork.cut.iter().flatten() {
            self.prose.cut(path, *len);
        }
        self.prose.forked(|path| renaming.path(path))?;
        (self.reader, self.state) = (Reader::default(), State::default());
        Ok(())
    }
}

impl Listener<'_> {
    fn hear(&mut self, entry: &Entry) {
        if entry.header.begins_anew() {
            self.prose.clear();
        }
        for moved in &entry.header.moves {
            self.prose.moved(&moved.from, &moved.to);
        }
        let ours = |path| self.profile.is_transcript(path);
        for part in entry.header.parts.iter().filter(|part| part.kind == FileKind::Append && ours(&part.path)) {
            self.prose.cut(&part.path, part.start);
        }
        self.reader.moved(&entry.header.moves);
        let told = self.reader.read(self.profile, entry.parts().filter(|(part, _)| ours(&part.path)));
        self.facts = std::mem::take(&mut self.facts).then(told.facts);
        told.said.iter().for_each(|said| self.prose.take(said));
    }
}

/// Listens to a session up to a point, and keeps its last `most` messages. Behind damage it goes on with every piece that
/// can be read by itself.
pub async fn history(logs: &Logs, profile: &dyn Profile, id: &LogId, goal: &Goal, most: usize) -> Result<History> {
    read(logs, profile, id, goal, most).await.doing_with(|| format!("read the conversation of {id}"))
}

async fn read(logs: &Logs, profile: &dyn Profile, id: &LogId, goal: &Goal, most: usize) -> Result<History> {
    let fresh =
        || Listener { profile, reader: Reader::default(), prose: Prose::new(most), facts: Facts::default(), state: State::default() };
    let read = logs.read_log(id, Reading { at: goal.at, ..Reading::default() }, fresh).await?;
    let mut listener = read.sink;
    if read.damage.is_some() {
        beyond(logs, id, goal.at, read.seq, &mut listener).await?;
    }
    let Listener { mut prose, facts, .. } = listener;
    for (path, len) in goal.cut.iter().flat_map(|point| &point.files) {
        prose.cut(path, *len);
    }
    Ok(History { prose, facts, sound_to: read.seq, head: read.head.max(read.seq) })
}

/// Goes on behind entry `sound` with what can be read, each piece by itself.
async fn beyond(logs: &Logs, id: &LogId, at: At, sound: Seq, listener: &mut Listener<'_>) -> Result<()> {
    let most = if let At::Seq(seq) = at { seq } else { Seq::MAX };
    let pieces = logs.pieces(id).await?;
    let mut damaged: BTreeSet<Name> = BTreeSet::new();
    let mut reached = sound;
    // What refused the next one may not show in the piece itself: it goes on from somewhere else.
    listener.prose.gap();
    'again: loop {
        for piece in cover(&pieces, reached, most, Prefer::Long, &damaged) {
            let entry = match logs.read_piece(id, &piece, None).await {
                Ok(Some(entry)) => entry,
                Err(error) if error.kind() != Kind::Corrupt => return Err(error),
                // Damaged, or collected meanwhile: others may stand for it.
                Ok(None) | Err(_) => {
                    damaged.insert(piece.name());
                    continue 'again;
                }
            };
            if !at.includes(&entry.header) {
                return Ok(());
            }
            if piece.from > reached + 1 {
                listener.prose.gap();
            }
            listener.hear(&entry);
            reached = piece.to;
        }
        break;
    }
    if reached < pieces::head(&pieces).min(most) {
        listener.prose.gap();
    }
    Ok(())
}
