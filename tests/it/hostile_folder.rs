//! The agent's directory is not trusted: the agent, or a program that a prompt made it run, can put
//! links, ledgers and files with any name into it. Nothing in it gives access to files outside, to
//! other sessions, or to the credentials of sessiond.

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use sessiond::log::ledger::Ledger;
use sessiond::log::writer::{LogWriter, WriteTarget};
use sessiond::model::LogId;
use sessiond::sys::{Directory, Disk};

use crate::agents::{contains_text, objects};
use crate::support::backend::{Backend, eventually, transcript};
use crate::support::files::{append, files_below, write};
use crate::support::{TempHome, sessiond, skip};

const SECRET: &str = "secret-of-the-machine";
const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/work/app\",\"text\":\"hello\"}\n";

/// The user and group of the agent, when the tests run as root.
const AGENT: u32 = 12_345;

fn root(home: &TempHome) -> PathBuf {
    home.home().join(".claude")
}

/// A file outside the agent's directory.
fn victim(home: &TempHome) -> PathBuf {
    let path = home.path().join("outside/victim");
    write(&path, SECRET);
    path
}

#[track_caller]
fn assert_untouched(victim: &Path) {
    assert_eq!(std::fs::read_to_string(victim).unwrap(), SECRET);
    let found = std::fs::metadata(victim).unwrap();
    assert_eq!(found.uid(), rustix::process::geteuid().as_raw());
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skip("only root can give files to another user");
    }
    is_root
}

#[test]
fn a_directory_that_became_a_link_is_not_stored() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let victim = victim(&home);
    append(&transcript(&home, "s1"), LINE);
    let tasks = root(&home).join("tasks/s1");
    write(&tasks.join("victim"), "{}");
    backend.run(&home, &["run", "--", "true"]).ok();
    // The path is known now.
    std::fs::remove_dir_all(&tasks).unwrap();
    symlink(victim.parent().unwrap(), &tasks).unwrap();
    append(&transcript(&home, "s1"), LINE);
    backend.run(&home, &["run", "--", "true"]).ok();
    let stored = objects(&backend.path().join("bucket"));
    assert!(stored.iter().all(|object| !contains_text(object, SECRET)));
    let doctor = backend.run(&home, &["doctor"]);
    let expected = "not stored: tasks/s1 is a symbolic link";
    assert!(doctor.out().contains(expected), "{}", doctor.out());
}

#[test]
fn a_link_in_the_state_directory_is_not_followed() {
    for name in ["lock", "ledger", "tmp", "aside", "socket"] {
        let (backend, home) = (Backend::file(), TempHome::new());
        let victim = victim(&home);
        append(&transcript(&home, "s1"), LINE);
        let state = root(&home).join(".sessiond");
        std::fs::create_dir_all(&state).unwrap();
        let target = match name {
            "lock" | "socket" => victim.clone(),
            _ => victim.parent().unwrap().to_owned(),
        };
        symlink(target, state.join(name)).unwrap();
        let ran = backend.run(&home, &["run", "--", "true"]);
        if name == "lock" {
            assert_ne!(ran.code(), 0);
            assert!(ran.err().contains("is not a regular file"), "{}", ran.err());
        }
        assert_untouched(&victim);
        let outside = files_below(victim.parent().unwrap());
        assert_eq!(outside.len(), 1, "{name}: {:?}", outside.keys());
    }
}

#[test]
fn a_link_in_the_place_of_opencodes_files_is_not_followed() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let victim = victim(&home);
    let data = home.home().join(".local/share/opencode");
    std::fs::create_dir_all(data.join(".sessiond-mirror")).unwrap();
    symlink(home.path().join("outside/new.db"), data.join("opencode.db")).unwrap();
    let outside = victim.parent().unwrap();
    symlink(outside, data.join(".sessiond-mirror/sessions")).unwrap();
    let row = "{\"schema\":[],\"migrations\":{}}\n";
    write(&outside.join("ses_1.jsonl"), row);
    let arguments = ["run", "--agent", "opencode", "--", "true"];
    backend.run(&home, &arguments);
    assert!(!outside.join("new.db").exists());
    assert_eq!(
        std::fs::read_to_string(outside.join("ses_1.jsonl")).unwrap(),
        row
    );
    assert_untouched(&victim);
    let stored = objects(&backend.path().join("bucket"));
    assert!(
        stored
            .iter()
            .all(|object| !contains_text(object, "migrations"))
    );
    // The whole mirror may be a link, too.
    std::fs::remove_dir_all(data.join(".sessiond-mirror")).unwrap();
    symlink(outside, data.join(".sessiond-mirror")).unwrap();
    assert_ne!(backend.run(&home, &arguments).code(), 0);
    assert!(!outside.join(".sessiond").exists());
}

