//! A directory that counts the bytes that sessiond reads.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use sessiond::model::{FileStat, RelPath};
use sessiond::sys::{Directory, Disk, FileAttributes, Item, OpenFile, Owner};

/// Wraps a directory; counts the bytes read from files, and makes opening or listing fail or hang.
pub struct CountingDirectory {
    inner: Disk,
    read: Arc<AtomicU64>,
    /// Files whose path contains this text cannot be opened.
    denied: Mutex<Option<String>>,
    /// Listing waits for this lock.
    list_lock: Mutex<()>,
}

impl CountingDirectory {
    pub fn new(root: PathBuf) -> Self {
        CountingDirectory {
            inner: Disk::new(root),
            read: Arc::default(),
            denied: Mutex::default(),
            list_lock: Mutex::default(),
        }
    }

    /// Listing hangs until the guard is dropped.
    pub fn block_listing(&self) -> MutexGuard<'_, ()> {
        self.list_lock.lock().unwrap()
    }

    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::SeqCst)
    }

    /// From now on, files whose path contains `text` cannot be opened; none allows all again.
    pub fn deny_open(&self, text: Option<&str>) {
        *self.denied.lock().unwrap() = text.map(str::to_owned);
    }
}

struct CountingFile {
    inner: Box<dyn OpenFile>,
    read: Arc<AtomicU64>,
}

impl OpenFile for CountingFile {
    fn stat(&self) -> io::Result<FileStat> {
        self.inner.stat()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let got = self.inner.read_at(buffer, offset)?;
        self.read.fetch_add(got as u64, Ordering::SeqCst);
        Ok(got)
    }
}

impl Directory for CountingDirectory {
    fn list(&self, directory: Option<&RelPath>) -> io::Result<Vec<Item>> {
        let _guard = self.list_lock.lock().unwrap();
        self.inner.list(directory)
    }

    fn stat(&self, path: &RelPath) -> io::Result<Option<FileStat>> {
        self.inner.stat(path)
    }

    fn open(&self, path: &RelPath) -> io::Result<Option<Box<dyn OpenFile>>> {
        if self
            .denied
            .lock()
            .unwrap()
            .as_ref()
            .is_some_and(|text| path.as_str().contains(text))
        {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let file = self.inner.open(path)?;
        Ok(file.map(|inner| {
            Box::new(CountingFile {
                inner,
                read: self.read.clone(),
            }) as Box<dyn OpenFile>
        }))
    }

    fn read(&self, path: &RelPath) -> io::Result<Option<Vec<u8>>> {
        self.inner.read(path)
    }

    fn replace(&self, path: &RelPath, bytes: &[u8], durable: bool) -> io::Result<()> {
        self.inner.replace(path, bytes, durable)
    }

    fn write_at(&self, path: &RelPath, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.inner.write_at(path, offset, bytes)
    }

    fn finish(&self, path: &RelPath, attributes: &FileAttributes) -> io::Result<()> {
        self.inner.finish(path, attributes)
    }

    fn rename(&self, from: &RelPath, to: &RelPath, owner: Option<Owner>) -> io::Result<()> {
        self.inner.rename(from, to, owner)
    }

    fn remove(&self, path: &RelPath) -> io::Result<()> {
        self.inner.remove(path)
    }
}
