//! The reader of a session's conversation: replays its transcripts up to a point.
//!
//! Owns how much of the log is read, and how reading continues after damage. Does not own what is
//! kept of each message: that is the visitor's task.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::agent::Profile;
use crate::codec::entry::Entry;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::fork::SessionRenamer;
use crate::log::read::{EntrySink, ReadOptions, ReadOutcome};
use crate::log::replay::{TranscriptReplay, TranscriptVisitor};
use crate::log::segments::{self, Granularity, SegmentId, select_segments};
use crate::log::state::LogState;
use crate::log::{Logs, errors};
use crate::model::{ForkOrigin, LogId, LogPoint, ResolvedPoint, Seq, SessionFacts};

/// Numbers of segments that a reader of the end of a conversation tries before it reads all
/// segments.
const TAIL_SEGMENTS: [usize; 2] = [2, 8];

/// A visitor that collects the messages of a conversation.
pub trait ConversationVisitor: TranscriptVisitor {
    /// Number of messages collected.
    fn message_count(&self) -> usize;

    /// Records that messages before the next one cannot be read.
    fn add_gap(&mut self) {}
}

/// How much of a conversation to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All messages before the first damage.
    All,
    /// As few segments of the end as hold this many messages.
    Last(usize),
    /// All messages, including those after damage that can be read on their own.
    PastDamage,
}

/// A conversation that was read.
#[derive(Debug)]
pub struct ConversationRead<V> {
    /// The visitor of the messages.
    pub visitor: V,
    /// The state of the log; none if only its end was read.
    pub state: Option<LogState>,
    /// The facts about the session in its transcripts.
    pub facts: SessionFacts,
    /// Whether the last entry removed the session.
    pub is_removed: bool,
    /// The last entry before the first damage.
    pub undamaged_to: Seq,
    /// The last entry of the log.
    pub head: Seq,
    /// Number of objects read.
    pub objects: usize,
    /// The first damage.
    pub damage: Option<Error>,
}

impl<V> ConversationRead<V> {
    /// Returns the error if the log `id` is damaged.
    pub fn require_undamaged(self, id: &LogId) -> Result<Self> {
        match self.damage {
            Some(damage) => Err(damage.hint(format!(
                "run \"sessiond verify {}\" to see which point can be restored",
                id.name
            ))),
            None => Ok(self),
        }
    }
}

/// The point that a fork started from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Origin {
    /// The session it was forked from.
    pub session: String,
    /// Number of complete turns it started with.
    pub turn: u64,
}

/// Reads the conversation of one session.
#[derive(Clone, Copy)]
pub struct ConversationReader<'a> {
    logs: &'a Logs,
    profile: &'a dyn Profile,
    id: &'a LogId,
}

impl<'a> ConversationReader<'a> {
    /// A reader of session `id`.
    pub fn new(logs: &'a Logs, profile: &'a dyn Profile, id: &'a LogId) -> Self {
        ConversationReader { logs, profile, id }
    }

    /// The session.
    pub fn id(&self) -> &LogId {
        self.id
    }

    /// The point that the session was forked from; none if it is not a fork, or if its first entry
    /// cannot be read.
    pub async fn origin(&self) -> Option<Origin> {
        match self.logs.fork_origin(self.id).await {
            Ok(origin) => origin.map(|origin| Origin {
                session: origin.session.to_string(),
                turn: origin.turn,
            }),
            Err(error) => {
                tracing::debug!(%error, "the origin of the session is unknown");
                None
            }
        }
    }

    /// Replays the conversation up to a point into a visitor. `visitor` creates an empty one; it is
    /// called again whenever reading starts over.
    pub async fn read<V: ConversationVisitor + Send>(
        &self,
        point: &ResolvedPoint,
        extent: Extent,
        visitor: impl Fn() -> V + Send + Sync,
    ) -> Result<ConversationRead<V>> {
        self.read_extent(point, extent, visitor)
            .await
            .with_context(|| format!("read the conversation of {}", self.id))
    }

    async fn read_extent<V: ConversationVisitor + Send>(
        &self,
        point: &ResolvedPoint,
        extent: Extent,
        visitor: impl Fn() -> V + Send + Sync,
    ) -> Result<ConversationRead<V>> {
        let starts = match extent {
            Extent::Last(_) if point.branch.is_none() => {
                tail_starts(self.logs, self.id, point.at).await?
            }
            // A branch is not compacted, and seldom long.
            Extent::Last(_) | Extent::All | Extent::PastDamage => vec![0],
        };
        for after in starts {
            let mut read = self.read_after(point, after, &visitor).await?;
            errors::check_point(self.id, point.at, &read)?;
            let damaged = read.damage.is_some();
            let replay = &mut read.sink.replay;
            if damaged && extent == Extent::PastDamage && point.branch.is_none() {
                self.read_past_damage(point.at, read.seq, replay).await?;
            }
            if let Some(checkpoint) = &point.checkpoint {
                replay.truncate_to(&checkpoint.transcript_lengths);
            }
            let is_enough = matches!(extent, Extent::Last(count)
                if !damaged && replay.visitor.message_count() >= count);
            if is_enough || after == 0 {
                return Ok(outcome(read));
            }
        }
        Err(Error::new(
            ErrorKind::Internal,
            "the list of start positions is empty",
        ))
    }

