//! What can be read of a session's conversation, however damaged its log is: for a prompt, where it cannot be restored.
//!
//! Owns what is read of a damaged log. Does not own how it is told (`prose`). Writes nothing and claims nothing.

use std::collections::BTreeSet;

use super::history_text::HistoryText;
use super::point::ResolvedPoint;
use crate::agent::Profile;
use crate::error::{ErrorContext, ErrorKind, Result};
use crate::log::Logs;
use crate::log::read::ReadOptions;
use crate::log::replay::TranscriptReplay;
use crate::log::segments::{self, Name, Prefer, cover};
use crate::log::state::LogState;
use crate::model::{LogId, LogPoint, Seq, SessionFacts, Version};

/// What was heard of a session.
pub struct History {
    /// The end of the conversation.
    pub prose: HistoryText,
    /// What is known of the session.
    pub facts: SessionFacts,
    /// Up to this entry the log is sound.
    pub sound_to: Seq,
    /// The last entry of all.
    pub head: Seq,
}

impl History {
    /// The version of the agent that wrote last.
    pub fn version(&self) -> Option<Version> {
        self.facts
            .agent_version
            .as_deref()
            .and_then(|version| version.parse().ok())
    }
}

/// Listens to a session up to a point, and keeps its last `most` messages. Behind damage it goes on with every piece that
/// can be read by itself.
pub async fn history(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    goal: &ResolvedPoint,
    most: usize,
) -> Result<History> {
    read(logs, profile, id, goal, most)
        .await
        .with_context(|| format!("read the conversation of {id}"))
}

async fn read(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    goal: &ResolvedPoint,
    most: usize,
) -> Result<History> {
    // The state notices what contradicts the rules, which is then read around where that is possible.
    let fresh = || {
        (
            LogState::default(),
            TranscriptReplay::new(profile, HistoryText::new(most)),
        )
    };
    let read = logs
        .read_log(
            id,
            ReadOptions {
                at: goal.at,
                ..ReadOptions::default()
            },
            fresh,
        )
        .await?;
    let (_, mut hearing) = read.sink;
    if read.damage.is_some() {
        beyond(logs, id, goal.at, read.seq, &mut hearing).await?;
    }
    if let Some(point) = &goal.cut {
        hearing.cut_to(&point.files);
    }
    Ok(History {
        prose: hearing.ear,
        facts: hearing.facts,
        sound_to: read.seq,
        head: read.head.max(read.seq),
    })
}

/// Goes on behind entry `sound` with what can be read, each piece by itself.
async fn beyond(
    logs: &Logs,
    id: &LogId,
    at: LogPoint,
    sound: Seq,
    hearing: &mut TranscriptReplay<'_, HistoryText>,
) -> Result<()> {
    let most = if let LogPoint::Seq(seq) = at {
        seq
    } else {
        Seq::MAX
    };
    let pieces = logs.pieces(id).await?;
    let mut damaged: BTreeSet<Name> = BTreeSet::new();
    let mut reached = sound;
    // What refused the next one may not show in the piece itself: it goes on from somewhere else.
    hearing.ear.gap();
    'again: loop {
        for piece in cover(&pieces, reached, most, Prefer::Long, &damaged) {
            let entry = match logs.read_piece(id, &piece, None).await {
                Ok(Some(entry)) => entry,
                Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
                // Damaged, or collected meanwhile: others may stand for it.
                Ok(None) | Err(_) => {
                    damaged.insert(piece.name());
                    continue 'again;
                }
            };
            if !at.includes(&entry.header) {
                return Ok(());
            }
            if piece.from > reached + 1 {
                hearing.ear.gap();
            }
            hearing.hear(&entry);
            reached = piece.to;
        }
        break;
    }
    if reached < segments::head(&pieces).min(most) {
        hearing.ear.gap();
    }
    Ok(())
}
