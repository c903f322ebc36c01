//! OpenCode: `$XDG_DATA_HOME/opencode`, where a database holds all sessions.
//!
//! What is kept is a directory of sessiond's own beside the database, in which each session is a file of lines, one a row;
//! `mirror` keeps the two in step. Tables that hold secrets are never read.

mod lines;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{FileClass, Profile, home_or, of_session};
use crate::model::{
    AgentName, FileKind, LogName, RelPath, SessionFacts, SessionId, TranscriptLine,
};

/// OpenCode's sessions.
pub struct OpenCode {
    name: AgentName,
}

impl OpenCode {
    /// The name of the profile.
    pub const NAME: &str = "opencode";

    /// The profile, under its name.
    pub fn new(name: AgentName) -> Self {
        OpenCode { name }
    }
}

/// The session of `sessions/<id>.jsonl`; none for any other file.
fn session(path: &RelPath) -> Option<&str> {
    let file = path.as_str().strip_prefix("sessions/")?;
    file.strip_suffix(".jsonl")
        .filter(|id| SessionId::is_name(id))
}

impl Profile for OpenCode {
    fn name(&self) -> &AgentName {
        &self.name
    }

    fn program(&self) -> Option<&'static str> {
        Some("opencode")
    }

    fn root(&self, home: Option<&Path>, env: &dyn Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
        home_or(
            env("XDG_DATA_HOME").map(|data| data.join("opencode")),
            home,
            ".local/share/opencode",
        )
    }

    fn enter(&self, directory: &RelPath) -> bool {
        directory.as_str() == "sessions"
    }

    fn place(&self, path: &RelPath) -> FileClass {
        session(path).map_or(FileClass::Ignore, |id| of_session(id, FileKind::Append))
    }

    fn directories(&self, _name: &LogName, _known: &BTreeSet<&RelPath>) -> Vec<RelPath> {
        // A session is one file.
        Vec::new()
    }

    fn is_transcript(&self, path: &RelPath) -> bool {
        session(path).is_some()
    }

    fn is_conversation(&self, path: &RelPath) -> bool {
        self.is_transcript(path)
    }

    fn line(&self, path: &RelPath, line: &[u8]) -> Option<TranscriptLine> {
        let (of, mut line) = lines::read(line)?;
        // The sessions of sub-agents are in the file of the one that started them.
        if let Some(of) = of.filter(|of| Some(of.as_str()) != session(path)) {
            line.facts = SessionFacts::default();
            line.mark = None;
            if let Some(message) = &mut line.message {
                message.sub_agent = Some(of);
            }
        }
        Some(line)
    }

    fn project_of(&self, cwd: &Path) -> String {
        cwd.to_string_lossy().into_owned()
    }

    fn fresh_id(&self, random: u128) -> String {
        // It takes no id without the word, and gives its own 26 letters and digits behind it.
        format!("ses_{:026x}", random >> 24)
    }

    fn transcript(&self, _project: &str, id: &SessionId) -> Option<RelPath> {
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
    fn only_what_was_made_of_the_database_is_kept() {
        let place =
            |path: &str| OpenCode::new("opencode".parse().unwrap()).place(&path.parse().unwrap());
        assert_eq!(
            place("sessions/ses_e1b6.jsonl"),
            FileClass::Keep("ses_e1b6".parse().unwrap(), FileKind::Append)
        );
        let id = OpenCode::new("opencode".parse().unwrap()).fresh_id(u128::MAX);
        assert_eq!(
            (id.len(), place(&format!("sessions/{id}.jsonl"))),
            (30, FileClass::Keep(id.parse().unwrap(), FileKind::Append))
        );
        for path in [
            "opencode.db",
            "opencode.db-wal",
            "auth.json",
            "sessions/x.tmp",
            "sessions/a/b.jsonl",
            "sessions/.jsonl",
        ] {
            assert_eq!(place(path), FileClass::Ignore, "{path}");
        }
    }
}
