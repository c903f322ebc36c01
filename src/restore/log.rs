//! Restores one log: reads it, plans and writes its files, claims it.

use std::collections::BTreeMap;
use std::future::Future;

use futures_util::future::join;
use tracing::Instrument;
use tracing::field::{Empty, display};

use super::claim::{LogEnd, Takeover, take_over};
use super::options::{Options, Purpose, RestoreContext};
use super::ownership;
use super::plan::{self, FilePlan, LedgerState};
use super::project;
use super::report::{RestoreReport, Restored};
use super::write;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::assemble::FileAssembler;
use crate::log::ledger::{FileCursor, Ledger};
use crate::log::read::{ReadOptions, ReadOutcome};
use crate::log::witness::{ReadLinks, Witness, WitnessQuery};
use crate::log::writer::WriteTarget;
use crate::log::{errors, race, segments};
use crate::model::limits::MAX_SEQ;
use crate::model::{
    FileKind, FileStat, FileState, LogId, LogPoint, RelPath, ResolvedPoint, Seq, ToolCall,
};
use crate::store::Store;
use crate::sys::{Directory, STATE_DIR, TRACE_TARGET};

/// Restores the files of one log.
pub async fn restore(context: &RestoreContext, id: &LogId, options: &Options) -> Result<Restored> {
    let attempts = race::retry(id, || async {
        let prepared = prepare(context, id, options).await?;
        prepared.finish(context, id).await
    });
    let command = options.purpose.as_str();
    let attempts = async { attempts.await.with_context(|| format!("{command} {id}")) };
    traced(id, attempts, |restored| &restored.report).await
}

/// Records a restore as a traced span.
pub(super) async fn traced<T>(
    id: &LogId,
    restore: impl Future<Output = Result<T>>,
    report: impl Fn(&T) -> &RestoreReport,
) -> Result<T> {
    let span = tracing::info_span!(
        target: TRACE_TARGET, "restore", session.id = %id.name, entry = Empty, objects = Empty, files = Empty, bytes = Empty, error = Empty
    );
    let result = restore.instrument(span.clone()).await;
    match &result {
        Ok(restored) => {
            let report = report(restored);
            span.record("entry", report.seq)
                .record("objects", report.objects)
                .record("files", report.written())
                .record("bytes", report.bytes);
        }
        // Most projects have no log.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            span.record("error", display(error));
        }
    }
    result
}

/// A log whose files are written, but which is not claimed yet.
pub(super) struct Prepared {
    pub restored: Restored,
    /// How the log is claimed; none for a copy or a dry run.
    takeover: Option<Takeover>,
}

impl Prepared {
    /// Claims the log. Returns `None` if another writer appended in between.
    pub async fn finish(self, context: &RestoreContext, id: &LogId) -> Result<Option<Restored>> {
        match self.takeover {
            Some(takeover) => take_over(context, id, takeover, self.restored).await,
            None => Ok(Some(self.restored)),
        }
    }
}

/// Reads a log and writes its files.
pub(super) async fn prepare(
    context: &RestoreContext,
    id: &LogId,
    options: &Options,
) -> Result<Prepared> {
    let witness = match options.claim && options.point.branch.is_none() {
        true => options.witness.ask(id),
        false => Witness::default().ask(id),
    };
    if let Some(mut prepared) = prepare_up_to_date(context, id, options).await? {
        let end = prepared.takeover.as_ref().map(|takeover| takeover.end);
        let link = end.and_then(|end| Some((end.seq, end.digest?)));
        let log = ReadLinks {
            head: prepared.restored.report.head,
            links: link.as_slice(),
        };
        prepared.restored.report.accepted_rollback = witness.check(&context.logs, id, &log).await?;
        return Ok(prepared);
    }
    if options.claim {
        // Left by a restore that was killed. The caller holds the directory's lock.
        let left: RelPath = format!("{STATE_DIR}/tmp").parse()?;
        context
            .directory
            .remove(&left)
            .map_err(|cause| Error::io(format!("remove {left}"), cause))?;
    }
    let stage: RelPath =
        format!("{STATE_DIR}/tmp/restore-{:016x}", context.logs.rng.next()).parse()?;
    // The claim needs the fence. Choose it while the log is read; if that fails, the claim retries.
    let choose_fence = async {
        if options.claim {
            let _ = context
                .logs
                .fence
                .choose(&*context.logs.store, &context.logs.rng)
                .await;
        }
    };
    let read_and_write = read_and_write(context, id, options, &stage, witness);
    let (prepared, ()) = join(read_and_write, choose_fence).await;
    if let Err(cause) = context.directory.remove(&stage) {
        tracing::warn!(%cause, %stage, "cannot remove the staging directory");
    }
    prepared
}

