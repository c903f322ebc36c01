//! The system calls of the file store: temporary files, exclusive renames, durable directories.
//!
//! Owns single system calls. Does not own their order, which makes a write atomic and durable
//! (`objects`). `sys::AtomicFile` is not used: a create must fail if the key exists, so it links a
//! temporary file to the key instead of renaming it.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::sys::atomic_file::sync_directory;
use crate::sys::{Clock, Rng, SystemClock, SystemRng};

/// The directory for temporary files, which are later renamed or linked to their keys. Its
/// existence also distinguishes a mounted store from an empty mount point.
pub(super) const TEMP_DIR: &str = ".tmp";

/// The file with the random ID of the store, written once. A directory that was emptied and
/// recreated is another store, so a process must not apply its cached state of the old store to it.
pub(super) const STORE_ID_FILE: &str = ".store-id";

/// Age at which a temporary file counts as left over from a process that died: a write takes
/// seconds.
pub(super) const STALE: Duration = Duration::from_secs(24 * 60 * 60);

/// A file that has no final name yet; deleted when dropped.
pub(super) struct TempFile {
    pub(super) path: PathBuf,
    is_kept: bool,
}

impl TempFile {
    pub(super) fn write(directory: &Path, body: &[u8]) -> io::Result<TempFile> {
        let path = directory.join(format!(
            "{:016x}{:016x}",
            SystemRng.next(),
            SystemRng.next()
        ));
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        let temp = TempFile {
            path,
            is_kept: false,
        };
        file.write_all(body)?;
        file.sync_all()?;
        Ok(temp)
    }

    /// Does not delete the file on drop, because it was renamed.
    pub(super) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.is_kept {
            // An error is expected after an exclusive rename. A file that stays is deleted when the
            // store is opened a day later.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Creates `directory` and its missing parents, durably.
pub(super) fn make_dirs(directory: &Path) -> io::Result<()> {
    let missing: Vec<&Path> = directory
        .ancestors()
        .take_while(|part| !part.exists())
        .collect();
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    missing
        .into_iter()
        .filter_map(Path::parent)
        .try_for_each(sync_directory)
}

pub(super) fn rename_exclusive(from: &Path, to: &Path) -> io::Result<()> {
    Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

pub(super) fn lacks_hard_links(cause: &io::Error) -> bool {
    let lacking = [
        Errno::PERM,
        Errno::OPNOTSUPP,
        Errno::NOTSUP,
        Errno::MLINK,
        Errno::NOSYS,
    ];
    cause
        .raw_os_error()
        .is_some_and(|code| lacking.iter().any(|errno| errno.raw_os_error() == code))
}

pub(super) fn is_missing(cause: &io::Error) -> bool {
    matches!(cause.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Deletes the temporary files of processes that died.
pub(super) fn delete_stale_files(temp: &Path) {
    let Ok(entries) = fs::read_dir(temp) else {
        return;
    };
    for entry in entries.flatten() {
        let modified = entry.metadata().and_then(|found| found.modified());
        let age = modified.ok().and_then(|modified| {
            SystemTime::from(SystemClock.now())
                .duration_since(modified)
                .ok()
        });
        if age.is_some_and(|age| age > STALE) {
            // Best effort: another process may delete the same files.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exclusive_rename_replaces_nothing() {
        let directory = tempfile::tempdir().expect("directory");
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        fs::write(&from, b"new").expect("write");
        rename_exclusive(&from, &to).expect("first");
        fs::write(&from, b"newer").expect("write");
        assert_eq!(
            rename_exclusive(&from, &to).expect_err("second").kind(),
            ErrorKind::AlreadyExists
        );
        assert_eq!(fs::read(&to).expect("read"), b"new");
    }
}
