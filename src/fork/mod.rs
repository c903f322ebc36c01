//! Forks a session: creates a new session that starts from a point of another and shares its
//! entries. No bytes are copied.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::error::{Error, ErrorContext, Result};
use crate::log::assemble::FileAssembler;
use crate::log::fork::SessionRenamer;
use crate::log::read::ReadOptions;
use crate::log::segments::{Granularity, select_segments};
use crate::log::writer::LogWriter;
use crate::log::{Logs, errors};
use crate::model::limits::MAX_FORK_FILES;
use crate::model::{
    Checkpoint, FileState, ForkOrigin, LogId, Part, RelPath, ResolvedPoint, Seq, keys,
};
use crate::store::delete_temporary;
use crate::sys::Directory;
use crate::sys::clock::new_writer_id;

/// A fork that was created.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub struct ForkReport {
    /// The new session.
    pub session: String,
    /// The session it was forked from.
    pub origin: String,
    /// The branch of the origin that it starts from; none for the main line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// The entry of the origin that it starts from.
    pub seq: u64,
    /// Number of complete turns it starts with.
    pub turn: u64,
    /// Number of files it starts with.
    pub files: usize,
    /// Size of these files. None of the bytes are stored again.
    pub bytes: u64,
}

/// Creates session `new` from session `id` at a point. `scratch` is a directory in which the files
/// are assembled once, to compute their digests.
pub async fn fork(
    logs: &Logs,
    id: &LogId,
    point: &ResolvedPoint,
    new: &LogId,
    scratch: &dyn Directory,
) -> Result<ForkReport> {
    let stage: RelPath = format!("fork-{:016x}", logs.rng.next()).parse()?;
    let forked = create(logs, id, point, new, scratch, &stage)
        .await
        .with_context(|| format!("fork {id}"));
    scratch
        .remove(&stage)
        .map_err(|cause| Error::io(format!("remove {stage}"), cause))?;
    forked
}

async fn create(
    logs: &Logs,
    id: &LogId,
    point: &ResolvedPoint,
    new: &LogId,
    scratch: &dyn Directory,
    stage: &RelPath,
) -> Result<ForkReport> {
    if id.name.is_project() || new.name.is_project() {
        return Err(Error::usage("only sessions can be forked"));
    }
    if !logs.list_segments(new).await?.is_empty() {
        return Err(
            Error::conflict(format!("{new} already exists")).hint("choose another ID with --id")
        );
    }
    logs.check_fork_depth(id).await?;
    let origin = origin_at(logs, id, point, new, scratch, stage).await?;
    check_file_count(id, &origin)?;
    // The pin comes first: the fork must never refer to entries that can be deleted.
    logs.pin_fork(id, pinned_seq(logs, id, &origin).await?, &new.name)
        .await?;
    check_origin_exists(logs, id, &origin, new).await?;
    let report = ForkReport {
        session: new.name.to_string(),
        origin: id.name.to_string(),
        branch: origin.branch.as_ref().map(ToString::to_string),
        seq: origin.seq,
        turn: origin.turn,
        files: origin.files.len(),
        bytes: origin.files.iter().map(|part| part.len).sum(),
    };
    let mut log_writer = LogWriter::unclaimed(new_writer_id(&logs.rng), 0, None, logs.clock.now());
    log_writer.fork = Some(origin);
    match logs.claim(new, &mut log_writer, 0).await? {
        Some(_) => Ok(report),
        None => Err(
            Error::conflict(format!("another writer has just created {new}"))
                .hint("choose another ID with --id"),
        ),
    }
}

