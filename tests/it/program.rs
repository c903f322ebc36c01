//! The program as a new user meets it: stream, restore, pull, flush, status, and `run` with an
//! agent.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::backend::{Backend, Running, Signal, eventually, transcript};
use crate::support::files::append;
use crate::support::needs_servers;
use crate::support::on_each_backend;
use crate::support::proxy::{Mode, TcpProxy};
use crate::support::servers::{postgres, s3};
use crate::support::{TempHome, sessiond, skip};

const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/work/app\",\"version\":\"2.1\",\"message\":{\"content\":\"hi\"}}\n";

fn script(home: &TempHome, text: &str) -> String {
    let path = home.path().join("agent.sh");
    std::fs::write(&path, text).unwrap();
    path.to_string_lossy().into_owned()
}

fn text(path: &std::path::Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

on_each_backend!(stream_kill_restore_in_a_new_home_is_byte_equal);
fn stream_kill_restore_in_a_new_home_is_byte_equal(backend: Backend) {
    let home = TempHome::new();
    let mut daemon = backend.daemon(&home, &[]);
    let root = home.home().join(".claude");
    append(&transcript(&home, "s1"), LINE.repeat(50));
    append(
        &root.join("projects/-work-app/s1/subagents/agent-1.jsonl"),
        LINE,
    );
    append(
        &root.join("projects/-work-app/s1/tool-results/big.txt"),
        "output ".repeat(9000),
    );
    append(
        &root.join("projects/-work-app/agent-0ld.jsonl"),
        "{\"sessionId\":\"s1\",\"isSidechain\":true}\n",
    );
    append(&root.join("tasks/s1/1.json"), "{\"id\":\"1\"}");
    append(&root.join("file-history/s1/abc@v1"), "old text, no newline");
    append(
        &root.join("projects/-work-app/memory/MEMORY.md"),
        "remember",
    );
    append(&root.join(".credentials.json"), "{\"secret\":1}");
    let said = backend.run(&home, &["flush", "--wait"]).ok().out();
    assert!(said.contains("s1: ") && said.contains("durable"), "{said}");
    daemon.kill();

    let other = TempHome::new();
    let said = backend.run(&other, &["restore", "s1"]).ok().out();
    assert!(said.contains("resume with session ID s1"), "{said}");
    let there = other.home().join(".claude");
    for path in [
        "projects/-work-app/s1.jsonl",
        "projects/-work-app/s1/subagents/agent-1.jsonl",
        "projects/-work-app/s1/tool-results/big.txt",
        "projects/-work-app/agent-0ld.jsonl",
        "tasks/s1/1.json",
        "file-history/s1/abc@v1",
        "projects/-work-app/memory/MEMORY.md",
    ] {
        assert_eq!(
            text(&there.join(path)),
            text(&root.join(path)),
            "{path} on {}",
            backend.name
        );
        let time = |root: &std::path::Path| {
            std::fs::metadata(root.join(path))
                .unwrap()
                .modified()
                .unwrap()
        };
        assert_eq!(time(&there), time(&root), "{path}: time");
    }
    assert!(!there.join(".credentials.json").exists());

    // The next append continues the log; nothing that was restored is uploaded again.
    let entry: u64 = said
        .split("at entry ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next()?.parse().ok())
        .unwrap();
    let mut daemon = backend.daemon(&other, &[]);
    let row = || backend.run(&other, &["ls", "--json"]).ok().json()["sessions"][0].clone();
    eventually("the index knows what was restored", || {
        row()["head"].as_u64() == Some(entry + 1)
    });
    let before = row();
    append(&transcript(&other, "s1"), LINE);
    backend.run(&other, &["flush", "--wait"]).ok();
    eventually("the index knows the append", || {
        row()["raw_bytes"].as_u64()
            == Some(before["raw_bytes"].as_u64().unwrap() + LINE.len() as u64)
    });
    assert_eq!(
        row()["head"].as_u64(),
        Some(before["head"].as_u64().unwrap() + 1)
    );
    assert_eq!(row()["cwd"], "/work/app");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.code(), Some(0));
}

on_each_backend!(run_restores_streams_launches_and_flushes_what_the_agent_writes_last);
fn run_restores_streams_launches_and_flushes_what_the_agent_writes_last(backend: Backend) {
    let home = TempHome::new();
    // Writes again after SIGTERM, as the real agent does.
    let agent = script(
        &home,
        "d=$HOME/.claude/projects/-work-app; mkdir -p $d; test -f $d/s1.jsonl && wc -l < $d/s1.jsonl > $HOME/restored\n\
             trap 'sleep 0.2; echo \"{\\\"last\\\":1}\" >> $d/s1.jsonl; printf torn >> $d/s1.jsonl; exit 143' TERM\n\
             echo '{\"first\":1}' >> $d/s1.jsonl; touch $HOME/up; while :; do sleep 0.05; done\n",
    );
    let mut run = Running(
        backend
            .command(&home, &["run", "--session", "s1", "--", "sh", &agent])
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    eventually("the agent is up", || home.home().join("up").exists());
    run.signal(Signal::TERM);
    assert_eq!(run.code(), Some(143));

    let other = TempHome::new();
    let ran = backend.run(
        &other,
        &[
            "run",
            "--session",
            "s1",
            "--",
            "sh",
            "-c",
            "wc -l < $HOME/.claude/projects/-work-app/s1.jsonl; exit 5",
        ],
    );
    assert_eq!((ran.code(), ran.out().trim()), (5, "2"), "{}", ran.err());
    assert_eq!(
        text(&transcript(&other, "s1")),
        "{\"first\":1}\n{\"last\":1}\n"
    );
    // The partial line is not lost: a copy has it.
    backend
        .run(&other, &["pull", "s1", "--to", "copy", "--at", "seq:3"])
        .ok();
    assert!(text(&other.home().join("copy/projects/-work-app/s1.jsonl")).ends_with("torn"));
}

#[test]
fn run_forwards_exit_codes_and_signals() {
    let backend = Backend::file();
    let home = TempHome::new();
    let run = |arguments: &[&str]| backend.run(&home, &[&["run", "--"], arguments].concat());
    assert_eq!(run(&["true"]).code(), 0);
    assert_eq!(run(&["sh", "-c", "exit 42"]).code(), 42);
    assert_eq!(run(&["sh", "-c", "kill -9 $$"]).code(), 137);
    assert_eq!(
        run(&["no-such-command-anywhere"])
            .fails(127, "no-such-command-anywhere", "")
            .code(),
        127
    );
    assert_eq!(run(&["/dev/null"]).fails(126, "/dev/null", "").code(), 126);
    for (name, signal) in [
        ("INT", Signal::INT),
        ("HUP", Signal::HUP),
        ("QUIT", Signal::QUIT),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
        ("WINCH", Signal::WINCH),
    ] {
        let _ = std::fs::remove_file(home.home().join("up"));
        let agent = script(
            &home,
            &format!("trap 'exit 9' {name}; touch $HOME/up; while :; do sleep 0.02; done"),
        );
        let mut run = Running(
            backend
                .command(&home, &["run", "--", "sh", &agent])
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        );
        eventually("the agent is up", || home.home().join("up").exists());
        run.signal(signal);
        assert_eq!(run.code(), Some(9), "{name}");
    }
}

#[test]
fn run_as_process_1_reaps_orphans() {
    let can = Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "true"])
        .status();
    if !can.is_ok_and(|status| status.success()) {
        return skip("unshare --pid does not work here");
    }
    let backend = Backend::file();
    let home = TempHome::new();
    let inner = backend.command(&home, &[]);
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--fork", "--mount-proc"])
        .arg(sessiond())
        .args(["run", "--", "sh", "-c"]);
    // An orphan that dies while we are process 1 must not stay a zombie.
    command.arg("(setsid sleep 0.1 &); sleep 0.6; cat /proc/[0-9]*/stat | cut -d' ' -f3 | grep -c Z; exit 6");
    command
        .env_clear()
        .envs(
            inner
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        )
        .current_dir(home.path());
    let output = command.output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(6),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "0");
}

