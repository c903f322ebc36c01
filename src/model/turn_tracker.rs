//! Counts the turns and steps of a session, and makes their checkpoints. Pure.
//!
//! Owns the definition of a turn and of a step. Does not own what a line of a transcript means (the
//! profile), or which checkpoints are kept (`checkpoint.rs`).

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::model::message::{ToolCall, TurnBoundary, TurnEvent};
use crate::model::{Checkpoint, CheckpointStatus, RelPath, limits};

/// Maximum length of the excerpts of a tool's input and result.
const MAX_EXCERPT_LEN: usize = 2000;

/// How often a step gets a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointInterval {
    /// At the latest after this number of steps.
    pub steps: Option<u64>,
    /// At the latest at the first step after this time, by the times of the messages.
    pub time: Option<SignedDuration>,
}

impl Default for CheckpointInterval {
    /// After every step.
    fn default() -> Self {
        CheckpointInterval {
            steps: Some(1),
            time: None,
        }
    }
}

/// Average number of bytes per step that checkpoints may add to a header. A checkpoint has the
/// lengths of all transcripts; in a session with hundreds of sub-agents, not every step gets one.
const CHECKPOINT_BYTES_PER_STEP: usize = 4096;

/// The response that ended a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct EndedTurn {
    response_id: Option<String>,
    /// The previous checkpoint.
    parent: Option<u64>,
}

/// The tool calls of one step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct StepCalls {
    /// The response that made the calls.
    response_id: Option<String>,
    /// The IDs of the calls that have no result.
    pending: Vec<String>,
}

impl StepCalls {
    /// Applies the calls and results of a line. Returns whether the last pending call got its
    /// result.
    fn apply(&mut self, event: &TurnEvent) -> bool {
        if !event.calls.is_empty() {
            // The model responds again only if every call of its last response has a result, or
            // the agent has given up on the rest.
            if event.response_id.is_some() && event.response_id != self.response_id {
                self.pending.clear();
            }
            self.response_id.clone_from(&event.response_id);
            let ids = event.calls.iter().map(|call| call.id.clone());
            self.pending.extend(ids);
        }
        let before = self.pending.len();
        self.pending
            .retain(|id| !event.tool_results.iter().any(|(result, _)| result == id));
        self.pending.len() < before && self.pending.is_empty()
    }
}

/// The last completed step of the open turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct CompletedStep {
    response_id: Option<String>,
    /// The checkpoint that was made for it, and its parent.
    checkpoint: Option<(u64, Option<u64>)>,
}

/// Counts the turns and steps of a session and makes their checkpoints. The result depends on the
/// bytes that were read, not on how they were split into entries.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnTracker {
    /// The highest checkpoint number.
    pub last_number: u64,
    /// The checkpoint that the conversation continues from.
    pub parent: Option<u64>,
    /// Number of complete turns.
    pub turn: u64,
    /// Number of completed steps of the open turn.
    #[serde(default)]
    pub step: u64,
    /// The value of `step` at the last checkpoint; 0 at the end of a turn.
    #[serde(default)]
    checkpointed_step: u64,
    /// The tool calls of the current step.
    #[serde(default)]
    step_calls: StepCalls,
    /// The last completed step of the open turn.
    #[serde(default)]
    last_step: Option<CompletedStep>,
    /// The response that ended the last turn, as long as no prompt follows it.
    #[serde(default)]
    ended: Option<EndedTurn>,
    /// Whether a prompt followed the last complete turn.
    #[serde(default)]
    has_prompt: bool,
    /// The latest time of a checkpoint, by the clocks of all machines.
    #[serde(default)]
    pub checkpointed_at: Option<Timestamp>,
    /// Length of the transcripts at the last checkpoint. With the message below it distinguishes a
    /// new turn or step from one that is read again because its file was rewritten.
    #[serde(default)]
    checkpoint_lengths: BTreeMap<RelPath, u64>,
    /// ID of the message at the last checkpoint.
    #[serde(default)]
    checkpoint_message_id: Option<String>,
    /// Tool calls since the last complete turn that have no result.
    #[serde(default)]
    pub pending_calls: Vec<ToolCall>,
    /// The end of the last tool result since then.
    #[serde(default)]
    pub last_tool_result: Option<String>,
}

