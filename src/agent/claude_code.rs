//! Claude Code and the Claude Agent SDK: `$CLAUDE_CONFIG_DIR` or `~/.claude`.

pub mod hooks;
mod lines;
pub mod settings;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::{DAY, FileClass, Profile, home_or, is_passing, of_session};
use crate::model::{
    AgentName, FileKind, LogName, RelPath, SessionFacts, SessionId, TranscriptLine,
};

/// The longest directory name that is an encoded path and nothing else; longer ones end in a hash. Claude Code's own number.
const LONGEST_ENCODED: usize = 200;

/// Sessions that were not written for so many days are deleted, unless the settings say otherwise. Claude Code's own number.
const SWEEP_DAYS: u64 = 30;

/// Claude Code's files.
pub struct ClaudeCode {
    name: AgentName,
    /// The directory of every project, if the user gave one.
    project: Option<String>,
}

impl ClaudeCode {
    /// The name of the profile.
    pub const NAME: &str = "claude-code";

    /// The profile, under its name.
    pub fn new(name: AgentName) -> Self {
        ClaudeCode {
            name,
            project: None,
        }
    }

    /// The same, where the client was told by its environment what the directory of a project is called. It takes that only where
    /// it was also told where its files are.
    #[must_use]
    pub fn told(self, env: &dyn Fn(&str) -> Option<PathBuf>) -> Self {
        let said = env("CLAUDE_CONFIG_DIR").and_then(|_| env("CLAUDE_CODE_PROJECT_DIR_NAME"));
        let plain = |name: &String| {
            name.len() <= 64
                && name
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        let project = said
            .map(|said| said.to_string_lossy().into_owned())
            .filter(plain);
        ClaudeCode { project, ..self }
    }
}

impl Profile for ClaudeCode {
    fn name(&self) -> &AgentName {
        &self.name
    }

    fn program(&self) -> Option<&'static str> {
        Some("claude")
    }

    fn root(&self, home: Option<&Path>, env: &dyn Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
        home_or(env("CLAUDE_CONFIG_DIR"), home, ".claude")
    }

    fn enter(&self, directory: &RelPath) -> bool {
        matches!(
            directory.parts().next(),
            Some("projects" | "tasks" | "file-history")
        ) && !is_passing(directory.name())
    }

    fn place(&self, path: &RelPath) -> FileClass {
        let name = path.name();
        // A key, a lock, a half-written file, or a cache that the client makes anew.
        if path.parts().any(is_passing)
            || name.ends_with(".key")
            || name == "resume-head.jsonl"
            || name.starts_with(".credentials")
        {
            return FileClass::Ignore;
        }
        let kind = if name.ends_with(".jsonl") {
            FileKind::Append
        } else {
            FileKind::Whole
        };
        let parts: Vec<&str> = path.parts().collect();
        match parts.as_slice() {
            ["projects", _, file] => match file.strip_suffix(".jsonl") {
                // Older versions keep a sub-agent's transcript beside the session's.
                Some(stem) if stem.starts_with("agent-") => FileClass::Ask("sessionId", kind, None),
                Some(stem) => of_session(stem, kind),
                None => FileClass::Ignore,
            },
            ["projects", project, "memory", ..] => FileClass::Keep(
                LogName::Project(SessionId::escape(project)),
                FileKind::Whole,
            ),
            ["projects", _, id, _, ..] => of_session(id, kind),
            ["tasks" | "file-history", id, _, ..] => of_session(id, FileKind::Whole),
            _ => FileClass::Ignore,
        }
    }

    fn directories(&self, name: &LogName, known: &BTreeSet<&RelPath>) -> Vec<RelPath> {
        let mut directories = BTreeSet::new();
        for path in known {
            let parts: Vec<&str> = path.parts().collect();
            match (name, parts.as_slice()) {
                (LogName::Project(_), ["projects", project, "memory", ..]) => {
                    directories.insert(format!("projects/{project}/memory"));
                }
                (LogName::Session(_), ["projects", project, file]) => {
                    if let Some(id) = file
                        .strip_suffix(".jsonl")
                        .filter(|stem| !stem.starts_with("agent-"))
                    {
                        directories.extend([
                            format!("projects/{project}/{id}"),
                            format!("tasks/{id}"),
                            format!("file-history/{id}"),
                        ]);
                    }
                }
                (LogName::Session(_), ["projects", project, id, _, ..]) => {
                    directories.insert(format!("projects/{project}/{id}"));
                }
                (LogName::Session(_), [top @ ("tasks" | "file-history"), id, _, ..]) => {
                    directories.insert(format!("{top}/{id}"));
                }
                _ => {}
            }
        }
        directories
            .iter()
            .filter_map(|directory| directory.parse().ok())
            .collect()
    }

