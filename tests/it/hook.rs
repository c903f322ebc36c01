//! `sessiond hook`, fed with input that Claude Code really sent to its hooks
//! (`tests/fixtures/claude-hooks`): a turn ends once it is durable, and the hook never takes longer
//! than its deadline.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::TempHome;
use crate::support::backend::{Backend, Ran, Running, Signal, eventually};
use crate::support::files::append;
use crate::support::on_each_backend;
use crate::support::slow;

const SESSION: &str = "36c58e05-60f1-4e52-a089-fafb891c18dd";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn transcript(home: &TempHome) -> PathBuf {
    home.home()
        .join(format!(".claude/projects/-work-work/{SESSION}.jsonl"))
}

/// The lines that the client wrote in a turn like that of the events; the last is "The sub-agent is
/// done.".
fn lines() -> Vec<String> {
    let path = fixtures()
        .join("claude/subagent/projects/-work-work/1a471e4f-bd92-4452-a5d6-0999f102be66.jsonl");
    std::fs::read_to_string(path)
        .unwrap()
        .lines()
        .map(|line| format!("{line}\n"))
        .collect()
}

/// A real event, with the paths of this home.
fn event(home: &TempHome, file: &str) -> String {
    let text = std::fs::read_to_string(fixtures().join("claude-hooks").join(file)).unwrap();
    text.replace("/work/home/", &format!("{}/", home.home().display()))
}

fn spawn(
    backend: &Backend,
    home: &TempHome,
    arguments: &[&str],
    change: impl FnOnce(&mut std::process::Command),
) -> std::process::Child {
    let mut command = backend.command(home, &[&["hook"], arguments].concat());
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // The environment of a real hook.
    command.env("ANTHROPIC_API_KEY", "sk-very-secret");
    change(&mut command);
    command.spawn().unwrap()
}

/// Calls the hook as the agent does. It must print nothing but a message on stdout, at most one line
/// on stderr, and exit with 0.
#[track_caller]
fn hook_with(
    backend: &Backend,
    home: &TempHome,
    arguments: &[&str],
    input_text: &[u8],
    change: impl FnOnce(&mut std::process::Command),
) -> (String, Duration) {
    let began = Instant::now();
    let mut child = spawn(backend, home, arguments, change);
    let mut input = child.stdin.take().unwrap();
    // It may have ended already.
    let _ = input.write_all(input_text);
    drop(input);
    let ran = Ran(child.wait_with_output().unwrap());
    let took = began.elapsed();
    assert_eq!(ran.code(), 0, "{}", ran.err());
    // Plain text would reach the model; this message reaches the user, or a headless caller.
    if !ran.out().is_empty() {
        let lines: Vec<Value> = ran
            .out()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let messages: Vec<String> = ran.err().lines().map(str::to_owned).collect();
        let expected: Vec<Value> = messages
            .iter()
            .map(|message| json!({ "systemMessage": message }))
            .collect();
        assert_eq!(lines, expected);
    }
    assert!(!ran.err().contains("secret"), "{}", ran.err());
    (ran.err(), took)
}

#[track_caller]
fn hook(
    backend: &Backend,
    home: &TempHome,
    arguments: &[&str],
    input_text: &str,
) -> (String, Duration) {
    let (stderr, took) = hook_with(backend, home, arguments, input_text.as_bytes(), |_| {});
    assert!(stderr.lines().count() <= 1, "{stderr}");
    (stderr, took)
}

/// The message that the hook shows to the client on stdout.
fn shown(backend: &Backend, home: &TempHome, arguments: &[&str], input_text: &str) -> Value {
    let mut child = spawn(backend, home, arguments, |_| {});
    let _ = child.stdin.take().unwrap().write_all(input_text.as_bytes());
    let ran = Ran(child.wait_with_output().unwrap());
    ran.json()
}

/// A daemon that flushes only on request: the first change is uploaded immediately, and the next
/// would wait for an hour.
fn slow_daemon(backend: &Backend, home: &TempHome) -> Running {
    let daemon = backend.daemon(home, &["--flush-interval", "1h"]);
    append(&transcript(home), "{\"type\":\"mode\"}\n");
    eventually("the first line is durable", || {
        let status = backend.run(home, &["status", "--json"]).ok().json();
        status["sessions"][0]["durable_bytes"]
            .as_u64()
            .is_some_and(|bytes| bytes > 0)
    });
    daemon
}

