//! The recovery planner: what to read next after an attempt to read a log stopped. Pure.
//!
//! Several segments can cover the same entries, so a damaged or unreadable one may not matter. The
//! planner decides which segments the next attempt excludes, or that the log is damaged. Does not
//! own fetching (`fetch`), the order of entries (`chain`) or what is built from them (`read`).

use std::collections::{BTreeMap, BTreeSet};

use super::segments::{Segment, SegmentId, SegmentKind};
use crate::error::{Error, ErrorKind};
use crate::model::{LogId, Seq};

/// Maximum number of times that a log is listed again because garbage collection deleted a listed
/// segment before it was read.
pub(super) const MAX_RELISTS: u32 = 5;

/// Why an attempt stopped.
#[derive(Debug)]
pub(super) struct Stop {
    /// The rejected segment; none if an entry is missing and no claim skips it.
    pub(super) segment: Option<SegmentId>,
    /// The error to report if nothing else can be read instead.
    pub(super) error: Error,
    /// Whether a listed segment no longer exists.
    pub(super) is_deleted: bool,
    /// The entry that the rejected claim continues from, if it skips entries that were applied.
    pub(super) skips_back_to: Option<Seq>,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop {
            segment: None,
            error,
            is_deleted: false,
            skips_back_to: None,
        }
    }
}

impl Stop {
    /// A listed segment no longer exists.
    pub(super) fn deleted(error: Error) -> Stop {
        Stop {
            is_deleted: true,
            ..Stop::from(error)
        }
    }

    /// A segment was rejected.
    pub(super) fn rejected(segment: SegmentId, error: Error) -> Stop {
        Stop {
            segment: Some(segment),
            ..Stop::from(error)
        }
    }
}

/// What an attempt had read when it stopped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attempt<'a> {
    /// The last entry that was applied.
    pub(super) reached: Seq,
    /// The merges and snapshots that were applied.
    pub(super) compacted: &'a [Segment],
    /// All segments that were listed.
    pub(super) listed: &'a [Segment],
}

/// What to do after an attempt stopped.
#[derive(Debug)]
pub(super) enum NextStep {
    /// List the log again, then retry: the listing is outdated.
    Relist,
    /// Retry with the new exclusions, on a complete listing.
    Retry,
    /// Return the error: the log cannot be read.
    Fail(Error),
    /// Return what was applied so far, and the damage that ended it.
    ReportDamage(Error),
}

/// What the next attempt leaves out.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Exclusions {
    /// Segments that are not read.
    pub(super) segments: BTreeSet<SegmentId>,
    /// Entries that count as damaged, with the reason: a later claim may skip them.
    pub(super) entries: BTreeMap<Seq, String>,
    /// Whether all merges and snapshots are left out. In a listing, a `seq` that was never written
    /// looks like a deleted one, so the first attempt to read every entry excludes them.
    pub(super) all_compacted: bool,
    /// Damage found so far.
    findings: Vec<String>,
}

impl Exclusions {
    fn add_finding(&mut self, finding: String) {
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    /// The segments of a listing that are not read.
    pub(super) fn excluded_segments(&self, listed: &[Segment]) -> BTreeSet<SegmentId> {
        let mut excluded = self.segments.clone();
        if self.all_compacted {
            let compacted = listed.iter().filter(|segment| segment.is_compacted());
            excluded.extend(compacted.map(Segment::id));
        }
        excluded
    }
}

/// An entry contradicts the merges and snapshots that were applied before it. The next attempt
/// excludes them, to find out which side is damaged.
#[derive(Debug)]
struct Suspicion {
    /// The entry.
    seq: Seq,
    /// Why it was rejected.
    error: String,
    /// The exclusions to return to if the entry is the damaged side.
    before: Exclusions,
}

/// Damage that did not end a read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ReadFindings {
    /// Damaged segments whose entries were read from other segments.
    pub(super) redundant: Vec<String>,
    /// Damaged entries that a later claim skips.
    pub(super) skipped: Vec<String>,
}

/// The findings of earlier attempts to read a log, and the plan for the next attempt.
#[derive(Debug)]
pub(super) struct RecoveryPlan<'a> {
    id: &'a LogId,
    /// The segments that the caller excludes from every attempt.
    excluded_by_caller: BTreeSet<SegmentId>,
    exclusions: Exclusions,
    /// The merges and snapshots that an earlier attempt suspected.
    suspected: BTreeSet<SegmentId>,
    suspicion: Option<Suspicion>,
    relists: u32,
    /// The first segment that is undamaged but unreadable here. If its entries cannot be read from
    /// other segments, its error is the one to return.
    unreadable: Option<Error>,
}

