//! Claude Code and the Claude Agent SDK: `$CLAUDE_CONFIG_DIR` or `~/.claude`.

pub mod hooks;
mod lines;
pub mod settings;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::{
    DAY, FileClass, NewSessionArgs, Profile, env_or_home, is_never_stored, is_uuid,
    stored_in_session,
};
use crate::model::{
    AgentName, FileKind, LogName, ProjectId, RelPath, SessionFacts, SessionId, TranscriptLine,
};

/// Maximum length of an encoded path, as defined by Claude Code. A longer path is truncated, and a
/// hash is appended.
const MAX_ENCODED_LEN: usize = 200;

/// Days after which Claude Code deletes an unchanged session by default.
const DEFAULT_RETENTION_DAYS: u64 = 30;

/// The profile of Claude Code.
pub struct ClaudeCode {
    name: AgentName,
    /// The directory name of all projects, if the environment sets one.
    project: Option<String>,
}

impl ClaudeCode {
    /// The name of the profile.
    pub const NAME: &str = "claude-code";

    /// The profile under an agent name.
    pub fn new(name: AgentName) -> Self {
        ClaudeCode {
            name,
            project: None,
        }
    }

    /// Applies `CLAUDE_CODE_PROJECT_DIR_NAME`. As Claude Code does, it ignores the variable unless
    /// `CLAUDE_CONFIG_DIR` is set.
    #[must_use]
    pub fn with_env(self, env: &dyn Fn(&str) -> Option<PathBuf>) -> Self {
        let name = env("CLAUDE_CONFIG_DIR").and_then(|_| env("CLAUDE_CODE_PROJECT_DIR_NAME"));
        let is_valid = |name: &String| {
            name.len() <= 64
                && name
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        let project = name
            .map(|name| name.to_string_lossy().into_owned())
            .filter(is_valid);
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
        env_or_home(env("CLAUDE_CONFIG_DIR"), home, ".claude")
    }

    fn is_scanned(&self, directory: &RelPath) -> bool {
        matches!(
            directory.components().next(),
            Some("projects" | "tasks" | "file-history")
        ) && !is_never_stored(directory.name())
    }

    fn classify(&self, path: &RelPath) -> FileClass {
        let name = path.name();
        // Keys, locks, temporary files, and a cache that Claude Code can rebuild.
        if path.components().any(is_never_stored)
            || name.ends_with(".key")
            || name == "resume-head.jsonl"
            || name.starts_with(".credentials")
        {
            return FileClass::Ignored;
        }
        let kind = if name.ends_with(".jsonl") {
            FileKind::Append
        } else {
            FileKind::Whole
        };
        let parts: Vec<&str> = path.components().collect();
        match parts.as_slice() {
            ["projects", _, file] => match file.strip_suffix(".jsonl") {
                // Older versions write the transcript of a sub-agent next to the session's.
                Some(stem) if stem.starts_with("agent-") => {
                    FileClass::SessionInContent("sessionId", kind, None)
                }
                Some(stem) => stored_in_session(stem, kind),
                None => FileClass::Ignored,
            },
            ["projects", project, "memory", ..] => FileClass::Stored(
                LogName::Project(ProjectId::escape(project)),
                FileKind::Whole,
            ),
            ["projects", _, id, _, ..] => stored_in_session(id, kind),
            ["tasks" | "file-history", id, _, ..] => stored_in_session(id, FileKind::Whole),
            _ => FileClass::Ignored,
        }
    }

    fn log_directories(&self, name: &LogName, known: &BTreeSet<&RelPath>) -> Vec<RelPath> {
        let mut directories = BTreeSet::new();
        for path in known {
            let parts: Vec<&str> = path.components().collect();
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
        let parts: Vec<&str> = path.components().collect();
        matches!(parts.as_slice(), ["projects", _, file] if file.ends_with(".jsonl") && !file.starts_with("agent-"))
    }

    fn has_messages(&self, path: &RelPath) -> bool {
        path.name().ends_with(".jsonl")
    }

    fn parse_line(&self, path: &RelPath, line: &[u8]) -> Option<TranscriptLine> {
        let mut line = lines::read(line)?;
        if self.is_transcript(path) {
            line.facts.project = path.components().nth(1).map(str::to_owned);
        } else {
            line.facts = SessionFacts::default();
        }
        Some(line)
    }

    fn new_session_args(&self, id: &SessionId) -> NewSessionArgs {
        match is_uuid(id.as_str()) {
            true => NewSessionArgs::Args(vec!["--session-id".to_owned(), id.to_string()]),
            false => NewSessionArgs::InvalidId("Claude Code requires a UUID"),
        }
    }

    fn resume_args(&self, id: &SessionId) -> Vec<String> {
        vec!["--resume".to_owned(), id.to_string()]
    }

    fn project_name(&self, cwd: &Path) -> String {
        self.project
            .clone()
            .unwrap_or_else(|| encode(&cwd.to_string_lossy()))
    }

    fn transcript_path(&self, project: &str, id: &SessionId) -> Option<RelPath> {
        let path: RelPath = format!("projects/{project}/{id}.jsonl").parse().ok()?;
        self.is_transcript(&path).then_some(path)
    }

    fn is_relocatable(&self) -> bool {
        true
    }

    fn relocated_path(&self, path: &RelPath, project: &str) -> Option<RelPath> {
        let rest = path.as_str().strip_prefix("projects/")?.split_once('/')?.1;
        format!("projects/{project}/{rest}").parse().ok()
    }

    fn retention(&self, settings: &Value) -> Option<Duration> {
        let days = settings
            .get("cleanupPeriodDays")
            .and_then(Value::as_u64)
            .unwrap_or(DEFAULT_RETENTION_DAYS);
        Some(DAY * u32::try_from(days).unwrap_or(u32::MAX / 2))
    }

    fn project_log(&self, path: &RelPath) -> Option<LogName> {
        let project = path.components().nth(1)?;
        self.is_transcript(path)
            .then(|| LogName::Project(ProjectId::escape(project)))
    }
}

/// The directory name that Claude Code derives from a working directory. It cannot be decoded.
fn encode(cwd: &str) -> String {
    let units: Vec<u16> = cwd.encode_utf16().collect();
    let encode_unit = |unit: &u16| {
        char::from_u32(u32::from(*unit))
            .filter(char::is_ascii_alphanumeric)
            .unwrap_or('-')
    };
    let mut encoded: String = units.iter().map(encode_unit).collect();
    if encoded.len() > MAX_ENCODED_LEN {
        let hash = units.iter().fold(0i32, |hash, unit| {
            hash.wrapping_mul(31).wrapping_add(i32::from(*unit))
        });
        encoded.truncate(MAX_ENCODED_LEN);
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

    fn classify(path: &str) -> FileClass {
        profile().classify(&path.parse().unwrap())
    }

    #[test]
    fn each_file_belongs_to_its_log() {
        let of = |name: &str, kind| FileClass::Stored(name.parse().unwrap(), kind);
        use FileKind::{Append, Whole};
        assert_eq!(
            classify("projects/-work-app/3f2a.jsonl"),
            of("3f2a", Append)
        );
        assert_eq!(
            classify("projects/-work-app/3f2a/subagents/agent-1.jsonl"),
            of("3f2a", Append)
        );
        assert_eq!(
            classify("projects/-work-app/3f2a/subagents/agent-1.meta.json"),
            of("3f2a", Whole)
        );
        assert_eq!(
            classify("projects/-work-app/3f2a/tool-results/t1.txt"),
            of("3f2a", Whole)
        );
        assert_eq!(
            classify("projects/-work-app/3f2a/custom-title.json"),
            of("3f2a", Whole)
        );
        assert_eq!(
            classify("projects/-work-app/agent-9c.jsonl"),
            FileClass::SessionInContent("sessionId", Append, None)
        );
        assert_eq!(
            classify("projects/-work-app/memory/MEMORY.md"),
            of("@-work-app", Whole)
        );
        assert_eq!(classify("tasks/3f2a/1.json"), of("3f2a", Whole));
        assert_eq!(classify("file-history/3f2a/abc@v1"), of("3f2a", Whole));
    }

    #[test]
    fn secrets_and_temporary_files_are_not_stored() {
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
            assert_eq!(classify(path), FileClass::Ignored, "{path}");
        }
        assert!(!profile().is_scanned(&"plugins".parse().unwrap()));
        assert!(!profile().is_scanned(&".sessiond".parse().unwrap()));
    }

    #[test]
    fn files_move_to_the_directory_of_another_project() {
        let relocated = |path: &str| {
            profile()
                .relocated_path(&path.parse().unwrap(), "-x-y")
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
        let transcript = profile().transcript_path(
            &profile().project_name(Path::new("/work/app")),
            &"s1".parse().unwrap(),
        );
        assert_eq!(
            transcript.map(String::from).as_deref(),
            Some("projects/-work-app/s1.jsonl")
        );
    }

    #[test]
    fn the_environment_can_set_the_project_directory() {
        let project = |config: Option<&str>, name: &str| {
            let env = |variable: &str| match variable {
                "CLAUDE_CONFIG_DIR" => config.map(PathBuf::from),
                "CLAUDE_CODE_PROJECT_DIR_NAME" => Some(PathBuf::from(name)),
                _ => None,
            };
            profile()
                .with_env(&env)
                .project_name(Path::new("/work/app"))
        };
        assert_eq!(project(Some("/config"), "tenant_7"), "tenant_7");
        assert_eq!(project(None, "tenant_7"), "-work-app");
        assert_eq!(project(Some("/config"), "../x"), "-work-app");
    }

    #[test]
    fn claude_code_deletes_sessions_after_its_retention() {
        let days = |settings: Value| {
            profile()
                .retention(&settings)
                .map(|after| after.as_secs() / 86_400)
        };
        assert_eq!(days(Value::Null), Some(30));
        assert_eq!(
            days(serde_json::json!({"cleanupPeriodDays": 365})),
            Some(365)
        );
    }

    #[test]
    fn a_working_directory_is_encoded_as_claude_code_does() {
        assert_eq!(encode("/work/my app.v2"), "-work-my-app-v2");
        // Each UTF-16 unit becomes one dash: a character outside the basic plane has two.
        assert_eq!(encode("/ä/😀"), "-----");
        let long = format!("/{}", "a".repeat(250));
        let encoded = encode(&long);
        assert_eq!(&encoded[..201], &format!("-{}-", "a".repeat(199)));
        assert!(encoded.len() > 201 && encoded.len() < 210);
    }
}
