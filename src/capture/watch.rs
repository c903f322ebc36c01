//! File events. They are hints: events can be lost, overflow or stop without notice, so the scan is
//! authoritative.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use notify::event::{EventKind, ModifyKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;

use crate::agent::Profile;
use crate::model::RelPath;
use crate::sys::{Directory, Item, ItemKind};

/// Maximum number of paths in the buffer. Beyond this number, a scan is cheaper.
const MAX_PATHS: usize = 4096;

/// The changes that file events hint at.
#[derive(Debug, Default)]
pub struct ChangeHints {
    /// The changed files and directories, as absolute paths.
    pub paths: BTreeSet<PathBuf>,
    /// Events were lost: scan the whole root.
    pub rescan: bool,
}

/// A buffer of file events.
#[derive(Default)]
pub struct EventBuffer {
    hints: Mutex<ChangeHints>,
    pushed: Notify,
}

impl EventBuffer {
    fn lock(&self) -> MutexGuard<'_, ChangeHints> {
        self.hints.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a changed path.
    pub fn push(&self, path: PathBuf) {
        let mut hints = self.lock();
        if hints.paths.len() >= MAX_PATHS {
            hints.paths.clear();
            hints.rescan = true;
        }
        if !hints.rescan {
            hints.paths.insert(path);
        }
        drop(hints);
        self.pushed.notify_one();
    }

    /// Requests a scan of the whole root.
    pub fn push_rescan(&self) {
        self.lock().rescan = true;
        self.pushed.notify_one();
    }

    /// Waits for an event.
    pub async fn wait(&self) {
        self.pushed.notified().await;
    }

    /// Removes and returns the changes.
    pub fn take(&self) -> ChangeHints {
        std::mem::take(&mut *self.lock())
    }
}

/// A source of file events.
pub trait Watcher: Send {
    /// Watches every directory that exists now. The error is the reason why events are unreliable.
    fn refresh(&mut self) -> Result<(), String>;
}

/// A watcher without events: the streamer relies on scans.
#[cfg_attr(not(debug_assertions), expect(dead_code, reason = "only tests use it"))]
pub struct NullWatcher;

impl Watcher for NullWatcher {
    fn refresh(&mut self) -> Result<(), String> {
        Err("file events are disabled".to_owned())
    }
}

/// A watcher that uses inotify.
pub struct InotifyWatcher {
    root: PathBuf,
    directory: Arc<dyn Directory>,
    profile: Arc<dyn Profile>,
    events: Arc<EventBuffer>,
    watches: Option<Watches>,
}

struct Watches {
    watcher: RecommendedWatcher,
    /// Device and inode of the watched root. Another directory may replace it.
    root: (u64, u64),
    /// A watched directory was deleted or renamed, which ends its watch. A new directory may have
    /// its name and its inode.
    is_broken: Arc<AtomicBool>,
    /// The directories below the root, by name and inode. Each is watched recursively.
    directories: BTreeSet<(String, u64)>,
}

impl InotifyWatcher {
    /// A watcher of `root`, the path of `directory`.
    pub fn new(
        root: PathBuf,
        directory: Arc<dyn Directory>,
        profile: Arc<dyn Profile>,
        events: Arc<EventBuffer>,
    ) -> Self {
        InotifyWatcher {
            root,
            directory,
            profile,
            events,
            watches: None,
        }
    }

    /// Starts to watch the root, without the directories below it.
    fn watch_root(&self, root: (u64, u64)) -> Result<Watches, String> {
        let is_broken = Arc::new(AtomicBool::new(false));
        let handler = {
            let (events, profile) = (self.events.clone(), self.profile.clone());
            let (path, is_broken) = (self.root.clone(), is_broken.clone());
            move |event: notify::Result<notify::Event>| {
                if event
                    .as_ref()
                    .is_ok_and(|event| ends_watch(&path, &*profile, event))
                {
                    is_broken.store(true, Ordering::Relaxed);
                }
                push_event(&events, event);
            }
        };
        let config = notify::Config::default().with_follow_symlinks(false);
        let mut watcher = RecommendedWatcher::new(handler, config).map_err(describe)?;
        watcher
            .watch(&self.root, RecursiveMode::NonRecursive)
            .map_err(describe)?;
        Ok(Watches {
            watcher,
            root,
            is_broken,
            directories: BTreeSet::new(),
        })
    }

