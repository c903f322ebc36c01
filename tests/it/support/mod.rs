//! The harness of the integration tests.
//!
//! - `backend`: the program on a backend, in a home of its own ([`TempHome`]).
//! - `storage`, `writer`, `world`: the library on a store and an index, without a process.
//! - `servers`, `proxy`, `faulty_store`, `counting_directory`, `small_disk`: what the tests run
//!   against, and the faults that they inject.
//! - `files`, `http`, `rng`, `transcripts`, `load`, `shell_blocks`: inputs and checks.
//!
//! # The quick loop
//! `cargo quick` runs the tests that need neither servers nor other tools and that take little
//! time. A test outside of it has the reason in its name: [`on_each_backend`], [`needs_servers`],
//! [`needs_tools`] and [`slow`] put it there, and `.cargo/config.toml` skips these names.

#![allow(
    dead_code,
    reason = "the harness offers more than the current tests use"
)]

pub mod backend;
pub mod counting_directory;
pub mod faulty_store;
pub mod fetch;
pub mod files;
pub mod http;
pub mod load;
pub mod proxy;
pub mod reaper;
pub mod rng;
pub mod servers;
pub mod shell_blocks;
pub mod small_disk;
pub mod storage;
pub mod transcripts;
pub mod world;
pub mod writer;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Maximum time for anything a test waits for. A busy machine needs less; a hang becomes a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The program under test.
pub fn sessiond() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_sessiond"))
}

/// A temporary directory with an empty home directory, so that no test uses the real one.
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

    /// Returns a command that inherits only PATH: no XDG directories, credentials or settings of
    /// the user who runs the tests.
    pub fn command(&self, bin: &Path) -> Command {
        let mut command = bare_command(bin, self.path());
        command
            .env("HOME", self.home())
            .env("TMPDIR", self.path().join("tmp"))
            .current_dir(self.home());
        command
    }
}

/// Waits for a future, on a thread of its own, because an async test already runs inside a runtime.
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

/// Returns a command in `dir` that inherits only PATH.
fn bare_command(bin: &Path, dir: &Path) -> Command {
    let mut command = Command::new(bin);
    command
        .env_clear()
        .env("HOME", dir)
        .env("TMPDIR", dir)
        .current_dir(dir);
    if bin == sessiond() {
        // Tests run concurrently, and all would use the same default port.
        command.env("SESSIOND_HTTP", "off");
    }
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command
}

/// Runs a command; the error contains its output.
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

/// Reports that a test cannot run on this machine. In CI that is a failure.
#[track_caller]
pub fn skip(reason: &str) {
    use std::io::Write;
    assert!(
        std::env::var_os("CI").is_none_or(|ci| ci.is_empty()),
        "CI must run every test: {reason}"
    );
    // Not eprintln!: libtest captures that and discards it when the test passes.
    writeln!(std::io::stderr(), "skipped: {reason}").ok();
}

/// Whether tests shall rewrite their expected output instead of comparing with it.
pub fn is_update() -> bool {
    std::env::var_os("SESSIOND_TEST_UPDATE").is_some_and(|value| !value.is_empty())
}

/// Returns a prepared value, or skips the test with the reason why it could not be prepared.
pub fn or_skip<T>(prepared: Result<T, String>) -> Option<T> {
    prepared.map_err(|reason| skip(&reason)).ok()
}

/// Turns `fn test(backend: Backend)` into two tests: on files with SQLite, and on S3 with
/// PostgreSQL.
macro_rules! on_each_backend {
    ($($test:ident),+ $(,)?) => { $(
        mod $test {
            #[test]
            fn on_files() {
                super::$test($crate::support::backend::Backend::file())
            }
            #[test]
            fn needs_servers() {
                if let Some(backend) = $crate::support::backend::Backend::servers() {
                    super::$test(backend)
                }
            }
        }
    )+ };
}
pub(crate) use on_each_backend;

/// Turns `async fn test(storage: Storage)` into three tests: on files, on a bucket, and on a bucket
/// that ignores conditional creates. After `slow:`, the one on files is outside the quick loop, too.
macro_rules! on_each_storage {
    (slow: $($test:ident),+ $(,)?) => {
        $crate::support::on_each_storage!(@ slow_on_files $($test)+);
    };
    ($($test:ident),+ $(,)?) => {
        $crate::support::on_each_storage!(@ on_files $($test)+);
    };
    (@ $on_files:ident $($test:ident)+) => { $(
        mod $test {
            use $crate::support::storage::Storage;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $on_files() {
                super::$test(Storage::files()).await
            }
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn on_a_bucket_needs_servers() {
                if let Some(storage) = Storage::bucket().await {
                    super::$test(storage).await
                }
            }
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn on_a_lax_bucket_needs_servers() {
                if let Some(storage) = Storage::lax_bucket().await {
                    super::$test(storage).await
                }
            }
        }
    )+ };
}
pub(crate) use on_each_storage;

/// Turns functions into tests outside the quick loop, whose names contain the reason.
macro_rules! outside_quick_loop {
    ($reason:ident: async $($test:ident),+ $(,)?) => { $(
        mod $test {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $reason() {
                super::$test().await
            }
        }
    )+ };
    ($reason:ident: $($test:ident),+ $(,)?) => { $(
        mod $test {
            #[test]
            fn $reason() {
                super::$test()
            }
        }
    )+ };
}
pub(crate) use outside_quick_loop;

/// Turns functions into tests that need an S3 server or PostgreSQL.
macro_rules! needs_servers {
    ($($tests:tt)+) => { $crate::support::outside_quick_loop!(needs_servers: $($tests)+); };
}
pub(crate) use needs_servers;

/// Turns functions into tests that need agents or packages from npm, PyPI or Debian.
macro_rules! needs_tools {
    ($($tests:tt)+) => { $crate::support::outside_quick_loop!(needs_tools: $($tests)+); };
}
pub(crate) use needs_tools;

/// Turns functions into tests that take several seconds.
macro_rules! slow {
    ($($tests:tt)+) => { $crate::support::outside_quick_loop!(slow: $($tests)+); };
}
pub(crate) use slow;
