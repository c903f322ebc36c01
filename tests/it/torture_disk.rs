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

/// Text that hardly compresses.
fn incompressible_text(rng: &mut TestRng, max_len: u64) -> String {
    (0..rng.below(max_len / 16))
        .map(|_| format!("{:016x}", rng.below(u64::MAX)))
        .collect()
}

/// One step of an agent: a line, and sometimes a side file. A write that does not fit is torn, as
/// with a real agent.
fn append(home: &TempHome, rng: &mut TestRng, number: u64) -> std::io::Result<()> {
    let path = transcript(home, &session(rng.below(SESSIONS)));
    std::fs::create_dir_all(path.parent().unwrap())?;
    let mut file = std::fs::File::options()
        .append(true)
        .create(true)
        .open(&path)?;
    writeln!(
        file,
        "{{\"type\":\"user\",\"n\":{number},\"cwd\":\"/work/app\",\"text\":\"{}\"}}",
        incompressible_text(rng, 3000)
    )?;
    if rng.below(8) == 0 {
        let side = path.with_extension("").join("tool-results");
        std::fs::create_dir_all(&side)?;
        std::fs::write(
            side.join(format!("{number}.txt")),
            incompressible_text(rng, 6000),
        )?;
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
    let mut rng = TestRng::new(seed);
    let backend = Backend::file();
    let mut load = Load::new(TempHome::new());
    let disk = SmallDisk::mount_on(&load.home.home(), 2048);
    let mut daemon = backend.daemon(&load.home, &[]);
    let (mut number, mut refused) = (0, 0);
    for round in 0..12 {
        // Sometimes one or two pages are free for agent and daemon.
        disk.fill_until(if round == 0 {
            200_000
        } else {
            rng.below(4) * 4096
        });
        while number < 10_000 {
            number += 1;
            if let Err(error) = append(&load.home, &mut rng, number) {
                assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
                refused += 1;
                break;
            }
        }
        // The daemon responds although the disk is full.
        load.flush(&backend, "20s").unwrap();
        if rng.below(2) == 0 {
            daemon.kill();
            load.kills += 1;
            daemon = backend.daemon(&load.home, &[]);
        }
        assert!(load.check_copy(&backend, &session(rng.below(SESSIONS))));
    }
    let log = std::fs::read_to_string(load.home.path().join("daemon.log")).unwrap();
    assert!(
        refused >= 10 && log.contains("saving the ledger failed"),
        "the disk was never full: {refused}"
    );
    disk.resize(16 << 10);
    for _ in 0..100 {
        number += 1;
        append(&load.home, &mut rng, number).unwrap();
    }
    // Bytes that did not fit were never written; the file that fills the disk is outside the root.
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
    let mut rng = TestRng::new(seed);
    let mut backend = Backend::file();
    let place = backend.path().join("small");
    std::fs::create_dir(&place).unwrap();
    let disk = SmallDisk::mount_on(&place, 1024);
    // With the index next to it, as by default.
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
        disk.fill_until(rng.below(100) << 10);
        for _ in 0..150 {
            number += 1;
            append(&load.home, &mut rng, number).unwrap();
        }
        if let Err(output) = load.flush(&backend, "1s") {
            assert!(output.contains("No space left on device"), "{output}");
            late += 1;
        }
        if rng.below(3) == 0 {
            daemon.kill();
            load.kills += 1;
            daemon = backend.daemon(&load.home, &[]);
        }
        // No reader sees a half-written object.
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
    let mut rng = TestRng::new(seed);
    let (backend, home) = (Backend::file(), TempHome::new());
    let root = |home: &TempHome| home.home().join(".claude");
    (0..100).for_each(|number| append(&home, &mut rng, number).unwrap());
    backend.run(&home, &["run", "--", "true"]).ok();
    let other = TempHome::new();
    let disk = SmallDisk::mount_on(&other.home(), 8192);
    // An older copy exists, next to a file of the user.
    std::fs::create_dir_all(root(&other)).unwrap();
    copy_dir(&root(&home).join("projects"), &root(&other));
    std::fs::write(root(&other).join("settings.json"), "{}").unwrap();
    (100..400).for_each(|number| append(&home, &mut rng, number).unwrap());
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
