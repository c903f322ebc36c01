//! Change detection against a model: generated actions on real files with flushes and restarts
//! between them; after every flush the bucket must hold what a small set of rules predicts.
//!
//! Owns the rules for stored content; `act` owns the actions, `write_target` the rules for write targets.
//! Every written line is unique. The tests control file times: each change gets its own time, as on
//! a file system with fine time stamps.

mod act;
mod write_target;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseError};
use sessiond::capture::flush::{FlushOutcome, LogFlusher};
use sessiond::capture::scan::scan;
use sessiond::log::ledger::{FileCursor, Ledger};
use sessiond::log::writer::{LogWriter, WriteTarget};
use sessiond::model::{Digest, EntryKind, FileMove, RelPath, Seq, WriterId};
use sessiond::store::Store;

use self::act::{Act, FILES, SESSION, act};
use self::write_target::{Step, branch_of};
use crate::support::files::{Files, files_below};
use crate::support::slow;
use crate::support::world::World;

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

/// What a flush found when it looked.
struct Looked {
    local: Files,
    last: bool,
}

struct Case {
    world: World,
    runtime: tokio::runtime::Runtime,
    shipment: LogFlusher,
    /// In which of the projects each file is.
    projects: [usize; FILES.len()],
    /// Makes every line and every time unlike any other.
    count: u64,
    /// The number up to which each ground was checked.
    checked: BTreeMap<Option<WriterId>, Seq>,
    /// The flushes since then: what is new in the bucket is of one of them.
    looks: Vec<Looked>,
    /// The entry that arrived unheard of in this life of the writer.
    unheard: Option<Digest>,
    unclaimed: bool,
    carried: Carried,
    /// Mode and time are known to the log only while the ledger is whole.
    meta: bool,
    older_ledger: Option<PathBuf>,
}

impl Case {
    fn new(world: World) -> Case {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let shipment = LogFlusher::new(world.id(SESSION));
        Case {
            world,
            runtime,
            shipment,
            projects: [0; FILES.len()],
            count: 0,
            checked: BTreeMap::from([(None, 0)]),
            looks: Vec::new(),
            unheard: None,
            unclaimed: true,
            carried: Carried::Whole,
            meta: true,
            older_ledger: None,
        }
    }

    fn flush(&mut self, last: bool) -> Result<(), TestCaseError> {
        let context = self.scanned();
        let ledgers = self.world.root().join(".sessiond");
        let kept = self.world.path("older-ledger");
        let _ = std::fs::remove_dir_all(&kept);
        self.older_ledger = ledgers.exists().then(|| {
            copy_all(&ledgers, &kept);
            kept
        });
        let (was_on, must_leave) = self.foresee();
        let cursors = self
            .shipment
            .ledger
            .as_ref()
            .map(|ledger| ledger.files.clone())
            .unwrap_or_default();
        let writes = self.world.store.writes();
        let shipped = self
            .runtime
            .block_on(self.shipment.flush(&context, last))
            .map_err(|error| fail(error.to_string()))?;
        let writes = self.world.store.writes() - writes;
        let log_writer = self.shipment.ledger.as_ref().unwrap().log_writer.clone();
        let left = branch_of(&log_writer) != was_on;
        prop_assert!(
            !left || must_leave,
            "a flush went to a branch, and it could have gone on"
        );
        prop_assert!(
            left || !must_leave || shipped.entries == 0,
            "a flush went on where another wrote"
        );
        let local = self.local();
        self.looks.push(Looked {
            local: local.clone(),
            last,
        });
        let main = LogWriter {
            target: WriteTarget::Main,
            ..log_writer.clone()
        };
        for log_writer in [&main, &log_writer] {
            self.check_ground(log_writer)?;
        }
        let (history, _) = self
            .runtime
            .block_on(write_target::history(&self.world, &log_writer));
        let stored = write_target::files_at(&history, Seq::MAX);
        explained(&stored, &[], self.looks.last().unwrap(), &stored)
            .map_err(|why| fail(format!("still to be shipped: {why}")))?;
        if self.carried == Carried::Whole && self.looks.len() == 1 {
            let delta = history.last().filter(|_| shipped.entries > 0);
            self.check_work(&history, delta, &shipped, writes)?;
            let moves = delta.map_or(&[][..], |delta| &delta.entry.header.moves);
            self.check_moves(&cursors, &local, moves)?;
        }
        if self.meta {
            self.check_meta(&local, &stored)?;
        }
        self.unclaimed = log_writer.target == WriteTarget::Unclaimed;
        self.looks.clear();
        self.unheard = None;
        // That a ledger is older shows at the next write.
        if shipped.entries > 0 || self.carried == Carried::Lost {
            self.carried = Carried::Whole;
        }
        Ok(())
    }

