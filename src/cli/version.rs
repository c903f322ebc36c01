//! `version`: the version and the build of this program.

use serde::Serialize;

use crate::cli::{exit, print};
use crate::error::Result;
use crate::wire::AGENTS;

/// The back ends of this build. None of them is optional yet.
const FEATURES: [&str; 6] = ["age", "file", "otlp", "postgres", "s3", "sqlite"];

/// Print the version, commit and build
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond version --json | jq -r .commit")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Version {
    version: &'static str,
    commit: &'static str,
    profile: &'static str,
    target: &'static str,
    features: [&'static str; 6],
    agents: [&'static str; 4],
}

/// Prints the version.
pub fn run(args: &Args) -> Result<u8> {
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        commit: env!("SESSIOND_BUILD_COMMIT"),
        profile: env!("SESSIOND_BUILD_PROFILE"),
        target: env!("SESSIOND_BUILD_TARGET"),
        features: FEATURES,
        agents: AGENTS,
    };
    if args.json {
        print::json(&version)?;
    } else {
        print::line(format_args!(
            "sessiond {} (commit {}, {} build, {})",
            version.version, version.commit, version.profile, version.target
        ))?;
    }
    Ok(exit::OK)
}
