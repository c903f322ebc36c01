//! What a session's conversation amounts to at a point: its checkpoints, what was running, what was said last.
//!
//! Owns reading that from the log alone. Does not own what is restored (`mod.rs`) or what the index keeps of it.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use crate::agent::Profile;
use crate::error::{Error, Result};
use crate::log::Logs;
use crate::log::read::{ReadOptions, ReadOutcome};
use crate::log::replay::{PerTranscript, TranscriptReplay, TranscriptVisitor};
use crate::log::state::LogState;
use crate::model::message::TurnEvent;
use crate::model::{
    Checkpoint, FileKind, FileState, LocatedMessage, LogId, LogPoint, Message, RelPath, Role,
    ToolCall, TurnTracker,
};

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
#[derive(Default)]
pub struct ConversationState {
    said: PerTranscript<LocatedMessage>,
    marks: PerTranscript<TurnEvent>,
}

/// What a log amounts to, and what is said in it.
pub type ConversationReader<'a> = (LogState, TranscriptReplay<'a, ConversationState>);

/// Everything that was said, and the files, at a point.
#[derive(Debug, Default)]
pub struct Contents {
    /// The messages in order, each with what tells it from others: its id, or its bytes' place.
    pub said: Vec<(String, Message)>,
    /// Each file's length, and what tells its content.
    pub files: BTreeMap<RelPath, (u64, String)>,
}

impl TranscriptVisitor for ConversationState {
    fn said(&mut self, said: LocatedMessage) {
        self.said
            .push(said.path.clone(), said.start + said.len, said);
    }

    fn marked(&mut self, marked: TurnEvent) {
        self.marks.push(marked.path.clone(), marked.end, marked);
    }

    fn cut(&mut self, path: &RelPath, from: u64) {
        self.said.cut(path, from);
        self.marks.cut(path, from);
    }

    fn moved(&mut self, from: &RelPath, to: &RelPath) {
        self.said.moved(from, to);
        self.marks.moved(from, to);
    }

    fn forked(&mut self, names: &BTreeMap<RelPath, RelPath>) {
        self.said.forked(names);
        self.marks.forked(names);
    }

    fn clear(&mut self) {
        *self = ConversationState::default();
    }
}

impl ConversationState {
    /// How far the turns have come, and what was running.
    pub fn turns(&self) -> TurnTracker {
        let marks: Vec<TurnEvent> = self
            .marks
            .iter()
            .map(|(_, marked)| marked.clone())
            .collect();
        let mut turns = TurnTracker::default();
        turns.take(&marks, &BTreeMap::new());
        turns
    }

    /// How many messages there are, by who spoke.
    pub fn roles(&self) -> BTreeMap<Role, u64> {
        self.said
            .iter()
            .fold(BTreeMap::new(), |mut roles, (_, said)| {
                *roles.entry(said.message.role).or_default() += 1;
                roles
            })
    }

    /// The sub-agents, by id.
    pub fn sub_agents(&self) -> Vec<SubAgent> {
        let mut agents: BTreeMap<&str, SubAgent> = BTreeMap::new();
        for (_, LocatedMessage { message, .. }) in self.said.iter() {
            let Some(id) = message.sub_agent.as_deref() else {
                continue;
            };
            let agent = agents.entry(id).or_insert(SubAgent {
                id: id.to_owned(),
                messages: 0,
                last: None,
                active: true,
            });
            agent.messages += 1;
            agent.last = message.at.or(agent.last);
            if message.role != Role::System {
                agent.active = !(message.role == Role::Assistant
                    && message.kind == "text"
                    && message.complete);
            }
        }
        agents.into_values().collect()
    }

    /// The last text that somebody said, sub-agents left out.
    pub fn last_text(&self) -> Option<(Role, String)> {
        let own = self
            .said
            .iter()
            .map(|(_, said)| &said.message)
            .filter(|message| message.sub_agent.is_none());
        let spoken = own
            .filter(|message| matches!(message.role, Role::User | Role::Assistant))
            .map(|message| (message.role, message.text()));
        spoken.filter(|(_, text)| !text.trim().is_empty()).last()
    }
}

/// Reads a conversation up to a point; what is damaged behind it is in the answer.
pub async fn read<'a>(
    logs: &Logs,
    profile: &'a dyn Profile,
    id: &LogId,
    at: LogPoint,
    cut: Option<&Checkpoint>,
) -> Result<ReadOutcome<ConversationReader<'a>>> {
    let fresh = || {
        (
            LogState::default(),
            TranscriptReplay::new(profile, ConversationState::default()),
        )
    };
    let mut read = logs
        .read_log(
            id,
            ReadOptions {
                at,
                ..ReadOptions::default()
            },
            fresh,
        )
        .await?;
    if read.head == 0 {
        return Err(super::find::unknown(id));
    }
    if read.seq == 0 && read.damage.is_none() {
        return Err(
            Error::not_found(format!("{id} has no entry as early as {at}")).hint(format!(
                "sessiond checkpoints {} lists points to go back to",
                id.name
            )),
        );
    }
    if let LogPoint::Seq(seq) = at
        && seq > read.head
    {
        return Err(Error::not_found(format!(
            "{id} has no entry {seq}: its last is {}",
            read.head
        )));
    }
    if let Some(point) = cut {
        read.sink.1.cut_to(&point.files);
    }
    Ok(read)
}

/// What a log has behind a point: bytes, by transcript, and the calls that nothing has answered yet.
pub async fn behind(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    point: &LogState,
) -> Result<(BTreeMap<RelPath, u64>, Vec<ToolCall>)> {
    let (end, heard) = read(logs, profile, id, LogPoint::Latest, None).await?.sink;
    let more = |path: &RelPath, file: &FileState| {
        file.len
            .checked_sub(point.files.get(path).map_or(0, |here| here.len))
    };
    let transcripts = end
        .files
        .iter()
        .filter(|(_, file)| file.kind == FileKind::Append);
    let lengths = transcripts.filter_map(|(path, file)| {
        Some((path.clone(), more(path, file).filter(|more| *more > 0)?))
    });
    Ok((lengths.collect(), heard.ear.turns().pending))
}

/// Everything that was said up to a point, and the files there.
pub async fn contents(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    at: LogPoint,
    cut: Option<&Checkpoint>,
) -> Result<Contents> {
    let (state, hearing) = read(logs, profile, id, at, cut).await?.sound()?;
    let key = |path: &RelPath, said: &LocatedMessage| {
        let own = said
            .message
            .uuid
            .clone()
            .unwrap_or_else(|| format!("{path}:{}", said.start));
        format!(
            "{}/{own}",
            said.message.sub_agent.as_deref().unwrap_or_default()
        )
    };
    let mut said: Vec<(String, Message)> = hearing
        .ear
        .said
        .iter()
        .map(|(path, said)| (key(path, said), said.message.clone()))
        .collect();
    said.sort_by_key(|(_, message)| message.at);
    let keep = |path: &RelPath| cut.and_then(|point| point.files.get(path)).copied();
    let files = state.files.into_iter().filter(|(path, file)| {
        file.kind == FileKind::Whole || cut.is_none() || keep(path).is_some()
    });
    let files = files.map(|(path, file)| {
        let len = keep(&path).unwrap_or(file.len).min(file.len);
        // A transcript only grows; whatever else it does, it has another digest then.
        let told = if len == file.len {
            file.sha256.to_string()
        } else {
            format!("{len} bytes")
        };
        (path, (len, told))
    });
    Ok(Contents {
        said,
        files: files.collect(),
    })
}
