//! Which agents there are on this machine, where, and of which version.

use std::path::Path;

use futures_util::future::join_all;

use super::{Findings, Grade};
use crate::agent::Profile;
use crate::cli::installed;
use crate::wire::{self, Parts};

/// Looks for each agent that has a profile.
pub async fn look(parts: Option<&Parts>, findings: &mut Findings) {
    let agents = wire::agents_here();
    // A home that can be thrown away, for those that are not at home here.
    let scratch = parts.map(|parts| {
        std::env::temp_dir().join(format!("sessiond-ask-{:016x}", parts.logs.rng.next()))
    });
    let scratch = scratch.filter(|scratch| std::fs::create_dir(scratch).is_ok());
    let asked = agents
        .iter()
        .map(|(profile, root)| version(&**profile, scratch.as_deref().filter(|_| !root.exists())));
    let versions = join_all(asked).await;
    if let Some(scratch) = &scratch {
        let _ = std::fs::remove_dir_all(scratch);
    }
    let chosen = parts.map(|parts| parts.profile.name());
    let mut seen = 0;
    for ((profile, root), version) in agents.iter().zip(versions) {
        let ours = chosen == Some(profile.name());
        if !root.exists() && version.is_none() && !ours {
            continue;
        }
        seen += 1;
        let version = version.map_or_else(
            || "not on the PATH".to_owned(),
            |version| format!("version {version}"),
        );
        let text = format!(
            "{}: {version}, {}{}",
            profile.name(),
            place(root),
            if ours {
                "; this is the one that is kept"
            } else {
                ""
            }
        );
        let other = format!("sessiond daemon --agent {} keeps it", profile.name());
        findings.add(
            "agent",
            Grade::Ok,
            text,
            (!ours && root.exists()).then_some(other.as_str()),
        );
    }
    if seen == 0 {
        findings.add(
            "agent",
            Grade::Warn,
            "none of those that are known is here",
            Some("--agent NAME and --root DIR name another"),
        );
    }
}

fn place(root: &Path) -> String {
    if root.exists() {
        format!("in {}", root.display())
    } else {
        format!("nothing in {} yet", root.display())
    }
}

async fn version(profile: &dyn Profile, elsewhere: Option<&Path>) -> Option<String> {
    Some(
        installed::version(profile.program()?, elsewhere)
            .await
            .ok()?
            .to_string(),
    )
}
