//! A conversation at a point of its log: what was said in all its transcripts, and which sub-agent was started where.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::Timestamp;
use serde::Serialize;

use super::display::{DisplayBlock, DisplayMessage};
use crate::agent::Profile;
use crate::error::{Error, ErrorKind, Result};
use crate::log::Logs;
use crate::log::read::{ReadOptions, ReadOutcome};
use crate::log::replay::{PerTranscript, TranscriptReplay, TranscriptVisitor};
use crate::log::segments::{Prefer, cover};
use crate::model::{Checkpoint, LocatedMessage, LogId, LogPoint, RelPath, Seq};

/// A message that is written again was written before within so many.
const RECENT: usize = 64;

/// What was said, as the log goes on. Only what is shown is kept of it.
pub struct Conversation {
    full: bool,
    said: PerTranscript<DisplayMessage>,
}

/// A message in its place.
#[derive(Debug, Clone, Serialize)]
pub struct Shown {
    /// 0 for the session's own conversation, one more for each sub-agent within another.
    pub depth: usize,
    /// The message.
    #[serde(flatten)]
    pub spoken: DisplayMessage,
}

impl TranscriptVisitor for Conversation {
    fn said(&mut self, said: LocatedMessage) {
        let (path, end) = (said.path.clone(), said.start + said.len);
        let before = self.said.last(&path).map_or(-1, |last| last.position);
        let position = said
            .message
            .at
            .map_or(0, Timestamp::as_microsecond)
            .max(before.saturating_add(1));
        let Some(spoken) = DisplayMessage::of(said, position, self.full) else {
            return;
        };
        // Some agents write a message again when it has changed.
        let again =
            |before: &&mut DisplayMessage| before.name == spoken.name && before.role == spoken.role;
        if let Some(before) = self.said.recent(&path).take(RECENT).find(again) {
            *before = DisplayMessage {
                position: before.position,
                at: before.at,
                ..spoken
            };
        } else {
            self.said.push(path, end, spoken);
        }
    }

    fn cut(&mut self, path: &RelPath, from: u64) {
        self.said.cut(path, from);
    }

    fn moved(&mut self, from: &RelPath, to: &RelPath) {
        self.said.moved(from, to);
    }

    fn forked(&mut self, names: &BTreeMap<RelPath, RelPath>) {
        self.said.forked(names);
    }

    fn clear(&mut self) {
        self.said.clear();
    }
}

impl Conversation {
    /// Reads a session up to a point; with `last`, from as few objects of its end as have so many messages. `cut` says how long its
    /// transcripts were at the point, if that is not as the entry leaves them. `full` keeps all that there is.
    pub async fn read<'a>(
        logs: &Logs,
        profile: &'a dyn Profile,
        id: &LogId,
        (at, cut): (LogPoint, Option<&Checkpoint>),
        last: Option<usize>,
        full: bool,
    ) -> Result<ReadOutcome<TranscriptReplay<'a, Conversation>>> {
        let fresh = || {
            TranscriptReplay::new(
                profile,
                Conversation {
                    full,
                    said: PerTranscript::default(),
                },
            )
        };
        for after in ends(logs, id, at, last.is_some()).await? {
            let mut read = logs
                .read_log(
                    id,
                    ReadOptions {
                        at,
                        after,
                        ..ReadOptions::default()
                    },
                    fresh,
                )
                .await?;
            if let Some(point) = cut {
                read.sink.cut_to(&point.files);
            }
            let enough = read.damage.is_none()
                && last.is_some_and(|last| read.sink.ear.said.iter().count() >= last);
            if enough || after == 0 {
                return Ok(read);
            }
        }
        Err(Error::new(ErrorKind::Internal, "read a session"))
    }

    /// Everything in order, each sub-agent below the call that started it; with `last`, only so many messages of the end.
    pub fn shown(self, last: Option<usize>) -> Vec<Shown> {
        let mut talks: BTreeMap<Option<String>, Vec<DisplayMessage>> = BTreeMap::new();
        for spoken in self.said.into_all() {
            talks
                .entry(spoken.sub_agent.clone())
                .or_default()
                .push(spoken);
        }
        for talk in talks.values_mut() {
            talk.sort_by_key(|spoken| spoken.position);
        }
        let mut shown = Tree::new(talks).all();
        if let Some(last) = last {
            shown.drain(..shown.len().saturating_sub(last));
        }
        shown
    }
}

