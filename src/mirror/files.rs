//! The files of the mirror, one per session.

use std::io;

use crate::model::RelPath;
use crate::sys::{Directory, Disk, OpenFile};

/// The files of the mirror. Disk files implement it; the simulation does so in memory.
pub trait MirrorFiles: Send + Sync {
    /// The name of a session's file in messages.
    fn name(&self, session: &str) -> String;
    /// Opens the file of a session; none if there is none.
    fn open(&self, session: &str) -> io::Result<Option<Box<dyn OpenFile>>>;
    /// Appends to the file of a session. Creates it if it is missing.
    fn append(&self, session: &str, bytes: &[u8]) -> io::Result<()>;
    /// Truncates the file of a session.
    fn truncate(&self, session: &str, len: u64) -> io::Result<()>;
}

/// Files in a directory on disk.
pub struct DiskFiles {
    /// The directory of the mirror.
    pub directory: Disk,
}

impl DiskFiles {
    fn path(&self, session: &str) -> io::Result<RelPath> {
        let path = format!("sessions/{session}.jsonl").parse();
        path.map_err(io::Error::other)
    }
}

impl MirrorFiles for DiskFiles {
    fn name(&self, session: &str) -> String {
        let path = format!("sessions/{session}.jsonl");
        self.directory.root().join(path).display().to_string()
    }

    fn open(&self, session: &str) -> io::Result<Option<Box<dyn OpenFile>>> {
        self.directory.open(&self.path(session)?)
    }

    fn append(&self, session: &str, bytes: &[u8]) -> io::Result<()> {
        self.directory.append(&self.path(session)?, bytes)
    }

    fn truncate(&self, session: &str, len: u64) -> io::Result<()> {
        self.directory.write_at(&self.path(session)?, len, &[])
    }
}
