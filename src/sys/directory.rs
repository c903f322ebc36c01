//! The agent's directory, behind a seam: everything that capture, restore and the ledger do to local files.

use std::io;

use crate::model::{FileStat, RelPath};

/// What a name in a directory stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link; never followed.
    Link,
    /// Something whose name is not UTF-8, which no entry can hold.
    Unnamed,
    /// A socket, pipe or device.
    Other,
}

/// One name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The name.
    pub name: String,
    /// What it stands for.
    pub kind: ItemKind,
}

/// User and group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// What a file gets besides its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    /// Permission bits.
    pub mode: u32,
    /// Time of the last change, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Whose it is; none leaves it to the system.
    pub owner: Option<Owner>,
}

/// A file that is open for reading. It stays the same file when its name is given to another.
pub trait OpenFile: Send {
    /// What the file system says of it now.
    fn stat(&self) -> io::Result<FileStat>;
    /// Reads from `offset`; 0 is the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

/// A directory.
///
/// # Contract
/// - Paths are below the directory and no symbolic link on the way is followed: where one stands in the way of a write,
///   the write fails.
/// - `replace` and `rename` are atomic: after a crash the old or the new file is there. `sync` makes a file and its
///   name durable.
/// - Reading what is not there is `None`, not an error.
pub trait Directory: Send + Sync + 'static {
    /// The names in a directory (`None` is the root), in order; nothing if it does not exist.
    fn list(&self, directory: Option<&RelPath>) -> io::Result<Vec<Item>>;
    /// What the file system says of a regular file.
    fn stat(&self, path: &RelPath) -> io::Result<Option<FileStat>>;
    /// Opens a regular file for reading.
    fn open(&self, path: &RelPath) -> io::Result<Option<Box<dyn OpenFile>>>;
    /// Reads a small file whole.
    fn read(&self, path: &RelPath) -> io::Result<Option<Vec<u8>>>;
    /// Puts a small file in place as one, readable by its owner alone; `durable` also survives a power cut.
    fn replace(&self, path: &RelPath, bytes: &[u8], durable: bool) -> io::Result<()>;
    /// Writes into a file of ours (made if missing, readable by its owner alone) at `offset`, cutting it there first.
    fn write_at(&self, path: &RelPath, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Sets what a file has besides its bytes, then makes it durable.
    fn finish(&self, path: &RelPath, meta: &Meta) -> io::Result<()>;
    /// Gives a file another name, making the directories on the way (owned by `owner`), replacing what is there.
    fn rename(&self, from: &RelPath, to: &RelPath, owner: Option<Owner>) -> io::Result<()>;
    /// Removes a file or a whole directory; removing what is not there is fine.
    fn remove(&self, path: &RelPath) -> io::Result<()>;
}
