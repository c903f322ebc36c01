//! Verifies that a log and its branches can be restored: reads what a restore reads, into a scratch
//! directory.
//!
//! Owns what is checked and what counts as damage. Does not own how a log is read (`log`).

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::agent::Profile;
use crate::codec::entry::Entry;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::index::EntryRow;
use crate::log::Logs;
use crate::log::assemble::FileAssembler;
use crate::log::foreign_files::find_foreign_files;
use crate::log::fork::SessionRenamer;
use crate::log::read::{EntrySink, ReadOptions, ReadOutcome};
use crate::log::segments::{Granularity, Segment, SegmentKind, head, select_segments};
use crate::log::witness::{self, LogRollback, ReadLinks};
use crate::model::{Digest, FileState, ForkOrigin, LogId, RelPath, Seq, UploadPart, WriterId};
use crate::sys::Directory;

/// The result for one log.
#[derive(Debug, Clone, Default, Serialize, schemars::JsonSchema)]
pub struct VerifyReport {
    /// The session, or `@` and the project.
    pub session: String,
    /// The last entry that can be restored.
    pub undamaged_to: Seq,
    /// The last entry.
    pub head: Seq,
    /// Number of objects read.
    pub objects: usize,
    /// Number of files at the last entry that can be restored.
    pub files: usize,
    /// Size of these files.
    pub bytes: u64,
    /// The writers whose branches were checked too.
    pub branches: Vec<String>,
    /// Whether the session was removed and can be undeleted.
    pub removed: bool,
    /// Number of objects that this process cannot read: encrypted to others, or written by a newer
    /// sessiond. If there are any, only `missing` and the damage of readable objects are checked.
    pub unreadable: usize,
    /// Number of these objects that a newer sessiond wrote.
    pub newer_format: usize,
    /// First and last number of each range that no object covers: lost, or skipped by a writer.
    /// Only reported if objects are unreadable.
    pub missing: Vec<(Seq, Seq)>,
    /// The damage found, one sentence each.
    pub damage: Vec<String>,
    /// The keys of undamaged merges and snapshots that contradict their entries, all of which exist.
    /// A restore may read them.
    pub contradicting: Vec<String>,
    /// How the index contradicts the log: it knows entries that the store lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollback: Option<LogRollback>,
    /// Damage that no longer matters: the session was rolled back to a point before it.
    pub irrelevant_damage: Vec<String>,
}

/// Reads what a restore of a log and its branches reads; with `deep`, every object. Compares the
/// log with the newest entries that the index knows. An error means that the log could not be
/// checked; damage is part of the report.
pub async fn verify(
    (logs, profile): (&Logs, &dyn Profile),
    id: &LogId,
    known: &[EntryRow],
    scratch: &dyn Directory,
    deep: bool,
) -> Result<VerifyReport> {
    let checker = Checker {
        logs,
        profile,
        id,
        scratch,
        stage: format!("verify-{:016x}", logs.rng.next()).parse()?,
        known,
    };
    let report = match checker.check(deep).await {
        Err(error) if error.kind().is_unreadable() => checker.check_unreadable(deep).await,
        report => report,
    };
    let report = report.with_context(|| format!("verify {id}"));
    if let Err(cause) = scratch.remove(&checker.stage) {
        tracing::warn!(%cause, stage = %checker.stage, "cannot remove the staging directory");
    }
    report
}

/// Whether entries that the index knows, newest first, must be in the store.
pub fn is_lost(known: &[EntryRow]) -> bool {
    let nothing = ReadLinks {
        head: 0,
        links: &[],
    };
    witness::compare(known, &nothing).is_some()
}

struct Checker<'a> {
    logs: &'a Logs,
    profile: &'a dyn Profile,
    id: &'a LogId,
    scratch: &'a dyn Directory,
    stage: RelPath,
    /// The newest entries that the index knows, newest first.
    known: &'a [EntryRow],
}

/// The files of a log after an entry, and the digest of that entry.
type FilesAtEntry = (Digest, BTreeMap<RelPath, FileState>);

/// Assembles the files, and records their state at some of the entries.
struct StateRecorder<'a> {
    assembler: FileAssembler<'a>,
    /// The entries to record.
    wanted: Vec<Seq>,
    recorded: BTreeMap<Seq, FilesAtEntry>,
    /// The last `seq` of every segment that was applied.
    applied: BTreeSet<Seq>,
    /// Those of `applied` that were merges or snapshots.
    compacted: BTreeSet<Seq>,
    /// Files that a restore rejects, because they do not belong to the session.
    foreign: Vec<RelPath>,
}

