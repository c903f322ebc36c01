//! The files of a session at a point, without a restore.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::pull;
use crate::error::{Error, Result};
use crate::log::errors;
use crate::log::read::ReadOptions;
use crate::log::state::LogState;
use crate::model::{
    Digest, FileKind, FileState, LogId, PointSpec, RelPath, ResolvedPoint, WriterId,
};
use crate::sessions::point;
use crate::sys::scratch::ScratchDirectory;
use crate::sys::{Directory, OpenFile};
use crate::wire::Parts;

/// A file of a session at a point.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct ListedFile {
    /// Its path below the agent's directory.
    pub path: RelPath,
    /// Whether it is a transcript (`append`) or a side file (`whole`).
    pub kind: FileKind,
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of its content; none if the point is within the bytes of an entry.
    pub sha256: Option<Digest>,
}

/// Lists the files of a session at a point.
pub async fn list(parts: &Parts, id: &LogId, point: &ResolvedPoint) -> Result<Vec<ListedFile>> {
    let files = states(parts, id, point).await?;
    let lengths = point.checkpoint.as_ref().map(|at| &at.transcript_lengths);
    let listed = files.into_iter().map(|(path, file)| {
        let at_point = lengths.and_then(|lengths| lengths.get(&path)).copied();
        let bytes = at_point.map_or(file.len, |len| len.min(file.len));
        ListedFile {
            kind: file.kind,
            bytes,
            sha256: (bytes == file.len).then_some(file.sha256),
            path,
        }
    });
    Ok(listed.collect())
}

async fn states(
    parts: &Parts,
    id: &LogId,
    point: &ResolvedPoint,
) -> Result<BTreeMap<RelPath, FileState>> {
    let options = ReadOptions::up_to(point);
    let read = parts.logs.read_log(id, options, LogState::default).await?;
    if read.head == 0 {
        return Err(errors::not_found(id));
    }
    errors::check_point(id, point.at, &read)?;
    Ok(read.require_undamaged(id)?.files)
}

/// The path of the session's own transcript.
pub async fn transcript_path(parts: &Parts, id: &LogId, point: &ResolvedPoint) -> Result<RelPath> {
    let files = states(parts, id, point).await?;
    let transcripts = files
        .into_iter()
        .filter(|(path, _)| parts.profile.is_transcript(path));
    let newest = transcripts.max_by_key(|(_, file)| file.seq);
    newest.map(|(path, _)| path).ok_or_else(|| {
        Error::not_found(format!("{id} has no transcript"))
            .hint("read its files instead: the profile of the agent does not know its transcript")
    })
}

/// The bytes of a transcript that belong to one turn: from the end of the previous turn.
pub async fn turn_range(
    parts: &Parts,
    id: &LogId,
    branch: Option<&WriterId>,
    path: &RelPath,
    turn: u64,
) -> Result<(u64, u64)> {
    let end_of = async |turn: u64| -> Result<u64> {
        let spec = PointSpec::Turn(Some(turn));
        let end = point::resolve_on(&parts.logs, id, branch, &spec).await?;
        let lengths = end.checkpoint.map(|end| end.transcript_lengths);
        Ok(lengths
            .and_then(|lengths| lengths.get(path).copied())
            .unwrap_or(0))
    };
    let end = end_of(turn).await?;
    let start = match turn {
        0 | 1 => 0,
        _ => end_of(turn - 1).await?,
    };
    Ok((start.min(end), end))
}

/// A verified copy of a file of a session. Its bytes are in memory, or in an unlinked file.
pub struct FileCopy {
    /// The file.
    pub file: Box<dyn OpenFile>,
    /// Its length.
    pub len: u64,
}

/// Copies a file of a session at a point.
pub async fn copy(
    parts: &Parts,
    id: &LogId,
    point: ResolvedPoint,
    path: &RelPath,
) -> Result<FileCopy> {
    let scratch = Arc::new(ScratchDirectory::new(&*parts.logs.rng));
    pull::copy(parts, id, point, scratch.clone()).await?;
    let failed = |cause| Error::io(format!("read {path}"), cause);
    let file = scratch.open(path).map_err(failed)?;
    let file = file.ok_or_else(|| Error::not_found(format!("{id} has no file {path}")))?;
    let len = file.stat().map_err(failed)?.size;
    Ok(FileCopy { file, len })
}