    async fn read_after<V: ConversationVisitor + Send>(
        &self,
        point: &ResolvedPoint,
        after: Seq,
        visitor: &(impl Fn() -> V + Send + Sync),
    ) -> Result<ReadOutcome<Sink<'a, V>>> {
        let sink = || Sink {
            // The state can only be computed from the first entry on.
            state: (after == 0).then(LogState::default),
            replay: TranscriptReplay::new(self.profile, visitor()),
        };
        let options = ReadOptions {
            after,
            ..ReadOptions::up_to(point)
        };
        self.logs.read_log(self.id, options, sink).await
    }

    /// Replays every segment after entry `undamaged_to` that can be read on its own.
    async fn read_past_damage<V: ConversationVisitor>(
        &self,
        at: LogPoint,
        undamaged_to: Seq,
        replay: &mut TranscriptReplay<'_, V>,
    ) -> Result<()> {
        let last = if let LogPoint::Seq(seq) = at {
            seq
        } else {
            Seq::MAX
        };
        let segments = self.logs.list_segments(self.id).await?;
        let mut damaged: BTreeSet<SegmentId> = BTreeSet::new();
        let mut reached = undamaged_to;
        // The damage may be a broken link to the next segment, which is then readable on its own.
        replay.visitor.add_gap();
        'select: loop {
            for segment in select_segments(&segments, reached, last, Granularity::Coarse, &damaged)
            {
                let entry = match self.logs.read_segment(self.id, &segment, None).await {
                    Ok(Some(entry)) => entry,
                    Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
                    // Damaged, or garbage-collected since the listing: other segments may
                    // cover it.
                    Ok(None) | Err(_) => {
                        damaged.insert(segment.id());
                        continue 'select;
                    }
                };
                if !at.includes(&entry.header) {
                    return Ok(());
                }
                if segment.first_seq > reached + 1 {
                    replay.visitor.add_gap();
                }
                replay.visit_entry(&entry);
                reached = segment.last_seq;
            }
            break;
        }
        if reached < segments::head(&segments).min(last) {
            replay.visitor.add_gap();
        }
        Ok(())
    }
}

/// The entries to start after, so that only the end of a log is read: the last few segments, then
/// more, then all.
pub(super) async fn tail_starts(logs: &Logs, id: &LogId, at: LogPoint) -> Result<Vec<Seq>> {
    let last = match at {
        LogPoint::Latest => Seq::MAX,
        LogPoint::Seq(seq) => seq,
        LogPoint::Time(_) => return Ok(vec![0]),
    };
    let segments = logs.list_newest_segments(id).await?;
    let read = select_segments(&segments, 0, last, Granularity::Coarse, &BTreeSet::new());
    let start = |count: usize| {
        read.len()
            .checked_sub(count)
            .and_then(|first| read.get(first))
            .map_or(0, |segment| segment.first_seq - 1)
    };
    let mut starts: Vec<Seq> = TAIL_SEGMENTS.into_iter().map(start).chain([0]).collect();
    starts.dedup();
    Ok(starts)
}

fn outcome<V>(read: ReadOutcome<Sink<'_, V>>) -> ConversationRead<V> {
    let Sink { state, mut replay } = read.sink;
    if state.is_none() {
        // The log was not read from its first entry, so this is a later prompt.
        replay.facts.first_prompt = None;
    }
    ConversationRead {
        visitor: replay.visitor,
        state,
        facts: replay.facts,
        is_removed: replay.removed,
        undamaged_to: read.seq,
        head: read.head.max(read.seq),
        objects: read.objects,
        damage: read.damage,
    }
}

/// Applies each entry to the state, which rejects inconsistent entries, then to the replay.
struct Sink<'a, V> {
    state: Option<LogState>,
    replay: TranscriptReplay<'a, V>,
}

impl<V: TranscriptVisitor> EntrySink for Sink<'_, V> {
    fn apply_entry(&mut self, entry: &Entry) -> Result<()> {
        if let Some(state) = &mut self.state {
            state.apply_entry(entry)?;
        }
        self.replay.apply_entry(entry)
    }

    fn needs_fork_origin(&self) -> bool {
        true
    }

    fn start_fork(&mut self, fork: &ForkOrigin, renamer: &SessionRenamer) -> Result<()> {
        if let Some(state) = &mut self.state {
            state.start_fork(fork, renamer)?;
        }
        self.replay.start_fork(fork, renamer)
    }
}
