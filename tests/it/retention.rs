//! Retention of history, sessions and removed sessions. Tests pass time by changing file times.

use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::support::TempHome;
use crate::support::backend::{Backend, eventually, transcript};
use crate::support::files::append;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Makes all objects of the bucket older by this duration.
pub fn age_objects(backend: &Backend, time: Duration) {
    let mut open = vec![backend.path().join("bucket/v1")];
    while let Some(directory) = open.pop() {
        for item in std::fs::read_dir(&directory)
            .unwrap()
            .map(|item| item.unwrap().path())
        {
            if item.is_dir() {
                open.push(item);
            } else {
                let file = std::fs::File::open(&item).unwrap();
                let modified: SystemTime = file.metadata().unwrap().modified().unwrap();
                file.set_modified(modified - time).unwrap();
            }
        }
    }
}

fn session(backend: &Backend) -> std::path::PathBuf {
    backend.path().join("bucket/v1/default/claude-code/s1")
}

fn count(directory: &Path) -> usize {
    std::fs::read_dir(directory).map_or(0, Iterator::count)
}

/// Streams this number of changes, each in its own entry. Returns the transcript.
fn stream(backend: &Backend, home: &TempHome, changes: usize) -> Vec<u8> {
    let daemon = backend.daemon(home, &["--flush-interval", "10ms"]);
    let path = transcript(home, "s1");
    for number in 0..changes {
        append(&path, format!("{{\"n\":{number},\"of\":{changes}}}\n"));
        backend.run(home, &["flush", "--wait"]).ok();
    }
    drop(daemon);
    std::fs::read(path).unwrap()
}

fn restored(backend: &Backend, arguments: &[&str]) -> Vec<u8> {
    let home = TempHome::new();
    let copy = home.path().join("copy");
    backend
        .run(
            &home,
            &[&["pull", "s1", "--to", &copy.to_string_lossy()], arguments].concat(),
        )
        .ok();
    std::fs::read(copy.join("projects/-work-app/s1.jsonl")).unwrap()
}

#[test]
fn history_is_kept_for_the_grace_period_and_then_compacted() {
    let backend = Backend::file();
    let home = TempHome::new();
    let whole = stream(&backend, &home, 80);
    let directory = session(&backend);
    // A claim and 80 deltas: the daemon has made a snapshot of the first 47.
    assert_eq!(
        (
            count(&directory.join("log")),
            count(&directory.join("snap"))
        ),
        (81, 1)
    );
    let third = restored(&backend, &["--at", "seq:4"]);
    assert!(whole.starts_with(&third) && third.iter().filter(|byte| **byte == b'\n').count() == 3);

    age_objects(&backend, 6 * DAY);
    let plan = backend
        .run(&home, &["gc", "--ttl", "never", "--json"])
        .json();
    assert_eq!(plan["objects"], 0, "{plan}");
    assert_eq!(count(&directory.join("log")), 81);

    age_objects(&backend, 2 * DAY);
    let plan = backend
        .run(&home, &["gc", "--ttl", "never", "--dry-run", "--json"])
        .json();
    assert_eq!(
        (&plan["objects"], &plan["collected"][0]["steps"]),
        (
            &47.into(),
            &serde_json::json!(["delete_covered", "merge_small"])
        ),
        "{plan}"
    );
    assert_eq!(
        count(&directory.join("log")),
        81,
        "a dry run deletes nothing"
    );
    backend.run(&home, &["gc", "--ttl", "never"]).ok();
    assert_eq!(
        (
            count(&directory.join("log")),
            count(&directory.join("snap"))
        ),
        (34, 2)
    );
    assert_eq!(restored(&backend, &[]), whole);
    assert_eq!(
        backend
            .run(&home, &["pull", "s1", "--at", "seq:4", "--to", "nowhere"])
            .code(),
        3
    );

    age_objects(&backend, 2 * DAY);
    backend.run(&home, &["gc", "--ttl", "never"]).ok();
    assert_eq!(
        (
            count(&directory.join("log")),
            count(&directory.join("snap"))
        ),
        (0, 1)
    );
    assert_eq!(restored(&backend, &[]), whole);
    backend.run(&home, &["verify", "--all", "--deep"]).ok();
    let before = backend.run(&home, &["ls", "--json"]).json();
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(backend.run(&home, &["ls", "--json"]).json(), before);

    // The volume continues as before.
    let longer = stream(&backend, &home, 3);
    assert!(longer.starts_with(&whole) && longer.len() > whole.len());
    assert_eq!(restored(&backend, &[]), longer);
    backend.run(&home, &["verify", "--all", "--deep"]).ok();
}