/// The transcript that another machine restores.
fn stored(backend: &Backend) -> String {
    let copy = TempHome::new();
    backend.run(&copy, &["pull", SESSION, "--to", "copy"]).ok();
    std::fs::read_to_string(
        copy.home()
            .join(format!("copy/projects/-work-work/{SESSION}.jsonl")),
    )
    .unwrap()
}

on_each_backend!(the_stop_hook_makes_the_turn_durable);
fn the_stop_hook_makes_the_turn_durable(backend: Backend) {
    let home = TempHome::new();
    let mut daemon = slow_daemon(&backend, &home);
    append(&transcript(&home), lines().concat());
    let (stderr, took) = hook(&backend, &home, &[], &event(&home, "09-Stop.json"));
    daemon.kill();
    assert_eq!(stderr, "", "{took:?}");
    assert_eq!(
        stored(&backend),
        std::fs::read_to_string(transcript(&home)).unwrap()
    );
}

#[test]
fn the_hook_waits_for_the_last_message() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let mut daemon = slow_daemon(&backend, &home);
    let mut lines = lines();
    let late = lines.split_off(
        lines
            .iter()
            .position(|line| line.contains("The sub-agent is done."))
            .unwrap(),
    );
    append(&transcript(&home), lines.concat());
    let (stderr, took) = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            append(&transcript(&home), &late[0]);
        });
        hook(
            &backend,
            &home,
            &["--verbose"],
            &event(&home, "09-Stop.json"),
        )
    });
    daemon.kill();
    assert!(stderr.contains("is durable at entry"), "{stderr}");
    assert!(took >= Duration::from_millis(300), "{took:?}");
    assert!(stored(&backend).ends_with(&late[0]));
}

#[test]
fn a_missing_last_message_is_reported_and_the_rest_is_durable() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let mut daemon = slow_daemon(&backend, &home);
    append(&transcript(&home), lines()[..20].concat());
    let (stderr, took) = hook(
        &backend,
        &home,
        &["--deadline", "1s"],
        &event(&home, "09-Stop.json"),
    );
    assert!(stderr.contains("without the last message"), "{stderr}");
    assert!(
        took >= Duration::from_millis(400) && took < Duration::from_secs(4),
        "{took:?}"
    );
    // A compaction names a sub-agent whose transcript never exists: nothing to wait for.
    let (stderr, took) = hook(&backend, &home, &[], &event(&home, "19-SubagentStop.json"));
    assert_eq!(stderr, "");
    assert!(took < Duration::from_millis(3500), "{took:?}");
    daemon.kill();
    assert_eq!(
        stored(&backend),
        std::fs::read_to_string(transcript(&home)).unwrap()
    );
}

slow!(every_hook_event_succeeds_and_only_turn_ends_flush);
fn every_hook_event_succeeds_and_only_turn_ends_flush() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let _daemon = slow_daemon(&backend, &home);
    append(&transcript(&home), lines().concat());
    let head = || {
        backend.run(&home, &["status", "--json"]).ok().json()["sessions"][0]["head"]
            .as_u64()
            .unwrap()
    };
    let mut names: Vec<String> = std::fs::read_dir(fixtures().join("claude-hooks"))
        .unwrap()
        .map(|item| item.unwrap().file_name().into_string().unwrap())
        .collect();
    names.retain(|name| name != "settings.example.json");
    names.sort();
    assert_eq!(names.len(), 26);
    for name in names {
        let before = head();
        append(&transcript(&home), "{\"type\":\"mode\"}\n");
        // The last messages of these turns are not in this transcript: the hook waits until its
        // deadline.
        let (stderr, _) = hook(
            &backend,
            &home,
            &["--deadline", "400ms"],
            &event(&home, &name),
        );
        let ends = [
            "-Stop.json",
            "-StopFailure.json",
            "-SubagentStop.json",
            "-SessionEnd.json",
        ]
        .iter()
        .any(|end| name.ends_with(end));
        assert_eq!(head() - before, u64::from(ends), "{name}");
        assert!(
            stderr.is_empty() || stderr.contains("without the last message"),
            "{name}: {stderr}"
        );
    }
    // With --after-tools also after a tool, whose result is not written yet.
    for name in ["06-PostToolUse.json", "14-PostToolUseFailure.json"] {
        let before = head();
        append(&transcript(&home), "{\"type\":\"mode\"}\n");
        assert_eq!(
            hook(&backend, &home, &["--after-tools"], &event(&home, name)).0,
            ""
        );
        assert_eq!(head() - before, 1, "{name}");
    }
    // Another root than the usual one is found by its transcript.
    let elsewhere = TempHome::new();
    append(&transcript(&home), "{\"type\":\"mode\"}\n");
    let before = head();
    assert_eq!(
        hook(
            &backend,
            &elsewhere,
            &[],
            &event(&home, "10-SessionEnd.json")
        )
        .0,
        ""
    );
    assert_eq!(head() - before, 1);
}

