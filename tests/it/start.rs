//! One command for the first start and for every restart: `{session-args}` and `--request`.

use std::time::{Duration, Instant};

use crate::support::TempHome;
use crate::support::backend::{Backend, Running, Signal, eventually};
use crate::support::on_each_backend;

/// Behaves like Claude Code: `--session-id` starts a session that must be new, `--resume` continues
/// one that must exist. Records its arguments and variables, and appends a line to the transcript.
const AGENT: &str = r#"
d=$HOME/.claude/projects/-work-app; mkdir -p "$d"
echo "$* $SESSIOND_SESSION_ID $SESSIOND_RESTORED" >> "$HOME/../starts"
case "$1" in
--session-id) test ! -e "$d/$2.jsonl" || { echo "already in use" >&2; exit 1; } ;;
--resume) test -e "$d/$2.jsonl" || { echo "no conversation found" >&2; exit 1; } ;;
*) exit 1 ;;
esac
echo "{\"type\":\"user\",\"message\":{\"content\":\"$3\"}}" >> "$d/$2.jsonl"
test "$3" != hang || { touch "$HOME/hangs"; while :; do sleep 0.05; done; }
"#;

const ID: &str = "0b5e551d-0000-4000-8000-00000000d340";

/// Writes the agent, and returns the arguments that start it.
fn command(home: &TempHome, select: [&str; 2], prompt: &str) -> Vec<String> {
    let agent = home.path().join("agent.sh");
    std::fs::write(&agent, AGENT).unwrap();
    let agent = agent.to_string_lossy().into_owned();
    let [flag, value] = select;
    let words = [
        "run",
        flag,
        value,
        "--",
        "sh",
        &agent,
        "{session-args}",
        prompt,
    ];
    words.map(str::to_owned).to_vec()
}

fn start(backend: &Backend, home: &TempHome, select: [&str; 2], prompt: &str) {
    let command = command(home, select, prompt);
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    backend.run(home, &command).ok();
}

/// Starts the agent, and kills it and sessiond while the agent runs.
fn crash(backend: &Backend, home: &TempHome, select: [&str; 2]) {
    let command = command(home, select, "hang");
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let mut command = backend.command(home, &command);
    let mut run = Running(command.stderr(std::process::Stdio::null()).spawn().unwrap());
    let marker = home.home().join("hangs");
    eventually("the agent runs", || marker.exists());
    backend.run(home, &["flush", "--wait"]).ok();
    // Process 1 of a container: the kernel kills the rest with it.
    let children = format!("/proc/{0}/task/{0}/children", run.0.id());
    for child in std::fs::read_to_string(children)
        .unwrap()
        .split_whitespace()
    {
        crate::support::backend::send_signal(child.parse().unwrap(), Signal::KILL);
    }
    run.kill();
    std::fs::remove_file(marker).unwrap();
}

/// The last start: arguments, session and whether it was restored.
fn last_start(home: &TempHome) -> String {
    let starts = std::fs::read_to_string(home.path().join("starts")).unwrap();
    starts.lines().last().unwrap().to_owned()
}

on_each_backend!(one_command_starts_and_restarts_a_session_by_its_id);
fn one_command_starts_and_restarts_a_session_by_its_id(backend: Backend) {
    let select = ["--session", ID];
    let home = TempHome::new();
    start(&backend, &home, select, "first");
    assert_eq!(last_start(&home), format!("--session-id {ID} first {ID} 0"));
    start(&backend, &home, select, "second");
    assert_eq!(last_start(&home), format!("--resume {ID} second {ID} 1"));
    crash(&backend, &home, select);
    start(&backend, &home, select, "fourth");
    assert_eq!(last_start(&home), format!("--resume {ID} fourth {ID} 1"));
    let other = TempHome::new();
    start(&backend, &other, select, "fifth");
    assert_eq!(last_start(&other), format!("--resume {ID} fifth {ID} 1"));
    let transcript = other
        .home()
        .join(format!(".claude/projects/-work-app/{ID}.jsonl"));
    assert_eq!(
        std::fs::read_to_string(transcript).unwrap().lines().count(),
        5
    );
}

on_each_backend!(one_command_starts_and_restarts_the_session_of_a_request);
fn one_command_starts_and_restarts_the_session_of_a_request(backend: Backend) {
    let select = ["--request", "job/7"];
    let home = TempHome::new();
    start(&backend, &home, select, "first");
    let first = last_start(&home);
    let id = first.split(' ').nth(1).unwrap();
    assert_eq!(first, format!("--session-id {id} first {id} 0"));
    crash(&backend, &home, select);
    for (host, home) in [TempHome::new(), TempHome::new()].iter().enumerate() {
        start(&backend, home, select, "again");
        assert_eq!(
            last_start(home),
            format!("--resume {id} again {id} 1"),
            "host {host}"
        );
    }
    // Another request has a session of its own.
    let other = TempHome::new();
    start(&backend, &other, ["--request", "job/8"], "first");
    assert!(!last_start(&other).contains(id));
    let listed = backend
        .run(&home, &["ls", "--request", "job/7", "--json"])
        .ok();
    assert_eq!(listed.json()["sessions"][0]["id"], id);
}

