//! A scan of the agent's directory: which files there are, which log each belongs to. The truth that events only hint at.

use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};

use serde_json::Value;

use crate::agent::{FileClass, Profile};
use crate::error::{Error, Result};
use crate::model::{Digest, FileKind, FileStat, LogName, RelPath, SessionId};
use crate::sys::{Directory, ItemKind};

/// A file that was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Where.
    pub path: RelPath,
    /// How the agent writes it.
    pub kind: FileKind,
    /// What the file system says of it.
    pub stat: FileStat,
}

/// What a scan found.
#[derive(Debug, Default)]
pub struct DirectoryScan {
    /// The files of each log, by path.
    pub logs: BTreeMap<LogName, Vec<Seen>>,
    /// What stands in the directory and cannot be kept, and why: for people.
    pub oddities: Vec<String>,
}

/// Files that were asked whose they are, and what they said: it holds until they change.
pub type Asked = HashMap<RelPath, (FileStat, LogName)>;

/// Scans `from` (the whole root if none).
pub fn survey(
    directory: &dyn Directory,
    profile: &dyn Profile,
    from: Option<&RelPath>,
) -> Result<DirectoryScan> {
    survey_again(directory, profile, from, &mut Asked::new())
}

/// The same, for one who scans often: files that were asked and have not changed are not asked again.
pub fn survey_again(
    directory: &dyn Directory,
    profile: &dyn Profile,
    from: Option<&RelPath>,
    asked: &mut Asked,
) -> Result<DirectoryScan> {
    let mut found = DirectoryScan::default();
    let mut open = vec![from.cloned()];
    while let Some(at) = open.pop() {
        let failed = |cause| {
            Error::io(
                format!(
                    "list {}",
                    at.as_ref().map_or("the agent's directory", RelPath::as_str)
                ),
                cause,
            )
        };
        let items = match directory.list(at.as_ref()) {
            Ok(items) => items,
            // The root itself must be readable; a directory below it may be closed to us without hiding the others.
            Err(cause) if at.is_none() => return Err(failed(cause)),
            Err(cause) => {
                found.oddities.push(failed(cause).to_string());
                continue;
            }
        };
        for item in items {
            let path = match &at {
                Some(at) => at.join(&item.name),
                None => item.name.parse(),
            };
            match (path, item.kind) {
                (Ok(path), ItemKind::Directory) if profile.enter(&path) => open.push(Some(path)),
                (Ok(path), ItemKind::File) => found.take(directory, profile, path, asked),
                (Ok(path), ItemKind::Link)
                    if profile.enter(&path) || profile.place(&path) != FileClass::Ignore =>
                {
                    found.oddities.push(format!("{path} is a symbolic link and is not followed; point --root at the real directory"));
                }
                (_, ItemKind::Unnamed) => {
                    let below = at.as_ref().map_or("the agent's directory", RelPath::as_str);
                    found
                        .oddities
                        .push(format!("{} in {below}: its name is not UTF-8", item.name));
                }
                (Err(error), ItemKind::File | ItemKind::Directory) => {
                    found.oddities.push(error.to_string())
                }
                _ => {}
            }
        }
    }
    for files in found.logs.values_mut() {
        files.sort_by(|a, b| a.path.cmp(&b.path));
    }
    Ok(found)
}

impl DirectoryScan {
    fn take(
        &mut self,
        directory: &dyn Directory,
        profile: &dyn Profile,
        path: RelPath,
        asked: &mut Asked,
    ) {
        let mut seen = || -> std::io::Result<Option<(LogName, Seen)>> {
            let place = profile.place(&path);
            if place == FileClass::Ignore {
                return Ok(None);
            }
            let Some(stat) = directory.stat(&path)? else {
                return Ok(None);
            };
            let known = asked.get(&path).filter(|(before, _)| *before == stat);
            let (name, kind) = match (place, known) {
                (FileClass::Ask(_, kind, _), Some((_, name))) => (name.clone(), kind),
                (FileClass::Ask(_, kind, _), None) => {
                    let Some((name, _)) = whose(directory, profile, &path)? else {
                        return Ok(None);
                    };
                    asked.insert(path.clone(), (stat, name.clone()));
                    (name, kind)
                }
                (FileClass::Keep(name, kind), _) => (name, kind),
                (FileClass::Ignore, _) => return Ok(None),
            };
            Ok(Some((
                name,
                Seen {
                    path: path.clone(),
                    kind,
                    stat,
                },
            )))
        };
        match seen() {
            Ok(Some((name, seen))) => self.logs.entry(name).or_default().push(seen),
            Ok(None) => {}
            Err(cause) => self.oddities.push(format!("{path}: {cause}")),
        }
    }
}

/// The log that a file belongs to, and its kind.
pub fn whose(
    directory: &dyn Directory,
    profile: &dyn Profile,
    path: &RelPath,
) -> std::io::Result<Option<(LogName, FileKind)>> {
    match profile.place(path) {
        FileClass::Ignore => Ok(None),
        FileClass::Keep(name, kind) => Ok(Some((name, kind))),
        FileClass::Ask(key, kind, otherwise) => {
            let Some(file) = directory.open(path)? else {
                return Ok(None);
            };
            // The id stands near the front of one of the first lines, which can be long.
            let mut start = vec![0; 16 << 10];
            let got = file.read_at(&mut start, 0)?;
            let said =
                session_in(&start[..got], key).map(|id| LogName::Session(SessionId::escape(&id)));
            // Nothing is said in a file that has no line yet.
            let otherwise =
                otherwise.filter(|_| start[..got].contains(&b'\n') || got == start.len());
            Ok(said.or(otherwise).map(|name| (name, kind)))
        }
    }
}

/// The text under `key` in the first line that has it, or in an object in that line; also in one that is longer than what was read.
fn session_in(start: &[u8], key: &str) -> Option<String> {
    start.split(|byte| *byte == b'\n').find_map(|line| {
        if let Ok(Value::Object(line)) = serde_json::from_slice(line) {
            let within = || line.values().find_map(|value| value.get(key));
            return line.get(key).or_else(within)?.as_str().map(str::to_owned);
        }
        let text = String::from_utf8_lossy(line);
        let behind = text.split_once(&format!("\"{key}\":\""))?.1;
        behind.split_once('"').map(|(id, _)| id.to_owned())
    })
}

/// One number for what the files of a log look like: equal as long as nothing changed.
pub fn fingerprint<'a>(files: impl Iterator<Item = (&'a RelPath, &'a FileStat)>) -> u64 {
    struct Bytes(Vec<u8>);
    impl Hasher for Bytes {
        fn finish(&self) -> u64 {
            Digest::of(&self.0).short()
        }
        fn write(&mut self, bytes: &[u8]) {
            self.0.extend_from_slice(bytes);
        }
    }
    let mut hasher = Bytes(Vec::new());
    for file in files {
        file.hash(&mut hasher);
    }
    // 0 means "unknown" in a ledger.
    hasher.finish().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::claude_code::ClaudeCode;
    use crate::sys::Disk;

    #[test]
    fn a_scan_groups_files_and_names_what_it_cannot_keep() {
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
        let found = survey(&Disk::new(root.path()), &profile, None).unwrap();
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
        assert_eq!(found.oddities.len(), 1);
        assert!(
            found.oddities[0].contains("symbolic link"),
            "{:?}",
            found.oddities
        );
    }
}
