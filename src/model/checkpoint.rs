//! A point of a conversation to go back to.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::message::{ToolCall, TurnBoundary, TurnEvent};
use crate::model::{RelPath, Seq};

/// What is kept of what a tool was given and said.
const LONGEST_QUOTE: usize = 2000;

/// So many checkpoints without a name are kept of a session, the newest.
pub const MOST_CHECKPOINTS: usize = 100;

/// The end of a turn, or a point that somebody gave a name. It stands in the header of the entry that carries its last
/// byte, so that it is as durable as what it points at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Counts the checkpoints of a session, also over what was gone back from. 0 if it has only a name.
    pub number: u64,
    /// The entry it is in; none in that entry itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<Seq>,
    /// The turn that is complete with it.
    pub turn: u64,
    /// The checkpoint that the conversation went on from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u64>,
    /// When its last message was said.
    pub at: Timestamp,
    /// That message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Why the agent stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<String>,
    /// How long each transcript is. Files that are replaced as one are as the entry leaves them.
    pub files: BTreeMap<RelPath, u64>,
    /// Tools that were called and had not answered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending: Vec<ToolCall>,
    /// The end of what the last tool said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_answer: Option<String>,
}

impl Checkpoint {
    /// The same without a word of what was said.
    #[must_use]
    pub fn without_text(&self) -> Checkpoint {
        let pending = self
            .pending
            .iter()
            .map(|call| ToolCall {
                input: String::new(),
                ..call.clone()
            })
            .collect();
        Checkpoint {
            pending,
            last_answer: None,
            ..self.clone()
        }
    }
}

/// The answer that completed a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Ended {
    answer: Option<String>,
    /// The checkpoint before.
    parent: Option<u64>,
}

/// How far the turns of a session have come. What was read decides, however it was cut into pieces.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnTracker {
    /// The highest number of a checkpoint.
    pub number: u64,
    /// The checkpoint that the conversation goes on from.
    pub parent: Option<u64>,
    /// Turns that are complete.
    pub turn: u64,
    /// The answer that completed the last of them, and whether nobody has prompted since.
    #[serde(default)]
    ended: Option<Ended>,
    /// Somebody has prompted since.
    #[serde(default)]
    prompted: bool,
    /// When the latest of them was, by whichever clock.
    pub last: Option<Timestamp>,
    /// How long the transcripts were then, and the message that completed it. What is read once more, because its file was
    /// written anew, counts once.
    #[serde(default)]
    counted: BTreeMap<RelPath, u64>,
    #[serde(default)]
    completed_by: Option<String>,
    /// Tools that were called since and have not answered.
    #[serde(default)]
    pub pending: Vec<ToolCall>,
    /// The end of what the last tool said.
    #[serde(default)]
    pub last_answer: Option<String>,
}

impl TurnTracker {
    /// So many turns are complete, the last of them at that time.
    pub fn after(turn: u64, last: Option<Timestamp>) -> TurnTracker {
        TurnTracker {
            turn,
            last,
            ..TurnTracker::default()
        }
    }

    /// Takes in what was read; answers the checkpoints that it makes. `lengths` are the lengths of the session's transcripts.
    pub fn take(
        &mut self,
        marks: &[TurnEvent],
        lengths: &BTreeMap<RelPath, u64>,
    ) -> Vec<Checkpoint> {
        let mut made: Vec<Checkpoint> = Vec::new();
        for marked in marks {
            self.note(marked);
            let Some(TurnBoundary::End(stop)) = &marked.mark else {
                continue;
            };
            if self.is_counted(marked) {
                continue;
            }
            let at = marked.at.or(self.last).unwrap_or(Timestamp::UNIX_EPOCH);
            let mut files = lengths.clone();
            files.insert(marked.path.clone(), marked.end);
            let ended = self.ended.take();
            // One more piece of the same answer: the same point, a little later. And an agent that goes on by itself is still
            // at the same turn.
            let same_answer = ended
                .as_ref()
                .is_some_and(|ended| ended.answer.is_some() && ended.answer == marked.answer);
            let checkpoint = Checkpoint {
                number: self.number + u64::from(!same_answer),
                seq: None,
                turn: self.turn + u64::from(ended.is_none()),
                parent: if same_answer {
                    ended.and_then(|ended| ended.parent)
                } else {
                    self.parent
                },
                at,
                uuid: marked.uuid.clone(),
                stop: Some(stop.clone()),
                files,
                pending: std::mem::take(&mut self.pending),
                last_answer: self.last_answer.take(),
            };
            self.follow(&checkpoint);
            self.ended = Some(Ended {
                answer: marked.answer.clone(),
                parent: checkpoint.parent,
            });
            made.retain(|earlier| earlier.number != checkpoint.number);
            made.push(checkpoint);
        }
        made
    }

    /// Whether it was read before. What stands behind the last end of a turn is new, whatever its clock says; elsewhere, in a
    /// transcript that was written anew or has another name, only its time can tell.
    fn is_counted(&self, marked: &TurnEvent) -> bool {
        let behind = self
            .counted
            .get(&marked.path)
            .is_some_and(|len| marked.end > *len);
        let same = marked.uuid.is_some() && marked.uuid == self.completed_by;
        let later = marked
            .at
            .is_some_and(|at| self.last.is_none_or(|last| at > last));
        !later && self.last.is_some() && (!behind || same)
    }

    fn note(&mut self, marked: &TurnEvent) {
        if marked.mark == Some(TurnBoundary::Start) {
            self.pending.clear();
            self.last_answer = None;
            self.ended = None;
            self.prompted = !self.is_counted(marked);
        }
        for call in &marked.calls {
            if !self.pending.iter().any(|known| known.id == call.id) {
                self.pending.push(ToolCall {
                    input: quote(&call.input),
                    ..call.clone()
                });
            }
        }
        // Some agents write a call once more, with its answer.
        for (id, said) in &marked.answers {
            self.pending.retain(|call| call.id != *id);
            self.last_answer = Some(quote_end(said));
        }
    }

    /// Whether somebody has prompted, or a tool was called, since the last turn was complete.
    pub fn is_open(&self) -> bool {
        self.prompted || !self.pending.is_empty() || self.last_answer.is_some()
    }

    /// The conversation goes on from an earlier checkpoint, or from before the first.
    pub fn go_back(&mut self, to: Option<&Checkpoint>) {
        let number = self.number;
        *self = TurnTracker::default();
        if let Some(point) = to {
            self.follow(point);
        }
        self.number = self.number.max(number);
    }

    /// Goes on behind a checkpoint.
    pub fn follow(&mut self, checkpoint: &Checkpoint) {
        self.number = self.number.max(checkpoint.number);
        self.parent = Some(checkpoint.number)
            .filter(|number| *number > 0)
            .or(checkpoint.parent);
        self.turn = checkpoint.turn;
        self.ended = None;
        self.prompted = false;
        self.last = self.last.max(Some(checkpoint.at));
        self.counted.clone_from(&checkpoint.files);
        self.completed_by.clone_from(&checkpoint.uuid);
        self.pending.clear();
        self.last_answer = None;
    }
}

fn quote(text: &str) -> String {
    text[..text.floor_char_boundary(LONGEST_QUOTE)].to_owned()
}

fn quote_end(text: &str) -> String {
    text[text.ceil_char_boundary(text.len().saturating_sub(LONGEST_QUOTE))..].to_owned()
}
