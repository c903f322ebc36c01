//! Asks an agent that is on the `PATH` for its version.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::model::Version;

/// An agent that says its version does so in well under a second.
const PATIENCE: Duration = Duration::from_secs(10);

/// The version that a program says it has. Some make directories in the home even then: `elsewhere` gives them another.
pub async fn version(program: &str, elsewhere: Option<&Path>) -> Result<Version> {
    let failed = |why: &str| Error::not_found(format!("{program} {why}"));
    let mut command = Command::new(program);
    if let Some(home) = elsewhere {
        command.env("HOME", home).current_dir(home);
        [
            "XDG_DATA_HOME",
            "XDG_CONFIG_HOME",
            "XDG_STATE_HOME",
            "XDG_CACHE_HOME",
        ]
        .iter()
        .for_each(|name| {
            command.env_remove(name);
        });
    }
    let started = command
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child =
        started.map_err(|cause| failed("cannot be asked for its version").caused_by(cause))?;
    let output = child.stdout.take();
    let said = tokio::task::spawn_blocking(move || {
        let mut text = Vec::new();
        output.map(|output| output.take(4096).read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    let said = tokio::time::timeout(PATIENCE, said).await;
    // It has said what it had to say, or will not.
    let _ = child.kill();
    let _ = child.wait();
    said.ok()
        .and_then(|said| said.ok())
        .and_then(|said| Version::find(&said))
        .ok_or_else(|| failed("does not say its version"))
}
