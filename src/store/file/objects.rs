//! The blocking operations of the file store.
//!
//! Owns the mapping of keys to files, and the order of system calls that makes an acknowledged
//! write atomic and durable. Does not own the system calls (`disk`).

use std::collections::{BinaryHeap, HashSet};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use jiff::Timestamp;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::disk::{
    STORE_ID_FILE, TEMP_DIR, TempFile, is_missing, lacks_hard_links, rename_exclusive,
};
use crate::error::{Error, Result};
use crate::model::keys;
use crate::store::{CreateOutcome, ListPage, Object, check_len};
use crate::sys::atomic_file::sync_directory;

/// Maximum number of objects in a page, by contract.
const MAX_PAGE: usize = 1000;

/// Maximum length of a name on common filesystems.
const MAX_NAME_LEN: usize = 255;

/// Maximum number of attempts to write into a directory that concurrent deletes remove.
const MAX_ATTEMPTS: usize = 16;

/// Maximum number of directories that are known to be durable. Discarding them only costs some
/// additional fsyncs.
const MAX_DURABLE_DIRS: usize = 4096;

/// The directory of a file store.
#[derive(Debug)]
pub(super) struct ObjectDirectory {
    pub(super) root: PathBuf,
    /// The store's ID when it was opened.
    store_id: Vec<u8>,
    /// Directories that are known to be durable, with all their parents.
    durable_dirs: Mutex<HashSet<PathBuf>>,
}

impl ObjectDirectory {
    pub(super) fn new(root: PathBuf, store_id: Vec<u8>) -> Self {
        ObjectDirectory {
            root,
            store_id,
            durable_dirs: Mutex::new(HashSet::new()),
        }
    }

    /// Checks that the directory is still the store that was opened. An unmounted store must not
    /// appear as an empty one.
    pub(super) fn check_identity(&self) -> Result<()> {
        match fs::read(self.root.join(STORE_ID_FILE)) {
            Ok(store_id) if store_id == self.store_id => Ok(()),
            _ => Err(Error::unavailable(format!(
                "the store in {} no longer exists, or another store replaced it",
                self.root.display()
            ))
            .hint("check that the disk of the store is mounted; if you recreated the store, restart sessiond to upload everything again")),
        }
    }

    pub(super) fn path(&self, key: &str) -> Result<PathBuf> {
        check_key(key)?;
        Ok(self.root.join(key))
    }

    pub(super) fn create(&self, path: &Path, body: &[u8]) -> Result<CreateOutcome> {
        let temp = self.write_temp(body)?;
        let committed = self.commit_in_parent(path, || match fs::hard_link(&temp.path, path) {
            Err(cause) if lacks_hard_links(&cause) => rename_exclusive(&temp.path, path),
            linked => linked,
        });
        match committed {
            Ok(()) => {}
            // `AlreadyExists` guarantees that the object can be read, so a directory with this name
            // is an error.
            Err(cause) if cause.kind() == ErrorKind::AlreadyExists && !path.is_dir() => {
                // The other writer may not have synced the directory yet, and this result must be
                // durable.
                self.sync_parent(path)?;
                return Ok(CreateOutcome::AlreadyExists);
            }
            Err(cause)
                if cause.kind() == ErrorKind::Unsupported
                    || cause.raw_os_error() == Some(Errno::INVAL.raw_os_error()) =>
            {
                return Err(Error::usage(format!(
                    "the filesystem supports neither hard links nor exclusive renames ({cause})"
                ))
                .hint("use another filesystem or an S3 store"));
            }
            Err(cause) => return Err(commit_error(path, cause)),
        }
        drop(temp);
        self.sync_parent(path)?;
        Ok(CreateOutcome::Created)
    }

    pub(super) fn put(&self, path: &Path, body: &[u8]) -> Result<()> {
        let temp = self.write_temp(body)?;
        self.commit_in_parent(path, || fs::rename(&temp.path, path))
            .map_err(|cause| commit_error(path, cause))?;
        temp.keep();
        self.sync_parent(path)
    }

