//! Plans what a restore does with each file. A file that exists only locally is never overwritten.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::ops::Bound;

use serde::Serialize;

use super::compare::{Comparison, LocalFile, compare};
use super::options::{Options, RestoreContext};
use super::project;
use crate::error::{Error, Result};
use crate::log::assemble::FileAssembler;
use crate::log::ledger::{FileCursor, Ledger};
use crate::log::writer::WriteTarget;
use crate::model::{FileKind, FileMove, FileStat, FileState, LogId, LogPoint, RelPath, Seq};
use crate::sys::{Directory, ItemKind};

/// Maximum number of files that a conflict lists.
const MAX_LISTED_CONFLICTS: usize = 3;

/// What is done with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FileAction {
    /// Written. There is no local file, or the log holds all of it.
    Write,
    /// Kept. The local file is equal or newer; its new bytes are uploaded later.
    Keep,
    /// Not written: the local file has bytes that the log does not hold.
    Conflict,
    /// Written, after the local file was moved aside.
    Replace,
    /// Not written: a newer file replaced it. It stays in the log.
    Superseded,
    /// Moved aside: a second local copy of the session, which the agent must not find.
    Aside,
}

impl FileAction {
    /// Whether the stored file is written.
    pub fn is_write(self) -> bool {
        matches!(self, FileAction::Write | FileAction::Replace)
    }
}

/// A file and what is done with it.
#[derive(Debug, Clone, Serialize)]
pub struct FilePlan {
    /// Its path below the root.
    pub path: RelPath,
    /// What is done with it.
    pub action: FileAction,
    /// Its length after the restore.
    pub bytes: u64,
    /// Number of its bytes that the log holds.
    pub log_bytes: u64,
    /// Number of bytes of a kept file that the log does not hold yet.
    pub lag_bytes: u64,
    /// Number of bytes of a partial line that stay in the log.
    pub partial_line_bytes: u64,
    /// The path of the local file that becomes this one. It differs if the session changes its
    /// project.
    #[serde(skip)]
    pub local_path: RelPath,
    /// The local file.
    #[serde(skip)]
    local: Option<LocalFile>,
    /// The cursor after the stored bytes of the local file.
    #[serde(skip)]
    cursor: Option<Box<FileCursor>>,
}

impl FilePlan {
    fn new(path: &RelPath, local_path: &RelPath, comparison: Comparison) -> Self {
        FilePlan {
            path: path.clone(),
            action: FileAction::Write,
            bytes: comparison.len,
            log_bytes: comparison.len + comparison.partial_line_bytes,
            lag_bytes: 0,
            partial_line_bytes: comparison.partial_line_bytes,
            local_path: local_path.clone(),
            local: comparison.local,
            cursor: comparison.cursor.map(Box::new),
        }
    }

    /// A local file that is kept. The cursor says how far the log holds it.
    pub(super) fn kept(path: &RelPath, cursor: &FileCursor, stat: &FileStat) -> Self {
        FilePlan {
            path: path.clone(),
            action: FileAction::Keep,
            bytes: stat.size,
            log_bytes: cursor.len,
            lag_bytes: match cursor.kind {
                FileKind::Append => stat.size.saturating_sub(cursor.len),
                FileKind::Whole if *stat == cursor.stat => 0,
                FileKind::Whole => stat.size,
            },
            partial_line_bytes: 0,
            local_path: path.clone(),
            local: None,
            cursor: None,
        }
    }

    /// Sets what is done with the file.
    fn set_action(&mut self, action: FileAction, kind: FileKind) {
        self.action = action;
        if let (FileAction::Keep, Some(local)) = (action, self.local) {
            self.bytes = local.size;
            self.lag_bytes = match kind {
                _ if local.is_equal => 0,
                FileKind::Append if local.is_longer => local.size.saturating_sub(self.log_bytes),
                _ => local.size,
            };
        }
    }

    /// Whether the local file is at another path.
    pub(super) fn is_moved(&self) -> bool {
        self.local_path != self.path && self.local.is_some()
    }