#[test]
fn with_an_owner_everything_belongs_to_it_from_the_start() {
    if !is_root() {
        return;
    }
    let (backend, home) = (Backend::file(), TempHome::new());
    append(&transcript(&home, "s1"), LINE);
    backend.run(&home, &["run", "--", "true"]).ok();
    let other = TempHome::new();
    let owner = format!("{AGENT}:{AGENT}");
    let start = ["run", "--session", "s1", "--owner", &owner, "--"];
    let check = format!(
        "find {} ! -uid {AGENT} | grep . && exit 3; exit 0",
        root(&other).display()
    );
    backend
        .run(&other, &[&start[..], &["sh", "-c", &check]].concat())
        .ok();
    for (path, _) in files_below(&root(&other)) {
        let found = std::fs::symlink_metadata(root(&other).join(&path)).unwrap();
        assert_eq!((found.uid(), found.gid()), (AGENT, AGENT), "{path}");
    }
}

#[test]
fn with_an_owner_sessiond_has_only_its_rights() {
    if !is_root() {
        return;
    }
    let (backend, home) = (Backend::file(), TempHome::new());
    let victim = victim(&home);
    std::fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o600)).unwrap();
    append(&transcript(&home, "s1"), LINE);
    std::fs::create_dir_all(root(&home).join("tasks/s1")).unwrap();
    for item in [".", "projects", "projects/-work-app", "tasks", "tasks/s1"] {
        chown(root(&home).join(item), Some(AGENT), Some(AGENT)).unwrap();
    }
    chown(transcript(&home, "s1"), Some(AGENT), Some(AGENT)).unwrap();
    // A file of root with a name in the agent's directory.
    std::fs::hard_link(&victim, root(&home).join("tasks/s1/1.json")).unwrap();
    let owner = format!("{AGENT}:{AGENT}");
    let ran = backend.run(&home, &["run", "--owner", &owner, "--", "true"]);
    assert!(ran.err().contains("Permission denied"), "{}", ran.err());
    let stored = objects(&backend.path().join("bucket"));
    assert!(stored.iter().any(|object| contains_text(object, "hello")));
    assert!(stored.iter().all(|object| !contains_text(object, SECRET)));
    assert_untouched(&victim);
}

#[test]
fn with_an_owner_a_directory_of_somebody_else_is_rejected() {
    if !is_root() {
        return;
    }
    let (backend, home) = (Backend::file(), TempHome::new());
    let victim = home.path().join("victim");
    write(&victim.join("projects/-v/s1.jsonl"), SECRET);
    chown(home.home(), Some(AGENT), Some(AGENT)).unwrap();
    symlink(&victim, root(&home)).unwrap();
    let owner = format!("{AGENT}:{AGENT}");
    for arguments in [
        &["run", "--owner", &owner, "--", "true"][..],
        &["daemon", "--owner", &owner],
        &["restore", "s1", "--owner", &owner],
    ] {
        backend
            .run(&home, arguments)
            .fails(2, "belongs to user 0", "chown");
    }
    assert!(!victim.join(".sessiond").exists());
    let stored = objects(&backend.path().join("bucket"));
    assert!(stored.iter().all(|object| !contains_text(object, SECRET)));
    // The user replaces the directory later.
    let moved = home.path().join("moved");
    std::fs::create_dir(&moved).unwrap();
    let disk = Disk::new(&moved).on_behalf_of(
        Some(sessiond::sys::Owner {
            uid: AGENT,
            gid: AGENT,
        }),
        true,
    );
    assert_eq!(
        disk.list(None).unwrap_err().kind(),
        std::io::ErrorKind::PermissionDenied
    );
}

