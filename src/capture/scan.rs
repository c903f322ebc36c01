//! The scan: lists the agent's directory and finds the log of each file. File events only hint at
//! changes; the scan is authoritative.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::agent::{FileClass, Profile, SESSION_ID_SEARCH_BYTES, find_session_id};
use crate::error::{Error, Result};
use crate::model::{FileKind, FileStat, LogName, RelPath, RunningHash, SessionId};
use crate::sys::{Directory, ItemKind};

/// A file that a scan found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScannedFile {
    /// The path of the file.
    pub path: RelPath,
    /// How the agent writes the file.
    pub kind: FileKind,
    /// The metadata of the file.
    pub stat: FileStat,
}

impl ScannedFile {
    /// The fingerprint of the files of a log.
    pub fn fingerprint(files: &[ScannedFile]) -> u64 {
        fingerprint(files.iter().map(|file| (&file.path, &file.stat)))
    }

    /// The sum of the sizes of files.
    pub fn total_size(files: &[ScannedFile]) -> u64 {
        files.iter().map(|file| file.stat.size).sum()
    }
}

/// The result of a scan.
#[derive(Debug, Default)]
pub struct DirectoryScan {
    /// The files of each log, ordered by path, without named files.
    pub logs: BTreeMap<LogName, Vec<ScannedFile>>,
    /// The files that belong to the sessions whose transcripts name them.
    pub named: NamedFiles,
    /// The files that cannot be stored, each as a message with the reason.
    pub skipped: Vec<String>,
    /// The directories that could not be listed, and why: their files may have changed.
    pub unlisted: Vec<(RelPath, String)>,
}

/// Files that belong to the sessions whose transcripts name them, by path. A flush learns the names
/// from the lines that it uploads, and from then on they are among the known files of the log.
#[derive(Debug, Default)]
pub struct NamedFiles(BTreeMap<RelPath, ScannedFile>);

impl NamedFiles {
    /// Adds those of the `known` files of a log to the files that a scan found.
    pub fn add_known<'a>(
        &self,
        known: impl IntoIterator<Item = &'a RelPath>,
        files: &mut Vec<ScannedFile>,
    ) {
        if self.0.is_empty() {
            return;
        }
        let known = known.into_iter().filter_map(|path| self.0.get(path));
        files.extend(known.cloned());
        files.sort_by(|a, b| a.path.cmp(&b.path));
    }
}

/// Held by a scan of the root, and by the change detection of a log with many files: each of them needs memory for
/// every file, so only one of them runs at a time in this process.
static MANY_FILES: Mutex<()> = Mutex::new(());

/// Waits until nothing else that needs memory for many files is running.
pub fn wait_for_turn() -> MutexGuard<'static, ()> {
    MANY_FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a scan keeps for the next one.
#[derive(Debug, Default)]
pub struct LogCache {
    /// The logs of files whose content has the session ID. Valid until the file changes.
    logs: HashMap<RelPath, (FileStat, LogName)>,
    /// The paths of the files. The result of the next scan shares their text.
    paths: HashSet<RelPath>,
}

impl LogCache {
    /// The path with a text that is shared.
    fn share(&mut self, path: RelPath) -> RelPath {
        if let Some(known) = self.paths.get(&path) {
            return known.clone();
        }
        self.paths.insert(path.clone());
        path
    }

    /// Drops the paths of deleted files, if there are many.
    fn drop_surplus(&mut self, count: usize) {
        if self.paths.len() > 2 * count + MAX_SURPLUS_PATHS {
            self.paths = HashSet::new();
        }
    }
}

/// Number of paths of deleted files that a cache may keep.
const MAX_SURPLUS_PATHS: usize = 1000;

/// Scans `start`, or the whole root.
pub fn scan(
    directory: &dyn Directory,
    profile: &dyn Profile,
    start: Option<&RelPath>,
) -> Result<DirectoryScan> {
    scan_cached(directory, profile, start, &mut LogCache::default())
}

