//! The turns of a conversation at a point of its log: which are complete, and which tool calls are
//! pending.
//!
//! Owns reading turns from the transcripts. Does not own the definition of a turn
//! (`model/checkpoint.rs`).

use std::collections::BTreeMap;

use super::Logs;
use super::errors;
use super::read::{ReadOptions, ReadOutcome};
use super::replay::{PerTranscript, TranscriptReplay, TranscriptVisitor};
use super::state::LogState;
use crate::agent::Profile;
use crate::error::Result;
use crate::model::message::TurnEvent;
use crate::model::{
    Checkpoint, CheckpointInterval, CheckpointStatus, FileKind, FileMove, LocatedMessage, LogId,
    RelPath, ResolvedPoint, TurnTracker,
};

/// The turn events of all transcripts of a session.
#[derive(Debug, Clone, Default)]
pub struct TurnEvents(PerTranscript<TurnEvent>);

impl TurnEvents {
    /// The state that the events lead to.
    pub fn tracker(&self) -> TurnTracker {
        let events = self.0.iter().map(|(_, event)| event);
        let mut turns = TurnTracker::default();
        turns.apply_each(
            events,
            &BTreeMap::new(),
            CheckpointInterval::default(),
            drop,
        );
        turns
    }
}

impl TranscriptVisitor for TurnEvents {
    fn visit_message(&mut self, _message: LocatedMessage) {}

    fn visit_turn_event(&mut self, event: TurnEvent) {
        self.0.push(event.path.clone(), event.end, event);
    }

    fn truncate(&mut self, path: &RelPath, from: u64) {
        self.0.truncate(path, from);
    }

    fn apply_move(&mut self, moved: &FileMove) {
        self.0.apply_move(moved);
    }

    fn start_fork(&mut self, names: &BTreeMap<RelPath, RelPath>) {
        self.0.start_fork(names);
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

/// The state of a log, and the turns of its conversation.
pub type LogTurns<'a> = (LogState, TranscriptReplay<'a, TurnEvents>);

impl Logs {
    /// Reads the turns of a conversation up to a point. Damage is part of the outcome.
    pub async fn read_turns<'a>(
        &self,
        profile: &'a dyn Profile,
        id: &LogId,
        point: &ResolvedPoint,
    ) -> Result<ReadOutcome<LogTurns<'a>>> {
        let sink = || {
            (
                LogState::default(),
                TranscriptReplay::new(profile, TurnEvents::default()),
            )
        };
        let options = ReadOptions::up_to(point);
        let mut read = self.read_log(id, options, sink).await?;
        errors::check_point(id, point.at, &read)?;
        if let Some(checkpoint) = &point.checkpoint {
            read.sink.1.truncate_to(&checkpoint.transcript_lengths);
        }
        Ok(read)
    }

    /// A checkpoint at the end of an entry, with the tool calls that are pending there.
    pub async fn checkpoint_at(
        &self,
        profile: &dyn Profile,
        id: &LogId,
        point: &ResolvedPoint,
    ) -> Result<Checkpoint> {
        let read = self.read_turns(profile, id, point).await?;
        let (seq, (state, replay)) = (read.seq, read.require_undamaged(id)?);
        let turns = replay.visitor.tracker();
        let is_open = turns.has_open_turn();
        let step = Some(turns.step).filter(|step| is_open && *step > 0);
        let last = state.active_checkpoints().last().map(|last| last.status);
        let status = match is_open {
            true => CheckpointStatus::Running,
            false => last.unwrap_or_default(),
        };
        let transcripts = state
            .files
            .iter()
            .filter(|(_, file)| file.kind == FileKind::Append);
        Ok(Checkpoint {
            number: 0,
            seq: Some(seq),
            turn: state.turns.turn.saturating_add(u64::from(step.is_some())),
            step,
            status,
            parent: state.turns.parent,
            parent_session: None,
            at: self.clock.now(),
            message_id: None,
            stop_reason: None,
            transcript_lengths: transcripts
                .map(|(path, file)| (path.clone(), file.len))
                .collect(),
            pending_calls: turns.pending_calls,
        })
    }
}
