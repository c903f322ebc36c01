//! A container in which a client runs under `sessiond run`: a disposable home and a working
//! directory.
//!
//! Owns the client's environment: nothing of the user who runs the tests, a fake key, a model on
//! loopback.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::client::Client;
use super::install::agents;
use super::model::{Model, Request, conversation};
use crate::support::TempHome;
use crate::support::backend::{Backend, Ran, Running};
use crate::support::files::{Files, files_below};

/// A turn takes seconds; one that does not end is a failure.
const PATIENCE: Duration = Duration::from_secs(180);

/// The model runs a command of Claude Code's.
pub fn bash(command: &str) -> Value {
    Client::ClaudeNew.shell(command)
}

/// Runs a scenario with a client on every backend.
pub fn everywhere(client: Client, scenario: impl Fn(&Container<'_>)) {
    for backend in Backend::all() {
        let model = Model::start();
        let Some(container) = Container::new(client, &backend, &model) else {
            return;
        };
        scenario(&container);
    }
}

/// Makes a test of each scenario for each client.
macro_rules! scenarios {
    (@ $name:ident $client:ident ($($scenario:ident),+ $(,)?)) => {
        mod $name { $(#[test] fn $scenario() { crate::clients::container::everywhere(crate::clients::client::Client::$client, super::$scenario) })+ }
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
    /// Where the client is started.
    pub cwd: PathBuf,
    bin: PathBuf,
    lost: std::cell::Cell<u32>,
}

impl<'a> Container<'a> {
    /// One with a directory of its own to work in; `None` where the test is to be skipped.
    pub fn new(client: Client, backend: &'a Backend, model: &'a Model) -> Option<Container<'a>> {
        let bin = client.bin(agents()?);
        let home = TempHome::new();
        let cwd = home.path().join("work");
        std::fs::create_dir(&cwd).unwrap();
        client.furnish(&home.home(), &model.url());
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

    /// Another one that works in the same directory.
    pub fn beside(&self) -> Container<'a> {
        let (client, backend, model) = (self.client, self.backend, self.model);
        let home = TempHome::new();
        client.furnish(&home.home(), &model.url());
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

    /// The home is thrown away, and there is a new one in its place. Answers where the old one can still be looked at.
    pub fn throw_away(&self) -> PathBuf {
        self.lost.set(self.lost.get() + 1);
        let lost = self.home.path().join(format!("lost-{}", self.lost.get()));
        std::fs::rename(self.home.home(), &lost).unwrap();
        std::fs::create_dir(self.home.home()).unwrap();
        self.client.furnish(&self.home.home(), &self.model.url());
        lost
    }

    /// `sessiond` with these arguments, beside the client.
    pub fn sessiond(&self, arguments: &[&str]) -> Ran {
        Ran(self
            .prepared(self.backend.command(&self.home, arguments))
            .output()
            .unwrap())
    }

    /// `sessiond run --session ID -- claude …`, as people write it.
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
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = run.0.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > deadline {
                switch_off(&mut run);
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

    /// The first turn of a session; answers the id that the client gave it.
    #[track_caller]
    pub fn begin(&self, prompt: &str) -> String {
        self.run_to_end(self.turn(None, prompt)).ok();
        let listed = self.sessiond(&["ls", "--json"]).ok().json();
        let sessions = listed["sessions"].as_array().unwrap();
        assert_eq!(sessions.len(), 1, "{listed}");
        sessions[0]["id"].as_str().unwrap().to_owned()
    }

    /// A further turn.
    #[track_caller]
    pub fn resume(&self, session: &str, prompt: &str) -> Ran {
        self.run_to_end(self.turn(Some(session), prompt)).ok()
    }

    /// A further turn that goes on while the test does.
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

    /// What this home has of a session.
    #[track_caller]
    pub fn record(&self, session: &str) -> String {
        self.client.record(&self.home.home(), session)
    }
}

/// The transcripts of a session in a directory of Claude Code's: more than one, where it stands in more than one project.
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
pub fn kept(home: &Path) -> Files {
    let mut files = files_below(&home.join(".claude"));
    files.retain(|path, _| {
        ["projects/", "tasks/", "file-history/"]
            .iter()
            .any(|directory| path.starts_with(directory))
            && !path.ends_with(".lock")
    });
    files
}

/// What was in one home is in the other, byte for byte; transcripts may have gone on.
#[track_caller]
pub fn assert_restored(lost: &Path, home: &Path, what: &str) {
    let (before, now) = (kept(lost), kept(home));
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

/// The next request holds the whole conversation of an earlier one, in its order, and then `more`.
#[track_caller]
pub fn assert_goes_on(earlier: &Request, next: &Request, more: &[&str]) {
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

/// Ends a process and all that it started, as a machine that is switched off.
pub fn switch_off(run: &mut Running) {
    let mut tree = vec![run.0.id()];
    let mut at = 0;
    while at < tree.len() {
        let pid = tree[at];
        // Stopped, it starts nothing more.
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
    // One that has ended by itself is what is wanted.
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .map(|pid| kill_process(pid, signal).ok());
}