    /// Whether the local file only gets another path.
    pub fn is_only_moved(&self) -> bool {
        self.action == FileAction::Keep && self.is_moved()
    }

    /// The cursor of a file that is kept: after the bytes that the log holds.
    pub(super) fn kept_cursor(&self, ledger: Option<&Ledger>) -> Option<FileCursor> {
        let stored = self.cursor.as_deref().cloned().map(|mut cursor| {
            // The next scan finds the bytes after the cursor as new.
            cursor.stat.size = cursor.len;
            cursor.settle();
            cursor
        });
        stored.or_else(|| ledger?.files.get(&self.local_path).cloned())
    }
}

/// What the ledger of this volume says about the log that is restored.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LedgerState<'a> {
    pub ledger: Option<&'a Ledger>,
    /// Whether only this volume has written since it was restored to the point.
    pub continued_here: bool,
}

/// Decides what is done with a file. Pure.
///
/// `is_newer`: the local file is newer than the stored one, even though it does not start with it.
fn decide(
    kind: FileKind,
    is_latest: bool,
    local: Option<LocalFile>,
    is_newer: bool,
    force: bool,
) -> FileAction {
    let Some(local) = local else {
        return FileAction::Write;
    };
    if local.is_equal
        || (is_latest && local.is_longer && kind == FileKind::Append)
        || (is_latest && is_newer && !local.is_stored() && !force)
    {
        FileAction::Keep
    } else if local.is_stored() {
        FileAction::Write
    } else if force {
        FileAction::Replace
    } else {
        FileAction::Conflict
    }
}

/// Plans every file of log `id`.
pub(super) fn plan_files(
    context: &RestoreContext,
    id: &LogId,
    assembler: &FileAssembler<'_>,
    moves: &[FileMove],
    known: LedgerState<'_>,
    options: &Options,
) -> Result<Vec<FilePlan>> {
    let mut plans = compare_files(context, assembler, moves, known.ledger, options)?;
    let newest = newest_transcripts(context, assembler);
    // A crash can lose the last updates of the ledger. The entries after it still belong to this
    // writer.
    let is_owner = known.ledger.is_some_and(|ledger| {
        ledger.log_writer.target == WriteTarget::Main
            && assembler.is_only_writer_after(&ledger.log_writer.writer, ledger.log_writer.seq)
    });
    let is_latest = options.point.at == LogPoint::Latest || known.continued_here;
    // If the local copy of the last transcript starts with the stored one, the session continued on
    // this volume, with or without a ledger, and its side files are newer than the log.
    let last_transcript = plans
        .iter()
        .filter(|(_, file)| file.kind == FileKind::Append)
        .max_by_key(|(_, file)| file.seq);
    let continued_locally = last_transcript
        .is_some_and(|(plan, _)| plan.local.is_some_and(|local| local.continues_stored()));
    for (plan, file) in &mut plans {
        let was_moved = options.claim
            && context.profile.is_transcript(&plan.path)
            && newest
                .get(plan.path.name())
                .is_some_and(|newest| *newest != file.seq);
        let is_foreign =
            options.claim && project::is_foreign_root_file(context, assembler, &plan.path, options);
        if was_moved || is_foreign || is_replaced(assembler, &plan.path, file.seq) {
            plan.action = FileAction::Superseded;
            continue;
        }
        // Any writer may change the files of a project.
        let is_newer =
            is_owner || id.name.is_project() || (continued_locally && file.kind == FileKind::Whole);
        // Without a claim nothing is uploaded, so a longer file counts as different.
        let local = plan.local.map(|local| LocalFile {
            is_longer: local.is_longer && options.claim,
            ..local
        });
        let action = decide(
            file.kind,
            is_latest,
            local,
            is_newer && options.claim,
            options.force,
        );
        plan.set_action(action, file.kind);
    }
    let mut plans: Vec<FilePlan> = plans.into_iter().map(|(plan, _)| plan).collect();
    if options.claim {
        let duplicates = plan_duplicates(context, id, assembler, known.ledger, options, &plans)?;
        plans.extend(duplicates);
    }
    Ok(plans)
}

