//! The way in: find → plan → fetch and verify → place → claim.
//!
//! Owns what a restore does to local files. Does not own the log's rules (`log`) or the format (`codec`).

pub mod blob;
pub mod conversation_state;
pub mod find;
pub mod fork;
pub mod history;
pub mod history_text;
pub mod place;
pub mod point;
pub mod relocate;
pub mod repair;
pub mod verify;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::future::{BoxFuture, join};
use serde::Serialize;
use tracing::Instrument;
use tracing::field::{Empty, display};

use crate::agent::Profile;
use crate::codec::entry::Encoded;
use crate::error::{Error, ErrorContext, ErrorKind, Result};
use crate::log::Logs;
use crate::log::assemble::FileAssembler;
use crate::log::ledger::{FileCursor, Ledger};
use crate::log::read::{ReadOptions, ReadOutcome};
use crate::log::segments;
use crate::log::writer::{LogWriter, WriteTarget};
use crate::model::{
    Checkpoint, Digest, EntryKind, FileKind, FileMove, LogId, LogName, LogPoint, RelPath, Seq,
    ToolCall, TurnTracker, WriterId,
};
use crate::sys::clock::new_writer;
use crate::sys::{Backoff, Directory, Owner, STATE_DIR, TRACED};

use place::{Action, FilePlan};
use repair::Repaired;

/// Somebody else may write between our look and our claim; so often we look again.
const MOST_RACES: u32 = 10;

/// So often a claim is tried that the store does not answer.
const CLAIM_TRIES: u32 = 4;

/// What a restore needs.
#[derive(Clone)]
pub struct Context {
    /// Where the files go.
    pub directory: Arc<dyn Directory>,
    /// What we know of the agent.
    pub profile: Arc<dyn Profile>,
    /// Where the entries come from.
    pub logs: Logs,
}

/// How to restore.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The point to go back to.
    pub at: LogPoint,
    /// Within the entry at that point: only what was there at this checkpoint.
    pub cut: Option<Checkpoint>,
    /// It is the last turn that is complete: where the agent went on from it on this volume, that is kept.
    pub last_turn: bool,
    /// The branch to take instead of the log.
    pub branch: Option<WriterId>,
    /// Put the session where the agent looks for it in this project.
    pub project: Option<String>,
    /// Move local files that differ aside instead of stopping.
    pub force: bool,
    /// Where the log is damaged, take what is sound before the damage.
    pub salvage: bool,
    /// Give the agent transcripts without damage, and keep them as they were aside.
    pub repair: bool,
    /// Only say what would be done.
    pub dry_run: bool,
    /// Take the session over. Never for a copy.
    pub claim: bool,
    /// Bring what belongs to its projects along.
    pub along: bool,
    /// Whose the files shall be.
    pub owner: Option<Owner>,
}

/// What a restore did, or would do.
#[derive(Debug, Serialize)]
pub struct RestoreReport {
    /// The session; the id to resume.
    pub session: String,
    /// The entry that the files stand at.
    pub seq: u64,
    /// The end of the log.
    pub head: u64,
    /// Who holds the session now, if it was taken over.
    pub writer: Option<String>,
    /// Objects read.
    pub objects: usize,
    /// Bytes put in place.
    pub bytes: u64,
    /// Each file and what became of it.
    pub files: Vec<FilePlan>,
    /// What came behind the point and stays in the log: bytes, by transcript.
    pub cut_off: BTreeMap<RelPath, u64>,
    /// The calls among it that nothing had answered.
    pub dropped: Vec<ToolCall>,
    /// What was repaired in which file.
    pub repaired: Vec<Repaired>,
    /// Whether nothing was done on purpose.
    pub dry_run: bool,
    /// The claim, for the index.
    #[serde(skip)]
    pub claim: Option<Encoded>,
    /// What became of the projects' files, if they were to be brought along.
    #[serde(skip)]
    pub along: Vec<Result<RestoreReport>>,
}

/// Brings a log's files back.
pub async fn restore(context: &Context, id: &LogId, options: &Options) -> Result<RestoreReport> {
    let span = tracing::info_span!(
        target: TRACED, "restore", session.id = %id.name, entry = Empty, objects = Empty, files = Empty, bytes = Empty, error = Empty
    );
    let result = until_nobody_writes(context, id, options)
        .instrument(span.clone())
        .await;
    match &result {
        Ok(report) => {
            span.record("entry", report.seq)
                .record("objects", report.objects);
            span.record("files", report.written())
                .record("bytes", report.bytes)
        }
        // A project has files of its own, or has none.
        Err(error) if error.kind() == ErrorKind::NotFound => &span,
        Err(error) => span.record("error", display(error)),
    };
    result
}

