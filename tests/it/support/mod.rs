//! What the integration tests stand on: owns temporary homes and the way into async code; servers, proxies and tools are below.

#![allow(
    dead_code,
    reason = "a support module offers more than the tests of one moment use"
)]

pub mod backend;
pub mod fetch;
pub mod load;
pub mod proxy;
pub mod reaper;
pub mod servers;
pub mod small_disk;
pub mod transcripts;
pub mod world;
pub mod writers;

use std::path::{Path, PathBuf};
use std::process::Command;

/// The program under test.
pub fn sessiond() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_sessiond"))
}

/// A temporary directory with an empty home in it, so that no test sees the real one.
pub struct TempHome(tempfile::TempDir);

impl TempHome {
    pub fn new() -> TempHome {
        let root = tempfile::Builder::new()
            .prefix("sessiond-it-")
            .tempdir()
            .unwrap();
        for directory in ["home", "tmp"] {
            std::fs::create_dir(root.path().join(directory)).unwrap();
        }
        TempHome(root)
    }

    /// The temporary directory, the parent of the home.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn home(&self) -> PathBuf {
        self.path().join("home")
    }

    /// A command that inherits nothing but PATH: no XDG directories, no credentials, no settings of whoever runs the tests.
    pub fn command(&self, bin: &Path) -> Command {
        let mut command = bare_command(bin, self.path());
        command
            .env("HOME", self.home())
            .env("TMPDIR", self.path().join("tmp"))
            .current_dir(self.home());
        command
    }
}

/// Waits for a future from anywhere: on a thread of its own, since a test that is async already runs inside a runtime.
pub fn block_on<T: Send>(future: impl Future<Output = T> + Send) -> T {
    std::thread::scope(|scope| {
        let runtime = || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
        };
        scope
            .spawn(move || runtime().block_on(future))
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A command at home in `dir`, with PATH and nothing else of our environment.
fn bare_command(bin: &Path, dir: &Path) -> Command {
    let mut command = Command::new(bin);
    command
        .env_clear()
        .env("HOME", dir)
        .env("TMPDIR", dir)
        .current_dir(dir);
    if bin == sessiond() {
        // Tests run side by side, and the default port is one.
        command.env("SESSIOND_HTTP", "off");
    }
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command
}

/// Runs a command to its end; the error carries what it printed.
pub fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(std::process::Stdio::null())
        .output()
        .map_err(|e| format!("run {name}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    Err(format!(
        "run {name}: {}: {}",
        output.status,
        String::from_utf8_lossy(&text).trim()
    ))
}

/// Says that a test does not run here, and why. In CI that is a failure.
#[track_caller]
pub fn skip(why: &str) {
    use std::io::Write;
    assert!(
        std::env::var_os("CI").is_none_or(|ci| ci.is_empty()),
        "a skip is a failure in CI: {why}"
    );
    // Not eprintln: the test harness would keep that to itself when the test passes.
    writeln!(std::io::stderr(), "skipped: {why}").ok();
}

/// What was made ready, or a skip that says why it was not.
pub fn or_skip<T>(ready: Result<T, String>) -> Option<T> {
    ready.map_err(|why| skip(&why)).ok()
}
