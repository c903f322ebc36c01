//! The version of a program that is installed on this machine.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::model::Version;

/// `--version` takes well under a second; this is generous for a slow disk.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of output bytes to read.
const MAX_OUTPUT_LEN: u64 = 4096;

/// Runs `program --version` and parses its output. Some agents create files in the home directory
/// even for `--version`; `scratch_home`, if given, replaces it.
pub async fn installed_version(program: &str, scratch_home: Option<&Path>) -> Result<Version> {
    let mut command = Command::new(program);
    if let Some(home) = scratch_home {
        command.env("HOME", home).current_dir(home);
        for name in [
            "XDG_DATA_HOME",
            "XDG_CONFIG_HOME",
            "XDG_STATE_HOME",
            "XDG_CACHE_HOME",
        ] {
            command.env_remove(name);
        }
    }
    let started = command
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = started
        .map_err(|cause| Error::not_found(format!("run {program} --version")).caused_by(cause))?;
    let output = child.stdout.take();
    let output = tokio::task::spawn_blocking(move || {
        let mut text = Vec::new();
        output.map(|output| output.take(MAX_OUTPUT_LEN).read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    let output = tokio::time::timeout(TIMEOUT, output).await;
    // The program has printed its version or timed out. It is not needed any longer.
    let _ = child.kill();
    let _ = child.wait();
    output
        .ok()
        .and_then(|output| output.ok())
        .and_then(|output| Version::find(&output))
        .ok_or_else(|| Error::not_found(format!("{program} --version printed no version")))
}