#[test]
fn a_hanging_store_delays_the_agent_by_the_deadline_at_most() {
    let mut backend = Backend::file();
    // Accepts connections and never responds.
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    backend.set(
        "SESSIOND_STORE",
        format!(
            "s3://bucket?endpoint=http://{}",
            server.local_addr().unwrap()
        ),
    );
    backend.set("AWS_ACCESS_KEY_ID", "key");
    backend.set("AWS_SECRET_ACCESS_KEY", "secret");
    let home = TempHome::new();
    let daemon = backend.daemon(&home, &[]);
    append(&transcript(&home), lines().concat());
    for file in ["09-Stop.json", "10-SessionEnd.json"] {
        let (stderr, took) = hook(&backend, &home, &["--deadline", "1s"], &event(&home, file));
        assert!(stderr.contains("not durable after 1s"), "{stderr}");
        // A headless caller does not see the stderr of a hook.
        let shown = shown(&backend, &home, &["--deadline", "1s"], &event(&home, file));
        let message = shown["systemMessage"].as_str().unwrap_or_default();
        assert!(message.contains("not durable after 1s"), "{shown}");
        assert!(
            took >= Duration::from_secs(1) && took < Duration::from_secs(4),
            "{took:?}"
        );
    }
    // A suspended daemon.
    daemon.signal(Signal::STOP);
    let (stderr, took) = hook(
        &backend,
        &home,
        &["--deadline", "500ms"],
        &event(&home, "09-Stop.json"),
    );
    assert!(
        stderr.contains("not durable after 500ms") && took < Duration::from_millis(3500),
        "{took:?}: {stderr}"
    );
    let (stderr, took) = hook(
        &backend,
        &home,
        &["--deadline", "500ms"],
        &event(&home, "01-SessionStart.json"),
    );
    assert!(
        !stderr.is_empty() && took < Duration::from_millis(3500),
        "{took:?}: {stderr}"
    );
    daemon.signal(Signal::CONT);
}

#[test]
fn the_hook_exits_at_once_without_a_daemon() {
    let (backend, home) = (Backend::file(), TempHome::new());
    append(&transcript(&home), lines().concat());
    let gone = |file: &str, word: &str| {
        let (stderr, took) = hook(&backend, &home, &[], &event(&home, file));
        assert!(stderr.contains(word), "{file}: {stderr}");
        assert!(took < Duration::from_millis(3500), "{took:?}");
    };
    gone("01-SessionStart.json", "no sessiond is running for");
    gone("09-Stop.json", "cannot make session");
    // A killed daemon leaves its socket behind.
    backend.daemon(&home, &[]).kill();
    assert!(home.home().join(".claude/.sessiond/socket").exists());
    gone("09-Stop.json", "cannot make session");
    // Neither a root nor a home.
    let (stderr, _) = hook_with(
        &backend,
        &home,
        &[],
        b"{\"hook_event_name\":\"Stop\",\"session_id\":\"s\"}",
        |command| {
            command.env_remove("HOME").env_remove("SESSIOND_ROOT");
        },
    );
    assert!(!stderr.is_empty());
}

#[test]
fn the_hook_reports_a_takeover() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let _daemon = slow_daemon(&backend, &home);
    backend.run(&TempHome::new(), &["restore", SESSION]).ok();
    append(&transcript(&home), lines().concat());
    let (stderr, _) = hook(&backend, &home, &[], &event(&home, "09-Stop.json"));
    assert!(
        stderr.contains("the latest bytes are durable on branch"),
        "{stderr}"
    );
}

