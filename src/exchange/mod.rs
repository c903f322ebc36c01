//! Sessions that leave a store or come into one as a single file.
//!
//! Owns what goes into an archive and how one becomes a log. Does not own the format (`codec/archive.rs`), finding a session and
//! putting its files together (`restore`), or the agent's directory, which is never touched here.

pub mod import;

use std::io::{Read, Write};

use crate::codec::archive::{self, Manifest, Member};
use crate::error::{Error, Result};
use crate::log::ledger::FileCursor;
use crate::model::{FileKind, RelPath};
use crate::sys::{Directory, OpenFile};

/// Writes an archive of these files of a directory: everything of `manifest` but the files is known.
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
        let gone = || failed(std::io::ErrorKind::NotFound.into());
        let file = directory.open(path).map_err(failed)?.ok_or_else(gone)?;
        let stat = file.stat().map_err(failed)?;
        let cursor = FileCursor::over(&*file, *kind, stat.size)
            .map_err(failed)?
            .ok_or_else(gone)?;
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
        Ok(Box::new(Sequential { file, at: 0 }))
    })?;
    Ok(manifest)
}

/// A file from its beginning to its end.
struct Sequential {
    file: Box<dyn OpenFile>,
    at: u64,
}

impl Read for Sequential {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let got = self.file.read_at(buffer, self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}
