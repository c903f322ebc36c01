//! One sessiond per directory: a lock that the kernel lets go of when its holder dies.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::sys::{Disk, Owner, STATE_DIR};

/// Held as long as it lives.
pub struct Lock {
    _file: File,
}

/// Our directory below the agent's root.
pub fn state_dir(root: &Path) -> PathBuf {
    root.join(STATE_DIR)
}

/// Takes the lock of a root, making the directory for `owner` if it is missing.
pub fn take(root: &Path, owner: Option<Owner>) -> Result<Lock> {
    let directory = state_dir(root);
    let failed = |cause| Error::named(format!("lock {}", directory.display()), cause);
    Disk::new(root).make(owner).map_err(failed)?;
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
                "another sessiond (process {holder}) already keeps {}",
                root.display()
            ))
            .hint("sessiond status shows it; stop it first, or give --root another directory"));
        }
        Err(TryLockError::Error(cause)) => return Err(failed(cause)),
    }
    // For whoever finds it taken; not what the lock rests on.
    let _ = file
        .set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| write!(file, "{}", std::process::id()));
    Ok(Lock { _file: file })
}