impl EntrySink for StateRecorder<'_> {
    fn apply_entry(&mut self, entry: &Entry) -> Result<()> {
        self.assembler.apply_entry(entry)?;
        self.applied.insert(entry.header.seq);
        if entry.header.kind.is_compacted() {
            self.compacted.insert(entry.header.seq);
        }
        if self.wanted.contains(&entry.header.seq) {
            self.recorded.insert(
                entry.header.seq,
                (entry.digest, self.assembler.state.files.clone()),
            );
        }
        Ok(())
    }

    fn needs_fork_origin(&self) -> bool {
        true
    }

    fn start_fork(&mut self, fork: &ForkOrigin, renamer: &SessionRenamer) -> Result<()> {
        // Everything recorded so far belongs to the origin.
        self.applied.clear();
        self.compacted.clear();
        self.recorded.clear();
        self.assembler.start_fork(fork, renamer)
    }
}

impl Checker<'_> {
    async fn check(&self, deep: bool) -> Result<VerifyReport> {
        let read = self.read(ReadOptions::default(), &[]).await?;
        let state = &read.sink.assembler.state;
        let mut report = VerifyReport {
            session: self.id.name.to_string(),
            undamaged_to: read.seq,
            head: read.head.max(read.seq),
            objects: read.objects,
            files: state.files.len(),
            bytes: state.files.values().map(|file| file.len).sum(),
            removed: state.removed.is_some(),
            ..VerifyReport::default()
        };
        report.add_outcome(&read);
        report.add_rollback(witness::compare(self.known, &read.read_links()));
        if deep {
            self.check_all_segments(&mut report).await?;
        }
        for writer in self.logs.list_branches(self.id).await? {
            let options = ReadOptions {
                branch: Some(&writer),
                ..ReadOptions::default()
            };
            let branch = self.read(options, &[]).await;
            let branch = branch.with_context(|| format!("read branch {writer}"))?;
            report.add_outcome(&branch);
            report.objects += branch.objects;
            report.branches.push(writer.to_string());
        }
        Ok(report)
    }

    /// Checks what can be checked of a log with unreadable objects: whether every number exists,
    /// and which objects are damaged.
    async fn check_unreadable(&self, deep: bool) -> Result<VerifyReport> {
        let segments = self.logs.list_segments(self.id).await?;
        let read = select_segments(
            &segments,
            0,
            Seq::MAX,
            Granularity::Coarse,
            &BTreeSet::new(),
        );
        let mut report = VerifyReport {
            session: self.id.name.to_string(),
            head: head(&segments),
            ..VerifyReport::default()
        };
        let log = ReadLinks {
            head: report.head,
            links: &[],
        };
        report.add_rollback(witness::compare(self.known, &log));
        let mut next = 1;
        for segment in &read {
            if segment.first_seq > next {
                report.missing.push((next, segment.first_seq - 1));
            }
            next = segment.last_seq + 1;
        }
        for segment in if deep { &segments } else { &read } {
            self.try_read(segment, None, &mut report).await?;
        }
        for writer in self.logs.list_branches(self.id).await? {
            for segment in self.logs.list_branch_segments(self.id, &writer).await? {
                self.try_read(&segment, Some(&writer), &mut report).await?;
            }
            report.branches.push(writer.to_string());
        }
        Ok(report)
    }

    async fn try_read(
        &self,
        segment: &Segment,
        branch: Option<&WriterId>,
        report: &mut VerifyReport,
    ) -> Result<()> {
        report.objects += 1;
        match self.logs.read_segment(self.id, segment, branch).await {
            Ok(_) => {}
            Err(error) if error.kind().is_unreadable() => {
                report.unreadable += 1;
                report.newer_format += usize::from(error.kind() == ErrorKind::NewerFormat);
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => report.add_damage(sentence(&error)),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn read(
        &self,
        options: ReadOptions<'_>,
        wanted: &[Seq],
    ) -> Result<ReadOutcome<StateRecorder<'_>>> {
        let mut attempt = 0;
        let recorder = || {
            attempt += 1;
            StateRecorder {
                assembler: FileAssembler::new(self.scratch, self.stage.clone(), attempt),
                wanted: wanted.to_vec(),
                recorded: BTreeMap::new(),
                applied: BTreeSet::new(),
                compacted: BTreeSet::new(),
                foreign: Vec::new(),
            }
        };
        let mut read = self.logs.read_log(self.id, options, recorder).await;
        if let Ok(read) = &mut read {
            let assembler = &read.sink.assembler;
            let found = find_foreign_files(self.profile, self.scratch, self.id, assembler)
                .map_err(|cause| Error::io(format!("read the files of {}", self.id), cause))?;
            read.sink.foreign = found.foreign;
        }
        self.scratch
            .remove(&self.stage)
            .map_err(|cause| Error::io(format!("remove {}", self.stage), cause))?;
        read
    }

    /// Reads every segment on its own, and compares every merge and snapshot with the entries that
    /// it replaces.
    async fn check_all_segments(&self, report: &mut VerifyReport) -> Result<()> {
        let segments = self.logs.list_segments(self.id).await?;
        let compacted: Vec<&Segment> = segments
            .iter()
            .filter(|segment| segment.kind != SegmentKind::Entry)
            .collect();
        let wanted: Vec<Seq> = compacted.iter().map(|segment| segment.last_seq).collect();
        let options = ReadOptions {
            granularity: Granularity::Fine,
            ..ReadOptions::default()
        };
        let read = self.read(options, &wanted).await?;
        report.add_outcome(&read);
        report.objects = segments.len();
        for segment in &segments {
            match self.logs.read_segment(self.id, segment, None).await {
                Ok(Some(entry)) => self.compare(segment, &entry, &read.sink, report),
                // Garbage collection has deleted it since the listing.
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    let is_read = segment.kind != SegmentKind::Entry
                        || segment.last_seq > read.seq
                        || read.sink.applied.contains(&segment.last_seq);
                    let is_covered = compacted.iter().any(|other| other.contains(segment));
                    if is_read || is_covered {
                        report.add_damage(sentence(&error));
                    } else {
                        report.add_irrelevant_damage(sentence(&error));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Compares a merge or snapshot with the state that was recorded at its last entry.
    fn compare(
        &self,
        segment: &Segment,
        entry: &Entry,
        recorder: &StateRecorder<'_>,
        report: &mut VerifyReport,
    ) {
        if segment.kind == SegmentKind::Entry {
            return;
        }
        let Some((digest, files)) = recorder.recorded.get(&segment.last_seq) else {
            return;
        };
        let parts = &entry.header.parts;
        // A file changes with the last part of its upload.
        let mut complete = parts
            .iter()
            .filter(|part| part.upload != Some(UploadPart::More));
        let agrees = complete.all(|part| {
            files
                .get(&part.path)
                .is_some_and(|file| (file.len, file.sha256) == (part.end(), part.file_sha256))
        });
        let is_complete = segment.kind != SegmentKind::Snapshot || parts.len() == files.len();
        if entry.digest == *digest && agrees && is_complete {
            return;
        }
        let key = segment.key(self.id);
        let mut compacted = recorder
            .compacted
            .range(segment.first_seq..=segment.last_seq);
        if compacted.next().is_none() {
            report.add_damage(format!("{key} contradicts the entries that it replaces"));
            report.contradicting.push(key);
        } else {
            // Some entries were deleted after compaction, and the smaller segment that replaces
            // them may be the wrong one.
            report.add_damage(format!(
                "{key} contradicts smaller segments of the same entries; do not delete any of them"
            ));
        }
    }
}

/// The error as one sentence, with its hint.
fn sentence(error: &Error) -> String {
    error
        .hint_text()
        .map_or_else(|| error.to_string(), |hint| format!("{error}; {hint}"))
}

impl VerifyReport {
    fn add_outcome(&mut self, read: &ReadOutcome<StateRecorder<'_>>) {
        for damage in &read.redundant_damage {
            self.add_damage(damage.clone());
        }
        for damage in &read.skipped_damage {
            self.add_irrelevant_damage(damage.clone());
        }
        if let Some(error) = &read.damage {
            self.add_damage(sentence(error));
        }
        for path in &read.sink.foreign {
            self.add_damage(format!("{path} is not a file of the session"));
        }
    }

    fn add_rollback(&mut self, rollback: Option<LogRollback>) {
        if let Some(rollback) = &rollback {
            self.add_damage(format!("the log was rolled back: {rollback}"));
        }
        self.rollback = rollback;
    }

    fn add_damage(&mut self, damage: String) {
        if !self.damage.contains(&damage) {
            self.damage.push(damage);
        }
    }

    fn add_irrelevant_damage(&mut self, damage: String) {
        if !self.irrelevant_damage.contains(&damage) {
            self.irrelevant_damage.push(damage);
        }
    }
}
