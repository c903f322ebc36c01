//! Writes planned files into the agent's directory.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use super::options::{Options, RestoreContext};
use super::plan::{FileAction, FilePlan};
use super::repair::{self, RepairedFile};
use super::report::RestoreReport;
use crate::error::{Error, Result};
use crate::log::assemble::{FileAssembler, StagedFile};
use crate::log::ledger::{FileCursor, Ledger};
use crate::model::{FileKind, FileState, RelPath};
use crate::sys::packed::insert_packed;
use crate::sys::{BlockedPath, Directory, FileAttributes, STATE_DIR};

/// Writes the files of a report and returns their cursors. Transcripts come last, so that the files
/// they refer to exist first.
pub(super) fn write_files(
    context: &RestoreContext,
    assembler: &FileAssembler<'_>,
    report: &mut RestoreReport,
    ledger: Option<&Ledger>,
    options: &Options,
) -> Result<BTreeMap<RelPath, FileCursor>> {
    let stored: BTreeMap<&RelPath, (&FileState, &StagedFile)> = assembler
        .files()
        .map(|(path, file, staged)| (path, (file, staged)))
        .collect();
    let writer = FileWriter {
        context,
        options,
        ledger,
        aside: format!(
            "{STATE_DIR}/aside/{}-{:08x}",
            context.logs.clock.now().strftime("%Y%m%dT%H%M%S"),
            context.logs.rng.next() >> 32
        ),
    };
    // The order that survives a power failure: the staged files are durable before the first of them
    // gets its name, so that no file of the agent is empty or cut. The names are durable before the
    // caller writes the ledger and the claim, which say that the files exist. Two syncs of all files
    // replace one sync per file.
    writer.complete_staged_files(&report.files, &stored)?;
    let mut cursors = BTreeMap::new();
    for is_transcript in [false, true] {
        let plans = report
            .files
            .iter()
            .filter(|plan| context.profile.is_transcript(&plan.path) == is_transcript);
        for plan in plans {
            let (cursor, repaired) = writer.write(plan, stored.get(&plan.path).copied())?;
            if let Some(cursor) = cursor {
                insert_packed(&mut cursors, plan.path.clone(), cursor);
            }
            report.repaired.extend(repaired);
        }
    }
    let written: Vec<RelPath> = cursors.keys().cloned().collect();
    context
        .directory
        .sync_names(&written)
        .map_err(|cause| Error::io("sync the restored files", cause))?;
    Ok(cursors)
}

/// Finds what would be repaired, for a dry run.
pub(super) fn preview_repairs(
    context: &RestoreContext,
    assembler: &FileAssembler<'_>,
    report: &mut RestoreReport,
    options: &Options,
) -> Result<()> {
    let directory = &*context.directory;
    for (path, _, staged) in assembler
        .files()
        .filter(|(_, file, _)| options.repair && file.kind == FileKind::Append)
    {
        let Some(plan) = report.files.iter().find(|plan| plan.path == *path) else {
            continue;
        };
        let failed = |cause| Error::io(format!("read {path}"), cause);
        let is_kept = plan.action == FileAction::Keep;
        let source = if is_kept {
            plan.local_path.clone()
        } else {
            staged.path()
        };
        let Some(file) = directory.open(&source).map_err(failed)? else {
            continue;
        };
        let len = if is_kept {
            file.stat().map_err(failed)?.size
        } else {
            plan.bytes
        };
        let changes = repair::repair(
            directory,
            &*context.profile,
            path,
            (&*file, len),
            &repaired_path(staged)?,
            options.claim,
        )
        .map_err(failed)?;
        if !changes.is_empty() {
            report.repaired.push(RepairedFile {
                path: path.clone(),
                original: None,
                changes,
            });
        }
    }
    Ok(())
}

/// The path at which a repaired file is staged.
fn repaired_path(staged: &StagedFile) -> Result<RelPath> {
    let path = staged.path();
    path.parent().unwrap_or(path).join("repaired")
}

struct FileWriter<'a> {
    context: &'a RestoreContext,
    options: &'a Options,
    ledger: Option<&'a Ledger>,
    /// The directory for files that are moved aside.
    aside: String,
}