    pub(super) fn get(&self, key: &str, path: &Path) -> Result<Option<Bytes>> {
        // Without this flag, opening a named pipe would block forever.
        let open = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(path);
        let file = match open {
            Ok(file) => file,
            Err(cause) if is_missing(&cause) => return self.check_identity().map(|()| None),
            Err(cause) => return Err(Error::io(format!("open {}", path.display()), cause)),
        };
        let failed = |cause| Error::io(format!("read {}", path.display()), cause);
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Ok(None);
        }
        check_len(key, metadata.len())?;
        let mut body = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
        // The file may grow while it is read.
        file.take(keys::max_object_len(key) + 1)
            .read_to_end(&mut body)
            .map_err(failed)?;
        check_len(key, body.len() as u64)?;
        Ok(Some(Bytes::from(body)))
    }

    pub(super) fn list(
        &self,
        directory: &str,
        name_prefix: &str,
        after: Option<&str>,
    ) -> Result<ListPage> {
        let path = self.root.join(directory);
        let failed = |cause| Error::io(format!("read directory {}", path.display()), cause);
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(cause) if is_missing(&cause) => {
                return self.check_identity().map(|()| ListPage::default());
            }
            Err(cause) => return Err(failed(cause)),
        };
        let base = if directory.is_empty() {
            String::new()
        } else {
            format!("{directory}/")
        };
        // Only the first keys are kept: a directory can have millions of files.
        let mut keys = BinaryHeap::new();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let is_internal = directory.is_empty() && name.starts_with('.');
            if !name.starts_with(name_prefix) || is_internal {
                continue;
            }
            let kind = entry.file_type().map_err(failed)?;
            let is_directory = kind.is_dir() || kind.is_symlink() && entry.path().is_dir();
            let slash = if is_directory { "/" } else { "" };
            let key = format!("{base}{name}{slash}");
            if after.is_none_or(|after| key.as_str() > after) {
                keys.push(key);
            }
            if keys.len() > MAX_PAGE + 1 {
                keys.pop();
            }
        }
        if keys.is_empty() {
            self.check_identity()?;
        }
        let mut keys = keys.into_sorted_vec();
        let has_more = keys.len() > MAX_PAGE;
        keys.truncate(MAX_PAGE);
        self.page(keys, has_more)
    }

    /// The objects below a directory. Visits at most as many directories as a page has objects, so a
    /// loop of links ends.
    pub(super) fn list_tree(&self, directory: String) -> Result<ListPage> {
        let mut tree = ListPage::default();
        let mut pending = vec![directory];
        let mut visited = 0;
        while let Some(directory) = pending.pop() {
            let page = self.list(&directory, "", None)?;
            visited += 1;
            tree.objects.extend(page.objects);
            let directories = page.directories.iter();
            pending.extend(directories.map(|name| name.trim_end_matches('/').to_owned()));
            if page.next.is_some() || tree.objects.len().max(visited + pending.len()) > MAX_PAGE {
                tree.next = Some(directory);
                break;
            }
        }
        tree.objects.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(tree)
    }

    fn page(&self, keys: Vec<String>, has_more: bool) -> Result<ListPage> {
        let mut page = ListPage {
            next: keys.last().filter(|_| has_more).cloned(),
            ..ListPage::default()
        };
        for key in keys {
            if key.ends_with('/') {
                page.directories.push(key);
                continue;
            }
            // Only existing regular files are listed; a file may have been deleted in the meantime.
            match fs::metadata(self.root.join(&key)) {
                Ok(metadata) if metadata.is_file() => page.objects.push(Object {
                    key,
                    size: metadata.len(),
                    modified: modified(&metadata),
                }),
                Ok(_) => {}
                Err(cause) if is_missing(&cause) => {}
                Err(cause) => return Err(Error::io(format!("inspect {key}"), cause)),
            }
        }
        Ok(page)
    }

    pub(super) fn delete(&self, path: &Path) -> Result<()> {
        match fs::remove_file(path) {
            Ok(()) => {}
            Err(cause) if is_missing(&cause) || path.is_dir() => return self.check_identity(),
            Err(cause) => return Err(Error::io(format!("delete {}", path.display()), cause)),
        }
        self.sync_parent(path)?;
        // An object store has no empty directories, so a listing must not show any.
        for directory in path
            .ancestors()
            .skip(1)
            .take_while(|directory| *directory != self.root)
        {
            if fs::remove_dir(directory).is_err() {
                break;
            }
            self.durable_dirs().remove(directory);
        }
        Ok(())
    }

    fn write_temp(&self, body: &[u8]) -> Result<TempFile> {
        let directory = self.root.join(TEMP_DIR);
        TempFile::write(&directory, body).map_err(|cause| {
            Error::io(
                format!("write a temporary file in {}", directory.display()),
                cause,
            )
        })
    }

    /// Makes the parent directory durable, then runs `commit`, which links or renames the file to
    /// its final path. Retries if a concurrent delete removes the directory in between.
    fn commit_in_parent(&self, path: &Path, commit: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let directory = path.parent().unwrap_or(&self.root);
        let attempt = || self.make_durable(directory).and_then(|()| commit());
        for _ in 1..MAX_ATTEMPTS {
            match attempt() {
                Err(cause) if cause.kind() == ErrorKind::NotFound => self.durable_dirs().clear(),
                done => return done,
            }
        }
        attempt()
    }

    /// Creates a directory and syncs all its parents up to the root.
    fn make_durable(&self, directory: &Path) -> io::Result<()> {
        if self.durable_dirs().contains(directory) {
            return Ok(());
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|cause| match cause.kind() {
                // The caller would take `AlreadyExists` for an existing object. Either a file has
                // the name of the directory, or a concurrent delete removed the directory during
                // its creation.
                ErrorKind::AlreadyExists => {
                    let is_file_in_path = directory
                        .ancestors()
                        .find_map(|part| fs::metadata(part).ok())
                        .is_some_and(|metadata| !metadata.is_dir());
                    io::Error::from(if is_file_in_path {
                        ErrorKind::NotADirectory
                    } else {
                        ErrorKind::NotFound
                    })
                }
                _ => cause,
            })?;
        // All parents, not only new ones: another writer may have created one and not synced it yet.
        for parent in directory
            .ancestors()
            .take_while(|part| *part != self.root)
            .filter_map(Path::parent)
        {
            sync_directory(parent)?;
        }
        let mut durable_dirs = self.durable_dirs();
        if durable_dirs.len() >= MAX_DURABLE_DIRS {
            durable_dirs.clear();
        }
        durable_dirs.insert(directory.to_owned());
        Ok(())
    }

    fn durable_dirs(&self) -> MutexGuard<'_, HashSet<PathBuf>> {
        self.durable_dirs
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn sync_parent(&self, path: &Path) -> Result<()> {
        let directory = path.parent().unwrap_or(&self.root);
        match sync_directory(directory) {
            // A concurrent delete of the object removed its directory, so there is nothing to make
            // durable.
            Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(()),
            synced => {
                synced.map_err(|cause| Error::io(format!("sync {}", directory.display()), cause))
            }
        }
    }
}

