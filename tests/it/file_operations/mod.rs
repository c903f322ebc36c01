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
use crate::support::writer::FlushAll;

/// The state of the ledger before the checked flush.
#[derive(Debug, Clone, Copy, PartialEq)]
enum LedgerState {
    /// The ledger of the last flush.
    Current,
    /// A ledger from before the last flush.
    Outdated,
    /// No ledger.
    Missing,
}

/// The local files that a flush read, and whether it was the last one.
struct FlushObservation {
    local: Files,
    last: bool,
}

struct Case {
    world: World,
    runtime: tokio::runtime::Runtime,
    flusher: LogFlusher,
    /// The project of each file.
    projects: [usize; FILES.len()],
    /// Makes every line and every time unique.
    count: u64,
    /// The seq up to which each write target was checked.
    checked: BTreeMap<Option<WriterId>, Seq>,
    /// The flushes since then. Each new entry must come from one of them.
    observations: Vec<FlushObservation>,
    /// The entry of this process whose reply was lost.
    unacknowledged: Option<Digest>,
    unclaimed: bool,
    ledger_state: LedgerState,
    /// The log has current modes and times only while the ledger is current.
    has_attributes: bool,
    older_ledger: Option<PathBuf>,
}

impl Case {
    fn new(world: World) -> Case {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let flusher = LogFlusher::new(world.id(SESSION));
        Case {
            world,
            runtime,
            flusher,
            projects: [0; FILES.len()],
            count: 0,
            checked: BTreeMap::from([(None, 0)]),
            observations: Vec::new(),
            unacknowledged: None,
            unclaimed: true,
            ledger_state: LedgerState::Current,
            has_attributes: true,
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
        let (previous_branch, must_branch) = self.predict();
        let cursors = self
            .flusher
            .ledger
            .as_ref()
            .map(|ledger| ledger.files.clone())
            .unwrap_or_default();
        let writes = self.world.store.writes();
        let flushed = self
            .runtime
            .block_on(self.flusher.flush(&context, last))
            .map_err(|error| fail(error.to_string()))?;
        let writes = self.world.store.writes() - writes;
        let log_writer = self.flusher.ledger.as_ref().unwrap().log_writer.clone();
        let has_branched = branch_of(&log_writer) != previous_branch;
        prop_assert!(
            !has_branched || must_branch,
            "a flush started a branch although it could continue"
        );
        prop_assert!(
            has_branched || !must_branch || flushed.entries == 0,
            "a flush continued where another writer wrote"
        );
        let local = self.local();
        self.observations.push(FlushObservation {
            local: local.clone(),
            last,
        });
        let main = LogWriter {
            target: WriteTarget::Main,
            ..log_writer.clone()
        };
        for log_writer in [&main, &log_writer] {
            self.check_write_target(log_writer)?;
        }
        let (history, _) = self
            .runtime
            .block_on(write_target::history(&self.world, &log_writer));
        let stored = write_target::files_at(&history, Seq::MAX);
        check_explained(&stored, &[], self.observations.last().unwrap(), &stored)
            .map_err(|why| fail(format!("not stored: {why}")))?;
        if self.ledger_state == LedgerState::Current && self.observations.len() == 1 {
            let delta = history.last().filter(|_| flushed.entries > 0);
            self.check_work(&history, delta, &flushed, writes)?;
            let moves = delta.map_or(&[][..], |delta| &delta.entry.header.moves);
            self.check_moves(&cursors, &local, moves)?;
        }
        if self.has_attributes {
            self.check_attributes(&local, &stored)?;
        }
        self.unclaimed = log_writer.target == WriteTarget::Unclaimed;
        self.observations.clear();
        self.unacknowledged = None;
        // An outdated ledger is detected at the next write.
        if flushed.entries > 0 || self.ledger_state == LedgerState::Missing {
            self.ledger_state = LedgerState::Current;
        }
        Ok(())
    }

    /// A flush that fails: nothing is stored, or everything is and the reply is lost.
    fn flush_with_failing_store(&mut self, takes_effect: bool) -> Result<(), TestCaseError> {
        let context = self.scanned();
        let (previous_branch, must_branch) = self.predict();
        let bucket = self.world.path("bucket");
        let objects = || files_below(&bucket).len();
        let before = objects();
        if takes_effect {
            self.world.store.lose_responses()
        } else {
            self.world.store.fail_requests("")
        }
        let flushed = self.runtime.block_on(self.flusher.flush(&context, false));
        self.world.store.recover();
        let log_writer = self
            .flusher
            .ledger
            .as_ref()
            .map(|ledger| ledger.log_writer.clone());
        if let Some(log_writer) = &log_writer {
            prop_assert!(
                branch_of(log_writer) == previous_branch || must_branch,
                "a failed flush changed its write target"
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
            self.unacknowledged = arrived.map(|step| step.entry.digest);
        }
        let local = self.local();
        self.observations
            .push(FlushObservation { local, last: false });
        Ok(())
    }

    /// Predicts the branch of the writer, and whether it must start a new branch when it writes.
    fn predict(&self) -> (Option<WriterId>, bool) {
        let context = self.world.context();
        let load = || {
            Ledger::load(
                &*context.directory,
                &self.world.store.address(),
                &self.flusher.id,
            )
        };
        let ledger = self.flusher.ledger.clone().or_else(load);
        let previous_branch = ledger
            .as_ref()
            .and_then(|ledger| branch_of(&ledger.log_writer));
        if self.ledger_state == LedgerState::Current {
            return (previous_branch, false);
        }
        let main = LogWriter::unclaimed("none".parse().unwrap(), 0, None, context.logs.clock.now());
        let log_writer = ledger.as_ref().map_or(&main, |ledger| &ledger.log_writer);
        let (main, _) = self
            .runtime
            .block_on(write_target::history(&self.world, &main));
        let (own, _) = self
            .runtime
            .block_on(write_target::history(&self.world, log_writer));
        let local_files = files_below(&self.world.root());
        // A ledger from disk that names no entry is not confirmed by the store: the log is read.
        let is_from_disk = self.flusher.ledger.is_none();
        let is_trusted = |ledger: &&Ledger| {
            let log_writer = &ledger.log_writer;
            !is_from_disk || log_writer.seq > 0 || log_writer.target == WriteTarget::Branch
        };
        (
            previous_branch,
            write_target::must_branch(
                ledger.as_ref().filter(is_trusted),
                &main,
                &own,
                &local_files,
                self.unacknowledged,
            ),
        )
    }

    /// The local files of the session.
    fn local(&self) -> Files {
        let mut files = files_below(&self.world.root());
        files.retain(|path, bytes| act::is_session_file(path, bytes));
        files
    }

    /// The streamer knows every path from its scan.
    fn scanned(&mut self) -> sessiond::capture::CaptureContext {
        let context = self.world.context();
        let seen = scan(&*context.directory, &*context.profile, None).unwrap();
        self.flusher
            .paths
            .extend(seen.logs.into_values().flatten().map(|file| file.path));
        context
    }

    /// Checks that each new entry of a write target follows from the local files of one of the
    /// flushes, and that a restore gives the resulting files.
    fn check_write_target(&mut self, log_writer: &LogWriter) -> Result<(), TestCaseError> {
        let branch = branch_of(log_writer);
        let (history, branched_at) = self
            .runtime
            .block_on(write_target::history(&self.world, log_writer));
        let checked = self.checked.entry(branch.clone()).or_insert(branched_at);
        let mut base = write_target::files_at(&history, *checked);
        let mut observations = self.observations.iter().peekable();
        for step in history
            .iter()
            .filter(|step| step.seq() > *checked && step.entry.header.kind != EntryKind::Claim)
        {
            let mut why = String::new();
            while let Some(observation) = observations.peek() {
                match check_explained(&base, &step.entry.header.moves, observation, &step.files) {
                    Ok(()) => break,
                    Err(differs) => why = differs,
                }
                observations.next();
            }
            prop_assert!(observations.peek().is_some(), "entry {}: {why}", step.seq());
            base = step.files.clone();
        }
        let Some(end) = history
            .last()
            .map(Step::seq)
            .filter(|end| *end > branched_at)
        else {
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
                "a restore of entry {} gives other files",
                step.seq()
            );
        }
        *checked = end;
        let restored = self
            .runtime
            .block_on(self.world.stored_on(SESSION, branch))
            .unwrap_or_default();
        prop_assert!(restored == base, "a restore gives other files");
        Ok(())
    }

    /// Checks that a flush writes one entry with exactly the new bytes.
    fn check_work(
        &self,
        history: &[Step],
        delta: Option<&Step>,
        flushed: &FlushOutcome,
        writes: u64,
    ) -> Result<(), TestCaseError> {
        let claims = u64::from(self.unclaimed);
        prop_assert!(
            flushed.entries <= 1,
            "{} entries in one flush",
            flushed.entries
        );
        prop_assert!(
            writes <= u64::from(flushed.entries) + claims,
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
            flushed.raw_bytes,
            new as u64,
            "uploaded bytes and new bytes"
        );
        Ok(())
    }

    /// Checks that a file with a new path and otherwise unchanged is recorded as a move.
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
                    "{from} was moved to {to} and uploaded again"
                );
            }
        }
        Ok(())
    }

    /// Checks the mode and the time of each completely stored file.
    fn check_attributes(&self, local: &Files, stored: &Files) -> Result<(), TestCaseError> {
        let ledger = self.flusher.ledger.as_ref().unwrap();
        let state = self
            .runtime
            .block_on(self.world.logs().read_state(&ledger.id))
            .unwrap();
        for (path, bytes) in local
            .iter()
            .filter(|(path, bytes)| stored.get(*path) == Some(bytes))
        {
            let local_files = std::fs::metadata(self.world.root().join(path)).unwrap();
            let there = &state.files[&path.parse().unwrap()];
            prop_assert_eq!(there.len, bytes.len() as u64);
            prop_assert_eq!(there.mode, local_files.mode() & 0o7777, "mode of {}", path);
            prop_assert_eq!(
                there.mtime_ns,
                local_files.mtime() * 1_000_000_000 + local_files.mtime_nsec(),
                "time of {}",
                path
            );
        }
        Ok(())
    }
}

