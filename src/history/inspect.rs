//! A session at one point: its turns, pending tool calls, sub-agents and files.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::messages::AllMessages;
use super::reader::{ConversationReader, Extent, Origin};
use crate::error::Result;
use crate::model::{Checkpoint, LocatedMessage, RelPath, ResolvedPoint, Role, Seq, ToolCall};

/// The state of a session at a point.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct Inspection {
    /// The session.
    pub session: String,
    /// The entry that was read last.
    pub seq: Seq,
    /// The last entry of the log.
    pub head: Seq,
    /// Number of objects read.
    pub objects: usize,
    /// The point that the session was forked from, if it is a fork.
    pub origin: Option<Origin>,
    /// The checkpoint, if the point is one.
    pub checkpoint: Option<Checkpoint>,
    /// Number of complete turns.
    pub turn: u64,
    /// Whether another turn has started.
    #[serde(rename = "turn_open")]
    pub is_turn_open: bool,
    /// Number of messages by role.
    pub messages: BTreeMap<&'static str, u64>,
    /// The tool calls without a result.
    pub pending_calls: Vec<ToolCall>,
    /// The end of the last tool result.
    pub last_tool_result: Option<String>,
    /// Role and text of the last message with text, sub-agents left out.
    pub last_text: Option<(&'static str, String)>,
    /// The sub-agents, by ID.
    pub sub_agents: Vec<SubAgent>,
    /// The length of each file.
    pub files: BTreeMap<RelPath, u64>,
    /// The first damage of the log.
    pub damage: Option<String>,
}

/// A sub-agent of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct SubAgent {
    /// Its ID.
    pub id: String,
    /// Number of its messages.
    pub messages: u64,
    /// The time of its last message.
    pub last_message_at: Option<Timestamp>,
    /// Whether it had not finished.
    #[serde(rename = "active")]
    pub is_active: bool,
}

/// Reads the state of a session at a point. Damage is part of the result.
pub async fn inspect(reader: ConversationReader<'_>, point: &ResolvedPoint) -> Result<Inspection> {
    let read = reader
        .read(point, Extent::All, AllMessages::default)
        .await?;
    let (overview, checkpoint) = (read.visitor, point.checkpoint.as_ref());
    let turns = overview.turn_events.tracker();
    let length = |path: &RelPath, len: u64| {
        checkpoint
            .and_then(|checkpoint| checkpoint.transcript_lengths.get(path))
            .map_or(len, |at_checkpoint| len.min(*at_checkpoint))
    };
    let files = read.state.map(|state| state.files).unwrap_or_default();
    Ok(Inspection {
        session: reader.id().name.to_string(),
        seq: read.undamaged_to,
        head: read.head,
        objects: read.objects,
        origin: reader.origin().await,
        turn: checkpoint.map_or(turns.turn, Checkpoint::complete_turns),
        is_turn_open: turns.has_open_turn(),
        messages: overview.count_by_role(),
        last_text: overview.last_text(),
        sub_agents: overview.sub_agents(),
        pending_calls: turns.pending_calls,
        last_tool_result: turns.last_tool_result,
        files: files
            .into_iter()
            .map(|(path, file)| {
                let len = length(&path, file.len);
                (path, len)
            })
            .collect(),
        damage: read.damage.map(|damage| damage.to_string()),
        checkpoint: checkpoint.cloned(),
    })
}

impl AllMessages {
    fn count_by_role(&self) -> BTreeMap<&'static str, u64> {
        let mut counts = BTreeMap::new();
        for (_, located) in self.messages.iter() {
            *counts.entry(located.message.role.as_str()).or_default() += 1;
        }
        counts
    }

    fn sub_agents(&self) -> Vec<SubAgent> {
        let mut agents: BTreeMap<&str, SubAgent> = BTreeMap::new();
        for (_, LocatedMessage { message, .. }) in self.messages.iter() {
            let Some(id) = message.sub_agent.as_deref() else {
                continue;
            };
            let agent = agents.entry(id).or_insert_with(|| SubAgent {
                id: id.to_owned(),
                messages: 0,
                last_message_at: None,
                is_active: true,
            });
            agent.messages += 1;
            agent.last_message_at = message.at.or(agent.last_message_at);
            if message.role != Role::System {
                let is_final = message.role == Role::Assistant
                    && message.kind == "text"
                    && message.is_complete;
                agent.is_active = !is_final;
            }
        }
        agents.into_values().collect()
    }

    fn last_text(&self) -> Option<(&'static str, String)> {
        let messages = self.messages.iter().map(|(_, located)| &located.message);
        messages
            .filter(|message| {
                message.sub_agent.is_none() && matches!(message.role, Role::User | Role::Assistant)
            })
            .map(|message| (message.role.as_str(), message.text()))
            .filter(|(_, text)| !text.trim().is_empty())
            .last()
    }
}
