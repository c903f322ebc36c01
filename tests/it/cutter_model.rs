//! The cutter against a model: generated actions on real files, flushes and restarts between them, and after every
//! flush the bucket must hold what a small set of rules says.
//!
//! Owns the rules. Every line that is written is unlike any other, so that equal bytes mean the same bytes. The clock
//! of the files is ours: each change gets a time of its own, as a file system with fine time stamps gives it.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};
use sessiond::capture::ship::{Shipment, Shipped};
use sessiond::capture::survey::survey;
use sessiond::log::pen::Ground;
use sessiond::model::WriterId;

use crate::support::world::{Files, World, files_below};

const SESSION: &str = "3f2a";
const PROJECTS: [&str; 2] = ["-work-a", "-work-b"];

/// The files that actions are about: transcripts first, then side files.
const FILES: [&str; 6] = [
    "projects/{p}/3f2a.jsonl",
    "projects/{p}/3f2a/subagents/agent-1.jsonl",
    "projects/{p}/3f2a/subagents/agent-1.meta.json",
    "projects/{p}/3f2a/tool-results/t1.txt",
    "projects/{p}/3f2a/tool-results/t2.txt",
    "tasks/3f2a/1.json",
];

#[derive(Debug, Clone)]
enum Act {
    Lines(usize, usize),
    HalfLine(usize),
    FinishLine(usize),
    Huge(usize),
    Truncate(usize, u8),
    TruncateAndGrow(usize, u8),
    ReplaceByTheSame(usize),
    ReplaceByAnother(usize),
    ReplaceByALonger(usize),
    RewriteInPlace(usize),
    Delete(usize),
    Touch(usize),
    Chmod(usize, bool),
    MoveToTheOtherProject,
    Flush,
    LastFlush,
    Restart,
    RestartWithoutLedger,
    RestartWithOlderLedger,
}

fn act() -> impl Strategy<Value = Act> {
    // The transcript is what most of it is about.
    let file = || prop_oneof![3 => Just(0usize), 2 => 1..FILES.len()];
    prop_oneof![
        8 => (file(), 1usize..4).prop_map(|(file, lines)| Act::Lines(file, lines)),
        4 => file().prop_map(Act::HalfLine),
        3 => file().prop_map(Act::FinishLine),
        1 => file().prop_map(Act::Huge),
        2 => (file(), any::<u8>()).prop_map(|(file, to)| Act::Truncate(file, to)),
        2 => (file(), any::<u8>()).prop_map(|(file, to)| Act::TruncateAndGrow(file, to)),
        1 => file().prop_map(Act::ReplaceByTheSame),
        2 => file().prop_map(Act::ReplaceByAnother),
        1 => file().prop_map(Act::ReplaceByALonger),
        2 => file().prop_map(Act::RewriteInPlace),
        2 => file().prop_map(Act::Delete),
        1 => file().prop_map(Act::Touch),
        1 => (file(), any::<bool>()).prop_map(|(file, wide)| Act::Chmod(file, wide)),
        2 => Just(Act::MoveToTheOtherProject),
        10 => Just(Act::Flush),
        1 => Just(Act::LastFlush),
        2 => Just(Act::Restart),
        1 => Just(Act::RestartWithoutLedger),
        1 => Just(Act::RestartWithOlderLedger),
    ]
}

/// How the right to write came to the flush that is checked.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Carried {
    /// By the ledger, as it was left.
    Whole,
    /// By a ledger from before the last flush.
    Older,
    /// Not at all.
    Lost,
}

struct Case {
    world: World,
    runtime: tokio::runtime::Runtime,
    shipment: Shipment,
    project: usize,
    /// Makes every line and every time unlike any other.
    count: u64,
    /// What the bucket holds on the ground where we write.
    stored: Files,
    branch: Option<WriterId>,
    unclaimed: bool,
    carried: Carried,
    /// Mode and time are known to the log only while the ledger is whole.
    meta: bool,
    older_ledger: Option<PathBuf>,
}

impl Case {
    fn new() -> Case {
        let world = World::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let shipment = Shipment::new(world.id(SESSION));
        Case {
            world,
            runtime,
            shipment,
            project: 0,
            count: 0,
            stored: Files::new(),
            branch: None,
            unclaimed: true,
            carried: Carried::Whole,
            meta: true,
            older_ledger: None,
        }
    }

