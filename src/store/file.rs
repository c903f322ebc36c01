//! A store in a directory, on a local disk or on a network filesystem.
//!
//! Owns opening the store and the timeout of its calls. Does not own the operations on files
//! (`objects`) or the meaning of keys.

mod disk;
mod objects;

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use self::disk::{
    STORE_ID_FILE, TEMP_DIR, TempFile, delete_stale_files, make_dirs, rename_exclusive,
};
use self::objects::{ObjectDirectory, check_key};
use super::{CreateOutcome, ListPage, Store, check_len};
use crate::error::{Error, Result};
use crate::sys::atomic_file::sync_directory;
use crate::sys::{Rng, SystemRng};

/// Timeout of a call: an unreachable network filesystem blocks forever. The same as for an S3
/// request.
const TIMEOUT: Duration = Duration::from_secs(30);

/// An object store whose objects are files below one directory.
#[derive(Debug, Clone)]
pub struct FileStore {
    inner: Arc<ObjectDirectory>,
}

impl FileStore {
    /// Opens the store in `root`. Creates the directory if it does not exist.
    pub fn open(root: PathBuf) -> Result<FileStore> {
        Self::open_root(&root)
            .map_err(|error| error.context(format_args!("open store {}", root.display())))
    }

    fn open_root(root: &Path) -> Result<FileStore> {
        let absolute =
            std::path::absolute(root).map_err(|cause| Error::io("resolve the path", cause))?;
        match fs::metadata(&absolute) {
            Ok(found) if !found.is_dir() => {
                return Err(Error::usage("it is not a directory")
                    .hint("specify a directory, such as file:///var/lib/sessiond"));
            }
            Ok(_) => {}
            Err(cause) if cause.kind() == ErrorKind::NotADirectory => {
                return Err(Error::usage("a component of its path is a file")
                    .hint("specify a directory, such as file:///var/lib/sessiond"));
            }
            Err(cause) if cause.kind() == ErrorKind::NotFound => {
                make_dirs(&absolute)
                    .map_err(|cause| Error::user_path("create the directory", cause))?;
            }
            Err(cause) => return Err(Error::user_path("read its attributes", cause)),
        }
        let temp = absolute.join(TEMP_DIR);
        match DirBuilder::new().mode(0o700).create(&temp) {
            Ok(()) => {
                sync_directory(&absolute)
                    .map_err(|cause| Error::io("sync the directory", cause))?;
            }
            Err(cause) if cause.kind() == ErrorKind::AlreadyExists => {}
            Err(cause) => {
                return Err(Error::user_path(
                    format!("create {}", temp.display()),
                    cause,
                ));
            }
        }
        // An existing directory may not be writable; report it now rather than at the first entry.
        TempFile::write(&temp, b"")
            .map_err(|cause| Error::user_path(format!("write to {}", temp.display()), cause))?;
        delete_stale_files(&temp);
        let store_id =
            load_store_id(&absolute).map_err(|cause| Error::io("read the store ID", cause))?;
        Ok(FileStore {
            inner: Arc::new(ObjectDirectory::new(absolute, store_id)),
        })
    }

    /// Runs `work` on a blocking thread. After a timeout, or when the future is dropped, the
    /// outcome is unknown.
    async fn blocking<T: Send + 'static>(
        &self,
        context: String,
        work: impl FnOnce(&ObjectDirectory) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = Arc::clone(&self.inner);
        let task = tokio::task::spawn_blocking(move || {
            inner.check_identity()?;
            work(&inner)
        });
        match tokio::time::timeout(TIMEOUT, task).await {
            Ok(Ok(done)) => done.map_err(|error| error.context(context)),
            Ok(Err(cause)) => Err(Error::unavailable(context).caused_by(cause)),
            Err(_) => Err(Error::unavailable(format!(
                "the disk did not respond within {} s",
                TIMEOUT.as_secs()
            ))
            .context(context)
            .hint(format!(
                "run \"ls {}\" to see whether the filesystem responds",
                self.inner.root.display()
            ))),
        }
    }

    fn context(&self, verb: &str, key: &str) -> String {
        format!("{verb} {key} in {}", self.address())
    }
}

#[async_trait]
impl Store for FileStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<CreateOutcome> {
        let path = self.inner.path(key)?;
        check_len(key, body.len() as u64)?;
        self.blocking(self.context("create", key), move |inner| {
            inner.create(&path, &body)
        })
        .await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        let path = self.inner.path(key)?;
        check_len(key, body.len() as u64)?;
        self.blocking(self.context("put", key), move |inner| {
            inner.put(&path, &body)
        })
        .await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        let path = self.inner.path(key)?;
        let name = key.to_owned();
        self.blocking(self.context("get", key), move |inner| {
            inner.get(&name, &path)
        })
        .await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage> {
        let (directory, name_prefix) = prefix.rsplit_once('/').unwrap_or(("", prefix));
        if !directory.is_empty() {
            check_key(directory)?;
        }
        let (directory, name_prefix, after) = (
            directory.to_owned(),
            name_prefix.to_owned(),
            after.map(str::to_owned),
        );
        self.blocking(self.context("list", prefix), move |inner| {
            inner.list(&directory, &name_prefix, after.as_deref())
        })
        .await
    }

    async fn list_tree(&self, directory: &str) -> Result<ListPage> {
        let name = directory.trim_end_matches('/').to_owned();
        check_key(&name)?;
        self.blocking(self.context("list", directory), move |inner| {
            inner.list_tree(name)
        })
        .await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        let path = self.inner.path(key)?;
        self.blocking(self.context("delete", key), move |inner| {
            inner.delete(&path)
        })
        .await
    }

    fn has_atomic_create(&self) -> Option<bool> {
        Some(true)
    }

    fn address(&self) -> String {
        format!("file://{}", self.inner.root.display())
    }
}

/// Reads the ID of the store, and creates it if there is none. If two processes create it at the
/// same time, the first one wins.
fn load_store_id(root: &Path) -> std::io::Result<Vec<u8>> {
    let path = root.join(STORE_ID_FILE);
    if !path.exists() {
        let store_id = format!("{:016x}{:016x}\n", SystemRng.next(), SystemRng.next());
        let temp = TempFile::write(&root.join(TEMP_DIR), store_id.as_bytes())?;
        match fs::hard_link(&temp.path, &path).or_else(|_| rename_exclusive(&temp.path, &path)) {
            Err(cause) if cause.kind() != ErrorKind::AlreadyExists => return Err(cause),
            _ => sync_directory(root)?,
        }
    }
    fs::read(path)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::SystemTime;

    use super::disk::STALE;
    use super::*;

    #[test]
    fn only_stale_temp_files_are_deleted() {
        let directory = tempfile::tempdir().expect("directory");
        FileStore::open(directory.path().to_owned()).expect("open");
        let (old, new) = (
            directory.path().join(".tmp/old"),
            directory.path().join(".tmp/new"),
        );
        let file = File::create(&old).expect("old");
        file.set_modified(
            SystemTime::from(crate::sys::Clock::now(&crate::sys::SystemClock))
                - STALE
                - Duration::from_secs(60),
        )
        .expect("age");
        File::create(&new).expect("new");
        FileStore::open(directory.path().to_owned()).expect("open again");
        assert!(!old.exists() && new.exists());
    }
}
