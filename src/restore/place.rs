//! Puts restored files where the agent looks for them, without ever overwriting what is only here.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Bound;

use serde::Serialize;

use super::repair::{self, Repaired};
use super::{Context, Options, RestoreReport, relocate};
use crate::agent::FileClass;
use crate::error::{Error, Result};
use crate::log::assemble::{FileAssembler, StagedFile};
use crate::log::ledger::{FileCursor, Ledger};
use crate::log::writer::WriteTarget;
use crate::model::{FileKind, FileMove, FileState, LogId, LogPoint, RelPath, Seq};
use crate::sys::{Directory, Meta, OpenFile, STATE_DIR};

/// What becomes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It is written; nothing stands there, or only what the log holds too.
    Write,
    /// It is here already, perhaps longer: it is kept, and what is more is shipped.
    Keep,
    /// Another file stands there that the log does not hold.
    Conflict,
    /// The other file is moved aside, then this one is written.
    Replace,
    /// An older place of a transcript that has moved: left in the log.
    Superseded,
    /// The session stands here too, where the agent must not find it a second time: moved aside.
    Aside,
}

impl Action {
    /// Whether bytes are put in place.
    pub fn writes(self) -> bool {
        matches!(self, Action::Write | Action::Replace)
    }
}

/// One file and what becomes of it.
#[derive(Debug, Clone, Serialize)]
pub struct FilePlan {
    /// Its path below the root.
    pub path: RelPath,
    /// What becomes of it.
    pub action: Action,
    /// Its length once restored.
    pub bytes: u64,
    /// Bytes of an unfinished line that stay in the log.
    pub torn: u64,
    /// Where the local file is that becomes this one; elsewhere, if the session comes from another project.
    #[serde(skip)]
    pub stands_at: RelPath,
    /// What stands in its place.
    #[serde(skip)]
    standing: Option<Local>,
    /// The cursor behind what the log holds of the local file.
    #[serde(skip)]
    cursor: Option<FileCursor>,
}

impl FilePlan {
    fn new(path: &RelPath, stands_at: &RelPath, action: Action) -> Self {
        FilePlan {
            path: path.clone(),
            action,
            bytes: 0,
            torn: 0,
            stands_at: stands_at.clone(),
            standing: None,
            cursor: None,
        }
    }

    /// A file that stays as it is, known from the ledger alone.
    pub fn kept(path: &RelPath, cursor: &FileCursor) -> Self {
        FilePlan {
            bytes: cursor.len,
            torn: cursor.torn,
            ..FilePlan::new(path, path, Action::Keep)
        }
    }
}

/// What is known of the file that stands where a restored one should go.
#[derive(Debug, Clone, Copy, Default)]
struct Local {
    equal: bool,
    /// It begins with the stored one and is longer.
    longer: bool,
    /// The stored one begins with it.
    shorter: bool,
    /// The ledger knows that the log holds just this.
    shipped: bool,
    /// We wrote the log's last entry: what is here is newer than the log.
    ours: bool,
}

/// Pure: what becomes of a file.
fn decide(kind: FileKind, latest: bool, local: Option<Local>, force: bool) -> Action {
    let Some(local) = local else {
        return Action::Write;
    };
    let safe = local.shorter || local.shipped;
    if local.equal
        || (latest && local.longer && kind == FileKind::Append)
        || (latest && local.ours && !safe && !force)
    {
        Action::Keep
    } else if safe {
        Action::Write
    } else if force {
        Action::Replace
    } else {
        Action::Conflict
    }
}

