//! Checkpoints: the points of a conversation that a restore can return to.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::model::limits::{self, check};
use crate::model::message::ToolCall;
use crate::model::{LogName, RelPath, Seq};

/// What the agent was doing at a checkpoint.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointStatus {
    /// The turn goes on: the checkpoint is the end of a step, or a named point within a turn.
    Running,
    /// The turn ended with a response.
    #[default]
    Completed,
    /// The turn ended with an error of the model API.
    Failed,
    /// The turn was interrupted.
    Interrupted,
}

impl CheckpointStatus {
    /// The status after a turn that ended for this reason.
    pub fn of_ended_turn(stop_reason: &str) -> CheckpointStatus {
        match stop_reason {
            "interrupted" | "aborted" | "cancelled" | "replaced" | "review_ended"
            | "budget_limited" => CheckpointStatus::Interrupted,
            API_ERROR | "error" => CheckpointStatus::Failed,
            _ => CheckpointStatus::Completed,
        }
    }

    /// The name in lists and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            CheckpointStatus::Running => "running",
            CheckpointStatus::Completed => "completed",
            CheckpointStatus::Failed => "failed",
            CheckpointStatus::Interrupted => "interrupted",
        }
    }
}

/// The reason of a turn that ended with an error of the model API.
pub const API_ERROR: &str = "api_error";

/// The end of a turn or a step, or a point that a user has named. It is stored in the header of the entry
/// that holds its last byte, so that it is exactly as durable as the bytes it refers to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Checkpoint {
    /// The number of the checkpoint in its session, rewound ones included. 0 for a checkpoint that
    /// has only a name.
    pub number: u64,
    /// The entry that holds it; none within that entry itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<Seq>,
    /// The turn that ends here; of a step, the turn that it belongs to.
    pub turn: u64,
    /// The number of the step within its turn; none at the end of a turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// What the agent was doing.
    #[serde(default)]
    pub status: CheckpointStatus,
    /// The checkpoint that the conversation continued from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u64>,
    /// The session that has the parent, where it is the origin of a fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_session: Option<LogName>,
    /// Time of its last message.
    pub at: Timestamp,
    /// ID of its last message; none for a step.
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
        let optional = [self.parent, self.step].map(Option::unwrap_or_default);
        for number in [self.number, self.turn].into_iter().chain(optional) {
            check("number of a turn", number, limits::MAX_TURN)?;
        }
        self.transcript_lengths
            .values()
            .try_for_each(|len| check("length", *len, limits::MAX_FILE_LEN))
    }

    /// Number of complete turns at this point.
    pub fn complete_turns(&self) -> u64 {
        self.turn.saturating_sub(u64::from(self.step.is_some()))
    }

    /// Number of bytes of the transcripts at this point.
    pub fn size(&self) -> u64 {
        let lengths = self.transcript_lengths.values();
        lengths.fold(0, |sum, len| sum.saturating_add(*len))
    }

    /// Whether it is a step that only continues the checkpoint before it. Only such a checkpoint
    /// is thinned out, so that the parent of a missing number is always the number before it.
    fn is_plain_step(&self) -> bool {
        self.step.is_some()
            && self
                .parent
                .is_some_and(|parent| parent.saturating_add(1) == self.number)
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

/// Which checkpoints of a session are kept. Named ones are always kept.
///
/// The rule depends only on the numbers. What it drops from a part of a log, it also drops from the
/// whole log, so merges, readers and the index keep the same checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointRetention {
    /// Number of ends of turns; the newest are kept.
    pub turns: u64,
    /// Number of newest checkpoints whose steps are all kept. Of the steps before them, every second
    /// is kept, then every fourth, and so on, each over twice the distance.
    pub steps: u64,
}

impl Default for CheckpointRetention {
    fn default() -> Self {
        CheckpointRetention {
            turns: 100,
            steps: 16,
        }
    }
}

impl CheckpointRetention {
    /// The largest numbers. A header has at most `MAX_HEADER_CHECKPOINTS` checkpoints.
    pub const MAX: CheckpointRetention = CheckpointRetention {
        turns: 400,
        steps: 100,
    };

