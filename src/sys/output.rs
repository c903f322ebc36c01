//! Writes files that the user names.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use super::atomic_file::{AtomicFile, sync_parent};
use super::directory::Owner;
use crate::error::{Error, Result};

/// Where a file that the user names is written.
enum Target {
    /// A regular file, which is created or replaced atomically.
    File(PathBuf),
    /// A device or pipe, which is opened for writing.
    Stream(File),
}

/// Writes a file, readable only by its owner: it may hold a conversation. A regular file is
/// replaced atomically; a device or pipe is written to.
pub fn write_file<T>(
    path: &Path,
    owner: Option<Owner>,
    write: impl FnOnce(&mut dyn Write) -> Result<T>,
) -> Result<T> {
    let failed = |cause| Error::user_path(format!("write {}", path.display()), cause);
    let path = match target(path).map_err(failed)? {
        Target::File(path) => path,
        Target::Stream(file) => {
            let mut out = BufWriter::new(file);
            let value = write(&mut out)?;
            out.flush().map_err(failed)?;
            return Ok(value);
        }
    };
    let mut out = BufWriter::new(AtomicFile::create(&path).map_err(failed)?);
    let value = write(&mut out)?;
    let file = out
        .into_inner()
        .map_err(|cause| failed(cause.into_error()))?;
    if let Some(owner) = owner {
        fchown(file.file(), Some(owner.uid), Some(owner.gid)).map_err(failed)?;
    }
    file.commit().map_err(failed)?;
    Ok(value)
}

/// Creates a file, durably and readable only by its owner. Fails if the path exists. A failed write
/// leaves no file.
pub fn create_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written.and_then(|()| sync_parent(path))
}

/// Follows symbolic links, including one whose target does not exist yet.
fn target(path: &Path) -> std::io::Result<Target> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => std::fs::canonicalize(path).map(Target::File),
        // The write reports the error.
        Ok(found) if found.is_dir() => Ok(Target::File(path.to_owned())),
        Ok(_) => OpenOptions::new()
            .write(true)
            .open(path)
            .map(Target::Stream),
        Err(_) => Ok(Target::File(match std::fs::read_link(path) {
            Ok(link) => path
                .parent()
                .map_or_else(|| link.clone(), |directory| directory.join(&link)),
            Err(_) => path.to_owned(),
        })),
    }
}
