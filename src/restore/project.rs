//! The project that a session is restored into: the one it was in, or the one that the agent will
//! run in.
//!
//! Owns the rule that a session is in one project only: an agent that finds two copies resumes
//! neither, or the wrong one. Does not own what is done with each file (`plan`).

use std::collections::BTreeMap;
use std::path::Path;

use super::compare::compare;
use super::options::{Options, RestoreContext, TargetProject};
use crate::agent::Profile;
use crate::error::{Error, Result};
use crate::log::assemble::{FileAssembler, StagedFile};
use crate::model::{FileMove, FileState, LogId, RelPath, Seq};
use crate::sys::{Directory, FileAttributes, Owner, STATE_DIR};

/// Maximum length of the path of a project's directory.
const MAX_ROOT_LEN: usize = 4096;

/// The moves that bring the files of a session into the requested project, or into the one where
/// the agent continued it while no sessiond was running.
pub fn moves(
    context: &RestoreContext,
    id: &LogId,
    assembler: &FileAssembler<'_>,
    options: &Options,
) -> Result<Vec<FileMove>> {
    let project = match &options.project {
        Some(project) => Some(project.name.clone()),
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

/// The agent's name for the project in a directory. If names are not unique, the local files decide:
/// the project that has this directory, or else the first name that no other directory has.
pub fn find_project(profile: &dyn Profile, directory: &dyn Directory, root: &Path) -> String {
    let name = profile.project_name(root);
    let parent = profile
        .project_root_file(&name)
        .and_then(|file| file.parent()?.parent());
    let Some(parent) = parent else {
        return name;
    };
    let owner = |project: &str| read_root(directory, &profile.project_root_file(project)?);
    let items = directory.list(Some(&parent)).unwrap_or_default();
    let root = root.to_string_lossy();
    let existing = items
        .iter()
        .find(|item| owner(&item.name).is_some_and(|owner| owner == root));
    if let Some(item) = existing {
        return item.name.clone();
    }
    let numbered = (1..=items.len()).map(|number| format!("{name}-{number}"));
    std::iter::once(name.clone())
        .chain(numbered)
        .find(|candidate| owner(candidate).is_none())
        .unwrap_or(name)
}

/// The directory of the project that has this file.
fn read_root(directory: &dyn Directory, file: &RelPath) -> Option<String> {
    let file = directory.open(file).ok().flatten()?;
    let mut bytes = vec![0; MAX_ROOT_LEN];
    let len = file.read_at(&mut bytes, 0).ok()?;
    let text = std::str::from_utf8(&bytes[..len]).ok()?;
    Some(text.trim().to_owned())
}

/// Writes the directory of the project into the file that the agent reads it from, unless the file
/// has it.
pub fn write_root_file(
    context: &RestoreContext,
    project: &TargetProject,
    owner: Option<Owner>,
) -> Result<()> {
    let Some(path) = context.profile.project_root_file(&project.name) else {
        return Ok(());
    };
    let root = project.root.to_string_lossy();
    let directory = &*context.directory;
    if read_root(directory, &path).is_some_and(|known| known == root) {
        return Ok(());
    }
    let staged: RelPath = format!("{STATE_DIR}/project-root").parse()?;
    let now = i64::try_from(context.logs.clock.now().as_nanosecond()).unwrap_or(i64::MAX);
    let attributes = FileAttributes {
        mode: 0o644,
        mtime_ns: now,
        owner,
    };
    directory
        .write_at(&staged, 0, root.as_bytes())
        .and_then(|()| directory.finish(&staged, &attributes))
        .and_then(|()| directory.rename(&staged, &path, owner))
        .map_err(|cause| Error::io(format!("write {path}"), cause))
}

/// Whether the file tells the agent which directory a project has, and the restored session is in
/// another project, or in another directory.
pub fn is_foreign_root_file(
    context: &RestoreContext,
    assembler: &FileAssembler<'_>,
    path: &RelPath,
    options: &Options,
) -> bool {
    let project = path.components().nth(1);
    let root_file = project.and_then(|project| context.profile.project_root_file(project));
    if root_file.as_ref() != Some(path) {
        return false;
    }
    let own = main_transcript(context, assembler)
        .and_then(|(transcript, _)| transcript.components().nth(1));
    options.project.is_some() || own != project
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
