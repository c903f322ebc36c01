//! Rollbacks of the bucket: the newest objects of a log are deleted or replaced. The index knows
//! that they existed, so a new machine does not continue from the older state without a word.

use std::time::{Duration, Instant};

use crate::encryption::{bucket, conversation};
use crate::support::backend::{Backend, eventually, transcript};
use crate::support::files::{append, files_below};
use crate::support::proxy::{Mode, TcpProxy};
use crate::support::servers::{postgres, s3};
use crate::support::{TempHome, block_on, needs_servers};

/// A UUID: `run` and `restore` do not look it up in the store first.
const ID: &str = "3f2a9c1e-0000-4000-8000-000000000001";

/// The store of a backend: deletes and replaces objects.
enum Objects {
    Directory,
    Bucket(String),
}

impl Objects {
    /// The names of the entries of the session.
    fn entries(&self, backend: &Backend) -> Vec<String> {
        let directory = format!("v1/default/claude-code/{ID}/log/");
        match self {
            Objects::Directory => files_below(&bucket(backend).join(directory))
                .into_keys()
                .collect(),
            Objects::Bucket(name) => block_on(async {
                let server = s3().unwrap();
                let prefix = format!("some/prefix/{directory}");
                let listed = server.client(&server.endpoint).list_objects_v2();
                let listed = listed.bucket(name).prefix(&prefix).send().await.unwrap();
                let keys = listed.contents().iter().map(|object| object.key().unwrap());
                keys.map(|key| key.strip_prefix(&prefix).unwrap().to_owned())
                    .collect()
            }),
        }
    }

    fn delete(&self, backend: &Backend, name: &str) {
        let key = format!("v1/default/claude-code/{ID}/log/{name}");
        match self {
            Objects::Directory => std::fs::remove_file(bucket(backend).join(key)).unwrap(),
            Objects::Bucket(bucket) => block_on(async {
                let server = s3().unwrap();
                let delete = server.client(&server.endpoint).delete_object();
                let key = format!("some/prefix/{key}");
                delete.bucket(bucket).key(key).send().await.unwrap();
            }),
        }
    }
}

/// Streams some turns; the index has them all.
fn stream(backend: &Backend, home: &TempHome, turns: std::ops::RangeInclusive<u32>) {
    for turn in turns {
        let mut daemon = backend.daemon(home, &[]);
        append(&transcript(home, ID), conversation(turn));
        backend.run(home, &["flush", "--wait"]).ok();
        daemon.kill();
    }
    backend.run(home, &["reindex"]).ok();
}

fn restored_text(home: &TempHome) -> String {
    std::fs::read_to_string(transcript(home, ID)).unwrap()
}

#[test]
fn a_store_that_was_emptied_and_filled_again_needs_a_reindex() {
    let (backend, home, other) = (Backend::file(), TempHome::new(), TempHome::new());
    stream(&backend, &home, 1..=3);
    std::fs::remove_dir_all(bucket(&backend).join("v1/default/claude-code").join(ID)).unwrap();
    let daemon = backend.daemon(&home, &[]);
    append(&transcript(&home, ID), conversation(4));
    backend.run(&home, &["flush", "--wait"]).ok();
    assert_eq!(daemon.stop().0, Some(0));
    backend.run(&other, &["restore", ID]).fails(
        6,
        "the log was rolled back",
        "if the store was emptied on purpose and a daemon filled it again, run \"sessiond reindex\"",
    );
    backend.run(&other, &["reindex"]).ok();
    backend.run(&other, &["restore", ID]).ok();
    assert_eq!(restored_text(&other), restored_text(&home));
}

