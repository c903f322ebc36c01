//! A store in a directory: a local disk, or a network filesystem that several machines mount.
//!
//! Owns how a key becomes a file, and that a write is whole and durable before it is answered. Does not own the durable
//! files of the daemon itself, nor what the keys mean.

mod disk;

use std::collections::HashSet;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;
use rustix::fs::OFlags;
use rustix::io::Errno;

use self::disk::{Temp, is_missing, lacks_links, make_dirs, rename_new, sweep, sync_dir};
use super::{Created, Object, Page, Store};
use crate::error::{Error, Result};
use crate::sys::{Rng, SystemRng};

/// Where files are written before they get their name. It also tells a store from the bare mount point below it.
const TEMP: &str = ".tmp";

/// Made once with the store: a directory that was emptied and made again under us is another store, and what we know of the
/// old one does not hold there.
const MARK: &str = ".mark";

/// The contract's bound on a page.
const PAGE: usize = 1000;

/// The longest name that every filesystem takes.
const LONGEST_NAME: usize = 255;

/// A dead network filesystem blocks for ever; this is when a caller stops to wait for it. As long as an S3 attempt.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often a write looks for its directory again that a racing delete has removed. Each round lost needs another delete.
const ROUNDS: usize = 16;

/// Directories remembered as durable; beyond this they are forgotten, which costs only some fsyncs.
const REMEMBERED: usize = 4096;

/// Keeps objects as files below one directory.
#[derive(Debug, Clone)]
pub struct FileStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    /// What the store's mark held when it was opened.
    mark: Vec<u8>,
    /// Directories whose way up to the root is known to be on the disk.
    settled: Mutex<HashSet<PathBuf>>,
}

impl FileStore {
    /// Opens the store in `root`, which is made where it is missing.
    pub fn open(root: PathBuf) -> Result<FileStore> {
        let context = |what: &str| format!("open store {}: {what}", root.display());
        let absolute = std::path::absolute(&root)
            .map_err(|cause| Error::io(context("find its path"), cause))?;
        match fs::metadata(&absolute) {
            Ok(found) if !found.is_dir() => {
                return Err(Error::usage(context("it is not a directory"))
                    .hint("name a directory, such as file:///var/lib/sessiond"));
            }
            Ok(_) => {}
            Err(cause) if cause.kind() == ErrorKind::NotADirectory => {
                return Err(Error::usage(context("a part of its path is a file"))
                    .hint("name a directory, such as file:///var/lib/sessiond"));
            }
            Err(cause) if cause.kind() == ErrorKind::NotFound => {
                make_dirs(&absolute)
                    .map_err(|cause| Error::named(context("make the directory"), cause))?;
            }
            Err(cause) => return Err(Error::named(context("look at it"), cause)),
        }
        let temp = absolute.join(TEMP);
        match DirBuilder::new().mode(0o700).create(&temp) {
            Ok(()) => sync_dir(&absolute)
                .map_err(|cause| Error::io(context("make its directory durable"), cause))?,
            Err(cause) if cause.kind() == ErrorKind::AlreadyExists => {}
            Err(cause) => {
                return Err(Error::named(
                    context(&format!("make {}", temp.display())),
                    cause,
                ));
            }
        }
        // A directory that was there before may not be ours to write; better known now than at the first entry.
        Temp::write(&temp, b"").map_err(|cause| {
            Error::named(context(&format!("write in {}", temp.display())), cause)
        })?;
        sweep(&temp);
        let mark =
            mark_of(&absolute).map_err(|cause| Error::io(context("read its mark"), cause))?;
        Ok(FileStore {
            inner: Arc::new(Inner {
                root: absolute,
                mark,
                settled: Mutex::new(HashSet::new()),
            }),
        })
    }