/// Brings back what belongs to the projects that these files are in.
fn along<'a>(
    context: &'a Context,
    id: &LogId,
    files: &[FilePlan],
    options: &Options,
) -> BoxFuture<'a, Vec<Result<RestoreReport>>> {
    let placed = files
        .iter()
        .filter(|file| options.along && !id.name.is_project() && file.action != Action::Aside);
    let projects: BTreeSet<LogName> = placed
        .filter_map(|file| context.profile.project_log(&file.path))
        .collect();
    let Options {
        force,
        salvage,
        repair,
        dry_run,
        claim,
        owner,
        ..
    } = *options;
    Box::pin(async move {
        let mut reports = Vec::new();
        for name in projects {
            // A project stays where it is, and as it is now.
            let options = Options {
                force,
                salvage,
                repair,
                dry_run,
                claim,
                owner,
                ..Options::default()
            };
            match restore(context, &context.logs.id(name), &options).await {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                done => reports.push(done),
            }
        }
        reports
    })
}

async fn until_nobody_writes(
    context: &Context,
    id: &LogId,
    options: &Options,
) -> Result<RestoreReport> {
    for _ in 0..MOST_RACES {
        if let Some(report) = attempt(context, id, options)
            .await
            .with_context(|| format!("restore {id}"))?
        {
            return Ok(report);
        }
    }
    Err(
        Error::unavailable(format!("restore {id}: others keep writing to it"))
            .hint("stop the other writer, or try again"),
    )
}

/// None if somebody wrote in between.
async fn attempt(
    context: &Context,
    id: &LogId,
    options: &Options,
) -> Result<Option<RestoreReport>> {
    if let Some(report) = still_ours(context, id, options).await? {
        return Ok(report);
    }
    if options.claim {
        // What a restore left that was killed; we hold the directory's lock.
        let left = format!("{STATE_DIR}/tmp").parse()?;
        context
            .directory
            .remove(&left)
            .map_err(|cause| Error::io(format!("remove {left}"), cause))?;
    }
    let stage: RelPath =
        format!("{STATE_DIR}/tmp/restore-{:016x}", context.logs.rng.next()).parse()?;
    // What the claim will need to know of the store is asked meanwhile; if it does not answer, the claim asks again.
    let asked = async {
        if options.claim {
            let _ = context
                .logs
                .fence
                .choose(&*context.logs.store, &context.logs.rng)
                .await;
        }
    };
    let (result, ()) = join(assemble_and_finish(context, id, options, &stage), asked).await;
    // A restore that failed leaves nothing behind.
    if let Err(cause) = context.directory.remove(&stage) {
        tracing::warn!(%cause, %stage, "the temporary directory was not removed");
    }
    result
}

