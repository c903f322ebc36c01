//! A volume: files in memory with identity, time and mode, and a process's access to them. It
//! survives its processes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sessiond::capture::watch::{EventBuffer, Watcher};
use sessiond::model::{FileStat, RelPath};
use sessiond::sys::{Directory, Item, ItemKind, Meta, OpenFile, Owner, STATE_DIR};

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
    /// Half of them get lost without a word.
    Missed,
    /// The queue overflows: all that is known is that something changed.
    Overflow,
    /// There are none, and that is known.
    Off,
}

#[derive(Default)]
struct Inner {
    nodes: BTreeMap<String, Shared>,
    next_ino: u64,
    /// Numbers of deleted files are given out again.
    free: Vec<u64>,
    full: bool,
    events: Events,
    hints: Option<Arc<EventBuffer>>,
    /// What a power cut leaves of a file of ours that was not made durable.
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

    pub fn watched_by(&self, hints: Option<Arc<EventBuffer>>) {
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

    /// Forgets what sessiond knows.
    pub fn lose_state(&self) {
        self.inner()
            .nodes
            .retain(|path, _| !path.starts_with(STATE_DIR));
    }

    /// The machine loses its power: what was not made durable is as it was, torn, or there after all.
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

    // What the agent does. Lines that follow each other within a tick of the kernel's clock still differ in length, so
    // their time may well; a file that is replaced as one can change twice within a tick.

    fn now(&self, inner: &mut Inner, path: &str) -> i64 {
        let micros = self.clock.micros();
        if !path.ends_with(".jsonl") {
            return (micros - micros.rem_euclid(TICK)) * 1000;
        }
        inner.changes += 1;
        micros * 1000 + inner.changes
    }

    /// Cuts a file at `at` (its end if none) and goes on with `bytes`.
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
        self.tell(&inner, path, rng);
    }

    /// Puts another file in place.
    pub fn agent_replaces(&self, path: &str, bytes: &[u8], rng: &mut SeededRng) {
        let mut inner = self.inner();
        let now = self.now(&mut inner, path);
        let mut node = inner.new_node(now, 0o600);
        node.bytes = bytes.to_vec();
        inner.drop_node(path);
        inner
            .nodes
            .insert(path.to_owned(), Arc::new(Mutex::new(node)));
        self.tell(&inner, path, rng);
    }

    pub fn agent_renames(&self, from: &str, to: &str, rng: &mut SeededRng) {
        let mut inner = self.inner();
        if let Some(node) = inner.nodes.remove(from) {
            inner.drop_node(to);
            inner.nodes.insert(to.to_owned(), node);
            self.tell(&inner, from, rng);
            self.tell(&inner, to, rng);
        }
    }

    fn tell(&self, inner: &Inner, path: &str, rng: &mut SeededRng) {
        let Some(hints) = &inner.hints else { return };
        match inner.events {
            Events::Off => {}
            Events::Missed if rng.coin() => {}
            Events::All | Events::Missed => hints.push(self.root().join(path)),
            Events::Overflow => hints.push_rescan(),
        }
    }
}

/// Hears of the volume's changes.
pub struct SimWatch(pub Arc<Disk>);

impl Watcher for SimWatch {
    fn refresh(&mut self) -> Result<(), String> {
        if self.0.inner().events == Events::Off {
            return Err("there are no events".to_owned());
        }
        Ok(())
    }
}

/// One process's way to a volume.
pub struct Mount {
    pub disk: Arc<Disk>,
    pub world: Arc<World>,
    pub lifetime: Arc<ProcessLifetime>,
}

impl Mount {
    fn alive(&self) -> io::Result<()> {
        if self.lifetime.is_dead() {
            Err(ProcessLifetime::gone())
        } else {
            Ok(())
        }
    }

    /// One change, with a chance to die before and behind it.
    fn change(
        &self,
        what: &str,
        path: &RelPath,
        takes_room: bool,
        change: impl FnOnce(&mut Inner) -> io::Result<()>,
    ) -> io::Result<()> {
        let step = self.lifetime.begin().ok_or_else(ProcessLifetime::gone)?;
        let mut inner = self.disk.inner();
        let done = if takes_room && inner.full {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            change(&mut inner)
        };
        drop(inner);
        self.world.note(|| {
            let answer = done
                .as_ref()
                .map_or_else(|error| error.to_string(), |()| "ok".to_owned());
            format!(
                "life {}: step {step} {what} {path}: {answer}",
                self.lifetime.number
            )
        });
        if self.lifetime.end(step) {
            done
        } else {
            Err(ProcessLifetime::gone())
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
        self.alive()?;
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
        self.alive()?;
        Ok(self
            .disk
            .inner()
            .nodes
            .get(path.as_str())
            .map(|node| stat_of(&lock(node))))
    }

    fn open(&self, path: &RelPath) -> io::Result<Option<Box<dyn OpenFile>>> {
        self.alive()?;
        Ok(self
            .disk
            .inner()
            .nodes
            .get(path.as_str())
            .map(|node| Box::new(Open(node.clone())) as Box<dyn OpenFile>))
    }

    fn read(&self, path: &RelPath) -> io::Result<Option<Vec<u8>>> {
        self.alive()?;
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

    fn finish(&self, path: &RelPath, meta: &Meta) -> io::Result<()> {
        self.change("finish", path, false, |inner| {
            let node = inner
                .nodes
                .get(path.as_str())
                .ok_or(io::ErrorKind::NotFound)?;
            let mut node = lock(node);
            (node.mode, node.mtime_ns) = (meta.mode & 0o777, meta.mtime_ns);
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
            let gone: Vec<String> = inner
                .nodes
                .keys()
                .filter(|key| *key == path.as_str() || key.starts_with(&below))
                .cloned()
                .collect();
            gone.iter().for_each(|path| inner.drop_node(path));
            Ok(())
        })
    }

    // A simulated crash stops the process; it does not lose written bytes.
    fn sync_files(&self, _paths: &[RelPath]) -> io::Result<()> {
        Ok(())
    }

    fn sync_names(&self, _paths: &[RelPath]) -> io::Result<()> {
        Ok(())
    }
}
