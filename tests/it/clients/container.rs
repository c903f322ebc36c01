//! A container in which a client runs under `sessiond run`: a disposable home and a working
//! directory.
//!
//! Owns the client's environment: nothing of the user who runs the tests, a fake key, a model on
//! loopback.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Once;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::client::Client;
use super::install::agents;
use super::model::{Model, Request, conversation};
use crate::support::TempHome;
use crate::support::backend::{Backend, Ran, Running};
use crate::support::files::{Files, files_below};

/// Maximum time of a turn, which takes seconds.
const MAX_TURN: Duration = Duration::from_secs(180);

/// The model calls Claude Code's Bash tool.
pub fn bash(command: &str) -> Value {
    Client::ClaudeNew.shell(command)
}

/// Runs a scenario with a client on every backend.
pub fn on_every_backend(client: Client, scenario: impl Fn(&Container<'_>)) {
    print_failures_at_once();
    for backend in Backend::all() {
        let model = Model::start();
        let Some(container) = Container::new(client, &backend, &model) else {
            return;
        };
        scenario(&container);
    }
}

/// Prints the reason of a failed scenario where it fails, and not only at the end of all tests:
/// failures of real clients depend on timing, and the log of a CI run may be cut off.
fn print_failures_at_once() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let printed_at_the_end = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let test = std::thread::current();
            if let Some(name) = test.name().filter(|name| name.starts_with("clients::")) {
                // Not `eprintln!`, which the test harness captures.
                let _ = writeln!(std::io::stderr(), "{name} failed: {panic}");
            }
            printed_at_the_end(panic);
        }));
    });
}

