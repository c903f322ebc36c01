//! The two ways sessiond is run: a directory and SQLite, or a real S3 server and a real PostgreSQL; and the program on them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::servers::{S3, postgres, s3};
use super::{TempHome, sessiond};

/// Where a test keeps its sessions.
pub struct Backend {
    pub name: &'static str,
    env: Vec<(&'static str, String)>,
    /// Holds the directory of the file store.
    place: TempHome,
}

impl Backend {
    /// A directory and an SQLite file.
    pub fn file() -> Backend {
        let place = TempHome::new();
        let env = vec![
            (
                "SESSIOND_STORE",
                format!("file://{}", place.path().join("bucket").display()),
            ),
            (
                "SESSIOND_INDEX",
                format!("sqlite://{}", place.path().join("index.db").display()),
            ),
        ];
        Backend {
            name: "file+sqlite",
            env,
            place,
        }
    }

    /// A fresh bucket and a fresh database of the shared servers.
    pub fn servers() -> Option<Backend> {
        let (s3, postgres) = (s3()?, postgres()?);
        Some(Backend::on(
            &s3.endpoint,
            &s3.fresh_bucket(),
            &postgres.fresh_database(),
        ))
    }

    /// A bucket behind an endpoint (a proxy, perhaps) and a database.
    pub fn on(endpoint: &str, bucket: &str, database: &str) -> Backend {
        Backend::of(
            s3().expect("the caller has a server"),
            endpoint,
            bucket,
            database,
        )
    }

    /// The same, with the keys of a server of the test's own.
    pub fn of(s3: &S3, endpoint: &str, bucket: &str, database: &str) -> Backend {
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
            place: TempHome::new(),
        }
    }

    /// Both, as far as they can be had; in CI both are there or the run fails.
    pub fn all() -> Vec<Backend> {
        [Some(Backend::file()), Backend::servers()]
            .into_iter()
            .flatten()
            .collect()
    }

    /// Where this backend keeps what it keeps on disk.
    pub fn path(&self) -> &Path {
        self.place.path()
    }

    /// Sets or replaces a variable.
    pub fn set(&mut self, name: &'static str, value: impl Into<String>) {
        self.env.retain(|(known, _)| *known != name);
        self.env.push((name, value.into()));
    }

    /// Takes a variable away.
    pub fn unset(&mut self, name: &str) {
        self.env.retain(|(known, _)| *known != name);
    }

    /// `sessiond` with these arguments in that home, and nothing else in its environment.
    pub fn command(&self, home: &TempHome, arguments: &[&str]) -> Command {
        let mut command = home.command(&sessiond());
        command
            .envs(self.env.iter().map(|(name, value)| (*name, value.as_str())))
            .args(arguments)
            .stdin(Stdio::null());
        command
    }

    /// Runs it to its end.
    pub fn run(&self, home: &TempHome, arguments: &[&str]) -> Ran {
        Ran(self.command(home, arguments).output().unwrap())
    }

    /// Starts a daemon and waits until it says that it is ready.
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

/// A process that is killed when it goes out of sight.
pub struct Running(pub Child);

impl Running {
    /// kill -9.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .args([format!("-{name}"), self.0.id().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
    }

    /// Waits for its end; answers the exit code, or none if a signal ended it.
    pub fn code(&mut self) -> Option<i32> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(
                Instant::now() < deadline,
                "process {} does not end",
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

/// What a run of the program gave.
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

    /// It went well.
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

    /// It failed with that code, said so, and said what to try where `hint` is not empty.
    #[track_caller]
    pub fn fails(self, code: i32, error: &str, hint: &str) -> Ran {
        let said = self.err();
        assert_eq!(self.code(), code, "{said}");
        assert!(said.contains("error: ") && said.contains(error), "{said}");
        assert!(
            hint.is_empty()
                || said
                    .lines()
                    .any(|line| line.starts_with("hint: ") && line.contains(hint)),
            "{said}"
        );
        self
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.0.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}\n{}", self.out(), self.err()))
    }
}

/// Waits until something is so.
#[track_caller]
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !so() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The transcript of a session in a home.
pub fn transcript(home: &TempHome, session: &str) -> PathBuf {
    home.home()
        .join(format!(".claude/projects/-work-app/{session}.jsonl"))
}

/// Appends whole lines to a file, making its directory.
pub fn append(path: &Path, lines: &str) {
    use std::io::Write;
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut file = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .unwrap();
    file.write_all(lines.as_bytes()).unwrap();
}