/// Assembles the files of the origin at the point, under the names and with the digests that they
/// have in the fork.
async fn origin_at(
    logs: &Logs,
    id: &LogId,
    point: &ResolvedPoint,
    new: &LogId,
    scratch: &dyn Directory,
    stage: &RelPath,
) -> Result<ForkOrigin> {
    let mut attempt = 0;
    let assembler = || {
        attempt += 1;
        FileAssembler::new(scratch, stage.clone(), attempt)
    };
    if let Some(writer) = &point.branch {
        logs.check_branch(id, writer).await?;
    }
    let read = logs
        .read_log(id, ReadOptions::up_to(point), assembler)
        .await?;
    if read.head == 0 {
        return Err(errors::not_found(id));
    }
    let seq = read.seq;
    let mut assembler = read.require_undamaged(id)?;
    if let Some(by) = assembler.state.removed {
        return Err(errors::removed(id, by));
    }
    let active = assembler.state.active_checkpoints();
    let checkpoint = match &point.checkpoint {
        Some(checkpoint) => Some(checkpoint.clone()),
        None => active.last().map(|last| (*last).clone()),
    };
    let turns = &assembler.state.turns;
    let turn = checkpoint
        .as_ref()
        .map_or(turns.turn, Checkpoint::complete_turns);
    let checkpointed_at = match &point.checkpoint {
        Some(checkpoint) => Some(checkpoint.at),
        None => turns.checkpointed_at,
    };
    let transcript_lengths = point
        .checkpoint
        .as_ref()
        .map(|checkpoint| checkpoint.transcript_lengths.clone());
    let renamer = SessionRenamer::new(&id.name, &new.name, assembler.state.files.keys());
    let checkpoint_lengths = match &checkpoint {
        Some(last) if transcript_lengths.is_none() => {
            Some(assembler.renamed_lengths(&last.transcript_lengths, &renamer)?)
        }
        _ => None,
    };
    assembler.fork(transcript_lengths.as_ref(), &renamer)?;
    let files: Vec<Part> = assembler
        .files()
        .map(|(path, file, _)| complete_part(path, file))
        .collect();
    if files.is_empty() {
        return Err(Error::not_found(format!("{id} has no files at this point")));
    }
    Ok(ForkOrigin {
        session: id.name.clone(),
        branch: point.branch.clone(),
        seq,
        transcript_lengths,
        turn,
        step: checkpoint.as_ref().and_then(|checkpoint| checkpoint.step),
        checkpoint: checkpoint
            .map(|checkpoint| checkpoint.number)
            .filter(|number| *number > 0),
        checkpointed_at,
        checkpoint_lengths,
        files,
    })
}

/// Checks that the list of files fits into the first entry of the fork.
fn check_file_count(id: &LogId, origin: &ForkOrigin) -> Result<()> {
    if origin.files.len() <= MAX_FORK_FILES {
        return Ok(());
    }
    let name = &id.name;
    Err(Error::conflict(format!(
        "it has {} files, and a fork starts with at most {MAX_FORK_FILES}",
        origin.files.len()
    ))
    .hint(format!(
        "run \"sessiond export {name} -o {name}.tar.gz\" and \"sessiond import {name}.tar.gz --id NEW\" to copy the session"
    )))
}

/// The entry of the main log that the fork needs: a branch is kept as long as the session.
async fn pinned_seq(logs: &Logs, id: &LogId, origin: &ForkOrigin) -> Result<Seq> {
    let Some(writer) = &origin.branch else {
        return Ok(origin.seq);
    };
    let base = logs
        .branch(id, writer)
        .await?
        .map_or(0, |branch| branch.base);
    Ok(origin.seq.min(base.max(1)))
}

/// Checks that garbage collection did not delete the entries before the pin was written.
async fn check_origin_exists(
    logs: &Logs,
    id: &LogId,
    origin: &ForkOrigin,
    new: &LogId,
) -> Result<()> {
    if origin.branch.is_some() {
        // Garbage collection keeps a branch, and the entry that it continues from, as long as the
        // session.
        return Ok(());
    }
    let seq = origin.seq;
    let segments = logs.list_segments(id).await?;
    let read = select_segments(&segments, 0, seq, Granularity::Coarse, &BTreeSet::new());
    if read.last().is_some_and(|last| last.last_seq == seq) {
        return Ok(());
    }
    delete_temporary(&*logs.store, &keys::fork_pin(id, &new.name)).await?;
    Err(Error::not_found(format!(
        "garbage collection has just deleted entry {seq} of {id}"
    ))
    .hint("fork at a later point"))
}

/// The part that holds a complete file.
fn complete_part(path: &RelPath, file: &FileState) -> Part {
    Part {
        path: path.clone(),
        kind: file.kind,
        start: 0,
        len: file.len,
        file_sha256: file.sha256,
        mode: file.mode,
        mtime_ns: file.mtime_ns,
        seq: None,
        upload: None,
    }
}