#[test]
fn a_terminal_interrupt_reaches_the_agent_once() {
    let backend = Backend::file();
    let home = TempHome::new();
    let agent = script(
        &home,
        "n=0; trap 'n=$((n+1))' INT; test -t 0 && touch $HOME/tty; touch $HOME/up\nfor i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; done; echo $n > $HOME/ints\n",
    );
    let inner = backend.command(&home, &[]);
    let mut command = Command::new("script");
    command.args([
        "-qec",
        &format!("{} run -- sh {agent}", sessiond().display()),
        "/dev/null",
    ]);
    command
        .env_clear()
        .envs(
            inner
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        )
        .current_dir(home.path());
    let mut terminal = Running(
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    eventually("the agent is up", || home.home().join("up").exists());
    assert!(
        home.home().join("tty").exists(),
        "the agent has no terminal"
    );
    use std::io::Write;
    let mut keys = terminal.0.stdin.take().unwrap();
    keys.write_all(b"\x03").unwrap();
    keys.flush().unwrap();
    eventually("the agent has counted", || {
        std::fs::read_to_string(home.home().join("ints")).is_ok_and(|text| text.ends_with('\n'))
    });
    assert_eq!(text(&home.home().join("ints")).trim(), "1");
    drop(keys);
}

#[test]
fn a_failed_restore_blocks_the_agent_by_default() {
    let backend = Backend::file();
    let home = TempHome::new();
    append(&transcript(&home, "s1"), LINE);
    backend.run(&home, &["run", "--", "true"]).ok();
    let entry = backend
        .path()
        .join("bucket/v1/default/claude-code/s1/log/000000000002.gz");
    std::fs::write(&entry, b"not gzip").unwrap();
    let other = TempHome::new();
    let run = |arguments: &[&str]| {
        backend.run(
            &other,
            &[
                &["run", "--session", "s1"],
                arguments,
                &["--", "touch", "launched"],
            ]
            .concat(),
        )
    };
    run(&[]).fails(8, "not a gzip stream", "");
    assert!(!other.home().join("launched").exists());
    assert!(
        !other.home().join(".claude/projects").exists(),
        "something was half-written"
    );
    run(&["--on-restore-error", "continue"]).ok();
    assert!(other.home().join("launched").exists());
    // A missing session is no error, unless it must exist.
    backend
        .run(&other, &["run", "--session", "unknown", "--", "true"])
        .ok();
    backend
        .run(
            &other,
            &["run", "--session", "unknown", "--must-exist", "--", "true"],
        )
        .fails(8, "unknown", "");
}

#[test]
fn the_daemon_waits_for_a_process_and_flushes_after_it() {
    let backend = Backend::file();
    let home = TempHome::new();
    let mut agent = Running(Command::new("sleep").arg("1000").spawn().unwrap());
    let mut daemon = backend.daemon(
        &home,
        &[
            "--wait-pid",
            &agent.0.id().to_string(),
            "--flush-interval",
            "1h",
        ],
    );
    append(&transcript(&home, "s1"), LINE);
    daemon.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(300));
    assert!(daemon.0.try_wait().unwrap().is_none(), "it did not wait");
    append(
        &transcript(&home, "s1"),
        "{\"written\":\"after the signal\"}\n",
    );
    agent.kill();
    assert_eq!(daemon.code(), Some(0));
    backend.run(&TempHome::new(), &["verify", "s1"]).ok();
    let copy = TempHome::new();
    backend.run(&copy, &["pull", "s1", "--to", "copy"]).ok();
    assert_eq!(
        text(&copy.home().join("copy/projects/-work-app/s1.jsonl")),
        text(&transcript(&home, "s1"))
    );
}

