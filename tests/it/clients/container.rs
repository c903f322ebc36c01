//! A container in which a client runs under `sessiond run`: a home that can be thrown away and a folder that is worked in.
//!
//! Owns the clients' environment: nothing of whoever runs the tests, a key that is none, a model on loopback.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::anthropic::conversation;
use super::install::agents;
use super::model::{Model, Request, call};
use crate::support::TempHome;
use crate::support::backend::{Backend, Ran, Running};
use crate::support::writers::{Files, files_in};

/// Which Claude Code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    New,
    Old,
}

/// A new session's id.
pub fn id() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// The model runs a command.
pub fn bash(command: &str) -> Value {
    call("Bash", json!({ "command": command, "description": "Run it" }))
}

/// Runs a scenario with a version on every backend.
pub fn everywhere(version: Version, scenario: impl Fn(&Container<'_>)) {
    for backend in Backend::all() {
        let model = Model::start();
        let Some(container) = Container::new(version, &backend, &model) else { return };
        scenario(&container);
    }
}

/// Makes a test of each scenario for each version.
macro_rules! both_versions {
    ($($scenario:ident),+ $(,)?) => {
        mod new { $(#[test] fn $scenario() { crate::clients::container::everywhere(crate::clients::container::Version::New, super::$scenario) })+ }
        mod old { $(#[test] fn $scenario() { crate::clients::container::everywhere(crate::clients::container::Version::Old, super::$scenario) })+ }
    };
}
pub(super) use both_versions;

/// A container.
pub struct Container<'a> {
    pub version: Version,
    pub backend: &'a Backend,
    pub model: &'a Model,
    pub home: TempHome,
    /// Where the client is started.
    pub cwd: PathBuf,
    bin: PathBuf,
    lost: std::cell::Cell<u32>,
}

impl<'a> Container<'a> {
    /// One with a folder of its own to work in; `None` where the test is to be skipped.
    pub fn new(version: Version, backend: &'a Backend, model: &'a Model) -> Option<Container<'a>> {
        let agents = agents()?;
        let bin = match version {
            Version::New => agents.claude_new(),
            Version::Old => agents.claude_old(),
        };
        let home = TempHome::new();
        let cwd = home.path().join("work");
        std::fs::create_dir(&cwd).unwrap();
        Some(Container { version, backend, model, home, cwd, bin, lost: Default::default() })
    }

    /// Another one that works in the same folder.
    pub fn beside(&self) -> Container<'a> {
        let (home, cwd, bin) = (TempHome::new(), self.cwd.clone(), self.bin.clone());
        Container { version: self.version, backend: self.backend, model: self.model, home, cwd, bin, lost: Default::default() }
    }

    /// The home is thrown away, and there is an empty one in its place. Answers where the old one can still be looked at.
    pub fn throw_away(&self) -> PathBuf {
        self.lost.set(self.lost.get() + 1);
        let lost = self.home.path().join(format!("lost-{}", self.lost.get()));
        std::fs::rename(self.home.home(), &lost).unwrap();
        std::fs::create_dir(self.home.home()).unwrap();
        lost
    }

    /// `sessiond` with these arguments, beside the client.
    pub fn sessiond(&self, arguments: &[&str]) -> Ran {
        Ran(self.prepared(self.backend.command(&self.home, arguments)).output().unwrap())
    }

    /// `sessiond run --session ID -- claude …`, as people write it.
    pub fn command(&self, session: &str, arguments: &[&str]) -> Command {
        let mut command = self.prepared(self.backend.command(&self.home, &["run", "--session", session, "--", "claude"]));
        command.args(arguments).args(["--output-format", "stream-json", "--verbose", "--permission-mode", "bypassPermissions"]);
        command
    }

    fn prepared(&self, mut command: Command) -> Command {
        let tmp = self.home.path().join("tmp");
        let path = std::env::join_paths(
            std::iter::once(self.bin.clone()).chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
        );
        command.current_dir(&self.cwd).env("PATH", path.unwrap()).env("CLAUDE_CODE_TMPDIR", tmp);
        command.env("ANTHROPIC_BASE_URL", self.model.url()).env("ANTHROPIC_API_KEY", "no-key");
        // It refuses to go without asking as root, unless it is told that this is a sandbox.
        for name in ["IS_SANDBOX", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] {
            command.env(name, "1");
        }
        // File history in print mode, and in the new one the tools for tasks.
        command.env("CLAUDE_CODE_ENABLE_SDK_FILE_CHECKPOINTING", "1").env("CLAUDE_CODE_ENABLE_TODO_TOOLS", "1");
        // Where the new one is a remote worker, this is on.
        command.env("CLAUDE_CODE_TRANSCRIPT_LOCAL_GC", "1").stdin(Stdio::null());
        command
    }

    /// The first turn of a session.
    #[track_caller]
    pub fn begin(&self, session: &str, prompt: &str) -> Ran {
        Ran(self.command(session, &["--session-id", session, "-p", prompt]).output().unwrap()).ok()
    }

    /// A further turn.
    #[track_caller]
    pub fn resume(&self, session: &str, prompt: &str) -> Ran {
        Ran(self.command(session, &["--resume", session, "-p", prompt]).output().unwrap()).ok()
    }

    /// A turn that goes on while the test does.
    pub fn start(&self, session: &str, how: &str, prompt: &str) -> Running {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.home.path().join("run.log")).unwrap();
        let out = log.try_clone().unwrap();
        Running(self.command(session, &[how, session, "-p", prompt]).stderr(log).stdout(out).spawn().unwrap())
    }

    /// The transcripts of a session in a home: more than one, where it stands in more than one project.
    pub fn transcripts(home: &Path, session: &str) -> Vec<PathBuf> {
        Self::transcripts_below(&home.join(".claude"), session)
    }

    /// The same in a copy of the client's folder.
    pub fn transcripts_below(root: &Path, session: &str) -> Vec<PathBuf> {
        let projects = std::fs::read_dir(root.join("projects")).into_iter().flatten().flatten();
        projects.map(|project| project.path().join(format!("{session}.jsonl"))).filter(|path| path.exists()).collect()
    }

    /// The transcript of a session in this container.
    #[track_caller]
    pub fn transcript(&self, session: &str) -> PathBuf {
        let found = Self::transcripts(&self.home.home(), session);
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].clone()
    }
}