    fn path(&self, file: usize) -> PathBuf {
        self.world.root().join(FILES[file].replace("{p}", PROJECTS[self.project]))
    }

    fn number(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    fn line(&mut self) -> String {
        format!("{{\"n\":{:06},\"type\":\"user\"}}\n", self.number())
    }

    /// What the file has; none if it is not there.
    fn bytes(&self, file: usize) -> Option<Vec<u8>> {
        std::fs::read(self.path(file)).ok()
    }

    /// Gives a file its bytes in place, and a time of its own.
    fn put(&mut self, file: usize, bytes: &[u8]) {
        let path = self.path(file);
        crate::support::world::write(&path, bytes);
        self.stamp(&path);
    }

    fn stamp(&mut self, path: &Path) {
        let time = UNIX_EPOCH + Duration::from_secs(1_700_000_000 + self.number());
        std::fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    }

    fn add(&mut self, file: usize, bytes: &[u8]) {
        let path = self.path(file);
        crate::support::world::append(&path, bytes);
        self.stamp(&path);
    }

    fn replace(&mut self, file: usize, bytes: &[u8]) {
        let path = self.path(file);
        let new = path.with_extension("tmp");
        crate::support::world::write(&new, bytes);
        self.stamp(&new);
        std::fs::rename(new, path).unwrap();
    }

    fn act(&mut self, act: &Act) -> Result<(), TestCaseError> {
        match *act {
            Act::Lines(file, lines) => {
                let text: String = (0..lines).map(|_| self.line()).collect();
                self.add(file, text.as_bytes());
            }
            Act::HalfLine(file) => {
                let line = self.line();
                self.add(file, line[..line.len() - 4].trim_end().as_bytes());
            }
            Act::FinishLine(file) => {
                let rest = format!("\",\"m\":{}}}\n", self.number());
                self.add(file, rest.as_bytes());
            }
            Act::Huge(file) => {
                // Longer than every buffer and window on the way.
                let line = self.line();
                self.add(file, line.trim_end().repeat(6000).as_bytes());
                self.add(file, b"\n");
            }
            Act::Truncate(file, to) => {
                if let Some(bytes) = self.bytes(file) {
                    let to = bytes.len() * usize::from(to) / 256;
                    self.put(file, &bytes[..to]);
                }
            }
            Act::TruncateAndGrow(file, to) => {
                if let Some(mut bytes) = self.bytes(file) {
                    let before = bytes.len();
                    bytes.truncate(before * usize::from(to) / 256);
                    while bytes.len() <= before {
                        bytes.extend_from_slice(self.line().as_bytes());
                    }
                    self.put(file, &bytes);
                }
            }
            Act::ReplaceByTheSame(file) => {
                if let Some(bytes) = self.bytes(file) {
                    self.replace(file, &bytes);
                }
            }
            Act::ReplaceByAnother(file) => {
                let line = self.line();
                self.replace(file, line.as_bytes());
            }
            Act::ReplaceByALonger(file) => {
                let line = self.line();
                let bytes = [self.bytes(file).unwrap_or_default(), line.into_bytes()].concat();
                self.replace(file, &bytes);
            }
            Act::RewriteInPlace(file) => {
                if let Some(bytes) = self.bytes(file) {
                    // Every line gets another number: the same size, other bytes all over.
                    let number = format!("\"n\":{:06}", self.number());
                    let text = String::from_utf8(bytes).unwrap();
                    let mut pieces = text.split("\"n\":");
                    let mut new = pieces.next().unwrap_or_default().to_owned();
                    for piece in pieces {
                        new.push_str(if piece.len() >= 6 { &number } else { "\"n\":" });
                        new.push_str(if piece.len() >= 6 { &piece[6..] } else { piece });
                    }
                    assert_eq!(new.len(), text.len());
                    self.put(file, new.as_bytes());
                }
            }
            Act::Delete(file) => {
                let _ = std::fs::remove_file(self.path(file));
            }
            Act::Touch(file) => {
                let path = self.path(file);
                if path.exists() {
                    self.stamp(&path);
                }
            }
            Act::Chmod(file, wide) => {
                let mode = std::fs::Permissions::from_mode(if wide { 0o644 } else { 0o600 });
                let _ = std::fs::set_permissions(self.path(file), mode);
            }
            Act::MoveToTheOtherProject => {
                let from: Vec<PathBuf> = (0..FILES.len()).map(|file| self.path(file)).collect();
                self.project = 1 - self.project;
                for (file, from) in from.iter().enumerate() {
                    let to = self.path(file);
                    if from.exists() && *from != to {
                        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
                        std::fs::rename(from, to).unwrap();
                    }
                }
            }
            Act::Flush => self.flush(false)?,
            Act::LastFlush => self.flush(true)?,
            Act::Restart => self.shipment = Shipment::new(self.world.id(SESSION)),
            Act::RestartWithoutLedger => {
                self.shipment = Shipment::new(self.world.id(SESSION));
                self.world.lose_ledgers();
                self.carried = Carried::Lost;
                self.meta = false;
            }
            Act::RestartWithOlderLedger => {
                if let Some(older) = &self.older_ledger {
                    let ledgers = self.world.root().join(".sessiond");
                    let _ = std::fs::remove_dir_all(&ledgers);
                    copy_all(older, &ledgers);
                    self.shipment = Shipment::new(self.world.id(SESSION));
                    self.carried = Carried::Older;
                    self.meta = false;
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self, last: bool) -> Result<(), TestCaseError> {
        let context = self.world.context();
        // The streamer knows every path from its scan.
        let seen = survey(&*context.folder, &*context.profile, None).unwrap();
        let paths = seen.logs.into_values().flatten().map(|file| file.path);
        self.shipment.hints.extend(paths);
        let ledgers = self.world.root().join(".sessiond");
        let kept = self.world.folder("older-ledger");
        let _ = std::fs::remove_dir_all(&kept);
        self.older_ledger = ledgers.exists().then(|| {
            copy_all(&ledgers, &kept);
            kept
        });
        let writes = self.world.store.writes();
        let shipped = self.runtime.block_on(self.shipment.flush(&context, last)).map_err(|error| fail(error.to_string()))?;
        let writes = self.world.store.writes() - writes;
        let pen = self.shipment.ledger.as_ref().unwrap().pen.clone();
        let unclaimed = pen.ground == Ground::Unclaimed;
        let branch = (pen.ground == Ground::Branch).then_some(pen.writer);
        let entries = self.runtime.block_on(self.world.numbers(SESSION));
        let local = files_below(&self.world.root());
        let stored = if entries == 0 && branch.is_none() {
            Files::new()
        } else {
            self.runtime.block_on(self.world.stored_on(SESSION, branch.clone())).unwrap_or_default()
        };
        if branch != self.branch {
            prop_assert_ne!(self.carried, Carried::Whole, "the ledger was whole, and the flush went elsewhere");
            let main = self.runtime.block_on(self.world.stored(SESSION)).unwrap_or_default();
            if branch.is_some() {
                let goes_on = main.iter().all(|(path, stored)| local.get(path).is_some_and(|local| local.starts_with(stored)));
                prop_assert!(!goes_on, "the files go on from the log, and the flush went to a branch");
            }
            // Another ground: what it held before is what it holds of the files that did not change.
            let unchanged = |(path, stored): &(&String, &Vec<u8>)| local.get(*path).is_none_or(|local| !local.starts_with(stored));
            self.stored = stored.iter().filter(unchanged).map(|(path, stored)| (path.clone(), stored.clone())).collect();
        }
        self.check_files(&local, &stored, last)?;
        if self.carried == Carried::Whole {
            self.check_work(&local, &stored, &shipped, writes)?;
        }
        if self.meta {
            self.check_meta(&local, &stored)?;
        }
        (self.stored, self.branch, self.unclaimed) = (stored, branch, unclaimed);
        // That a ledger is older shows at the next write.
        if shipped.entries > 0 || self.carried == Carried::Lost {
            self.carried = Carried::Whole;
        }
        Ok(())
    }

    /// What the bucket holds is what is here, up to the last line; what is gone from here stays there.
    fn check_files(&self, local: &Files, stored: &Files, last: bool) -> Result<(), TestCaseError> {
        for (path, bytes) in local {
            let before = self.before(path, bytes, stored);
            let whole = last || !path.ends_with(".jsonl");
            let cut = if whole { bytes.len() } else { bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1) };
            let went_on = before.filter(|before| bytes.starts_with(before) && before.len() >= cut);
            let expected = match went_on {
                // An unfinished line that was shipped when the agent was gone.
                Some(before) => Some(before.as_slice()),
                // Nothing but an unfinished line: what is stored stays until there is something to put there.
                None if cut == 0 && !bytes.is_empty() => self.stored.get(path).map(Vec::as_slice),
                None => Some(&bytes[..cut]),
            };
            let found = stored.get(path).map(Vec::as_slice);
            let lengths = (found.map(<[u8]>::len), expected.map(<[u8]>::len));
            prop_assert!(found == expected, "{path}: {} bytes here, stored and expected {lengths:?}", bytes.len());
        }
        for (path, before) in self.stored.iter().filter(|(path, _)| !local.contains_key(*path)) {
            let moved = || local.keys().any(|to| stored.get(to).is_some_and(|new| new.starts_with(before)));
            prop_assert!(
                stored.get(path) == Some(before) || (!stored.contains_key(path) && moved()),
                "{path} is gone from here and from the bucket"
            );
        }
        Ok(())
    }

    /// What the bucket had of a file before: under its name, or under the one it had.
    fn before<'a>(&'a self, path: &str, bytes: &[u8], stored: &Files) -> Option<&'a Vec<u8>> {
        let [a, b] = PROJECTS;
        let from = if path.contains(a) { path.replace(a, b) } else { path.replace(b, a) };
        let moved = || self.stored.get(&from).filter(|had| !stored.contains_key(&from) && bytes.starts_with(had));
        moved().or_else(|| self.stored.get(path))
    }

    /// One entry a flush, and in it the bytes that are new.
    fn check_work(&self, local: &Files, stored: &Files, shipped: &Shipped, writes: u64) -> Result<(), TestCaseError> {
        let claims = u64::from(self.unclaimed);
        prop_assert!(shipped.entries <= 1, "{} entries in one flush", shipped.entries);
        prop_assert!(writes <= u64::from(shipped.entries) + claims, "{writes} writes in one flush");
        let mut new = 0;
        for (path, bytes) in stored.iter().filter(|(path, _)| local.contains_key(*path)) {
            new += match self.before(path, bytes, stored) {
                Some(before) if bytes.starts_with(before) => bytes.len() - before.len(),
                _ => bytes.len(),
            };
        }
        prop_assert_eq!(shipped.bytes, new as u64, "bytes that were shipped, and bytes that are new");
        Ok(())
    }

    /// Mode and time of what is stored to its end.
    fn check_meta(&self, local: &Files, stored: &Files) -> Result<(), TestCaseError> {
        let ledger = self.shipment.ledger.as_ref().unwrap();
        let state = self.runtime.block_on(self.world.logs().read_state(&ledger.id)).unwrap();
        for (path, bytes) in local.iter().filter(|(path, bytes)| stored.get(*path) == Some(bytes)) {
            let here = std::fs::metadata(self.world.root().join(path)).unwrap();
            let there = &state.files[&path.parse().unwrap()];
            prop_assert_eq!(there.len, bytes.len() as u64);
            prop_assert_eq!(there.mode, here.mode() & 0o7777, "mode of {}", path);
            prop_assert_eq!(there.mtime_ns, here.mtime() * 1_000_000_000 + here.mtime_nsec(), "time of {}", path);
        }
        Ok(())
    }
}

fn fail(text: String) -> TestCaseError {
    TestCaseError::fail(text)
}

fn copy_all(from: &Path, to: &Path) {
    for (path, bytes) in files_below(from) {
        crate::support::world::write(&to.join(path), bytes);
    }
}

fn run(acts: &[Act]) -> Result<(), TestCaseError> {
    let mut case = Case::new();
    for (at, act) in acts.iter().chain([&Act::Flush, &Act::Flush]).enumerate() {
        case.act(act).map_err(|error| match error {
            TestCaseError::Fail(reason) => fail(format!("at action {at} ({act:?}): {reason}")),
            reject => reject,
        })?;
    }
    Ok(())
}

#[test]
fn whatever_an_agent_does_to_its_files_the_bucket_holds_them() {
    // More cases by hand: PROPTEST_CASES=5000. A failing case is printed as the actions that lead to it.
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(150);
    let config = Config { cases, max_shrink_iters: 400, failure_persistence: None, ..Config::default() };
    proptest!(config, |(acts in proptest::collection::vec(act(), 1..25))| {
        run(&acts)?;
    });
}
