//! `demo`: streams, kills and restores a sample session on this machine, and compares the bytes.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::cli::{exit, print};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Digest;
use crate::sys::{Rng, SystemRng};

/// The ID of the sample session.
const SESSION: &str = "0b5e551d-0000-4000-8000-00000000d340";
/// The path of its transcript below the home directory.
const TRANSCRIPT: &str = ".claude/projects/-work-app/0b5e551d-0000-4000-8000-00000000d340.jsonl";
/// The sample agent exits after this many lines if nothing kills it.
const MAX_LINES: u32 = 2000;
/// How often the demo checks the transcript of the sample agent, and how many times.
const CHECK_INTERVAL: Duration = Duration::from_millis(25);
const MAX_CHECKS: u32 = 400;

/// Stream, kill and restore a sample session on this machine
///
/// Needs no server and no agent, and touches nothing outside a temporary directory.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond demo")]
pub struct Args {
    /// Keep the temporary directory, and print its path
    #[arg(long)]
    pub keep: bool,

    /// Act as the sample agent: append to this transcript until killed
    #[arg(long, hide = true, value_name = "FILE")]
    pub write: Option<PathBuf>,
}

/// Runs the demo.
pub fn run(args: Args) -> Result<u8> {
    if let Some(path) = &args.write {
        return write(path).map(|()| exit::OK);
    }
    let directory = std::env::temp_dir().join(format!("sessiond-demo-{:016x}", SystemRng.next()));
    let demo = Demo {
        directory: directory.clone(),
        program: std::env::current_exe()
            .map_err(|cause| Error::io("find the path of sessiond", cause))?,
    };
    let result = run_steps(&demo);
    if args.keep {
        print::line(format_args!(
            "\nkept the temporary directory {}",
            directory.display()
        ))?;
    } else if let Err(cause) = std::fs::remove_dir_all(&directory) {
        tracing::warn!(%cause, directory = %directory.display(), "cannot remove the temporary directory");
    }
    result.map(|()| exit::OK)
}

/// The temporary directory and the program of the demo.
struct Demo {
    directory: PathBuf,
    program: PathBuf,
}

/// A child process that is killed when it is dropped.
struct ChildProcess(Child);