/// Compares every file of the log with the local one.
fn compare_files<'f>(
    context: &RestoreContext,
    assembler: &'f FileAssembler<'_>,
    moves: &[FileMove],
    ledger: Option<&Ledger>,
    options: &Options,
) -> Result<Vec<(FilePlan, &'f FileState)>> {
    // Not more than needed: a session can have a hundred thousand files.
    let mut plans = Vec::with_capacity(assembler.state.files.len());
    let mut links = Links::default();
    for (path, file, staged) in assembler.files() {
        let failed = |cause: std::io::Error| {
            if cause.kind() == ErrorKind::AlreadyExists {
                Error::conflict(format!("{path} is a symbolic link or a directory"))
                    .hint(format!("move {path} away, then run the command again"))
            } else {
                Error::io(format!("compare {path}"), cause)
            }
        };
        let local_path = local_path(context, path, moves).map_err(failed)?;
        let comparison =
            compare(context, options, &local_path, (file, staged), ledger).map_err(failed)?;
        if comparison.local.is_none() {
            links
                .check(&*context.directory, &local_path)
                .map_err(failed)?;
        }
        plans.push((FilePlan::new(path, &local_path, comparison), file));
    }
    Ok(plans)
}

/// The links in each directory, which is listed once. A link in the place of a file counts as a
/// missing file when it is read, but would stop the restore when it is written.
#[derive(Default)]
struct Links(BTreeMap<Option<RelPath>, BTreeSet<String>>);

impl Links {
    /// Fails if there is a link at a path.
    fn check(&mut self, directory: &dyn Directory, path: &RelPath) -> std::io::Result<()> {
        let names = match self.0.entry(path.parent()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                let items = directory.list(unknown.key().as_ref())?;
                let links = items.into_iter().filter(|item| item.kind == ItemKind::Link);
                unknown.insert(links.map(|item| item.name).collect())
            }
        };
        match names.contains(path.name()) {
            true => Err(ErrorKind::AlreadyExists.into()),
            false => Ok(()),
        }
    }
}

/// The newest entry of each transcript, by file name: a transcript that moved to another directory
/// has its earlier path in the log too.
fn newest_transcripts<'f>(
    context: &RestoreContext,
    assembler: &'f FileAssembler<'_>,
) -> BTreeMap<&'f str, Seq> {
    let mut newest = BTreeMap::new();
    for (path, file, _) in assembler.files() {
        if context.profile.is_transcript(path) {
            let seq = newest.entry(path.name()).or_insert(file.seq);
            *seq = file.seq.max(*seq);
        }
    }
    newest
}

/// The path of the local file to compare with: the same, or the one before a move of this restore.
fn local_path(
    context: &RestoreContext,
    path: &RelPath,
    moves: &[FileMove],
) -> std::io::Result<RelPath> {
    match moves.iter().find(|moved| moved.to == *path) {
        Some(moved) if context.directory.stat(path)?.is_none() => Ok(moved.from.clone()),
        _ => Ok(path.clone()),
    }
}

/// Plans the local copies of the session's transcript in other projects.
fn plan_duplicates(
    context: &RestoreContext,
    id: &LogId,
    assembler: &FileAssembler<'_>,
    ledger: Option<&Ledger>,
    options: &Options,
    plans: &[FilePlan],
) -> Result<Vec<FilePlan>> {
    let Some((transcript, newest)) = project::main_transcript(context, assembler) else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for (_, path) in project::duplicates(context, id, transcript)? {
        let is_planned = plans
            .iter()
            .any(|plan| plan.local_path == path && plan.action != FileAction::Superseded);
        if is_planned {
            continue;
        }
        let stored = assembler
            .files()
            .find(|(known, ..)| **known == path)
            .map_or(newest, |(_, file, staged)| (file, staged));
        let comparison = compare(context, options, &path, stored, ledger)
            .map_err(|cause| Error::io(format!("compare {path}"), cause))?;
        let is_safe = comparison
            .local
            .is_none_or(|local| local.is_equal || local.is_stored());
        let mut plan = FilePlan::new(&path, &path, comparison);
        plan.action = if is_safe || options.force {
            FileAction::Aside
        } else {
            FileAction::Conflict
        };
        found.push(plan);
    }
    Ok(found)
}