    /// Checks the numbers against the limits of the format.
    pub fn check_limits(&self) -> Result<()> {
        check("number of kept turns", self.turns, Self::MAX.turns)?;
        check("number of kept steps", self.steps, Self::MAX.steps)
    }

    /// Adds a checkpoint; it replaces one with the same number.
    pub fn add(checkpoints: &mut Vec<Checkpoint>, checkpoint: Checkpoint) {
        checkpoints.retain(|earlier| earlier.number != checkpoint.number);
        checkpoints.push(checkpoint);
    }

    /// Drops the checkpoints that are not kept.
    pub fn apply(&self, checkpoints: &mut Vec<Checkpoint>) {
        let last = checkpoints.iter().map(|checkpoint| checkpoint.number).max();
        let last = last.unwrap_or_default();
        let turns = checkpoints.iter().filter(|point| point.step.is_none());
        let mut surplus_turns = turns.count().saturating_sub(self.turns as usize);
        checkpoints.retain(|checkpoint| {
            if checkpoint.step.is_some() {
                return !checkpoint.is_plain_step() || self.keeps_step(checkpoint.number, last);
            }
            let is_surplus = surplus_turns > 0;
            surplus_turns -= usize::from(is_surplus);
            !is_surplus
        });
        // Rollbacks to steps are rare, and an untrusted log can have any number of them.
        let surplus = checkpoints
            .len()
            .saturating_sub(limits::MAX_HEADER_CHECKPOINTS);
        checkpoints.drain(..surplus);
    }

    /// Whether a step is kept when `last` is the highest number. The index has the same rule in SQL.
    fn keeps_step(&self, number: u64, last: u64) -> bool {
        let spacing = number & number.wrapping_neg();
        last.saturating_sub(number) < self.steps.saturating_mul(spacing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(number: u64, step: Option<u64>) -> Checkpoint {
        Checkpoint {
            number,
            seq: None,
            turn: 1,
            step,
            status: CheckpointStatus::Running,
            parent: number.checked_sub(1),
            parent_session: None,
            at: Timestamp::UNIX_EPOCH,
            message_id: None,
            stop_reason: None,
            transcript_lengths: BTreeMap::new(),
            pending_calls: Vec::new(),
        }
    }

    fn numbers(checkpoints: &[Checkpoint]) -> Vec<u64> {
        checkpoints.iter().map(|point| point.number).collect()
    }

    #[test]
    fn old_steps_are_thinned_and_new_ones_are_all_kept() {
        let retention = CheckpointRetention::default();
        let mut all: Vec<Checkpoint> = (1..=10_000).map(|n| checkpoint(n, Some(n))).collect();
        retention.apply(&mut all);
        let kept = numbers(&all);
        assert!(kept.len() < 400, "{}", kept.len());
        assert!((9_985..=10_000).all(|number| kept.contains(&number)));
        // The distance of two kept steps is small compared to their age.
        for pair in kept.windows(2) {
            let age = 10_000 - pair[0];
            assert!(pair[1] - pair[0] <= age / 4 + 2, "{pair:?}");
        }
    }

    #[test]
    fn the_kept_checkpoints_do_not_depend_on_how_the_log_is_split() {
        let retention = CheckpointRetention { turns: 7, steps: 8 };
        // Every 9th checkpoint is the end of a turn.
        let all: Vec<Checkpoint> = (1..=1_000)
            .map(|n| checkpoint(n, Some(n).filter(|n| n % 9 > 0)))
            .collect();
        let mut expected = all.clone();
        retention.apply(&mut expected);
        for size in [1, 3, 64, 400] {
            let mut kept = Vec::new();
            for range in all.chunks(size) {
                let mut range = range.to_vec();
                retention.apply(&mut range);
                kept.extend(range);
                retention.apply(&mut kept);
            }
            assert_eq!(numbers(&kept), numbers(&expected), "{size}");
        }
    }
}
