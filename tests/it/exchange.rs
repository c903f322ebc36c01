//! Export and import: sessions as one file between stores, homes and machines, and from an
//! environment variable.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use sessiond::agent::Profile;
use sessiond::codec::archive::Manifest;
use sessiond::exchange::{import, pack};
use sessiond::model::{FileKind, SessionMetadata};
use sessiond::sys::Disk;

use crate::support::TempHome;
use crate::support::backend::{Backend, Signal, transcript};
use crate::support::files::{append, files_below};
use crate::support::on_each_backend;
use crate::support::world::World;

const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/work/app\",\"message\":{\"content\":\"hi\"}}\n";

/// A session with every kind of file, with distinct modes and times, and a partial line.
fn stream(backend: &Backend, home: &TempHome) {
    let root = home.home().join(".claude");
    let mut daemon = backend.daemon(home, &["--label", "team=infra", "--request", "r1"]);
    append(&transcript(home, "s1"), LINE.repeat(50));
    append(
        &root.join("projects/-work-app/s1/subagents/agent-1.jsonl"),
        LINE,
    );
    append(
        &root.join("projects/-work-app/s1/tool-results/big.txt"),
        "output ".repeat(900_000),
    );
    append(&root.join("projects/-work-app/s1/empty.json"), "");
    append(
        &root.join(format!(
            "projects/-work-app/s1/{}/deep.txt",
            "long-name".repeat(20)
        )),
        "deep",
    );
    append(
        &root.join("projects/-work-app/agent-0ld.jsonl"),
        "{\"sessionId\":\"s1\",\"isSidechain\":true}\n",
    );
    append(&root.join("tasks/s1/1.json"), "{\"id\":\"1\"}");
    append(&transcript(home, "s1"), "{\"torn");
    for (path, mode, seconds) in [
        ("tasks/s1/1.json", 0o640, 1_600_000_000),
        (
            "projects/-work-app/s1/subagents/agent-1.jsonl",
            0o600,
            1_500_000_000,
        ),
    ] {
        let file = std::fs::File::options()
            .write(true)
            .open(root.join(path))
            .unwrap();
        file.set_permissions(std::fs::Permissions::from_mode(mode))
            .unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::new(seconds, 123_456_789))
            .unwrap();
    }
    backend.run(home, &["flush", "--wait"]).ok();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.code(), Some(0));
}

fn pulled(backend: &Backend, id: &str) -> (TempHome, std::path::PathBuf) {
    let home = TempHome::new();
    backend.run(&home, &["pull", id, "--to", "copy"]).ok();
    let copy = home.home().join("copy");
    (home, copy)
}

#[track_caller]
fn assert_equal(one: &Path, other: &Path) {
    let (files, others) = (files_below(one), files_below(other));
    assert_eq!(
        files.keys().collect::<Vec<_>>(),
        others.keys().collect::<Vec<_>>()
    );
    for (path, bytes) in &files {
        assert!(others[path] == *bytes, "{path} differs");
        let meta = |root: &Path| std::fs::metadata(root.join(path)).unwrap();
        let (here, there) = (meta(one), meta(other));
        assert_eq!(
            here.permissions().mode(),
            there.permissions().mode(),
            "{path}: mode"
        );
        assert_eq!(
            here.modified().unwrap(),
            there.modified().unwrap(),
            "{path}: time"
        );
    }
}

