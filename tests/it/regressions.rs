//! Fixed bugs, each a test named after it.

use std::os::unix::fs::MetadataExt;

use crate::support::TempHome;
use crate::support::backend::{Backend, transcript};
use crate::support::files::append;
use crate::support::skip;

const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/work/app\"}\n";

fn text(path: &std::path::Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A home whose session `s1` with this number of lines is stored.
fn stored(backend: &Backend, lines: usize) -> TempHome {
    let home = TempHome::new();
    append(&transcript(&home, "s1"), LINE.repeat(lines));
    backend.run(&home, &["run", "--", "true"]).ok();
    home
}

fn restored(backend: &Backend) -> String {
    let other = TempHome::new();
    backend.run(&other, &["pull", "s1", "--to", "copy"]).ok();
    text(&other.home().join("copy/projects/-work-app/s1.jsonl"))
}

#[test]
fn a_transcript_truncated_by_a_power_loss_is_restored() {
    let backend = Backend::file();
    let home = stored(&backend, 100);
    // The client does not sync its files: after a power cut the end may be missing.
    std::fs::OpenOptions::new()
        .write(true)
        .open(transcript(&home, "s1"))
        .unwrap()
        .set_len(2000)
        .unwrap();
    backend
        .run(&home, &["run", "--session", "s1", "--", "true"])
        .ok();
    assert_eq!(text(&transcript(&home, "s1")), LINE.repeat(100));
    assert_eq!(restored(&backend), LINE.repeat(100));
}

#[test]
fn force_replaces_local_files_and_keeps_them_aside() {
    let backend = Backend::file();
    let home = stored(&backend, 3);
    for round in 0..2 {
        std::fs::write(
            transcript(&home, "s1"),
            format!("{{\"precious\":{round}}}\n"),
        )
        .unwrap();
        backend.run(&home, &["restore", "s1", "--force"]).ok();
        assert_eq!(text(&transcript(&home, "s1")), LINE.repeat(3));
    }
    let aside = std::fs::read_dir(home.home().join(".claude/.sessiond/aside")).unwrap();
    let mut kept: Vec<String> = aside
        .map(|item| text(&item.unwrap().path().join("projects/-work-app/s1.jsonl")))
        .collect();
    kept.sort();
    assert_eq!(kept, ["{\"precious\":0}\n", "{\"precious\":1}\n"]);
}

#[test]
fn an_emptied_store_receives_everything_again() {
    let backend = Backend::file();
    let home = stored(&backend, 3);
    let bucket = backend.path().join("bucket");
    std::fs::remove_dir_all(&bucket).unwrap();
    append(&transcript(&home, "s1"), LINE);
    backend.run(&home, &["run", "--", "true"]).ok();
    assert_eq!(restored(&backend), LINE.repeat(4));

    // Emptied under a running daemon, and recreated by a process that only reads.
    let mut daemon = backend.daemon(&home, &[]);
    append(&transcript(&home, "s1"), LINE);
    backend.run(&home, &["flush", "--wait"]).ok();
    std::fs::remove_dir_all(&bucket).unwrap();
    backend.run(&home, &["status"]).ok();
    assert!(!bucket.exists(), "status made a store");
    backend.run(&home, &["ls"]).ok();
    append(&transcript(&home, "s1"), LINE);
    backend
        .run(&home, &["flush", "--wait", "--timeout", "1s"])
        .fails(5, "another store replaced it", "");
    daemon.kill();
    let _daemon = backend.daemon(&home, &[]);
    backend.run(&home, &["flush", "--wait"]).ok();
    assert_eq!(restored(&backend), LINE.repeat(6));
    // The index knows the longer log of the store before it was emptied.
    backend
        .run(&home, &["verify", "--all"])
        .fails(6, "damaged", "");
    backend.run(&home, &["reindex"]).ok();
    backend.run(&home, &["verify", "--all"]).ok();
}

#[test]
fn a_restore_that_cannot_write_its_ledger_claims_nothing() {
    let backend = Backend::file();
    let home = stored(&backend, 3);
    let other = TempHome::new();
    append(
        &other.home().join(".claude/.sessiond/ledger"),
        "a file where a directory must be",
    );
    assert_eq!(backend.run(&other, &["restore", "s1"]).code(), 5);
    append(&transcript(&home, "s1"), LINE);
    let mut daemon = backend.daemon(&home, &[]);
    backend.run(&home, &["flush", "--wait"]).ok();
    daemon.kill();
    assert_eq!(restored(&backend), LINE.repeat(4));
}

#[test]
fn on_restore_error_continue_launches_the_agent_without_a_store() {
    let home = TempHome::new();
    for store in [
        "file:///proc/no-such-place",
        "ftp://x",
        "s3://bucket?endpoint=http://127.0.0.1:1",
    ] {
        let mut backend = Backend::file();
        backend.set("SESSIOND_STORE", store);
        backend.set("AWS_ACCESS_KEY_ID", "x");
        backend.set("AWS_SECRET_ACCESS_KEY", "y");
        let run = |more: &[&str]| {
            backend.run(
                &home,
                &[
                    &["run", "--session", "s1", "--flush-deadline", "200ms"],
                    more,
                    &["--", "sh", "-c", "echo up; exit 3"],
                ]
                .concat(),
            )
        };
        let ran = run(&["--on-restore-error", "continue"]);
        assert_eq!(
            (ran.code(), ran.out().as_str()),
            (3, "up\n"),
            "{store}: {}",
            ran.err()
        );
        let ran = run(&[]);
        assert!(
            ran.code() != 3 && ran.out().is_empty(),
            "{store}: {}",
            ran.err()
        );
    }
    Backend::file()
        .run(&home, &["run", "--session", "", "--", "true"])
        .fails(2, "--session", "omit --session");
}

#[test]
fn a_second_pull_never_leaves_a_stale_copy() {
    let backend = Backend::file();
    let home = stored(&backend, 3);
    backend.run(&home, &["pull", "s1", "--to", "copy"]).ok();
    backend.run(&home, &["pull", "s1", "--to", "copy"]).ok();
    std::fs::OpenOptions::new()
        .write(true)
        .open(transcript(&home, "s1"))
        .unwrap()
        .set_len(2 * LINE.len() as u64)
        .unwrap();
    backend.run(&home, &["run", "--", "true"]).ok();
    backend
        .run(&home, &["pull", "s1", "--to", "copy"])
        .fails(7, "s1.jsonl", "empty directory");
}

#[test]
fn files_created_by_root_belong_to_the_owner_of_the_root() {
    let home = TempHome::new();
    if std::fs::metadata(home.path()).unwrap().uid() != 0 {
        return skip("only root can give files away");
    }
    let backend = Backend::file();
    append(&transcript(&home, "s1"), LINE);
    std::os::unix::fs::chown(home.home().join(".claude"), Some(4321), Some(4322)).unwrap();
    backend.run(&home, &["run", "--", "true"]).ok();
    for path in ["", "lock", "ledger", "ledger/default/claude-code/s1.json"] {
        let found = std::fs::metadata(home.home().join(".claude/.sessiond").join(path)).unwrap();
        assert_eq!((found.uid(), found.gid()), (4321, 4322), "{path}");
    }
}

#[test]
fn a_mistyped_url_never_prints_its_password() {
    let home = TempHome::new();
    for (name, url) in [
        ("SESSIOND_INDEX", "postgres:/u:s3cr3t@h/d"),
        ("SESSIOND_STORE", "https://u:s3cr3t@x/y"),
        ("SESSIOND_STORE", "file://u:s3cr3t@x/y"),
    ] {
        let mut backend = Backend::file();
        backend.set(name, url);
        for arguments in [
            &["ls"][..],
            &["doctor"],
            &["reindex"],
            &["run", "--", "true"],
        ] {
            let ran = backend.run(&home, arguments);
            assert!(ran.code() != 0, "{url}");
            assert!(
                !format!("{}{}", ran.out(), ran.err()).contains("s3cr3t"),
                "{url} {arguments:?}: {}{}",
                ran.out(),
                ran.err()
            );
        }
    }
    let mut backend = Backend::file();
    backend.set("SESSIOND_STORE", "file:///");
    backend
        .run(&home, &["ls"])
        .fails(2, "root of the filesystem", "directory");
}

#[test]
fn leftovers_of_a_killed_restore_are_removed_by_the_next() {
    let backend = Backend::file();
    stored(&backend, 3);
    let other = TempHome::new();
    let left = other
        .home()
        .join(".claude/.sessiond/tmp/restore-0123456789abcdef");
    append(&left.join("00000001"), LINE.repeat(1000));
    backend.run(&other, &["restore", "s1"]).ok();
    assert!(!left.exists());
}

#[test]
fn doctor_reports_unstorable_files_and_a_dangling_root() {
    use std::os::unix::ffi::OsStrExt;
    let backend = Backend::file();
    let home = stored(&backend, 1);
    let name = std::ffi::OsStr::from_bytes(b"\xff\xfe.jsonl");
    std::fs::write(
        home.home().join(".claude/projects/-work-app").join(name),
        LINE,
    )
    .unwrap();
    let output = backend.run(&home, &["doctor"]).ok().out();
    assert!(output.contains("is not UTF-8"), "{output}");
    let other = TempHome::new();
    std::os::unix::fs::symlink("/no/such/place", other.home().join(".claude")).unwrap();
    let ran = backend.run(&other, &["doctor"]);
    assert_eq!(ran.code(), 1);
    assert!(
        ran.out().contains("dangling symbolic link"),
        "{}",
        ran.out()
    );
}