impl ChildProcess {
    fn kill(&mut self) -> Result<()> {
        self.0
            .kill()
            .and_then(|()| self.0.wait())
            .map(|_| ())
            .map_err(|cause| Error::io("kill a process of the demo", cause))
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Demo {
    fn home(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn command(&self, home: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .env_clear()
            .env("HOME", self.home(home))
            .env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env(
            "SESSIOND_STORE",
            format!("file://{}", self.directory.join("bucket").display()),
        );
        command.env(
            "SESSIOND_INDEX",
            format!("sqlite://{}", self.directory.join("index.db").display()),
        );
        command
            .env("SESSIOND_HTTP", "off")
            .env("SESSIOND_LOG", "warn")
            .current_dir(&self.directory)
            .args(arguments)
            .stdin(Stdio::null());
        command
    }

    fn start(&self, home: &str, arguments: &[&str]) -> Result<ChildProcess> {
        self.command(home, arguments)
            .spawn()
            .map(ChildProcess)
            .map_err(|cause| Error::io("start a process of the demo", cause))
    }

    /// Runs a command, and prints it with its output.
    fn run(&self, home: &str, arguments: &[&str]) -> Result<()> {
        print::line(format_args!("$ sessiond {}", arguments.join(" ")))?;
        let output = self
            .command(home, arguments)
            .stderr(Stdio::inherit())
            .output()
            .map_err(|cause| Error::io("run sessiond", cause))?;
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .try_for_each(|line| print::line(format_args!("  {line}")))?;
        if output.status.success() {
            Ok(())
        } else {
            Err(Error::new(
                ErrorKind::Internal,
                format!("sessiond {} failed", arguments.join(" ")),
            ))
        }
    }
}

fn run_steps(demo: &Demo) -> Result<()> {
    let read = |home: &str| {
        std::fs::read(demo.home(home).join(TRANSCRIPT))
            .map_err(|cause| Error::io("read the transcript", cause))
    };
    ["first-container", "second-container"]
        .iter()
        .try_for_each(|home| std::fs::create_dir_all(demo.home(home)))
        .map_err(|cause| Error::io("create the directories of the demo", cause))?;
    print::line("1. A container runs an agent, which writes a transcript, and a sessiond daemon.")?;
    let mut daemon = demo.start("first-container", &["daemon"])?;
    let transcript = demo.home("first-container").join(TRANSCRIPT);
    let mut agent = demo.start(
        "first-container",
        &["demo", "--write", &transcript.to_string_lossy()],
    )?;
    wait_for(&transcript)?;
    std::thread::sleep(Duration::from_secs(2));

    print::line("2. A flush makes everything on disk durable. The agent continues.")?;
    let durable = read("first-container")?.len();
    demo.run("first-container", &["flush", "--wait"])?;
    std::thread::sleep(Duration::from_millis(700));

    print::line(
        "3. kill -9 stops both in the middle of a turn. The container's home directory is lost.",
    )?;
    agent.kill()?;
    daemon.kill()?;
    let written = read("first-container")?;
    let lost_home = demo.directory.join("lost");
    std::fs::rename(demo.home("first-container"), &lost_home)
        .map_err(|cause| Error::io("move the first home directory", cause))?;

    print::line("4. Another container with an empty home directory restores the session.")?;
    demo.run("second-container", &["restore", &SESSION[..8]])?;
    let restored = read("second-container")?;

    compare(&written, &restored, durable)?;

    print::line("6. You can inspect the stored session with and without sessiond.")?;
    demo.run("second-container", &["ls"])?;
    demo.run("second-container", &["verify", "--all"])?;
    print::line("  without sessiond: zcat …/log/000000000002.gz | tail -n +2 | jq .")?;
    print::line(
        "\nAs a container's entrypoint: sessiond run --request \"$JOB\" -- claude {session-args}",
    )
}

/// Compares the restored transcript with the one that the agent wrote.
fn compare(written: &[u8], restored: &[u8], durable: usize) -> Result<()> {
    let same = written.get(..restored.len()).unwrap_or_default();
    print::line("5. The demo compares both transcripts byte by byte.")?;
    let line = |name: &str, bytes: usize, digest: String| {
        print::line(format_args!("  {name:<23} {bytes:>8} bytes{digest}"))
    };
    let digest = |bytes: &[u8]| format!(", sha256 {}", Digest::of(bytes));
    line("written by the agent", written.len(), String::new())?;
    line("acknowledged as durable", durable, String::new())?;
    line("restored", restored.len(), digest(restored))?;
    line("original, same length", same.len(), digest(same))?;
    if same != restored || restored.len() < durable || restored.last() != Some(&b'\n') {
        return Err(Error::new(
            ErrorKind::Internal,
            "the restored transcript differs from what the agent wrote",
        ));
    }
    print::line("  identical: no acknowledged byte is lost, and no line is torn.")
}

fn wait_for(path: &Path) -> Result<()> {
    for _ in 0..MAX_CHECKS {
        if std::fs::metadata(path).is_ok_and(|found| found.len() > 0) {
            return Ok(());
        }
        std::thread::sleep(CHECK_INTERVAL);
    }
    Err(Error::unavailable(
        "the sample agent has not written its transcript",
    ))
}

/// The sample agent: appends complete lines, as Claude Code does.
fn write(path: &Path) -> Result<()> {
    let failed = |cause| Error::io(format!("write {}", path.display()), cause);
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(failed)?;
    }
    for number in 0..MAX_LINES {
        let role = if number % 2 == 0 { "user" } else { "assistant" };
        let line = serde_json::json!({
            "type": role,
            "uuid": format!("00000000-0000-4000-8000-{number:012}"),
            "sessionId": SESSION,
            "cwd": "/work/app",
            "version": "demo",
            "message": { "role": role, "content": format!("line {number} of a conversation that must not be lost") },
        });
        let mut file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .map_err(failed)?;
        file.write_all(format!("{line}\n").as_bytes())
            .map_err(failed)?;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
