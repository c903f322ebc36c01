//! A volume: files in memory with identity, time and mode, and a process's access to them. It
//! survives its processes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sessiond::capture::watch::{EventBuffer, Watcher};
use sessiond::model::{FileStat, RelPath};
use sessiond::sys::{Directory, FileAttributes, Item, ItemKind, OpenFile, Owner, STATE_DIR};

use super::history::Files;
use super::process::ProcessLifetime;
use super::rng::SeededRng;
use super::world::{HostClock, World};

/// The kernel's clock for files ticks this often, in microseconds.
const TICK: i64 = 4_000;

/// A file.
pub struct Node {
    ino: u64,
    bytes: Vec<u8>,
    mtime_ns: i64,
    mode: u32,
}

type Shared = Arc<Mutex<Node>>;

/// How events of this volume reach a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Events {
    #[default]
    All,
    /// Half of them are lost silently.
    Missed,
    /// The queue overflows: the process knows only that something changed.
    Overflow,
    /// Watching fails with an error.
    Off,
}

#[derive(Default)]
struct Inner {
    nodes: BTreeMap<String, Shared>,
    next_ino: u64,
    /// Inode numbers of deleted files, for reuse.
    free: Vec<u64>,
    full: bool,
    events: Events,
    hints: Option<Arc<EventBuffer>>,
    /// The content after a power cut of a state file that was not synced.
    durable: BTreeMap<String, Vec<u8>>,
    at_risk: BTreeSet<String>,
    changes: i64,
}

impl Inner {
    fn new_node(&mut self, mtime_ns: i64, mode: u32) -> Node {
        let ino = self.free.pop().unwrap_or_else(|| {
            self.next_ino += 1;
            self.next_ino
        });
        Node {
            ino,
            bytes: Vec::new(),
            mtime_ns,
            mode,
        }
    }

    fn drop_node(&mut self, path: &str) {
        if let Some(node) = self.nodes.remove(path) {
            self.free.push(lock(&node).ino);
        }
    }
}

fn lock(node: &Shared) -> MutexGuard<'_, Node> {
    node.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A volume.
pub struct Disk {
    pub volume: u64,
    pub clock: Arc<HostClock>,
    inner: Mutex<Inner>,
}