#[test]
fn the_daemon_notifies_systemd_and_status_shows_lag() {
    let backend = Backend::file();
    let home = TempHome::new();
    let socket = home.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&socket).unwrap();
    manager
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let mut command = backend.command(
        &home,
        &["daemon", "--flush-interval", "1h", "--log-format", "json"],
    );
    let mut daemon = Running(
        command
            .env("NOTIFY_SOCKET", &socket)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut said = [0; 64];
    let got = manager.recv(&mut said).unwrap();
    assert_eq!(&said[..got], b"READY=1\n");
    let status = || backend.run(&home, &["status", "--json"]).ok().json();
    assert_eq!(status()["ready"], true);
    append(&transcript(&home, "s1"), LINE);
    // The first change after a quiet time is uploaded immediately, the next waits for the interval.
    eventually("the first is durable", || {
        status()["sessions"][0]["durable_bytes"] == LINE.len()
    });
    append(&transcript(&home, "s1"), LINE);
    eventually("lag is seen", || {
        status()["sessions"][0]["lag_bytes"] == LINE.len()
    });
    assert!(backend.run(&home, &["status"]).ok().out().contains(" for "));
    backend
        .run(&home, &["flush", "--wait", "--session", "s"])
        .ok();
    assert_eq!(status()["sessions"][0]["lag_bytes"], 0);
    // A second sessiond on the same directory is rejected.
    backend
        .run(&home, &["daemon"])
        .fails(7, "another sessiond", "status");
    backend
        .run(&home, &["restore", "s1"])
        .fails(7, "another sessiond", "status");
    let modes: Vec<u32> = ["", "socket"]
        .iter()
        .map(|name| mode(&home.home().join(".claude/.sessiond").join(name)))
        .collect();
    assert_eq!(modes, [0o700, 0o600]);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.code(), Some(0));
    let mut log = String::new();
    std::io::Read::read_to_string(&mut daemon.0.stderr.take().unwrap(), &mut log).unwrap();
    for line in log.lines() {
        assert!(
            serde_json::from_str::<serde_json::Value>(line).is_ok(),
            "not JSON: {line}"
        );
    }
    assert!(!log.contains("hi\""), "a transcript's text is in the log");
}

