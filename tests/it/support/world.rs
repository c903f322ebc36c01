//! One machine on storage of its own, with a store that can fail: the setup of most capture tests.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sessiond::agent::Profile;
use sessiond::capture::watch::EventBuffer;
use sessiond::capture::{self, StreamerHandle};
use sessiond::log::Logs;
use sessiond::model::{LogId, LogPoint, Seq, WriterId};
use sessiond::sys::Directory;

use super::faulty_store::FaultyStore;
use super::files::{self, Files};
use super::storage::Storage;
use super::writer::{self, Writer};

/// A writer, its storage, and the faults of its store.
pub struct World {
    /// The storage that the writer uses.
    pub storage: Storage,
    pub store: Arc<FaultyStore>,
    pub writer: Writer,
    directory: PathBuf,
}

impl World {
    pub fn new() -> World {
        World::below(&std::env::temp_dir())
    }

    /// A world in memory, if the machine has /dev/shm: thousands of flushes need no disk.
    pub fn in_memory() -> World {
        let memory = Path::new("/dev/shm");
        if memory.is_dir() {
            World::below(memory)
        } else {
            World::new()
        }
    }

    fn below(parent: &Path) -> World {
        let temporary = tempfile::Builder::new()
            .prefix("sessiond-it-")
            .tempdir_in(parent)
            .unwrap();
        let directory = temporary.path().to_owned();
        let (storage, store) = Storage::files_in(&directory).decorate(FaultyStore::new);
        let writer = Writer::in_directory(&storage, storage.logs(), temporary);
        World {
            storage,
            store,
            writer,
            directory,
        }
    }

    /// The agent's root.
    pub fn root(&self) -> PathBuf {
        self.writer.root.clone()
    }

    /// Returns a path beside the root, such as the root of another agent.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub fn profile(&self) -> &dyn Profile {
        &*self.writer.context.profile
    }

    /// Returns the logs as a new process sees them.
    pub fn logs(&self) -> Logs {
        self.storage.logs()
    }

    pub fn id(&self, name: &str) -> LogId {
        self.storage.id(name)
    }

    /// Returns the context of the world's own root.
    pub fn context(&self) -> capture::CaptureContext {
        capture::CaptureContext {
            logs: self.logs(),
            ..self.writer.context.clone()
        }
    }

    /// Returns the context of another directory on the same storage.
    pub fn context_of(&self, directory: Arc<dyn Directory>) -> capture::CaptureContext {
        capture::CaptureContext {
            directory,
            ..self.context()
        }
    }

    /// Streams the root as the daemon does.
    pub fn stream(&self) -> StreamerHandle {
        writer::stream(self.root(), self.context())
    }

    pub fn write(&self, path: &str, bytes: impl AsRef<[u8]>) {
        files::write(&self.root().join(path), bytes);
    }

    pub fn append(&self, path: &str, bytes: impl AsRef<[u8]>) {
        files::append(&self.root().join(path), bytes);
    }

    /// Streams the root without events of the file system.
    pub fn stream_by_scans(&self) -> StreamerHandle {
        writer::stream_by_scans(self.root(), self.context())
    }

    /// Streams the root with events that the test produces.
    pub fn stream_with_events(&self, events: Arc<EventBuffer>) -> StreamerHandle {
        writer::stream_with_events(self.root(), self.context(), events)
    }

    /// Returns the stored files of a log; none if the store does not have it.
    pub async fn stored(&self, name: &str) -> Option<Files> {
        self.stored_on(name, None).await
    }

    pub async fn stored_on(&self, name: &str, branch: Option<WriterId>) -> Option<Files> {
        match self.storage.files_at(name, LogPoint::Latest, branch).await {
            Ok(files) => Some(files),
            Err(error) if error.kind() == sessiond::error::ErrorKind::NotFound => None,
            Err(error) => panic!("{name} cannot be restored: {error}"),
        }
    }

    /// Returns the stored files at an earlier entry.
    pub async fn stored_at(&self, name: &str, seq: Seq) -> Files {
        let at = LogPoint::Seq(seq);
        self.storage.files_at(name, at, None).await.unwrap()
    }

    /// Returns the stored bytes of one file; none if the store does not have it.
    pub async fn stored_file(&self, name: &str, path: &str) -> Option<Vec<u8>> {
        self.stored(name).await?.remove(path)
    }

    /// Waits until the store has these bytes of a file, without a flush request.
    pub async fn wait_for(&self, name: &str, path: &str, bytes: &[u8], timeout: Duration) {
        let deadline = tokio::time::Instant::now() + timeout;
        loop {
            let stored = self.stored_file(name, path).await;
            if stored.as_deref() == Some(bytes) {
                return;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "{path} of {name} is not stored after {timeout:?}: {:?}",
                stored.map(|bytes| bytes.len())
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns the number of entries of a log, which must have no gap.
    pub async fn entry_count(&self, name: &str) -> usize {
        let entries = self.logs().list_entries(&self.id(name), 0).await.unwrap();
        let seqs: Vec<Seq> = entries.iter().map(|entry| entry.seq).collect();
        let expected: Vec<Seq> = (1..=seqs.len() as Seq).collect();
        assert_eq!(seqs, expected, "the log of {name} has a gap");
        seqs.len()
    }

    /// Returns the raw bytes of a log's entries: the bytes that were uploaded.
    pub async fn uploaded(&self, name: &str) -> u64 {
        let entries = self.storage.entries(name).await;
        entries.iter().map(|entry| entry.header.body_len()).sum()
    }

    pub async fn branches(&self, name: &str) -> Vec<WriterId> {
        self.storage.branches(name).await
    }
}