    /// A flush that fails: nothing arrives, or all of it does and the answer is lost.
    fn flush_in_vain(&mut self, arrives: bool) -> Result<(), TestCaseError> {
        let context = self.scanned();
        let (was_on, must_leave) = self.foresee();
        let bucket = self.world.path("bucket");
        let objects = || files_below(&bucket).len();
        let before = objects();
        if arrives {
            self.world.store.lose_responses()
        } else {
            self.world.store.fail_requests("")
        }
        let flushed = self.runtime.block_on(self.shipment.flush(&context, false));
        self.world.store.recover();
        let log_writer = self
            .shipment
            .ledger
            .as_ref()
            .map(|ledger| ledger.log_writer.clone());
        if let Some(log_writer) = &log_writer {
            prop_assert!(
                branch_of(log_writer) == was_on || must_leave,
                "a flush in vain left its ground"
            );
        }
        let Err(error) = flushed else { return Ok(()) };
        prop_assert!(error.is_retryable(), "{}", error);
        if let Some(log_writer) = log_writer.filter(|_| objects() > before) {
            let (history, _) = self
                .runtime
                .block_on(write_target::history(&self.world, &log_writer));
            let arrived = history
                .last()
                .filter(|step| step.entry.header.kind != EntryKind::Claim);
            self.unheard = arrived.map(|step| step.entry.digest);
        }
        let local = self.local();
        self.looks.push(Looked { local, last: false });
        Ok(())
    }

    /// Where the writer is, and whether it must leave when it writes.
    fn foresee(&self) -> (Option<WriterId>, bool) {
        let context = self.world.context();
        let load = || {
            Ledger::load(
                &*context.directory,
                &self.world.store.address(),
                &self.shipment.id,
            )
        };
        let ledger = self.shipment.ledger.clone().or_else(load);
        let was_on = ledger
            .as_ref()
            .and_then(|ledger| branch_of(&ledger.log_writer));
        if self.carried == Carried::Whole {
            return (was_on, false);
        }
        let main = LogWriter::unclaimed("none".parse().unwrap(), 0, None, context.logs.clock.now());
        let log_writer = ledger.as_ref().map_or(&main, |ledger| &ledger.log_writer);
        let (main, _) = self
            .runtime
            .block_on(write_target::history(&self.world, &main));
        let (own, _) = self
            .runtime
            .block_on(write_target::history(&self.world, log_writer));
        let here = files_below(&self.world.root());
        (
            was_on,
            write_target::must_leave(ledger.as_ref(), &main, &own, &here, self.unheard),
        )
    }

    /// The files of the session that are here.
    fn local(&self) -> Files {
        let mut files = files_below(&self.world.root());
        files.retain(|path, bytes| act::is_ours(path, bytes));
        files
    }

    /// The streamer knows every path from its scan.
    fn scanned(&mut self) -> sessiond::capture::CaptureContext {
        let context = self.world.context();
        let seen = scan(&*context.directory, &*context.profile, None).unwrap();
        self.shipment
            .paths
            .extend(seen.logs.into_values().flatten().map(|file| file.path));
        context
    }

    /// Every entry that is new on a ground is what one of the flushes must have made of what it found; a restore brings
    /// what they amount to.
    fn check_ground(&mut self, log_writer: &LogWriter) -> Result<(), TestCaseError> {
        let branch = branch_of(log_writer);
        let (history, leaves) = self
            .runtime
            .block_on(write_target::history(&self.world, log_writer));
        let checked = self.checked.entry(branch.clone()).or_insert(leaves);
        let mut base = write_target::files_at(&history, *checked);
        let mut looks = self.looks.iter().peekable();
        for step in history
            .iter()
            .filter(|step| step.seq() > *checked && step.entry.header.kind != EntryKind::Claim)
        {
            let mut why = String::new();
            while let Some(look) = looks.peek() {
                match explained(&base, &step.entry.header.moves, look, &step.files) {
                    Ok(()) => break,
                    Err(differs) => why = differs,
                }
                looks.next();
            }
            prop_assert!(looks.peek().is_some(), "entry {}: {why}", step.seq());
            base = step.files.clone();
        }
        let Some(end) = history.last().map(Step::seq).filter(|end| *end > leaves) else {
            return Ok(());
        };
        let earlier = history
            .iter()
            .filter(|step| branch.is_none() && *checked < step.seq() && step.seq() < end);
        for step in earlier {
            let restored = self
                .runtime
                .block_on(self.world.stored_at(SESSION, step.seq()));
            prop_assert!(
                restored == step.files,
                "a restore of entry {} brings other files",
                step.seq()
            );
        }
        *checked = end;
        let restored = self
            .runtime
            .block_on(self.world.stored_on(SESSION, branch))
            .unwrap_or_default();
        prop_assert!(restored == base, "a restore brings other files");
        Ok(())
    }

