//! Export and import of sessions as archive files.
//!
//! Owns the content of an archive, and the conversion of an archive to a log. Does not own the
//! format (`codec/archive.rs`) or restoring files (`restore`). It never accesses the agent's
//! directory.

pub mod import;

use std::io::{Read, Write};

use crate::codec::archive::{self, Manifest, Member};
use crate::error::{Error, Result};
use crate::log::ledger::FileCursor;
use crate::model::{FileKind, RelPath};
use crate::sys::{Directory, OpenFile};

/// Writes an archive of `files` in a directory. `manifest` has no files yet; the result lists them.
pub fn pack(
    directory: &dyn Directory,
    files: &[(RelPath, FileKind)],
    manifest: Manifest,
    base64: bool,
    out: impl Write,
) -> Result<Manifest> {
    let mut manifest = manifest;
    for (path, kind) in files {
        let failed = |cause| Error::io(format!("read {path}"), cause);
        let missing = || failed(std::io::ErrorKind::NotFound.into());
        let file = directory.open(path).map_err(failed)?.ok_or_else(missing)?;
        let stat = file.stat().map_err(failed)?;
        let cursor = FileCursor::read(&*file, *kind, stat.size)
            .map_err(failed)?
            .ok_or_else(missing)?;
        let (mode, mtime_ns, sha256) = (stat.mode & 0o777, stat.mtime_ns, cursor.hash.digest());
        manifest.files.push(Member {
            path: path.clone(),
            kind: *kind,
            len: stat.size,
            mode,
            mtime_ns,
            sha256,
        });
    }
    archive::write(out, base64, &manifest, |member| {
        let file = directory
            .open(&member.path)?
            .ok_or(std::io::ErrorKind::NotFound)?;
        Ok(Box::new(SequentialReader { file, offset: 0 }))
    })?;
    Ok(manifest)
}

/// Reads a file from start to end.
struct SequentialReader {
    file: Box<dyn OpenFile>,
    offset: u64,
}

impl Read for SequentialReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let got = self.file.read_at(buffer, self.offset)?;
        self.offset += got as u64;
        Ok(got)
    }
}