/// Scans `start`, or the whole root, without reading the files that are in the cache.
pub fn scan_cached(
    directory: &dyn Directory,
    profile: &dyn Profile,
    start: Option<&RelPath>,
    cache: &mut LogCache,
) -> Result<DirectoryScan> {
    // A scan of one directory runs in the streamer's own task, which must not wait.
    let _turn = start.is_none().then(wait_for_turn);
    let mut found = DirectoryScan::default();
    let mut pending = vec![start.cloned()];
    while let Some(parent) = pending.pop() {
        let parent_name = parent
            .as_ref()
            .map_or("the agent's directory", RelPath::as_str);
        let items = match directory.list(parent.as_ref()) {
            Ok(items) => items,
            // It was removed since its parent was listed.
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound && parent.is_some() => {
                continue;
            }
            Err(cause) => {
                let error = Error::io(format!("list {parent_name}"), cause);
                // The root must be readable. An unreadable directory below it is skipped.
                let Some(parent) = parent else {
                    return Err(error);
                };
                found.skipped.push(error.to_string());
                found.unlisted.push((parent, error.to_string()));
                continue;
            }
        };
        for item in items {
            let path = match &parent {
                Some(parent) => parent.join(&item.name),
                None => item.name.parse(),
            };
            match (path, item.kind) {
                (Ok(path), ItemKind::Directory) if profile.is_scanned(&path) => {
                    pending.push(Some(path));
                }
                (Ok(path), ItemKind::File) => found.add_file(directory, profile, path, cache),
                (Ok(path), ItemKind::Link)
                    if profile.is_scanned(&path)
                        || profile.classify(&path) != FileClass::Ignored =>
                {
                    found.skipped.push(format!(
                        "{path} is a symbolic link; set --root to the real directory"
                    ));
                }
                (_, ItemKind::InvalidName) => {
                    found.skipped.push(format!(
                        "the name of {} in {parent_name} is not UTF-8",
                        item.name
                    ));
                }
                (Err(error), ItemKind::File | ItemKind::Directory) => {
                    found.skipped.push(error.to_string());
                }
                _ => {}
            }
        }
    }
    for files in found.logs.values_mut() {
        files.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    }
    cache.drop_surplus(found.logs.values().map(Vec::len).sum());
    Ok(found)
}

impl DirectoryScan {
    fn add_file(
        &mut self,
        directory: &dyn Directory,
        profile: &dyn Profile,
        path: RelPath,
        cache: &mut LogCache,
    ) {
        match scan_file(directory, profile, &path, cache) {
            Ok(Some((Some(name), file))) => {
                let files = self.logs.entry(name).or_default();
                if files.len() == files.capacity() {
                    // Less than twice as much as needed: a log can have a hundred thousand files.
                    files.reserve_exact(files.len() / 8 + 4);
                }
                files.push(file);
            }
            Ok(Some((None, file))) => {
                self.named.0.insert(path, file);
            }
            Ok(None) => {}
            Err(cause) => self.skipped.push(format!("{path}: {cause}")),
        }
    }
}

/// A file and its log; without a log if transcripts name the file.
fn scan_file(
    directory: &dyn Directory,
    profile: &dyn Profile,
    path: &RelPath,
    cache: &mut LogCache,
) -> std::io::Result<Option<(Option<LogName>, ScannedFile)>> {
    let class = profile.classify(path);
    if class == FileClass::Ignored {
        return Ok(None);
    }
    let Some(stat) = directory.stat(path)? else {
        return Ok(None);
    };
    let cached = cache.logs.get(path).filter(|(cached, _)| *cached == stat);
    let (name, kind) = match (class, cached) {
        (FileClass::Ignored, _) => return Ok(None),
        (FileClass::Stored(name, kind), _) => (Some(name), kind),
        (FileClass::NamedInTranscript(kind), _) => (None, kind),
        (FileClass::SessionInContent(_, kind, _), Some((_, name))) => (Some(name.clone()), kind),
        (FileClass::SessionInContent(_, kind, _), None) => {
            let Some((name, _)) = log_of(directory, profile, path)? else {
                return Ok(None);
            };
            cache.logs.insert(path.clone(), (stat, name.clone()));
            (Some(name), kind)
        }
    };
    let file = ScannedFile {
        path: cache.share(path.clone()),
        kind,
        stat,
    };
    Ok(Some((name, file)))
}

