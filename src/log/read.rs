//! Reading a log up to a point.
//!
//! Owns the sequence of attempts. Each attempt reads a set of segments, and the recovery plan
//! decides which segments the next attempt excludes. Does not own what is built from the entries
//! (an `EntrySink`).

use tracing::Instrument;

use super::Logs;
use super::attempt::{Origin, ReadAttempt};
use super::options::NewSink;
use super::recovery::{Attempt, NextStep, RecoveryPlan, Stop};
use super::segments::{self, Granularity, Segment, SegmentKind};
use super::state::LogState;
use super::witness::ReadLinks;
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
    /// The last entries that were applied, in order, and their digests.
    pub links: Vec<(Seq, Digest)>,
    /// The highest `seq` of the log or branch, read or not; 0 if the log does not exist.
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
    /// What the index can confirm or contradict.
    pub fn read_links(&self) -> ReadLinks<'_> {
        ReadLinks {
            head: self.head.max(self.seq),
            links: &self.links,
        }
    }

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

    async fn read_with<S: EntrySink + Send>(
        &self,
        id: &LogId,
        options: ReadOptions<'_>,
        new_sink: NewSink<'_, S>,
    ) -> Result<ReadOutcome<S>> {
        let mut reader = LogReader::open(self, id, options).await?;
        loop {
            let attempt = ReadAttempt::new(self, id, options, &mut *new_sink, Origin::Unread);
            if let Some(outcome) = reader.run(attempt).await? {
                return Ok(outcome);
            }
        }
    }

    async fn list_for_read(&self, id: &LogId, complete: bool) -> Result<Vec<Segment>> {
        let listed = async {
            if complete {
                self.list_segments(id).await
            } else {
                self.list_newest_segments_at_once(id).await
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

/// A log that is read in several attempts: its listing, and the findings of earlier attempts.
pub(super) struct LogReader<'a> {
    logs: &'a Logs,
    id: &'a LogId,
    options: ReadOptions<'a>,
    is_complete: bool,
    listed: Vec<Segment>,
    plan: RecoveryPlan<'a>,
}

impl<'a> LogReader<'a> {
    /// Lists a log.
    pub(super) async fn open(
        logs: &'a Logs,
        id: &'a LogId,
        options: ReadOptions<'a>,
    ) -> Result<LogReader<'a>> {
        // Where the order of plaintext and encryption matters, a reader must know what a merge covers.
        let is_complete = !options.is_newest_only() || logs.store.policy().depends_on_order();
        let listed = logs.list_for_read(id, is_complete).await?;
        let has_first_entry = listed.iter().any(|segment| {
            segment.kind == SegmentKind::Entry
                && segment.first_seq == options.after.saturating_add(1)
        });
        let without_compacted = options.granularity == Granularity::Fine && has_first_entry;
        Ok(LogReader {
            logs,
            id,
            options,
            is_complete,
            listed,
            plan: RecoveryPlan::new(id, options.excluding, without_compacted),
        })
    }

    /// What is read of the log.
    pub(super) fn options(&self) -> ReadOptions<'a> {
        self.options
    }

    /// Runs an attempt; returns none if another one is needed.
    pub(super) async fn run<S: EntrySink + Send>(
        &mut self,
        mut attempt: ReadAttempt<'_, S>,
    ) -> Result<Option<ReadOutcome<S>>> {
        let done = attempt
            .run(&self.listed, self.plan.exclusions())
            .instrument(tracing::info_span!(target: TRACE_TARGET, "fetch"))
            .await;
        let done = done.and_then(|()| match attempt.is_full() {
            true => Ok(()),
            false => check_end(self.id, &self.options, attempt.seq, &self.listed),
        });
        let damage = match done {
            Ok(()) => None,
            Err(stop) => {
                let progress = Attempt {
                    reached: attempt.seq,
                    compacted: &attempt.compacted,
                    listed: &self.listed,
                };
                match self.plan.next(stop, progress) {
                    NextStep::Relist => {
                        self.listed = self.logs.list_for_read(self.id, self.is_complete).await?;
                        return Ok(None);
                    }
                    NextStep::Retry => {
                        if !self.is_complete {
                            self.is_complete = true;
                            self.listed = self.logs.list_for_read(self.id, true).await?;
                        }
                        return Ok(None);
                    }
                    NextStep::Fail(error) => return Err(error),
                    NextStep::ReportDamage(error) => Some(error),
                }
            }
        };
        let findings = self.plan.take_findings(attempt.seq, damage.as_ref());
        let is_damaged = damage.is_some();
        check_collected(
            self.id,
            &self.options,
            attempt.seq,
            is_damaged,
            &self.listed,
        )?;
        Ok(Some(ReadOutcome {
            sink: attempt.sink,
            seq: attempt.seq,
            digest: attempt.digest,
            links: attempt.links,
            head: attempt
                .branch_head
                .unwrap_or_else(|| segments::head(&self.listed)),
            objects: attempt.objects,
            redundant_damage: findings.redundant,
            skipped_damage: findings.skipped,
            damage,
        }))
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
    let next_entry_exists = listed.iter().any(|segment| {
        segment.first_seq == reached.saturating_add(1) && segment.kind == SegmentKind::Entry
    });
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