impl TurnTracker {
    /// A tracker of a session that starts with `turn` complete turns. Its last checkpoint was at
    /// `checkpointed_at`.
    pub fn starting_after(turn: u64, checkpointed_at: Option<Timestamp>) -> TurnTracker {
        TurnTracker {
            turn,
            checkpointed_at,
            ..TurnTracker::default()
        }
    }

    /// Applies events in order; returns the checkpoints that they make. `lengths` has the length of
    /// each transcript of the session.
    pub fn apply(
        &mut self,
        events: &[TurnEvent],
        lengths: &BTreeMap<RelPath, u64>,
        interval: CheckpointInterval,
    ) -> Vec<Checkpoint> {
        let mut made: Vec<Checkpoint> = Vec::new();
        self.apply_each(events, lengths, interval, |checkpoint| {
            // Only the last checkpoint can be made again.
            made.pop_if(|last| last.number == checkpoint.number);
            made.push(checkpoint);
        });
        made
    }

    /// Applies events in order, and passes each checkpoint to `on_checkpoint`. A checkpoint with
    /// the number of the previous one replaces it.
    pub fn apply_each<'a>(
        &mut self,
        events: impl IntoIterator<Item = &'a TurnEvent>,
        lengths: &BTreeMap<RelPath, u64>,
        interval: CheckpointInterval,
        mut on_checkpoint: impl FnMut(Checkpoint),
    ) {
        for event in events {
            self.track_calls(event);
            let is_step_complete = !event.is_sub_agent && self.step_calls.apply(event);
            let checkpoint = match &event.boundary {
                Some(TurnBoundary::End(stop_reason)) => self.end_turn(event, stop_reason, lengths),
                _ if is_step_complete => self.end_step(event, lengths, interval),
                _ => None,
            };
            if let Some(checkpoint) = checkpoint {
                on_checkpoint(checkpoint);
            }
        }
    }

    /// Ends the turn. Returns none if the event was applied before.
    fn end_turn(
        &mut self,
        event: &TurnEvent,
        stop_reason: &str,
        lengths: &BTreeMap<RelPath, u64>,
    ) -> Option<Checkpoint> {
        if self.is_counted(event) {
            return None;
        }
        let ended = self.ended.take();
        // Another message of the same response moves its checkpoint a little later. An agent that
        // continues without a prompt stays in the same turn.
        let is_same_response = ended.as_ref().is_some_and(|ended| {
            ended.response_id.is_some() && ended.response_id == event.response_id
        });
        let turn = next(self.turn, ended.is_none());
        let checkpoint = Checkpoint {
            number: next(self.last_number, !is_same_response),
            parent: if is_same_response {
                ended.and_then(|ended| ended.parent)
            } else {
                self.parent
            },
            status: CheckpointStatus::of_ended_turn(stop_reason),
            stop_reason: Some(stop_reason.to_owned()),
            pending_calls: std::mem::take(&mut self.pending_calls),
            ..self.checkpoint_at(event, lengths, turn)
        }
        // It is part of a header, which is uploaded with every entry that merges it. The transcript
        // has the text.
        .without_text();
        self.continue_from(&checkpoint);
        self.ended = Some(EndedTurn {
            response_id: event.response_id.clone(),
            parent: checkpoint.parent,
        });
        Some(checkpoint)
    }

    /// Ends a step. Returns its checkpoint, if one is due.
    fn end_step(
        &mut self,
        event: &TurnEvent,
        lengths: &BTreeMap<RelPath, u64>,
        interval: CheckpointInterval,
    ) -> Option<Checkpoint> {
        let response_id = self.step_calls.response_id.clone();
        // An agent can run the first calls of a response before it has received the others. They
        // are one step, whose checkpoint moves.
        let continued = self
            .last_step
            .take_if(|last| last.response_id.is_some() && last.response_id == response_id);
        self.step = next(self.step, continued.is_none());
        let mut checkpoint = None;
        if !self.is_counted(event) {
            if self.ended.take().is_some() {
                // The agent continues the turn without a prompt: it is open again.
                self.turn = self.turn.saturating_sub(1);
            }
            self.has_prompt = true;
            let moved = continued.as_ref().and_then(|step| step.checkpoint);
            let (number, parent) = moved.unwrap_or((next(self.last_number, true), self.parent));
            let candidate = Checkpoint {
                number,
                parent,
                step: Some(self.step),
                pending_calls: self.pending_calls.clone(),
                ..self.checkpoint_at(event, lengths, next(self.turn, true))
            }
            .without_text();
            if moved.is_some() || self.is_due(&candidate, interval) {
                self.set_last_checkpoint(&candidate);
                // The ID does not compress, and there are many steps.
                checkpoint = Some(Checkpoint {
                    message_id: None,
                    ..candidate
                });
            }
        }
        let made = checkpoint.as_ref();
        self.last_step = Some(CompletedStep {
            response_id,
            checkpoint: made.map(|made| (made.number, made.parent)),
        });
        checkpoint
    }

    /// Whether a step gets a checkpoint.
    fn is_due(&self, checkpoint: &Checkpoint, interval: CheckpointInterval) -> bool {
        let steps = self.step.saturating_sub(self.checkpointed_step);
        let passed = self
            .checkpointed_at
            .map(|last| checkpoint.at.duration_since(last));
        let is_late = interval
            .time
            .is_some_and(|time| passed.is_none_or(|passed| passed >= time));
        let has_enough_steps = interval.steps.is_some_and(|count| steps >= count);
        let min_steps = checkpoint.estimated_len() / CHECKPOINT_BYTES_PER_STEP;
        (is_late || has_enough_steps) && steps >= min_steps as u64
    }

    /// A checkpoint after an event, within a turn.
    fn checkpoint_at(
        &self,
        event: &TurnEvent,
        lengths: &BTreeMap<RelPath, u64>,
        turn: u64,
    ) -> Checkpoint {
        let mut transcript_lengths = lengths.clone();
        transcript_lengths.insert(event.path.clone(), event.end);
        Checkpoint {
            number: 0,
            seq: None,
            turn,
            step: None,
            status: CheckpointStatus::Running,
            parent: None,
            parent_session: None,
            at: event
                .at
                .or(self.checkpointed_at)
                .unwrap_or(Timestamp::UNIX_EPOCH),
            message_id: event.message_id.clone(),
            stop_reason: None,
            transcript_lengths,
            pending_calls: Vec::new(),
        }
    }

    /// Whether the event was applied before. An event after the last checkpoint is new, regardless
    /// of its time. In a transcript that was rewritten or renamed, its time decides.
    fn is_counted(&self, event: &TurnEvent) -> bool {
        let is_after_checkpoint = self
            .checkpoint_lengths
            .get(&event.path)
            .is_some_and(|len| event.end > *len);
        let is_same_message =
            event.message_id.is_some() && event.message_id == self.checkpoint_message_id;
        let is_later = event
            .at
            .is_some_and(|at| self.checkpointed_at.is_none_or(|last| at > last));
        !is_later && self.checkpointed_at.is_some() && (!is_after_checkpoint || is_same_message)
    }

    fn track_calls(&mut self, event: &TurnEvent) {
        if event.boundary == Some(TurnBoundary::Start) {
            self.pending_calls.clear();
            self.last_tool_result = None;
            self.ended = None;
            self.has_prompt = !self.is_counted(event);
            self.start_steps(0);
        }
        for call in &event.calls {
            if !self.pending_calls.iter().any(|known| known.id == call.id) {
                self.pending_calls.push(ToolCall {
                    input: first_bytes(&call.input),
                    ..call.clone()
                });
            }
        }
        // Some agents write a call a second time, with its result.
        for (id, text) in &event.tool_results {
            self.pending_calls.retain(|call| call.id != *id);
            self.last_tool_result = Some(last_bytes(text));
        }
    }

    /// Continues after `step` steps of a turn.
    fn start_steps(&mut self, step: u64) {
        self.step = step;
        self.checkpointed_step = step;
        self.step_calls = StepCalls::default();
        self.last_step = None;
    }

    /// Whether a prompt or a tool call followed the last complete turn.
    pub fn has_open_turn(&self) -> bool {
        self.has_prompt || !self.pending_calls.is_empty() || self.last_tool_result.is_some()
    }

    /// Continues from an earlier checkpoint, or from the start of the session.
    pub fn roll_back(&mut self, to: Option<&Checkpoint>) {
        let last_number = self.last_number;
        *self = TurnTracker::default();
        if let Some(checkpoint) = to {
            self.continue_from(checkpoint);
        }
        self.last_number = self.last_number.max(last_number);
    }

    /// Continues from a checkpoint.
    pub fn continue_from(&mut self, checkpoint: &Checkpoint) {
        self.set_last_checkpoint(checkpoint);
        self.turn = checkpoint.complete_turns();
        self.ended = None;
        self.has_prompt = checkpoint.step.is_some();
        self.start_steps(checkpoint.step.unwrap_or(0));
        self.pending_calls.clear();
        self.last_tool_result = None;
    }

    fn set_last_checkpoint(&mut self, checkpoint: &Checkpoint) {
        self.last_number = self.last_number.max(checkpoint.number);
        self.parent = Some(checkpoint.number)
            .filter(|number| *number > 0)
            .or(checkpoint.parent);
        self.checkpointed_step = checkpoint.step.unwrap_or(0);
        self.checkpointed_at = self.checkpointed_at.max(Some(checkpoint.at));
        self.checkpoint_lengths
            .clone_from(&checkpoint.transcript_lengths);
        self.checkpoint_message_id
            .clone_from(&checkpoint.message_id);
    }
}