#[test]
fn a_directory_that_cannot_be_listed_is_not_reported_as_durable() {
    if !is_root() {
        return;
    }
    let (backend, home) = (Backend::file(), TempHome::new());
    append(&transcript(&home, "s1"), LINE);
    append(
        &transcript(&home, "s2").with_file_name("other/s2.jsonl"),
        LINE,
    );
    let owner = format!("{AGENT}:{AGENT}");
    for item in [
        "",
        "projects",
        "projects/-work-app",
        "projects/-work-app/s1.jsonl",
    ] {
        chown(root(&home).join(item), Some(AGENT), Some(AGENT)).unwrap();
    }
    let daemon = backend.daemon(&home, &["--owner", &owner]);
    backend.run(&home, &["flush", "--wait"]).ok();
    let hidden = root(&home).join("projects/-hidden");
    write(&hidden.join("s3.jsonl"), LINE);
    std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o700)).unwrap();
    let flushed = backend.run(&home, &["flush", "--wait"]);
    flushed.fails(5, "cannot list projects/-hidden", "access to the directory");
    // A session in another directory is durable.
    backend
        .run(&home, &["flush", "--wait", "--session", "s1"])
        .ok();
    assert_eq!(daemon.stop().0, Some(9));
}

/// A ledger of the session that says what the agent wants it to say.
fn forge(backend: &Backend, home: &TempHome, session: &str, seq: u64, target: WriteTarget) {
    let id = LogId {
        namespace: "default".parse().unwrap(),
        agent: "claude-code".parse().unwrap(),
        name: session.parse().unwrap(),
    };
    let now = "2026-05-01T12:00:00Z".parse().unwrap();
    let log_writer = LogWriter {
        target,
        ..LogWriter::unclaimed("forged".parse().unwrap(), seq, None, now)
    };
    let store = backend.env("SESSIOND_STORE").unwrap().to_owned();
    let ledger = Ledger::new(store, id, log_writer);
    ledger.save(&Disk::new(root(home)), true).unwrap();
}

#[test]
fn a_forged_ledger_cannot_blank_another_session() {
    for target in [WriteTarget::Main, WriteTarget::Unclaimed] {
        let (backend, home) = (Backend::file(), TempHome::new());
        append(&transcript(&home, "s1"), LINE.repeat(20));
        backend.run(&home, &["run", "--", "true"]).ok();
        let log = backend.path().join("bucket/v1/default/claude-code/s1/log");
        let head = files_below(&log).len() as u64;
        let attacker = TempHome::new();
        append(&transcript(&attacker, "s1"), "{}\n");
        forge(&backend, &attacker, "s1", head, target);
        backend.run(&attacker, &["run", "--", "true"]);
        let copy = home.path().join("copy");
        let to = copy.display().to_string();
        backend.run(&home, &["pull", "s1", "--to", &to]).ok();
        let pulled = copy.join("projects/-work-app/s1.jsonl");
        assert_eq!(
            std::fs::read_to_string(pulled).unwrap(),
            LINE.repeat(20),
            "{target:?}"
        );
        backend.run(&home, &["verify", "s1", "--deep"]).ok();
    }
}

#[test]
fn a_limited_daemon_continues_only_its_sessions() {
    let (backend, home) = (Backend::file(), TempHome::new());
    for session in ["s1", "s2", "s3"] {
        append(&transcript(&home, session), LINE);
    }
    backend.run(&home, &["run", "--", "true"]).ok();
    let log_of = |session: &str| {
        let log = format!("bucket/v1/default/claude-code/{session}");
        files_below(&backend.path().join(log)).len()
    };
    let before = log_of("s2");
    assert_ne!(before, 0);
    // A new machine: the agent writes files with the IDs of two other sessions.
    let attacker = TempHome::new();
    append(&transcript(&attacker, "s2"), LINE.repeat(2));
    append(&transcript(&attacker, "s3"), "{}\n");
    forge(&backend, &attacker, "s3", 0, WriteTarget::Branch);
    append(&transcript(&attacker, "new"), LINE);
    let script = format!("echo '{{}}' >> {}", transcript(&attacker, "s1").display());
    let ran = backend.run(
        &attacker,
        &[
            "run",
            "--session",
            "s1",
            "--only",
            "restored",
            "--",
            "sh",
            "-c",
            &script,
        ],
    );
    assert!(
        ran.err().contains("not one of the sessions in --only"),
        "{}",
        ran.err()
    );
    assert_eq!((log_of("s2"), log_of("s3")), (before, before));
    assert_ne!(log_of("new"), 0);
    let shown = backend.run(&home, &["verify", "s1", "--deep"]).ok();
    assert!(log_of("s1") > before, "{}", shown.out());
    // The next process continues the session that this one created.
    append(&transcript(&attacker, "new"), LINE);
    let stored = log_of("new");
    backend.run(&attacker, &["run", "--only", "s1", "--", "true"]);
    assert!(log_of("new") > stored);
}

