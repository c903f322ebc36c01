//! Atomic replacement of a file: write a temporary file next to it, sync, rename, sync the
//! directory.
//!
//! Readers see either the old or the new file, also after a crash.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

/// The next version of a file. Dropping it without [`commit`](AtomicFile::commit) leaves the file
/// as it was.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    is_committed: bool,
}

impl AtomicFile {
    /// Starts the next version of the file at `path`. Only its owner can read it.
    pub fn create(path: &Path) -> io::Result<AtomicFile> {
        // Two processes may replace the same file at once.
        let suffix = format!("{}.new", std::process::id());
        let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        let temporary = path.with_file_name(format!(".{}.{suffix}", name.to_string_lossy()));
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits() as i32)
            .open(&temporary)?;
        Ok(AtomicFile {
            file,
            temporary,
            path: path.to_owned(),
            is_committed: false,
        })
    }

    /// The temporary file, to set its owner and mode.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Replaces the file, durably.
    pub fn commit(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.temporary, &self.path)?;
        self.is_committed = true;
        sync_parent(&self.path)
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.is_committed {
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Makes the name of a file durable.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(directory) if directory.as_os_str().is_empty() => sync_directory(Path::new(".")),
        Some(directory) => sync_directory(directory),
        None => Ok(()),
    }
}

/// Makes the names in a directory durable.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    sync_open_directory(&File::open(directory)?)
}

/// Makes the names in a directory durable, which is open for reading.
pub(super) fn sync_open_directory(directory: &File) -> io::Result<()> {
    match directory.sync_all() {
        // Some network and FUSE filesystems do not support syncing a directory; their writes are
        // synchronous.
        Err(cause) if cause.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => Ok(()),
        synced => synced,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_file_stays_until_the_commit() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a.json");
        std::fs::write(&path, "old").unwrap();
        let mut dropped = AtomicFile::create(&path).unwrap();
        dropped.write_all(b"part").unwrap();
        drop(dropped);
        let mut next = AtomicFile::create(&path).unwrap();
        next.write_all(b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        next.commit().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_filesystem_that_cannot_sync_a_directory_is_accepted() {
        let proc = Path::new("/proc");
        assert!(File::open(proc).unwrap().sync_all().is_err());
        sync_directory(proc).unwrap();
        assert!(sync_directory(Path::new("/no/such/directory")).is_err());
    }

    #[test]
    fn a_path_without_a_file_name_is_rejected() {
        assert!(AtomicFile::create(Path::new("/")).is_err());
    }
}