/// Behind which entries to begin, so that only the end of a session is read: what a few objects hold, then more, then all.
pub(super) async fn ends(
    logs: &Logs,
    id: &LogId,
    at: LogPoint,
    only_the_end: bool,
) -> Result<Vec<Seq>> {
    let most = match at {
        LogPoint::Latest => Seq::MAX,
        LogPoint::Seq(seq) => seq,
        LogPoint::Time(_) => return Ok(vec![0]),
    };
    if !only_the_end {
        return Ok(vec![0]);
    }
    let picked = cover(
        &logs.newest_pieces(id).await?,
        0,
        most,
        Prefer::Long,
        &BTreeSet::new(),
    );
    let begin = |objects: usize| {
        picked
            .len()
            .checked_sub(objects)
            .and_then(|first| picked.get(first))
            .map_or(0, |piece| piece.from - 1)
    };
    let mut ends = vec![begin(2), begin(8), 0];
    ends.dedup();
    Ok(ends)
}

/// What tools answered, by call: failed, and how much they said.
pub fn answers<'s>(
    shown: impl Iterator<Item = &'s DisplayMessage>,
) -> HashMap<String, (bool, usize)> {
    let bits = shown.flat_map(|spoken| &spoken.bits);
    bits.filter_map(|bit| {
        if let DisplayBlock::Answer {
            id, bytes, failed, ..
        } = bit
        {
            Some((id.clone(), (*failed, *bytes)))
        } else {
            None
        }
    })
    .collect()
}

/// Which conversation was started within which other.
struct Tree {
    talks: BTreeMap<Option<String>, Vec<DisplayMessage>>,
    /// Behind which message of which conversation each sub-agent comes.
    below: BTreeMap<(Option<String>, usize), Vec<String>>,
}

impl Tree {
    fn new(talks: BTreeMap<Option<String>, Vec<DisplayMessage>>) -> Tree {
        let mut below: BTreeMap<(Option<String>, usize), Vec<String>> = BTreeMap::new();
        let mut taken: BTreeSet<(Option<String>, usize)> = BTreeSet::new();
        let mut agents: Vec<(&String, &Vec<DisplayMessage>)> = talks
            .iter()
            .filter_map(|(name, talk)| Some((name.as_ref()?, talk)))
            .collect();
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
        let Some(talk) = self.talks.remove(&name) else {
            return;
        };
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
    talks: &BTreeMap<Option<String>, Vec<DisplayMessage>>,
    name: &str,
    talk: &[DisplayMessage],
    taken: &BTreeSet<(Option<String>, usize)>,
) -> (Option<String>, usize) {
    let first = talk.first();
    let others = talks
        .iter()
        .filter(|(other, _)| other.as_deref() != Some(name));
    if let Some(prompt) = first.and_then(|first| first.prompt) {
        let mut starts = others.flat_map(|(other, talk)| {
            let starting = talk
                .iter()
                .enumerate()
                .filter(move |(_, spoken)| spoken.starts(prompt));
            starting.map(move |(at, _)| (other.clone(), at))
        });
        if let Some(found) = starts.find(|place| !taken.contains(place)) {
            return found;
        }
    }
    let main = talks.get(&None).map_or(&[][..], Vec::as_slice);
    let began = first.map_or(i64::MAX, |first| first.position);
    let called = main
        .iter()
        .rposition(|spoken| spoken.position <= began && spoken.calls().next().is_some());
    let before = || main.iter().rposition(|spoken| spoken.position <= began);
    (None, called.or_else(before).unwrap_or(0))
}
