//! What an agent wrote on a volume, version by version, and whether the content of a log is one of
//! these versions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Files by path below the root.
pub type Files = BTreeMap<String, Vec<u8>>;

/// One version of a file.
pub struct FileVersion {
    pub bytes: Vec<u8>,
    /// The end of the last complete line; the whole length of a side file.
    pub cut: usize,
    is_transcript: bool,
    /// The agent had exited: the log may contain the partial line.
    may_end_partially: AtomicBool,
}

impl FileVersion {
    fn new(path: &str, bytes: Vec<u8>) -> FileVersion {
        let is_transcript = path.ends_with(".jsonl");
        let cut = if is_transcript {
            complete_lines_len(&bytes)
        } else {
            bytes.len()
        };
        FileVersion {
            bytes,
            cut,
            is_transcript,
            may_end_partially: AtomicBool::new(false),
        }
    }

    /// It has no complete line yet: the log keeps the previous content.
    fn has_no_complete_line(&self) -> bool {
        self.is_transcript && self.cut == 0
    }

    pub fn complete_bytes(&self) -> &[u8] {
        &self.bytes[..self.cut]
    }
}

/// Returns the end of the last complete line.
pub fn complete_lines_len(bytes: &[u8]) -> usize {
    bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1)
}

/// All files of a volume at one moment.
#[derive(Clone)]
pub struct Version {
    /// Counts through all versions of all volumes.
    pub number: u64,
    pub files: BTreeMap<String, Arc<FileVersion>>,
}

/// Returns the number of bytes that each version adds to the previous one.
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

    /// The agent has exited: partial lines may be uploaded.
    pub fn allow_partial_lines(&self) {
        self.files
            .values()
            .for_each(|file| file.may_end_partially.store(true, Ordering::Relaxed));
    }
}

/// Returns the newest version whose complete lines are `held`, the files of a log. A log keeps
/// deleted files, and the content before a rewrite that has no complete line yet.
pub fn newest_match(held: &Files, chain: &[&Version]) -> Option<usize> {
    (0..chain.len()).rev().find(|at| matches(held, chain, *at))
}

/// Whether `held` has each file of a version, or a newer version of the file.
pub fn contains_files_of(held: &Files, chain: &[&Version], at: usize) -> bool {
    chain[at]
        .files
        .iter()
        .filter(|(_, file)| file.cut > 0)
        .all(|(path, _)| {
            let later = || (at..chain.len()).map(|later| (later, chain[later].files.get(path)));
            // It was moved: it may have its new name, or its old one if it was deleted.
            later().any(|(_, file)| file.is_none())
                || held.get(path).is_some_and(|bytes| {
                    later().any(|(later, file)| {
                        file.is_some_and(|file| {
                            is_cut(bytes, file, &chain[..=later]) || file.has_no_complete_line()
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
            // A new path without an event yet. `contains_files_of` checks acknowledged versions.
            None => true,
            Some(bytes) => {
                is_cut(bytes, file, &chain[..=at])
                    || (file.has_no_complete_line()
                        && (bytes.is_empty() || is_earlier_version(bytes, path, &chain[..at])))
                    || is_moved_file(bytes, path, &chain[..at])
                    || is_later_side_file(bytes, path, &chain[at..])
            }
        });
    present
        && held
            .iter()
            .filter(|(path, _)| !version.files.contains_key(*path))
            .all(|(path, bytes)| {
                is_earlier_version(bytes, path, &chain[..at])
                    || is_later_side_file(bytes, path, &chain[at..])
            })
}

/// A flush of several entries uploads side files first, so a side file can be newer than the
/// transcripts. It is complete or absent.
fn is_later_side_file(bytes: &[u8], path: &str, chain: &[&Version]) -> bool {
    let is_same = |file: &Arc<FileVersion>| !file.is_transcript && file.bytes == bytes;
    chain
        .iter()
        .any(|version| version.files.get(path).is_some_and(is_same))
}

fn is_cut(bytes: &[u8], file: &FileVersion, chain: &[&Version]) -> bool {
    let complete = file.complete_bytes();
    if bytes == complete {
        return true;
    }
    // A partial line that was uploaded after the agent exited stays until more is written after it.
    let has_partial_line = file.is_transcript
        && bytes.len() > complete.len()
        && complete_lines_len(bytes) == complete.len()
        && bytes.starts_with(complete);
    // The file may have been moved since.
    let was_uploaded = |then: &Arc<FileVersion>| {
        then.may_end_partially.load(Ordering::Relaxed) && then.bytes == bytes
    };
    has_partial_line
        && chain
            .iter()
            .rev()
            .any(|version| version.files.values().any(was_uploaded))
}

fn is_earlier_version(bytes: &[u8], path: &str, chain: &[&Version]) -> bool {
    (0..chain.len()).rev().any(|at| {
        chain[at]
            .files
            .get(path)
            .is_some_and(|file| is_cut(bytes, file, &chain[..=at]))
    })
}

/// A claim reports that a session moved to another project. The next delta has the bytes that were
/// added there.
fn is_moved_file(bytes: &[u8], path: &str, chain: &[&Version]) -> bool {
    let is_same_file_in_other_project = |other: &str| {
        other != path && in_project(other).is_some() && in_project(other) == in_project(path)
    };
    let origins = |version: &Version| {
        version
            .files
            .keys()
            .filter(|other| is_same_file_in_other_project(other))
            .cloned()
            .collect::<Vec<_>>()
    };
    chain
        .last()
        .is_some_and(|version| !version.files.contains_key(path))
        && (0..chain.len()).rev().any(|at| {
            origins(chain[at])
                .iter()
                .any(|from| is_cut(bytes, &chain[at].files[from], &chain[..=at]))
        })
}

/// Returns the path below its project.
pub fn in_project(path: &str) -> Option<&str> {
    Some(path.strip_prefix("projects/")?.split_once('/')?.1)
}