/// Decides for every file of the log `id`. `goes_on`: nobody but this volume has written since it was restored to this point.
pub fn decide_all(
    context: &Context,
    id: &LogId,
    assembly: &FileAssembler<'_>,
    moves: &[FileMove],
    (ledger, goes_on): (Option<&Ledger>, bool),
    options: &Options,
) -> Result<Vec<FilePlan>> {
    refuse_strangers(context, id, assembly, options)?;
    let transcripts = assembly
        .files()
        .filter(|(path, _, _)| context.profile.is_transcript(path));
    // A transcript that moved has its old name in another directory.
    let mut newest: BTreeMap<&str, Seq> = BTreeMap::new();
    for (path, at, _) in transcripts {
        newest
            .entry(path.name())
            .and_modify(|seq| *seq = at.seq.max(*seq))
            .or_insert(at.seq);
    }
    // A crash can lose the last steps of a ledger; the entries behind them are ours all the same.
    let ours = ledger.is_some_and(|ledger| {
        ledger.log_writer.target == WriteTarget::Main
            && assembly.only_by(&ledger.log_writer.writer, ledger.log_writer.seq)
    });
    let latest = options.at == LogPoint::Latest || goes_on;
    let mut plans = Vec::new();
    for (path, at, staged) in assembly.files() {
        let failed = |cause: std::io::Error| {
            let in_the_way = cause.kind() == ErrorKind::AlreadyExists
                || cause.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
            match in_the_way {
                true => Error::conflict(format!("{path} is a link or a directory here"))
                    .hint("move it away: a restore writes files and follows no link"),
                false => Error::io(format!("compare {path}"), cause),
            }
        };
        let stands_at = stands_at(context, path, moves).map_err(failed)?;
        plans.push((
            examine(context, options, (path, &stands_at), at, staged, ledger).map_err(failed)?,
            at,
        ));
    }
    // The transcript that was written last goes on here: this is where the session lives, ledger or not, and what the
    // agent replaced beside it is newer than the log. Also, any writer may change a project's files.
    let last_written = plans
        .iter()
        .filter(|(_, at)| at.kind == FileKind::Append)
        .max_by_key(|(_, at)| at.seq);
    let lives_here = last_written.is_some_and(|(plan, _)| {
        plan.standing
            .is_some_and(|standing| standing.equal || standing.longer)
    });
    for (plan, at) in &mut plans {
        let moved_on = options.claim
            && newest
                .get(plan.path.name())
                .is_some_and(|newest| *newest != at.seq)
            && context.profile.is_transcript(&plan.path);
        let superseded = moved_on || is_covered(assembly, &plan.path, at.seq);
        let newer_here = ours || id.name.is_project() || (lives_here && at.kind == FileKind::Whole);
        // Where nothing is streamed, what is longer is only different.
        let (ours, longer) = (newer_here && options.claim, |standing: Local| {
            standing.longer && options.claim
        });
        let local = plan.standing.map(|standing| Local {
            ours,
            longer: longer(standing),
            ..standing
        });
        plan.action = if superseded {
            Action::Superseded
        } else {
            decide(at.kind, latest, local, options.force)
        };
    }
    let mut plans: Vec<FilePlan> = plans.into_iter().map(|(plan, _)| plan).collect();
    if options.claim {
        plans.extend(second_places(
            context, id, assembly, ledger, options, &plans,
        )?);
    }
    Ok(plans)
}

/// Where the local file is that a restored one is compared with: at its path, or where it was before a move of ours.
fn stands_at(context: &Context, path: &RelPath, moves: &[FileMove]) -> std::io::Result<RelPath> {
    match moves.iter().find(|moved| moved.to == *path) {
        Some(moved) if context.directory.stat(path)?.is_none() => Ok(moved.from.clone()),
        _ => Ok(path.clone()),
    }
}

/// Other places of the session's transcript: an agent that finds two takes neither, or the wrong one.
fn second_places(
    context: &Context,
    id: &LogId,
    assembly: &FileAssembler<'_>,
    ledger: Option<&Ledger>,
    options: &Options,
    plans: &[FilePlan],
) -> Result<Vec<FilePlan>> {
    let Some((here, newest)) = relocate::transcript(context, assembly) else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for (_, path) in relocate::elsewhere(context, id, here)? {
        if plans
            .iter()
            .any(|plan| plan.stands_at == path && plan.action != Action::Superseded)
        {
            continue;
        }
        let (at, staged) = assembly
            .files()
            .find(|(known, ..)| **known == path)
            .map_or(newest, |(_, at, staged)| (at, staged));
        let plan = examine(context, options, (&path, &path), at, staged, ledger);
        let mut plan = plan.map_err(|cause| Error::io(format!("compare {path}"), cause))?;
        let safe = plan
            .standing
            .is_none_or(|standing| standing.equal || standing.shorter || standing.shipped);
        plan.action = if safe || options.force {
            Action::Aside
        } else {
            Action::Conflict
        };
        found.push(plan);
    }
    Ok(found)
}