    fn is_transcript(&self, path: &RelPath) -> bool {
        let parts: Vec<&str> = path.parts().collect();
        matches!(parts.as_slice(), ["projects", _, file] if file.ends_with(".jsonl") && !file.starts_with("agent-"))
    }

    fn is_conversation(&self, path: &RelPath) -> bool {
        path.name().ends_with(".jsonl")
    }

    fn line(&self, path: &RelPath, line: &[u8]) -> Option<TranscriptLine> {
        let mut line = lines::read(line)?;
        if self.is_transcript(path) {
            line.facts.project = path.parts().nth(1).map(str::to_owned);
        } else {
            line.facts = SessionFacts::default();
        }
        Some(line)
    }

    fn project_of(&self, cwd: &Path) -> String {
        self.project
            .clone()
            .unwrap_or_else(|| encode(&cwd.to_string_lossy()))
    }

    fn transcript(&self, project: &str, id: &SessionId) -> Option<RelPath> {
        let path: RelPath = format!("projects/{project}/{id}.jsonl").parse().ok()?;
        self.is_transcript(&path).then_some(path)
    }

    fn follows(&self) -> bool {
        true
    }

    fn relocated(&self, path: &RelPath, project: &str) -> Option<RelPath> {
        let rest = path.as_str().strip_prefix("projects/")?.split_once('/')?.1;
        format!("projects/{project}/{rest}").parse().ok()
    }

    fn sweeps_after(&self, settings: &Value) -> Option<Duration> {
        let days = settings
            .get("cleanupPeriodDays")
            .and_then(Value::as_u64)
            .unwrap_or(SWEEP_DAYS);
        Some(DAY * u32::try_from(days).unwrap_or(u32::MAX / 2))
    }

    fn project_log(&self, path: &RelPath) -> Option<LogName> {
        let project = path.parts().nth(1)?;
        self.is_transcript(path)
            .then(|| LogName::Project(SessionId::escape(project)))
    }
}

/// The directory name that Claude Code makes of a working directory. Lossy: never decode it.
fn encode(cwd: &str) -> String {
    let units: Vec<u16> = cwd.encode_utf16().collect();
    let plain = |unit: &u16| {
        char::from_u32(u32::from(*unit))
            .filter(char::is_ascii_alphanumeric)
            .unwrap_or('-')
    };
    let mut encoded: String = units.iter().map(plain).collect();
    if encoded.len() > LONGEST_ENCODED {
        let hash = units.iter().fold(0i32, |hash, unit| {
            hash.wrapping_mul(31).wrapping_add(i32::from(*unit))
        });
        encoded.truncate(LONGEST_ENCODED);
        encoded.push('-');
        encoded.push_str(&base36(u64::from(hash.unsigned_abs())));
    }
    encoded
}