async fn read_and_write(
    context: &RestoreContext,
    id: &LogId,
    options: &Options,
    stage: &RelPath,
    witness: WitnessQuery,
) -> Result<Prepared> {
    if let Some(writer) = &options.point.branch {
        context.logs.check_branch(id, writer).await?;
    }
    let mut attempt = 0;
    let mut assembler = || {
        attempt += 1;
        FileAssembler::new(&*context.directory, stage.clone(), attempt)
    };
    let mut read = read_point(context, id, options, &mut assembler).await?;
    // Before anything is written: a log without its newest entries may even look missing.
    let accepted_rollback = witness.check(&context.logs, id, &read.read_links()).await?;
    errors::check_point(id, options.point.at, &read)?;
    if options.claim && read.head >= MAX_SEQ {
        return Err(errors::full(id));
    }
    if let Some(by) = read.sink.state.removed {
        return Err(errors::removed(id, by));
    }
    for damage in &read.redundant_damage {
        tracing::warn!(%damage, "an object is damaged; reading other segments that cover its entries");
    }
    ownership::check_files(context, id, &mut read.sink, options.purpose).map_err(|error| {
        error.hint(format!(
            "run \"sessiond pull {} --to DIR\" to fetch a copy without the file; nothing was changed",
            id.name
        ))
    })?;
    let end = read_end(context, id, options, &read, assembler).await?;
    let mut prepared = write(context, id, options, read, end).await?;
    prepared.restored.report.accepted_rollback = accepted_rollback;
    Ok(prepared)
}

/// Reads the log up to the point; with `salvage`, up to the last undamaged entry. An undamaged part
/// that the agent cannot resume is not restored: a claim would hide the damage after it.
async fn read_point<'a>(
    context: &RestoreContext,
    id: &LogId,
    options: &Options,
    assembler: &mut (impl FnMut() -> FileAssembler<'a> + Send),
) -> Result<ReadOutcome<FileAssembler<'a>>> {
    let mut at = options.point.at;
    let mut salvaged: Option<Error> = None;
    loop {
        let read_options = ReadOptions {
            at,
            branch: options.point.branch.as_ref(),
            ..ReadOptions::default()
        };
        let mut read = context
            .logs
            .read_log(id, read_options, &mut *assembler)
            .await?;
        let error = match (read.damage.take(), salvaged.take()) {
            (None, Some(error)) if !is_resumable(context, id, &read) => {
                return Err(with_damage_hint(context, id, &read, error, options));
            }
            (None, Some(error)) => {
                tracing::warn!(%error, undamaged_to = read.seq, head = read.head, "the log is damaged; restoring the undamaged part");
                return Ok(read);
            }
            (None, None) => return Ok(read),
            (Some(_), Some(first)) => first,
            (Some(error), None) => error,
        };
        if !options.salvage || read.seq == 0 {
            return Err(with_damage_hint(context, id, &read, error, options));
        }
        at = LogPoint::Seq(read.seq);
        salvaged = Some(error);
    }
}

/// Whether the agent can resume what was read: it holds the session's transcript.
fn is_resumable(
    context: &RestoreContext,
    id: &LogId,
    read: &ReadOutcome<FileAssembler<'_>>,
) -> bool {
    let files = &read.sink.state.files;
    let mut files = files.iter().filter(|(_, file)| file.len > 0);
    if id.name.is_project() || !context.profile.knows_transcripts() {
        return files.next().is_some();
    }
    files.any(|(path, _)| context.profile.is_transcript(path))
}

/// Adds the other damage that was found, and what the user can do.
fn with_damage_hint(
    context: &RestoreContext,
    id: &LogId,
    read: &ReadOutcome<FileAssembler<'_>>,
    error: Error,
    options: &Options,
) -> Error {
    let hint = error.hint_text().map(str::to_owned);
    let error = match read.redundant_damage.as_slice() {
        [] => error,
        others => Error::corrupt(format!("{error}; also damaged: {}", others.join("; "))),
    };
    error.hint(hint.unwrap_or_else(|| match read.seq {
        0 => errors::NO_UNDAMAGED_ENTRY.to_owned(),
        _ if options.purpose == Purpose::Restore && !is_resumable(context, id, read) => {
            errors::history_hint(id)
        }
        seq => undamaged_part_hint(id, seq, read.head, options),
    }))
}