on_each_backend!(a_session_moves_between_stores_and_is_byte_equal);
fn a_session_moves_between_stores_and_is_byte_equal(mut backend: Backend) {
    let home = TempHome::new();
    stream(&backend, &home);
    let (_home, before) = pulled(&backend, "s1");
    backend
        .run(&home, &["export", "s1", "-o", "s1.tar.gz"])
        .ok();
    let file = home.home().join("s1.tar.gz");
    assert_eq!(
        std::fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let text = backend.run(&home, &["export", "s1", "--base64"]).ok().out();
    assert!(
        text.starts_with("H4sI")
            && text.ends_with('\n')
            && !text.trim().contains(char::is_whitespace)
    );
    std::fs::write(home.home().join("s1.txt"), text).unwrap();

    // Into a directory, from a file and from text.
    for name in ["s1.tar.gz", "s1.txt"] {
        let other = Backend::file();
        let there = TempHome::new();
        let archive = home.home().join(name);
        let archive = archive.to_str().unwrap();
        assert!(
            other
                .run(&there, &["import", archive, "--dry-run"])
                .ok()
                .out()
                .contains("would import s1")
        );
        other
            .run(&there, &["pull", "s1"])
            .fails(3, "does not exist", "");
        let done = other
            .run(&there, &["import", archive, "--json"])
            .ok()
            .json();
        assert_eq!(
            (&done["session"], &done["files"], &done["already_stored"]),
            (&"s1".into(), &7.into(), &false.into()),
            "{done}"
        );
        assert!(done["entries"].as_u64().unwrap() >= 2);
        let (_there, after) = pulled(&other, "s1");
        assert_equal(&before, &after);
        other.run(&there, &["verify", "s1", "--deep"]).ok();
        let row = other.run(&there, &["ls", "--json"]).ok().json()["sessions"][0].clone();
        assert_eq!(
            (&row["labels"]["team"], &row["request_id"], &row["cwd"]),
            (&"infra".into(), &"r1".into(), &"/work/app".into())
        );

        // A repeated import does nothing, another archive with the same ID is rejected, and the
        // agent can continue.
        assert!(
            other
                .run(&there, &["import", archive])
                .ok()
                .out()
                .contains("is already stored")
        );
        assert!(!there.home().join(".claude/projects").exists());
        other.run(&there, &["restore", "s1"]).ok();
        let mut daemon = other.daemon(&there, &[]);
        append(&transcript(&there, "s1"), LINE);
        other.run(&there, &["flush", "--wait"]).ok();
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.code(), Some(0));
        other
            .run(&there, &["import", archive])
            .fails(7, "and different content", "--id NEW");
        assert!(
            other
                .run(&there, &["import", archive, "--id", "s2"])
                .ok()
                .out()
                .contains("imported s2")
        );
        let (_there, renamed) = pulled(&other, "s2");
        let (old, new) = (files_below(&before), files_below(&renamed));
        let as_s2 = |bytes: &[u8]| {
            String::from_utf8(bytes.to_vec())
                .unwrap()
                .replace("s1", "s2")
                .into_bytes()
        };
        for path in [
            "projects/-work-app/s1.jsonl",
            "projects/-work-app/agent-0ld.jsonl",
            "tasks/s1/1.json",
        ] {
            assert_eq!(new[&path.replace("s1", "s2")], as_s2(&old[path]), "{path}");
        }
        assert_eq!(new.len(), old.len());
        other.run(&there, &["verify", "s2", "--deep"]).ok();
        other.run(&there, &["rm", "s2", "--yes"]).ok();
        other.run(&there, &["import", archive, "--id", "s2"]).fails(
            7,
            "was removed",
            "undelete s2",
        );
    }
    // An earlier point, through a pipe, back into the same store with another ID.
    let earlier = backend.run(&home, &["export", "s1", "--at", "seq:2"]).ok();
    let mut command = backend.command(&home, &["import", "-", "--id", "s3"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(&earlier.0.stdout)
        .unwrap();
    assert!(child.wait().unwrap().success());
    // Also with a database fence.
    backend.set("SESSIOND_FENCING", "database");
    backend.run(&home, &["import", "s1.txt", "--id", "s4"]).ok();
    backend.run(&home, &["verify", "s4", "--deep"]).ok();
    assert!(
        backend
            .run(&home, &["import", "s1.tar.gz", "--id", "s4"])
            .ok()
            .out()
            .contains("is already stored")
    );
    backend.run(&home, &["reindex"]).ok();
    let rows = backend.run(&home, &["ls", "--json"]).ok().json();
    assert!(
        rows["sessions"]
            .as_array()
            .unwrap()
            .iter()
            .any(|row| row["id"] == "s3" && row["labels"]["team"] == "infra"),
        "{rows}"
    );
}

#[test]
fn an_invalid_archive_is_rejected_and_nothing_is_written() {
    let backend = Backend::file();
    let home = TempHome::new();
    let other = Backend::file();
    stream(&backend, &home);
    let good = backend.run(&home, &["export", "s1"]).ok().0.stdout;
    let file = home.home().join("bad.tar.gz");
    let import = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        other.run(&home, &["import", file.to_str().unwrap()])
    };
    import(b"").fails(6, "it is empty", "");
    import(b"garbage, not an archive at all").fails(6, "neither gzip nor", "");
    import(&good[..good.len() / 2]).fails(6, "bad.tar.gz", "");
    import(&good[..good.len() - 4]).fails(6, "bad.tar.gz", "");
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 0x10;
    import(&flipped).fails(6, "bad.tar.gz", "");
    other
        .run(&home, &["import", "nowhere.tar.gz"])
        .fails(3, "does not exist", "");
    std::fs::write(&file, &good).unwrap();
    other
        .run(
            &home,
            &["import", file.to_str().unwrap(), "--agent", "generic"],
        )
        .fails(2, "a session of claude-code", "--agent claude-code");
    let objects = |backend: &Backend| {
        files_below(&backend.path().join("bucket"))
            .into_keys()
            .filter(|key| key.contains("/log/"))
            .count()
    };
    assert_eq!(objects(&other), 0);
    let left = std::fs::read_dir(home.path().join("tmp")).unwrap().count();
    assert_eq!(left, 0, "the scratch directories are gone");
    backend
        .run(&home, &["export", "nobody"])
        .fails(3, "does not exist", "sessiond ls");
    backend
        .run(&home, &["export", "s1", "-o", "missing/x"])
        .fails(2, "write missing/x", "create the directory first");
}

/// The store fails during an import; a repeated import continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_import_continues() {
    let world = World::new();
    let handle = world.stream();
    let line = format!("{{\"n\":\"{}\"}}\n", "x".repeat(1000));
    world.append("projects/-w/s1.jsonl", line.repeat(13_000));
    world.write("projects/-w/s1/tool-results/t.txt", vec![b'y'; 5 << 20]);
    handle.flush(None).await.unwrap();
    let before = world.stored("s1").await.unwrap();
    let (scratch, out) = (Disk::new(world.path("scratch")), world.path("s1.tar.gz"));
    let paths = ["projects/-w/s1.jsonl", "projects/-w/s1/tool-results/t.txt"];
    let files: Vec<_> = paths
        .iter()
        .map(|path| (path.parse().unwrap(), FileKind::Append))
        .collect();
    let manifest = Manifest::new(
        world.profile().name().clone(),
        "s1".parse().unwrap(),
        7,
        "2026-05-01T12:00:00Z".parse().unwrap(),
        &SessionMetadata::default(),
    );
    pack(
        &Disk::new(world.root()),
        &files,
        manifest,
        false,
        std::fs::File::create(&out).unwrap(),
    )
    .unwrap();

    let mut unpacked = import::unpack("x", std::fs::File::open(&out).unwrap(), &scratch).unwrap();
    unpacked.rename(&"s2".parse().unwrap()).unwrap();
    let (logs, profile) = (world.logs(), world.writer.context.profile.clone());
    world.store.fail_requests("s2/log/000000000004");
    let error = import::import(&logs, &*profile, &unpacked, false)
        .await
        .unwrap_err();
    assert!(
        error.is_retryable()
            && error
                .hint_text()
                .unwrap()
                .contains("run the same command again"),
        "{error}"
    );
    world.store.recover();
    let uploaded = world.uploaded("s2").await;
    assert!(uploaded > 5 << 20);
    let done = import::import(&logs, &*profile, &unpacked, false)
        .await
        .unwrap();
    assert!(!done.already_stored && done.entries >= 2);
    let after = world.stored("s2").await.unwrap();
    assert_eq!(
        after["projects/-w/s2.jsonl"],
        before["projects/-w/s1.jsonl"]
    );
    assert_eq!(
        after["projects/-w/s2/tool-results/t.txt"],
        before["projects/-w/s1/tool-results/t.txt"]
    );
    // Nothing was uploaded twice, and each entry is bounded.
    assert_eq!(
        world.uploaded("s2").await,
        before.values().map(|bytes| bytes.len() as u64).sum::<u64>()
    );
    assert!(world.entry_count("s2").await >= 6);
    assert!(
        import::import(&logs, &*profile, &unpacked, false)
            .await
            .unwrap()
            .already_stored
    );
}

