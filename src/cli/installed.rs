//! Asks an agent that is on the `PATH` for its version.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::model::Version;

/// An agent that says its version does so in well under a second.
const PATIENCE: Duration = Duration::from_secs(10);

/// The version that a program says it has.
pub async fn version(program: &str) -> Result<Version> {
    let failed = |why: &str| Error::not_found(format!("ask {program} for its version: {why}"));
    let started = Command::new(program).arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = started.map_err(|cause| failed(&cause.to_string()))?;
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
    said.ok().and_then(|said| said.ok()).and_then(|said| Version::find(&said)).ok_or_else(|| failed("it does not say"))
}
