//! A temporary directory that is removed when it goes out of scope.

use std::io::ErrorKind;
use std::sync::Arc;

use super::clock::Rng;
use super::disk::Disk;

/// A directory of this process below the system's temporary directory.
pub struct ScratchDirectory {
    disk: Arc<Disk>,
}

impl ScratchDirectory {
    /// A scratch directory for `purpose`. It is created by the first write.
    pub fn new(purpose: &str, rng: &dyn Rng) -> ScratchDirectory {
        let name = format!("sessiond-{purpose}-{:016x}", rng.next());
        ScratchDirectory {
            disk: Arc::new(Disk::new(std::env::temp_dir().join(name))),
        }
    }

    /// The directory.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        let root = self.disk.root();
        if let Err(cause) = std::fs::remove_dir_all(root)
            && cause.kind() != ErrorKind::NotFound
        {
            tracing::warn!(%cause, path = %root.display(), "removing the scratch directory failed");
        }
    }
}