/// How to get the entries before the damage. Only a restore may suggest a command that claims the
/// log.
fn undamaged_part_hint(id: &LogId, seq: Seq, head: Seq, options: &Options) -> String {
    let name = &id.name;
    if options.purpose == Purpose::Restore {
        return format!(
            "run \"sessiond restore {name} --salvage\" to restore up to entry {seq} of {head}"
        );
    }
    if options.purpose == Purpose::Export {
        return format!(
            "run \"sessiond export {name} --at seq:{seq} -o FILE\" to export up to entry {seq} of {head}"
        );
    }
    let branch = match &options.point.branch {
        Some(writer) => format!(" --branch {writer}"),
        None => String::new(),
    };
    format!(
        "run \"sessiond pull {name}{branch} --at seq:{seq}\" to fetch up to entry {seq} of {head}"
    )
}

/// Reads the end of the log, after which the claim is written.
async fn read_end<'a>(
    context: &'a RestoreContext,
    id: &LogId,
    options: &Options,
    read: &ReadOutcome<FileAssembler<'_>>,
    assembler: impl FnMut() -> FileAssembler<'a> + Send,
) -> Result<LogEnd> {
    if options.point.at == LogPoint::Latest || !options.claim {
        return Ok(log_end(read));
    }
    // A rollback is also written after the end of the log or, if the log is damaged, after its last
    // undamaged entry. This read verifies the bytes of that entry: a claim after an entry that
    // cannot be restored would make that entry part of every later restore.
    let latest = context
        .logs
        .read_log(id, ReadOptions::default(), assembler)
        .await?;
    if let Some(error) = &latest.damage {
        tracing::warn!(%error, "the log is damaged; continuing after its last undamaged entry");
    }
    Ok(log_end(&latest))
}

fn log_end(read: &ReadOutcome<FileAssembler<'_>>) -> LogEnd {
    LogEnd {
        seq: read.seq,
        digest: read.digest,
        head: read.head.max(read.seq),
        checkpoint: read.sink.state.turns.last_number,
    }
}

/// Plans and writes the files of a log that was read.
async fn write(
    context: &RestoreContext,
    id: &LogId,
    options: &Options,
    mut read: ReadOutcome<FileAssembler<'_>>,
    end: LogEnd,
) -> Result<Prepared> {
    if let Some(checkpoint) = &options.point.checkpoint {
        read.sink.truncate_to(checkpoint)?;
    }
    let (rewound_bytes, rewound_calls) =
        match options.point.branch.is_none() && !options.is_latest() {
            true => rewound(context, id, &read.sink).await?,
            false => Default::default(),
        };
    let moves = project::moves(context, id, &read.sink, options)?;
    read.sink.relocate(&moves);
    let assembler = &read.sink;
    let ledger = Ledger::load(&*context.directory, &context.logs.store.address(), id)
        .filter(|_| options.claim);
    let known = LedgerState {
        ledger: ledger.as_ref(),
        continued_here: options.is_last_turn
            && ledger.as_ref().is_some_and(|ledger| {
                ledger.log_writer.target == WriteTarget::Main && ledger.log_writer.seq == end.head
            }),
    };
    let files = plan::plan_files(context, id, assembler, &moves, known, options)?;
    let mut report = RestoreReport {
        seq: read.seq,
        head: end.head,
        objects: read.objects,
        rewound_bytes,
        rewound_calls,
        ..RestoreReport::new(id, files, options)
    };
    plan::check_conflicts(id, &report.files, options)?;
    if options.dry_run {
        write::preview_repairs(context, assembler, &mut report, options)?;
        return Ok(Prepared {
            restored: Restored {
                report,
                claim: None,
            },
            takeover: None,
        });
    }
    let mut cursors = tracing::info_span!(target: TRACE_TARGET, "place").in_scope(|| {
        write::write_files(context, assembler, &mut report, ledger.as_ref(), options)
    })?;
    if read.seq < end.seq {
        // The end of the log holds other bytes of these files.
        cursors.values_mut().for_each(FileCursor::invalidate);
    }
    let takeover = options.claim.then(|| {
        let is_rollback = read.seq < end.seq || options.point.checkpoint.is_some();
        let mut turns = assembler.state.turns.clone();
        turns.last_number = turns.last_number.max(end.checkpoint);
        Takeover {
            end,
            files: cursors,
            turns,
            // After a rollback all files are uploaded again, at their new paths.
            moves: if is_rollback { Vec::new() } else { moves },
            rollback_to: is_rollback.then_some(read.seq),
            rollback_checkpoint: options
                .point
                .checkpoint
                .as_ref()
                .map(|checkpoint| checkpoint.number)
                .filter(|number| *number > 0),
        }
    });
    Ok(Prepared {
        restored: Restored {
            report,
            claim: None,
        },
        takeover,
    })
}