/// Finds the log that a file belongs to, and its kind; none if only transcripts tell.
pub fn log_of(
    directory: &dyn Directory,
    profile: &dyn Profile,
    path: &RelPath,
) -> std::io::Result<Option<(LogName, FileKind)>> {
    match profile.classify(path) {
        FileClass::Ignored | FileClass::NamedInTranscript(_) => Ok(None),
        FileClass::Stored(name, kind) => Ok(Some((name, kind))),
        FileClass::SessionInContent(key, kind, fallback) => {
            let Some(file) = directory.open(path)? else {
                return Ok(None);
            };
            let mut start = vec![0; SESSION_ID_SEARCH_BYTES];
            let len = file.read_at(&mut start, 0)?;
            start.truncate(len);
            let name =
                find_session_id(&start, key).map(|id| LogName::Session(SessionId::escape(&id)));
            // Before its first complete line, a file has no session ID yet.
            let has_line = start.contains(&b'\n') || len == SESSION_ID_SEARCH_BYTES;
            let fallback = fallback.filter(|_| has_line);
            Ok(name.or(fallback).map(|name| (name, kind)))
        }
    }
}

/// The fingerprint of paths and metadata: it changes when a file changes. Never 0, which means
/// "unknown" in a ledger.
pub fn fingerprint<'a>(files: impl Iterator<Item = (&'a RelPath, &'a FileStat)>) -> u64 {
    #[derive(Default)]
    struct Sha256Hasher(RunningHash);
    impl Hasher for Sha256Hasher {
        fn finish(&self) -> u64 {
            self.0.digest().fingerprint()
        }
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
    }
    let mut hasher = Sha256Hasher::default();
    for file in files {
        file.hash(&mut hasher);
    }
    hasher.finish().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::claude_code::ClaudeCode;
    use crate::sys::Disk;

    #[test]
    fn a_scan_groups_files_by_log_and_reports_skipped_files() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("projects/-w/s1.jsonl", "{}\n");
        put("projects/-w/s1/tool-results/a.txt", "x");
        put(
            "projects/-w/agent-1.jsonl",
            &format!("{{\"x\":\"{}\",\"sessionId\":\"s1\"}}\n", "y".repeat(100)),
        );
        put(
            "projects/-w/agent-2.jsonl",
            &format!(
                "{{\"sessionId\":\"s2\",\"x\":\"{}\"}}\n",
                "y".repeat(50_000)
            ),
        );
        put(
            "projects/-w/agent-3.jsonl",
            "{\"type\":\"summary\"}\n{\"sessionId\":\"s2\"}\n",
        );
        put("projects/-w/memory/M.md", "m");
        put("tasks/s1/1.json", "{}");
        put("plugins/p/x.jsonl", "{}\n");
        std::os::unix::fs::symlink("/etc/passwd", root.path().join("projects/-w/s3.jsonl"))
            .unwrap();
        let profile = ClaudeCode::new("claude-code".parse().unwrap());
        let found = scan(&Disk::new(root.path()), &profile, None).unwrap();
        let counts: Vec<_> = found
            .logs
            .iter()
            .map(|(name, files)| (name.to_string(), files.len()))
            .collect();
        assert_eq!(
            counts,
            [
                ("s1".to_owned(), 4),
                ("s2".to_owned(), 2),
                ("@-w".to_owned(), 1)
            ]
        );
        assert_eq!(found.skipped.len(), 1);
        assert!(
            found.skipped[0].contains("symbolic link"),
            "{:?}",
            found.skipped
        );
    }
}
