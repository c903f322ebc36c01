//! Full disks under the agent, the store and a restore: nothing stops, nothing is half-written,
//! acknowledged bytes can be restored, and uploads catch up once there is space.

use std::io::Write;

use crate::support::TempHome;
use crate::support::backend::{Backend, transcript};
use crate::support::files::{Files, copy_dir, files_below};
use crate::support::load::{Load, Replay};
use crate::support::rng::TestRng;
use crate::support::small_disk::{SmallDisk, in_own_mount_namespace};
use crate::torture::seed;

const SESSIONS: u64 = 3;

fn session(number: u64) -> String {
    format!("session-{number}")
}

/// Text that does not become much smaller when it is compressed.
fn noise(dice: &mut TestRng, most: u64) -> String {
    (0..dice.below(most / 16))
        .map(|_| format!("{:016x}", dice.below(u64::MAX)))
        .collect()
}

/// An agent's step: a line, and perhaps a side file. What does not fit is torn, as it would be for a real one.
fn append(home: &TempHome, dice: &mut TestRng, number: u64) -> std::io::Result<()> {
    let path = transcript(home, &session(dice.below(SESSIONS)));
    std::fs::create_dir_all(path.parent().unwrap())?;
    let mut file = std::fs::File::options()
        .append(true)
        .create(true)
        .open(&path)?;
    writeln!(
        file,
        "{{\"type\":\"user\",\"n\":{number},\"cwd\":\"/work/app\",\"text\":\"{}\"}}",
        noise(dice, 3000)
    )?;
    if dice.below(8) == 0 {
        let side = path.with_extension("").join("tool-results");
        std::fs::create_dir_all(&side)?;
        std::fs::write(side.join(format!("{number}.txt")), noise(dice, 6000))?;
    }
    Ok(())
}

#[test]
fn a_full_disk_under_the_agent_does_not_stop_streaming() {
    const TEST: &str = "torture_disk::a_full_disk_under_the_agent_does_not_stop_streaming";
    if !in_own_mount_namespace(TEST) {
        return;
    }
    let seed = seed();
    let _replay = Replay { seed, test: TEST };
    let mut dice = TestRng::new(seed);
    let backend = Backend::file();
    let mut load = Load::new(TempHome::new());
    let disk = SmallDisk::mount_on(&load.home.home(), 2048);
    let mut daemon = backend.daemon(&load.home, &[]);
    let (mut number, mut refused) = (0, 0);
    for round in 0..12 {
        // Now and then there is a page or two that agent and daemon may both take.
        disk.fill_until(if round == 0 {
            200_000
        } else {
            dice.below(4) * 4096
        });
        while number < 10_000 {
            number += 1;
            if let Err(error) = append(&load.home, &mut dice, number) {
                assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
                refused += 1;
                break;
            }
        }
        // The disk is full, and still it is answered.
        load.flush(&backend, "20s").unwrap();
        if dice.below(2) == 0 {
            daemon.kill();
            load.kills += 1;
            daemon = backend.daemon(&load.home, &[]);
        }
        assert!(load.check_copy(&backend, &session(dice.below(SESSIONS))));
    }
    let log = std::fs::read_to_string(load.home.path().join("daemon.log")).unwrap();
    assert!(
        refused >= 10 && log.contains("saving the ledger failed"),
        "the disk was never full: {refused}"
    );
    disk.resize(16 << 10);
    for _ in 0..100 {
        number += 1;
        append(&load.home, &mut dice, number).unwrap();
    }
    // What fitted in no more was never written; the agent's own ballast is not of its directory.
    load.check_all(&backend);
    load.check_reindex(&backend);
    load.summarize(&format!(
        "a full disk under the agent, {refused} writes refused"
    ));
    drop(daemon);
}

