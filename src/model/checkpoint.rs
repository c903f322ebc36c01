//! Checkpoints: the points of a conversation that a restore can return to.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::model::limits::{self, check};
use crate::model::message::{ToolCall, TurnBoundary, TurnEvent};
use crate::model::{RelPath, Seq};

/// Maximum length of the excerpts of a tool's input and result.
const MAX_EXCERPT_LEN: usize = 2000;

/// Maximum number of unnamed checkpoints that are kept per session; the newest stay.
pub const MAX_CHECKPOINTS: usize = 100;

/// The end of a turn, or a point that a user has named. It is stored in the header of the entry
/// that holds its last byte, so that it is exactly as durable as the bytes it refers to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The number of the checkpoint in its session, rewound ones included. 0 for a checkpoint that
    /// has only a name.
    pub number: u64,
    /// The entry that holds it; none within that entry itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<Seq>,
    /// The turn that ends here.
    pub turn: u64,
    /// The checkpoint that the conversation continued from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u64>,
    /// Time of its last message.
    pub at: Timestamp,
    /// ID of its last message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<String>,
    /// Why the agent stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<String>,
    /// Length of each transcript. Side files are as the entry leaves them.
    pub transcript_lengths: BTreeMap<RelPath, u64>,
    /// Tool calls without a result.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending_calls: Vec<ToolCall>,
}

impl Checkpoint {
    /// Checks every number against the limits of the format.
    pub fn check_limits(&self) -> Result<()> {
        check(
            "seq of a checkpoint",
            self.seq.unwrap_or(0),
            limits::MAX_SEQ,
        )?;
        for number in [self.number, self.turn, self.parent.unwrap_or(0)] {
            check("number of a turn", number, limits::MAX_TURN)?;
        }
        self.transcript_lengths
            .values()
            .try_for_each(|len| check("length", *len, limits::MAX_FILE_LEN))
    }

    /// Its approximate size in a header.
    pub fn estimated_len(&self) -> usize {
        // Texts that are escaped in JSON are at most six times as long.
        let texts = [&self.message_id, &self.stop_reason];
        let texts = texts.into_iter().flatten().map(|text| 6 * text.len());
        let paths = self.transcript_lengths.keys();
        let calls = self.pending_calls.iter();
        300 + texts.sum::<usize>()
            + paths
                .map(|path| 6 * path.as_str().len() + 24)
                .sum::<usize>()
            + calls
                .map(|call| 6 * (call.input.len() + call.name.len()) + 200)
                .sum::<usize>()
    }

    /// The same checkpoint without any text of the conversation.
    #[must_use]
    pub fn without_text(&self) -> Checkpoint {
        let mut checkpoint = self.clone();
        for call in &mut checkpoint.pending_calls {
            call.input.clear();
        }
        checkpoint
    }
}

/// The response that ended a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct EndedTurn {
    response_id: Option<String>,
    /// The previous checkpoint.
    parent: Option<u64>,
}

/// Counts the turns of a session and makes their checkpoints. The result depends on the bytes that
/// were read, not on how they were split into entries.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnTracker {
    /// The highest checkpoint number.
    pub last_number: u64,
    /// The checkpoint that the conversation continues from.
    pub parent: Option<u64>,
    /// Number of complete turns.
    pub turn: u64,
    /// The response that ended the last turn, as long as no prompt follows it.
    #[serde(default)]
    ended: Option<EndedTurn>,
    /// Whether a prompt followed the last complete turn.
    #[serde(default)]
    has_prompt: bool,
    /// The latest time at which a turn ended, by the clocks of all machines.
    pub turn_ended_at: Option<Timestamp>,
    /// Length of the transcripts at the end of that turn. With the message below it
    /// distinguishes a new turn from one that is read again because its file was rewritten.
    #[serde(default)]
    turn_end_lengths: BTreeMap<RelPath, u64>,
    /// ID of the message that ended that turn.
    #[serde(default)]
    turn_end_message_id: Option<String>,
    /// Tool calls since then that have no result.
    #[serde(default)]
    pub pending_calls: Vec<ToolCall>,
    /// The end of the last tool result since then.
    #[serde(default)]
    pub last_tool_result: Option<String>,
}