/// Whether what stands at `path` is the session's transcript, with all that the log holds of it.
pub fn goes_on_at(
    context: &Context,
    options: &Options,
    path: &RelPath,
    at: &FileState,
    staged: &StagedFile,
) -> Result<bool> {
    let plan = examine(context, options, (path, path), at, staged, None);
    let plan = plan.map_err(|cause| Error::io(format!("compare {path}"), cause))?;
    Ok(plan
        .standing
        .is_some_and(|standing| standing.equal || standing.longer))
}

/// A bucket can say anything: only what the agent's profile would have kept goes to the agent's directory, so that nobody
/// plants settings there, and nothing ever goes to ours.
fn refuse_strangers(
    context: &Context,
    id: &LogId,
    assembly: &FileAssembler<'_>,
    options: &Options,
) -> Result<()> {
    for (path, _, _) in assembly.files() {
        let kept = match context.profile.place(path) {
            FileClass::Ignore => false,
            FileClass::Keep(name, _) => name == id.name,
            FileClass::Ask(..) => true,
        };
        if path.parts().next() == Some(STATE_DIR) || options.claim && !kept {
            return Err(Error::corrupt(format!(
                "{path} is not a file that {} keeps for {id}",
                context.profile.name()
            ))
            .hint("nothing was changed; sessiond pull ID --to DIR fetches a copy to look at"));
        }
    }
    Ok(())
}

/// Whether a newer file stands where a directory of this one's path must be, or a newer one lies in a directory of its name.
fn is_covered(assembly: &FileAssembler<'_>, path: &RelPath, seq: Seq) -> bool {
    let files = &assembly.state.files;
    let above = std::iter::successors(path.parent(), RelPath::parent)
        .any(|directory| files.get(&directory).is_some_and(|file| file.seq > seq));
    let below = format!("{path}/");
    let mut behind = files
        .range((Bound::Excluded(path), Bound::Unbounded))
        .take_while(|(other, _)| other.as_str().starts_with(path.as_str()));
    above || behind.any(|(other, file)| other.as_str().starts_with(&below) && file.seq >= seq)
}

/// Compares a stored file with the one that stands in its place.
fn examine(
    context: &Context,
    options: &Options,
    (path, stands_at): (&RelPath, &RelPath),
    at: &FileState,
    staged: &StagedFile,
    ledger: Option<&Ledger>,
) -> std::io::Result<FilePlan> {
    let directory = &*context.directory;
    let stored = directory
        .open(&staged.at)?
        .ok_or(std::io::ErrorKind::NotFound)?;
    // A copy for debugging is the log as it is; an agent gets whole lines.
    let len = match at.kind {
        FileKind::Append if options.claim => {
            let lines = whole_lines(&*stored, at.len)?;
            // What lacks only the end of its line can be repaired.
            if options.repair && repair::is_record(&*stored, lines, at.len)? {
                at.len
            } else {
                lines
            }
        }
        _ => at.len,
    };
    let mut plan = FilePlan {
        bytes: len,
        torn: at.len - len,
        ..FilePlan::new(path, stands_at, Action::Write)
    };
    let Some(file) = directory.open(stands_at)? else {
        return Ok(plan);
    };
    let size = file.stat()?.size;
    let mut standing = Local::default();
    let common = size.min(len);
    let (here, there) = (
        FileCursor::over(&*file, at.kind, common)?,
        FileCursor::over(&*stored, at.kind, common)?,
    );
    if let (Some(here), Some(there)) = (here, there)
        && here.hash == there.hash
    {
        standing = Local {
            equal: size == len,
            longer: size > len,
            shorter: size < len,
            ..standing
        };
        if size >= len {
            plan.cursor = Some(here);
        }
    }
    if let Some(shipped) = ledger
        .and_then(|ledger| ledger.files.get(stands_at))
        .filter(|shipped| shipped.len == size)
    {
        standing.shipped =
            FileCursor::over(&*file, at.kind, size)?.is_some_and(|now| now.hash == shipped.hash);
    }
    plan.standing = Some(standing);
    Ok(plan)
}