on_each_backend!(restore_from_env_never_overwrites_differing_files);
fn restore_from_env_never_overwrites_differing_files(backend: Backend) {
    let home = TempHome::new();
    stream(&backend, &home);
    let blob = backend.run(&home, &["export", "s1", "--base64"]).ok().out();
    // Too long for an environment variable; use a smaller session.
    assert!(blob.len() < 128 << 10, "{}", blob.len());
    let from_env = |there: &TempHome, id: &str, blob: &str, arguments: &[&str]| {
        let mut command = backend.command(there, &[&["restore", "--from-env"], arguments].concat());
        command
            .env("AGENT_SESSION_ID", id)
            .env("AGENT_SESSION_BLOB", blob)
            .env("SESSIOND_STORE", "s3://nobody?endpoint=http://127.0.0.1:1");
        crate::support::backend::Ran(command.output().unwrap())
    };
    let there = TempHome::new();
    let output = from_env(&there, "s1", &blob, &[]).ok().out();
    assert!(
        output.contains("resume with session ID s1") && output.contains("partial line"),
        "{output}"
    );
    let (root, copy) = (home.home().join(".claude"), there.home().join(".claude"));
    let (mut sent, got) = (files_below(&root), files_below(&copy));
    sent.insert(
        "projects/-work-app/s1.jsonl".into(),
        LINE.repeat(50).into_bytes(),
    );
    assert_eq!(
        sent.keys().collect::<Vec<_>>(),
        got.keys().collect::<Vec<_>>()
    );
    assert!(sent == got);
    from_env(&there, "s1", &blob, &[]).ok();
    from_env(&there, "s2", &blob, &[]).fails(2, "contains session s1, not s2", "");
    std::fs::write(transcript(&there, "s1"), "{\"mine\":1}\n").unwrap();
    from_env(&there, "s1", &blob, &[]).fails(7, "local file", "--force");
    assert_eq!(
        std::fs::read_to_string(transcript(&there, "s1")).unwrap(),
        "{\"mine\":1}\n"
    );
    from_env(&there, "s1", &blob, &["--force"]).ok();

    // A gzipped transcript is restored into the project of the current directory.
    let gzipped = std::process::Command::new("sh")
        .args([
            "-c",
            &format!("printf '%s' '{LINE}{{\"torn' | gzip | base64"),
        ])
        .output()
        .unwrap();
    let blob = String::from_utf8(gzipped.stdout).unwrap();
    let there = TempHome::new();
    from_env(&there, "s9", &blob, &[]).ok();
    let here = there.home().canonicalize().unwrap();
    let profile = sessiond::agent::claude_code::ClaudeCode::new("claude-code".parse().unwrap());
    let path = there.home().join(format!(
        ".claude/projects/{}/s9.jsonl",
        profile.project_name(&here)
    ));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), LINE, "whole lines");
    // From then on it is a session like any other.
    let mut daemon = backend.daemon(&there, &[]);
    append(&path, LINE);
    backend.run(&there, &["flush", "--wait"]).ok();
    daemon.kill();
    let (_other, copy) = pulled(&backend, "s9");
    assert_eq!(
        files_below(&copy).values().next().unwrap(),
        LINE.repeat(2).as_bytes()
    );

    from_env(&there, "s9", "", &[]).fails(3, "AGENT_SESSION_BLOB is not set", "sessiond export");
    from_env(&there, "s9", "", &["--if-exists"]).ok();
    from_env(&there, "", &blob, &[]).fails(2, "the session ID is unknown", "");
    from_env(&there, "../s9", &blob, &[]).fails(2, "invalid session ID", "");
    from_env(&there, "s9", "bm90IGd6aXAK", &[]).fails(6, "neither gzip", "");
    from_env(&there, "s9", "H4sIAAAAAAAA", &[]).fails(6, "AGENT_SESSION_BLOB", "");
}