/// Defines one test per scenario and client.
macro_rules! scenarios {
    (@ $name:ident $client:ident ($($scenario:ident),+ $(,)?)) => {
        mod $name { $(#[test] fn $scenario() { crate::clients::container::on_every_backend(crate::clients::client::Client::$client, super::$scenario) })+ }
    };
    ($($name:ident $client:ident),+: $scenarios:tt) => { $(crate::clients::container::scenarios!(@ $name $client $scenarios);)+ };
}
pub(super) use scenarios;

/// A container.
pub struct Container<'a> {
    pub client: Client,
    pub backend: &'a Backend,
    pub model: &'a Model,
    pub home: TempHome,
    /// The working directory of the client.
    pub cwd: PathBuf,
    bin: PathBuf,
    lost: std::cell::Cell<u32>,
}

impl<'a> Container<'a> {
    /// A container with its own working directory; `None` if the test must be skipped.
    pub fn new(client: Client, backend: &'a Backend, model: &'a Model) -> Option<Container<'a>> {
        let bin = client.bin(agents()?);
        let home = TempHome::new();
        let cwd = home.path().join("work");
        std::fs::create_dir(&cwd).unwrap();
        client.write_settings(&home.home(), &model.url());
        Some(Container {
            client,
            backend,
            model,
            home,
            cwd,
            bin,
            lost: Default::default(),
        })
    }

    /// A second container with the same working directory.
    pub fn second_container(&self) -> Container<'a> {
        let (client, backend, model) = (self.client, self.backend, self.model);
        let home = TempHome::new();
        client.write_settings(&home.home(), &model.url());
        Container {
            client,
            backend,
            model,
            home,
            cwd: self.cwd.clone(),
            bin: self.bin.clone(),
            lost: Default::default(),
        }
    }

    /// Replaces the home with an empty one. Returns the path of the old one.
    pub fn replace_home(&self) -> PathBuf {
        self.lost.set(self.lost.get() + 1);
        let lost = self.home.path().join(format!("lost-{}", self.lost.get()));
        std::fs::rename(self.home.home(), &lost).unwrap();
        std::fs::create_dir(self.home.home()).unwrap();
        self.client
            .write_settings(&self.home.home(), &self.model.url());
        lost
    }

    /// Runs `sessiond` with these arguments in the container.
    pub fn sessiond(&self, arguments: &[&str]) -> Ran {
        Ran(self
            .prepared(self.backend.command(&self.home, arguments))
            .output()
            .unwrap())
    }

    /// Returns the command `sessiond run --session ID -- claude …`.
    pub fn command(&self, session: Option<&str>, arguments: &[&str]) -> Command {
        let session: Vec<&str> = session.iter().flat_map(|id| ["--session", id]).collect();
        let run = [
            &["run"],
            &session[..],
            &["--", self.client.program()],
            arguments,
            self.client.flags(),
        ]
        .concat();
        self.prepared(self.backend.command(&self.home, &run))
    }

    /// `sessiond run --request JOB -- claude {session-args} …`: the same command for every start.
    pub fn job(&self, job: &str, prompt: &str) -> Command {
        let (arguments, stdin) = self.client.turn_with_placeholder(prompt);
        let run = [
            &["run", "--request", job, "--", self.client.program()],
            &arguments[..],
            self.client.flags(),
        ]
        .concat();
        let command = self.prepared(self.backend.command(&self.home, &run));
        self.with_stdin(command, stdin)
    }

    fn prepared(&self, mut command: Command) -> Command {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(
            std::iter::once(self.bin.clone()).chain(std::env::split_paths(&path)),
        );
        command
            .current_dir(&self.cwd)
            .env("PATH", path.unwrap())
            .stdin(Stdio::null());
        self.client.environment(
            &mut command,
            &self.home.path().join("tmp"),
            &self.model.url(),
        );
        command
    }

    fn turn(&self, session: Option<&str>, prompt: &str) -> Command {
        let (arguments, stdin) = self.client.turn(session, prompt);
        self.with_stdin(self.command(session, &arguments), stdin)
    }

    fn with_stdin(&self, mut command: Command, text: Option<&str>) -> Command {
        if let Some(text) = text {
            let file = self.home.path().join("prompt");
            std::fs::write(&file, text).unwrap();
            command.stdin(std::fs::File::open(file).unwrap());
        }
        command
    }

    /// Runs a command of this container to its end.
    #[track_caller]
    pub fn run_to_end(&self, mut command: Command) -> Ran {
        let files = ["out", "err"].map(|name| self.home.path().join(name));
        let [out, err] = files
            .each_ref()
            .map(|path| std::fs::File::create(path).unwrap());
        let mut run = Running(command.stdout(out).stderr(err).spawn().unwrap());
        let deadline = Instant::now() + MAX_TURN;
        let status = loop {
            if let Some(status) = run.0.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > deadline {
                kill_process_tree(&mut run);
                panic!(
                    "{command:?} does not end: {:?}",
                    files.map(|path| std::fs::read_to_string(path).unwrap())
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let [stdout, stderr] = files.map(|path| std::fs::read(path).unwrap());
        Ran(Output {
            status,
            stdout,
            stderr,
        })
    }

    /// Runs the first turn of a session. Returns its ID.
    #[track_caller]
    pub fn begin(&self, prompt: &str) -> String {
        self.run_to_end(self.turn(None, prompt)).ok();
        let listed = self.sessiond(&["ls", "--json"]).ok().json();
        let sessions = listed["sessions"].as_array().unwrap();
        assert_eq!(sessions.len(), 1, "{listed}");
        sessions[0]["id"].as_str().unwrap().to_owned()
    }

    /// Runs a further turn.
    #[track_caller]
    pub fn resume(&self, session: &str, prompt: &str) -> Ran {
        self.run_to_end(self.turn(Some(session), prompt)).ok()
    }

    /// Starts a further turn in the background.
    pub fn start(&self, session: &str, prompt: &str) -> Running {
        self.start_command(self.turn(Some(session), prompt))
    }

    /// Starts a command that runs while the test continues.
    pub fn start_command(&self, mut command: Command) -> Running {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.home.path().join("run.log"))
            .unwrap();
        let out = log.try_clone().unwrap();
        Running(command.stderr(log).stdout(out).spawn().unwrap())
    }

    /// The content of a session in this home.
    #[track_caller]
    pub fn record(&self, session: &str) -> String {
        self.client.record(&self.home.home(), session)
    }
}

/// The transcripts of a session in Claude Code's directory; several if it is in several projects.
pub fn transcripts(root: &Path, session: &str) -> Vec<PathBuf> {
    let projects = std::fs::read_dir(root.join("projects"))
        .into_iter()
        .flatten()
        .flatten();
    projects
        .map(|project| project.path().join(format!("{session}.jsonl")))
        .filter(|path| path.exists())
        .collect()
}

/// The one transcript of a session in a home.
#[track_caller]
pub fn transcript(home: &Path, session: &str) -> PathBuf {
    let found = transcripts(&home.join(".claude"), session);
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

/// The files of a home that belong to sessions, and their bytes.
pub fn session_files(home: &Path) -> Files {
    let mut files = files_below(&home.join(".claude"));
    files.retain(|path, _| {
        ["projects/", "tasks/", "file-history/"]
            .iter()
            .any(|directory| path.starts_with(directory))
            && !path.ends_with(".lock")
    });
    files
}

/// Checks that the files of one home are in the other, byte for byte; transcripts may be longer.
#[track_caller]
pub fn assert_restored(lost: &Path, home: &Path, what: &str) {
    let (before, now) = (session_files(lost), session_files(home));
    assert!(!before.is_empty(), "{what}: nothing was kept");
    for (path, bytes) in &before {
        let restored = now
            .get(path)
            .unwrap_or_else(|| panic!("{what}: {path} was not restored"));
        let appended = path.ends_with(".jsonl") && restored.starts_with(bytes);
        assert!(
            restored == bytes || appended,
            "{what}: {path} differs: {} bytes, {} restored",
            bytes.len(),
            restored.len()
        );
    }
}

/// Checks that the next request contains the whole conversation of an earlier one, in order, and
/// then `more`.
#[track_caller]
pub fn assert_continues(earlier: &Request, next: &Request, more: &[&str]) {
    let (earlier, next) = (conversation(earlier), conversation(next));
    assert!(
        next.len() > earlier.len() && next.starts_with(&earlier),
        "earlier: {earlier:#?}\nnext: {next:#?}"
    );
    let mut behind = next[earlier.len()..].iter();
    for words in more {
        assert!(
            behind.any(|line| line.contains(words)),
            "{words:?} is not behind it: {next:#?}"
        );
    }
}

/// Kills a process and its descendants, like a power loss.
pub fn kill_process_tree(run: &mut Running) {
    let mut tree = vec![run.0.id()];
    let mut at = 0;
    while at < tree.len() {
        let pid = tree[at];
        // A stopped process starts no others.
        signal(pid, Signal::STOP);
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten();
        for task in tasks {
            let children =
                std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            tree.extend(
                children
                    .split_whitespace()
                    .filter_map(|pid| pid.parse::<u32>().ok()),
            );
        }
        at += 1;
    }
    assert!(tree.len() > 1, "no client was running");
    tree.iter().for_each(|pid| signal(*pid, Signal::KILL));
    run.kill();
}

fn signal(pid: u32, signal: Signal) {
    // The process may have ended already.
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .map(|pid| kill_process(pid, signal).ok());
}
