//! The cutter against a model: generated actions on real files, flushes and restarts between them, and after every
//! flush the bucket must hold what a small set of rules says.
//!
//! Owns the rules; the actions are in `act`. Every line that is written is unlike any other, so that equal bytes mean the same bytes. The clock
//! of the files is ours: each change gets a time of its own, as a file system with fine time stamps gives it.

mod act;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};
use sessiond::capture::ship::{Shipment, Shipped};
use sessiond::capture::survey::survey;
use sessiond::log::pen::Ground;
use sessiond::model::WriterId;

use self::act::{Act, FILES, SESSION, act};
use crate::support::world::{Files, World, files_below};

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
    /// In which of the projects each file is.
    projects: [usize; FILES.len()],
    /// Makes every line and every time unlike any other.
    count: u64,
    /// What the bucket holds on the ground where we write.
    stored: Files,
    /// What it may hold instead since flushes whose fate nobody knows.
    unsure: Vec<Files>,
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
            projects: [0; FILES.len()],
            count: 0,
            stored: Files::new(),
            unsure: Vec::new(),
            branch: None,
            unclaimed: true,
            carried: Carried::Whole,
            meta: true,
            older_ledger: None,
        }
    }

    fn flush(&mut self, last: bool) -> Result<(), TestCaseError> {
        let context = self.scanned();
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
        let local = self.local();
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
            self.unsure.clear();
        }
        self.check_files(&local, &stored, last)?;
        if self.carried == Carried::Whole && self.unsure.is_empty() {
            self.check_work(&local, &stored, &shipped, writes)?;
        }
        if self.meta {
            self.check_meta(&local, &stored)?;
        }
        (self.stored, self.branch, self.unclaimed) = (stored, branch, unclaimed);
        self.unsure.clear();
        // That a ledger is older shows at the next write.
        if shipped.entries > 0 || self.carried == Carried::Lost {
            self.carried = Carried::Whole;
        }
        Ok(())
    }

    /// A flush that fails: nothing arrives, or all of it does and the answer is lost.
    fn flush_in_vain(&mut self, arrives: bool) -> Result<(), TestCaseError> {
        let context = self.scanned();
        if arrives {
            self.world.store.mute()
        } else {
            self.world.store.refuse("")
        }
        let flushed = self.runtime.block_on(self.shipment.flush(&context, false));
        self.world.store.recover();
        let Err(error) = flushed else { return Ok(()) };
        prop_assert!(error.is_retryable(), "{}", error);
        let local = self.local();
        let mut then = self.stored.clone();
        for (path, bytes) in &local {
            then.extend(expected(&self.stored, &then, path, bytes, false).map(|bytes| (path.clone(), bytes.to_vec())));
        }
        self.unsure.push(then);
        Ok(())
    }

    /// The files of the session that are here.
    fn local(&self) -> Files {
        let mut files = files_below(&self.world.root());
        files.retain(|path, bytes| act::is_ours(path, bytes));
        files
    }

    /// The streamer knows every path from its scan.
    fn scanned(&mut self) -> sessiond::capture::Context {
        let context = self.world.context();
        let seen = survey(&*context.folder, &*context.profile, None).unwrap();
        self.shipment.hints.extend(seen.logs.into_values().flatten().map(|file| file.path));
        context
    }

    /// What the bucket holds is what is here, up to the last line; what is gone from here stays there.
    fn check_files(&self, local: &Files, stored: &Files, last: bool) -> Result<(), TestCaseError> {
        let bases = || self.unsure.iter().chain([&self.stored]);
        for (path, bytes) in local {
            let found = stored.get(path).map(Vec::as_slice);
            let right = bases().any(|base| found == expected(base, stored, path, bytes, last));
            let lengths = (found.map(<[u8]>::len), expected(&self.stored, stored, path, bytes, last).map(<[u8]>::len));
            prop_assert!(right, "{path}: {} bytes here, stored and expected {lengths:?}", bytes.len());
        }
        for path in self.stored.keys().filter(|path| !local.contains_key(*path)) {
            let stays = |base: &Files| {
                let before = base.get(path);
                let moved =
                    || local.keys().any(|to| stored.get(to).is_some_and(|new| before.is_some_and(|before| new.starts_with(before))));
                stored.get(path) == before || (!stored.contains_key(path) && moved())
            };
            prop_assert!(bases().any(stays), "{path} is gone from here and from the bucket");
        }
        Ok(())
    }

    /// One entry a flush, and in it the bytes that are new.
    fn check_work(&self, local: &Files, stored: &Files, shipped: &Shipped, writes: u64) -> Result<(), TestCaseError> {
        let claims = u64::from(self.unclaimed);
        prop_assert!(shipped.entries <= 1, "{} entries in one flush", shipped.entries);
        prop_assert!(writes <= u64::from(shipped.entries) + claims, "{writes} writes in one flush");
        let mut new = 0;
        for (path, bytes) in stored.iter().filter(|(path, _)| local.contains_key(*path)) {
            new += match before(&self.stored, path, bytes, stored) {
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

/// What the bucket had of a file before: under its name, or under one that it has no longer.
fn before<'a>(base: &'a Files, path: &str, bytes: &[u8], stored: &Files) -> Option<&'a Vec<u8>> {
    let moved = base.iter().filter(|(from, had)| !stored.contains_key(*from) && !had.is_empty() && bytes.starts_with(had));
    moved.map(|(_, had)| had).max_by_key(|had| had.len()).or_else(|| base.get(path))
}

/// What the bucket must have of a file that is here, where it had `base` before.
fn expected<'a>(base: &'a Files, stored: &Files, path: &str, bytes: &'a [u8], last: bool) -> Option<&'a [u8]> {
    let whole = last || !path.ends_with(".jsonl");
    let cut = if whole { bytes.len() } else { bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1) };
    match before(base, path, bytes, stored).filter(|before| bytes.starts_with(before) && before.len() >= cut) {
        // An unfinished line that was shipped when the agent was gone.
        Some(before) => Some(before.as_slice()),
        // Nothing but an unfinished line: what is stored stays until there is something to put there.
        None if cut == 0 && !bytes.is_empty() => base.get(path).map(Vec::as_slice),
        None => Some(&bytes[..cut]),
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

#[test]
fn a_file_that_appears_or_moves_while_an_entry_waits_is_in_the_flush_that_ends_the_outage() {
    let waits = [Act::Lines(0, 1), Act::Flush, Act::Lines(0, 1), Act::FlushWithoutStore];
    for since in [Act::MoveToTheOtherProject, Act::Lines(2, 1)] {
        let acts: Vec<Act> = waits.iter().cloned().chain([since]).collect();
        run(&acts).unwrap();
    }
}

#[test]
fn a_side_file_that_changes_within_a_tick_of_a_lost_ledgers_comparison_is_shipped() {
    let acts = [Act::RewriteInTheSameTick(4, false), Act::Lines(0, 1), Act::Flush, Act::RestartWithoutLedger, Act::Flush];
    let again = [Act::RewriteInTheSameTick(4, false)];
    run(&acts.into_iter().chain(again).collect::<Vec<_>>()).unwrap();
}