/// The next number, if there is one. The numbers of a log are untrusted, and a turn must not be lost
/// because an earlier one has the highest number.
fn next(number: u64, is_new: bool) -> u64 {
    number
        .saturating_add(u64::from(is_new))
        .min(limits::MAX_TURN)
}

fn first_bytes(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_EXCERPT_LEN)].to_owned()
}

fn last_bytes(text: &str) -> String {
    text[text.ceil_char_boundary(text.len().saturating_sub(MAX_EXCERPT_LEN))..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(number: u64, boundary: TurnBoundary) -> TurnEvent {
        TurnEvent {
            path: "projects/-w/s1.jsonl".parse().unwrap(),
            end: number,
            at: Timestamp::from_second(number as i64).ok(),
            message_id: None,
            response_id: Some(format!("r{}", number / 3)),
            boundary: Some(boundary),
            calls: Vec::new(),
            tool_results: Vec::new(),
            is_sub_agent: false,
        }
    }

    #[test]
    fn each_end_of_a_turn_is_visited_once() {
        const TURNS: u64 = 20_000;
        // A prompt and a response of two messages per turn.
        let events: Vec<TurnEvent> = (0..TURNS)
            .flat_map(|turn| {
                let end = || TurnBoundary::End("end_turn".to_owned());
                let start = event(3 * turn, TurnBoundary::Start);
                [
                    start,
                    event(3 * turn + 1, end()),
                    event(3 * turn + 2, end()),
                ]
            })
            .collect();
        let mut visited = Vec::new();
        let mut turns = TurnTracker::default();
        turns.apply_each(
            &events,
            &BTreeMap::new(),
            CheckpointInterval::default(),
            |checkpoint| {
                visited.push(checkpoint.number);
            },
        );
        let expected: Vec<u64> = (1..=TURNS).flat_map(|number| [number, number]).collect();
        assert_eq!(visited, expected);
        assert_eq!(turns.turn, TURNS);
        let made =
            TurnTracker::default().apply(&events, &BTreeMap::new(), CheckpointInterval::default());
        assert_eq!(made.len() as u64, TURNS);
        assert_eq!(made.last().unwrap().at.as_second(), 3 * TURNS as i64 - 1);
    }
}
