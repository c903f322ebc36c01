//! What an agent wrote on a volume, version by version, and whether the content of a log is one of
//! these versions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Files by path below the root.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A file as it was for a while.
pub struct FileVersion {
    pub bytes: Vec<u8>,
    /// Where its last whole line ends; all of it where it is replaced as one.
    pub cut: usize,
    lines: bool,
    /// The agent was gone while it was so: what follows the last whole line may be in the log.
    with_tail: AtomicBool,
}

impl FileVersion {
    fn new(path: &str, bytes: Vec<u8>) -> FileVersion {
        let lines = path.ends_with(".jsonl");
        let cut = if lines {
            whole_lines(&bytes)
        } else {
            bytes.len()
        };
        FileVersion {
            bytes,
            cut,
            lines,
            with_tail: AtomicBool::new(false),
        }
    }

    /// It has no whole line yet: what stood there before stays in the log.
    fn waits(&self) -> bool {
        self.lines && self.cut == 0
    }

    pub fn whole(&self) -> &[u8] {
        &self.bytes[..self.cut]
    }
}

/// Where the last whole line ends.
pub fn whole_lines(bytes: &[u8]) -> usize {
    bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1)
}

/// All files of a volume at a moment.
#[derive(Clone)]
pub struct Version {
    /// Counts through all versions of all volumes.
    pub number: u64,
    pub files: BTreeMap<String, Arc<FileVersion>>,
}

/// What each version has that the one before did not, in bytes.
pub fn new_bytes(history: &[Version]) -> u64 {
    let mut new = 0;
    let mut before: Option<&Version> = None;
    for version in history {
        for (path, file) in &version.files {
            let had = before.and_then(|before| before.files.get(path));
            new += match had.filter(|had| file.bytes.starts_with(&had.bytes)) {
                Some(had) => file.bytes.len() - had.bytes.len(),
                None => file.bytes.len(),
            };
        }
        before = Some(version);
    }
    new as u64
}

impl Version {
    pub fn size(&self) -> u64 {
        self.files
            .values()
            .map(|file| file.bytes.len() as u64)
            .sum()
    }

    /// The version that follows `before`.
    pub fn following(before: Option<&Version>, number: u64, files: Files) -> Version {
        let files = files.into_iter().map(|(path, bytes)| {
            let same = before
                .and_then(|before| before.files.get(&path))
                .filter(|file| file.bytes == bytes)
                .cloned();
            let file = same.unwrap_or_else(|| Arc::new(FileVersion::new(&path, bytes)));
            (path, file)
        });
        Version {
            number,
            files: files.collect(),
        }
    }

    /// The agent is gone: unfinished lines may go out.
    pub fn allow_tails(&self) {
        self.files
            .values()
            .for_each(|file| file.with_tail.store(true, Ordering::Relaxed));
    }
}

/// The newest version that `held` (the files that a log amounts to) is a cut of. What vanished stays in a log, and so
/// does what stood before a rewrite that has no whole line yet.
pub fn newest_match(held: &Files, chain: &[&Version]) -> Option<usize> {
    (0..chain.len()).rev().find(|at| matches(held, chain, *at))
}

/// Whether `held` holds each file of a version, that one or a newer.
pub fn holds_each_file_of(held: &Files, chain: &[&Version], at: usize) -> bool {
    chain[at]
        .files
        .iter()
        .filter(|(_, file)| file.cut > 0)
        .all(|(path, _)| {
            let later = || (at..chain.len()).map(|later| (later, chain[later].files.get(path)));
            // It was moved, and may be under its new name or, vanished, under its old one.
            later().any(|(_, file)| file.is_none())
                || held.get(path).is_some_and(|bytes| {
                    later().any(|(later, file)| {
                        file.is_some_and(|file| {
                            is_cut(bytes, file, &chain[..=later]) || file.waits()
                        })
                    })
                })
        })
}

fn matches(held: &Files, chain: &[&Version], at: usize) -> bool {
    let version = chain[at];
    let present = version
        .files
        .iter()
        .all(|(path, file)| match held.get(path) {
            // A new path that no event has told of yet; whether it may be missing is asked where something was promised.
            None => true,
            Some(bytes) => {
                is_cut(bytes, file, &chain[..=at])
                    || (file.waits() && (bytes.is_empty() || was(bytes, path, &chain[..at])))
                    || came_along(bytes, path, &chain[..at])
            }
        });
    present
        && held
            .iter()
            .filter(|(path, _)| !version.files.contains_key(*path))
            .all(|(path, bytes)| was(bytes, path, &chain[..at]))
}

fn is_cut(bytes: &[u8], file: &FileVersion, chain: &[&Version]) -> bool {
    let whole = file.whole();
    if bytes == whole {
        return true;
    }
    // An unfinished line that went out when the agent was gone stays until something is written behind it.
    let tail = file.lines
        && bytes.len() > whole.len()
        && whole_lines(bytes) == whole.len()
        && bytes.starts_with(whole);
    // It may have been moved since.
    let went_out =
        |then: &Arc<FileVersion>| then.with_tail.load(Ordering::Relaxed) && then.bytes == bytes;
    tail && chain
        .iter()
        .rev()
        .any(|version| version.files.values().any(went_out))
}

fn was(bytes: &[u8], path: &str, chain: &[&Version]) -> bool {
    (0..chain.len()).rev().any(|at| {
        chain[at]
            .files
            .get(path)
            .is_some_and(|file| is_cut(bytes, file, &chain[..=at]))
    })
}

/// A claim says that a session has moved to another project; what was added there comes with the next delta.
fn came_along(bytes: &[u8], path: &str, chain: &[&Version]) -> bool {
    let elsewhere = |other: &str| {
        other != path && in_project(other).is_some() && in_project(other) == in_project(path)
    };
    let froms = |version: &Version| {
        version
            .files
            .keys()
            .filter(|other| elsewhere(other))
            .cloned()
            .collect::<Vec<_>>()
    };
    chain
        .last()
        .is_some_and(|version| !version.files.contains_key(path))
        && (0..chain.len()).rev().any(|at| {
            froms(chain[at])
                .iter()
                .any(|from| is_cut(bytes, &chain[at].files[from], &chain[..=at]))
        })
}

/// What a path is below its project.
pub fn in_project(path: &str) -> Option<&str> {
    Some(path.strip_prefix("projects/")?.split_once('/')?.1)
}
