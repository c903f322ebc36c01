//! A visitor that keeps every message of a conversation, and its turn events.

use std::collections::BTreeMap;

use super::reader::ConversationVisitor;
use crate::log::replay::{PerTranscript, TranscriptVisitor};
use crate::log::turns::TurnEvents;
use crate::model::message::TurnEvent;
use crate::model::{FileMove, LocatedMessage, RelPath};

/// All messages and turn events of a conversation.
#[derive(Default)]
pub(super) struct AllMessages {
    pub(super) messages: PerTranscript<LocatedMessage>,
    pub(super) turn_events: TurnEvents,
}

impl ConversationVisitor for AllMessages {
    fn message_count(&self) -> usize {
        self.messages.iter().count()
    }
}

impl TranscriptVisitor for AllMessages {
    fn visit_message(&mut self, located: LocatedMessage) {
        self.messages
            .push(located.path.clone(), located.start + located.len, located);
    }

    fn visit_turn_event(&mut self, event: TurnEvent) {
        self.turn_events.visit_turn_event(event);
    }

    fn truncate(&mut self, path: &RelPath, from: u64) {
        self.messages.truncate(path, from);
        self.turn_events.truncate(path, from);
    }

    fn apply_move(&mut self, moved: &FileMove) {
        self.messages.apply_move(moved);
        self.turn_events.apply_move(moved);
    }

    fn start_fork(&mut self, names: &BTreeMap<RelPath, RelPath>) {
        self.messages.start_fork(names);
        self.turn_events.start_fork(names);
    }

    fn clear(&mut self) {
        *self = AllMessages::default();
    }
}