#[test]
fn an_export_writes_to_files_pipes_and_devices_as_named() {
    use std::os::unix::fs::FileTypeExt;
    let (backend, home) = (Backend::file(), TempHome::new());
    stream(&backend, &home);
    let directory = home.home();
    rustix::fs::mkfifoat(
        rustix::fs::CWD,
        directory.join("pipe"),
        rustix::fs::Mode::RWXU,
    )
    .unwrap();
    std::os::unix::fs::symlink("real.tar.gz", directory.join("link")).unwrap();
    let reader = std::thread::spawn({
        let pipe = directory.join("pipe");
        move || std::fs::read(pipe).unwrap()
    });
    backend.run(&home, &["export", "s1", "-o", "pipe"]).ok();
    let piped = reader.join().unwrap();
    for _ in 0..2 {
        backend.run(&home, &["export", "s1", "-o", "link"]).ok();
    }
    assert!(
        std::fs::symlink_metadata(directory.join("pipe"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    assert!(
        std::fs::symlink_metadata(directory.join("link"))
            .unwrap()
            .is_symlink()
    );
    assert!(
        piped.starts_with(&[0x1f, 0x8b])
            && directory.join("real.tar.gz").metadata().unwrap().len() > 1000
    );
}

#[test]
fn restore_from_env_writes_only_files_of_the_session() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let scratch = TempHome::new();
    let directory = Disk::new(scratch.home());
    let own = "projects/-work-app/s1.jsonl";
    append(&scratch.home().join(own), LINE);
    for foreign in [
        "settings.json",
        ".credentials.json",
        "CLAUDE.md",
        "hooks/x.sh",
        ".sessiond/writer.key",
        ".sessiond/ledger/default/claude-code/s9.json",
        "projects/-work-app/s2.jsonl",
    ] {
        append(&scratch.home().join(foreign), "{}");
        let files = [own, foreign].map(|path| (path.parse().unwrap(), FileKind::Append));
        let manifest = Manifest::new(
            "claude-code".parse().unwrap(),
            "s1".parse().unwrap(),
            7,
            "2026-05-01T12:00:00Z".parse().unwrap(),
            &SessionMetadata::default(),
        );
        let mut blob = Vec::new();
        pack(&directory, &files, manifest, true, &mut blob).unwrap();
        for arguments in [
            &["restore", "--from-env"][..],
            &["restore", "--from-env", "--force"],
        ] {
            let mut command = backend.command(&home, arguments);
            command.env("AGENT_SESSION_ID", "s1").env(
                "AGENT_SESSION_BLOB",
                String::from_utf8(blob.clone()).unwrap(),
            );
            crate::support::backend::Ran(command.output().unwrap()).fails(
                6,
                &format!("{foreign} is not a file of session s1"),
                "",
            );
        }
        assert!(
            files_below(&home.home().join(".claude")).is_empty(),
            "{foreign}"
        );
    }
}
