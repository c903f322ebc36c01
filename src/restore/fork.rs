//! Forks: a new session that begins with another's entries, and copies none of them.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde::Serialize;

use super::point::ResolvedPoint;
use crate::error::{Error, ErrorContext, Result};
use crate::log::Logs;
use crate::log::assemble::FileAssembler;
use crate::log::fork::SessionRenamer;
use crate::log::read::ReadOptions;
use crate::log::segments::{Prefer, cover};
use crate::log::writer::LogWriter;
use crate::model::{ForkOrigin, LogId, Part, RelPath, keys};
use crate::sys::Directory;
use crate::sys::clock::new_writer;

/// What was made.
#[derive(Debug, Clone, Serialize)]
pub struct Forked {
    /// The new session.
    pub session: String,
    /// The one it was forked from.
    pub from: String,
    /// At this entry of it.
    pub seq: u64,
    /// With so many complete turns.
    pub turn: u64,
    /// Its files.
    pub files: usize,
    /// Their bytes; none of them is stored again.
    pub bytes: u64,
}

/// Makes `new` begin with `id` at a point. `scratch` is a directory where its files are put together once, for their digests.
pub async fn fork(
    logs: &Logs,
    id: &LogId,
    goal: &ResolvedPoint,
    new: &LogId,
    scratch: &dyn Directory,
) -> Result<Forked> {
    let stage: RelPath = format!("fork-{:016x}", logs.rng.next()).parse()?;
    let forked = make(logs, id, goal, new, scratch, &stage)
        .await
        .with_context(|| format!("fork {id}"));
    scratch
        .remove(&stage)
        .map_err(|cause| Error::io(format!("remove {stage}"), cause))?;
    forked
}

async fn make(
    logs: &Logs,
    id: &LogId,
    goal: &ResolvedPoint,
    new: &LogId,
    scratch: &dyn Directory,
    stage: &RelPath,
) -> Result<Forked> {
    if id.name.is_project() || new.name.is_project() {
        return Err(Error::usage("only a session can be forked"));
    }
    if !logs.pieces(new).await?.is_empty() {
        return Err(Error::conflict(format!("{new} exists")).hint("--id gives the fork another id"));
    }
    let mut made = 0;
    let fresh = || {
        made += 1;
        FileAssembler::new(scratch, stage.clone(), made)
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
    if read.head == 0 {
        return Err(super::find::unknown(id));
    }
    let seq = read.seq;
    let mut assembly = read.sound()?;
    if assembly.state.removed.is_some() {
        return Err(
            Error::not_found("it was removed, or has expired").hint(format!(
                "sessiond undelete {} brings it back within the grace period",
                id.name
            )),
        );
    }
    let turns = goal.cut.as_ref().map_or(
        (assembly.state.turns.turn, assembly.state.turns.last),
        |point| (point.turn, Some(point.at)),
    );
    let cut = goal.cut.as_ref().map(|point| point.files.clone());
    let renaming = SessionRenamer::new(&id.name, &new.name);
    let ends = match super::point::line(&assembly.state).last() {
        Some(point) if cut.is_none() => Some(assembly.renamed_lengths(&point.files, &renaming)?),
        _ => None,
    };
    assembly.fork(cut.as_ref(), &renaming)?;
    let files: Vec<Part> = assembly
        .files()
        .map(|(path, at, _)| part(path, at))
        .collect();
    if files.is_empty() {
        return Err(Error::not_found("it has no files at that point"));
    }
    // First what keeps the entries, then what needs them.
    logs.pin_fork(id, seq, &new.name).await?;
    let there = cover(
        &logs.pieces(id).await?,
        0,
        seq,
        Prefer::Long,
        &BTreeSet::new(),
    );
    if there.last().is_none_or(|last| last.to != seq) {
        logs.store.delete(&keys::fork_pin(id, &new.name)).await?;
        return Err(
            Error::not_found(format!("entry {seq} of {id} was collected just now"))
                .hint("fork it at a later point"),
        );
    }
    let (turn, last): (u64, Option<Timestamp>) = turns;
    let bytes = files.iter().map(|part| part.len).sum();
    let forked = Forked {
        session: new.name.to_string(),
        from: id.name.to_string(),
        seq,
        turn,
        files: files.len(),
        bytes,
    };
    let fork = ForkOrigin {
        from: id.name.clone(),
        seq,
        cut,
        turn,
        last,
        ends,
        files,
    };
    let mut log_writer = LogWriter {
        fork: Some(fork),
        ..LogWriter::unclaimed(new_writer(&logs.rng), 0, None, logs.clock.now())
    };
    match logs.claim(new, &mut log_writer, 0).await? {
        Some(_) => Ok(forked),
        None => Err(
            Error::conflict(format!("{new} was begun by somebody else just now"))
                .hint("--id gives the fork another id"),
        ),
    }
}

fn part(path: &RelPath, at: &crate::model::FileState) -> Part {
    Part {
        path: path.clone(),
        kind: at.kind,
        start: 0,
        len: at.len,
        file_sha256: at.sha256,
        mode: at.mode,
        mtime_ns: at.mtime_ns,
        seq: None,
    }
}
