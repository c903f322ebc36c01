//! A temporary directory that leaves nothing behind, even if the process is killed.
//!
//! Its names exist only in this process. The bytes are in memory up to a limit, and after that in
//! one file that was unlinked when it was created. The commands that use it therefore also work on
//! a machine without a writable file system, and no plaintext of an encrypted session stays on a
//! disk.

mod content;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use content::{Content, Spill};

use super::{Directory, FileAttributes, Item, ItemKind, OpenFile, Owner, Rng};
use crate::model::{FileStat, RelPath};

/// Bytes that a scratch directory keeps in memory. Most sessions are smaller; four such directories
/// fit into the memory limit of the sidecar in `deploy/`.
const MEMORY_LIMIT: u64 = 16 << 20;

/// A temporary directory of this process.
pub struct ScratchDirectory {
    files: Mutex<BTreeMap<RelPath, ScratchFile>>,
    spill: Arc<Spill>,
}

#[derive(Clone)]
struct ScratchFile {
    content: Content,
    number: u64,
    mode: u32,
    mtime_ns: i64,
}

impl ScratchDirectory {
    /// An empty directory. Bytes above the memory limit go to the first of these directories in
    /// which a file can be created: `TMPDIR`, `/var/tmp`, `HOME`, `/dev/shm`.
    pub fn new(rng: &dyn Rng) -> ScratchDirectory {
        let mut directories = vec![std::env::temp_dir(), PathBuf::from("/var/tmp")];
        directories.extend(std::env::var_os("HOME").map(PathBuf::from));
        directories.push(PathBuf::from("/dev/shm"));
        ScratchDirectory::with_limit(MEMORY_LIMIT, directories, rng.next())
    }

    fn with_limit(limit: u64, directories: Vec<PathBuf>, random: u64) -> ScratchDirectory {
        ScratchDirectory {
            files: Mutex::default(),
            spill: Arc::new(Spill::new(limit, directories, random)),
        }
    }

    fn with_files<T>(&self, use_files: impl FnOnce(&mut BTreeMap<RelPath, ScratchFile>) -> T) -> T {
        use_files(&mut self.files.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ScratchFile {
    fn new(number: usize) -> ScratchFile {
        ScratchFile {
            content: Content::default(),
            number: number as u64,
            mode: 0o600,
            mtime_ns: 0,
        }
    }
}

impl OpenFile for ScratchFile {
    fn stat(&self) -> io::Result<FileStat> {
        Ok(FileStat {
            dev: 0,
            ino: self.number,
            size: self.content.len(),
            mtime_ns: self.mtime_ns,
            mode: self.mode,
        })
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.content.read_at(buffer, offset)
    }
}

/// The part of `path` below `directory`; none if it is not below it.
fn below<'a>(path: &'a RelPath, directory: Option<&RelPath>) -> Option<&'a str> {
    match directory {
        None => Some(path.as_str()),
        Some(directory) => path
            .as_str()
            .strip_prefix(directory.as_str())?
            .strip_prefix('/'),
    }
}

impl Directory for ScratchDirectory {
    fn list(&self, directory: Option<&RelPath>) -> io::Result<Vec<Item>> {
        let mut items = BTreeMap::new();
        self.with_files(|files| {
            for rest in files.keys().filter_map(|path| below(path, directory)) {
                match rest.split_once('/') {
                    Some((name, _)) => items.insert(name.to_owned(), ItemKind::Directory),
                    None => items.insert(rest.to_owned(), ItemKind::File),
                };
            }
        });
        let item = |(name, kind)| Item { name, kind };
        Ok(items.into_iter().map(item).collect())
    }

    fn stat(&self, path: &RelPath) -> io::Result<Option<FileStat>> {
        self.with_files(|files| files.get(path).map(OpenFile::stat).transpose())
    }

    fn open(&self, path: &RelPath) -> io::Result<Option<Box<dyn OpenFile>>> {
        let file = self.with_files(|files| files.get(path).cloned());
        Ok(file.map(|file| Box::new(file) as Box<dyn OpenFile>))
    }