fn mode(path: &std::path::Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn flush_waits_only_for_bytes_already_on_disk() {
    let backend = Backend::file();
    let home = TempHome::new();
    let _daemon = backend.daemon(&home, &[]);
    append(&transcript(&home, "s1"), LINE);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                append(&transcript(&home, "s1"), LINE);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let began = Instant::now();
        for _ in 0..5 {
            backend.run(&home, &["flush", "--wait"]).ok();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "an agent that keeps writing holds flush up"
        );
    });
}

on_each_backend!(restore_finds_by_prefix_by_latest_by_project_and_all);
fn restore_finds_by_prefix_by_latest_by_project_and_all(backend: Backend) {
    let home = TempHome::new();
    append(&transcript(&home, "aaa-1"), LINE);
    append(&transcript(&home, "aaa-2"), LINE);
    backend.run(&home, &["run", "--", "true"]).ok();
    append(
        &home.home().join(".claude/projects/-elsewhere/bbb.jsonl"),
        LINE,
    );
    backend.run(&home, &["run", "--", "true"]).ok();
    let into = |arguments: &[&str]| {
        let other = TempHome::new();
        let ran = backend.run(&other, &[&["restore", "--json"], arguments].concat());
        (ran, other)
    };
    into(&["aaa"]).0.fails(2, "aaa-1, aaa-2", "more characters");
    into(&["zzz"]).0.fails(3, "zzz", "sessiond ls");
    let (ran, _) = into(&["zzz", "--if-exists"]);
    assert_eq!(ran.ok().json(), serde_json::json!([]));
    assert_eq!(into(&["bb"]).0.ok().json()[0]["session"], "bbb");
    assert_eq!(into(&["--latest"]).0.ok().json()[0]["session"], "bbb");
    let latest = into(&["--latest", "--project", "/work/app"]).0.ok().json();
    assert!(
        latest[0]["session"].as_str().unwrap().starts_with("aaa-"),
        "{latest}"
    );
    let (ran, other) = into(&["--all"]);
    assert_eq!(ran.ok().json().as_array().unwrap().len(), 3);
    assert!(transcript(&other, "aaa-2").exists());
    let ls = backend
        .run(&other, &["ls", "--json", "--project", "/work/app"])
        .ok()
        .json();
    assert_eq!(ls["sessions"].as_array().unwrap().len(), 2);
    let page = backend
        .run(&other, &["ls", "--json", "--limit", "2"])
        .ok()
        .json();
    let next = page["next"].as_str().unwrap();
    let rest = backend
        .run(&other, &["ls", "--json", "--limit", "2", "--cursor", next])
        .ok()
        .json();
    assert_eq!(rest["sessions"].as_array().unwrap().len(), 1);
}

on_each_backend!(a_restore_does_not_change_which_session_is_the_latest);
fn a_restore_does_not_change_which_session_is_the_latest(mut backend: Backend) {
    let home = TempHome::new();
    for session in ["older", "newer"] {
        append(&transcript(&home, session), LINE);
        backend
            .run(&home, &["run", "--request", "job", "--", "true"])
            .ok();
    }
    let times = |backend: &Backend| {
        let page = backend.run(&home, &["ls", "--json"]).ok().json();
        let rows = page["sessions"].as_array().unwrap().clone();
        let time = |row: &serde_json::Value| (row["id"].clone(), row["updated"].clone());
        rows.iter().map(time).collect::<Vec<_>>()
    };
    let before = times(&backend);
    assert_eq!(before[0].0, "newer");
    // A restore claims the session, and a daemon with nothing to upload claims it again.
    let other = TempHome::new();
    backend.run(&other, &["restore", "older"]).ok();
    let third = TempHome::new();
    backend
        .run(&third, &["run", "--session", "older", "--", "true"])
        .ok();
    assert_eq!(times(&backend), before, "{}", backend.name);
    let latest = |backend: &Backend| {
        for arguments in [&["--latest"][..], &["--request", "job"]] {
            let restored = backend.run(
                &TempHome::new(),
                &[&["restore", "--json", "--dry-run"], arguments].concat(),
            );
            assert_eq!(restored.ok().json()[0]["session"], "newer", "{arguments:?}");
        }
    };
    latest(&backend);
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(times(&backend), before, "{}", backend.name);
    // The store alone gives the same answer.
    backend.set("SESSIOND_INDEX", "postgres://nobody@127.0.0.1:1/none");
    latest(&backend);
}