    /// One entry a flush, and in it the bytes that are new.
    fn check_work(
        &self,
        history: &[Step],
        delta: Option<&Step>,
        shipped: &FlushOutcome,
        writes: u64,
    ) -> Result<(), TestCaseError> {
        let claims = u64::from(self.unclaimed);
        prop_assert!(
            shipped.entries <= 1,
            "{} entries in one flush",
            shipped.entries
        );
        prop_assert!(
            writes <= u64::from(shipped.entries) + claims,
            "{writes} writes in one flush"
        );
        let mut new = 0;
        if let Some(delta) = delta {
            let mut base = write_target::files_at(history, delta.seq() - 1);
            for FileMove { from, to } in &delta.entry.header.moves {
                let had = base.remove(from.as_str()).unwrap();
                base.insert(to.to_string(), had);
            }
            for (path, bytes) in &delta.files {
                new += match base.get(path) {
                    Some(before) if bytes.starts_with(before) => bytes.len() - before.len(),
                    _ => bytes.len(),
                };
            }
        }
        prop_assert_eq!(
            shipped.raw_bytes,
            new as u64,
            "bytes that were shipped, and bytes that are new"
        );
        Ok(())
    }

    /// A file that has another path, and all else as it was, was moved.
    fn check_moves(
        &self,
        cursors: &BTreeMap<RelPath, FileCursor>,
        local: &Files,
        moves: &[FileMove],
    ) -> Result<(), TestCaseError> {
        let directory = self.world.context().directory;
        for (from, cursor) in cursors
            .iter()
            .filter(|(path, cursor)| !local.contains_key(path.as_str()) && cursor.len > 0)
        {
            let same = |(path, bytes): &(RelPath, &Vec<u8>)| {
                let as_it_was = directory.stat(path).unwrap() == Some(cursor.stat);
                as_it_was
                    && Digest::of(&bytes[..cursor.len as usize]) == cursor.hash.digest()
                    && !cursors.contains_key(path)
            };
            for (to, _) in local
                .iter()
                .map(|(path, bytes)| (path.parse().unwrap(), bytes))
                .filter(same)
            {
                // The same file may have had two paths before.
                prop_assert!(
                    moves.iter().any(|known| known.to == to),
                    "{from} was moved to {to} and shipped again"
                );
            }
        }
        Ok(())
    }

    /// Mode and time of what is stored to its end.
    fn check_meta(&self, local: &Files, stored: &Files) -> Result<(), TestCaseError> {
        let ledger = self.shipment.ledger.as_ref().unwrap();
        let state = self
            .runtime
            .block_on(self.world.logs().read_state(&ledger.id))
            .unwrap();
        for (path, bytes) in local
            .iter()
            .filter(|(path, bytes)| stored.get(*path) == Some(bytes))
        {
            let here = std::fs::metadata(self.world.root().join(path)).unwrap();
            let there = &state.files[&path.parse().unwrap()];
            prop_assert_eq!(there.len, bytes.len() as u64);
            prop_assert_eq!(there.mode, here.mode() & 0o7777, "mode of {}", path);
            prop_assert_eq!(
                there.mtime_ns,
                here.mtime() * 1_000_000_000 + here.mtime_nsec(),
                "time of {}",
                path
            );
        }
        Ok(())
    }
}

/// Whether a flush that found `look` must make `then` of `base` with these moves; if not, why.
fn explained(base: &Files, moves: &[FileMove], look: &Looked, then: &Files) -> Result<(), String> {
    let mut base = base.clone();
    for FileMove { from, to } in moves {
        let had = base
            .remove(from.as_str())
            .filter(|_| !look.local.contains_key(from.as_str()));
        let had = had.filter(|had| {
            look.local
                .get(to.as_str())
                .is_some_and(|bytes| bytes.starts_with(had))
        });
        base.insert(
            to.to_string(),
            had.ok_or_else(|| format!("{from} was not moved to {to}"))?,
        );
    }
    // What is gone from here stays there.
    let mut must = base.clone();
    for (path, bytes) in &look.local {
        must.extend(
            expected(&base, path, bytes, look.last).map(|bytes| (path.clone(), bytes.to_vec())),
        );
    }
    let mut paths = must.keys().chain(then.keys());
    match paths.find(|path| must.get(*path) != then.get(*path)) {
        None => Ok(()),
        Some(path) => {
            let len = |files: &Files| files.get(path).map(Vec::len);
            Err(format!(
                "{path}: {:?} bytes here, stored and expected {:?}",
                len(&look.local),
                (len(then), len(&must))
            ))
        }
    }
}

