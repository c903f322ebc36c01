//! Reading a log up to a point.
//!
//! Owns the sequence of attempts. Each attempt reads a set of segments, and the recovery plan
//! decides which segments the next attempt excludes. Does not own what is built from the entries
//! (an `EntrySink`).

use tracing::Instrument;

use super::Logs;
use super::attempt::ReadAttempt;
use super::options::NewSink;
use super::recovery::{Attempt, NextStep, RecoveryPlan, Stop};
use super::segments::{self, Granularity, Segment, SegmentKind};
use super::state::LogState;
use crate::error::{Error, Result};
use crate::model::{Digest, LogId, LogPoint, Seq};
use crate::sys::TRACE_TARGET;

pub use super::options::ReadOptions;
pub use super::sink::EntrySink;

/// The result of reading a log.
pub struct ReadOutcome<S> {
    /// The sink. After damage it may hold part of the rejected entry.
    pub sink: S,
    /// The last entry that was applied.
    pub seq: Seq,
    /// Its digest.
    pub digest: Option<Digest>,
    /// The highest `seq` that was listed, read or not; 0 if the log does not exist.
    pub head: Seq,
    /// Number of objects read.
    pub objects: usize,
    /// Damaged segments whose entries were read from other segments.
    pub redundant_damage: Vec<String>,
    /// Damaged entries that a later claim skips.
    pub skipped_damage: Vec<String>,
    /// The damage that ended the read before the point.
    pub damage: Option<Error>,
}

impl<S> ReadOutcome<S> {
    /// Returns the sink; an error if damage ended the read.
    pub fn require_undamaged(self, id: &LogId) -> Result<S> {
        let hint = || {
            let name = &id.name;
            format!("run \"sessiond verify {name}\" to see which point can be restored")
        };
        self.damage
            .map_or(Ok(self.sink), |error| Err(error.hint(hint())))
    }
}

impl Logs {
    /// Reads a log up to a point. `new_sink` creates one sink per attempt: after a damaged segment,
    /// a new attempt reads the segments that cover the same entries. An error means that the log
    /// could not be read; damage is part of the outcome.
    pub async fn read_log<S: EntrySink + Send>(
        &self,
        id: &LogId,
        options: ReadOptions<'_>,
        mut new_sink: impl FnMut() -> S + Send,
    ) -> Result<ReadOutcome<S>> {
        self.read_with(id, options, &mut new_sink).await
    }

    pub(super) async fn read_with<S: EntrySink + Send>(
        &self,
        id: &LogId,
        options: ReadOptions<'_>,
        new_sink: NewSink<'_, S>,
    ) -> Result<ReadOutcome<S>> {
        let mut is_complete = !options.is_newest_only();
        let mut listed = self.list_for_read(id, is_complete).await?;
        let has_first_entry = listed.iter().any(|segment| {
            segment.kind == SegmentKind::Entry && segment.first_seq == options.after + 1
        });
        let without_compacted = options.granularity == Granularity::Fine && has_first_entry;
        let mut plan = RecoveryPlan::new(id, options.excluding, without_compacted);
        loop {
            let mut attempt = ReadAttempt::new(self, id, options, &mut *new_sink);
            let done = attempt
                .run(&listed, plan.exclusions())
                .instrument(tracing::info_span!(target: TRACE_TARGET, "fetch"))
                .await;
            let damage = match done.and_then(|()| check_end(id, &options, attempt.seq, &listed)) {
                Ok(()) => None,
                Err(stop) => {
                    let progress = Attempt {
                        reached: attempt.seq,
                        compacted: &attempt.compacted,
                        listed: &listed,
                    };
                    match plan.next(stop, progress) {
                        NextStep::Relist => {
                            listed = self.list_for_read(id, is_complete).await?;
                            continue;
                        }
                        NextStep::Retry => {
                            if !is_complete {
                                is_complete = true;
                                listed = self.list_for_read(id, is_complete).await?;
                            }
                            continue;
                        }
                        NextStep::Fail(error) => return Err(error),
                        NextStep::ReportDamage(error) => Some(error),
                    }
                }
            };
            let ReadAttempt {
                sink,
                seq,
                digest,
                objects,
                ..
            } = attempt;
            let findings = plan.into_findings(seq, damage.as_ref());
            check_collected(id, &options, seq, damage.is_some(), &listed)?;
            return Ok(ReadOutcome {
                sink,
                seq,
                digest,
                head: segments::head(&listed),
                objects,
                redundant_damage: findings.redundant,
                skipped_damage: findings.skipped,
                damage,
            });
        }
    }

    async fn list_for_read(&self, id: &LogId, complete: bool) -> Result<Vec<Segment>> {
        let listed = async {
            if complete {
                self.list_segments(id).await
            } else {
                self.list_newest_segments_in_one_round_trip(id).await
            }
        };
        listed
            .instrument(tracing::info_span!(target: TRACE_TARGET, "plan"))
            .await
    }

    /// The state of a log at its head, even if the session is removed.
    pub async fn read_state(&self, id: &LogId) -> Result<LogState> {
        self.read_log(id, ReadOptions::default(), LogState::default)
            .await?
            .require_undamaged(id)
    }
}

/// Checks that a read up to the latest entry reached the head.
fn check_end(
    id: &LogId,
    options: &ReadOptions<'_>,
    reached: Seq,
    listed: &[Segment],
) -> Result<(), Stop> {
    let is_latest = options.at == LogPoint::Latest && options.branch.is_none();
    if is_latest && reached < segments::head(listed) {
        return Err(Error::corrupt(format!(
            "the entries of {id} after entry {reached} are unreadable"
        ))
        .into());
    }
    Ok(())
}

/// Checks that the requested entry is not within a segment whose entries garbage collection
/// deleted. That is not damage.
fn check_collected(
    id: &LogId,
    options: &ReadOptions<'_>,
    reached: Seq,
    is_damaged: bool,
    listed: &[Segment],
) -> Result<()> {
    let (LogPoint::Seq(requested), None) = (options.at, options.branch) else {
        return Ok(());
    };
    let next_entry_exists = listed
        .iter()
        .any(|segment| segment.first_seq == reached + 1 && segment.kind == SegmentKind::Entry);
    if is_damaged && next_entry_exists {
        return Ok(());
    }
    let covering = listed.iter().find(|segment| {
        (is_damaged || reached < segment.first_seq)
            && segment.first_seq <= requested
            && requested < segment.last_seq
    });
    match covering {
        None => Ok(()),
        Some(segment) => Err(Error::not_found(format!(
            "entry {requested} of {id} can no longer be restored: garbage collection deleted it"
        ))
        .hint(format!(
            "restore one of the closest points: --at seq:{reached} or --at seq:{}",
            segment.last_seq
        ))),
    }
}