/// The modification time of a file. A file with an unknown time counts as new.
fn modified(metadata: &fs::Metadata) -> Timestamp {
    metadata
        .modified()
        .ok()
        .and_then(|time| Timestamp::try_from(time).ok())
        .unwrap_or(Timestamp::MAX)
}

/// Rejects keys that would escape the root, name an internal file of the store, or exceed the
/// limits of a filesystem.
pub(super) fn check_key(key: &str) -> Result<()> {
    let is_invalid = |part: &str| {
        matches!(part, "" | "." | "..") || part.len() > MAX_NAME_LEN || part.contains('\0')
    };
    if key.starts_with('.') || key.split('/').any(is_invalid) {
        return Err(Error::usage(format!(
            "invalid key {key:?}: expected names of 1 to {MAX_NAME_LEN} bytes, separated by single slashes, the first without a leading dot"
        )));
    }
    Ok(())
}

/// Classifies the error of a commit. A filesystem, unlike an object store, cannot hold both `a` and
/// `a/b`; a retry does not help.
fn commit_error(path: &Path, cause: io::Error) -> Error {
    let phrase = format!("write {}", path.display());
    match cause.kind() {
        ErrorKind::NotADirectory
        | ErrorKind::IsADirectory
        | ErrorKind::AlreadyExists
        | ErrorKind::DirectoryNotEmpty => Error::usage(phrase)
            .caused_by(cause)
            .hint("remove the file or directory that conflicts with this path"),
        _ => Error::io(phrase, cause),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn keys_stay_below_the_root() {
        for key in [
            "",
            "/etc/passwd",
            "a//b",
            "a/",
            "../a",
            "a/../../b",
            "a/./b",
            ".tmp/x",
            "a\0b",
        ] {
            assert_eq!(
                check_key(key).expect_err(key).kind(),
                ErrorKind::Usage,
                "{key:?}"
            );
        }
        check_key("v1/.store.json").expect("a dot below the root is fine");
        assert!(check_key(&"x".repeat(256)).is_err());
    }
}
