//! The arguments of `restore` for sessions that the agent cannot resume: the conversation is
//! written as text instead.

use std::path::PathBuf;

use clap::ValueEnum;

use crate::agent::Profile;
use crate::error::{Error, Result};
use crate::model::Version;
use crate::operations::history_file::HistoryFallback;
use crate::sys::program_version::installed_version;

/// What to do if a session cannot be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FallbackKind {
    /// Write the end of the conversation as text for a prompt.
    History,
}

/// The fallback arguments of `restore`.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct Args {
    /// If the session cannot be restored, write its history as text and exit with 10
    #[arg(long, env = "SESSIOND_FALLBACK", value_name = "KIND")]
    pub fallback: Option<FallbackKind>,

    /// With --fallback: maximum number of messages, from the end
    #[arg(long, env = "SESSIOND_FALLBACK_MESSAGES", value_name = "N", default_value = "40", value_parser = clap::value_parser!(u16).range(1..))]
    pub fallback_messages: u16,

    /// With --fallback: file to write [default: .sessiond/history-ID.md in the root]
    #[arg(
        long,
        value_name = "FILE",
        requires = "fallback",
        conflicts_with = "all"
    )]
    pub fallback_file: Option<PathBuf>,

    /// Newest agent version whose sessions are restored, or auto [default: any]
    ///
    /// With auto, the version of the installed agent.
    #[arg(long, env = "SESSIOND_MAX_AGENT_VERSION", value_name = "VERSION")]
    pub max_agent_version: Option<String>,
}

impl Args {
    /// The fallback, if there is one.
    pub fn history(&self) -> Option<HistoryFallback> {
        self.fallback.map(|FallbackKind::History| HistoryFallback {
            max_messages: usize::from(self.fallback_messages),
            file: self.fallback_file.clone(),
        })
    }

    /// The newest agent version whose sessions are restored; none for any.
    pub async fn max_version(&self, profile: &dyn Profile) -> Result<Option<Version>> {
        match self.max_agent_version.as_deref().map(str::trim) {
            None => Ok(None),
            Some("auto") => installed(profile).await,
            Some(text) => match text.parse::<Version>() {
                Ok(version) => Ok(Some(version)),
                Err(_) => Err(invalid(text, "expected numbers separated by dots, or auto")),
            },
        }
    }
}

/// The version of the installed agent; none, with a warning, if it cannot be determined.
async fn installed(profile: &dyn Profile) -> Result<Option<Version>> {
    let program = profile.program().ok_or_else(|| {
        let reason = format!("the version of {} cannot be determined", profile.name());
        invalid("auto", &reason)
    })?;
    let version = installed_version(program, None).await;
    if let Err(error) = &version {
        tracing::warn!(%error, "agent version unknown; restoring sessions of any version");
    }
    Ok(version.ok())
}

fn invalid(text: &str, reason: &str) -> Error {
    Error::usage(format!(
        "invalid --max-agent-version value {text:?}: {reason}"
    ))
    .hint("use a version, such as --max-agent-version 2.1.325")
}