impl Disk {
    pub fn new(volume: u64, clock: Arc<HostClock>) -> Arc<Disk> {
        Arc::new(Disk {
            volume,
            clock,
            inner: Mutex::default(),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn root(&self) -> PathBuf {
        PathBuf::from(format!("/sim/{}", self.volume))
    }

    pub fn set_full(&self, full: bool) {
        self.inner().full = full;
    }

    pub fn set_events(&self, events: Events) {
        self.inner().events = events;
    }

    pub fn set_watcher(&self, hints: Option<Arc<EventBuffer>>) {
        self.inner().hints = hints;
    }

    /// The agent's files: bytes, time and mode.
    pub fn agents_files(&self) -> BTreeMap<String, (Vec<u8>, i64, u32)> {
        let inner = self.inner();
        let agents = inner
            .nodes
            .iter()
            .filter(|(path, _)| !path.starts_with(STATE_DIR));
        agents
            .map(|(path, node)| {
                let node = lock(node);
                (path.clone(), (node.bytes.clone(), node.mtime_ns, node.mode))
            })
            .collect()
    }

    pub fn files(&self) -> Files {
        self.agents_files()
            .into_iter()
            .map(|(path, (bytes, _, _))| (path, bytes))
            .collect()
    }

    pub fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        self.inner()
            .nodes
            .get(path)
            .map(|node| lock(node).bytes.clone())
    }

    /// Deletes sessiond's state directory.
    pub fn lose_state(&self) {
        self.inner()
            .nodes
            .retain(|path, _| !path.starts_with(STATE_DIR));
    }

    /// Simulates a power cut: each file that was not synced has its old content, is torn, or has
    /// its new content.
    pub fn cut_power(&self, rng: &mut SeededRng) {
        let mut inner = self.inner();
        for path in std::mem::take(&mut inner.at_risk) {
            let before = inner.durable.get(&path).cloned();
            match (rng.below(3), before) {
                (0, _) => {}
                (1, None) => inner.drop_node(&path),
                (1, Some(bytes)) => {
                    if let Some(node) = inner.nodes.get(&path) {
                        lock(node).bytes = bytes;
                    }
                }
                _ => {
                    if let Some(node) = inner.nodes.get(&path) {
                        let mut node = lock(node);
                        let half = node.bytes.len() / 2;
                        node.bytes.truncate(half);
                    }
                }
            }
        }
    }

    // The agent's operations. Two appends within a tick of the kernel's clock differ in length, so
    // each gets its own time. A side file can change twice within a tick.

    fn now(&self, inner: &mut Inner, path: &str) -> i64 {
        let micros = self.clock.micros();
        if !path.ends_with(".jsonl") {
            return (micros - micros.rem_euclid(TICK)) * 1000;
        }
        inner.changes += 1;
        micros * 1000 + inner.changes
    }

    /// Truncates a file at `at` (at its end if none) and appends `bytes`.
    pub fn agent_writes(&self, path: &str, at: Option<usize>, bytes: &[u8], rng: &mut SeededRng) {
        let mut inner = self.inner();
        let now = self.now(&mut inner, path);
        let node = match inner.nodes.get(path) {
            Some(node) => node.clone(),
            None => {
                let node = Arc::new(Mutex::new(inner.new_node(now, 0o600)));
                inner.nodes.insert(path.to_owned(), node.clone());
                node
            }
        };
        {
            let mut node = lock(&node);
            if let Some(at) = at {
                node.bytes.truncate(at);
            }
            node.bytes.extend_from_slice(bytes);
            node.mtime_ns = now;
        }
        self.emit_event(&inner, path, rng);
    }

    /// Replaces a file with a new one.
    pub fn agent_replaces(&self, path: &str, bytes: &[u8], rng: &mut SeededRng) {
        let mut inner = self.inner();
        let now = self.now(&mut inner, path);
        let mut node = inner.new_node(now, 0o600);
        node.bytes = bytes.to_vec();
        inner.drop_node(path);
        inner
            .nodes
            .insert(path.to_owned(), Arc::new(Mutex::new(node)));
        self.emit_event(&inner, path, rng);
    }

    pub fn agent_renames(&self, from: &str, to: &str, rng: &mut SeededRng) {
        let mut inner = self.inner();
        if let Some(node) = inner.nodes.remove(from) {
            inner.drop_node(to);
            inner.nodes.insert(to.to_owned(), node);
            self.emit_event(&inner, from, rng);
            self.emit_event(&inner, to, rng);
        }
    }

    fn emit_event(&self, inner: &Inner, path: &str, rng: &mut SeededRng) {
        let Some(hints) = &inner.hints else { return };
        match inner.events {
            Events::Off => {}
            Events::Missed if rng.coin() => {}
            Events::All | Events::Missed => hints.push(self.root().join(path)),
            Events::Overflow => hints.push_rescan(),
        }
    }
}

/// Watches the volume.
pub struct SimWatch(pub Arc<Disk>);

impl Watcher for SimWatch {
    fn refresh(&mut self) -> Result<(), String> {
        if self.0.inner().events == Events::Off {
            return Err("there are no events".to_owned());
        }
        Ok(())
    }
}

/// One process's access to a volume.
pub struct Mount {
    pub disk: Arc<Disk>,
    pub world: Arc<World>,
    pub lifetime: Arc<ProcessLifetime>,
}

impl Mount {
    fn check_running(&self) -> io::Result<()> {
        if self.lifetime.is_killed() {
            Err(ProcessLifetime::killed_error())
        } else {
            Ok(())
        }
    }

    /// One change. The process can crash before or after it.
    fn change(
        &self,
        what: &str,
        path: &RelPath,
        needs_space: bool,
        change: impl FnOnce(&mut Inner) -> io::Result<()>,
    ) -> io::Result<()> {
        let step = self
            .lifetime
            .begin()
            .ok_or_else(ProcessLifetime::killed_error)?;
        let mut inner = self.disk.inner();
        let done = if needs_space && inner.full {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            change(&mut inner)
        };
        drop(inner);
        self.world.note(|| {
            let result = done
                .as_ref()
                .map_or_else(|error| error.to_string(), |()| "ok".to_owned());
            format!(
                "process {}: step {step} {what} {path}: {result}",
                self.lifetime.number
            )
        });
        if self.lifetime.end(step) {
            done
        } else {
            Err(ProcessLifetime::killed_error())
        }
    }
}

struct Open(Shared);

fn stat_of(node: &Node) -> FileStat {
    FileStat {
        dev: 1,
        ino: node.ino,
        size: node.bytes.len() as u64,
        mtime_ns: node.mtime_ns,
        mode: node.mode,
    }
}

impl OpenFile for Open {
    fn stat(&self) -> io::Result<FileStat> {
        Ok(stat_of(&lock(&self.0)))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let node = lock(&self.0);
        let rest = node.bytes.get(offset as usize..).unwrap_or_default();
        let got = rest.len().min(buffer.len());
        buffer[..got].copy_from_slice(&rest[..got]);
        Ok(got)
    }
}

impl Directory for Mount {
    fn list(&self, directory: Option<&RelPath>) -> io::Result<Vec<Item>> {
        self.check_running()?;
        let prefix = directory.map_or_else(String::new, |directory| format!("{directory}/"));
        let inner = self.disk.inner();
        let mut items: BTreeMap<String, ItemKind> = BTreeMap::new();
        for path in inner
            .nodes
            .range(prefix.clone()..)
            .map(|(path, _)| path)
            .take_while(|path| path.starts_with(&prefix))
        {
            match path[prefix.len()..].split_once('/') {
                Some((name, _)) => items.insert(name.to_owned(), ItemKind::Directory),
                None => items.insert(path[prefix.len()..].to_owned(), ItemKind::File),
            };
        }
        Ok(items
            .into_iter()
            .map(|(name, kind)| Item { name, kind })
            .collect())
    }

    fn stat(&self, path: &RelPath) -> io::Result<Option<FileStat>> {
        self.check_running()?;
        Ok(self
            .disk
            .inner()
            .nodes
            .get(path.as_str())
            .map(|node| stat_of(&lock(node))))
    }

    fn open(&self, path: &RelPath) -> io::Result<Option<Box<dyn OpenFile>>> {
        self.check_running()?;
        Ok(self
            .disk
            .inner()
            .nodes
            .get(path.as_str())
            .map(|node| Box::new(Open(node.clone())) as Box<dyn OpenFile>))
    }

    fn read(&self, path: &RelPath) -> io::Result<Option<Vec<u8>>> {
        self.check_running()?;
        Ok(self.disk.bytes(path.as_str()))
    }

    fn replace(&self, path: &RelPath, bytes: &[u8], durable: bool) -> io::Result<()> {
        let now = self.disk.clock.micros() * 1000;
        self.change("replace", path, true, |inner| {
            let mut node = inner.new_node(now, 0o600);
            node.bytes = bytes.to_vec();
            inner.drop_node(path.as_str());
            inner
                .nodes
                .insert(path.to_string(), Arc::new(Mutex::new(node)));
            if durable {
                inner.durable.insert(path.to_string(), bytes.to_vec());
                inner.at_risk.remove(path.as_str());
            } else {
                inner.at_risk.insert(path.to_string());
            }
            Ok(())
        })
    }

    fn write_at(&self, path: &RelPath, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let now = self.disk.clock.micros() * 1000;
        self.change("write", path, true, |inner| {
            if !inner.nodes.contains_key(path.as_str()) {
                let node = inner.new_node(now, 0o600);
                inner
                    .nodes
                    .insert(path.to_string(), Arc::new(Mutex::new(node)));
            }
            if let Some(node) = inner.nodes.get(path.as_str()) {
                let mut node = lock(node);
                node.bytes.resize(offset as usize, 0);
                node.bytes.extend_from_slice(bytes);
                node.mtime_ns = now;
            }
            Ok(())
        })
    }

    fn finish(&self, path: &RelPath, attributes: &FileAttributes) -> io::Result<()> {
        self.change("finish", path, false, |inner| {
            let node = inner
                .nodes
                .get(path.as_str())
                .ok_or(io::ErrorKind::NotFound)?;
            let mut node = lock(node);
            (node.mode, node.mtime_ns) = (attributes.mode & 0o777, attributes.mtime_ns);
            Ok(())
        })
    }

    fn rename(&self, from: &RelPath, to: &RelPath, _owner: Option<Owner>) -> io::Result<()> {
        self.change("rename", to, false, |inner| {
            let node = inner
                .nodes
                .remove(from.as_str())
                .ok_or(io::ErrorKind::NotFound)?;
            inner.drop_node(to.as_str());
            inner.nodes.insert(to.to_string(), node);
            Ok(())
        })
    }

    fn remove(&self, path: &RelPath) -> io::Result<()> {
        self.change("remove", path, false, |inner| {
            let below = format!("{path}/");
            let killed: Vec<String> = inner
                .nodes
                .keys()
                .filter(|key| *key == path.as_str() || key.starts_with(&below))
                .cloned()
                .collect();
            killed.iter().for_each(|path| inner.drop_node(path));
            Ok(())
        })
    }
}
