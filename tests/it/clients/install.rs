//! Installs the clients from npm, pinned by the lock file in `tests/agents/npm`.
//!
//! Owns `target/test-tools/agents-*`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use sessiond::model::Digest;

use crate::support::{fetch, or_skip, run};

const PACKAGE: &str = include_str!("../../agents/npm/package.json");
const LOCK: &str = include_str!("../../agents/npm/package-lock.json");

/// The installed clients.
pub struct Agents(PathBuf);

impl Agents {
    /// The directory that holds a client's program.
    fn bin(&self, package: &str) -> PathBuf {
        let arch = if cfg!(target_arch = "aarch64") {
            "arm64"
        } else {
            "x64"
        };
        self.0
            .join("node_modules")
            .join(format!("{package}-linux-{arch}"))
    }

    /// All packages, the Agent SDK for TypeScript among them.
    pub fn node_modules(&self) -> PathBuf {
        self.0.join("node_modules")
    }

    /// Claude Code as the Agent SDK brings it: the newest.
    pub fn claude_new(&self) -> PathBuf {
        self.bin("@anthropic-ai/claude-agent-sdk")
    }

    /// An older Claude Code.
    pub fn claude_old(&self) -> PathBuf {
        self.bin("@anthropic-ai/claude-code")
    }

    pub fn codex(&self) -> PathBuf {
        self.bin("@openai/codex").join(format!(
            "vendor/{}-unknown-linux-musl/bin",
            std::env::consts::ARCH
        ))
    }

    pub fn opencode(&self) -> PathBuf {
        self.bin("opencode").join("bin")
    }
}

/// The clients, installed once per build directory; `None` if the test must be skipped.
pub fn agents() -> Option<&'static Agents> {
    static SHARED: OnceLock<Result<Agents, String>> = OnceLock::new();
    or_skip(SHARED.get_or_init(install).as_ref().map_err(String::clone))
}

fn install() -> Result<Agents, String> {
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("test-tools");
    let name = format!(
        "agents-{}",
        &Digest::of(format!("{PACKAGE}{LOCK}").as_bytes()).to_string()[..16]
    );
    let ready = Agents(tools.join(&name));
    let fail = |e: std::io::Error| format!("install the agents into {}: {e}", tools.display());
    std::fs::create_dir_all(&tools).map_err(fail)?;
    // Another process may need them too, and they take a gigabyte: one installs, the others wait.
    let lock = std::fs::File::create(tools.join("agents.lock")).map_err(fail)?;
    lock.lock().map_err(fail)?;
    if ready.0.exists() {
        return Ok(ready);
    }
    fetch::program("npm")?;
    for old in std::fs::read_dir(&tools).map_err(fail)?.flatten() {
        if old.file_name().to_string_lossy().starts_with("agents-") {
            std::fs::remove_dir_all(old.path()).map_err(fail)?;
        }
    }
    let work = tempfile::Builder::new()
        .prefix("agents-")
        .tempdir_in(&tools)
        .map_err(fail)?;
    std::fs::write(work.path().join("package.json"), PACKAGE).map_err(fail)?;
    std::fs::write(work.path().join("package-lock.json"), LOCK).map_err(fail)?;
    // Their install scripts are not needed: they only copy the program, which the tests call by its
    // own path.
    run(Command::new("npm")
        .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
        .current_dir(work.path()))?;
    let installed = Agents(work.path().to_owned());
    check_version(&installed.claude_new(), "claude", "2.1.325")?;
    check_version(&installed.claude_old(), "claude", "2.1.197")?;
    check_version(&installed.codex(), "codex", "0.166.0")?;
    check_version(&installed.opencode(), "opencode", "1.18.33")?;
    std::fs::rename(work.keep(), &ready.0).map_err(fail)?;
    Ok(ready)
}

/// Checks that an installed program runs and has the expected version.
fn check_version(bin: &Path, program: &str, version: &str) -> Result<(), String> {
    let home = crate::support::TempHome::new();
    let said = home
        .command(&bin.join(program))
        .arg("--version")
        .output()
        .map_err(|e| format!("run {}: {e}", bin.display()))?;
    let text = String::from_utf8_lossy(&said.stdout);
    if said.status.success() && text.contains(version) {
        return Ok(());
    }
    Err(format!(
        "{} is not {version}: {} {text} {}",
        bin.display(),
        said.status,
        String::from_utf8_lossy(&said.stderr)
    ))
}
