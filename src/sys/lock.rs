//! The lock of an agent's root: one sessiond per root. The kernel releases it when the holder dies.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::model::RelPath;
use crate::sys::{Disk, STATE_DIR};

/// Maximum length of the process ID in the lock file, which the agent may have changed.
const MAX_HOLDER_LEN: u64 = 20;

/// The lock of a root, until it is dropped.
pub struct RootLock {
    _file: File,
}

/// The state directory of sessiond below the agent's root.
pub fn state_dir(root: &Path) -> PathBuf {
    root.join(STATE_DIR)
}

/// The path of a file in the state directory, below the root.
pub fn state_file(name: &str) -> Result<RelPath> {
    format!("{STATE_DIR}/{name}").parse()
}

/// Locks a root. Creates the directory if it is missing.
pub fn lock_root(disk: &Disk) -> Result<RootLock> {
    let failed = |cause| {
        let directory = state_dir(disk.root());
        Error::user_path(format!("lock {}", directory.display()), cause)
    };
    let mut file = disk.open_or_create(&state_file("lock")?).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = Vec::new();
            let _ = file.take(MAX_HOLDER_LEN).read_to_end(&mut holder);
            let holder = String::from_utf8_lossy(&holder);
            let holder = holder.trim();
            return Err(Error::conflict(format!(
                "another sessiond (process {holder}) is running for {}",
                disk.root().display()
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
