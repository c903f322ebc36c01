//! The lock of an agent's root: one sessiond per root. The kernel releases it when the holder dies.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::sys::{Disk, Owner, STATE_DIR};

/// The lock of a root, until it is dropped.
pub struct RootLock {
    _file: File,
}

/// The state directory of sessiond below the agent's root.
pub fn state_dir(root: &Path) -> PathBuf {
    root.join(STATE_DIR)
}

/// Locks a root. Creates the directory, owned by `owner`, if it is missing.
pub fn lock_root(root: &Path, owner: Option<Owner>) -> Result<RootLock> {
    let directory = state_dir(root);
    let failed = |cause| Error::user_path(format!("lock {}", directory.display()), cause);
    Disk::new(root).create(owner).map_err(failed)?;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&directory)
        .map_err(failed)?;
    let path = directory.join("lock");
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let _ = file.read_to_string(&mut holder);
            let holder = holder.trim();
            return Err(Error::conflict(format!(
                "another sessiond (process {holder}) is running for {}",
                root.display()
            ))
            .hint("run \"sessiond status\" to inspect it; stop it, or pass another --root"));
        }
        Err(TryLockError::Error(cause)) => return Err(failed(cause)),
    }
    // Informational: the process ID appears in the error message of a second sessiond.
    let _ = file
        .set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| write!(file, "{}", std::process::id()));
    Ok(RootLock { _file: file })
}