#[test]
fn an_expired_session_can_be_undeleted_until_the_grace_period_ends() {
    let backend = Backend::file();
    let home = TempHome::new();
    let whole = stream(&backend, &home, 3);
    age_objects(&backend, 8 * DAY);
    backend.run(&home, &["ttl", "s1", "never"]).ok();
    backend.run(&home, &["gc", "--ttl", "7d"]).ok();
    assert_eq!(restored(&backend, &[]), whole);
    let output = backend.run(&home, &["ttl", "s1", "9d"]);
    assert!(output.out().contains("9 days"), "{}", output.out());
    backend.run(&home, &["gc", "--ttl", "7d"]).ok();
    assert_eq!(restored(&backend, &[]), whole);

    backend.run(&home, &["ttl", "s1", "default"]).ok();
    assert_eq!(
        backend.run(&home, &["gc", "--ttl", "7d", "--json"]).json()["collected"][0]["steps"][0],
        "expire"
    );
    let elsewhere = TempHome::new();
    backend
        .run(&elsewhere, &["restore", "s1"])
        .fails(3, "was removed", "sessiond undelete s1");
    assert_eq!(
        backend.run(&home, &["ls", "--json"]).json()["sessions"]
            .as_array()
            .unwrap()
            .len(),
        0
    );
    assert_eq!(
        backend
            .run(&home, &["ls", "--status", "removed", "--json"])
            .json()["sessions"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    backend.run(&home, &["undelete", "s1"]).ok();
    assert_eq!(restored(&backend, &[]), whole);
    assert_eq!(
        backend.run(&home, &["ls", "--json"]).json()["sessions"]
            .as_array()
            .unwrap()
            .len(),
        1
    );

    age_objects(&backend, 8 * DAY);
    backend.run(&home, &["gc", "--ttl", "7d"]).ok();
    age_objects(&backend, DAY / 2);
    assert_eq!(
        backend.run(&home, &["gc", "--ttl", "7d", "--json"]).json()["objects"],
        0,
        "within the grace period nothing is deleted"
    );
    age_objects(&backend, DAY);
    backend.run(&home, &["gc", "--ttl", "7d"]).ok();
    assert_eq!(
        count(&session(&backend).join("log")),
        1,
        "only the mark is left"
    );
    backend
        .run(&home, &["undelete", "s1"])
        .fails(3, "deleted permanently", "");

    // A writer that still has the files can continue: all of them are uploaded again.
    let longer = stream(&backend, &home, 1);
    assert_eq!(restored(&backend, &[]), longer);
    assert!(longer.starts_with(&whole));
    backend.run(&home, &["verify", "--all", "--deep"]).ok();
}

#[test]
fn gc_keeps_every_session_that_has_no_ttl() {
    let backend = Backend::file();
    let home = TempHome::new();
    let whole = stream(&backend, &home, 3);
    age_objects(&backend, 4000 * DAY);
    // SESSIOND_TTL is the TTL of the sessions that a daemon writes; gc does not read it.
    let mut gc = backend.command(&home, &["gc", "--json"]);
    gc.env("SESSIOND_TTL", "1s");
    let report: serde_json::Value =
        serde_json::from_slice(&gc.output().expect("run gc").stdout).expect("JSON");
    assert_eq!(report["expired"], 0, "{report}");
    backend.run(&home, &["gc"]).ok();
    age_objects(&backend, 10 * DAY);
    backend.run(&home, &["gc"]).ok();
    assert_eq!(restored(&backend, &[]), whole);

    let plan = backend.run(&home, &["gc", "--ttl", "7d", "--dry-run"]);
    assert!(plan.out().contains("1 session expires;"), "{}", plan.out());
    let said = backend.run(&home, &["gc", "--ttl", "7d"]);
    assert!(said.out().contains("1 session expired;"), "{}", said.out());
}

#[test]
fn an_archived_session_expires_only_if_it_is_included() {
    let backend = Backend::file();
    let home = TempHome::new();
    stream(&backend, &home, 3);
    backend.run(&home, &["ttl", "s1", "1d"]).ok();
    backend.run(&home, &["close", "s1"]).ok();
    backend.run(&home, &["archive", "s1"]).ok();
    age_objects(&backend, 2 * DAY);
    let kept = backend.run(&home, &["gc", "--ttl", "1d", "--json"]).json();
    assert_eq!(
        (&kept["expired"], &kept["exempt"]),
        (&0.into(), &1.into()),
        "{kept}"
    );
    backend.run(&home, &["gc", "--include-checkpoints"]).ok();
    assert!(restored(&backend, &[]).len() > 1);
    // The session grows: it is active again, and its TTL applies.
    stream(&backend, &home, 1);
    age_objects(&backend, 2 * DAY);
    let plan = backend.run(&home, &["gc", "--dry-run", "--json"]).json();
    assert_eq!(plan["expired"], 1, "{plan}");

    backend.run(&home, &["close", "s1"]).ok();
    backend.run(&home, &["archive", "s1"]).ok();
    let report = backend
        .run(&home, &["gc", "--include-archived", "--json"])
        .json();
    assert_eq!(report["expired"], 1, "{report}");
}

#[test]
fn a_session_with_a_named_checkpoint_expires_only_if_it_is_included() {
    let backend = Backend::file();
    let home = TempHome::new();
    stream(&backend, &home, 3);
    backend
        .run(&home, &["checkpoint", "s1", "--name", "release"])
        .ok();
    age_objects(&backend, 8 * DAY);
    let said = backend.run(&home, &["gc", "--ttl", "7d", "--include-archived"]);
    assert!(
        said.out().contains("1 session is past the TTL"),
        "{}",
        said.out()
    );
    assert!(restored(&backend, &["--at", "release"]).len() > 1);
    let report = backend
        .run(
            &home,
            &["gc", "--ttl", "7d", "--include-checkpoints", "--json"],
        )
        .json();
    assert_eq!(report["expired"], 1, "{report}");
}

#[test]
fn leftovers_of_a_deleted_session_are_removed() {
    let backend = Backend::file();
    let home = TempHome::new();
    stream(&backend, &home, 2);
    backend.run(&home, &["label", "s1", "a=b"]).ok();
    assert_eq!(count(&session(&backend).join("meta")), 1);
    backend.run(&home, &["rm", "s1", "--yes"]).ok();
    age_objects(&backend, 2 * DAY);
    backend.run(&home, &["gc"]).ok();
    assert_eq!(count(&session(&backend).join("meta")), 0);
    // A process that found the session before writes its metadata.
    backend.run(&home, &["label", "s1", "a=c"]).ok();
    age_objects(&backend, 8 * DAY);
    assert_eq!(
        backend.run(&home, &["gc", "--json"]).json()["collected"][0]["steps"][0],
        "delete_purge_entry"
    );
    assert!(!session(&backend).exists());
    assert_eq!(
        backend
            .run(&home, &["ls", "--status", "removed", "--json"])
            .json()["sessions"]
            .as_array()
            .unwrap()
            .len(),
        0
    );
    // A daemon that was suspended meanwhile.
    let longer = stream(&backend, &home, 1);
    assert_eq!(restored(&backend, &[]), longer);
}

#[test]
fn rm_confirms_and_a_writer_revives_the_session() {
    let backend = Backend::file();
    let home = TempHome::new();
    let daemon = backend.daemon(&home, &[]);
    let path = transcript(&home, "s1");
    append(&path, "{\"n\":1}\n");
    backend.run(&home, &["flush", "--wait"]).ok();
    backend
        .run(&home, &["rm", "s1"])
        .fails(2, "confirmation is required", "--yes");
    backend.run(&home, &["rm", "s1", "--yes"]).ok();
    backend.run(&home, &["rm", "s1", "--yes"]).ok();
    backend
        .run(&TempHome::new(), &["restore", "s1"])
        .fails(3, "was removed", "undelete");
    backend
        .run(&home, &["rm", "nobody", "--yes"])
        .fails(3, "does not exist", "sessiond ls");
    append(&path, "{\"n\":2}\n");
    backend.run(&home, &["flush", "--wait"]).ok();
    assert_eq!(restored(&backend, &[]), std::fs::read(&path).unwrap());
    let row = || backend.run(&home, &["ls", "--json"]).json()["sessions"][0].clone();
    eventually("the index has the revived session", || {
        row()["status"] == "active"
    });
    let row = row();
    assert_eq!(
        (&row["status"], &row["branches"]),
        (&"active".into(), &serde_json::json!([])),
        "{row}"
    );
    drop(daemon);
}

#[test]
fn a_removed_id_can_be_used_again_and_the_old_session_is_history() {
    let backend = Backend::file();
    let home = TempHome::new();
    let old = stream(&backend, &home, 3);
    backend.run(&home, &["rm", "s1", "--yes"]).ok();
    let other = TempHome::new();
    let daemon = backend.daemon(&other, &[]);
    append(&transcript(&other, "s1"), "{\"n\":\"another\"}\n");
    backend.run(&other, &["flush", "--wait"]).ok();
    drop(daemon);
    assert_eq!(restored(&backend, &[]), b"{\"n\":\"another\"}\n");
    assert_eq!(restored(&backend, &["--at", "seq:4"]), old);
    backend.run(&home, &["verify", "--all", "--deep"]).ok();
    backend.run(&home, &["reindex"]).ok();
    let row = backend.run(&home, &["ls", "--json"]).json()["sessions"][0].clone();
    assert_eq!(
        (&row["status"], &row["branches"]),
        (&"active".into(), &serde_json::json!([])),
        "{row}"
    );
}

#[test]
fn a_sessions_own_ttl_wins() {
    let backend = Backend::file();
    let home = TempHome::new();
    stream(&backend, &home, 2);
    backend.run(&home, &["ttl", "s1", "1h"]).ok();
    age_objects(&backend, DAY / 48);
    assert!(
        backend.run(&home, &["gc", "--json"]).ok().json()["collected"]
            .as_array()
            .unwrap()
            .is_empty()
    );
    age_objects(&backend, DAY / 48);
    assert_eq!(
        backend.run(&home, &["gc", "--json"]).ok().json()["collected"][0]["steps"][0],
        "expire"
    );
}

#[test]
fn a_purged_session_can_be_imported_again() {
    let backend = Backend::file();
    let home = TempHome::new();
    let whole = stream(&backend, &home, 3);
    backend.run(&home, &["label", "s1", "a=b"]).ok();
    backend.run(&home, &["close", "s1"]).ok();
    backend
        .run(&home, &["export", "s1", "-o", "s1.tar.gz"])
        .ok();
    backend.run(&home, &["rm", "s1", "--yes"]).ok();
    age_objects(&backend, 2 * DAY);
    backend.run(&home, &["gc"]).ok();
    assert_eq!(
        count(&session(&backend).join("log")),
        1,
        "only the mark is left"
    );
    backend.run(&home, &["import", "s1.tar.gz"]).ok();
    assert_eq!(restored(&backend, &[]), whole);
    backend.run(&home, &["verify", "--all", "--deep"]).ok();
    let row = || backend.run(&home, &["ls", "--json"]).ok().json()["sessions"][0].clone();
    assert_eq!(
        (&row()["status"], &row()["labels"]["a"]),
        (&"active".into(), &"b".into())
    );
    let before = row();
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(row(), before);
}

#[test]
fn a_purged_session_leaves_no_request_reference() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let mut daemon = backend.daemon(&home, &["--request", "job-7"]);
    append(&transcript(&home, "s1"), "{\"n\":1}\n");
    backend.run(&home, &["flush", "--wait"]).ok();
    let references = backend
        .path()
        .join("bucket/v1/default/claude-code/.requests/job-7");
    // The reference is written before the metadata, which names it.
    eventually("the session has the request ID", || {
        count(&session(&backend).join("meta")) == 1
    });
    assert!(references.join("s1.json").exists());
    daemon.kill();
    backend.run(&home, &["rm", "s1", "--yes"]).ok();
    for _ in 0..3 {
        if references.exists() {
            age_objects(&backend, 10 * DAY);
            backend.run(&home, &["gc"]).ok();
        }
    }
    assert!(!references.join("s1.json").exists());
}