#[test]
fn a_restore_on_its_own_volume_reports_what_the_log_holds() {
    let (backend, home) = (Backend::file(), TempHome::new());
    append(&transcript(&home, "s1"), LINE);
    backend.run(&home, &["run", "--", "true"]).ok();
    // The agent wrote another line, and no sessiond was running.
    append(&transcript(&home, "s1"), LINE);
    let stored = LINE.len() as u64;
    let report = backend.run(&home, &["restore", "s1", "--json"]).ok().json()[0].clone();
    assert_eq!(
        (&report["log_bytes"], &report["lag_bytes"], &report["bytes"]),
        (&stored.into(), &stored.into(), &0.into()),
        "{report}"
    );
    let file = &report["files"][0];
    assert_eq!(
        (&file["action"], &file["log_bytes"], &file["bytes"]),
        (&"keep".into(), &stored.into(), &(2 * stored).into()),
        "{report}"
    );
    let said = backend.run(&home, &["restore", "s1"]).ok().out();
    let expected = format!(
        " to {}: 0 files written (0 B), 1 unchanged ({} B)\n  the log holds 1 file ({stored} B); {stored} B of local files are not in the log yet\n",
        home.home().join(".claude").display(),
        2 * stored
    );
    assert!(said.contains(&expected), "{said}");
    // The same without a ledger, where the files are compared with the log.
    std::fs::remove_dir_all(home.home().join(".claude/.sessiond")).unwrap();
    let said = backend.run(&home, &["restore", "s1"]).ok().out();
    assert!(said.contains(&expected), "{said}");
    // A partial line that only the disk has is not in the log.
    let mut daemon = backend.daemon(&home, &[]);
    append(&transcript(&home, "s1"), "{\"half");
    backend.run(&home, &["flush", "--wait"]).ok();
    daemon.kill();
    let said = backend.run(&home, &["restore", "s1"]).ok().out();
    assert!(
        !said.contains("partial line")
            && said.contains("; 6 B of local files are not in the log yet"),
        "{said}"
    );
    append(&transcript(&home, "s1"), "\"}\n");
    // Once everything is uploaded, only the total is left to say.
    backend.run(&home, &["run", "--", "true"]).ok();
    let said = backend.run(&home, &["restore", "s1"]).ok().out();
    assert!(
        said.contains(&format!(
            "\n  the log holds 1 file ({} B)\n",
            2 * stored + 9
        )),
        "{said}"
    );
}

