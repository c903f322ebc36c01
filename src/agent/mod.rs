//! What we know of each agent: which of its files to keep, which session each belongs to, how it is written.
//!
//! Owns the names and shapes of agents' files. Does not own reading or shipping them.

pub mod claude_code;
pub mod codex;
pub mod gemini;
pub mod generic;
mod json;
pub mod opencode;
pub mod transcript;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::model::{AgentName, FileKind, LogName, RelPath, SessionId, TranscriptLine};

/// A day.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Digits and dashes of a UUID.
const UUID: usize = 36;

/// What to do with a file below the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileClass {
    /// Not ours.
    Ignore,
    /// It belongs to this log.
    Keep(LogName, FileKind),
    /// Which session it belongs to stands in its first lines, under this JSON key; if it does not, it is of this log, if any.
    Ask(&'static str, FileKind, Option<LogName>),
}

/// What we know of one agent.
///
/// # Contract
/// - `place` and `enter` are pure and say the same each time.
/// - `line` is best effort: whatever its bytes are, it never fails.
/// - What a profile does not say is not known, and nothing rests on it.
pub trait Profile: Send + Sync + 'static {
    /// The agent's name, which is part of every key.
    fn name(&self) -> &AgentName;

    /// What starts it from a shell and says its version with `--version`; none if nothing is known of that.
    fn program(&self) -> Option<&'static str> {
        None
    }

    /// The directory it keeps its files in, for a user with this home and environment.
    fn root(&self, home: Option<&Path>, env: &dyn Fn(&str) -> Option<PathBuf>) -> Option<PathBuf>;

    /// Whether a directory below the root can hold files to keep.
    fn enter(&self, directory: &RelPath) -> bool;

    /// What to do with a file.
    fn place(&self, path: &RelPath) -> FileClass;

    /// The directories below which new files of a log appear, given the files of it that are known.
    fn directories(&self, name: &LogName, known: &BTreeSet<&RelPath>) -> Vec<RelPath>;

    /// Whether this is the session's own transcript, of which there is one.
    fn is_transcript(&self, path: &RelPath) -> bool;

    /// Whether this file is read for what is said in it: the transcript, and those of sub-agents.
    fn is_conversation(&self, path: &RelPath) -> bool;

    /// What one line of such a file says; none if it cannot be read.
    fn line(&self, path: &RelPath, line: &[u8]) -> Option<TranscriptLine>;

    /// The agent's name for the project that runs in `cwd`.
    fn project_of(&self, cwd: &Path) -> String;

    /// Where the transcript of a session lies, if the agent runs in that project; none if the profile does not say.
    fn transcript(&self, _project: &str, _id: &SessionId) -> Option<RelPath> {
        None
    }

    /// Whether the agent finds a session when it runs in another directory than before, once its files have the paths that
    /// `relocated` says.
    fn follows(&self) -> bool {
        false
    }

    /// An id for a new session, in the form that the agent gives its own.
    fn fresh_id(&self, random: u128) -> String {
        let versioned = (random & !(0xf << 76) & !(0xc << 60)) | 0x4 << 76 | 0x8 << 60;
        let text = format!("{versioned:032x}");
        format!(
            "{}-{}-{}-{}-{}",
            &text[..8],
            &text[8..12],
            &text[12..16],
            &text[16..20],
            &text[20..]
        )
    }

    /// The path that a file of a session has if the agent runs in that project, whose name is the second part of it; none if
    /// its path does not say where it runs.
    fn relocated(&self, _path: &RelPath, _project: &str) -> Option<RelPath> {
        None
    }

    /// After how long without a change the agent itself deletes a session, as its `settings.json` says; none if it does not.
    fn sweeps_after(&self, _settings: &Value) -> Option<Duration> {
        None
    }

    /// The project log that goes with a session that has this file, if there is one.
    fn project_log(&self, _path: &RelPath) -> Option<LogName> {
        None
    }
}

/// A root: what a variable says, or a directory in the home.
fn home_or(said: Option<PathBuf>, home: Option<&Path>, name: &str) -> Option<PathBuf> {
    said.or_else(|| home.map(|home| home.join(name)))
}

/// Whether this is an id as most agents make them.
pub fn is_uuid(text: &str) -> bool {
    let digit = |(at, byte): (usize, u8)| {
        if matches!(at, 8 | 13 | 18 | 23) {
            byte == b'-'
        } else {
            byte.is_ascii_hexdigit()
        }
    };
    text.len() == UUID && text.bytes().enumerate().all(digit)
}

/// The log of a session.
fn log_of(id: &str) -> LogName {
    LogName::Session(SessionId::escape(id))
}

/// Kept for a session.
fn of_session(id: &str, kind: FileKind) -> FileClass {
    FileClass::Keep(log_of(id), kind)
}

/// Names that are never kept, whatever the agent: our own state, locks, and files on their way to another name.
fn is_passing(name: &str) -> bool {
    name == ".sessiond"
        || name.ends_with(".lock")
        || name == ".lock"
        || name.ends_with(".tmp")
        || name.contains(".tmp.")
}