/// Whether a newer file replaced this one: a directory above the path is now a file, or the path is
/// now a directory.
fn is_replaced(assembler: &FileAssembler<'_>, path: &RelPath, seq: Seq) -> bool {
    let files = &assembler.state.files;
    let is_below_newer = std::iter::successors(path.parent(), RelPath::parent)
        .any(|directory| files.get(&directory).is_some_and(|file| file.seq > seq));
    let prefix = format!("{path}/");
    let mut following = files
        .range((Bound::Excluded(path), Bound::Unbounded))
        .take_while(|(other, _)| other.as_str().starts_with(path.as_str()));
    is_below_newer
        || following.any(|(other, file)| other.as_str().starts_with(&prefix) && file.seq >= seq)
}

/// Fails if local files are in conflict. The error lists them.
pub(super) fn check_conflicts(id: &LogId, files: &[FilePlan], options: &Options) -> Result<()> {
    let conflicts: Vec<&str> = files
        .iter()
        .filter(|file| file.action == FileAction::Conflict)
        .map(|file| file.local_path.as_str())
        .collect();
    if conflicts.is_empty() || options.dry_run {
        return Ok(());
    }
    let listed = conflicts[..conflicts.len().min(MAX_LISTED_CONFLICTS)].join(", ");
    let more = match conflicts.len().saturating_sub(MAX_LISTED_CONFLICTS) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let differ = match conflicts.len() {
        1 => "a local file differs",
        _ => "local files differ",
    };
    let error = Error::conflict(format!(
        "{differ} from {id}: {listed}{more}; nothing was changed"
    ));
    Err(if options.claim {
        error.hint(format!(
            "use --force to move the local files to .sessiond/aside, or run \"sessiond restore {} --to DIR\" to restore into another directory",
            id.name
        ))
    } else {
        error.hint("choose an empty directory with --to")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_exist_only_locally_are_never_overwritten() {
        use FileKind::{Append, Whole};
        let different = LocalFile::default();
        let equal = LocalFile {
            is_equal: true,
            ..different
        };
        let longer = LocalFile {
            is_longer: true,
            ..different
        };
        let shorter = LocalFile {
            is_shorter: true,
            ..different
        };
        let uploaded = LocalFile {
            is_uploaded: true,
            ..different
        };
        for (kind, is_latest, local, is_newer, force, expected) in [
            (Append, true, None, false, false, FileAction::Write),
            (Append, true, Some(equal), false, false, FileAction::Keep),
            (Append, true, Some(longer), false, false, FileAction::Keep),
            (Append, true, Some(shorter), false, false, FileAction::Write),
            (
                Append,
                true,
                Some(different),
                false,
                false,
                FileAction::Conflict,
            ),
            (
                Append,
                true,
                Some(different),
                false,
                true,
                FileAction::Replace,
            ),
            (
                Append,
                true,
                Some(different),
                true,
                true,
                FileAction::Replace,
            ),
            // This volume owns the log, and its files are newer.
            (Whole, true, Some(different), true, false, FileAction::Keep),
            // Another machine continued; the local file was uploaded before.
            (Whole, true, Some(uploaded), false, false, FileAction::Write),
            // A rollback replaces only what the log holds.
            (
                Append,
                false,
                Some(longer),
                false,
                false,
                FileAction::Conflict,
            ),
            (
                Append,
                false,
                Some(LocalFile {
                    is_uploaded: true,
                    ..longer
                }),
                false,
                false,
                FileAction::Write,
            ),
            (
                Append,
                false,
                Some(different),
                true,
                false,
                FileAction::Conflict,
            ),
        ] {
            assert_eq!(
                decide(kind, is_latest, local, is_newer, force),
                expected,
                "{kind:?}, latest {is_latest}, {local:?}, newer {is_newer}, force {force}"
            );
        }
    }
}