#[test]
fn the_hook_names_a_checkpoint_at_the_last_turn() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let _daemon = slow_daemon(&backend, &home);
    let named = || {
        backend
            .run(&home, &["checkpoints", SESSION, "--json"])
            .ok()
            .json()["named"]
            .clone()
    };
    let mut last = 0;
    for _ in 0..2 {
        append(&transcript(&home), lines().concat());
        assert_eq!(
            hook(
                &backend,
                &home,
                &["--checkpoint", "ended"],
                &event(&home, "09-Stop.json")
            )
            .0,
            ""
        );
        let names = named();
        assert_eq!(
            (names.as_array().unwrap().len(), names[0]["name"].as_str()),
            (1, Some("ended")),
            "{names}"
        );
        let seq = names[0]["seq"].as_u64().unwrap();
        assert!(seq > last, "{names}");
        last = seq;
    }
    // Not for other events, and not in another store than the daemon's.
    let before = named();
    append(&transcript(&home), "{\"type\":\"mode\"}\n");
    hook(
        &backend,
        &home,
        &["--checkpoint", "ended", "--after-tools"],
        &event(&home, "06-PostToolUse.json"),
    );
    assert_eq!(named(), before);
    let stop = event(&home, "10-SessionEnd.json");
    let (stderr, _) = hook_with(
        &backend,
        &home,
        &["--checkpoint", "other"],
        stop.as_bytes(),
        |command| {
            command.env(
                "SESSIOND_STORE",
                format!("file://{}/elsewhere", home.path().display()),
            );
        },
    );
    assert!(
        stderr.contains("cannot create checkpoint other") && stderr.contains("elsewhere"),
        "{stderr}"
    );
    assert_eq!(named(), before);
    assert!(
        installed(&backend, &home, &["--print", "--checkpoint", "ended"])
            .contains("hook --checkpoint ended")
    );
    assert_ne!(
        backend
            .run(&home, &["hook", "--print", "--checkpoint", "a b"])
            .code(),
        0
    );
}

#[test]
fn the_hook_never_stops_the_agent() {
    let (backend, home) = (Backend::file(), TempHome::new());
    for garbage in [
        &b""[..],
        b"\n\n",
        b"{",
        b"not json\n",
        b"[1,2]\n",
        b"\xff\xfe\0\n",
        b"{\"hook_event_name\":\"Stop\"}\n",
    ] {
        let (stderr, took) = hook_with(&backend, &home, &[], garbage, |_| {});
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(took < Duration::from_millis(3500), "{took:?}");
    }
    let (stderr, _) = hook_with(
        &backend,
        &home,
        &[],
        b"{\"hook_event_name\":\"Tomorrow\",\n\"x\":[1]}",
        |_| {},
    );
    assert_eq!(stderr, "", "an unknown event is nothing to us");
    // Invalid arguments, variables and files: exit code 2 would make the agent continue its turn.
    let stop = event(&home, "09-Stop.json");
    for arguments in [
        &["--nonsense"][..],
        &["--deadline"],
        &["--deadline", "soon"],
        &["--config", "/nowhere.toml"],
        &["more", "words"],
    ] {
        hook_with(&backend, &home, arguments, stop.as_bytes(), |_| {});
    }
    for (name, value) in [
        ("SESSIOND_S3_PATH_STYLE", "maybe"),
        ("SESSIOND_LOG", "a=b=c"),
        ("SESSIOND_HOOK_DEADLINE", "x"),
        ("SESSIOND_AGENT", "who"),
    ] {
        hook_with(&backend, &home, &[], stop.as_bytes(), |command| {
            command.env(name, value);
        });
    }
    // An agent that sends nothing and keeps stdin open.
    let began = Instant::now();
    let mut child = spawn(&backend, &home, &["--deadline", "500ms"], |_| {});
    let line = child.stdin.take();
    let status = child.wait().unwrap();
    assert!(
        status.success() && began.elapsed() < Duration::from_millis(3500),
        "{status} after {:?}",
        began.elapsed()
    );
    drop(line);
    // An interactive user gets exit code 2.
    assert_eq!(
        backend
            .run(&home, &["hook", "--install", "--nonsense"])
            .code(),
        2
    );
}

fn installed(backend: &Backend, home: &TempHome, arguments: &[&str]) -> String {
    backend
        .run(home, &[&["hook"], arguments].concat())
        .ok()
        .out()
}

