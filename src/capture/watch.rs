//! Events of the file system, as hints. They get lost, overflow and stop without a word; the scan is the truth.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use notify::event::{EventKind, ModifyKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;

use crate::agent::Profile;
use crate::model::RelPath;
use crate::sys::{Directory, ItemKind};

/// More hints than this at a time are not worth keeping apart: scan instead.
const MOST_HINTS: usize = 4096;

/// What changed.
#[derive(Debug, Default)]
pub struct ChangeHints {
    /// Files or directories, absolute.
    pub paths: BTreeSet<PathBuf>,
    /// Something was missed: scan everything.
    pub rescan: bool,
}

/// Where events are gathered until somebody asks.
#[derive(Default)]
pub struct EventBuffer {
    waiting: Mutex<ChangeHints>,
    arrived: Notify,
}

impl EventBuffer {
    /// Something changed at `path`.
    pub fn path(&self, path: PathBuf) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.paths.len() >= MOST_HINTS {
            waiting.paths.clear();
            waiting.rescan = true;
        }
        if !waiting.rescan {
            waiting.paths.insert(path);
        }
        drop(waiting);
        self.arrived.notify_one();
    }

    /// Something was missed.
    pub fn rescan(&self) {
        self.waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .rescan = true;
        self.arrived.notify_one();
    }

    /// Waits until something changed.
    pub async fn arrived(&self) {
        self.arrived.notified().await;
    }

    /// What changed since the last time.
    pub fn take(&self) -> ChangeHints {
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A source of hints.
pub trait Watcher: Send {
    /// Sees to it that everything is watched that is there now; answers why events cannot be relied on, if so.
    fn refresh(&mut self) -> Option<String>;
}

/// No events at all: scanning is all there is.
pub struct NullWatcher;

impl Watcher for NullWatcher {
    fn refresh(&mut self) -> Option<String> {
        Some("events are switched off".to_owned())
    }
}

/// Watches a directory on a real disk through inotify.
pub struct InotifyWatcher {
    root: PathBuf,
    directory: Arc<dyn Directory>,
    profile: Arc<dyn Profile>,
    hints: Arc<EventBuffer>,
    watching: Option<Watching>,
}

struct Watching {
    watcher: RecommendedWatcher,
    /// The root that is watched; another one may take its name.
    root: (u64, u64),
    /// One of the directories was deleted or renamed: its watch went with it, and a new one may get its name and its number.
    lost: Arc<AtomicBool>,
    /// Directories directly below it, each watched with all that is in it.
    tops: BTreeSet<(String, u64)>,
}

impl InotifyWatcher {
    /// Watches `root`, which is `directory`.
    pub fn new(
        root: PathBuf,
        directory: Arc<dyn Directory>,
        profile: Arc<dyn Profile>,
        hints: Arc<EventBuffer>,
    ) -> Self {
        InotifyWatcher {
            root,
            directory,
            profile,
            hints,
            watching: None,
        }
    }

    fn watch(&mut self) -> Result<(), String> {
        let found = std::fs::metadata(&self.root)
            .map_err(|error| format!("{}: {error}", self.root.display()))?;
        let root = (found.dev(), found.ino());
        let say = |error: notify::Error| {
            match &error.kind {
            notify::ErrorKind::MaxFilesWatch => "the limit of watches is reached; raise fs.inotify.max_user_watches".to_owned(),
            notify::ErrorKind::Io(cause) if cause.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error()) => {
                "the limit of watchers or of open files is reached; raise fs.inotify.max_user_instances or ulimit -n".to_owned()
            }
            _ => error.to_string(),
        }
        };
        if self
            .watching
            .as_ref()
            .is_none_or(|watching| watching.root != root || watching.lost.load(Ordering::Relaxed))
        {
            // Let go of the old one first: it holds watches that count. What happened since it broke made no event.
            if self.watching.take().is_some() {
                self.hints.rescan();
            }
            let (hints, lost) = (self.hints.clone(), Arc::new(AtomicBool::new(false)));
            let (watched, profile, loses) = (self.root.clone(), self.profile.clone(), lost.clone());
            let config = notify::Config::default().with_follow_symlinks(false);
            let note = move |event: notify::Result<notify::Event>| {
                if event
                    .as_ref()
                    .is_ok_and(|event| is_loss(&watched, &*profile, event))
                {
                    loses.store(true, Ordering::Relaxed);
                }
                note(&hints, event);
            };
            let mut watcher = RecommendedWatcher::new(note, config).map_err(say)?;
            watcher
                .watch(&self.root, RecursiveMode::NonRecursive)
                .map_err(say)?;
            self.watching = Some(Watching {
                watcher,
                root,
                lost,
                tops: BTreeSet::new(),
            });
        }
        let Some(watching) = &mut self.watching else {
            return Ok(());
        };
        for item in self
            .directory
            .list(None)
            .map_err(|error| error.to_string())?
        {
            let Ok(path) = item.name.parse::<RelPath>() else {
                continue;
            };
            if item.kind != ItemKind::Directory || !self.profile.enter(&path) {
                continue;
            }
            let below = path.below(&self.root);
            let Ok(found) = std::fs::metadata(&below) else {
                continue;
            };
            let top = (item.name.clone(), found.ino());
            if !watching.tops.contains(&top) {
                if let Err(error) = watching.watcher.watch(&below, RecursiveMode::Recursive) {
                    // A part may be watched and a part not: begin anew next time.
                    self.watching = None;
                    return Err(say(error));
                }
                watching.tops.insert(top);
                // What was in it before the watch made no event.
                self.hints.path(below);
            }
        }
        Ok(())
    }
}

impl Watcher for InotifyWatcher {
    fn refresh(&mut self) -> Option<String> {
        self.watch().err()
    }
}

fn note(hints: &EventBuffer, event: notify::Result<notify::Event>) {
    match event {
        Ok(event) if event.need_rescan() => hints.rescan(),
        // Our own reading makes access events.
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
            .filter(|path| !is_ours(path))
            .for_each(|path| hints.path(path)),
        Err(_) => hints.rescan(),
    }
}

/// Whether the root or a directory directly below it lost its name.
fn is_loss(root: &Path, profile: &dyn Profile, event: &notify::Event) -> bool {
    let top = |path: &Path| {
        let below = path.strip_prefix(root).ok().and_then(Path::to_str);
        below.is_some_and(|below| {
            below.is_empty()
                || (!below.contains('/') && below.parse().is_ok_and(|below| profile.enter(&below)))
        })
    };
    matches!(
        event.kind,
        EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_))
    ) && event.paths.iter().any(|path| top(path))
}

fn is_ours(path: &Path) -> bool {
    path.components()
        .any(|part| part.as_os_str() == crate::sys::STATE_DIR)
}
