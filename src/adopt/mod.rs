//! Adopts a branch: makes it the main line of its session.
//!
//! An adoption appends to the log like any other writer: a claim, which fences the current writer,
//! and deltas that change the files of the main line into those of the branch. The last delta
//! records which branch was adopted. The former main line gets a named checkpoint before the first
//! delta, and the branch stays as it is. An adoption that was interrupted leaves a valid log;
//! adopting again completes it.
//!
//! Owns the order of these steps. Does not own the content of the deltas (`plan`).

mod plan;

use std::time::Duration;

use serde::Serialize;

use crate::agent::Profile;
use crate::codec::entry::{self, EncodedEntry};
use crate::error::{Error, ErrorContext, Result};
use crate::log::append::AppendOutcome;
use crate::log::assemble::FileAssembler;
use crate::log::branches::Branch;
use crate::log::read::ReadOptions;
use crate::log::writer::LogWriter;
use crate::log::{Logs, errors, race};
use crate::model::{
    AdoptedBranch, EntryHeader, EntryKind, LogId, RelPath, ResolvedPoint, Seq, WriterId,
};
use crate::sys::{Backoff, Directory};

use plan::{AdoptionPlan, Delta};

/// A writer whose last entry is younger than this may still run. An agent can be silent for
/// minutes, so this is a courtesy: the fence protects a writer that is silent for longer.
const ACTIVE_PERIOD: Duration = Duration::from_secs(5 * 60);

/// The start of the IDs of writers that adopt a branch. Such a writer is never active for long.
const WRITER_PREFIX: &str = "adopt-";

/// Maximum number of attempts to write an entry.
const MAX_ATTEMPTS: u32 = 6;

/// How to adopt a branch.
#[derive(Debug, Clone, Copy, Default)]
pub struct AdoptOptions {
    /// Only plan; change nothing.
    pub dry_run: bool,
    /// Adopt the branch even if a writer may be active, or if it was adopted before.
    pub force: bool,
}

/// The result of an adoption.
#[derive(Debug, Clone, Serialize)]
pub struct AdoptReport {
    /// The session.
    pub session: String,
    /// The writer of the branch.
    pub branch: String,
    /// The last entry of the branch.
    pub branch_head: Seq,
    /// The entry of the main line that the branch continues from.
    pub base: Seq,
    /// Whether the main line already had the content of the branch; nothing was written.
    pub already_adopted: bool,
    /// Whether this was a dry run.
    pub dry_run: bool,
    /// The last entry of the former main line.
    pub former_head: Seq,
    /// The named checkpoint at that entry; none if the main line had no files.
    pub former_checkpoint: Option<String>,
    /// Number of files that changed.
    pub files: usize,
    /// Bytes that were written, before compression.
    pub bytes: u64,
    /// The last entry of the new main line.
    pub head: Seq,
    /// Number of complete turns of the new main line.
    pub turn: u64,
}

/// Makes the branch of `writer` the main line of session `id`. `scratch` is a directory in which
/// both lines are assembled.
pub async fn adopt(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    writer: &WriterId,
    options: AdoptOptions,
    scratch: &dyn Directory,
) -> Result<AdoptReport> {
    if id.name.is_project() {
        return Err(Error::usage("only sessions have branches"));
    }
    let adoption = Adoption {
        logs,
        profile,
        id,
        writer,
        options,
        scratch,
    };
    race::retry(id, || adoption.attempt())
        .await
        .with_context(|| format!("adopt branch {writer} of {id}"))
}

struct Adoption<'a> {
    logs: &'a Logs,
    profile: &'a dyn Profile,
    id: &'a LogId,
    writer: &'a WriterId,
    options: AdoptOptions,
    scratch: &'a dyn Directory,
}

/// A line of the session: its files, and its end.
struct Line<'a> {
    files: FileAssembler<'a>,
    seq: Seq,
    head: Seq,
}

impl<'a> Adoption<'a> {
    /// Returns none if another writer appended in between.
    async fn attempt(&self) -> Result<Option<AdoptReport>> {
        let (logs, id) = (self.logs, self.id);
        let Some(branch) = logs.branch(id, self.writer).await? else {
            logs.check_branch(id, self.writer).await?;
            return Ok(None);
        };
        let stage: RelPath = format!("adopt-{:016x}", logs.rng.next()).parse()?;
        let adopted = self.attempt_in(&branch, &stage).await;
        self.scratch
            .remove(&stage)
            .map_err(|cause| Error::io(format!("remove {stage}"), cause))?;
        adopted
    }

