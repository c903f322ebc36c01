//! In which of the agent's projects a session is put: the one it was in, or another that the agent will run in.
//!
//! Owns that a session is never in two projects: an agent that finds it twice takes neither, or the wrong one. Does not own
//! what becomes of a file (`place`).

use std::collections::BTreeMap;

use super::{Context, Options, place};
use crate::agent::Profile;
use crate::error::{Error, Result};
use crate::log::assemble::{FileAssembler, StagedFile};
use crate::model::{FileMove, FileState, LogId, LogPoint, RelPath, Seq};

/// The moves that bring the files of a session where they shall be: into the project that was asked for, or into the one
/// where the agent went on with it while nobody streamed.
pub fn moves(
    context: &Context,
    id: &LogId,
    assembly: &FileAssembler<'_>,
    options: &Options,
) -> Result<Vec<FileMove>> {
    let project = match &options.project {
        Some(project) => Some(project.clone()),
        None if options.claim && options.at == LogPoint::Latest && options.cut.is_none() => {
            lives_in(context, id, assembly, options)?
        }
        None => None,
    };
    let files = assembly.state.files.iter().map(|(path, at)| (path, at.seq));
    Ok(project.map_or_else(Vec::new, |project| into(&*context.profile, &project, files)))
}

/// Pure: the moves of files, each with the entry that wrote it last, into a project.
pub fn into<'a>(
    profile: &dyn Profile,
    project: &str,
    files: impl Iterator<Item = (&'a RelPath, Seq)>,
) -> Vec<FileMove> {
    let mut files: Vec<(&RelPath, Seq)> = files.collect();
    files.sort_by_key(|(_, seq)| *seq);
    // Of two that get the same path the newer stays.
    let wanted: BTreeMap<RelPath, &RelPath> = files
        .into_iter()
        .filter_map(|(from, _)| Some((profile.relocated(from, project)?, from)))
        .collect();
    wanted
        .into_iter()
        .filter(|(to, from)| to != *from)
        .map(|(to, from)| FileMove {
            from: from.clone(),
            to,
        })
        .collect()
}

/// The session's transcript: where it was written last, and what of it.
pub fn transcript<'a>(
    context: &Context,
    assembly: &'a FileAssembler<'_>,
) -> Option<(&'a RelPath, (&'a FileState, &'a StagedFile))> {
    let transcripts = assembly
        .files()
        .filter(|(path, ..)| context.profile.is_transcript(path));
    transcripts
        .max_by_key(|(_, at, _)| at.seq)
        .map(|(path, at, staged)| (path, (at, staged)))
}

/// The other projects in which a transcript of the session stands that should be `here`.
pub fn elsewhere(context: &Context, id: &LogId, here: &RelPath) -> Result<Vec<(String, RelPath)>> {
    if id.name.is_project() {
        return Ok(Vec::new());
    }
    let Some(projects) = here.parts().next().and_then(|top| top.parse().ok()) else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for project in context
        .directory
        .list(Some(&projects))
        .map_err(|cause| Error::io(format!("list {projects}"), cause))?
    {
        let Some(path) = context
            .profile
            .relocated(here, &project.name)
            .filter(|path| path != here)
        else {
            continue;
        };
        if context
            .directory
            .stat(&path)
            .map_err(|cause| Error::io(format!("look at {path}"), cause))?
            .is_some()
        {
            found.push((project.name, path));
        }
    }
    Ok(found)
}

/// The project to which the agent has moved a session that the log knows elsewhere.
fn lives_in(
    context: &Context,
    id: &LogId,
    assembly: &FileAssembler<'_>,
    options: &Options,
) -> Result<Option<String>> {
    let Some((here, (at, staged))) = transcript(context, assembly) else {
        return Ok(None);
    };
    let gone = context
        .directory
        .stat(here)
        .map_err(|cause| Error::io(format!("look at {here}"), cause))?
        .is_none();
    match elsewhere(context, id, here)?.as_slice() {
        [(project, path)] if gone && place::goes_on_at(context, options, path, at, staged)? => {
            Ok(Some(project.clone()))
        }
        _ => Ok(None),
    }
}
