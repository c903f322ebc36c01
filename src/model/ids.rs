//! Identifiers. Each is validated when it is parsed, so that keys and paths built from them are
//! safe.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The number of an entry in its log. The first is 1; 0 means "before the first".
pub type Seq = u64;

/// Whether a character is safe in an object key, a file name and a shell word.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'=')
}

fn validate(what: &str, text: &str, max_len: usize) -> Result<()> {
    if text.is_empty() || text.len() > max_len {
        return Err(Error::usage(format!(
            "invalid {what} {text:?}: it must have 1 to {max_len} characters"
        )));
    }
    if text.starts_with('.') || !text.bytes().all(is_plain) {
        return Err(Error::usage(format!(
            "invalid {what} {text:?}: only letters, digits, '.', '_', '-' and '=' are allowed, \
             and no '.' at the start"
        )));
    }
    Ok(())
}

macro_rules! identifier {
    ($(#[$doc:meta])* $name:ident, $what:literal, $max_len:literal) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
        )]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The ID as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Error;
            fn from_str(text: &str) -> Result<Self> {
                validate($what, text, $max_len)?;
                Ok($name(text.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(text: String) -> Result<Self> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

identifier!(/// A tenant: the first component of every key and a column of every table.
    Namespace, "namespace", 64);
identifier!(/// The program whose conversations are stored.
    AgentName, "agent", 64);
identifier!(/// One conversation.
    SessionId, "session ID", 200);
identifier!(/// The agent's name for the directory it works in, escaped.
    ProjectId, "project ID", 200);
identifier!(/// One sessiond process that writes to a log.
    WriterId, "writer ID", 64);

impl SessionId {
    /// Whether an agent's ID can be used as a file name without escaping.
    pub fn is_file_name(id: &str) -> bool {
        !id.is_empty()
            && id.len() < 128
            && id
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    }

    /// Makes an ID of any file or directory name.
    pub fn escape(name: &str) -> SessionId {
        SessionId(escape(name))
    }
}

impl ProjectId {
    /// Makes an ID of any file or directory name.
    pub fn escape(name: &str) -> ProjectId {
        ProjectId(escape(name))
    }
}

/// Writes unsafe bytes as `=` and two hex digits, so that different names stay different. A name
/// that is too long for a key ends in its digest.
pub(super) fn escape(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for (at, byte) in name.bytes().enumerate() {
        if is_plain(byte) && byte != b'=' && !(at == 0 && byte == b'.') {
            out.push(byte as char);
        } else {
            out.push_str(&format!("={byte:02X}"));
        }
    }
    if out.len() > 160 {
        let digest = crate::model::Digest::of(name.as_bytes()).to_string();
        out.truncate(120);
        out.push_str("==");
        out.push_str(&digest[..32]);
    }
    if out.is_empty() { "=".to_owned() } else { out }
}

/// The name of a log: that of a session, or of the files that belong to a project.
#[derive(
    Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(try_from = "String", into = "String")]
pub enum LogName {
    /// A session has one writer at a time.
    Session(SessionId),
    /// Any writer may append to a project; the last writer of a file wins.
    Project(ProjectId),
}

impl LogName {
    /// The session ID, if it is the log of a session.
    pub fn session(&self) -> Option<&SessionId> {
        match self {
            LogName::Session(id) => Some(id),
            LogName::Project(_) => None,
        }
    }

    /// A description of the log, such as `session 3f2a`.
    pub fn description(&self) -> String {
        match self {
            LogName::Session(id) => format!("session {id}"),
            LogName::Project(id) => format!("project {id}"),
        }
    }

    /// Whether it is the log of a project.
    pub fn is_project(&self) -> bool {
        matches!(self, LogName::Project(_))
    }
}

impl fmt::Display for LogName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LogName::Session(id) => write!(f, "{id}"),
            LogName::Project(id) => write!(f, "@{id}"),
        }
    }
}

impl FromStr for LogName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text.strip_prefix('@') {
            Some(id) => Ok(LogName::Project(id.parse()?)),
            None => Ok(LogName::Session(text.parse()?)),
        }
    }
}

impl TryFrom<String> for LogName {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<LogName> for String {
    fn from(name: LogName) -> String {
        name.to_string()
    }
}

/// The full identity of a log: namespace, agent and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LogId {
    /// The namespace.
    pub namespace: Namespace,
    /// The agent.
    pub agent: AgentName,
    /// The session or project.
    pub name: LogName,
}

impl LogId {
    /// Checks that an object at `key` was written for this log, and not copied from another one.
    pub fn check_owner(&self, key: &str, owner: &LogId) -> Result<()> {
        if self == owner {
            return Ok(());
        }
        Err(Error::corrupt(format!(
            "it belongs to {owner} of agent {} in namespace {}",
            owner.agent, owner.namespace
        ))
        .context(format_args!("read {key}")))
    }
}

impl fmt::Display for LogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name.description())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_could_leave_their_directory_are_rejected() {
        for bad in ["", "..", ".hidden", "a/b", "a b", "ä", "@x", "a\0"] {
            assert!(bad.parse::<SessionId>().is_err(), "{bad:?}");
        }
        assert!("3f2a-11".parse::<SessionId>().is_ok());
    }

    #[test]
    fn escaping_keeps_different_names_different() {
        let names = ["a b", "a=20b", "a_b", ".a", "a", "ä", "", "="];
        let escaped: std::collections::BTreeSet<_> =
            names.iter().map(|name| SessionId::escape(name)).collect();
        // Only the empty name and "=" collide; no file has an empty name.
        assert!(escaped.len() >= names.len() - 1);
        for id in escaped {
            assert!(id.as_str().parse::<SessionId>().is_ok(), "{id}");
        }
        let long = "x".repeat(4000);
        assert!(
            SessionId::escape(&long)
                .as_str()
                .parse::<SessionId>()
                .is_ok()
        );
    }

    #[test]
    fn a_log_name_round_trips_through_its_text() {
        for text in ["abc", "@-work-app"] {
            assert_eq!(
                text.parse::<LogName>()
                    .map(|name| name.to_string())
                    .ok()
                    .as_deref(),
                Some(text)
            );
        }
    }
}
