//! The project that a session is restored into: the one it was in, or the one that the agent will
//! run in.
//!
//! Owns the rule that a session is in one project only: an agent that finds two copies resumes
//! neither, or the wrong one. Does not own what is done with each file (`plan`).

use std::collections::BTreeMap;

use super::compare::compare;
use super::options::{Options, RestoreContext};
use crate::agent::Profile;
use crate::error::{Error, Result};
use crate::log::assemble::{FileAssembler, StagedFile};
use crate::model::{FileMove, FileState, LogId, RelPath, Seq};

/// The moves that bring the files of a session into the requested project, or into the one where
/// the agent continued it while no sessiond was running.
pub fn moves(
    context: &RestoreContext,
    id: &LogId,
    assembler: &FileAssembler<'_>,
    options: &Options,
) -> Result<Vec<FileMove>> {
    let project = match &options.project {
        Some(project) => Some(project.clone()),
        None if options.claim && options.is_latest() => moved_to(context, id, assembler, options)?,
        None => None,
    };
    let files = assembler
        .state
        .files
        .iter()
        .map(|(path, file)| (path, file.seq));
    Ok(project.map_or_else(Vec::new, |project| {
        moves_into(&*context.profile, &project, files)
    }))
}

/// The moves of files into a project. Each file comes with the entry that wrote it last. Pure.
pub fn moves_into<'a>(
    profile: &dyn Profile,
    project: &str,
    files: impl Iterator<Item = (&'a RelPath, Seq)>,
) -> Vec<FileMove> {
    let mut files: Vec<(&RelPath, Seq)> = files.collect();
    files.sort_by_key(|(_, seq)| *seq);
    // Of two files with the same target, the newer one wins.
    let targets: BTreeMap<RelPath, &RelPath> = files
        .into_iter()
        .filter_map(|(from, _)| Some((profile.relocated_path(from, project)?, from)))
        .collect();
    targets
        .into_iter()
        .filter(|(to, from)| to != *from)
        .map(|(to, from)| FileMove {
            from: from.clone(),
            to,
        })
        .collect()
}

/// The session's own transcript: the path where it was written last, its state and its staged file.
pub fn main_transcript<'a>(
    context: &RestoreContext,
    assembler: &'a FileAssembler<'_>,
) -> Option<(&'a RelPath, (&'a FileState, &'a StagedFile))> {
    assembler
        .files()
        .filter(|(path, ..)| context.profile.is_transcript(path))
        .max_by_key(|(_, file, _)| file.seq)
        .map(|(path, file, staged)| (path, (file, staged)))
}

/// The other projects that have a local transcript of the session, and its path there.
pub fn duplicates(
    context: &RestoreContext,
    id: &LogId,
    transcript: &RelPath,
) -> Result<Vec<(String, RelPath)>> {
    if id.name.is_project() {
        return Ok(Vec::new());
    }
    let Some(projects) = transcript
        .components()
        .next()
        .and_then(|top| top.parse().ok())
    else {
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
            .relocated_path(transcript, &project.name)
            .filter(|path| path != transcript)
        else {
            continue;
        };
        if exists(context, &path)? {
            found.push((project.name, path));
        }
    }
    Ok(found)
}

fn exists(context: &RestoreContext, path: &RelPath) -> Result<bool> {
    let stat = context
        .directory
        .stat(path)
        .map_err(|cause| Error::io(format!("stat {path}"), cause))?;
    Ok(stat.is_some())
}

/// The project to which the agent has moved a session since its last upload.
fn moved_to(
    context: &RestoreContext,
    id: &LogId,
    assembler: &FileAssembler<'_>,
    options: &Options,
) -> Result<Option<String>> {
    let Some((transcript, stored)) = main_transcript(context, assembler) else {
        return Ok(None);
    };
    if exists(context, transcript)? {
        return Ok(None);
    }
    let duplicates = duplicates(context, id, transcript)?;
    let [(project, path)] = duplicates.as_slice() else {
        return Ok(None);
    };
    let comparison = compare(context, options, path, stored, None)
        .map_err(|cause| Error::io(format!("compare {path}"), cause))?;
    let continues = comparison
        .local
        .is_some_and(|local| local.continues_stored());
    Ok(continues.then(|| project.clone()))
}
