//! `demo`: shows the point within a minute, with no server and no agent: stream, kill, restore elsewhere, compare.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::cli::{exit, print};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Digest;
use crate::sys::{Rng, SystemRng};

/// The sample session's id.
const SESSION: &str = "0b5e551d-0000-4000-8000-00000000d340";
/// Its transcript below the home directory.
const TRANSCRIPT: &str = ".claude/projects/-work-app/0b5e551d-0000-4000-8000-00000000d340.jsonl";
/// The writer stops by itself if nobody kills it.
const MOST_LINES: u32 = 2000;

/// Show the point: stream a sample session, kill everything, restore it elsewhere, compare
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond demo\n\nNeeds no server and no agent, and touches nothing outside a temporary directory."
)]
pub struct Args {
    /// Keep the temporary directory and say where it is
    #[arg(long, env = "SESSIOND_KEEP")]
    pub keep: bool,

    /// Be the sample agent: append to this transcript until killed
    #[arg(long, hide = true, value_name = "FILE")]
    pub write: Option<PathBuf>,
}

/// Does it.
pub fn run(args: Args) -> Result<u8> {
    if let Some(path) = &args.write {
        return write(path).map(|()| exit::OK);
    }
    let directory = std::env::temp_dir().join(format!("sessiond-demo-{:016x}", SystemRng.next()));
    let stage = Stage {
        directory: directory.clone(),
        program: std::env::current_exe()
            .map_err(|cause| Error::io("find our own program", cause))?,
    };
    let done = play(&stage);
    if args.keep {
        print::line(format_args!("\nkept: {}", directory.display()))?;
    } else if let Err(cause) = std::fs::remove_dir_all(&directory) {
        tracing::warn!(%cause, "{} was not removed", directory.display());
    }
    done.map(|()| exit::OK)
}

struct Stage {
    directory: PathBuf,
    program: PathBuf,
}

/// Killed when it goes out of sight, whatever happens.
struct Running(Child);

impl Running {
    fn kill(&mut self) -> Result<()> {
        self.0
            .kill()
            .and_then(|()| self.0.wait())
            .map(|_| ())
            .map_err(|cause| Error::io("kill a process of the demo", cause))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Stage {
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

    fn start(&self, home: &str, arguments: &[&str]) -> Result<Running> {
        self.command(home, arguments)
            .spawn()
            .map(Running)
            .map_err(|cause| Error::io("start a process of the demo", cause))
    }

    fn call(&self, home: &str, arguments: &[&str]) -> Result<()> {
        print::line(format_args!("$ sessiond {}", arguments.join(" ")))?;
        let output = self
            .command(home, arguments)
            .stderr(Stdio::inherit())
            .output()
            .map_err(|cause| Error::io("call sessiond", cause))?;
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

fn play(stage: &Stage) -> Result<()> {
    let read = |home: &str| {
        std::fs::read(stage.home(home).join(TRANSCRIPT))
            .map_err(|cause| Error::io("read the transcript", cause))
    };
    let made = ["first-container", "second-container"]
        .iter()
        .try_for_each(|home| std::fs::create_dir_all(stage.home(home)));
    made.map_err(|cause| Error::io("make the demo's directory", cause))?;
    print::line(
        "1. A container with an agent that writes its transcript, and sessiond beside it.",
    )?;
    let mut daemon = stage.start("first-container", &["daemon"])?;
    let transcript = stage.home("first-container").join(TRANSCRIPT);
    let mut agent = stage.start(
        "first-container",
        &["demo", "--write", &transcript.to_string_lossy()],
    )?;
    wait_for(&transcript)?;
    std::thread::sleep(Duration::from_secs(2));

    print::line("2. What is on disk now is made durable, while the agent goes on.")?;
    let before = read("first-container")?.len();
    stage.call("first-container", &["flush", "--wait"])?;
    std::thread::sleep(Duration::from_millis(700));

    print::line(
        "3. kill -9 of both, in the middle of a turn. The container and its home are gone.",
    )?;
    agent.kill()?;
    daemon.kill()?;
    let dead = read("first-container")?;
    let gone = stage.directory.join("gone");
    std::fs::rename(stage.home("first-container"), &gone)
        .map_err(|cause| Error::io("remove the first home", cause))?;

    print::line("4. Another container, with an empty home.")?;
    stage.call("second-container", &["restore", &SESSION[..8]])?;
    let restored = read("second-container")?;

    print::line("5. Compared, byte for byte.")?;
    let prefix = dead
        .get(..restored.len())
        .is_some_and(|dead| dead == restored);
    print::line(format_args!(
        "  the agent had written   {:>8} bytes",
        dead.len()
    ))?;
    print::line(format_args!("  acknowledged as durable {before:>8} bytes"))?;
    print::line(format_args!(
        "  restored                {:>8} bytes, sha256 {}",
        restored.len(),
        Digest::of(&restored)
    ))?;
    print::line(format_args!(
        "  the same bytes there    {:>8} bytes, sha256 {}",
        restored.len(),
        Digest::of(dead.get(..restored.len()).unwrap_or_default())
    ))?;
    if !prefix || restored.len() < before || restored.last() != Some(&b'\n') {
        return Err(Error::new(
            ErrorKind::Internal,
            "demo: the restored transcript is not what the agent wrote",
        ));
    }
    print::line("  equal: nothing that was acknowledged is lost, and no line is torn.")?;

    print::line("6. What is stored can be looked at, with us and without.")?;
    stage.call("second-container", &["ls"])?;
    stage.call("second-container", &["verify", "--all"])?;
    print::line("  without us: zcat …/log/000000000002.gz | tail -n +2 | jq . (docs/FORMAT.md)")?;
    print::line(
        "\nIn a container's entrypoint: sessiond run --session \"$ID\" -- claude --resume \"$ID\"",
    )
}

fn wait_for(path: &Path) -> Result<()> {
    for _ in 0..400 {
        if std::fs::metadata(path).is_ok_and(|found| found.len() > 0) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    Err(Error::unavailable("demo: the sample agent does not write"))
}

/// The sample agent: whole lines, appended in batches, as Claude Code does it.
fn write(path: &Path) -> Result<()> {
    let failed = |cause| Error::io(format!("write {}", path.display()), cause);
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(failed)?;
    }
    for number in 0..MOST_LINES {
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