    fn read(&self, path: &RelPath) -> io::Result<Option<Vec<u8>>> {
        let Some(file) = self.with_files(|files| files.get(path).cloned()) else {
            return Ok(None);
        };
        let mut bytes = vec![0; usize::try_from(file.content.len()).map_err(io::Error::other)?];
        let mut filled = 0;
        while filled < bytes.len() {
            match file.content.read_at(&mut bytes[filled..], filled as u64)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        Ok(Some(bytes))
    }

    fn replace(&self, path: &RelPath, bytes: &[u8], _durable: bool) -> io::Result<()> {
        self.write_at(path, 0, bytes)
    }

    fn write_at(&self, path: &RelPath, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.with_files(|files| {
            let number = files.len() + 1;
            let file = files
                .entry(path.clone())
                .or_insert_with(|| ScratchFile::new(number));
            file.content.write_at(&self.spill, offset, bytes)
        })
    }

    fn finish(&self, path: &RelPath, attributes: &FileAttributes) -> io::Result<()> {
        self.with_files(|files| {
            let file = files.get_mut(path).ok_or(io::ErrorKind::NotFound)?;
            (file.mode, file.mtime_ns) = (attributes.mode & 0o777, attributes.mtime_ns);
            Ok(())
        })
    }

    fn rename(&self, from: &RelPath, to: &RelPath, _owner: Option<Owner>) -> io::Result<()> {
        self.with_files(|files| {
            let file = files.remove(from).ok_or(io::ErrorKind::NotFound)?;
            files.insert(to.clone(), file);
            Ok(())
        })
    }

    fn remove(&self, path: &RelPath) -> io::Result<()> {
        self.with_files(|files| {
            files.retain(|other, _| other != path && below(other, Some(path)).is_none());
        });
        Ok(())
    }

    /// Nothing here survives the process.
    fn sync_files(&self, _paths: &[RelPath]) -> io::Result<()> {
        Ok(())
    }

    fn sync_names(&self, _paths: &[RelPath]) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rel(text: &str) -> RelPath {
        text.parse().unwrap()
    }

    #[test]
    fn bytes_above_the_limit_have_no_name_on_disk() {
        let disk = tempfile::tempdir().unwrap();
        let directories = vec![PathBuf::from("/proc"), disk.path().to_owned()];
        let scratch = ScratchDirectory::with_limit(8, directories, 1);
        let path = rel("stage/1");
        for (offset, text) in [(0, "0123456"), (7, "789abcdef"), (16, "ghi")] {
            scratch.write_at(&path, offset, text.as_bytes()).unwrap();
        }
        assert_eq!(std::fs::read_dir(disk.path()).unwrap().count(), 0);
        assert_eq!(
            scratch.read(&path).unwrap().unwrap(),
            b"0123456789abcdefghi"
        );
        let open = scratch.open(&path).unwrap().unwrap();
        scratch.write_at(&path, 3, b"rewritten").unwrap();
        assert_eq!(scratch.read(&path).unwrap().unwrap(), b"012rewritten");
        let mut before = [0; 4];
        assert_eq!(open.read_at(&mut before, 15).unwrap(), 4);
        assert_eq!(&before, b"fghi", "an open file stays the same file");
        scratch.remove(&rel("stage")).unwrap();
        assert!(scratch.list(None).unwrap().is_empty());
    }

    #[test]
    fn without_a_writable_directory_only_the_limit_fits() {
        let scratch = ScratchDirectory::with_limit(8, vec![PathBuf::from("/proc")], 1);
        scratch.write_at(&rel("a"), 0, b"01234567").unwrap();
        let error = scratch.write_at(&rel("b"), 0, b"8").unwrap_err();
        assert!(error.to_string().contains("TMPDIR"), "{error}");
        // A removed file makes room.
        scratch.remove(&rel("a")).unwrap();
        scratch.write_at(&rel("b"), 0, b"8").unwrap();
    }

    proptest! {
        #[test]
        fn a_file_holds_what_was_written(
            writes in proptest::collection::vec((0u64..40, 0usize..20), 0..30),
        ) {
            let disk = tempfile::tempdir().unwrap();
            let scratch = ScratchDirectory::with_limit(25, vec![disk.path().to_owned()], 1);
            let mut model: Vec<u8> = Vec::new();
            for (number, (offset, len)) in writes.into_iter().enumerate() {
                let offset = offset.min(model.len() as u64);
                let bytes = vec![number as u8; len];
                scratch.write_at(&rel("f"), offset, &bytes).unwrap();
                model.truncate(offset as usize);
                model.extend(bytes);
                prop_assert_eq!(&scratch.read(&rel("f")).unwrap().unwrap(), &model);
            }
        }
    }
}