    fn watch_directories(&self, watches: &mut Watches, items: Vec<Item>) -> Result<(), String> {
        for item in items {
            let Ok(path) = item.name.parse::<RelPath>() else {
                continue;
            };
            if item.kind != ItemKind::Directory || !self.profile.is_scanned(&path) {
                continue;
            }
            let path = path.below(&self.root);
            let Ok(metadata) = std::fs::metadata(&path) else {
                continue;
            };
            let directory = (item.name.clone(), metadata.ino());
            if !watches.directories.contains(&directory) {
                watches
                    .watcher
                    .watch(&path, RecursiveMode::Recursive)
                    .map_err(describe)?;
                watches.directories.insert(directory);
                // Files that existed before the watch caused no event.
                self.events.push(path);
            }
        }
        Ok(())
    }
}

impl Watcher for InotifyWatcher {
    fn refresh(&mut self) -> Result<(), String> {
        let metadata = std::fs::metadata(&self.root)
            .map_err(|error| format!("{}: {error}", self.root.display()))?;
        let root = (metadata.dev(), metadata.ino());
        let is_current =
            |watches: &Watches| watches.root == root && !watches.is_broken.load(Ordering::Relaxed);
        let watches = self.watches.take();
        let had_watches = watches.is_some();
        let mut watches = match watches.filter(is_current) {
            Some(watches) => watches,
            // The old watches are dropped first: they count toward the limit.
            None => {
                if had_watches {
                    // Changes since the watch ended caused no event.
                    self.events.push_rescan();
                }
                self.watch_root(root)?
            }
        };
        match self.directory.list(None) {
            // If not all directories can be watched, the next refresh starts from the beginning.
            Ok(items) => self.watch_directories(&mut watches, items)?,
            Err(error) => {
                self.watches = Some(watches);
                return Err(error.to_string());
            }
        }
        self.watches = Some(watches);
        Ok(())
    }
}

fn describe(error: notify::Error) -> String {
    match &error.kind {
        notify::ErrorKind::MaxFilesWatch => {
            "too many watches; raise fs.inotify.max_user_watches".to_owned()
        }
        notify::ErrorKind::Io(cause)
            if cause.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error()) =>
        {
            "too many watchers or open files; raise fs.inotify.max_user_instances or ulimit -n"
                .to_owned()
        }
        _ => error.to_string(),
    }
}

fn push_event(events: &EventBuffer, event: notify::Result<notify::Event>) {
    match event {
        Ok(event) if event.need_rescan() => events.push_rescan(),
        // sessiond causes access events when it reads.
        Ok(event)
            if matches!(
                event.kind,
                EventKind::Access(_)
                    | EventKind::Modify(ModifyKind::Metadata(
                        notify::event::MetadataKind::AccessTime
                    ))
            ) => {}
        Ok(event) => event
            .paths
            .into_iter()
            .filter(|path| !is_state_file(path))
            .for_each(|path| events.push(path)),
        Err(_) => events.push_rescan(),
    }
}

/// Whether the root or a directory directly below it was deleted or renamed.
fn ends_watch(root: &Path, profile: &dyn Profile, event: &notify::Event) -> bool {
    let is_watched = |path: &Path| {
        let relative = path.strip_prefix(root).ok().and_then(Path::to_str);
        relative.is_some_and(|relative| {
            relative.is_empty()
                || (!relative.contains('/')
                    && relative.parse().is_ok_and(|path| profile.is_scanned(&path)))
        })
    };
    matches!(
        event.kind,
        EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_))
    ) && event.paths.iter().any(|path| is_watched(path))
}

/// Whether sessiond itself writes the file.
fn is_state_file(path: &Path) -> bool {
    path.components()
        .any(|part| part.as_os_str() == crate::sys::STATE_DIR)
}
