//! The profile of Gemini CLI: `.gemini` in `$GEMINI_CLI_HOME` or in the home directory.
//!
//! Only the session files in `tmp/<project>/` are stored. Two directories with the same base name
//! are the projects `app` and `app-1`; `.project_root` tells which is which. Gemini CLI rebuilds
//! `projects.json` from these files.

mod lines;

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

/// The profile of Gemini CLI.
pub struct Gemini {
    name: AgentName,
}

impl Gemini {
    /// The name of the profile.
    pub const NAME: &str = "gemini";

    /// The profile under an agent name.
    pub fn new(name: AgentName) -> Self {
        Gemini { name }
    }
}

/// The directories of a session in `tmp/<project>/<id>/`.
const SESSION_DIRECTORIES: [&str; 3] = ["plans", "tasks", "tracker"];

/// The file in `tmp/<project>/` that has the path of the project's directory.
const PROJECT_ROOT: &str = ".project_root";

impl Profile for Gemini {
    fn name(&self) -> &AgentName {
        &self.name
    }

    fn program(&self) -> Option<&'static str> {
        Some("gemini")
    }

    fn root(&self, home: Option<&Path>, env: &dyn Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
        env_or_home(
            env("GEMINI_CLI_HOME").map(|home| home.join(".gemini")),
            home,
            ".gemini",
        )
    }

    fn is_scanned(&self, directory: &RelPath) -> bool {
        let parts: Vec<&str> = directory.components().collect();
        let is_known = match parts.as_slice() {
            ["tmp"] | ["tmp", _] => true,
            ["tmp", _, top, ..] => {
                matches!(*top, "chats" | "tool-outputs" | "memory") || is_uuid(top)
            }
            _ => false,
        };
        is_known && !is_never_stored(directory.name())
    }

    fn classify(&self, path: &RelPath) -> FileClass {
        if path.components().any(is_never_stored) {
            return FileClass::Ignored;
        }
        let parts: Vec<&str> = path.components().collect();
        match parts.as_slice() {
            // The file name has only the first eight digits of the ID; the first line has all.
            ["tmp", _, "chats", file] if is_chat(file) => {
                FileClass::SessionInContent("sessionId", FileKind::Append, None)
            }
            ["tmp", _, "chats", id, file] if is_uuid(id) && file.ends_with(".jsonl") => {
                stored_in_session(id, FileKind::Append)
            }
            ["tmp", _, "tool-outputs", directory, _, ..] => {
                match directory.strip_prefix("session-") {
                    Some(id) => stored_in_session(id, FileKind::Whole),
                    None => FileClass::Ignored,
                }
            }
            // Every session of the project needs it.
            ["tmp", _, PROJECT_ROOT] => FileClass::NamedInTranscript(FileKind::Whole),
            ["tmp", project, "memory", _, ..] => FileClass::Stored(
                LogName::Project(ProjectId::escape(project)),
                FileKind::Whole,
            ),
            ["tmp", _, id, top, _, ..] if is_uuid(id) && SESSION_DIRECTORIES.contains(top) => {
                stored_in_session(id, FileKind::Whole)
            }
            _ => FileClass::Ignored,
        }
    }

    fn log_directories(&self, name: &LogName, known: &BTreeSet<&RelPath>) -> Vec<RelPath> {
        let projects: BTreeSet<&str> = known
            .iter()
            .filter_map(|path| path.components().nth(1))
            .collect();
        let directories = |project: &str| match name {
            LogName::Project(_) => vec![format!("tmp/{project}/memory")],
            LogName::Session(id) => {
                vec![
                    format!("tmp/{project}/chats/{id}"),
                    format!("tmp/{project}/tool-outputs/session-{id}"),
                    format!("tmp/{project}/{id}"),
                ]
            }
        };
        projects
            .into_iter()
            .flat_map(directories)
            .filter_map(|directory| directory.parse().ok())
            .collect()
    }

    fn is_transcript(&self, path: &RelPath) -> bool {
        let parts: Vec<&str> = path.components().collect();
        matches!(parts.as_slice(), ["tmp", _, "chats", file] if is_chat(file))
    }

    fn has_messages(&self, path: &RelPath) -> bool {
        path.components().nth(2) == Some("chats") && path.name().ends_with(".jsonl")
    }

    fn parse_line(&self, path: &RelPath, line: &[u8]) -> Option<TranscriptLine> {
        let mut line = lines::read(line)?;
        if self.is_transcript(path) {
            let project = path.components().nth(1);
            line.facts.project = project.map(str::to_owned);
            line.named_file = project.and_then(|project| self.project_root_file(project));
        } else {
            line.facts = SessionFacts::default();
            if let Some(message) = &mut line.message {
                message.sub_agent = path.name().strip_suffix(".jsonl").map(str::to_owned);
            }
        }
        Some(line)
    }

    fn new_session_args(&self, id: &SessionId) -> NewSessionArgs {
        match is_uuid(id.as_str()) {
            true => NewSessionArgs::Args(vec!["--session-id".to_owned(), id.to_string()]),
            false => NewSessionArgs::InvalidId("Gemini CLI requires a UUID"),
        }
    }

    fn resume_args(&self, id: &SessionId) -> Vec<String> {
        vec!["--resume".to_owned(), id.to_string()]
    }

    fn project_name(&self, cwd: &Path) -> String {
        let name = cwd
            .file_name()
            .map(|name| name.to_string_lossy().to_lowercase())
            .unwrap_or_default();
        let plain: String = name
            .chars()
            .map(|letter| {
                if letter.is_ascii_alphanumeric() {
                    letter
                } else {
                    '-'
                }
            })
            .collect();
        let words: Vec<&str> = plain.split('-').filter(|word| !word.is_empty()).collect();
        if words.is_empty() {
            "project".to_owned()
        } else {
            words.join("-")
        }
    }

    fn project_root_file(&self, project: &str) -> Option<RelPath> {
        format!("tmp/{project}/{PROJECT_ROOT}").parse().ok()
    }

    fn is_relocatable(&self) -> bool {
        true
    }

    fn relocated_path(&self, path: &RelPath, project: &str) -> Option<RelPath> {
        let rest = path.as_str().strip_prefix("tmp/")?.split_once('/')?.1;
        if rest == PROJECT_ROOT {
            return None;
        }
        format!("tmp/{project}/{rest}").parse().ok()
    }

    fn retention(&self, settings: &Value) -> Option<Duration> {
        let retention = settings
            .get("general")
            .and_then(|general| general.get("sessionRetention"));
        let setting = |key: &str| retention.and_then(|retention| retention.get(key));
        if setting("enabled").and_then(Value::as_bool) == Some(false) {
            return None;
        }
        let age = setting("maxAge").and_then(Value::as_str).unwrap_or("30d");
        let (count, unit) = age.split_at_checked(age.len().checked_sub(1)?)?;
        let unit = match unit {
            "h" => DAY / 24,
            "d" => DAY,
            "w" => DAY * 7,
            "m" => DAY * 30,
            _ => return None,
        };
        unit.checked_mul(count.parse().ok()?)
    }

    fn project_log(&self, path: &RelPath) -> Option<LogName> {
        let project = path.components().nth(1)?;
        self.is_transcript(path)
            .then(|| LogName::Project(ProjectId::escape(project)))
    }
}