fn check_deleted_head(backend: &Backend, objects: &Objects) {
    let home = TempHome::new();
    stream(backend, &home, 1..=3);
    let entries = objects.entries(backend);
    let head = entries.len();
    assert!(head > 3, "{entries:?}");
    objects.delete(backend, &entries[head - 1]);
    let why = format!(
        "the index knows entry {head}, but the store ends with entry {}",
        head - 1
    );
    let name = backend.name;

    // No command continues from the older state, and nothing is written.
    for arguments in [
        &["restore", ID][..],
        &["restore", ID, "--if-exists"],
        &["restore", ID, "--dry-run"],
        &["restore", ID, "--at", "seq:2"],
    ] {
        let other = TempHome::new();
        backend
            .run(&other, arguments)
            .fails(6, &why, "--accept-rollback");
        assert!(!transcript(&other, ID).exists(), "{name} {arguments:?}");
    }
    for arguments in [
        &["run", "--session", ID, "--", "touch", "started"][..],
        &["daemon", "--session", ID],
    ] {
        let other = TempHome::new();
        backend
            .run(&other, arguments)
            .fails(8, &why, "--accept-rollback");
        assert!(
            !other.home().join("started").exists(),
            "{name} {arguments:?}"
        );
    }
    let verified = backend.run(&TempHome::new(), &["verify"]);
    assert_eq!(verified.code(), 6, "{name}: {}", verified.out());
    assert!(verified.out().contains(&why), "{name}: {}", verified.out());
    // `pull` only makes a copy, and the bucket is authoritative.
    backend
        .run(&TempHome::new(), &["pull", ID, "--to", "copy"])
        .ok();
    assert_eq!(objects.entries(backend).len(), head - 1, "{name}");

    // The user may turn the check off, or accept the rollback.
    backend
        .run(
            &TempHome::new(),
            &["restore", ID, "--dry-run", "--witness", "off"],
        )
        .ok();
    let other = TempHome::new();
    let accepted = backend
        .run(&other, &["restore", ID, "--accept-rollback"])
        .ok();
    assert!(
        accepted.err().contains("accepting a rollback"),
        "{}",
        accepted.err()
    );
    assert!(!restored_text(&other).contains("u3-1"), "{name}");
    // The index agrees with the store again, and has a trace.
    stream(backend, &other, 4..=4);
    backend.run(&other, &["verify"]).ok();
    let next = TempHome::new();
    backend.run(&next, &["restore", ID]).ok();
    assert_eq!(restored_text(&next), restored_text(&other), "{name}");
    let status = backend.run(&next, &["doctor"]).out();
    assert!(status.contains("accepted a rollback"), "{name}: {status}");
}

/// A backend on which a slow machine does not skip the check.
fn with_witness(mut backend: Backend) -> Backend {
    backend.set("SESSIOND_WITNESS", "require");
    backend
}

#[test]
fn a_deleted_head_is_noticed_on_a_new_machine() {
    check_deleted_head(&with_witness(Backend::file()), &Objects::Directory);
}

needs_servers!(a_deleted_head_is_noticed_through_a_shared_index);
fn a_deleted_head_is_noticed_through_a_shared_index() {
    let (server, database) = (s3().unwrap(), postgres().unwrap());
    let (name, database) = (server.fresh_bucket(), database.fresh_database());
    let backend = with_witness(Backend::on(&server.endpoint, &name, &database));
    check_deleted_head(&backend, &Objects::Bucket(name));
}

#[test]
fn a_session_whose_objects_are_all_deleted_is_not_started_anew() {
    let backend = with_witness(Backend::file());
    let home = TempHome::new();
    stream(&backend, &home, 1..=1);
    std::fs::remove_dir_all(bucket(&backend).join(format!("v1/default/claude-code/{ID}"))).unwrap();
    for arguments in [
        &["run", "--session", ID, "--", "touch", "started"][..],
        &[
            "run",
            "--session",
            &ID[..ID.len()],
            "--must-exist",
            "--",
            "touch",
            "started",
        ],
    ] {
        let other = TempHome::new();
        backend
            .run(&other, arguments)
            .fails(8, "but the store has no entry", "backup");
        assert!(!other.home().join("started").exists());
    }
    let verified = backend.run(&TempHome::new(), &["verify"]);
    assert_eq!(verified.code(), 6, "{}", verified.out());
    assert!(
        verified.out().contains("but the store has no entry"),
        "{}",
        verified.out()
    );
}