#[test]
fn the_command_gets_no_credentials() {
    let (mut backend, home) = (Backend::file(), TempHome::new());
    backend.set("AWS_SECRET_ACCESS_KEY", "of-the-agent");
    let index = backend.index_url().to_owned();
    let ran = backend.run(&home, &["run", "--", "env"]).ok();
    assert!(!ran.out().contains("SESSIOND_STORE="), "{}", ran.out());
    assert!(!ran.out().contains(&index), "{}", ran.out());
    assert!(ran.out().contains("SESSIOND_SESSION_ID="), "{}", ran.out());
    // The store is not in S3, so these credentials are not those of sessiond.
    assert!(ran.out().contains("AWS_SECRET_ACCESS_KEY=of-the-agent"));
    let pass = ["run", "--pass-env", "SESSIOND_STORE", "--", "env"];
    let ran = backend.run(&home, &pass).ok();
    assert!(ran.out().contains("SESSIOND_STORE="), "{}", ran.out());
    assert!(!ran.out().contains(&index), "{}", ran.out());
}

#[test]
fn other_processes_of_the_user_cannot_read_the_memory() {
    if !is_root() {
        return;
    }
    let (backend, home) = (Backend::file(), TempHome::new());
    for path in [home.path().to_owned(), backend.path().to_owned()] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o711)).unwrap();
    }
    for path in [
        home.home(),
        home.path().join("tmp"),
        backend.path().to_owned(),
    ] {
        chown(path, Some(AGENT), Some(AGENT)).unwrap();
    }
    let readable = std::process::Command::new("test")
        .arg("-x")
        .arg(sessiond())
        .uid(AGENT)
        .status();
    if !readable.is_ok_and(|status| status.success()) {
        return skip("another user cannot execute the program here");
    }
    let script = "cat /proc/$PPID/environ /proc/$PPID/maps; ls -l /proc/$PPID/fd";
    let mut command = backend.command(&home, &["run", "--", "sh", "-c", script]);
    let output = command.uid(AGENT).gid(AGENT).output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(!contains_text(&output.stdout, "SESSIOND_STORE"), "{out}");
    assert_eq!(err.matches("Permission denied").count(), 3, "{err}");
}

#[test]
fn secret_keys_that_others_can_read_are_refused() {
    let (backend, home) = (Backend::file(), TempHome::new());
    for (option, keygen) in [
        ("--identity", &["keygen", "-o"][..]),
        ("--signing-key", &["keygen", "--signing", "-o"]),
    ] {
        let key = home.path().join(option);
        let path = key.display().to_string();
        backend.run(&home, &[keygen, &[&path]].concat()).ok();
        let list = ["ls", option, &path];
        backend.run(&home, &list).ok();
        for mode in [0o604, 0o602, 0o644] {
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
            backend.run(&home, &list).fails(
                2,
                &format!("invalid {option} value {path:?}: other users can read or change"),
                &format!("chmod 600 {path}"),
            );
        }
        // A group may share a key, as Kubernetes does with a secret.
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o440)).unwrap();
        backend.run(&home, &list).ok();
    }
}

#[test]
fn a_configuration_with_a_password_that_others_can_read_is_reported() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let config = home.path().join("config.toml");
    write(&config, "heartbeat-url = \"http://127.0.0.1:9/token\"\n");
    let path = config.display().to_string();
    let list = ["ls", "--config", &path];
    for (mode, is_reported) in [(0o644, true), (0o600, false)] {
        std::fs::set_permissions(&config, std::fs::Permissions::from_mode(mode)).unwrap();
        let ran = backend.run(&home, &list).ok();
        assert_eq!(
            ran.err().contains("other users can read"),
            is_reported,
            "{}",
            ran.err()
        );
    }
}

#[test]
fn idle_clients_do_not_block_the_control_socket() {
    let (backend, home) = (Backend::file(), TempHome::new());
    append(&transcript(&home, "s1"), LINE);
    let daemon = backend.daemon(&home, &[]);
    let socket = root(&home).join(".sessiond/socket");
    let mode = std::fs::metadata(&socket).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
    let idle: Vec<UnixStream> = (0..200)
        .map(|_| UnixStream::connect(&socket).unwrap())
        .collect();
    eventually("the daemon answers", || {
        backend.run(&home, &["status"]).code() == 0
    });
    drop(idle);
    assert_eq!(daemon.stop().0, Some(0));
}
