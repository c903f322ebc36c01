//! The files of the mirror, one per session.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::sys::{Disk, OpenFile, Owner};

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
    /// The agent's directory. Its owner becomes the owner of the files.
    pub data: PathBuf,
    /// The directory of the files.
    pub directory: PathBuf,
}

impl DiskFiles {
    fn path(&self, session: &str) -> PathBuf {
        self.directory.join(format!("{session}.jsonl"))
    }
}

impl MirrorFiles for DiskFiles {
    fn name(&self, session: &str) -> String {
        self.path(session).display().to_string()
    }

    fn open(&self, session: &str) -> io::Result<Option<Box<dyn OpenFile>>> {
        match File::open(self.path(session)) {
            Ok(file) => Ok(Some(Box::new(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn append(&self, session: &str, bytes: &[u8]) -> io::Result<()> {
        let owner = rustix::process::geteuid()
            .is_root()
            .then(|| Disk::new(&self.data).owner())
            .transpose()?;
        Disk::new(&self.directory).create(owner)?;
        let mut file = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(self.path(session))?;
        set_owner(&file, owner)?;
        file.write_all(bytes)
    }

    fn truncate(&self, session: &str, len: u64) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(self.path(session))?;
        file.set_len(len)
    }
}

/// Creates a file that only its owner can read, if it is missing.
pub fn create_file(path: &Path, owner: Option<Owner>) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)?;
    set_owner(&file, owner)
}

fn set_owner(file: &File, owner: Option<Owner>) -> io::Result<()> {
    owner.map_or(Ok(()), |owner| {
        std::os::unix::fs::fchown(file, Some(owner.uid), Some(owner.gid))
    })
}