async fn assemble_and_finish(
    context: &Context,
    id: &LogId,
    options: &Options,
    stage: &RelPath,
) -> Result<Option<RestoreReport>> {
    let branch = options.branch.as_ref();
    if let Some(writer) = branch
        && context.logs.branch_pieces(id, writer).await?.is_empty()
    {
        let known: Vec<String> = context
            .logs
            .branches(id)
            .await?
            .iter()
            .map(ToString::to_string)
            .collect();
        let known = if known.is_empty() {
            "it has none".to_owned()
        } else {
            format!("it has {}", known.join(", "))
        };
        return Err(Error::not_found(format!(
            "it has no branch {writer}: {known}"
        )));
    }
    let mut made = 0;
    let mut at = options.at;
    let read = loop {
        let fresh = || {
            made += 1;
            FileAssembler::new(&*context.directory, stage.clone(), made)
        };
        let mut read = context
            .logs
            .read_log(
                id,
                ReadOptions {
                    at,
                    branch,
                    ..ReadOptions::default()
                },
                fresh,
            )
            .await?;
        match read.damage.take() {
            None => break read,
            Some(error) if options.salvage && read.seq > 0 => {
                tracing::warn!(%error, sound = read.seq, head = read.head, "the log is damaged; bringing back what is sound");
                at = LogPoint::Seq(read.seq);
            }
            Some(error) => return Err(explained(id, &read, error)),
        }
    };
    if read.head == 0 && branch.is_none() {
        return Err(find::unknown(id));
    }
    if let LogPoint::Seq(seq) = options.at
        && branch.is_none()
        && seq > read.head
    {
        return Err(Error::not_found(format!(
            "it has no entry {seq}: its last is {}",
            read.head
        )));
    }
    if read.seq == 0 {
        return Err(
            Error::not_found(format!("it has no entry as early as {}", options.at)).hint(format!(
                "sessiond checkpoints {} lists points to go back to",
                id.name
            )),
        );
    }
    match read.sink.state.removed {
        Some(EntryKind::Purge) => return Err(Error::not_found("it was deleted for good")),
        Some(_) => {
            return Err(
                Error::not_found("it was removed, or has expired").hint(format!(
                    "sessiond undelete {} brings it back within the grace period",
                    id.name
                )),
            );
        }
        None => {}
    }
    for told in &read.spared {
        tracing::warn!("damaged, and other objects stand for it: {told}");
    }
    let head = head_of(context, id, options, &read, || {
        made += 1;
        FileAssembler::new(&*context.directory, stage.clone(), made)
    })
    .await?;
    finish(context, id, options, read, head).await
}

/// Says what a person can do about damage.
fn explained<S>(id: &LogId, read: &ReadOutcome<S>, error: Error) -> Error {
    let hint = error.hint_text().map(str::to_owned);
    let error = match read.spared.as_slice() {
        [] => error,
        also => Error::corrupt(format!("{error}; damaged too: {}", also.join("; "))),
    };
    error.hint(hint.unwrap_or_else(|| match read.seq {
        0 => "nothing before it is sound: bring the object back from a copy of the bucket, or from an older version of it".to_owned(),
        sound => format!("sessiond restore {} --salvage brings back what is sound: up to entry {sound} of {}", id.name, read.head),
    }))
}

/// The end of a log, which a claim goes behind.
#[derive(Debug, Clone, Copy)]
struct Head {
    /// The number of its last sound entry.
    seq: Seq,
    /// Its digest.
    digest: Option<Digest>,
    /// The last number there is; higher if what stands behind the last sound entry is damaged.
    end: Seq,
    /// The highest number of a checkpoint.
    points: u64,
}

async fn head_of<'a>(
    context: &'a Context,
    id: &LogId,
    options: &Options,
    read: &ReadOutcome<FileAssembler<'_>>,
    fresh: impl FnMut() -> FileAssembler<'a> + Send,
) -> Result<Head> {
    let here = Head {
        seq: read.seq,
        digest: read.digest,
        end: read.head.max(read.seq),
        points: read.sink.state.turns.number,
    };
    if options.at == LogPoint::Latest || !options.claim {
        return Ok(here);
    }
    // Going on from an earlier point is written behind the end all the same, or, where the log is damaged, behind what is
    // sound of it. Down to the bytes: a claim that follows an entry nobody can restore would make it part of every restore.
    let latest = context
        .logs
        .read_log(id, ReadOptions::default(), fresh)
        .await?;
    if let Some(error) = &latest.damage {
        tracing::warn!(%error, "the log is damaged; it goes on behind its last sound entry");
    }
    Ok(Head {
        seq: latest.seq,
        digest: latest.digest,
        end: latest.head.max(latest.seq),
        points: latest.sink.state.turns.number,
    })
}