on_each_backend!(a_request_finds_its_session_without_the_index);
fn a_request_finds_its_session_without_the_index(mut backend: Backend) {
    let select = ["--request", "job-7"];
    let home = TempHome::new();
    start(&backend, &home, select, "first");
    let id = last_start(&home).split(' ').nth(1).unwrap().to_owned();
    backend.set("SESSIOND_INDEX", "postgres://nobody@127.0.0.1:1/nowhere");
    let other = TempHome::new();
    start(&backend, &other, select, "second");
    assert_eq!(last_start(&other), format!("--resume {id} second {id} 1"));
    // Also with `restore`, and for a session whose agent chose the ID.
    let third = TempHome::new();
    let restored = backend.run(&third, &["restore", "--request", "job-7"]).ok();
    assert!(restored.out().contains(&id));
}

/// A database that accepts connections and never answers. A connection attempt takes 5 seconds.
#[test]
fn a_hanging_database_does_not_delay_the_start() {
    let mut backend = Backend::file();
    start(&backend, &TempHome::new(), ["--session", ID], "first");
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    backend.set(
        "SESSIOND_INDEX",
        format!("postgres://nobody@127.0.0.1:{port}/none"),
    );
    for select in [
        &["--session", ID][..],
        &["--request", "job-9"],
        &["--latest"],
    ] {
        let home = TempHome::new();
        let began = Instant::now();
        let command = ["--", "sh", "-c", "touch \"$HOME/hangs\""];
        let words = [&["run"], select, &command].concat();
        let mut run = backend.command(&home, &words);
        let mut run = Running(run.stderr(std::process::Stdio::null()).spawn().unwrap());
        let marker = home.home().join("hangs");
        eventually("the agent runs", || marker.exists());
        let waited = began.elapsed();
        assert!(waited < Duration::from_secs(4), "{select:?}: {waited:?}");
        assert_eq!(run.code(), Some(0), "{select:?}");
    }
    let began = Instant::now();
    let home = TempHome::new();
    let daemon = backend.daemon(&home, &["--session", ID]);
    let waited = began.elapsed();
    assert!(waited < Duration::from_secs(4), "ready after {waited:?}");
    assert_eq!(daemon.stop().0, Some(0));
}

#[test]
fn a_session_that_never_reached_the_store_is_resumed_on_its_volume() {
    let mut backend = Backend::file();
    let select = ["--request", "job-7"];
    let home = TempHome::new();
    let bucket = format!("file://{}", backend.path().join("bucket").display());
    backend.set("SESSIOND_FLUSH_DEADLINE", "200ms");
    backend.set("SESSIOND_STORE", "s3://b/p?endpoint=http://127.0.0.1:1");
    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
        backend.set(name, "unused");
    }
    let command_words = command(&home, select, "first");
    let mut words: Vec<&str> = command_words.iter().map(String::as_str).collect();
    words.splice(1..1, ["--on-restore-error", "continue"]);
    backend.run(&home, &words);
    let first = last_start(&home);
    let id = first.split(' ').nth(1).unwrap();
    assert_eq!(first, format!("--session-id {id} first {id} 0"));
    backend.set("SESSIOND_STORE", bucket);
    start(&backend, &home, select, "second");
    assert_eq!(last_start(&home), format!("--resume {id} second {id} 1"));
}

#[test]
fn a_removed_session_is_not_started_again_by_its_request() {
    let backend = Backend::file();
    let select = ["--request", "job-7"];
    let home = TempHome::new();
    start(&backend, &home, select, "first");
    let id = last_start(&home).split(' ').nth(1).unwrap().to_owned();
    backend.run(&home, &["rm", &id, "--yes"]).ok();
    let other = TempHome::new();
    start(&backend, &other, select, "new");
    let new = last_start(&other);
    assert!(
        new.starts_with("--session-id ") && new.ends_with(" 0"),
        "{new}"
    );
    assert!(!new.contains(&id), "{new}");
}

