//! A machine without a process: an agent's root on shared storage, flushed or streamed in the test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sessiond::capture::flush::{FlushOutcome, LogFlusher};
use sessiond::capture::index_queue::IndexTask;
use sessiond::capture::scan::scan;
use sessiond::capture::watch::{EventBuffer, InotifyWatcher, NullWatcher, Watcher};
use sessiond::capture::{self, EntryLimits, Streamer, StreamerHandle};
use sessiond::codec::entry::Entry;
use sessiond::error::Result;
use sessiond::index::Index;
use sessiond::index::sql::SqlIndex;
use sessiond::log::Logs;
use sessiond::log::ledger::Ledger;
use sessiond::model::LogName;
use sessiond::restore::{self, Options, RestoreReport};
use sessiond::store::Store;
use sessiond::sys::{Directory, Disk};
use sessiond::upkeep::reindex::catch_up;

use super::files::{self, Files, files_below};
use super::storage::{Storage, profile};

/// A complete flush, which the streamer runs in turns.
pub trait FlushAll {
    /// Makes the current changes durable. Partial lines are included if the agent has exited.
    async fn flush(
        &mut self,
        context: &capture::CaptureContext,
        agent_exited: bool,
    ) -> Result<FlushOutcome>;
}

impl FlushAll for LogFlusher {
    async fn flush(
        &mut self,
        context: &capture::CaptureContext,
        agent_exited: bool,
    ) -> Result<FlushOutcome> {
        let (mut raw_bytes, mut entries) = (0, 0);
        loop {
            let outcome = self.flush_turn(context, agent_exited).await?;
            raw_bytes += outcome.raw_bytes;
            entries += outcome.entries;
            if !outcome.is_unfinished {
                return Ok(FlushOutcome {
                    raw_bytes,
                    entries,
                    ..outcome
                });
            }
        }
    }
}

/// One volume and the sessiond on it.
pub struct Writer {
    pub root: PathBuf,
    pub context: capture::CaptureContext,
    index: Arc<SqlIndex>,
    flushers: BTreeMap<LogName, LogFlusher>,
    _directory: tempfile::TempDir,
}

/// Returns the context of a streamer on this directory.
pub fn capture_context(directory: Arc<dyn Directory>, logs: Logs) -> capture::CaptureContext {
    capture::CaptureContext {
        directory,
        profile: profile(),
        logs,
        index_queue: Arc::default(),
        compaction_queue: Arc::default(),
        metadata_queue: None,
        counters: Arc::default(),
        flush_interval: Duration::from_millis(200),
        checkpoints: capture::CheckpointPolicy::default(),
        max_concurrent_flushes: 8,
        limits: EntryLimits::default(),
        session_limit: capture::SessionLimit::default(),
    }
}

/// Streams a root as the daemon does.
pub fn stream(root: PathBuf, context: capture::CaptureContext) -> StreamerHandle {
    let events = Arc::new(EventBuffer::default());
    let watcher = InotifyWatcher::new(
        root.clone(),
        context.directory.clone(),
        context.profile.clone(),
        events.clone(),
    );
    Streamer::start(context, root, events, Box::new(watcher)).unwrap()
}

/// Streams a root without events of the file system, only by scans.
pub fn stream_by_scans(root: PathBuf, context: capture::CaptureContext) -> StreamerHandle {
    let events = Arc::new(EventBuffer::default());
    Streamer::start(context, root, events, Box::new(NullWatcher)).unwrap()
}

/// Streams a root with events that the test produces.
pub fn stream_with_events(
    root: PathBuf,
    context: capture::CaptureContext,
    events: Arc<EventBuffer>,
) -> StreamerHandle {
    struct TestEvents;
    impl Watcher for TestEvents {
        fn refresh(&mut self) -> std::result::Result<(), String> {
            Ok(())
        }
    }
    Streamer::start(context, root, events, Box::new(TestEvents)).unwrap()
}

impl Writer {
    pub fn new(storage: &Storage) -> Writer {
        Writer::with_logs(storage, storage.logs())
    }

    pub fn with_logs(storage: &Storage, logs: Logs) -> Writer {
        Writer::in_directory(storage, logs, tempfile::tempdir().unwrap())
    }

    /// A writer whose root is a subdirectory of this directory.
    pub fn in_directory(storage: &Storage, logs: Logs, directory: tempfile::TempDir) -> Writer {
        let root = directory.path().join("root");
        std::fs::create_dir(&root).unwrap();
        Writer {
            context: capture_context(Arc::new(Disk::new(&root)), logs),
            root,
            index: storage.index.clone(),
            flushers: BTreeMap::new(),
            _directory: directory,
        }
    }