#[test]
fn a_local_file_that_differs_is_never_overwritten() {
    let backend = Backend::file();
    let home = TempHome::new();
    append(&transcript(&home, "s1"), LINE.repeat(3));
    backend.run(&home, &["run", "--", "true"]).ok();
    let other = TempHome::new();
    append(&transcript(&other, "s1"), "{\"mine\":1}\n");
    backend
        .run(&other, &["restore", "s1"])
        .fails(7, "projects/-work-app/s1.jsonl", "--force");
    assert_eq!(text(&transcript(&other, "s1")), "{\"mine\":1}\n");
    let plan = backend
        .run(&other, &["restore", "s1", "--dry-run", "--json"])
        .ok()
        .json();
    assert_eq!(plan[0]["files"][0]["action"], "conflict");
    backend.run(&other, &["restore", "s1", "--force"]).ok();
    assert_eq!(text(&transcript(&other, "s1")), LINE.repeat(3));
    let aside = std::fs::read_dir(other.home().join(".claude/.sessiond/aside"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    assert_eq!(
        text(&aside.join("projects/-work-app/s1.jsonl")),
        "{\"mine\":1}\n"
    );

    // A longer file is kept and uploaded; a shorter one is updated.
    let ahead = TempHome::new();
    append(&transcript(&ahead, "s1"), LINE.repeat(5));
    backend
        .run(&ahead, &["run", "--session", "s1", "--", "true"])
        .ok();
    let behind = TempHome::new();
    append(&transcript(&behind, "s1"), LINE);
    backend.run(&behind, &["restore", "s1"]).ok();
    assert_eq!(text(&transcript(&behind, "s1")), LINE.repeat(5));
}

#[test]
fn a_restart_continues_with_an_outdated_ledger() {
    let backend = Backend::file();
    let home = TempHome::new();
    let task = home.home().join(".claude/tasks/s1/1.json");
    append(&transcript(&home, "s1"), LINE);
    append(&task, "{\"status\":\"pending\"}");
    let mut daemon = backend.daemon(&home, &[]);
    backend.run(&home, &["flush", "--wait"]).ok();
    let ledger = home
        .home()
        .join(".claude/.sessiond/ledger/default/claude-code/s1.json");
    let before = std::fs::read(&ledger).unwrap();
    append(&transcript(&home, "s1"), LINE);
    std::fs::write(&task, "{\"status\":\"running\"}").unwrap();
    backend.run(&home, &["flush", "--wait"]).ok();
    daemon.kill();
    // As if the machine had crashed between the store's reply and the ledger write; then the agent
    // changed a file again.
    std::fs::write(&ledger, before).unwrap();
    std::fs::write(&task, "{\"status\":\"done\"}").unwrap();
    backend
        .run(&home, &["run", "--session", "s1", "--", "true"])
        .ok();
    assert_eq!(text(&task), "{\"status\":\"done\"}");
    let other = TempHome::new();
    backend.run(&other, &["restore", "s1"]).ok();
    assert_eq!(
        text(&other.home().join(".claude/tasks/s1/1.json")),
        "{\"status\":\"done\"}"
    );
    assert_eq!(text(&transcript(&other, "s1")), LINE.repeat(2));

    // The same without a ledger: the transcript exists, so the side files next to it are newer than
    // the log.
    std::fs::remove_dir_all(home.home().join(".claude/.sessiond")).unwrap();
    std::fs::write(&task, "{\"status\":\"again\"}").unwrap();
    backend
        .run(&home, &["run", "--session", "s1", "--", "true"])
        .ok();
    assert_eq!(text(&task), "{\"status\":\"again\"}");
}

#[test]
fn restored_files_belong_to_the_owner_of_the_root() {
    use std::os::unix::fs::MetadataExt;
    let backend = Backend::file();
    let home = TempHome::new();
    append(&transcript(&home, "s1"), LINE);
    backend.run(&home, &["run", "--", "true"]).ok();
    if std::fs::metadata(home.path()).unwrap().uid() != 0 {
        return skip("only root can give files away");
    }
    let other = TempHome::new();
    std::os::unix::fs::chown(other.home(), Some(4321), Some(4322)).unwrap();
    backend.run(&other, &["restore", "s1"]).ok();
    let root = other.home().join(".claude");
    for path in [
        "",
        "projects",
        "projects/-work-app",
        "projects/-work-app/s1.jsonl",
        ".sessiond",
        ".sessiond/ledger",
    ] {
        let found = std::fs::metadata(root.join(path)).unwrap();
        assert_eq!((found.uid(), found.gid()), (4321, 4322), "{path}");
    }
    let named = TempHome::new();
    backend
        .run(&named, &["restore", "s1", "--owner", "77:78"])
        .ok();
    assert_eq!(
        std::fs::metadata(transcript(&named, "s1")).unwrap().uid(),
        77
    );
}

on_each_backend!(pull_never_claims);
fn pull_never_claims(backend: Backend) {
    let home = TempHome::new();
    let mut daemon = backend.daemon(&home, &[]);
    append(&transcript(&home, "s1"), LINE);
    backend.run(&home, &["flush", "--wait"]).ok();
    let root = home.home().join(".claude").to_string_lossy().into_owned();
    backend
        .run(&home, &["pull", "s1", "--to", &root])
        .fails(2, "--to", "another directory");
    backend
        .run(
            &home,
            &["pull", "s1", "--to", &format!("{root}/projects/x")],
        )
        .fails(2, "--to", "another directory");
    backend.run(&home, &["pull", "s1"]).ok();
    assert_eq!(
        text(&home.home().join("s1/projects/-work-app/s1.jsonl")),
        LINE
    );
    assert!(!home.home().join("s1/.sessiond").exists());
    backend
        .run(&home, &["pull", "s1", "--raw", "--to", "raw"])
        .ok();
    assert!(home.home().join("raw/log/000000000002.gz").exists());
    // The writer is not affected.
    append(&transcript(&home, "s1"), LINE);
    backend.run(&home, &["flush", "--wait"]).ok();
    let row = backend.run(&home, &["ls", "--json"]).ok().json()["sessions"][0].clone();
    assert_eq!(row["branches"], serde_json::json!([]));
    daemon.signal(Signal::INT);
    assert_eq!(daemon.code(), Some(0));
}

on_each_backend!(two_daemons_on_one_session_never_interleave);
fn two_daemons_on_one_session_never_interleave(backend: Backend) {
    let first = TempHome::new();
    let _first = backend.daemon(&first, &[]);
    append(&transcript(&first, "s1"), LINE);
    backend.run(&first, &["flush", "--wait"]).ok();
    let second = TempHome::new();
    backend.run(&second, &["restore", "s1"]).ok();
    let _second = backend.daemon(&second, &[]);
    append(&transcript(&second, "s1"), "{\"by\":\"second\"}\n");
    backend.run(&second, &["flush", "--wait"]).ok();
    append(&transcript(&first, "s1"), "{\"by\":\"first\"}\n");
    // The bytes of the fenced writer are durable, and `flush` reports where.
    backend.run(&first, &["flush", "--wait"]).fails(
        4,
        "another writer owns",
        "sessiond adopt s1 --branch",
    );
    // It reports that again, also without new bytes.
    backend.run(&first, &["flush", "--wait"]).fails(
        4,
        "another writer owns",
        "sessiond adopt s1 --branch",
    );
    append(&transcript(&second, "s1"), "{\"by\":\"second\"}\n");
    backend.run(&second, &["flush", "--wait"]).ok();

    let copy = TempHome::new();
    backend.run(&copy, &["pull", "s1", "--to", "main"]).ok();
    assert_eq!(
        text(&copy.home().join("main/projects/-work-app/s1.jsonl")),
        text(&transcript(&second, "s1"))
    );
    let branches =
        || backend.run(&copy, &["ls", "--json"]).ok().json()["sessions"][0]["branches"].clone();
    eventually("ls shows the branch", || {
        branches().as_array().unwrap().len() == 1
    });
    let branch = branches()[0].as_str().unwrap().to_owned();
    backend
        .run(
            &copy,
            &["pull", "s1", "--to", "branch", "--branch", &branch[..6]],
        )
        .ok();
    assert_eq!(
        text(&copy.home().join("branch/projects/-work-app/s1.jsonl")),
        text(&transcript(&first, "s1"))
    );
    backend.run(&copy, &["verify", "--all"]).ok();
}

#[test]
fn a_custom_agent_needs_only_patterns() {
    let backend = Backend::file();
    let home = TempHome::new();
    let config = home.path().join("config.toml");
    std::fs::write(&config, "agent = \"notes\"\nroot = \"state\"\n[profile]\nsessions = [\"chats/{session}.jsonl\", \"chats/{session}/**\"]\nappend = [\"**/*.jsonl\"]\nnever = [\"**/secret*\"]\n").unwrap();
    let config = config.to_string_lossy().into_owned();
    append(&home.home().join("state/chats/a b.jsonl"), LINE);
    append(&home.home().join("state/chats/a b/x/y.bin"), "\u{0}binary");
    append(&home.home().join("state/chats/a b/secret.txt"), "no");
    backend
        .run(&home, &["--config", &config, "run", "--", "true"])
        .ok();
    let other = TempHome::new();
    backend
        .run(&other, &["--config", &config, "restore", "a=20b"])
        .ok();
    assert_eq!(text(&other.home().join("state/chats/a b.jsonl")), LINE);
    assert_eq!(
        text(&other.home().join("state/chats/a b/x/y.bin")),
        "\u{0}binary"
    );
    assert!(!other.home().join("state/chats/a b/secret.txt").exists());
}

on_each_backend!(reindex_gives_the_same_rows);
fn reindex_gives_the_same_rows(backend: Backend) {
    let home = TempHome::new();
    for session in ["s1", "s2", "s3"] {
        append(&transcript(&home, session), LINE.repeat(3));
    }
    append(
        &home.home().join(".claude/projects/-work-app/memory/M.md"),
        "m",
    );
    backend.run(&home, &["run", "--", "true"]).ok();
    append(&transcript(&home, "s2"), LINE);
    backend
        .run(&home, &["run", "--session", "s2", "--", "true"])
        .ok();
    let before = backend.run(&home, &["ls", "--json"]).ok().json();
    assert_eq!(before["sessions"].as_array().unwrap().len(), 3);
    backend.run(&home, &["reindex"]).ok();
    assert_eq!(
        backend.run(&home, &["ls", "--json"]).ok().json(),
        before,
        "{}",
        backend.name
    );
}

#[test]
fn the_demo_restores_after_kill_9() {
    let home = TempHome::new();
    let output = home.command(&sessiond()).arg("demo").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        said.contains("identical: no acknowledged byte is lost"),
        "{said}"
    );
    assert_eq!(
        std::fs::read_dir(home.home()).unwrap().count(),
        0,
        "the demo touched the home directory"
    );
}

#[test]
fn help_version_completions_and_manual_are_printed() {
    let home = TempHome::new();
    let run = |arguments: &[&str]| {
        let output = home.command(&sessiond()).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(
        run(&["--version"]).trim(),
        format!("sessiond {}", env!("CARGO_PKG_VERSION"))
    );
    assert!(run(&["completions", "bash"]).contains("_sessiond"));
    assert!(run(&["man"]).contains(".TH sessiond"));
    run(&["man", "--to", "pages"]);
    assert!(home.home().join("pages/sessiond-run.1").exists());
    for verb in [
        "run",
        "daemon",
        "restore",
        "pull",
        "flush",
        "status",
        "hook",
        "checkpoints",
        "checkpoint",
        "inspect",
        "diff",
        "fork",
        "export",
        "import",
        "label",
        "close",
        "archive",
        "reopen",
        "ls",
        "show",
        "tail",
        "messages",
        "search",
        "stats",
        "verify",
        "reindex",
        "doctor",
        "demo",
    ] {
        let (short, long) = (run(&[verb, "-h"]), run(&[verb, "--help"]));
        assert!(long.contains("Example"), "{verb} --help has no example");
        for help in [&short, &long] {
            assert!(
                !help.contains("SESSIOND_STORE") && help.contains("sessiond --help"),
                "{verb} repeats the global options:\n{help}"
            );
        }
    }
    let help = run(&["--help"]);
    for text in ["Run:", "Time travel:", "Global options:", "SESSIOND_STORE"] {
        assert!(help.contains(text), "{text} is not in\n{help}");
    }
    assert!(!run(&["-h"]).contains("SESSIOND_STORE"));
}

needs_servers!(progress_is_shown_on_a_terminal_only);
fn progress_is_shown_on_a_terminal_only() {
    let (Some(s3), Some(postgres)) = (s3(), postgres()) else {
        return;
    };
    let proxy = TcpProxy::start(s3.addr());
    let backend = Backend::on(
        &format!("http://{}", proxy.addr()),
        &s3.fresh_bucket(),
        &postgres.fresh_database(),
    );
    let home = TempHome::new();
    append(&transcript(&home, "s1"), "{}\n".repeat(1000));
    backend.run(&home, &["run", "--", "true"]).ok();
    // Slow enough to show progress.
    proxy.set(Mode::Delay(Duration::from_millis(400)));
    // `script` runs a command on a new terminal.
    let on_a_terminal = |quiet: &str| {
        let command = backend.command(&home, &[]);
        let program = command.get_program().to_string_lossy().into_owned();
        let mut script = Command::new("script");
        script
            .env_clear()
            .env("TERM", "xterm")
            .envs(
                command
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            )
            .current_dir(home.path())
            .stdin(Stdio::null());
        script.args([
            "-qec",
            &format!("stty columns 100; {program} verify s1 {quiet}"),
            "/dev/null",
        ]);
        String::from_utf8_lossy(
            &script
                .output()
                .expect("script is a part of every Debian")
                .stdout,
        )
        .into_owned()
    };
    let shown = on_a_terminal("");
    assert!(
        shown.contains("verifying") && shown.contains("1 log, 0 damaged"),
        "{shown}"
    );
    let quiet = on_a_terminal("--quiet");
    assert!(
        !quiet.contains("verifying") && quiet.contains("1 log, 0 damaged"),
        "{quiet}"
    );
    let elsewhere = backend.run(&home, &["verify", "s1"]).ok();
    assert!(
        !elsewhere.err().contains("verifying"),
        "{}",
        elsewhere.err()
    );
}