fn is_chat(file: &str) -> bool {
    file.starts_with("session-") && file.ends_with(".jsonl")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "ab8e5c29-79c7-46e5-a392-565ddbd51310";

    fn profile() -> Gemini {
        Gemini::new("gemini".parse().unwrap())
    }

    #[test]
    fn each_file_belongs_to_its_session_and_nothing_else_is_stored() {
        use FileKind::{Append, Whole};
        let classify = |path: &str| profile().classify(&path.replace("ID", ID).parse().unwrap());
        let of = |name: &str, kind| FileClass::Stored(name.parse().unwrap(), kind);
        assert_eq!(
            classify("tmp/work/chats/session-2026-11-16T13-47-ab8e5c29.jsonl"),
            FileClass::SessionInContent("sessionId", Append, None)
        );
        assert_eq!(classify("tmp/work/chats/ID/sub.jsonl"), of(ID, Append));
        assert_eq!(
            classify("tmp/work/tool-outputs/session-ID/shell_1.txt"),
            of(ID, Whole)
        );
        assert_eq!(classify("tmp/work/ID/plans/plan.md"), of(ID, Whole));
        assert_eq!(classify("tmp/work/memory/notes.md"), of("@work", Whole));
        assert_eq!(
            classify("tmp/work/.project_root"),
            FileClass::NamedInTranscript(Whole)
        );
        for path in [
            "oauth_creds.json",
            "google_accounts.json",
            "settings.json",
            "projects.json",
            "tmp/work/shell_history",
            "tmp/work/logs.json",
            "tmp/work/logs/session-ID.jsonl",
            "tmp/work/chats/session-x.jsonl.tmp",
            "tmp/bin/rg",
            "history/work/.git/config",
        ] {
            assert_eq!(classify(path), FileClass::Ignored, "{path}");
        }
        let is_scanned = |directory: &str| profile().is_scanned(&directory.parse().unwrap());
        assert!(
            is_scanned("tmp/work/chats")
                && !is_scanned("history")
                && !is_scanned("tmp/work/logs")
                && !is_scanned("tmp/work/checkpoints")
        );
    }

    #[test]
    fn gemini_deletes_sessions_after_its_retention() {
        let of = |settings: Value| profile().retention(&settings);
        let age =
            |age: &str| of(serde_json::json!({"general": {"sessionRetention": {"maxAge": age}}}));
        assert_eq!(
            (of(Value::Null), age("1w"), age("x")),
            (Some(DAY * 30), Some(DAY * 7), None)
        );
        assert_eq!(
            of(serde_json::json!({"general": {"sessionRetention": {"enabled": false}}})),
            None
        );
    }

    #[test]
    fn a_project_is_named_as_gemini_does() {
        assert_eq!(
            profile().project_name(Path::new("/work/My App.v2-")),
            "my-app-v2"
        );
        assert_eq!(profile().project_name(Path::new("/")), "project");
        let relocated = |path: &str| {
            profile()
                .relocated_path(&path.parse().unwrap(), "other")
                .map(String::from)
        };
        assert_eq!(
            relocated("tmp/work/chats/session-x.jsonl").as_deref(),
            Some("tmp/other/chats/session-x.jsonl")
        );
        assert_eq!(relocated("tmp/work/.project_root"), None);
        assert_eq!(
            relocated("tmp/work/tool-outputs/session-x/1.txt").as_deref(),
            Some("tmp/other/tool-outputs/session-x/1.txt")
        );
    }
}