    async fn attempt_in(&self, branch: &Branch, stage: &RelPath) -> Result<Option<AdoptReport>> {
        let main = self.read(&ResolvedPoint::default(), stage, "main").await?;
        let point = ResolvedPoint::latest(Some(self.writer));
        let line = self.read(&point, stage, "branch").await?;
        if let Some(by) = main.files.state.removed {
            return Err(errors::removed(self.id, by));
        }
        let turn = self.turns_of(&line, branch, &point).await?;
        let fork = self.logs.fork_origin(self.id).await?;
        let plan = AdoptionPlan::new(
            (&main.files, &line.files),
            branch,
            turn,
            fork.as_ref(),
            self.profile,
            self.scratch,
        )?;
        let mut report = self.report(branch, &main, &plan);
        if !self.options.force && self.is_adopted(&main, branch) || plan.is_empty() {
            report.already_adopted = true;
            (report.files, report.bytes) = (0, 0);
            return Ok(Some(report));
        }
        if !self.options.force {
            self.check_inactive(main.head).await?;
        }
        if self.options.dry_run {
            return Ok(Some(report));
        }
        self.write(branch, &main, plan, report).await
    }

    /// The number of complete turns of the branch. A branch that contains all files from the start
    /// has no checkpoints of the turns before it; they are counted in its transcripts.
    async fn turns_of(
        &self,
        line: &Line<'_>,
        branch: &Branch,
        point: &ResolvedPoint,
    ) -> Result<u64> {
        let state = &line.files.state;
        if branch.base > 0 || !state.checkpoints.is_empty() {
            return Ok(state.turns.turn);
        }
        let read = self.logs.read_turns(self.profile, self.id, point).await?;
        Ok(read.sink.1.visitor.tracker().turn)
    }

    fn report(&self, branch: &Branch, main: &Line<'_>, plan: &AdoptionPlan) -> AdoptReport {
        AdoptReport {
            session: self.id.name.to_string(),
            branch: self.writer.to_string(),
            branch_head: branch.head,
            base: branch.base,
            already_adopted: false,
            dry_run: self.options.dry_run,
            former_head: main.seq,
            former_checkpoint: None,
            files: plan.changed_files(),
            bytes: plan.bytes(),
            head: main.head,
            turn: plan.turn,
        }
    }

