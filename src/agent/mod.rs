//! Profiles: the rules for each agent's files.
//!
//! Owns the rules which files are stored and which session each belongs to, and the transcript
//! parsers. Does not own reading or uploading files.

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

/// One day.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Length of a UUID in text form.
const UUID_LEN: usize = 36;

/// Bytes at the start of a file that are searched for a session ID.
pub const SESSION_ID_SEARCH_BYTES: usize = 16 << 10;

/// The class of a file below the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileClass {
    /// The file is not stored.
    Ignored,
    /// The file belongs to this log.
    Stored(LogName, FileKind),
    /// The first lines of the file have the session ID under this JSON key. Without it, the file
    /// belongs to the given log, or is not stored.
    SessionInContent(&'static str, FileKind, Option<LogName>),
    /// The file belongs to every session whose transcript names it (`TranscriptLine::named_file`).
    NamedInTranscript(FileKind),
}

impl FileClass {
    /// How the agent writes the file; none if it is not stored.
    pub fn kind(&self) -> Option<FileKind> {
        match self {
            FileClass::Ignored => None,
            FileClass::Stored(_, kind)
            | FileClass::SessionInContent(_, kind, _)
            | FileClass::NamedInTranscript(kind) => Some(*kind),
        }
    }
}

/// How an agent's program starts a new session with a given ID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewSessionArgs {
    /// With these arguments.
    Args(Vec<String>),
    /// It cannot: the agent chooses the ID itself.
    ChosenByAgent,
    /// It cannot: the ID must have another form.
    InvalidId(&'static str),
}

/// The rules for one agent.
///
/// # Contract
/// - `classify` and `is_scanned` are pure.
/// - `parse_line` is best effort: it accepts any bytes.
/// - Callers must not depend on optional information that a profile does not provide.
pub trait Profile: Send + Sync + 'static {
    /// The agent's name, which is part of every key.
    fn name(&self) -> &AgentName;

    /// The agent's program, which prints its version with `--version`; none if unknown.
    fn program(&self) -> Option<&'static str> {
        None
    }

    /// The agent's directory for a user with this home and environment.
    fn root(&self, home: Option<&Path>, env: &dyn Fn(&str) -> Option<PathBuf>) -> Option<PathBuf>;

    /// Whether a directory below the root can contain files to store.
    fn is_scanned(&self, directory: &RelPath) -> bool;

    /// The class of a file.
    fn classify(&self, path: &RelPath) -> FileClass;

    /// The directories in which new files of a log can appear, given its known files.
    fn log_directories(&self, name: &LogName, known: &BTreeSet<&RelPath>) -> Vec<RelPath>;

    /// Whether a file is the transcript of a session, and not of a sub-agent. A session has one.
    fn is_transcript(&self, path: &RelPath) -> bool;

    /// Whether the profile knows which file is the transcript of a session.
    fn knows_transcripts(&self) -> bool {
        true
    }

    /// Whether a file is parsed: a transcript of a session or of a sub-agent.
    fn has_messages(&self, path: &RelPath) -> bool;

    /// Parses one line of a transcript; none if it cannot be parsed.
    fn parse_line(&self, path: &RelPath, line: &[u8]) -> Option<TranscriptLine>;

    /// The agent's name for the project in `cwd`.
    fn project_name(&self, cwd: &Path) -> String;

    /// The file that has the path of a project's directory, for an agent whose names of projects are
    /// not unique; none for any other agent.
    fn project_root_file(&self, _project: &str) -> Option<RelPath> {
        None
    }

    /// The path of a session's transcript in a project; none if unknown.
    fn transcript_path(&self, _project: &str, _id: &SessionId) -> Option<RelPath> {
        None
    }

    /// Whether the agent can resume a session in another working directory, once its files have
    /// their `relocated_path`.
    fn is_relocatable(&self) -> bool {
        false
    }

    /// An ID for a new session, in the agent's own form.
    fn new_session_id(&self, random: u128) -> String {
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

    /// How the agent's program starts a new session with this ID.
    fn new_session_args(&self, _id: &SessionId) -> NewSessionArgs {
        NewSessionArgs::ChosenByAgent
    }

    /// The arguments with which the agent's program resumes a session; empty if it has none.
    fn resume_args(&self, _id: &SessionId) -> Vec<String> {
        Vec::new()
    }

    /// The path of a session's file if the agent runs in another project; none if the path does not
    /// depend on the project. The project is the second component of the path.
    fn relocated_path(&self, _path: &RelPath, _project: &str) -> Option<RelPath> {
        None
    }

    /// How long after its last change the agent deletes a session, according to its `settings.json`;
    /// none if it does not delete sessions.
    fn retention(&self, _settings: &Value) -> Option<Duration> {
        None
    }

    /// The project log to restore together with a session that has this file.
    fn project_log(&self, _path: &RelPath) -> Option<LogName> {
        None
    }
}

/// The directory from the environment, or the default one in the home directory.
fn env_or_home(from_env: Option<PathBuf>, home: Option<&Path>, name: &str) -> Option<PathBuf> {
    from_env.or_else(|| home.map(|home| home.join(name)))
}

/// Whether a text is a UUID.
pub fn is_uuid(text: &str) -> bool {
    let is_valid = |(index, byte): (usize, u8)| {
        if matches!(index, 8 | 13 | 18 | 23) {
            byte == b'-'
        } else {
            byte.is_ascii_hexdigit()
        }
    };
    text.len() == UUID_LEN && text.bytes().enumerate().all(is_valid)
}

/// Finds the string under `key` in the first line that has it, at the top level or one level below.
/// The last line may be incomplete.
pub fn find_session_id(start: &[u8], key: &str) -> Option<String> {
    start.split(|byte| *byte == b'\n').find_map(|line| {
        if let Ok(Value::Object(line)) = serde_json::from_slice(line) {
            let nested = || line.values().find_map(|value| value.get(key));
            return line.get(key).or_else(nested)?.as_str().map(str::to_owned);
        }
        let text = String::from_utf8_lossy(line);
        let after_key = text.split_once(&format!("\"{key}\":\""))?.1;
        after_key.split_once('"').map(|(id, _)| id.to_owned())
    })
}

/// The log of a session.
fn session_log(id: &str) -> LogName {
    LogName::Session(SessionId::escape(id))
}

/// The class of a file that belongs to a session.
fn stored_in_session(id: &str, kind: FileKind) -> FileClass {
    FileClass::Stored(session_log(id), kind)
}

/// Names that no profile stores: the state of sessiond, locks and temporary files.
fn is_never_stored(name: &str) -> bool {
    name == ".sessiond"
        || name.ends_with(".lock")
        || name == ".lock"
        || name.ends_with(".tmp")
        || name.contains(".tmp.")
}
