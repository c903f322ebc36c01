//! The profile of Codex: `$CODEX_HOME` or `~/.codex`.
//!
//! Only the rollouts are stored. The databases next to them contain absolute paths that prevent
//! Codex from resuming a restored session, and `auth.json` is a secret.

mod lines;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{FileClass, Profile, UUID_LEN, env_or_home, is_uuid, session_log};
use crate::model::{AgentName, FileKind, LogName, RelPath, SessionId, TranscriptLine};

/// The profile of Codex.
pub struct Codex {
    name: AgentName,
}

impl Codex {
    /// The name of the profile.
    pub const NAME: &str = "codex";

    /// The profile under an agent name.
    pub fn new(name: AgentName) -> Self {
        Codex { name }
    }
}

/// The ID in `sessions/YYYY/MM/DD/rollout-<time>-<id>.jsonl`, of a session or a sub-agent; none for
/// any other file.
fn thread_id(path: &RelPath) -> Option<&str> {
    let parts: Vec<&str> = path.components().collect();
    let ["sessions", _, _, _, file] = parts.as_slice() else {
        return None;
    };
    let stem = file.strip_prefix("rollout-")?.strip_suffix(".jsonl")?;
    let (time, id) = stem.split_at_checked(stem.len().checked_sub(UUID_LEN)?)?;
    (time.ends_with('-') && is_uuid(id)).then_some(id)
}

impl Profile for Codex {
    fn name(&self) -> &AgentName {
        &self.name
    }

    fn program(&self) -> Option<&'static str> {
        Some("codex")
    }

    fn root(&self, home: Option<&Path>, env: &dyn Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
        env_or_home(env("CODEX_HOME"), home, ".codex")
    }

    fn is_scanned(&self, directory: &RelPath) -> bool {
        directory.components().next() == Some("sessions") && directory.components().count() <= 4
    }

    fn classify(&self, path: &RelPath) -> FileClass {
        // The first line of a sub-agent's rollout has the ID of its session.
        thread_id(path).map_or(FileClass::Ignored, |id| {
            FileClass::SessionInContent("session_id", FileKind::Append, Some(session_log(id)))
        })
    }

    fn log_directories(&self, _name: &LogName, _known: &BTreeSet<&RelPath>) -> Vec<RelPath> {
        // All sessions share the directories. Events and scans find new rollouts.
        Vec::new()
    }

    fn is_transcript(&self, path: &RelPath) -> bool {
        thread_id(path).is_some()
    }

    fn has_messages(&self, path: &RelPath) -> bool {
        self.is_transcript(path)
    }

    fn parse_line(&self, _path: &RelPath, line: &[u8]) -> Option<TranscriptLine> {
        lines::read(line)
    }

    fn resume_args(&self, id: &SessionId) -> Vec<String> {
        vec!["resume".to_owned(), id.to_string()]
    }

    fn project_name(&self, cwd: &Path) -> String {
        cwd.to_string_lossy().into_owned()
    }

    fn is_relocatable(&self) -> bool {
        // Codex searches all its directories for an ID.
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLLOUT: &str = "sessions/2026/11/16/rollout-2026-11-16T13-47-53-01a1e49d-4067-7ff3-b610-00cb4b16c4fc.jsonl";

    fn classify(path: &str) -> FileClass {
        Codex::new("codex".parse().unwrap()).classify(&path.parse().unwrap())
    }

    #[test]
    fn a_new_id_is_a_uuid_of_version_4() {
        let fresh = |random| Codex::new("codex".parse().unwrap()).new_session_id(random);
        assert_eq!(fresh(0), "00000000-0000-4000-8000-000000000000");
        assert_eq!(fresh(u128::MAX), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }

    #[test]
    fn only_rollouts_are_stored() {
        let stored = FileClass::SessionInContent(
            "session_id",
            FileKind::Append,
            "01a1e49d-4067-7ff3-b610-00cb4b16c4fc".parse().ok(),
        );
        assert_eq!(classify(ROLLOUT), stored);
        for path in [
            "auth.json",
            "config.toml",
            "state_5.sqlite",
            "state_5.sqlite-wal",
            "history.jsonl",
            "logs_2.sqlite",
            "thread_history_1.sqlite",
            "sessions/2026/11/16/rollout-2026-11-16T13-47-53.jsonl",
            "sessions/2026/11/16/rollout-é1a1e49d-4067-7ff3-b610-00cb4b16c4fc.jsonl",
            "sessions/2026/11/16/rollout-x-01a1e49d-4067-7ff3-b610-00cb4b16c4fc.jsonl.tmp",
            "sessions/2026/11/16/notes.md",
            "archived_sessions/rollout-2026-11-16T13-47-53-01a1e49d-4067-7ff3-b610-00cb4b16c4fc.jsonl",
        ] {
            assert_eq!(classify(path), FileClass::Ignored, "{path}");
        }
        let profile = Codex::new("codex".parse().unwrap());
        let is_scanned = |directory: &str| profile.is_scanned(&directory.parse().unwrap());
        assert!(is_scanned("sessions") && is_scanned("sessions/2026/11/16"));
        assert!(
            !is_scanned("skills")
                && !is_scanned(".sessiond")
                && !is_scanned("sessions/2026/11/16/deep")
        );
    }
}