#[test]
fn a_full_disk_under_the_store_only_delays_uploads() {
    const TEST: &str = "torture_disk::a_full_disk_under_the_store_only_delays_uploads";
    if !in_own_mount_namespace(TEST) {
        return;
    }
    let seed = seed();
    let _replay = Replay { seed, test: TEST };
    let mut dice = TestRng::new(seed);
    let mut backend = Backend::file();
    let place = backend.path().join("small");
    std::fs::create_dir(&place).unwrap();
    let disk = SmallDisk::mount_on(&place, 1024);
    // With the index beside it, as it is by default.
    backend.set(
        "SESSIOND_STORE",
        format!("file://{}", place.join("bucket").display()),
    );
    backend.set(
        "SESSIOND_INDEX",
        format!("sqlite://{}", place.join("index.db").display()),
    );
    let mut load = Load::new(TempHome::new());
    let mut daemon = backend.daemon(&load.home, &[]);
    let (mut number, mut late) = (0, 0);
    for round in 1..=6 {
        disk.fill_until(dice.below(100) << 10);
        for _ in 0..150 {
            number += 1;
            append(&load.home, &mut dice, number).unwrap();
        }
        if let Err(said) = load.flush(&backend, "1s") {
            assert!(said.contains("No space left on device"), "{said}");
            late += 1;
        }
        if dice.below(3) == 0 {
            daemon.kill();
            load.kills += 1;
            daemon = backend.daemon(&load.home, &[]);
        }
        // Nothing half-written is ever seen.
        for number in 0..SESSIONS {
            assert!(load.check_copy(&backend, &session(number)));
        }
        backend.run(&load.home, &["verify", "--all"]).ok();
        if round % 2 == 0 {
            disk.resize(1024 << (round / 2));
            disk.fill_until(1 << 30);
            load.flush(&backend, "40s").unwrap();
        }
    }
    assert!(late >= 2, "the disk was hardly ever full: {late}");
    disk.resize(64 << 10);
    load.check_all(&backend);
    load.check_reindex(&backend);
    let left = files_below(&place.join("bucket/.tmp"));
    assert!(left.is_empty(), "{:?}", left.keys());
    load.summarize("a full disk under the store");
    drop(daemon);
}

#[test]
fn a_restore_on_a_full_disk_changes_nothing() {
    const TEST: &str = "torture_disk::a_restore_on_a_full_disk_changes_nothing";
    if !in_own_mount_namespace(TEST) {
        return;
    }
    let seed = seed();
    let _replay = Replay { seed, test: TEST };
    let mut dice = TestRng::new(seed);
    let (backend, home) = (Backend::file(), TempHome::new());
    let root = |home: &TempHome| home.home().join(".claude");
    (0..100).for_each(|number| append(&home, &mut dice, number).unwrap());
    backend.run(&home, &["run", "--", "true"]).ok();
    let other = TempHome::new();
    let disk = SmallDisk::mount_on(&other.home(), 8192);
    // An older copy is there already, with something beside it that is not ours.
    std::fs::create_dir_all(root(&other)).unwrap();
    copy_dir(&root(&home).join("projects"), &root(&other));
    std::fs::write(root(&other).join("settings.json"), "{}").unwrap();
    (100..400).for_each(|number| append(&home, &mut dice, number).unwrap());
    backend.run(&home, &["run", "--", "true"]).ok();

    let stored: Files = files_below(&root(&home))
        .into_iter()
        .filter(|(path, _)| path.contains("session-0"))
        .collect();
    let (before, needed) = (
        files_below(&root(&other)),
        stored.values().map(Vec::len).sum::<usize>() as u64,
    );
    assert!(needed > 100_000, "{needed}");
    let copy = other.home().join("copy");
    let verbs = [
        vec!["restore", "session-0"],
        vec!["pull", "session-0", "--to", copy.to_str().unwrap()],
    ];
    for share in [0, 1, 5, 10, 20, 30, 40] {
        disk.fill_until(needed * share / 100);
        let free = disk.free();
        for verb in &verbs {
            backend
                .run(&other, verb)
                .fails(5, "No space left", "free some disk space");
            assert_eq!(
                files_below(&root(&other)),
                before,
                "{verb:?} with {share} % of the room"
            );
            assert!(
                files_below(&copy).is_empty(),
                "{verb:?} with {share} % of the room"
            );
            assert!(
                disk.free() + 16_384 >= free,
                "{verb:?} left {} bytes behind",
                free - disk.free()
            );
        }
    }
    disk.fill_until(needed * 3);
    verbs
        .iter()
        .for_each(|verb| drop(backend.run(&other, verb).ok()));
    assert_eq!(files_below(&copy), stored);
    let of_others: Files = before
        .into_iter()
        .filter(|(path, _)| !path.contains("session-0"))
        .collect();
    assert_eq!(
        files_below(&root(&other)),
        stored.into_iter().chain(of_others).collect()
    );
}
