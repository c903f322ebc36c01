//! Codex: `$CODEX_HOME` or `~/.codex`. Of it the rollouts alone: the databases beside them hold absolute paths and keep a
//! restored session from being resumed, and `auth.json` is a secret.

mod lines;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{FileClass, Profile, UUID, home_or, is_uuid, log_of};
use crate::model::{AgentName, FileKind, LogName, RelPath, TranscriptLine};

/// Codex's files.
pub struct Codex {
    name: AgentName,
}

impl Codex {
    /// The name of the profile.
    pub const NAME: &str = "codex";

    /// The profile, under its name.
    pub fn new(name: AgentName) -> Self {
        Codex { name }
    }
}

/// The id in `sessions/YYYY/MM/DD/rollout-<time>-<id>.jsonl`: a session's, or a sub-agent's; none for any other file.
fn thread(path: &RelPath) -> Option<&str> {
    let parts: Vec<&str> = path.parts().collect();
    let ["sessions", _, _, _, file] = parts.as_slice() else {
        return None;
    };
    let stem = file.strip_prefix("rollout-")?.strip_suffix(".jsonl")?;
    let (time, id) = stem.split_at_checked(stem.len().checked_sub(UUID)?)?;
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
        home_or(env("CODEX_HOME"), home, ".codex")
    }

    fn enter(&self, directory: &RelPath) -> bool {
        directory.parts().next() == Some("sessions") && directory.parts().count() <= 4
    }

    fn place(&self, path: &RelPath) -> FileClass {
        // The rollout of a sub-agent says in its first line which session started it.
        thread(path).map_or(FileClass::Ignore, |id| {
            FileClass::Ask("session_id", FileKind::Append, Some(log_of(id)))
        })
    }

    fn directories(&self, _name: &LogName, _known: &BTreeSet<&RelPath>) -> Vec<RelPath> {
        // Rollouts of a day lie together, whoever's they are: events and scans find new ones.
        Vec::new()
    }

    fn is_transcript(&self, path: &RelPath) -> bool {
        thread(path).is_some()
    }

    fn is_conversation(&self, path: &RelPath) -> bool {
        self.is_transcript(path)
    }

    fn line(&self, _path: &RelPath, line: &[u8]) -> Option<TranscriptLine> {
        lines::read(line)
    }

    fn project_of(&self, cwd: &Path) -> String {
        cwd.to_string_lossy().into_owned()
    }

    fn follows(&self) -> bool {
        // It looks for an id in all its directories.
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLLOUT: &str = "sessions/2026/11/16/rollout-2026-11-16T13-47-53-01a1e49d-4067-7ff3-b610-00cb4b16c4fc.jsonl";

    fn place(path: &str) -> FileClass {
        Codex::new("codex".parse().unwrap()).place(&path.parse().unwrap())
    }

    #[test]
    fn a_new_id_is_a_uuid_of_version_4() {
        let fresh = |random| Codex::new("codex".parse().unwrap()).fresh_id(random);
        assert_eq!(fresh(0), "00000000-0000-4000-8000-000000000000");
        assert_eq!(fresh(u128::MAX), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }

    #[test]
    fn a_rollout_is_kept_and_nothing_else_is() {
        let kept = FileClass::Ask(
            "session_id",
            FileKind::Append,
            "01a1e49d-4067-7ff3-b610-00cb4b16c4fc".parse().ok(),
        );
        assert_eq!(place(ROLLOUT), kept);
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
            assert_eq!(place(path), FileClass::Ignore, "{path}");
        }
        let profile = Codex::new("codex".parse().unwrap());
        let enters = |directory: &str| profile.enter(&directory.parse().unwrap());
        assert!(enters("sessions") && enters("sessions/2026/11/16"));
        assert!(!enters("skills") && !enters(".sessiond") && !enters("sessions/2026/11/16/deep"));
    }
}
