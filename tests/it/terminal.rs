//! The agent's terminal belongs to the agent: sessiond writes nothing to it while the agent runs.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::support::backend::{Backend, Running, Signal, eventually};
use crate::support::{TempHome, slow};

/// A pseudo-terminal: what a terminal shows, and the side that programs use.
fn terminal() -> (File, File) {
    let shown = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&shown).unwrap();
    unlockpt(&shown).unwrap();
    let name = ptsname(&shown, Vec::new()).unwrap();
    let program = File::options()
        .read(true)
        .write(true)
        .open(name.to_str().unwrap())
        .unwrap();
    (File::from(shown), program)
}

/// Reads until every program has closed the terminal.
fn read_all(mut shown: File) -> String {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    // Linux reports EIO when the last program has closed its side.
    while let Ok(count) = shown.read(&mut buffer) {
        if count == 0 {
            break;
        }
        bytes.extend_from_slice(&buffer[..count]);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// An agent that works through an outage of the store: it becomes unavailable, and is back before
/// the agent exits.
fn agent(bucket: &Path) -> String {
    let bucket = bucket.display();
    format!(
        "t=$HOME/.claude/projects/-work-app/s1.jsonl; mkdir -p $(dirname $t)\n\
         echo agent-begins; echo '{{\"n\":1}}' >> $t; until test -e {bucket}/v1; do sleep 0.1; done\n\
         mv {bucket} {bucket}.away\n\
         for n in 1 2 3 4 5; do echo \"{{\\\"n\\\":$n}}\" >> $t; sleep 1; done\n\
         mv {bucket}.away {bucket}; sleep 4; echo agent-ends\n"
    )
}

slow!(
    nothing_is_written_to_the_terminal_while_the_agent_runs,
    an_outage_is_logged_once_in_the_log_of_a_container
);
fn nothing_is_written_to_the_terminal_while_the_agent_runs() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let agent = agent(&backend.path().join("bucket"));
    let log = home.path().join("sessiond.log");
    let words = ["run", "--flush-interval", "100ms", "--log-file"];
    let mut command = backend.command(&home, &words);
    command.arg(&log).args(["--", "sh", "-c", &agent]);
    let (shown, program) = terminal();
    command
        .stdin(Stdio::from(program.try_clone().unwrap()))
        .stdout(Stdio::from(program.try_clone().unwrap()))
        .stderr(Stdio::from(program));
    let mut run = Running(command.spawn().unwrap());
    // The command holds the program's side, too.
    drop(command);
    let shown = read_all(shown);
    assert_eq!(run.code(), Some(0), "{shown}");
    let (during, after) = shown.split_once("agent-ends\r\n").unwrap();
    let (_, during) = during.split_once("agent-begins\r\n").unwrap();
    assert_eq!(during, "", "{shown}");
    assert!(after.contains("flush failed"), "the summary: {shown}");
    assert!(after.lines().count() <= 3, "{shown}");
    // The log file has everything, and none of it repeatedly.
    let log = std::fs::read_to_string(log).unwrap();
    assert_eq!(log.matches("flush failed").count(), 1, "{log}");
    assert_eq!(log.matches("flushes succeed again").count(), 1, "{log}");
}

fn an_outage_is_logged_once_in_the_log_of_a_container() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let agent = agent(&backend.path().join("bucket"));
    let words = ["run", "--flush-interval", "100ms", "--", "sh", "-c", &agent];
    let ran = backend.run(&home, &words).ok();
    let log = ran.err();
    assert_eq!(log.matches("flush failed").count(), 1, "{log}");
    assert_eq!(log.matches("flushes succeed again").count(), 1, "{log}");
}

#[test]
fn an_agent_that_ignores_sigterm_is_killed_if_requested() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let agent = "trap '' TERM; t=$HOME/.claude/projects/-work-app/s1.jsonl; mkdir -p $(dirname $t)\n\
                 touch $HOME/up; while :; do echo '{\"n\":1}' >> $t; sleep 0.1; done";
    let words = ["run", "--kill-after", "1s", "--", "sh", "-c", agent];
    let mut run = Running(backend.command(&home, &words).spawn().unwrap());
    eventually("the agent runs", || home.home().join("up").exists());
    let started = Instant::now();
    run.signal(Signal::TERM);
    assert_eq!(run.code(), Some(137));
    assert!(started.elapsed() >= Duration::from_secs(1));
    // The final flush follows.
    let listed = backend.run(&home, &["ls", "--json"]).ok().json();
    assert_eq!(listed["sessions"][0]["id"], "s1", "{listed}");
    backend
        .run(&home, &["run", "--kill-after", "soon", "--", "true"])
        .fails(2, "--kill-after", "");
}