#[test]
fn hooks_are_installed_into_and_removed_from_the_settings() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let user = home.home().join(".claude/settings.json");
    let value = |path: &Path| {
        serde_json::from_str::<Value>(&std::fs::read_to_string(path).unwrap()).unwrap()
    };
    let ours = |hooks: &Value, event: &str| {
        let hook = &hooks[event].as_array().unwrap().last().unwrap()["hooks"][0];
        let command = hook["command"].as_str().unwrap();
        assert!(
            command.starts_with('/') && command.contains("sessiond hook"),
            "{command}"
        );
        assert_eq!(
            (hook["type"].as_str(), hook["timeout"].as_u64()),
            (Some("command"), Some(6))
        );
    };
    // Without settings.
    assert!(installed(&backend, &home, &["--install", "--dry-run"]).contains("would add"));
    assert!(!user.exists());
    assert!(
        installed(&backend, &home, &["--install"])
            .contains("SessionStart, Stop, StopFailure, SubagentStop, SessionEnd")
    );
    let hooks = value(&user)["hooks"].clone();
    [
        "SessionStart",
        "Stop",
        "StopFailure",
        "SubagentStop",
        "SessionEnd",
    ]
    .iter()
    .for_each(|event| ours(&hooks, event));
    assert_eq!(hooks.get("PostToolUse"), None);
    assert_eq!(
        serde_json::from_str::<Value>(&installed(&backend, &home, &["--print"])).unwrap()["hooks"],
        hooks
    );
    let written = std::fs::metadata(&user).unwrap().modified().unwrap();
    assert!(installed(&backend, &home, &["--install", "--user"]).contains("nothing to do"));
    assert_eq!(
        std::fs::metadata(&user).unwrap().modified().unwrap(),
        written
    );
    installed(&backend, &home, &["--uninstall"]);
    assert_eq!(value(&user), json!({}));

    // A project with its own hooks, as in a real client; behind a symlink, with a mode.
    let project = home.path().join("my project");
    let real = home.path().join("dotfiles.json");
    std::fs::copy(fixtures().join("claude-hooks/settings.example.json"), &real).unwrap();
    std::fs::set_permissions(&real, std::fs::Permissions::from_mode(0o640)).unwrap();
    std::fs::create_dir_all(project.join(".claude")).unwrap();
    std::os::unix::fs::symlink(&real, project.join(".claude/settings.json")).unwrap();
    let before = std::fs::read_to_string(&real).unwrap();
    let at = ["--project", project.to_str().unwrap()];
    installed(
        &backend,
        &home,
        &[&["--install", "--after-tools"][..], &at].concat(),
    );
    assert!(project.join(".claude/settings.json").is_symlink());
    assert_eq!(
        std::fs::metadata(&real).unwrap().permissions().mode() & 0o777,
        0o640
    );
    let hooks = value(&real)["hooks"].clone();
    ["Stop", "PostToolUse", "PostToolUseFailure"]
        .iter()
        .for_each(|event| ours(&hooks, event));
    assert_eq!(hooks["Stop"].as_array().unwrap().len(), 2);
    assert_eq!(hooks["PostToolUse"][1]["matcher"], "*");
    assert_eq!(
        std::fs::read_to_string(home.path().join("dotfiles.json.before-sessiond")).unwrap(),
        before
    );
    installed(&backend, &home, &[&["--uninstall"][..], &at].concat());
    assert_eq!(
        std::fs::read_to_string(&real).unwrap(),
        before,
        "not a byte differs"
    );
    assert!(
        installed(&backend, &home, &[&["--uninstall"][..], &at].concat()).contains("nothing to do")
    );

    // An empty file, and invalid JSON.
    let file = home.path().join("other.json");
    let at = ["--settings", file.to_str().unwrap()];
    std::fs::write(&file, "").unwrap();
    installed(&backend, &home, &[&["--install"][..], &at].concat());
    ours(&value(&file)["hooks"], "Stop");
    for broken in [
        "{\n  \"a\": 1,\n}\n",
        "// note\n{}",
        "[]",
        "{\"hooks\": []}",
    ] {
        std::fs::write(&file, broken).unwrap();
        backend
            .run(&home, &[&["hook", "--install"][..], &at].concat())
            .fails(7, "other.json", "nothing was changed");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), broken);
    }
}

#[test]
fn the_installed_hook_command_runs_under_sh() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let mut daemon = slow_daemon(&backend, &home);
    append(&transcript(&home), lines().concat());
    let printed: Value = serde_json::from_str(&installed(
        &backend,
        &home,
        &["--print", "--deadline", "3s"],
    ))
    .unwrap();
    let hook = &printed["hooks"]["Stop"][0]["hooks"][0];
    assert_eq!(hook["timeout"], 4);
    let inner = backend.command(&home, &[]);
    let mut shell = std::process::Command::new("/bin/sh");
    shell
        .args(["-c", hook["command"].as_str().unwrap()])
        .env_clear()
        .envs(
            inner
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        );
    let mut child = shell
        .current_dir(home.home())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(event(&home, "09-Stop.json").as_bytes())
        .unwrap();
    assert!(child.wait().unwrap().success());
    daemon.kill();
    assert_eq!(
        stored(&backend),
        std::fs::read_to_string(transcript(&home)).unwrap()
    );
}