/// Our own volume, nobody wrote since: what is here is the log or newer, and nothing needs to be read. The outer none
/// means that this is not so.
async fn still_ours(
    context: &Context,
    id: &LogId,
    options: &Options,
) -> Result<Option<Option<RestoreReport>>> {
    if !options.claim
        || options.at != LogPoint::Latest
        || options.cut.is_some()
        || options.force
        || options.repair
    {
        return Ok(None);
    }
    let Some(ledger) = Ledger::load(&*context.directory, &context.logs.store.address(), id) else {
        return Ok(None);
    };
    let newest = context
        .logs
        .newest_pieces(id)
        .instrument(tracing::info_span!(target: TRACED, "plan"))
        .await?;
    let newest = segments::head(&newest);
    let known = || ledger.files.keys().map(|path| (path, 0));
    let stays = options
        .project
        .as_ref()
        .is_none_or(|project| relocate::into(&*context.profile, project, known()).is_empty());
    // One of two places of it is to go, or to be told of.
    let mut transcripts = ledger
        .files
        .keys()
        .filter(|path| context.profile.is_transcript(path));
    let alone = transcripts.try_fold(true, |alone, path| {
        Ok::<_, Error>(alone && relocate::elsewhere(context, id, path)?.is_empty())
    })?;
    let current = ledger.log_writer.target == WriteTarget::Main
        && ledger.log_writer.seq == newest
        && stays
        && alone;
    let whole = |(path, cursor): (&RelPath, &FileCursor)| {
        holds(&*context.directory, path, cursor).unwrap_or(false)
    };
    if !current || !ledger.files.iter().all(whole) {
        return Ok(None);
    }
    let files = ledger
        .files
        .iter()
        .map(|(path, cursor)| FilePlan::kept(path, cursor))
        .collect();
    let mut report = RestoreReport {
        seq: newest,
        head: newest,
        ..RestoreReport::new(id, files, options)
    };
    let along = along(context, id, &report.files, options);
    if options.dry_run {
        report.along = along.await;
        return Ok(Some(Some(report)));
    }
    let head = Head {
        seq: ledger.log_writer.seq,
        digest: ledger.log_writer.digest,
        end: ledger.log_writer.seq,
        points: ledger.turns.number,
    };
    let going = Going {
        files: ledger.files,
        turns: ledger.turns,
        moves: Vec::new(),
        back_to: None,
    };
    let (taken, along) = join(take_over(context, id, head, going, &mut report), along).await;
    report.along = along;
    Ok(Some(taken?.then_some(report)))
}

/// Whether what was shipped of a file is still there: a machine that lost its power may have lost the end of it.
fn holds(directory: &dyn Directory, path: &RelPath, cursor: &FileCursor) -> std::io::Result<bool> {
    let Some(file) = directory.open(path)? else {
        return Ok(false);
    };
    let stat = file.stat()?;
    if stat == cursor.stat {
        return Ok(true);
    }
    match cursor.kind {
        FileKind::Append => Ok(FileCursor::over(&*file, cursor.kind, cursor.len)?
            .is_some_and(|now| now.hash == cursor.hash)),
        // It may have been replaced since, but not by nothing.
        FileKind::Whole => Ok(stat.size > 0 || cursor.len == 0),
    }
}

/// Claims, and tries again what failed in passing: a claim that arrived unheard of is read back.
async fn claim(
    context: &Context,
    id: &LogId,
    log_writer: &mut LogWriter,
    end: Seq,
) -> Result<Option<Encoded>> {
    let mut backoff = Backoff::new(context.logs.rng.clone());
    loop {
        match context.logs.claim(id, log_writer, end).await {
            Err(error) if error.is_retryable() && backoff.failed() + 1 < CLAIM_TRIES => {
                tracing::debug!(%error, attempt = backoff.failed() + 1, "claiming again");
                tokio::time::sleep(backoff.wait_after_failure()).await;
            }
            done => return done,
        }
    }
}

/// What the daemon goes on from.
struct Going {
    /// How far each file is shipped.
    files: BTreeMap<RelPath, FileCursor>,
    /// How far the turns have come.
    turns: TurnTracker,
    /// Files that have other paths here than in the log.
    moves: Vec<FileMove>,
    /// The entry that was gone back to, if it is not the last.
    back_to: Option<Seq>,
}

/// Claims the log and writes the ledger that lets the daemon go on. False if somebody wrote in between.
async fn take_over(
    context: &Context,
    id: &LogId,
    head: Head,
    going: Going,
    report: &mut RestoreReport,
) -> Result<bool> {
    let mut log_writer = LogWriter::unclaimed(
        new_writer(&context.logs.rng),
        head.seq,
        head.digest,
        context.logs.clock.now(),
    );
    log_writer.moves = going.moves;
    let mut ledger = Ledger::new(context.logs.store.address(), id.clone(), log_writer.clone());
    ledger.files = going.files;
    ledger.turns = going.turns;
    log_writer.back_to = going.back_to;
    // Before the claim: a disk that takes no ledger must not cost whoever holds the session, and an attempt that loses the
    // race must know that what it finds in place is the log's.
    ledger.save(&*context.directory, true)?;
    // A project's log is anybody's: nothing to take over.
    if !id.name.is_project() {
        report.claim = claim(context, id, &mut log_writer, head.end)
            .instrument(tracing::info_span!(target: TRACED, "claim"))
            .await?;
        if report.claim.is_none() {
            return Ok(false);
        }
        report.head = log_writer.seq;
    }
    report.writer = Some(log_writer.writer.to_string());
    ledger.log_writer = log_writer;
    if let Err(error) = ledger.save(&*context.directory, true) {
        // The one from before the claim is there: the daemon finds the claim, and claims behind it.
        tracing::warn!(%error, "the ledger was not written");
    }
    Ok(true)
}