/// The files of a home that belong to sessions, and their bytes.
pub fn kept(home: &Path) -> Files {
    let mut files = files_in(&home.join(".claude"));
    files.retain(|path, _| {
        ["projects/", "tasks/", "file-history/"].iter().any(|folder| path.starts_with(folder)) && !path.ends_with(".lock")
    });
    files
}

/// What was in one home is in the other, byte for byte; transcripts may have gone on.
#[track_caller]
pub fn assert_restored(lost: &Path, home: &Path, what: &str) {
    let (before, now) = (kept(lost), kept(home));
    assert!(!before.is_empty(), "{what}: nothing was kept");
    for (path, bytes) in &before {
        let restored = now.get(path).unwrap_or_else(|| panic!("{what}: {path} was not restored"));
        let appended = path.ends_with(".jsonl") && restored.starts_with(bytes);
        assert!(restored == bytes || appended, "{what}: {path} differs: {} bytes, {} restored", bytes.len(), restored.len());
    }
}

/// The next request holds the whole conversation of an earlier one, in its order, and then `more`.
#[track_caller]
pub fn assert_goes_on(earlier: &Request, next: &Request, more: &[&str]) {
    let (earlier, next) = (conversation(earlier), conversation(next));
    assert!(next.len() > earlier.len() && next.starts_with(&earlier), "earlier: {earlier:#?}\nnext: {next:#?}");
    let mut behind = next[earlier.len()..].iter();
    for words in more {
        assert!(behind.any(|line| line.contains(words)), "{words:?} is not behind it: {next:#?}");
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
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for task in tasks {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            tree.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        at += 1;
    }
    assert!(tree.len() > 1, "no client was running");
    tree.iter().for_each(|pid| signal(*pid, Signal::KILL));
    run.kill();
}

fn signal(pid: u32, signal: Signal) {
    // One that has ended by itself is what is wanted.
    i32::try_from(pid).ok().and_then(Pid::from_raw).map(|pid| kill_process(pid, signal).ok());
}

/// The lines of a transcript that are whole.
pub fn lines(transcript: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(transcript).unwrap();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}