    /// Another machine with a copy of this volume.
    pub fn copy(&self, storage: &Storage) -> Writer {
        let copy = Writer::new(storage);
        std::fs::remove_dir(&copy.root).unwrap();
        files::copy_dir(&self.root, &copy.root);
        copy
    }

    pub fn logs(&self) -> &Logs {
        &self.context.logs
    }

    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    pub fn append(&self, path: &str, text: &str) {
        files::append(&self.path(path), text);
    }

    pub fn replace(&self, path: &str, text: &str) {
        files::replace(&self.path(path), text);
    }

    pub fn files(&self) -> Files {
        files_below(&self.root)
    }

    /// Flushes every log once; returns the bytes and entries that became durable.
    pub async fn flush(&mut self) -> Result<(u64, u32)> {
        let scanned = scan(&*self.context.directory, &*self.context.profile, None)?;
        let mut total = (0, 0);
        for (name, files) in scanned.logs {
            let id = self.context.logs.id(name.clone());
            let flusher = self
                .flushers
                .entry(name)
                .or_insert_with(|| LogFlusher::new(id));
            flusher
                .paths
                .extend(files.into_iter().map(|file| file.path));
            let outcome = flusher.flush(&self.context, false).await?;
            total = (total.0 + outcome.raw_bytes, total.1 + outcome.entries);
        }
        Ok(total)
    }

    /// Ends the process and starts another one on the same volume.
    pub fn restart(&mut self) {
        self.flushers.clear();
    }

    pub async fn restore(&mut self, session: &str, options: Options) -> Result<RestoreReport> {
        self.restart();
        let context = restore::RestoreContext {
            directory: self.context.directory.clone(),
            profile: self.context.profile.clone(),
            logs: self.context.logs.clone(),
        };
        let id = self.context.logs.id(session.parse()?);
        let restored = restore::restore(&context, &id, &options).await?;
        self.context.index_queue.push_stale(id.name);
        Ok(restored.report)
    }

    /// Restores the head and claims the session.
    pub async fn take_over(&mut self, session: &str) -> Result<RestoreReport> {
        let options = Options {
            claim: true,
            ..Options::default()
        };
        self.restore(session, options).await
    }

    pub fn ledger(&self, session: &str) -> Option<Ledger> {
        let id = self.context.logs.id(session.parse().unwrap());
        let store = self.context.logs.store.address();
        Ledger::load(&*self.context.directory, &store, &id)
    }

    /// Deletes all ledgers, as if only the agent's files of a volume survived.
    pub fn delete_ledgers(&self) {
        let _ = std::fs::remove_dir_all(self.path(".sessiond"));
    }

    /// Returns `main`, `branch` or `unclaimed`, or an empty text without a ledger.
    pub fn write_target(&self, session: &str) -> String {
        self.ledger(session)
            .map(|ledger| format!("{:?}", ledger.log_writer.target).to_lowercase())
            .unwrap_or_default()
    }

    /// Records everything that is queued for the index, as the daemon does.
    pub async fn update_index(&self) {
        while let Some(task) = self.context.index_queue.try_next() {
            let behind = match task {
                IndexTask::Entries(records) => {
                    let outcomes = self.index.record_all(&records).await.unwrap();
                    let outcomes = records.into_iter().zip(outcomes);
                    let with_gap = outcomes.filter(|(_, outcome)| outcome.is_gap());
                    with_gap.map(|(record, _)| record.log).collect()
                }
                IndexTask::StaleLog(name) => vec![self.context.logs.id(name)],
                IndexTask::Failure(failure) => {
                    self.index.record_failure(&failure).await.unwrap();
                    continue;
                }
            };
            let (logs, profile) = (&self.context.logs, &*self.context.profile);
            for log in behind {
                catch_up(logs, &*self.index, profile, &log).await.unwrap();
            }
        }
    }
}

/// Checks that no writer appended again after another one had appended.
pub fn assert_not_interleaved(entries: &[Entry], what: &str) {
    let mut fenced = BTreeSet::new();
    for pair in entries.windows(2) {
        if pair[0].header.writer != pair[1].header.writer {
            fenced.insert(pair[0].header.writer.clone());
        }
        assert!(
            !fenced.contains(&pair[1].header.writer),
            "{what}: a fenced writer wrote entry {}",
            pair[1].header.seq
        );
    }
}
