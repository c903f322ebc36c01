//! Completion of session IDs in a shell: fast, bounded, and silent if anything fails.

use std::ffi::OsStr;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};

use crate::cli::{Cli, environment};
use crate::config::{self, Settings};
use crate::index::SessionFilter;
use crate::wire;

/// Maximum time that a user waits after pressing the tab key.
const DEADLINE: Duration = Duration::from_millis(700);

/// Maximum number of IDs to offer.
const MAX_CANDIDATES: u32 = 50;

/// Completes the ID of a session.
pub fn session_completer() -> ArgValueCompleter {
    ArgValueCompleter::new(|prefix: &OsStr| sessions(prefix).unwrap_or_default())
}

fn sessions(prefix: &OsStr) -> Option<Vec<CompletionCandidate>> {
    let prefix = prefix.to_str()?;
    let mut settings = settings()?;
    config::load(&mut settings, None, wire::default_config_file()).ok()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .ok()?;
    let query = async {
        let (namespace, index) = wire::existing_index(&settings).ok()??;
        let filter = SessionFilter {
            namespace,
            agent: None,
            id_prefix: Some(prefix.to_owned()),
            project: None,
            status: None,
            request: None,
            labels: Vec::new(),
            model: None,
            since: None,
            until: None,
            title: None,
            limit: MAX_CANDIDATES,
            cursor: None,
        };
        index.sessions(&filter).await.ok()
    };
    let page = runtime.block_on(async { tokio::time::timeout(DEADLINE, query).await.ok() })??;
    runtime.shutdown_background();
    let candidates = page.sessions.into_iter().map(|row| {
        let description = row.title.or(row.cwd).unwrap_or_default();
        CompletionCandidate::new(row.id).help(Some(description.into()))
    });
    Some(candidates.collect())
}

/// The settings from the command line as typed so far, and from the environment.
fn settings() -> Option<Settings> {
    // The shell passes the words of the command line after `--`.
    let words = std::env::args_os()
        .skip_while(|word| word != "--")
        .skip(1)
        .collect::<Vec<_>>();
    let matches = environment::ignore_empty(Cli::command())
        .ignore_errors(true)
        .try_get_matches_from(words)
        .ok()?;
    Settings::from_arg_matches(&matches).ok()
}