    /// Assembles a line of the session.
    async fn read(&self, point: &ResolvedPoint, stage: &RelPath, name: &str) -> Result<Line<'a>> {
        let stage = stage.join(name)?;
        let mut attempt = 0;
        let assembler = || {
            attempt += 1;
            FileAssembler::new(self.scratch, stage.clone(), attempt)
        };
        let options = ReadOptions::up_to(point);
        let read = self.logs.read_log(self.id, options, assembler).await?;
        let (seq, head) = (read.seq, read.head.max(read.seq));
        Ok(Line {
            files: read.require_undamaged(self.id)?,
            seq,
            head,
        })
    }

    /// Whether the main line continues from an adoption of the whole branch.
    fn is_adopted(&self, main: &Line<'_>, branch: &Branch) -> bool {
        main.files
            .state
            .adopted
            .iter()
            .any(|adopted| adopted.writer == *self.writer && adopted.branch_seq == branch.head)
    }

    /// Checks that no writer has written to the main line recently.
    async fn check_inactive(&self, head: Seq) -> Result<()> {
        let Some(last) = self.logs.read_entry(self.id, head).await? else {
            // It was compacted and deleted long ago, or there is no main line.
            return Ok(());
        };
        let (writer, at) = (&last.header.writer, last.header.at);
        let age = self.logs.clock.now().duration_since(at).unsigned_abs();
        if writer.as_str().starts_with(WRITER_PREFIX) || age > ACTIVE_PERIOD {
            return Ok(());
        }
        Err(Error::conflict(format!(
            "writer {writer} wrote to the session less than {} minutes ago and may still run",
            ACTIVE_PERIOD.as_secs() / 60
        ))
        .hint(format!(
            "stop it, then run \"sessiond adopt {} --branch {} --force\"; a writer that still runs continues on a branch",
            self.id.name, self.writer
        )))
    }

    /// Claims the session, names the end of the former main line, and writes the deltas. Returns
    /// none if another writer was first.
    async fn write(
        &self,
        branch: &Branch,
        main: &Line<'_>,
        plan: AdoptionPlan,
        mut report: AdoptReport,
    ) -> Result<Option<AdoptReport>> {
        let (logs, id) = (self.logs, self.id);
        let (seq, digest) = (main.seq, main.files.state.digest);
        let writer = format!(
            "{WRITER_PREFIX}{:016x}{:08x}",
            logs.rng.next(),
            logs.rng.next() >> 32
        );
        let mut log_writer = LogWriter::unclaimed(writer.parse()?, seq, digest, logs.clock.now());
        log_writer.rollback_to = (branch.base > 0).then_some(branch.base);
        let mut backoff = Backoff::new(logs.rng.clone());
        let claim = loop {
            match logs.claim(id, &mut log_writer, main.head).await {
                Ok(claim) => break claim,
                Err(error) => backoff.wait(error, MAX_ATTEMPTS).await.map_err(resumable)?,
            }
        };
        if claim.is_none() {
            return Ok(None);
        }
        // Only now: after a lost race, the former main line would be another one. It must have its
        // name before the first delta replaces its files.
        report.former_checkpoint = self.name_former_line(main).await.map_err(resumable)?;
        let mut deltas = plan.into_deltas(self.scratch);
        while let Some(delta) = deltas.next()? {
            let encoded = self.encode(&log_writer, branch, delta)?;
            if !self.append(&mut log_writer, &encoded).await? {
                return Ok(None);
            }
        }
        report.head = log_writer.seq;
        Ok(Some(report))
    }

    fn encode(
        &self,
        log_writer: &LogWriter,
        branch: &Branch,
        delta: Delta,
    ) -> Result<EncodedEntry> {
        let adopted = AdoptedBranch {
            writer: branch.writer.clone(),
            branch_seq: branch.head,
            seq: None,
        };
        let header = log_writer.next_header(
            self.id,
            EntryKind::Delta,
            self.logs.clock.now(),
            delta.moves,
            delta.parts,
        );
        let header = EntryHeader {
            checkpoints: delta.checkpoints,
            adopted: Vec::from_iter(delta.is_last.then_some(adopted)),
            ..header
        };
        entry::encode(header, &delta.bodies)
    }

    /// Returns false if another writer took over the session.
    async fn append(&self, log_writer: &mut LogWriter, encoded: &EncodedEntry) -> Result<bool> {
        let mut backoff = Backoff::new(self.logs.rng.clone());
        loop {
            match self.logs.append(self.id, log_writer, encoded).await {
                Ok(AppendOutcome::Written) => return Ok(true),
                Ok(AppendOutcome::Conflict(_)) => return Ok(false),
                Err(error) => backoff.wait(error, MAX_ATTEMPTS).await.map_err(resumable)?,
            }
        }
    }

    /// Names the end of the former main line, unless it has a name from an adoption that was
    /// interrupted. Returns none if there are no files.
    async fn name_former_line(&self, main: &Line<'_>) -> Result<Option<String>> {
        let files = &main.files.state.files;
        let Some(changed) = files.values().map(|file| file.seq).max() else {
            return Ok(None);
        };
        let prefix: String = self.writer.as_str().chars().take(8).collect();
        let name = format!("before-adopt-{prefix}");
        let numbered = format!("{name}-{}", main.seq);
        let point = ResolvedPoint {
            at: crate::model::LogPoint::Seq(main.seq),
            ..ResolvedPoint::default()
        };
        let checkpoint = self
            .logs
            .checkpoint_at(self.profile, self.id, &point)
            .await?;
        for name in [name, numbered] {
            if let Some(earlier) = self.logs.named_checkpoint(self.id, &name).await? {
                let is_same = earlier.checkpoint.transcript_lengths
                    == checkpoint.transcript_lengths
                    && earlier.checkpoint.seq.is_some_and(|seq| seq >= changed);
                if is_same {
                    return Ok(Some(name));
                }
                continue;
            }
            let named = self
                .logs
                .name_checkpoint(self.id, &name, checkpoint.clone())
                .await?;
            if named.is_some() {
                return Ok(Some(name));
            }
        }
        Err(Error::unavailable(
            "another process names the same point of the session",
        ))
    }
}

/// Adds to a retryable error how to complete the adoption.
fn resumable(error: Error) -> Error {
    if error.is_retryable() {
        error.hint("run the same command again; it completes the adoption")
    } else {
        error
    }
}
