//! The program under test on a backend: files with SQLite, or an S3 server with PostgreSQL.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

pub use rustix::process::Signal;
use rustix::process::{Pid, kill_process};

use super::servers::{S3, postgres, s3};
use super::{PATIENCE, TempHome, sessiond};

/// The store and the index of a test, as settings of the program.
pub struct Backend {
    pub name: &'static str,
    env: Vec<(&'static str, String)>,
    /// Contains the file store and the index file.
    storage: TempHome,
}

impl Backend {
    /// A directory and an SQLite file.
    pub fn file() -> Backend {
        let storage = TempHome::new();
        let env = vec![
            (
                "SESSIOND_STORE",
                format!("file://{}", storage.path().join("bucket").display()),
            ),
            (
                "SESSIOND_INDEX",
                format!("sqlite://{}", storage.path().join("index.db").display()),
            ),
        ];
        Backend {
            name: "file+sqlite",
            env,
            storage,
        }
    }

    /// A new bucket and a new database on the shared servers.
    pub fn servers() -> Option<Backend> {
        let (s3, postgres) = (s3()?, postgres()?);
        Some(Backend::on(
            &s3.endpoint,
            &s3.fresh_bucket(),
            &postgres.fresh_database(),
        ))
    }

    /// A bucket at an endpoint, which may be a proxy, and a database.
    pub fn on(endpoint: &str, bucket: &str, database: &str) -> Backend {
        Backend::on_server(
            s3().expect("the caller has started the server"),
            endpoint,
            bucket,
            database,
        )
    }

    /// A bucket on a server of the test's own, and a database.
    pub fn on_server(s3: &S3, endpoint: &str, bucket: &str, database: &str) -> Backend {
        let env = vec![
            (
                "SESSIOND_STORE",
                format!("s3://{bucket}/some/prefix?endpoint={endpoint}"),
            ),
            ("SESSIOND_INDEX", database.to_owned()),
            ("AWS_ACCESS_KEY_ID", s3.access_key.clone()),
            ("AWS_SECRET_ACCESS_KEY", s3.secret_key.clone()),
        ];
        Backend {
            name: "s3+postgres",
            env,
            storage: TempHome::new(),
        }
    }

    /// Returns all backends, for tests that are outside the quick loop anyway. Others use
    /// `on_each_backend!`.
    pub fn all() -> Vec<Backend> {
        [Some(Backend::file()), Backend::servers()]
            .into_iter()
            .flatten()
            .collect()
    }

    /// The directory of the file store and the index file.
    pub fn path(&self) -> &Path {
        self.storage.path()
    }

    /// The URL of the index.
    pub fn index_url(&self) -> &str {
        let index = self.env.iter().find(|(name, _)| *name == "SESSIOND_INDEX");
        &index.expect("every backend has an index").1
    }

    /// Sets or replaces a variable.
    pub fn set(&mut self, name: &'static str, value: impl Into<String>) {
        self.env.retain(|(known, _)| *known != name);
        self.env.push((name, value.into()));
    }

    /// Removes a variable.
    pub fn unset(&mut self, name: &str) {
        self.env.retain(|(known, _)| *known != name);
    }

    /// Returns a `sessiond` command with these arguments and settings in a home directory.
    pub fn command(&self, home: &TempHome, arguments: &[&str]) -> Command {
        let mut command = home.command(&sessiond());
        command
            .envs(self.env.iter().map(|(name, value)| (*name, value.as_str())))
            .args(arguments)
            .stdin(Stdio::null());
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, home: &TempHome, arguments: &[&str]) -> Ran {
        Ran(self.command(home, arguments).output().unwrap())
    }

    /// Starts a daemon and waits until it is ready.
    pub fn daemon(&self, home: &TempHome, arguments: &[&str]) -> Running {
        let ready = home.path().join(format!("ready-{}", std::process::id()));
        let _ = std::fs::remove_file(&ready);
        let mut command = self.command(home, &["daemon"]);
        command.env("SESSIOND_FLUSH_INTERVAL", "100ms");
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(home.path().join("daemon.log"))
            .unwrap();
        command
            .args(arguments)
            .arg("--ready-file")
            .arg(&ready)
            .stderr(log)
            .stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        eventually("the daemon is ready", || {
            if let Some(status) = child.try_wait().unwrap() {
                panic!(
                    "the daemon ended with {status}: {}",
                    std::fs::read_to_string(home.path().join("daemon.log")).unwrap()
                );
            }
            ready.exists()
        });
        Running(child)
    }
}

/// Sends a signal to a process.
pub fn send_signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid as i32).expect("a process ID is not 0");
    kill_process(pid, signal).unwrap();
}

/// A process that is killed on drop.
pub struct Running(pub Child);

impl Running {
    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        send_signal(self.0.id(), signal);
    }

    /// Sends SIGTERM; returns the exit code and the time until the end.
    pub fn stop(mut self) -> (Option<i32>, Duration) {
        let started = Instant::now();
        self.signal(Signal::TERM);
        (self.code(), started.elapsed())
    }

    /// Waits for its end; returns the exit code, or none if a signal ended it.
    pub fn code(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(
                Instant::now() < deadline,
                "process {} still runs",
                self.0.id()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The result of a command.
pub struct Ran(pub Output);

impl Ran {
    pub fn code(&self) -> i32 {
        self.0.status.code().unwrap_or(-1)
    }

    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.0.stdout).into_owned()
    }

    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.0.stderr).into_owned()
    }

    /// Requires success.
    #[track_caller]
    pub fn ok(self) -> Ran {
        assert!(
            self.0.status.success(),
            "exit {}\n{}\n{}",
            self.code(),
            self.out(),
            self.err()
        );
        self
    }

    /// Requires this exit code, an error that contains `error`, and a hint that contains `hint`
    /// unless that is empty.
    #[track_caller]
    pub fn fails(self, code: i32, error: &str, hint: &str) -> Ran {
        let stderr = self.err();
        assert_eq!(self.code(), code, "{stderr}");
        assert!(
            stderr.contains("error: ") && stderr.contains(error),
            "{stderr}"
        );
        assert!(
            hint.is_empty()
                || stderr
                    .lines()
                    .any(|line| line.starts_with("hint: ") && line.contains(hint)),
            "{stderr}"
        );
        self
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.0.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}\n{}", self.out(), self.err()))
    }
}

/// Waits until a condition holds.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the path of a session's transcript in a home directory.
pub fn transcript(home: &TempHome, session: &str) -> PathBuf {
    home.home()
        .join(format!(".claude/projects/-work-app/{session}.jsonl"))
}