impl FileWriter<'_> {
    /// Executes the plan of one file. Returns its cursor, and its repair if it was repaired.
    fn write(
        &self,
        plan: &FilePlan,
        stored: Option<(&FileState, &StagedFile)>,
    ) -> Result<(Option<FileCursor>, Option<RepairedFile>)> {
        let directory = &*self.context.directory;
        let failed = |cause: std::io::Error| {
            let phrase = format!("write {}", plan.path);
            match cause.kind() {
                ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
                    let blocked = BlockedPath::of(&cause)
                        .map_or_else(|| plan.path.to_string(), |path| path.display().to_string());
                    Error::conflict(phrase)
                        .caused_by(cause)
                        .hint(format!("move {blocked} away, then run the command again"))
                }
                _ => Error::io(phrase, cause),
            }
        };
        let aside: RelPath = format!("{}/{}", self.aside, plan.local_path).parse()?;
        if plan.action == FileAction::Replace
            || plan.action == FileAction::Aside
            || plan.action == FileAction::Write && plan.is_moved()
        {
            // Durable at once, because the next rename may take the old path.
            directory
                .rename(&plan.local_path, &aside, self.options.owner)
                .and_then(|()| directory.sync_names(std::slice::from_ref(&aside)))
                .map_err(failed)?;
        }
        let Some((file, staged)) = stored else {
            return Ok((None, None));
        };
        let mut cursor = match plan.action {
            FileAction::Superseded | FileAction::Conflict | FileAction::Aside => {
                return Ok((None, None));
            }
            FileAction::Keep => {
                if plan.is_moved() {
                    directory
                        .rename(&plan.local_path, &plan.path, self.options.owner)
                        .map_err(failed)?;
                }
                plan.kept_cursor(self.ledger)
            }
            FileAction::Write | FileAction::Replace => {
                Some(self.install(plan, file, staged).map_err(failed)?)
            }
        };
        if !self.options.repair || file.kind != FileKind::Append {
            return Ok((cursor, None));
        }
        let original: RelPath = format!("{aside}.damaged").parse()?;
        let changes = repair::repair_in_place(
            self.context,
            &plan.path,
            (&repaired_path(staged)?, &original),
            &mut cursor,
            self.options,
        )
        .map_err(failed)?;
        let repaired = (!changes.is_empty()).then(|| RepairedFile {
            path: plan.path.clone(),
            original: Some(original),
            changes,
        });
        Ok((cursor, repaired))
    }

    /// Sets the length and the attributes of the staged files to install, and makes them durable.
    fn complete_staged_files(
        &self,
        plans: &[FilePlan],
        stored: &BTreeMap<&RelPath, (&FileState, &StagedFile)>,
    ) -> Result<()> {
        let directory: &dyn Directory = &*self.context.directory;
        let mut completed = Vec::new();
        let installs =
            |plan: &&FilePlan| matches!(plan.action, FileAction::Write | FileAction::Replace);
        for plan in plans.iter().filter(installs) {
            let Some((file, staged)) = stored.get(&plan.path) else {
                continue;
            };
            self.complete(plan, file, staged)
                .map_err(|cause| Error::io(format!("write {}", plan.path), cause))?;
            completed.push(staged.path());
        }
        directory
            .sync_files(&completed)
            .map_err(|cause| Error::io("sync the staged files", cause))
    }

    fn complete(
        &self,
        plan: &FilePlan,
        file: &FileState,
        staged: &StagedFile,
    ) -> std::io::Result<()> {
        let directory: &dyn Directory = &*self.context.directory;
        if plan.bytes < file.len {
            directory.write_at(&staged.path(), plan.bytes, &[])?;
        }
        if directory.stat(&staged.path())?.is_none() {
            directory.write_at(&staged.path(), 0, &[])?;
        }
        let attributes = FileAttributes {
            mode: file.mode,
            mtime_ns: file.mtime_ns,
            owner: self.options.owner,
        };
        directory.finish(&staged.path(), &attributes)
    }

    /// Moves a staged file to its path.
    fn install(
        &self,
        plan: &FilePlan,
        file: &FileState,
        staged: &StagedFile,
    ) -> std::io::Result<FileCursor> {
        let directory: &dyn Directory = &*self.context.directory;
        let owner = self.options.owner;
        let opened = directory.open(&staged.path())?.ok_or(ErrorKind::NotFound)?;
        let cursor = match plan.bytes == file.len {
            true => FileCursor::with_hash(&*opened, file.kind, file.len, staged.hash.clone())?,
            false => FileCursor::read(&*opened, file.kind, plan.bytes)?,
        };
        let cursor = cursor.ok_or(ErrorKind::UnexpectedEof)?;
        directory.rename(&staged.path(), &plan.path, owner)?;
        // On another file system the rename is a copy, with another inode. No writer uses it yet.
        let stat = directory.stat(&plan.path)?.ok_or(ErrorKind::NotFound)?;
        let mut cursor = FileCursor {
            stat,
            is_recent: false,
            ..cursor
        };
        cursor.settle();
        Ok(cursor)
    }
}
