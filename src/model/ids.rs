//! The names of things, each checked where it enters the program, so that a key or path made of them is safe.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The number of an entry in its log; the first is 1, and 0 means "before the first".
pub type Seq = u64;

/// Characters that are safe in an object key, a file name and a shell word.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'=')
}

fn check_plain(what: &str, text: &str, longest: usize) -> Result<()> {
    if text.is_empty() || text.len() > longest {
        return Err(Error::usage(format!(
            "{what} {text:?} must have 1 to {longest} characters"
        )));
    }
    if text.starts_with('.') || !text.bytes().all(is_plain) {
        return Err(Error::usage(format!(
            "{what} {text:?} may hold only letters, digits, '.', '_', '-' and '=', and not begin with '.'"
        )));
    }
    Ok(())
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $what:literal, $longest:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Error;
            fn from_str(text: &str) -> Result<Self> {
                check_plain($what, text, $longest)?;
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

name!(/// The tenant: the first part of every key and a column of every table.
    Namespace, "namespace", 64);
name!(/// The program whose files are kept.
    AgentName, "agent", 64);
name!(/// One conversation.
    SessionId, "session id", 200);
name!(/// One running sessiond.
    WriterId, "writer id", 64);

impl SessionId {
    /// Whether an agent's id can be the name of a file as it is.
    pub fn is_name(id: &str) -> bool {
        !id.is_empty()
            && id.len() < 128
            && id
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    }

    /// Makes an id of any file or directory name: what is not plain is written as `=` and two hex digits, so that
    /// different names stay different; a name too long for a key ends in its digest.
    pub fn escape(name: &str) -> SessionId {
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
        SessionId(if out.is_empty() { "=".to_owned() } else { out })
    }
}

/// The log of a session, or of what belongs to a project and to no session.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum LogName {
    /// One writer at a time.
    Session(SessionId),
    /// Any writer may append; the last one wins per file.
    Project(SessionId),
}

impl LogName {
    /// The id, if this is a session's log.
    pub fn session(&self) -> Option<&SessionId> {
        match self {
            LogName::Session(id) => Some(id),
            LogName::Project(_) => None,
        }
    }

    /// Whether any writer may append.
    pub fn is_project(&self) -> bool {
        matches!(self, LogName::Project(_))
    }
}

impl fmt::Display for LogName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LogName::Session(id) => write!(f, "{id}"),
            LogName::Project(name) => write!(f, "@{name}"),
        }
    }
}

impl FromStr for LogName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text.strip_prefix('@') {
            Some(name) => Ok(LogName::Project(name.parse()?)),
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

/// Where a log lives: tenant, agent and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LogId {
    /// The tenant.
    pub namespace: Namespace,
    /// The agent whose files they are.
    pub agent: AgentName,
    /// The session or project.
    pub name: LogName,
}

impl fmt::Display for LogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            LogName::Session(id) => write!(f, "session {id}"),
            LogName::Project(name) => write!(f, "project {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_their_directory_are_refused() {
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
        // The empty name and "=" are the one exception; no file is called "".
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
    fn a_log_name_survives_its_text() {
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