impl<'a> RecoveryPlan<'a> {
    /// A plan for the first attempt to read a log.
    pub(super) fn new(
        id: &'a LogId,
        excluded: Option<&BTreeSet<SegmentId>>,
        without_compacted: bool,
    ) -> Self {
        let excluded_by_caller = excluded.cloned().unwrap_or_default();
        RecoveryPlan {
            id,
            exclusions: Exclusions {
                segments: excluded_by_caller.clone(),
                all_compacted: without_compacted,
                ..Exclusions::default()
            },
            excluded_by_caller,
            suspected: BTreeSet::new(),
            suspicion: None,
            relists: 0,
            unreadable: None,
        }
    }

    /// What the next attempt leaves out.
    pub(super) fn exclusions(&self) -> &Exclusions {
        &self.exclusions
    }

    /// Decides what to do after an attempt stopped.
    pub(super) fn next(&mut self, stop: Stop, attempt: Attempt<'_>) -> NextStep {
        if stop.is_deleted && self.relists < MAX_RELISTS {
            self.relists += 1;
            return NextStep::Relist;
        }
        if stop.error.kind().is_unreadable()
            && let Some(segment) = stop.segment
            && self.exclusions.segments.insert(segment)
        {
            // The segments that it covers may be readable here.
            self.unreadable.get_or_insert(stop.error);
            return NextStep::Retry;
        }
        if stop.error.kind() != ErrorKind::Corrupt {
            return NextStep::Fail(self.unreadable.take().unwrap_or(stop.error));
        }
        if self.has_alternative(&stop, attempt) {
            return NextStep::Retry;
        }
        match self.unreadable.take() {
            Some(error) => NextStep::Fail(error),
            None => NextStep::ReportDamage(stop.error),
        }
    }

    /// Whether the log can be read in another way after damage. If so, changes the exclusions for
    /// the next attempt.
    fn has_alternative(&mut self, stop: &Stop, attempt: Attempt<'_>) -> bool {
        let Some(rejected) = stop.segment else {
            if std::mem::take(&mut self.exclusions.all_compacted) {
                return true;
            }
            return self.resolve_suspicion(attempt.reached);
        };
        if rejected.kind == SegmentKind::Entry
            && let Some(from) = stop.skips_back_to
            && self.exclude_skipped(from, rejected.last_seq, attempt.listed)
        {
            return true;
        }
        let error = stop.error.to_string();
        if rejected.kind != SegmentKind::Entry {
            // The segments that it covers may still exist.
            self.exclusions.add_finding(error);
            return self.exclusions.segments.insert(rejected);
        }
        self.resolve_suspicion(attempt.reached)
            || self.suspect_compacted(rejected.last_seq, error, attempt.compacted)
    }

    /// Handles a claim that skips entries which were applied: its writer could not restore them,
    /// although they are readable here. Excludes the segments that end within the skipped range.
    fn exclude_skipped(&mut self, from: Seq, claim: Seq, listed: &[Segment]) -> bool {
        let before = self.exclusions.segments.len();
        let skipped = listed
            .iter()
            .filter(|segment| from < segment.last_seq && segment.last_seq < claim);
        self.exclusions.segments.extend(skipped.map(Segment::id));
        self.exclusions.segments.len() > before
    }

    /// Ends a suspicion. If the attempt without the suspected segments did not get further, the
    /// entry is damaged and the segments are used again.
    fn resolve_suspicion(&mut self, reached: Seq) -> bool {
        let Some(suspicion) = self
            .suspicion
            .take()
            .filter(|suspicion| reached < suspicion.seq)
        else {
            return false;
        };
        self.exclusions = suspicion.before;
        self.exclusions
            .entries
            .insert(suspicion.seq, suspicion.error);
        true
    }

    /// Tries without the merges and snapshots that led to a rejected entry. If all of them were
    /// suspected before, the entry is damaged: a later claim may skip it.
    fn suspect_compacted(&mut self, seq: Seq, error: String, compacted: &[Segment]) -> bool {
        let suspects: Vec<&Segment> = compacted
            .iter()
            .filter(|segment| !self.suspected.contains(&segment.id()))
            .collect();
        if suspects.is_empty() {
            return self.exclusions.entries.insert(seq, error).is_none();
        }
        let keys: Vec<String> = suspects
            .iter()
            .map(|segment| segment.key(self.id))
            .collect();
        let ids: BTreeSet<SegmentId> = suspects.iter().map(|segment| segment.id()).collect();
        let before = self.exclusions.clone();
        self.exclusions.segments = self.excluded_by_caller.union(&ids).copied().collect();
        self.exclusions.findings = vec![format!(
            "{} and a later entry contradict each other ({error})",
            keys.join(", ")
        )];
        self.suspected.extend(ids);
        self.suspicion = Some(Suspicion { seq, error, before });
        true
    }

