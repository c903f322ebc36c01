//! A file of a session: where it is below the root, of which kind, and what the file system says of it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::{Digest, Seq};

/// A path below the root: relative, `/` between its parts, no `.` or `..`, no control characters. A path that comes
/// from a bucket is untrusted; this type is the gate.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RelPath(String);

impl RelPath {
    /// The path as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path below `root`.
    pub fn below(&self, root: &Path) -> PathBuf {
        root.join(&self.0)
    }

    /// The parts of the path, outermost first.
    pub fn parts(&self) -> std::str::Split<'_, char> {
        self.0.split('/')
    }

    /// The directory it is in, if that is not the root itself.
    pub fn parent(&self) -> Option<RelPath> {
        self.0
            .rsplit_once('/')
            .map(|(directory, _)| RelPath(directory.to_owned()))
    }

    /// The last part.
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// The path of `name` in the directory `self`.
    pub fn join(&self, name: &str) -> Result<RelPath> {
        format!("{}/{name}", self.0).parse()
    }
}

impl FromStr for RelPath {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let refuse = |why: &str| Err(Error::corrupt(format!("read path {text:?}: {why}")));
        // PATH_MAX and NAME_MAX of Linux, less room for the root.
        if text.len() > 3000 {
            return refuse("longer than 3000 bytes");
        }
        for part in text.split('/') {
            match part {
                "" => return refuse("absolute, or a part of it is empty"),
                "." | ".." => return refuse("it leaves its directory"),
                _ if part.len() > 255 => return refuse("a part of it is longer than 255 bytes"),
                _ if part.chars().any(char::is_control) => {
                    return refuse("it holds a control character");
                }
                _ => {}
            }
        }
        Ok(RelPath(text.to_owned()))
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
        path.0
    }
}

impl fmt::Display for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// How an agent writes a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    /// Lines are appended; a cut never falls inside one.
    Append,
    /// Replaced as one.
    Whole,
}

/// What the file system says of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileStat {
    /// The device it is on.
    pub dev: u64,
    /// Its inode there: with the device, its identity.
    pub ino: u64,
    /// Length in bytes.
    pub size: u64,
    /// Time of the last change, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Permission bits.
    pub mode: u32,
}

impl FileStat {
    /// Whether it is the same file, whatever its name and content.
    pub fn same_file(&self, other: &FileStat) -> bool {
        (self.dev, self.ino) == (other.dev, other.ino)
    }
}

/// A file at a point of its log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// How the agent writes it.
    pub kind: FileKind,
    /// Length.
    pub len: u64,
    /// SHA-256 of it.
    pub sha256: Digest,
    /// Permission bits.
    pub mode: u32,
    /// Time of the last change, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// The entry that changed it last.
    pub seq: Seq,
}

/// The same with its path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathState {
    /// Path below the root.
    pub path: RelPath,
    /// What it is there.
    #[serde(flatten)]
    pub at: FileState,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_leave_the_root_are_refused() {
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