/// Where the last whole line ends.
fn whole_lines(file: &dyn OpenFile, len: u64) -> std::io::Result<u64> {
    let mut end = len;
    let mut buffer = vec![0; 64 << 10];
    while end > 0 {
        let from = end.saturating_sub(buffer.len() as u64);
        let want = (end - from) as usize;
        let mut got = 0;
        while got < want {
            match file.read_at(&mut buffer[got..want], from + got as u64)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                more => got += more,
            }
        }
        if let Some(at) = buffer[..want].iter().rposition(|byte| *byte == b'\n') {
            return Ok(from + at as u64 + 1);
        }
        end = from;
    }
    Ok(0)
}

/// Answers an error that names every file in the way.
pub fn check(id: &LogId, files: &[FilePlan], options: &Options) -> Result<()> {
    let conflicts: Vec<&str> = files
        .iter()
        .filter(|file| file.action == Action::Conflict)
        .map(|file| file.stands_at.as_str())
        .collect();
    if conflicts.is_empty() || options.dry_run {
        return Ok(());
    }
    let shown = conflicts
        .iter()
        .take(3)
        .copied()
        .collect::<Vec<_>>()
        .join(", ");
    let more = if conflicts.len() > 3 {
        format!(" and {} more", conflicts.len() - 3)
    } else {
        String::new()
    };
    Err(Error::conflict(format!("local files differ from {id}: {shown}{more}")).hint(if options.claim {
        "nothing was changed; --force moves them aside to .sessiond/aside first, --to DIR restores elsewhere"
    } else {
        "nothing was changed; give --to an empty directory"
    }))
}

/// Puts the files of a report in place, transcripts last, so that what they name is there first. Answers the cursors behind them.
pub fn place_all(
    context: &Context,
    assembly: &FileAssembler<'_>,
    report: &mut RestoreReport,
    ledger: Option<&Ledger>,
    options: &Options,
) -> Result<BTreeMap<RelPath, FileCursor>> {
    let directory = &*context.directory;
    let stored: BTreeMap<&RelPath, (&FileState, &StagedFile)> = assembly
        .files()
        .map(|(path, at, staged)| (path, (at, staged)))
        .collect();
    let aside = format!(
        "{STATE_DIR}/aside/{}",
        context.logs.clock.now().strftime("%Y%m%dT%H%M%S")
    );
    let aside = format!("{aside}-{:08x}", context.logs.rng.next() >> 32);
    let mut cursors = BTreeMap::new();
    for transcripts in [false, true] {
        for plan in report
            .files
            .iter()
            .filter(|plan| context.profile.is_transcript(&plan.path) == transcripts)
        {
            let failed = |cause: std::io::Error| {
                let context = format!("put {} in place", plan.path);
                match cause.kind() {
                    ErrorKind::NotADirectory | ErrorKind::AlreadyExists => Error::conflict(context)
                        .caused_by(cause)
                        .hint("move what is in its place away, then restore again"),
                    _ => Error::io(context, cause),
                }
            };
            let is_elsewhere = plan.stands_at != plan.path && plan.standing.is_some();
            let to: RelPath = format!("{aside}/{}", plan.stands_at).parse()?;
            if plan.action == Action::Replace
                || plan.action == Action::Aside
                || plan.action == Action::Write && is_elsewhere
            {
                directory
                    .rename(&plan.stands_at, &to, options.owner)
                    .map_err(failed)?;
            }
            let Some((at, staged)) = stored.get(&plan.path) else {
                continue;
            };
            let mut cursor = match plan.action {
                Action::Superseded | Action::Conflict | Action::Aside => continue,
                Action::Keep => {
                    if is_elsewhere {
                        directory
                            .rename(&plan.stands_at, &plan.path, options.owner)
                            .map_err(failed)?;
                    }
                    keep(plan, ledger)
                }
                Action::Write | Action::Replace => {
                    Some(put(directory, plan, at, staged, options).map_err(failed)?)
                }
            };
            if options.repair && at.kind == FileKind::Append {
                let original: RelPath = format!("{to}.damaged").parse()?;
                let view = staged
                    .at
                    .parent()
                    .unwrap_or_else(|| staged.at.clone())
                    .join("view")?;
                let changes = repair::in_place(
                    context,
                    &plan.path,
                    (&view, &original),
                    &mut cursor,
                    options,
                )
                .map_err(failed)?;
                if !changes.is_empty() {
                    report.repaired.push(Repaired {
                        path: plan.path.clone(),
                        original: Some(original),
                        changes,
                    });
                }
            }
            cursors.extend(cursor.map(|cursor| (plan.path.clone(), cursor)));
        }
    }
    Ok(cursors)
}

