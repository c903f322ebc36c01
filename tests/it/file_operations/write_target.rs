//! The write targets of a log as the bucket shows them, and which of them a writer must use. Reads
//! entries with code of its own; a restore must agree.

use std::collections::BTreeMap;

use sessiond::codec::entry::Entry;
use sessiond::log::ledger::Ledger;
use sessiond::log::state::LogState;
use sessiond::log::writer::{LogWriter, WriteTarget};
use sessiond::model::{Digest, FileKind, Seq, WriterId};

use super::act::SESSION;
use crate::support::files::Files;
use crate::support::world::World;

/// An entry, and the files after it.
pub struct Step {
    pub entry: Entry,
    pub files: Files,
}

impl Step {
    pub fn seq(&self) -> Seq {
        self.entry.header.seq
    }
}

/// The branch that a writer writes to, if any.
pub fn branch_of(log_writer: &LogWriter) -> Option<WriterId> {
    (log_writer.target == WriteTarget::Branch).then(|| log_writer.writer.clone())
}

/// The entries of a writer's target, and the seq where a branch starts. Those of a branch follow
/// the log's entries up to there.
pub async fn history(world: &World, log_writer: &LogWriter) -> (Vec<Step>, Seq) {
    let (logs, id) = (world.logs(), world.id(SESSION));
    let mut entries = Vec::new();
    for seq in 1..=world.entry_count(SESSION).await as Seq {
        entries.push(logs.read_entry(&id, seq).await.unwrap().unwrap());
    }
    let mut branched_at = 0;
    if let Some(writer) = branch_of(log_writer) {
        let mut own = Vec::new();
        for segment in logs.list_branch_segments(&id, &writer).await.unwrap() {
            own.push(
                logs.read_branch_entry(&id, &writer, segment.last_seq)
                    .await
                    .unwrap()
                    .unwrap(),
            );
        }
        branched_at = own
            .first()
            .map_or(log_writer.seq, |first| first.header.predecessor());
        entries.retain(|entry| entry.header.seq <= branched_at);
        entries.extend(own);
    }
    let mut files = Files::new();
    let steps = entries.into_iter().map(|entry| {
        apply(&mut files, &entry);
        Step {
            entry,
            files: files.clone(),
        }
    });
    (steps.collect(), branched_at)
}

/// The files after an entry.
pub fn files_at(history: &[Step], seq: Seq) -> Files {
    history
        .iter()
        .rfind(|step| step.seq() <= seq)
        .map(|step| step.files.clone())
        .unwrap_or_default()
}

fn apply(files: &mut Files, entry: &Entry) {
    for moved in &entry.header.moves {
        let bytes = files.remove(moved.from.as_str()).unwrap();
        files.insert(moved.to.to_string(), bytes);
    }
    for (part, bytes) in entry.parts() {
        let file = files.entry(part.path.to_string()).or_default();
        file.truncate(part.start as usize);
        file.extend_from_slice(bytes);
    }
}

/// Whether a writer that starts with this ledger, or none, must start a branch when it writes.
/// `found_on_retry` is an entry that it finds when it retries.
pub fn must_branch(
    ledger: Option<&Ledger>,
    main: &[Step],
    own: &[Step],
    local_files: &Files,
    found_on_retry: Option<Digest>,
) -> bool {
    let Some(ledger) = ledger else {
        return !extends_log(main, local_files);
    };
    let log_writer = &ledger.log_writer;
    let missed = || own.iter().filter(|step| step.seq() > log_writer.seq);
    if log_writer.target == WriteTarget::Unclaimed
        && missed()
            .next()
            .is_some_and(|step| step.entry.header.writer != log_writer.writer)
    {
        return !extends_log(main, local_files);
    }
    let mut cursors = files_at(own, log_writer.seq);
    cursors.retain(|path, _| ledger.files.keys().any(|known| known.as_str() == path));
    missed().any(|step| {
        let is_own = step.entry.header.writer == log_writer.writer
            && (Some(step.entry.digest) == found_on_retry
                || proves_ownership(step, &cursors, local_files));
        apply_step(&mut cursors, step, local_files);
        !is_own
    })
}

/// Whether the files equal or extend the log: no local transcript differs, and the last written one
/// exists.
fn extends_log(main: &[Step], local_files: &Files) -> bool {
    let mut state = LogState::default();
    main.iter()
        .for_each(|step| state.apply(&step.entry.header, step.entry.digest).unwrap());
    let stored = files_at(main, Seq::MAX);
    let newest = state
        .files
        .values()
        .filter(|file| file.kind == FileKind::Append)
        .map(|file| file.seq)
        .max();
    let begins: BTreeMap<_, bool> = local_files
        .iter()
        .filter_map(|(path, local_files)| Some((path, local_files.starts_with(stored.get(path)?))))
        .collect();
    let mut lines = state
        .files
        .iter()
        .filter(|(_, file)| newest.is_none() || file.kind == FileKind::Append);
    let differs = lines
        .clone()
        .any(|(path, _)| begins.get(&path.to_string()) == Some(&false));
    let newest_is_here = lines
        .any(|(path, file)| Some(file.seq) == newest && begins.contains_key(&path.to_string()));
    !differs && (newest_is_here || newest.is_none())
}

/// Whether the files prove that an entry was written from this volume: the lines that it appended
/// exist, or else everything that it changed.
fn proves_ownership(step: &Step, cursors: &Files, local_files: &Files) -> bool {
    let is_here = |path: &str, bytes: &Vec<u8>| {
        local_files
            .get(path)
            .is_some_and(|local_files| local_files.starts_with(bytes))
    };
    let header = &step.entry.header;
    let moved = header.moves.iter().all(|moved| {
        cursors
            .get(moved.from.as_str())
            .is_none_or(|had| is_here(moved.to.as_str(), had))
    });
    let of = |kind| header.parts.iter().filter(move |part| part.kind == kind);
    let all =
        |kind| of(kind).all(|part| is_here(part.path.as_str(), &step.files[part.path.as_str()]));
    let lines = of(FileKind::Append).any(|part| part.len > 0);
    all(FileKind::Append) && (lines || (moved && all(FileKind::Whole)))
}

fn apply_step(cursors: &mut Files, step: &Step, local_files: &Files) {
    for moved in &step.entry.header.moves {
        if let Some(had) = cursors.remove(moved.from.as_str()) {
            cursors.insert(moved.to.to_string(), had);
        }
    }
    for part in &step.entry.header.parts {
        let (path, bytes) = (part.path.as_str(), &step.files[part.path.as_str()]);
        if local_files
            .get(path)
            .is_some_and(|local_files| local_files.starts_with(bytes))
        {
            cursors.insert(path.to_owned(), bytes.clone());
        } else {
            cursors.remove(path);
        }
    }
}
