//! A session at one point: its turns, pending tool calls, sub-agents and files.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::messages::AllMessages;
use super::reader::{ConversationReader, Extent, Origin};
use crate::error::Result;
use crate::model::checkpoint::API_ERROR;
use crate::model::{
    Block, Checkpoint, CheckpointStatus, LocatedMessage, Message, Prices, RelPath, ResolvedPoint,
    Role, Seq, Tokens, ToolCall,
};

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
    /// What the agent was doing: within a turn `running`, otherwise how the last turn ended. None
    /// before the first turn.
    pub status: Option<CheckpointStatus>,
    /// Time of the first message.
    pub started_at: Option<Timestamp>,
    /// Time of the last checkpoint up to the point.
    pub checkpointed_at: Option<Timestamp>,
    /// Model of the last response.
    pub model: Option<String>,
    /// Version of the agent.
    pub agent_version: Option<String>,
    /// Number of complete turns.
    pub turn: u64,
    /// Number of completed steps of the open turn.
    pub step: u64,
    /// Whether another turn has started.
    #[serde(rename = "turn_open")]
    pub is_turn_open: bool,
    /// Number of messages by role.
    pub messages: BTreeMap<&'static str, u64>,
    /// Token usage of all responses.
    pub tokens: Tokens,
    /// Cost of all responses in US dollars, as far as their prices are known.
    pub cost_usd: Option<f64>,
    /// Number of turns and calls that ended with an error of the model API, after its retries.
    pub api_errors: u64,
    /// Number of requests to the model API that the agent repeated after an error.
    pub api_retries: u64,
    /// The tools that were called, by name; those of sub-agents included.
    pub tools: BTreeMap<String, ToolUse>,
    /// The tool calls without a result.
    pub pending_calls: Vec<ToolCall>,
    /// The tool calls with a result, oldest first; only if they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed_calls: Option<Vec<CompletedCall>>,
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

/// How often a tool was called.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct ToolUse {
    /// Number of calls.
    pub calls: u64,
    /// Number of results that are errors, denied calls included.
    pub errors: u64,
    /// Number of calls that the user or a permission rule denied.
    pub denials: u64,
    /// Number of calls without a result.
    pub pending: u64,
}

/// A tool call with its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct CompletedCall {
    /// The call, with its whole input.
    #[serde(flatten)]
    pub call: ToolCall,
    /// The sub-agent that made it.
    pub sub_agent: Option<String>,
    /// Time of the result.
    pub ended: Option<Timestamp>,
    /// Whether the tool failed.
    #[serde(rename = "error")]
    pub is_error: bool,
    /// What the tool returned, cut to 64 KiB.
    pub result: String,
}

/// Maximum length of a result, in bytes.
const MAX_RESULT_LEN: usize = 64 << 10;

/// The beginnings of the results that Claude Code writes for a denied call.
const DENIALS: [&str; 3] = [
    "The user doesn't want to proceed with this tool use",
    "Claude requested permissions to",
    "Permission to use ",
];

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

/// What to read of a session.
#[derive(Debug, Clone, Default)]
pub struct InspectOptions {
    /// Whether to return the completed calls, and all inputs whole.
    pub full: bool,
    /// The prices of models.
    pub prices: Prices,
}

