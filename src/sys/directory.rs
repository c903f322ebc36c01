//! The interface to the agent's directory. Capture, restore and the ledger access local files only
//! through it.
//!
//! The simulation implements it in memory.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::model::{FileStat, RelPath};

/// The kind of a directory item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link; never followed.
    Link,
    /// An item whose name is not UTF-8. It cannot be stored.
    InvalidName,
    /// A socket, pipe or device.
    Other,
}

/// One item of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The name.
    pub name: String,
    /// The kind.
    pub kind: ItemKind,
}

/// User and group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
}

/// The attributes of a file that a restore sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileAttributes {
    /// Permission bits.
    pub mode: u32,
    /// Modification time, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// The owner; none leaves it unchanged.
    pub owner: Option<Owner>,
}

/// A file that is open for reading. It stays the same file if another file replaces it at its path.
pub trait OpenFile: Send {
    /// Its current attributes.
    fn stat(&self) -> io::Result<FileStat>;
    /// Reads from `offset`; returns 0 at the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

/// Something other than the expected file or directory is at a path.
#[derive(Debug)]
pub struct BlockedPath {
    path: PathBuf,
    expected: &'static str,
}

impl BlockedPath {
    /// A file or a link is in the place of a directory.
    pub fn not_a_directory(path: PathBuf) -> io::Error {
        let expected = "directory";
        io::Error::new(io::ErrorKind::NotADirectory, BlockedPath { path, expected })
    }

    /// A directory or a link is in the place of a file.
    pub fn not_a_file(path: PathBuf) -> io::Error {
        let expected = "regular file";
        io::Error::new(io::ErrorKind::AlreadyExists, BlockedPath { path, expected })
    }

    /// The path, if the error has this cause.
    pub fn of(error: &io::Error) -> Option<&Path> {
        let cause = error.get_ref()?.downcast_ref::<BlockedPath>()?;
        Some(&cause.path)
    }
}

impl fmt::Display for BlockedPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not a {}", self.path.display(), self.expected)
    }
}

impl std::error::Error for BlockedPath {}

/// A directory.
///
/// # Contract
/// - Paths are below the directory. No symbolic link is followed: a write through a link fails.
/// - `replace` and `rename` are atomic: after a crash the old or the new file exists.
/// - Nothing but a durable `replace` and the `sync` methods survives a power failure for certain.
///   Sync a file before you rename it, and its name before you report it as written.
/// - Reading a missing file returns `None`, not an error.
pub trait Directory: Send + Sync + 'static {
    /// The items of a directory (`None` is the root), sorted by name; empty if it does not exist.
    fn list(&self, directory: Option<&RelPath>) -> io::Result<Vec<Item>>;
    /// The attributes of a regular file.
    fn stat(&self, path: &RelPath) -> io::Result<Option<FileStat>>;
    /// Opens a regular file for reading.
    fn open(&self, path: &RelPath) -> io::Result<Option<Box<dyn OpenFile>>>;
    /// Reads a small file.
    fn read(&self, path: &RelPath) -> io::Result<Option<Vec<u8>>>;
    /// Replaces a small file, which only its owner can read. With `durable` it survives a power
    /// failure.
    fn replace(&self, path: &RelPath, bytes: &[u8], durable: bool) -> io::Result<()>;
    /// Truncates a file that sessiond owns at `offset` and appends `bytes`. Creates it if it is
    /// missing, readable by its owner only.
    fn write_at(&self, path: &RelPath, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Sets the attributes of a file.
    fn finish(&self, path: &RelPath, attributes: &FileAttributes) -> io::Result<()>;
    /// Renames a file and replaces the target. Creates missing parent directories, owned by
    /// `owner`.
    fn rename(&self, from: &RelPath, to: &RelPath, owner: Option<Owner>) -> io::Result<()>;
    /// Removes a file or a directory with its content. Succeeds if it does not exist.
    fn remove(&self, path: &RelPath) -> io::Result<()>;
    /// Makes the content and the attributes of files durable. One call for many files costs less
    /// than a call for each.
    fn sync_files(&self, paths: &[RelPath]) -> io::Result<()>;
    /// Makes the names of files durable, after they were created or renamed.
    fn sync_names(&self, paths: &[RelPath]) -> io::Result<()>;
}