/// What the bucket must have of a file that is here, where it had `base` before.
fn expected<'a>(base: &'a Files, path: &str, bytes: &'a [u8], last: bool) -> Option<&'a [u8]> {
    let whole = last || !path.ends_with(".jsonl");
    let cut = if whole {
        bytes.len()
    } else {
        bytes
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |at| at + 1)
    };
    let before = base.get(path).map(Vec::as_slice);
    match before.filter(|before| bytes.starts_with(before) && before.len() >= cut) {
        // An unfinished line that was shipped when the agent was gone.
        Some(before) => Some(before),
        // Nothing but an unfinished line: what is stored stays until there is something to put there.
        None if cut == 0 && !bytes.is_empty() => before,
        None => Some(&bytes[..cut]),
    }
}

fn fail(text: String) -> TestCaseError {
    TestCaseError::fail(text)
}

fn copy_all(from: &Path, to: &Path) {
    for (path, bytes) in files_below(from) {
        crate::support::files::write(&to.join(path), bytes);
    }
}

fn run(acts: &[Act], world: World) -> Result<(), TestCaseError> {
    let mut case = Case::new(world);
    for (at, act) in acts.iter().chain([&Act::Flush, &Act::Flush]).enumerate() {
        case.act(act).map_err(|error| match error {
            TestCaseError::Fail(reason) => fail(format!("at action {at} ({act:?}): {reason}")),
            reject => reject,
        })?;
    }
    Ok(())
}

slow!(any_sequence_of_file_operations_is_stored_exactly);
fn any_sequence_of_file_operations_is_stored_exactly() {
    // The same cases every time. By hand: PROPTEST_CASES=5000 draws others, PROPTEST_RNG_SEED=7 chooses them. A failing case is
    // printed as the actions that lead to it.
    let given = |name| {
        std::env::var(name)
            .ok()
            .and_then(|value| value.parse::<u64>().ok())
    };
    let cases = given("PROPTEST_CASES");
    let drawn = cases.map(|_| RandomState::new().hash_one(()));
    let seed = given("PROPTEST_RNG_SEED").or(drawn).unwrap_or(1);
    let cases = cases.map_or(400, |cases| cases as u32);
    println!("{cases} cases, PROPTEST_RNG_SEED={seed}");
    let config = Config {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        max_shrink_iters: 400,
        failure_persistence: None,
        ..Config::default()
    };
    // A disk gives the number of a deleted file to the next one made; memory is faster.
    let on_disk = proptest::bool::weighted(0.25);
    proptest!(config, |(acts in proptest::collection::vec(act(), 1..25), on_disk in on_disk)| {
        run(&acts, if on_disk { World::new() } else { World::in_memory() })?;
    });
}

#[test]
fn a_file_created_or_moved_during_an_outage_is_flushed_after_it() {
    let waits = [
        Act::Lines(0, 1),
        Act::Flush,
        Act::Lines(0, 1),
        Act::FlushWithoutStore,
    ];
    for since in [Act::MoveToTheOtherProject, Act::Lines(2, 1)] {
        check(&[&waits[..], &[since]].concat());
    }
}

#[test]
fn a_side_file_changed_within_one_clock_tick_is_uploaded() {
    let changes = Act::RewriteInTheSameTick(4, false);
    check(&[
        changes.clone(),
        Act::Lines(0, 1),
        Act::Flush,
        Act::RestartWithoutLedger,
        Act::Flush,
        changes,
    ]);
}

#[test]
fn a_claim_with_a_lost_reply_is_recognized_after_the_files_moved() {
    let lost = [
        Act::Lines(0, 1),
        Act::Flush,
        Act::RestartWithoutLedger,
        Act::Flush,
        Act::MoveToTheOtherProject,
    ];
    check(&[&lost[..], &[Act::FlushWhoseAnswerIsLost]].concat());
    // Also by the next process, whose ledger is from before the claim.
    check(&[&lost[..], &[Act::FlushWhoseAnswerIsLost, Act::Restart]].concat());
}

#[test]
fn a_moved_file_stays_in_the_history_when_it_is_replaced_or_deleted() {
    let waits = [
        Act::Lines(0, 1),
        Act::HalfLine(4),
        Act::Flush,
        Act::MoveToTheOtherProject,
        Act::FlushWithoutStore,
    ];
    for since in [
        Act::ReplaceByAnother(0),
        Act::TruncateAndGrow(4, 0),
        Act::Delete(4),
        Act::Delete(0),
    ] {
        check(&[&waits[..], &[since]].concat());
    }
}

fn check(acts: &[Act]) {
    run(acts, World::in_memory()).unwrap();
}