/// The content of a log after the restored point: bytes by transcript, and the calls that are
/// pending at its end.
async fn rewound(
    context: &RestoreContext,
    id: &LogId,
    restored: &FileAssembler<'_>,
) -> Result<(BTreeMap<RelPath, u64>, Vec<ToolCall>)> {
    let point = ResolvedPoint::default();
    let read = context
        .logs
        .read_turns(&*context.profile, id, &point)
        .await?;
    let (end, replay) = read.sink;
    let added = |path: &RelPath, file: &FileState| {
        let kept = restored.state.files.get(path).map_or(0, |kept| kept.len);
        file.len.checked_sub(kept).filter(|added| *added > 0)
    };
    let bytes = end
        .files
        .iter()
        .filter(|(_, file)| file.kind == FileKind::Append)
        .filter_map(|(path, file)| Some((path.clone(), added(path, file)?)))
        .collect();
    Ok((bytes, replay.visitor.tracker().pending_calls))
}

/// Prepares a log that this volume wrote last: its files are equal to the log or newer, so nothing
/// is read. Returns `None` if that is not the case.
async fn prepare_up_to_date(
    context: &RestoreContext,
    id: &LogId,
    options: &Options,
) -> Result<Option<Prepared>> {
    if !options.claim || !options.is_latest() || options.force || options.repair {
        return Ok(None);
    }
    // A key may have been removed from the trusted ones since the ledger was written.
    if context.logs.store.signatures().is_checked() {
        return Ok(None);
    }
    let Some(ledger) = Ledger::load(&*context.directory, &context.logs.store.address(), id) else {
        return Ok(None);
    };
    let segments = context
        .logs
        .list_newest_segments_at_once(id)
        .instrument(tracing::info_span!(target: TRACE_TARGET, "plan"))
        .await?;
    let head = segments::head(&segments);
    let is_current = ledger.log_writer.target == WriteTarget::Main && ledger.log_writer.seq == head;
    if !is_current || !stays_in_project(context, id, options, &ledger)? {
        return Ok(None);
    }
    let mut files = Vec::new();
    for (path, cursor) in &ledger.files {
        match unchanged_file(&*context.directory, path, cursor) {
            Ok(Some(stat)) => files.push(FilePlan::kept(path, cursor, &stat)),
            Ok(None) | Err(_) => return Ok(None),
        }
    }
    let report = RestoreReport {
        seq: head,
        head,
        ..RestoreReport::new(id, files, options)
    };
    let takeover = (!options.dry_run).then(|| Takeover {
        end: LogEnd {
            seq: ledger.log_writer.seq,
            digest: ledger.log_writer.digest,
            head: ledger.log_writer.seq,
            checkpoint: ledger.turns.last_number,
        },
        files: ledger.files,
        turns: ledger.turns,
        moves: Vec::new(),
        rollback_to: None,
        rollback_checkpoint: None,
    });
    Ok(Some(Prepared {
        restored: Restored {
            report,
            claim: None,
        },
        takeover,
    }))
}

/// Whether no file of the session has to move, and no other project has a copy of its transcript.
fn stays_in_project(
    context: &RestoreContext,
    id: &LogId,
    options: &Options,
    ledger: &Ledger,
) -> Result<bool> {
    let paths = || ledger.files.keys().map(|path| (path, 0));
    let stays = options.project.as_ref().is_none_or(|project| {
        project::moves_into(&*context.profile, &project.name, paths()).is_empty()
    });
    if !stays {
        return Ok(false);
    }
    for path in ledger.files.keys() {
        if context.profile.is_transcript(path)
            && !project::duplicates(context, id, path)?.is_empty()
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The metadata of a local file that still holds the bytes that were uploaded: a power failure can
/// cut its end.
fn unchanged_file(
    directory: &dyn Directory,
    path: &RelPath,
    cursor: &FileCursor,
) -> std::io::Result<Option<FileStat>> {
    let Some(file) = directory.open(path)? else {
        return Ok(None);
    };
    let stat = file.stat()?;
    let is_unchanged = match cursor.kind {
        _ if stat == cursor.stat => true,
        FileKind::Append => FileCursor::read(&*file, cursor.kind, cursor.len)?
            .is_some_and(|current| current.hash == cursor.hash),
        // The agent may have replaced it since, but not with an empty file.
        FileKind::Whole => stat.size > 0 || cursor.len == 0,
    };
    Ok(is_unchanged.then_some(stat))
}