#[test]
fn a_replaced_entry_is_noticed_even_if_the_log_is_longer() {
    let (backend, elsewhere) = (with_witness(Backend::file()), Backend::file());
    let home = TempHome::new();
    stream(&backend, &home, 1..=2);
    // The attacker continues a copy of the older bucket and puts it in place.
    let copy = |from: &Backend, to: &Backend| {
        let _ = std::fs::remove_dir_all(bucket(to));
        for (path, bytes) in files_below(&bucket(from)) {
            crate::support::files::write(&bucket(to).join(path), bytes);
        }
    };
    copy(&backend, &elsewhere);
    stream(&backend, &home, 3..=3);
    let attacker = TempHome::new();
    elsewhere.run(&attacker, &["restore", ID]).ok();
    stream(&elsewhere, &attacker, 7..=9);
    copy(&elsewhere, &backend);
    backend.run(&TempHome::new(), &["restore", ID]).fails(
        6,
        "is not the one that the index knows",
        "--accept-rollback",
    );
}

#[test]
fn an_older_index_and_garbage_collection_raise_no_alarm() {
    let backend = with_witness(Backend::file());
    let home = TempHome::new();
    stream(&backend, &home, 1..=2);
    let index = backend.path().join("index.db");
    let old = std::fs::read(&index).unwrap();
    stream(&backend, &home, 3..=8);
    backend.run(&home, &["gc", "--history", "0s"]).ok();
    backend
        .run(&TempHome::new(), &["restore", ID, "--dry-run"])
        .ok();
    backend.run(&TempHome::new(), &["verify"]).ok();
    for side in ["index.db-wal", "index.db-shm"] {
        let _ = std::fs::remove_file(backend.path().join(side));
    }
    std::fs::write(&index, old).unwrap();
    backend.run(&TempHome::new(), &["verify"]).ok();
    backend.run(&TempHome::new(), &["restore", ID]).ok();
    // A removed session that garbage collection deletes.
    backend.run(&home, &["reindex"]).ok();
    backend.run(&home, &["rm", ID, "--yes"]).ok();
    std::fs::remove_dir_all(bucket(&backend).join(format!("v1/default/claude-code/{ID}"))).unwrap();
    backend.run(&TempHome::new(), &["verify"]).ok();
    backend
        .run(&TempHome::new(), &["restore", ID])
        .fails(3, "does not exist", "");
}

needs_servers!(an_unreachable_index_delays_a_restore_only_if_it_is_required);
fn an_unreachable_index_delays_a_restore_only_if_it_is_required() {
    let (server, database) = (s3().unwrap(), postgres().unwrap());
    let url = database.fresh_database();
    let proxy = TcpProxy::start(database.addr());
    let through = url.replacen(&database.addr().to_string(), &proxy.addr().to_string(), 1);
    let mut backend = Backend::on(&server.endpoint, &server.fresh_bucket(), &url);
    let home = TempHome::new();
    stream(&backend, &home, 1..=1);
    backend.set("SESSIOND_INDEX", through);
    proxy.set(Mode::Hang);
    let other = TempHome::new();
    backend
        .run(&other, &["run", "--session", ID, "--", "touch", "started"])
        .ok();
    eventually("the agent started", || {
        other.home().join("started").exists()
    });
    backend
        .run(
            &TempHome::new(),
            &["restore", ID, "--dry-run", "--witness", "auto"],
        )
        .ok();
    let started = Instant::now();
    backend
        .run(
            &TempHome::new(),
            &["restore", ID, "--dry-run", "--witness", "require"],
        )
        .fails(5, "compare", "--witness auto");
    assert!(started.elapsed() < Duration::from_secs(60));
}