impl TurnTracker {
    /// A tracker of a session that starts with `turn` complete turns, the last of which ended at
    /// `turn_ended_at`.
    pub fn starting_after(turn: u64, turn_ended_at: Option<Timestamp>) -> TurnTracker {
        TurnTracker {
            turn,
            turn_ended_at,
            ..TurnTracker::default()
        }
    }

    /// Applies events in order; returns the checkpoints that they make. `lengths` has the length of
    /// each transcript of the session.
    pub fn apply(
        &mut self,
        events: &[TurnEvent],
        lengths: &BTreeMap<RelPath, u64>,
    ) -> Vec<Checkpoint> {
        let mut made: Vec<Checkpoint> = Vec::new();
        self.apply_each(events, lengths, |checkpoint| {
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
        mut on_checkpoint: impl FnMut(Checkpoint),
    ) {
        for event in events {
            self.track_calls(event);
            let Some(TurnBoundary::End(stop_reason)) = &event.boundary else {
                continue;
            };
            if self.is_counted(event) {
                continue;
            }
            let at = event
                .at
                .or(self.turn_ended_at)
                .unwrap_or(Timestamp::UNIX_EPOCH);
            let mut transcript_lengths = lengths.clone();
            transcript_lengths.insert(event.path.clone(), event.end);
            let ended = self.ended.take();
            // Another message of the same response moves its checkpoint a little later. An agent
            // that continues without a prompt stays in the same turn.
            let is_same_response = ended.as_ref().is_some_and(|ended| {
                ended.response_id.is_some() && ended.response_id == event.response_id
            });
            let checkpoint = Checkpoint {
                number: next(self.last_number, !is_same_response),
                seq: None,
                turn: next(self.turn, ended.is_none()),
                parent: if is_same_response {
                    ended.and_then(|ended| ended.parent)
                } else {
                    self.parent
                },
                at,
                message_id: event.message_id.clone(),
                stop_reason: Some(stop_reason.clone()),
                transcript_lengths,
                pending_calls: std::mem::take(&mut self.pending_calls),
            }
            // It is part of a header, which is uploaded with every entry that merges it. The
            // transcript has the text.
            .without_text();
            self.continue_from(&checkpoint);
            self.ended = Some(EndedTurn {
                response_id: event.response_id.clone(),
                parent: checkpoint.parent,
            });
            on_checkpoint(checkpoint);
        }
    }

    /// Whether the event was applied before. An event after the last end of a turn is new,
    /// regardless of its time. In a transcript that was rewritten or renamed, its time decides.
    fn is_counted(&self, event: &TurnEvent) -> bool {
        let is_after_turn_end = self
            .turn_end_lengths
            .get(&event.path)
            .is_some_and(|len| event.end > *len);
        let is_same_message =
            event.message_id.is_some() && event.message_id == self.turn_end_message_id;
        let is_later = event
            .at
            .is_some_and(|at| self.turn_ended_at.is_none_or(|last| at > last));
        !is_later && self.turn_ended_at.is_some() && (!is_after_turn_end || is_same_message)
    }

    fn track_calls(&mut self, event: &TurnEvent) {
        if event.boundary == Some(TurnBoundary::Start) {
            self.pending_calls.clear();
            self.last_tool_result = None;
            self.ended = None;
            self.has_prompt = !self.is_counted(event);
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
        self.last_number = self.last_number.max(checkpoint.number);
        self.parent = Some(checkpoint.number)
            .filter(|number| *number > 0)
            .or(checkpoint.parent);
        self.turn = checkpoint.turn;
        self.ended = None;
        self.has_prompt = false;
        self.turn_ended_at = self.turn_ended_at.max(Some(checkpoint.at));
        self.turn_end_lengths
            .clone_from(&checkpoint.transcript_lengths);
        self.turn_end_message_id.clone_from(&checkpoint.message_id);
        self.pending_calls.clear();
        self.last_tool_result = None;
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
        turns.apply_each(&events, &BTreeMap::new(), |checkpoint| {
            visited.push(checkpoint.number);
        });
        let expected: Vec<u64> = (1..=TURNS).flat_map(|number| [number, number]).collect();
        assert_eq!(visited, expected);
        assert_eq!(turns.turn, TURNS);
        let made = TurnTracker::default().apply(&events, &BTreeMap::new());
        assert_eq!(made.len() as u64, TURNS);
        assert_eq!(made.last().unwrap().at.as_second(), 3 * TURNS as i64 - 1);
    }
}