fn base36(mut number: u64) -> String {
    let mut digits = Vec::new();
    loop {
        digits.push(char::from_digit((number % 36) as u32, 36).unwrap_or('0'));
        number /= 36;
        if number == 0 {
            return digits.into_iter().rev().collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> ClaudeCode {
        ClaudeCode::new("claude-code".parse().unwrap())
    }

    fn place(path: &str) -> FileClass {
        profile().place(&path.parse().unwrap())
    }

    #[test]
    fn each_file_finds_its_log() {
        let of = |name: &str, kind| FileClass::Keep(name.parse().unwrap(), kind);
        use FileKind::{Append, Whole};
        assert_eq!(place("projects/-work-app/3f2a.jsonl"), of("3f2a", Append));
        assert_eq!(
            place("projects/-work-app/3f2a/subagents/agent-1.jsonl"),
            of("3f2a", Append)
        );
        assert_eq!(
            place("projects/-work-app/3f2a/subagents/agent-1.meta.json"),
            of("3f2a", Whole)
        );
        assert_eq!(
            place("projects/-work-app/3f2a/tool-results/t1.txt"),
            of("3f2a", Whole)
        );
        assert_eq!(
            place("projects/-work-app/3f2a/custom-title.json"),
            of("3f2a", Whole)
        );
        assert_eq!(
            place("projects/-work-app/agent-9c.jsonl"),
            FileClass::Ask("sessionId", Append, None)
        );
        assert_eq!(
            place("projects/-work-app/memory/MEMORY.md"),
            of("@-work-app", Whole)
        );
        assert_eq!(place("tasks/3f2a/1.json"), of("3f2a", Whole));
        assert_eq!(place("file-history/3f2a/abc@v1"), of("3f2a", Whole));
    }

    #[test]
    fn what_must_never_leave_the_machine_is_ignored() {
        for path in [
            ".credentials.json",
            ".claude.json",
            "settings.local.json",
            "sessions/17.json",
            "session-env/x",
            "shell-snapshots/y.sh",
            "plugins/p/q.json",
            "backups/b",
            "history.jsonl",
            "projects/-w/3f2a/resume-head.jsonl",
            "projects/-w/3f2a.jsonl.tmp.123",
            "projects/-w/3f2a.compact.tmp.9",
            "tasks/3f2a/.lock",
            "tasks/3f2a/1.json.lock",
            "projects/-w/3f2a/id.key",
            "projects/-w/3f2a/x.tmp/file",
            ".sessiond/ledger/x.json",
        ] {
            assert_eq!(place(path), FileClass::Ignore, "{path}");
        }
        assert!(!profile().enter(&"plugins".parse().unwrap()));
        assert!(!profile().enter(&".sessiond".parse().unwrap()));
    }

    #[test]
    fn files_lie_in_their_projects_dir() {
        let relocated = |path: &str| {
            profile()
                .relocated(&path.parse().unwrap(), "-x-y")
                .map(String::from)
        };
        assert_eq!(
            relocated("projects/-w/s1.jsonl").as_deref(),
            Some("projects/-x-y/s1.jsonl")
        );
        assert_eq!(
            relocated("projects/-w/s1/tool-results/a.txt").as_deref(),
            Some("projects/-x-y/s1/tool-results/a.txt")
        );
        assert_eq!(relocated("tasks/s1/1.json"), None);
        let transcript = profile().transcript(
            &profile().project_of(Path::new("/work/app")),
            &"s1".parse().unwrap(),
        );
        assert_eq!(
            transcript.map(String::from).as_deref(),
            Some("projects/-work-app/s1.jsonl")
        );
    }

    #[test]
    fn the_directory_of_a_project_is_what_the_client_was_told() {
        let project = |config: Option<&str>, said: &str| {
            let env = |name: &str| match name {
                "CLAUDE_CONFIG_DIR" => config.map(PathBuf::from),
                "CLAUDE_CODE_PROJECT_DIR_NAME" => Some(PathBuf::from(said)),
                _ => None,
            };
            profile().told(&env).project_of(Path::new("/work/app"))
        };
        assert_eq!(project(Some("/config"), "tenant_7"), "tenant_7");
        assert_eq!(project(None, "tenant_7"), "-work-app");
        assert_eq!(project(Some("/config"), "../x"), "-work-app");
    }

    #[test]
    fn the_client_deletes_what_is_old() {
        let days = |settings: Value| {
            profile()
                .sweeps_after(&settings)
                .map(|after| after.as_secs() / 86_400)
        };
        assert_eq!(days(Value::Null), Some(30));
        assert_eq!(
            days(serde_json::json!({"cleanupPeriodDays": 365})),
            Some(365)
        );
    }

    #[test]
    fn a_working_directory_is_encoded_as_the_client_does() {
        assert_eq!(encode("/work/my app.v2"), "-work-my-app-v2");
        // One unit of UTF-16 each, so a character outside the basic plane gives two.
        assert_eq!(encode("/ä/😀"), "-----");
        let long = format!("/{}", "a".repeat(250));
        let encoded = encode(&long);
        assert_eq!(&encoded[..201], &format!("-{}-", "a".repeat(199)));
        assert!(encoded.len() > 201 && encoded.len() < 210);
    }
}