/// Reads the state of a session at a point. Damage is part of the result.
pub async fn inspect(
    reader: ConversationReader<'_>,
    point: &ResolvedPoint,
    options: &InspectOptions,
) -> Result<Inspection> {
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
    let last = read
        .state
        .as_ref()
        .and_then(|state| state.active_checkpoints().last().copied().cloned());
    let last = checkpoint.cloned().or(last);
    let files = read.state.map(|state| state.files).unwrap_or_default();
    let calls = overview.calls();
    let (tokens, cost) = overview.usage(&options.prices);
    let pending_calls = match options.full {
        true => whole(&turns.pending_calls, &calls.pending),
        false => turns.pending_calls.clone(),
    };
    Ok(Inspection {
        status: match turns.has_open_turn() {
            true => Some(CheckpointStatus::Running),
            false => last.as_ref().map(|last| last.status),
        },
        started_at: overview.started_at(),
        checkpointed_at: last.as_ref().map(|last| last.at),
        model: read.facts.model,
        agent_version: read.facts.agent_version,
        step: turns.step,
        tokens,
        cost_usd: cost.map(|millionths| millionths as f64 / 1e6),
        api_errors: overview.count_kind(Role::Assistant, API_ERROR),
        api_retries: overview.count_kind(Role::System, API_ERROR),
        tools: calls.tools,
        completed_calls: options.full.then_some(calls.completed),
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
        pending_calls,
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

/// The pending calls, with their whole inputs where the messages have them.
fn whole(pending: &[ToolCall], known: &BTreeMap<String, ToolCall>) -> Vec<ToolCall> {
    let whole = |call: &ToolCall| known.get(&call.id).unwrap_or(call).clone();
    pending.iter().map(whole).collect()
}

/// The tool calls of a conversation.
#[derive(Default)]
struct Calls {
    tools: BTreeMap<String, ToolUse>,
    /// The calls without a result, by ID.
    pending: BTreeMap<String, ToolCall>,
    completed: Vec<CompletedCall>,
}

impl Calls {
    fn add(&mut self, message: &Message) {
        for block in &message.blocks {
            match block {
                Block::ToolCall(call) if !self.pending.contains_key(&call.id) => {
                    let tool = self.tools.entry(call.name.clone()).or_default();
                    tool.calls += 1;
                    tool.pending += 1;
                    self.pending.insert(call.id.clone(), call.clone());
                }
                Block::ToolResult {
                    call_id,
                    text,
                    is_error,
                } => {
                    let Some(call) = self.pending.remove(call_id) else {
                        continue;
                    };
                    let tool = self.tools.entry(call.name.clone()).or_default();
                    tool.pending -= 1;
                    tool.errors += u64::from(*is_error);
                    let is_denied =
                        *is_error && DENIALS.iter().any(|text_of| text.starts_with(text_of));
                    tool.denials += u64::from(is_denied);
                    self.completed.push(CompletedCall {
                        call,
                        sub_agent: message.sub_agent.clone(),
                        ended: message.at,
                        is_error: *is_error,
                        result: text[..text.floor_char_boundary(MAX_RESULT_LEN)].to_owned(),
                    });
                }
                _ => {}
            }
        }
    }
}

impl AllMessages {
    fn calls(&self) -> Calls {
        let mut calls = Calls::default();
        for (_, located) in self.messages.iter() {
            calls.add(&located.message);
        }
        calls.completed.sort_by_key(|completed| completed.ended);
        calls
    }

    fn started_at(&self) -> Option<Timestamp> {
        let messages = self.messages.iter();
        messages.filter_map(|(_, located)| located.message.at).min()
    }

    fn count_kind(&self, role: Role, kind: &str) -> u64 {
        let messages = self.messages.iter().map(|(_, located)| &located.message);
        messages
            .filter(|message| message.role == role && message.kind == kind)
            .count() as u64
    }

    /// The tokens and the cost of all responses. The messages of a response repeat its usage; that
    /// of the last complete one counts.
    fn usage(&self, prices: &Prices) -> (Tokens, Option<u64>) {
        let mut responses: BTreeMap<String, &Message> = BTreeMap::new();
        for (index, (_, located)) in self.messages.iter().enumerate() {
            let message = &located.message;
            if message.tokens.is_none() {
                continue;
            }
            let own = || format!("#{index}");
            let key = message.response_id.clone().unwrap_or_else(own);
            let known = responses.entry(key).or_insert(message);
            if message.is_complete {
                *known = message;
            }
        }
        let (mut tokens, mut cost) = (Tokens::default(), None);
        for message in responses.into_values() {
            let Some(used) = message.tokens else { continue };
            tokens = tokens.plus(used);
            let model = message.model.as_deref();
            let price = message.cost.or_else(|| prices.cost(model?, used));
            if let Some(price) = price {
                cost = Some(price.saturating_add(cost.unwrap_or(0)));
            }
        }
        (tokens, cost)
    }

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
                    && matches!(message.kind.as_str(), "text" | API_ERROR)
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