#[test]
fn an_agent_that_chooses_its_ids_starts_without_arguments_and_is_bound_to_the_request() {
    let backend = Backend::file();
    let home = TempHome::new();
    let day = ".codex/sessions/2026/11/18";
    let script = home.path().join("codex.sh");
    std::fs::write(
        &script,
        format!(
            "mkdir -p $HOME/{day}; echo \"$* $SESSIOND_SESSION_ID $SESSIOND_RESTORED\" > $HOME/start\n\
             echo '{{\"type\":\"session_meta\",\"payload\":{{\"id\":\"{ID}\"}}}}' >> $HOME/{day}/rollout-2026-11-18T05-00-00-{ID}.jsonl\n"
        ),
    )
    .unwrap();
    let script = script.to_string_lossy().into_owned();
    let words = [
        "run",
        "--agent",
        "codex",
        "--request",
        "job-7",
        "--",
        "sh",
        &script,
        "exec",
        "{session-args}",
        "go",
    ];
    backend.run(&home, &words).ok();
    let started = |home: &TempHome| std::fs::read_to_string(home.home().join("start")).unwrap();
    assert_eq!(started(&home), "exec go  0\n");
    let other = TempHome::new();
    backend.run(&other, &words).ok();
    assert_eq!(started(&other), format!("exec resume {ID} go {ID} 1\n"));
}

#[test]
fn a_new_session_needs_an_id_that_the_agent_accepts() {
    let backend = Backend::file();
    let home = TempHome::new();
    let words = ["run", "--session", "job-7", "--", "true", "{session-args}"];
    let failed = backend.run(&home, &words);
    assert_eq!(failed.code(), 2);
    let error = failed.err();
    assert!(
        error.contains("invalid --session value \"job-7\""),
        "{error}"
    );
    assert!(
        error.contains("hint: pass an ID of your own to --request"),
        "{error}"
    );
}

/// Streams a session, lets another container take it over, and returns the first container.
fn taken_over(backend: &Backend, home: &TempHome, flags: &[&str]) -> Running {
    let transcript = ".claude/projects/-work-app/s1.jsonl";
    let agent = format!(
        "t=$HOME/{transcript}; mkdir -p $(dirname $t); echo '{{\"first\":1}}' >> $t; touch $HOME/up\n\
         trap 'echo \"{{\\\"last\\\":1}}\" >> $t; exit 0' TERM\n\
         while ! test -e $HOME/go; do sleep 0.05; done; echo '{{\"second\":1}}' >> $t\n\
         while ! test -e $HOME/end; do sleep 0.05; done\n"
    );
    let words = [
        &["run", "--session", "s1"],
        flags,
        &["--", "sh", "-c", &agent],
    ]
    .concat();
    let log = std::fs::File::create(home.path().join("err")).unwrap();
    let mut command = backend.command(home, &words);
    let run = Running(command.stderr(log).spawn().unwrap());
    eventually("the agent runs", || home.home().join("up").exists());
    backend.run(home, &["flush", "--wait"]).ok();
    backend.run(&TempHome::new(), &["restore", "s1"]).ok();
    std::fs::write(home.home().join("go"), "").unwrap();
    run
}

on_each_backend!(a_container_that_lost_its_session_ends_with_4);
fn a_container_that_lost_its_session_ends_with_4(backend: Backend) {
    let home = TempHome::new();
    let mut run = taken_over(&backend, &home, &[]);
    let branches =
        || backend.run(&home, &["ls", "--json"]).ok().json()["sessions"][0]["branches"].clone();
    eventually("the rest is on a branch", || {
        branches()
            .as_array()
            .is_some_and(|branches| branches.len() == 1)
    });
    assert!(run.0.try_wait().unwrap().is_none(), "the agent continues");
    std::fs::write(home.home().join("end"), "").unwrap();
    assert_eq!(run.code(), Some(4));
    let log = std::fs::read_to_string(home.path().join("err")).unwrap();
    assert!(
        log.contains("another writer took the session over"),
        "{log}"
    );
    assert!(!log.contains("everything is durable"), "{log}");
}

on_each_backend!(a_takeover_stops_the_agent_if_requested);
fn a_takeover_stops_the_agent_if_requested(backend: Backend) {
    let home = TempHome::new();
    let mut run = taken_over(&backend, &home, &["--on-takeover", "stop"]);
    assert_eq!(run.code(), Some(4));
    let listed = backend.run(&home, &["ls", "--json"]).ok().json();
    let branch = listed["sessions"][0]["branches"][0]
        .as_str()
        .unwrap()
        .to_owned();
    let copy = home.path().join("copy");
    let to = copy.to_string_lossy().into_owned();
    backend
        .run(&home, &["pull", "s1", "--branch", &branch, "--to", &to])
        .ok();
    let pulled = std::fs::read_to_string(copy.join("projects/-work-app/s1.jsonl")).unwrap();
    assert!(
        pulled.ends_with("{\"last\":1}\n"),
        "the final flush is on the branch: {pulled}"
    );
}
