//! Files of a session: their paths below the root, kinds, and attributes.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::{Digest, Seq};

/// A path below the root: relative, components separated by `/`, no `.` or `..`, no control
/// characters. Paths from a store are untrusted; parsing them into this type makes them safe. Clones
/// share the text: a session can have a hundred thousand files, and several sets hold their paths.
#[derive(
    Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(try_from = "String", into = "String")]
pub struct RelPath(Arc<str>);

impl RelPath {
    /// The path as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path below `root`.
    pub fn below(&self, root: &Path) -> PathBuf {
        root.join(&*self.0)
    }

    /// The components of the path, outermost first.
    pub fn components(&self) -> std::str::Split<'_, char> {
        self.0.split('/')
    }

    /// The parent directory, unless that is the root.
    pub fn parent(&self) -> Option<RelPath> {
        self.0
            .rsplit_once('/')
            .map(|(directory, _)| RelPath(directory.into()))
    }

    /// The last component.
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// The path of a file in the directory `self` whose name is two numbers.
    pub fn join_number(&self, first: u32, second: u32) -> RelPath {
        RelPath(format!("{}/{first}-{second:08}", self.0).into())
    }

    /// The path of `name` in the directory `self`.
    pub fn join(&self, name: &str) -> Result<RelPath> {
        format!("{}/{name}", self.0).parse()
    }
}

impl FromStr for RelPath {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let invalid = |why: &str| Err(Error::corrupt(format!("invalid path {text:?}: {why}")));
        // PATH_MAX and NAME_MAX of Linux, less room for the root.
        if text.len() > 3000 {
            return invalid("it is longer than 3000 bytes");
        }
        for component in text.split('/') {
            match component {
                "" => return invalid("it is absolute, or a component is empty"),
                "." | ".." => return invalid("\".\" and \"..\" are not allowed"),
                _ if component.len() > 255 => {
                    return invalid("a component is longer than 255 bytes");
                }
                _ if component.chars().any(char::is_control) => {
                    return invalid("it contains a control character");
                }
                _ => {}
            }
        }
        Ok(RelPath(text.into()))
    }
}

impl TryFrom<String> for RelPath {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<RelPath> for String {
    fn from(path: RelPath) -> String {
        path.0.as_ref().to_owned()
    }
}

impl fmt::Display for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// How an agent writes a file.
#[derive(
    Debug,
    Default,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    /// A transcript: the agent appends lines, and it is split only between them.
    #[default]
    Append,
    /// A side file: the agent replaces it as a whole.
    Whole,
}

impl FileKind {
    /// Whether it is a transcript.
    pub fn is_append(&self) -> bool {
        *self == FileKind::Append
    }
}

/// The attributes of a file, from `stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileStat {
    /// The device.
    pub dev: u64,
    /// The inode; with the device it identifies the file.
    pub ino: u64,
    /// Length in bytes.
    pub size: u64,
    /// Modification time, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Permission bits.
    pub mode: u32,
}

impl FileStat {
    /// Whether both are the same file, regardless of name and content.
    pub fn is_same_file(&self, other: &FileStat) -> bool {
        (self.dev, self.ino) == (other.dev, other.ino)
    }
}

/// The state of a file at a point of its log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// How the agent writes it.
    pub kind: FileKind,
    /// Length in bytes.
    pub len: u64,
    /// SHA-256 of the content.
    pub sha256: Digest,
    /// Permission bits.
    pub mode: u32,
    /// Modification time, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// The entry that changed it last.
    pub seq: Seq,
}

/// The state of a file, with its path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathState {
    /// Path below the root.
    pub path: RelPath,
    /// The state.
    #[serde(flatten)]
    pub state: FileState,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_leave_the_root_are_rejected() {
        for bad in [
            "",
            "/etc/passwd",
            "..",
            "a/../b",
            "a//b",
            "a/",
            "./a",
            "a\0b",
            "a\nb",
            "a/./b",
        ] {
            assert!(bad.parse::<RelPath>().is_err(), "{bad:?}");
        }
        let good: RelPath = "projects/-work-app/3f2a.jsonl".parse().expect("plain");
        assert_eq!(
            good.parent().map(String::from).as_deref(),
            Some("projects/-work-app")
        );
        assert_eq!(good.name(), "3f2a.jsonl");
    }
}