    /// Runs blocking `work`; after a time-out or a drop it may still take effect, which the contract calls unknown.
    async fn blocking<T: Send + 'static>(
        &self,
        context: String,
        work: impl FnOnce(&Inner) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = Arc::clone(&self.inner);
        let task = tokio::task::spawn_blocking(move || {
            inner.same_store()?;
            work(&inner)
        });
        match tokio::time::timeout(PATIENCE, task).await {
            Ok(Ok(done)) => done.map_err(|error| error.context(context)),
            Ok(Err(cause)) => Err(Error::unavailable(context).caused_by(cause)),
            Err(_) => Err(Error::unavailable(format!(
                "{context}: no answer from the disk for {} s",
                PATIENCE.as_secs()
            ))
            .hint(format!(
                "see whether `ls {}` answers",
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
    async fn create(&self, key: &str, body: Bytes) -> Result<Created> {
        let path = self.inner.path(key)?;
        self.blocking(self.context("create", key), move |inner| {
            inner.create(&path, &body)
        })
        .await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        let path = self.inner.path(key)?;
        self.blocking(self.context("put", key), move |inner| {
            inner.put(&path, &body)
        })
        .await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        let path = self.inner.path(key)?;
        self.blocking(self.context("get", key), move |inner| inner.get(&path))
            .await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        let (directory, begins) = prefix
            .rsplit_once('/')
            .map_or(("", prefix), |(directory, begins)| (directory, begins));
        if !directory.is_empty() {
            check(directory)?;
        }
        let (directory, begins, after) = (
            directory.to_owned(),
            begins.to_owned(),
            after.map(str::to_owned),
        );
        self.blocking(self.context("list", prefix), move |inner| {
            inner.list(&directory, &begins, after.as_deref())
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

    fn fences_by_itself(&self) -> Option<bool> {
        Some(true)
    }

    fn address(&self) -> String {
        format!("file://{}", self.inner.root.display())
    }
}

impl Inner {
    /// Whether the directory is still the one that was opened: an unmounted store must not look like an empty one.
    fn same_store(&self) -> Result<()> {
        match fs::read(self.root.join(MARK)) {
            Ok(mark) if mark == self.mark => Ok(()),
            _ => Err(Error::unavailable(format!("{} is gone, or another store has its place", self.root.display()))
                .hint("is its disk mounted? restart sessiond if the store was made anew: it uploads everything again")),
        }
    }

    fn path(&self, key: &str) -> Result<PathBuf> {
        check(key)?;
        Ok(self.root.join(key))
    }

    fn create(&self, path: &Path, body: &[u8]) -> Result<Created> {
        let temp = Temp::write(&self.root.join(TEMP), body)
            .map_err(|cause| self.io("write a temp file", cause))?;
        let placed = self.in_directory_of(path, || match fs::hard_link(&temp.path, path) {
            Err(cause) if lacks_links(&cause) => rename_new(&temp.path, path),
            linked => linked,
        });
        match placed {
            Ok(()) => {}
            // A directory of that name is no object, and a create that says "exists" promises one that can be read.
            Err(cause) if cause.kind() == ErrorKind::AlreadyExists && !path.is_dir() => {
                // Whoever made it may not have come to this yet, and our answer makes it a fact.
                self.sync_parent(path)?;
                return Ok(Created::Exists);
            }
            Err(cause)
                if cause.kind() == ErrorKind::Unsupported
                    || cause.raw_os_error() == Some(Errno::INVAL.raw_os_error()) =>
            {
                return Err(Error::usage("the filesystem has neither hard links nor renames that keep what is there")
                    .caused_by(cause)
                    .hint("use another filesystem or an S3 store: two writers could not be kept apart on this one"));
            }
            Err(cause) => return Err(in_the_way(path, cause)),
        }
        drop(temp);
        self.sync_parent(path)?;
        Ok(Created::New)
    }

    fn put(&self, path: &Path, body: &[u8]) -> Result<()> {
        let temp = Temp::write(&self.root.join(TEMP), body)
            .map_err(|cause| self.io("write a temp file", cause))?;
        self.in_directory_of(path, || fs::rename(&temp.path, path))
            .map_err(|cause| in_the_way(path, cause))?;
        temp.forget();
        self.sync_parent(path)
    }

    fn get(&self, path: &Path) -> Result<Option<Bytes>> {
        // Opening a pipe that somebody left here would block for ever.
        let open = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(path);
        let mut file = match open {
            Ok(file) => file,
            Err(cause) if is_missing(&cause) => return self.same_store().map(|()| None),
            Err(cause) => return Err(Error::io(format!("open {}", path.display()), cause)),
        };
        let read = || -> io::Result<Option<Vec<u8>>> {
            let found = file.metadata()?;
            if !found.is_file() {
                return Ok(None);
            }
            let mut body = Vec::with_capacity(usize::try_from(found.len()).unwrap_or(0));
            file.read_to_end(&mut body)?;
            Ok(Some(body))
        }();
        Ok(read
            .map_err(|cause| Error::io(format!("read {}", path.display()), cause))?
            .map(Bytes::from))
    }

    fn list(&self, directory: &str, begins: &str, after: Option<&str>) -> Result<Page> {
        let path = self.root.join(directory);
        let failed = |cause| Error::io(format!("read directory {}", path.display()), cause);
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(cause) if is_missing(&cause) => return self.same_store().map(|()| Page::default()),
            Err(cause) => return Err(failed(cause)),
        };
        let base = if directory.is_empty() {
            String::new()
        } else {
            format!("{directory}/")
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if !name.starts_with(begins) || (directory.is_empty() && name.starts_with('.')) {
                continue;
            }
            let ending = if entry.path().is_dir() { "/" } else { "" };
            let key = format!("{base}{name}{ending}");
            if after.is_none_or(|after| key.as_str() > after) {
                names.push(key);
            }
        }
        if names.is_empty() {
            self.same_store()?;
        }
        names.sort_unstable();
        let more = names.len() > PAGE;
        names.truncate(PAGE);
        let mut page = Page {
            next: names.last().filter(|_| more).cloned(),
            ..Page::default()
        };
        for key in names {
            if key.ends_with('/') {
                page.directories.push(key);
                continue;
            }
            // What was deleted meanwhile, and what is neither file nor directory, is no object.
            match fs::metadata(self.root.join(&key)) {
                Ok(found) if found.is_file() => page.objects.push(Object {
                    key,
                    size: found.len(),
                    modified: modified(&found),
                }),
                Ok(_) => {}
                Err(cause) if is_missing(&cause) => {}
                Err(cause) => return Err(Error::io(format!("look at {key}"), cause)),
            }
        }
        Ok(page)
    }

    fn delete(&self, path: &Path) -> Result<()> {
        match fs::remove_file(path) {
            Ok(()) => {}
            Err(cause) if is_missing(&cause) || path.is_dir() => return self.same_store(),
            Err(cause) => return Err(Error::io(format!("remove {}", path.display()), cause)),
        }
        self.sync_parent(path)?;
        // An object store has no empty directories, so a listing should show none here.
        for directory in path
            .ancestors()
            .skip(1)
            .take_while(|directory| *directory != self.root)
        {
            if fs::remove_dir(directory).is_err() {
                break;
            }
            self.settled().remove(directory);
        }
        Ok(())
    }

    /// Runs `place`, which gives a file its name, with the directory of `path` in place and its way up to the root durable.
    fn in_directory_of(&self, path: &Path, place: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let directory = path.parent().unwrap_or(&self.root);
        let attempt = || self.settle(directory).and_then(|()| place());
        for _ in 1..ROUNDS {
            match attempt() {
                Err(cause) if cause.kind() == ErrorKind::NotFound => self.settled().clear(),
                done => return done,
            }
        }
        attempt()
    }

    fn settle(&self, directory: &Path) -> io::Result<()> {
        if self.settled().contains(directory) {
            return Ok(());
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|cause| match cause.kind() {
                // "Exists" would pass for the object. It is a file in the directory's place, or a directory that a racing delete took
                // while it was being made.
                ErrorKind::AlreadyExists => {
                    let in_the_way = directory
                        .ancestors()
                        .find_map(|part| fs::metadata(part).ok())
                        .is_some_and(|found| !found.is_dir());
                    io::Error::from(if in_the_way {
                        ErrorKind::NotADirectory
                    } else {
                        ErrorKind::NotFound
                    })
                }
                _ => cause,
            })?;
        // All of them, not only those made just now: another writer may have made one and not yet synced its parent.
        for parent in directory
            .ancestors()
            .take_while(|part| *part != self.root)
            .filter_map(Path::parent)
        {
            sync_dir(parent)?;
        }
        let mut settled = self.settled();
        if settled.len() >= REMEMBERED {
            settled.clear();
        }
        settled.insert(directory.to_owned());
        Ok(())
    }

    fn settled(&self) -> std::sync::MutexGuard<'_, HashSet<PathBuf>> {
        self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sync_parent(&self, path: &Path) -> Result<()> {
        let directory = path.parent().unwrap_or(&self.root);
        match sync_dir(directory) {
            // Removed by a delete of the object we came for; then there is nothing to keep.
            Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(()),
            synced => synced
                .map_err(|cause| Error::io(format!("make {} durable", directory.display()), cause)),
        }
    }

    fn io(&self, what: &str, cause: io::Error) -> Error {
        Error::io(
            format!("{what} in {}", self.root.join(TEMP).display()),
            cause,
        )
    }
}

/// Refuses keys that would leave the root, hit the store's own files, or that a filesystem cannot hold.
/// When a file was written; one that cannot say counts as new.
fn modified(found: &fs::Metadata) -> Timestamp {
    found
        .modified()
        .ok()
        .and_then(|time| Timestamp::try_from(time).ok())
        .unwrap_or(Timestamp::MAX)
}

fn check(key: &str) -> Result<()> {
    let wrong = |part: &str| {
        matches!(part, "" | "." | "..") || part.len() > LONGEST_NAME || part.contains('\0')
    };
    if key.starts_with('.') || key.split('/').any(wrong) {
        return Err(Error::usage(format!("use key {key:?}: it is no path below the store"))
            .hint("a key is made of names of 1 to 255 bytes with single slashes between; the first does not begin with a dot"));
    }
    Ok(())
}

/// Unlike an object store a directory cannot hold both `a` and `a/b`; no retry mends that.
fn in_the_way(path: &Path, cause: io::Error) -> Error {
    let context = format!("place {}", path.display());
    match cause.kind() {
        ErrorKind::NotADirectory
        | ErrorKind::IsADirectory
        | ErrorKind::AlreadyExists
        | ErrorKind::DirectoryNotEmpty => Error::usage(context).caused_by(cause).hint(
            "a file stands where a directory is needed, or the other way round: move it away",
        ),
        _ => Error::io(context, cause),
    }
}

/// The store's mark, made if it has none; of two that make it at once one wins.
fn mark_of(root: &Path) -> std::io::Result<Vec<u8>> {
    let path = root.join(MARK);
    if !path.exists() {
        let mark = format!("{:016x}{:016x}\n", SystemRng.next(), SystemRng.next());
        let temp = Temp::write(&root.join(TEMP), mark.as_bytes())?;
        match fs::hard_link(&temp.path, &path).or_else(|_| rename_new(&temp.path, &path)) {
            Err(cause) if cause.kind() != ErrorKind::AlreadyExists => return Err(cause),
            _ => sync_dir(root)?,
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
                check(key).expect_err(key).kind(),
                ErrorKind::Usage,
                "{key:?}"
            );
        }
        check("v1/.store.json").expect("a dot below the root is fine");
        assert!(check(&"x".repeat(256)).is_err());
    }

    #[test]
    fn only_stale_temp_files_are_swept() {
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