/// Checks that a flush with these local files turns `base` into `then` with these moves.
fn check_explained(
    base: &Files,
    moves: &[FileMove],
    observation: &FlushObservation,
    then: &Files,
) -> Result<(), String> {
    let mut base = base.clone();
    for FileMove { from, to } in moves {
        let had = base
            .remove(from.as_str())
            .filter(|_| !observation.local.contains_key(from.as_str()));
        let had = had.filter(|had| {
            observation
                .local
                .get(to.as_str())
                .is_some_and(|bytes| bytes.starts_with(had))
        });
        base.insert(
            to.to_string(),
            had.ok_or_else(|| format!("{from} was not moved to {to}"))?,
        );
    }
    // Deleted files stay in the log.
    let mut required = base.clone();
    for (path, bytes) in &observation.local {
        required.extend(
            expected(&base, path, bytes, observation.last)
                .map(|bytes| (path.clone(), bytes.to_vec())),
        );
    }
    let mut paths = required.keys().chain(then.keys());
    match paths.find(|path| required.get(*path) != then.get(*path)) {
        None => Ok(()),
        Some(path) => {
            let len = |files: &Files| files.get(path).map(Vec::len);
            Err(format!(
                "{path}: {:?} bytes here, stored and expected {:?}",
                len(&observation.local),
                (len(then), len(&required))
            ))
        }
    }
}

/// The required content of a local file in the bucket, which had `base` before.
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
        // A partial line that was uploaded after the agent exited.
        Some(before) => Some(before),
        // Only a partial line: the stored content stays until there is a complete line.
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
    // The cases are the same every time. PROPTEST_CASES=5000 draws more, PROPTEST_RNG_SEED=7
    // selects others. A failing case is printed as a list of actions.
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
    // A disk reuses the inode numbers of deleted files; a file system in memory is faster.
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
    check(&[&lost[..], &[Act::FlushWithLostReply]].concat());
    // Also by the next process, with a ledger from before the claim.
    check(&[&lost[..], &[Act::FlushWithLostReply, Act::Restart]].concat());
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
        Act::ReplaceWithOther(0),
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
