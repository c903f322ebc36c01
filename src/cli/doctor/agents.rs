//! The agents on this machine: their directories and versions.

use std::path::Path;

use futures_util::future::join_all;

use super::{DoctorReport, Grade};
use crate::agent::Profile;
use crate::sys::program_version::installed_version;
use crate::wire::{self, Parts};

/// Checks each agent that has a profile.
pub async fn check(parts: Option<&Parts>, report: &mut DoctorReport) {
    let agents = wire::local_agents();
    // Some agents create files in the home directory even for `--version`. An agent without a root
    // gets a temporary home directory.
    let scratch = parts.map(|parts| {
        std::env::temp_dir().join(format!("sessiond-doctor-{:016x}", parts.logs.rng.next()))
    });
    let scratch = scratch.filter(|scratch| std::fs::create_dir(scratch).is_ok());
    let versions = agents
        .iter()
        .map(|(profile, root)| version(&**profile, scratch.as_deref().filter(|_| !root.exists())));
    let versions = join_all(versions).await;
    if let Some(scratch) = &scratch {
        let _ = std::fs::remove_dir_all(scratch);
    }
    let chosen = parts.map(|parts| parts.profile.name());
    let mut found = 0;
    for ((profile, root), version) in agents.iter().zip(versions) {
        let is_chosen = chosen == Some(profile.name());
        if !root.exists() && version.is_none() && !is_chosen {
            continue;
        }
        found += 1;
        let version = version.map_or_else(
            || "not on the PATH".to_owned(),
            |version| format!("version {version}"),
        );
        let text = format!(
            "{}: {version}, {}{}",
            profile.name(),
            location(root),
            if is_chosen { " (selected)" } else { "" }
        );
        let hint = format!(
            "run \"sessiond daemon --agent {}\" to stream it",
            profile.name()
        );
        report.add(
            "agent",
            Grade::Ok,
            text,
            (!is_chosen && root.exists()).then_some(hint.as_str()),
        );
    }
    if found == 0 {
        report.add(
            "agent",
            Grade::Warn,
            "no known agent found",
            Some("use --agent NAME and --root DIR to select one"),
        );
    }
}

fn location(root: &Path) -> String {
    if root.exists() {
        format!("in {}", root.display())
    } else {
        format!("{} does not exist yet", root.display())
    }
}

async fn version(profile: &dyn Profile, scratch_home: Option<&Path>) -> Option<String> {
    Some(
        installed_version(profile.program()?, scratch_home)
            .await
            .ok()?
            .to_string(),
    )
}