async fn finish(
    context: &Context,
    id: &LogId,
    options: &Options,
    read: ReadOutcome<FileAssembler<'_>>,
    head: Head,
) -> Result<Option<RestoreReport>> {
    let mut read = read;
    if let Some(point) = &options.cut {
        read.sink.cut(point)?;
    }
    let earlier = options.cut.is_some() || options.at != LogPoint::Latest;
    let (cut_off, dropped) = match options.branch.is_none() && earlier {
        true => {
            conversation_state::behind(&context.logs, &*context.profile, id, &read.sink.state)
                .await?
        }
        false => Default::default(),
    };
    let moves = relocate::moves(context, id, &read.sink, options)?;
    read.sink.relocate(&moves);
    let assembly = &read.sink;
    let ledger = Ledger::load(&*context.directory, &context.logs.store.address(), id)
        .filter(|_| options.claim);
    let goes_on = options.last_turn
        && ledger.as_ref().is_some_and(|ledger| {
            ledger.log_writer.target == WriteTarget::Main && ledger.log_writer.seq == head.end
        });
    let files = place::decide_all(
        context,
        id,
        assembly,
        &moves,
        (ledger.as_ref(), goes_on),
        options,
    )?;
    let mut report = RestoreReport {
        seq: read.seq,
        head: head.end,
        objects: read.objects,
        cut_off,
        dropped,
        ..RestoreReport::new(id, files, options)
    };
    place::check(id, &report.files, options)?;
    let along = along(context, id, &report.files, options);
    if options.dry_run {
        repair::foresee(context, assembly, &mut report, options)?;
        report.along = along.await;
        return Ok(Some(report));
    }
    let mut cursors = tracing::info_span!(target: TRACED, "place")
        .in_scope(|| place::place_all(context, assembly, &mut report, ledger.as_ref(), options))?;
    if read.seq < head.seq {
        // The log's end holds something else of these files than what they go on from.
        cursors.values_mut().for_each(FileCursor::distrust);
    }
    if !options.claim {
        return Ok(Some(report));
    }
    let back = read.seq < head.seq || options.cut.is_some();
    let mut turns = assembly.state.turns.clone();
    turns.number = turns.number.max(head.points);
    // What the log holds at its end may be elsewhere by now; behind an earlier point all is written anew in any case.
    let moves = if back { Vec::new() } else { moves };
    let going = Going {
        files: cursors,
        turns,
        moves,
        back_to: back.then_some(read.seq),
    };
    // One trip to the store less than one behind the other.
    let (taken, along) = join(take_over(context, id, head, going, &mut report), along).await;
    report.along = along;
    Ok(taken?.then_some(report))
}

impl RestoreReport {
    /// What becomes of these files.
    fn new(id: &LogId, files: Vec<FilePlan>, options: &Options) -> RestoreReport {
        RestoreReport {
            session: id.name.to_string(),
            seq: 0,
            head: 0,
            writer: None,
            objects: 0,
            bytes: files
                .iter()
                .filter(|file| file.action.writes())
                .map(|file| file.bytes)
                .sum(),
            files,
            cut_off: BTreeMap::new(),
            dropped: Vec::new(),
            repaired: Vec::new(),
            dry_run: options.dry_run,
            claim: None,
            along: Vec::new(),
        }
    }

    /// Files that were put in place.
    pub fn written(&self) -> usize {
        self.files
            .iter()
            .filter(|file| file.action.writes())
            .count()
    }

    /// Bytes behind the last whole line that stay in the log.
    pub fn torn(&self) -> u64 {
        self.files
            .iter()
            .filter(|file| !matches!(file.action, Action::Superseded | Action::Aside))
            .map(|file| file.torn)
            .sum()
    }
}