    /// The damage that did not end the read, once it reached entry `reached` and ended with
    /// `damage`.
    pub(super) fn take_findings(&mut self, reached: Seq, damage: Option<&Error>) -> ReadFindings {
        let Exclusions {
            findings, entries, ..
        } = std::mem::take(&mut self.exclusions);
        let damage = damage.map(Error::to_string);
        ReadFindings {
            redundant: findings
                .into_iter()
                .filter(|finding| Some(finding) != damage.as_ref())
                .collect(),
            skipped: entries
                .into_iter()
                .filter(|(seq, _)| *seq < reached)
                .map(|(_, error)| error)
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    fn id() -> LogId {
        LogId {
            namespace: "n".parse().unwrap(),
            agent: "a".parse().unwrap(),
            name: "s".parse().unwrap(),
        }
    }

    fn segment(kind: SegmentKind, first_seq: Seq, last_seq: Seq) -> Segment {
        Segment {
            first_seq,
            last_seq,
            kind,
            size: 1,
            modified: Timestamp::UNIX_EPOCH,
        }
    }

    fn entry(seq: Seq) -> Segment {
        segment(SegmentKind::Entry, seq, seq)
    }

    fn rejected(segment: Segment, why: &str) -> Stop {
        Stop::rejected(segment.id(), Error::corrupt(why))
    }

    fn reached(seq: Seq) -> Attempt<'static> {
        Attempt {
            reached: seq,
            compacted: &[],
            listed: &[],
        }
    }

    fn damage(step: NextStep) -> String {
        match step {
            NextStep::ReportDamage(error) => error.to_string(),
            other => panic!("expected damage, got {other:?}"),
        }
    }

    fn failure(step: NextStep) -> String {
        match step {
            NextStep::Fail(error) => error.to_string(),
            other => panic!("expected a failure, got {other:?}"),
        }
    }

    #[test]
    fn a_damaged_snapshot_is_excluded_once_and_reported_as_redundant() {
        let id = id();
        let snapshot = segment(SegmentKind::Snapshot, 1, 8);
        let mut plan = RecoveryPlan::new(&id, None, false);
        let step = plan.next(rejected(snapshot, "the snapshot is torn"), reached(0));
        assert!(matches!(step, NextStep::Retry));
        assert_eq!(plan.exclusions().segments, BTreeSet::from([snapshot.id()]));
        // Excluding it twice does not help.
        let step = plan.next(rejected(snapshot, "the snapshot is torn"), reached(0));
        assert_eq!(damage(step), "the snapshot is torn");
        let findings = plan.take_findings(8, None);
        assert_eq!(findings.redundant, ["the snapshot is torn"]);
        assert!(findings.skipped.is_empty());
    }

    #[test]
    fn a_missing_entry_is_damage() {
        let id = id();
        let mut plan = RecoveryPlan::new(&id, None, false);
        let step = plan.next(Error::corrupt("entry 3 is missing").into(), reached(2));
        assert_eq!(damage(step), "entry 3 is missing");
        // The damage itself is not listed among the findings.
        plan.exclusions.add_finding("entry 3 is missing".into());
        let error = Error::corrupt("entry 3 is missing");
        assert_eq!(plan.take_findings(2, Some(&error)), ReadFindings::default());
    }

    #[test]
    fn a_missing_entry_ends_the_attempt_without_compacted_segments_first() {
        let id = id();
        let listed = [entry(1), segment(SegmentKind::Merge, 2, 3), entry(4)];
        let mut plan = RecoveryPlan::new(&id, None, true);
        assert_eq!(
            plan.exclusions().excluded_segments(&listed),
            BTreeSet::from([listed[1].id()])
        );
        let missing = || Error::corrupt("entry 3 is missing").into();
        assert!(matches!(plan.next(missing(), reached(1)), NextStep::Retry));
        assert!(plan.exclusions().excluded_segments(&listed).is_empty());
        damage(plan.next(missing(), reached(1)));
    }

    #[test]
    fn a_deleted_segment_causes_a_new_listing_a_limited_number_of_times() {
        let id = id();
        let mut plan = RecoveryPlan::new(&id, None, false);
        let deleted = || Stop::deleted(Error::unavailable("log/4 no longer exists"));
        for _ in 0..MAX_RELISTS {
            assert!(matches!(plan.next(deleted(), reached(3)), NextStep::Relist));
        }
        assert_eq!(
            failure(plan.next(deleted(), reached(3))),
            "log/4 no longer exists"
        );
    }

    #[test]
    fn an_unreadable_snapshot_is_bypassed_and_is_the_error_if_its_entries_are_gone() {
        let id = id();
        let snapshot = segment(SegmentKind::Snapshot, 1, 8);
        for kind in [ErrorKind::Encrypted, ErrorKind::NewerFormat] {
            let unreadable = || Error::new(kind, "snap/8 is unreadable");
            let mut plan = RecoveryPlan::new(&id, None, false);
            let step = plan.next(Stop::rejected(snapshot.id(), unreadable()), reached(0));
            assert!(matches!(step, NextStep::Retry));
            let step = plan.next(Error::corrupt("entry 1 is missing").into(), reached(0));
            assert_eq!(failure(step), "snap/8 is unreadable");
            // An entry that is unreadable ends the read at once.
            let mut plan = RecoveryPlan::new(&id, None, false);
            failure(plan.next(unreadable().into(), reached(3)));
        }
    }

    #[test]
    fn other_errors_end_the_read() {
        let id = id();
        let mut plan = RecoveryPlan::new(&id, None, false);
        let step = plan.next(Error::unavailable("timed out").into(), reached(3));
        assert_eq!(failure(step), "timed out");
        assert_eq!(*plan.exclusions(), Exclusions::default());
    }

    #[test]
    fn a_contradicting_merge_is_excluded_if_the_entries_lead_further() {
        let id = id();
        let merge = segment(SegmentKind::Merge, 2, 4);
        let by_caller = BTreeSet::from([segment(SegmentKind::Snapshot, 1, 9).id()]);
        let mut plan = RecoveryPlan::new(&id, Some(&by_caller), false);
        let stop = || rejected(entry(5), "entry 5 does not follow entry 4");
        let compacted = [merge];
        let attempt = Attempt {
            compacted: &compacted,
            ..reached(4)
        };
        assert!(matches!(plan.next(stop(), attempt), NextStep::Retry));
        let mut expected = by_caller;
        expected.insert(merge.id());
        assert_eq!(plan.exclusions().segments, expected);
        // The next attempt passes entry 5 and meets other damage.
        let step = plan.next(Error::corrupt("entry 7 is missing").into(), reached(6));
        damage(step);
        let findings = plan.take_findings(6, None);
        assert_eq!(findings.redundant.len(), 1);
        assert!(
            findings.redundant[0]
                .contains("merge/000000000002-000000000004.gz and a later entry contradict"),
            "{findings:?}"
        );
    }

    #[test]
    fn an_entry_is_damaged_if_it_fails_without_the_suspected_merge_too() {
        let id = id();
        let merge = segment(SegmentKind::Merge, 2, 4);
        let mut plan = RecoveryPlan::new(&id, None, false);
        let stop = || rejected(entry(5), "entry 5 does not follow entry 4");
        let compacted = [merge];
        let with_merge = Attempt {
            compacted: &compacted,
            ..reached(4)
        };
        assert!(matches!(plan.next(stop(), with_merge), NextStep::Retry));
        assert!(matches!(plan.next(stop(), reached(4)), NextStep::Retry));
        assert!(
            plan.exclusions().segments.is_empty(),
            "the merge is used again"
        );
        assert!(plan.exclusions().entries.contains_key(&5));
        // No claim skips it.
        let step = plan.next(stop(), with_merge);
        assert_eq!(damage(step), "entry 5 does not follow entry 4");
        assert_eq!(plan.take_findings(4, None), ReadFindings::default());
    }

    #[test]
    fn an_entry_that_a_claim_skips_is_reported_as_skipped() {
        let id = id();
        let mut plan = RecoveryPlan::new(&id, None, false);
        let step = plan.next(rejected(entry(5), "a.jsonl has another digest"), reached(4));
        assert!(matches!(step, NextStep::Retry));
        assert_eq!(
            plan.take_findings(7, None),
            ReadFindings {
                redundant: vec![],
                skipped: vec!["a.jsonl has another digest".into()],
            }
        );
    }

    #[test]
    fn segments_that_a_claim_skips_are_excluded() {
        let id = id();
        let listed: Vec<Segment> = (1..=6)
            .map(entry)
            .chain([segment(SegmentKind::Merge, 2, 4)])
            .collect();
        let mut plan = RecoveryPlan::new(&id, None, false);
        let stop = || Stop {
            skips_back_to: Some(2),
            ..rejected(entry(6), "two writers claimed entry 6")
        };
        let attempt = Attempt {
            listed: &listed,
            ..reached(5)
        };
        assert!(matches!(plan.next(stop(), attempt), NextStep::Retry));
        let excluded: Vec<(Seq, Seq)> = plan
            .exclusions()
            .segments
            .iter()
            .map(|segment| (segment.first_seq, segment.last_seq))
            .collect();
        assert_eq!(excluded, [(3, 3), (4, 4), (5, 5), (2, 4)]);
        // Without effect the second time: then the entry itself is damaged.
        assert!(matches!(plan.next(stop(), attempt), NextStep::Retry));
        assert!(plan.exclusions().entries.contains_key(&6));
        damage(plan.next(stop(), attempt));
    }
}
