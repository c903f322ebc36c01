//! The profile of OpenCode: `$XDG_DATA_HOME/opencode`, where one database has all sessions.
//!
//! sessiond stores a directory of its own next to the database. It has one file per session with one
//! line per row, which `mirror` keeps up to date. Tables with secrets are never read.

mod lines;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{FileClass, Profile, env_or_home, stored_in_session};
use crate::model::{
    AgentName, FileKind, LogName, RelPath, SessionFacts, SessionId, TranscriptLine,
};

/// The profile of OpenCode.
pub struct OpenCode {
    name: AgentName,
}

impl OpenCode {
    /// The name of the profile.
    pub const NAME: &str = "opencode";

    /// The profile under an agent name.
    pub fn new(name: AgentName) -> Self {
        OpenCode { name }
    }
}

/// The session ID in `sessions/<id>.jsonl`; none for any other file.
fn session_id(path: &RelPath) -> Option<&str> {
    let file = path.as_str().strip_prefix("sessions/")?;
    file.strip_suffix(".jsonl")
        .filter(|id| SessionId::is_file_name(id))
}

impl Profile for OpenCode {
    fn name(&self) -> &AgentName {
        &self.name
    }

    fn program(&self) -> Option<&'static str> {
        Some("opencode")
    }

    fn root(&self, home: Option<&Path>, env: &dyn Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
        env_or_home(
            env("XDG_DATA_HOME").map(|data| data.join("opencode")),
            home,
            ".local/share/opencode",
        )
    }

    fn is_scanned(&self, directory: &RelPath) -> bool {
        directory.as_str() == "sessions"
    }

    fn classify(&self, path: &RelPath) -> FileClass {
        session_id(path).map_or(FileClass::Ignored, |id| {
            stored_in_session(id, FileKind::Append)
        })
    }

    fn log_directories(&self, _name: &LogName, _known: &BTreeSet<&RelPath>) -> Vec<RelPath> {
        // A session has one file.
        Vec::new()
    }

    fn is_transcript(&self, path: &RelPath) -> bool {
        session_id(path).is_some()
    }

    fn has_messages(&self, path: &RelPath) -> bool {
        self.is_transcript(path)
    }

    fn parse_line(&self, path: &RelPath, line: &[u8]) -> Option<TranscriptLine> {
        let (session, mut line) = lines::read(line)?;
        // The sessions of sub-agents are in the file of the session that started them.
        if let Some(sub_agent) = session.filter(|id| Some(id.as_str()) != session_id(path)) {
            line.facts = SessionFacts::default();
            line.boundary = None;
            if let Some(message) = &mut line.message {
                message.sub_agent = Some(sub_agent);
            }
        }
        Some(line)
    }

    fn resume_args(&self, id: &SessionId) -> Vec<String> {
        vec!["--session".to_owned(), id.to_string()]
    }

    fn project_name(&self, cwd: &Path) -> String {
        cwd.to_string_lossy().into_owned()
    }

    fn new_session_id(&self, random: u128) -> String {
        // OpenCode requires the prefix; its own IDs have 26 letters and digits after it.
        format!("ses_{:026x}", random >> 24)
    }

    fn transcript_path(&self, _project: &str, id: &SessionId) -> Option<RelPath> {
        format!("sessions/{id}.jsonl")
            .parse()
            .ok()
            .filter(|path| self.is_transcript(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_mirrored_files_are_stored() {
        let classify = |path: &str| {
            OpenCode::new("opencode".parse().unwrap()).classify(&path.parse().unwrap())
        };
        assert_eq!(
            classify("sessions/ses_e1b6.jsonl"),
            FileClass::Stored("ses_e1b6".parse().unwrap(), FileKind::Append)
        );
        let id = OpenCode::new("opencode".parse().unwrap()).new_session_id(u128::MAX);
        assert_eq!(
            (id.len(), classify(&format!("sessions/{id}.jsonl"))),
            (30, FileClass::Stored(id.parse().unwrap(), FileKind::Append))
        );
        for path in [
            "opencode.db",
            "opencode.db-wal",
            "auth.json",
            "sessions/x.tmp",
            "sessions/a/b.jsonl",
            "sessions/.jsonl",
        ] {
            assert_eq!(classify(path), FileClass::Ignored, "{path}");
        }
    }
}