/// The cursor of a file that stays: behind what the log holds of it.
fn keep(plan: &FilePlan, ledger: Option<&Ledger>) -> Option<FileCursor> {
    let behind_stored = plan.cursor.clone().map(|mut cursor| {
        // What is more than that is new to the next look.
        cursor.stat.size = cursor.len;
        cursor
    });
    behind_stored.or_else(|| ledger?.files.get(&plan.stands_at).cloned())
}

fn put(
    directory: &dyn Directory,
    plan: &FilePlan,
    at: &FileState,
    staged: &StagedFile,
    options: &Options,
) -> std::io::Result<FileCursor> {
    if plan.bytes < at.len {
        directory.write_at(&staged.at, plan.bytes, &[])?;
    }
    if directory.stat(&staged.at)?.is_none() {
        directory.write_at(&staged.at, 0, &[])?;
    }
    directory.finish(
        &staged.at,
        &Meta {
            mode: at.mode,
            mtime_ns: at.mtime_ns,
            owner: options.owner,
        },
    )?;
    let file = directory
        .open(&staged.at)?
        .ok_or(std::io::ErrorKind::NotFound)?;
    let cursor =
        FileCursor::over(&*file, at.kind, plan.bytes)?.ok_or(std::io::ErrorKind::UnexpectedEof)?;
    directory.rename(&staged.at, &plan.path, options.owner)?;
    // On another file system it is another file now. Nobody writes it yet.
    let stat = directory
        .stat(&plan.path)?
        .ok_or(std::io::ErrorKind::NotFound)?;
    Ok(FileCursor {
        stat,
        fresh: false,
        ..cursor
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_only_here_is_never_overwritten() {
        use FileKind::{Append, Whole};
        let none = Local::default();
        assert_eq!(decide(Append, true, None, false), Action::Write);
        assert_eq!(
            decide(
                Append,
                true,
                Some(Local {
                    equal: true,
                    ..none
                }),
                false
            ),
            Action::Keep
        );
        assert_eq!(
            decide(
                Append,
                true,
                Some(Local {
                    longer: true,
                    ..none
                }),
                false
            ),
            Action::Keep
        );
        assert_eq!(
            decide(
                Append,
                true,
                Some(Local {
                    shorter: true,
                    ..none
                }),
                false
            ),
            Action::Write
        );
        assert_eq!(decide(Append, true, Some(none), false), Action::Conflict);
        assert_eq!(decide(Append, true, Some(none), true), Action::Replace);
        assert_eq!(
            decide(Append, true, Some(Local { ours: true, ..none }), true),
            Action::Replace
        );
        // Our own volume, ahead of the log: what is here is the truth.
        assert_eq!(
            decide(Whole, true, Some(Local { ours: true, ..none }), false),
            Action::Keep
        );
        // Another container went on; what is here was shipped before.
        assert_eq!(
            decide(
                Whole,
                true,
                Some(Local {
                    shipped: true,
                    ..none
                }),
                false
            ),
            Action::Write
        );
        // Going back in time replaces only what the log holds.
        assert_eq!(
            decide(
                Append,
                false,
                Some(Local {
                    longer: true,
                    ..none
                }),
                false
            ),
            Action::Conflict
        );
        assert_eq!(
            decide(
                Append,
                false,
                Some(Local {
                    longer: true,
                    shipped: true,
                    ..none
                }),
                false
            ),
            Action::Write
        );
        assert_eq!(
            decide(Append, false, Some(Local { ours: true, ..none }), false),
            Action::Conflict
        );
    }
}
