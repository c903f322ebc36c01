//! `serve-store`: the SessionStore API of the Agent SDK, for programs that have no directory to
//! stream.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::time::Instant;

use crate::agent::claude_code::ClaudeCode;
use crate::cli::{daemon, print, start};
use crate::config::{Settings, StreamConfig};
use crate::daemon::service::Service;
use crate::daemon::session_store::token::Token;
use crate::daemon::session_store::{SessionStore, http};
use crate::daemon::signals::Signals;
use crate::error::{Error, Result};
use crate::http::listen::ListenAddress;
use crate::operations::restore::{IndexUpdate, RestoreService};
use crate::sys::lock::state_dir;
use crate::wire::{self, Parts};

/// Serve the Agent SDK's SessionStore API; an append returns once it is durable
///
/// The adapters for TypeScript and Python are in examples/. The server uses its own directory
/// (--root; default: in the XDG data directory), not the agent's directory. SIGTERM or SIGINT
/// starts the final flush. A second signal ends it early, with exit code 9.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond serve-store --listen http://127.0.0.1:7474 --store 's3://bucket/agents'"
)]
pub struct Args {
    /// Address: unix:///PATH or http://127.0.0.1:PORT [default: a socket in the root]
    #[arg(long, env = "SESSIOND_LISTEN", value_name = "URL")]
    pub listen: Option<String>,

    /// File with the token that clients must send [default: none]
    ///
    /// Required for an address that other machines can reach. Clients send
    /// "Authorization: Bearer TOKEN". The connection is not encrypted, so let only a
    /// private network or a TLS proxy reach the port.
    #[arg(long, env = "SESSIOND_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,

    /// How to stream.
    #[command(flatten)]
    pub stream: StreamConfig,
}

/// Serves the API.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let flush_deadline = start::flush_deadline(&args.stream)?;
    if let Some(agent) = &settings.agent.name
        && agent != ClaudeCode::NAME
    {
        return Err(Error::usage(format!(
            "invalid --agent value {agent:?}: serve-store stores sessions of {} only",
            ClaudeCode::NAME
        ))
        .hint("remove --agent"));
    }
    let root = wire::session_store_root(settings)?;
    let address = args.listen.as_deref().map(str::parse::<ListenAddress>);
    let address = address.transpose()?;
    let token = args.token_file.as_deref().map(Token::read).transpose()?;
    if token.is_none() && address.as_ref().is_some_and(ListenAddress::is_remote) {
        return Err(Error::usage(format!(
            "invalid --listen value {:?}: an address of other machines needs a token",
            args.listen.as_deref().unwrap_or_default()
        ))
        .hint("pass --token-file FILE, or listen on http://127.0.0.1:7474"));
    }
    let options = start::options(settings, &args.stream).await?;
    let health = start::start_probes(&args.stream, false).await?;
    let parts = Parts::build(settings, args.stream.flush.parallel)
        .await?
        .with_root(root);
    let mut signals = Signals::for_termination()?;
    let disk = parts.directory()?;
    let (counters, index) = (health.counters.clone(), IndexUpdate::Deferred);
    let restore = Arc::new(RestoreService::open(&parts, counters, index)?);
    let address = address
        .unwrap_or_else(|| ListenAddress::Unix(state_dir(disk.root()).join("session-store")));
    let (listener, bound) = address.bind().await?;
    let service = Service::start(&parts, options, Vec::new(), &health).await?;
    let store = Arc::new(SessionStore::new(&parts, &service, restore.clone()));
    print::line(format_args!("listening on {bound}"))?;
    let mut deadline = Instant::now();
    http::serve(store, listener, token, async {
        let signal = signals.termination().await;
        tracing::info!(signal = signal.number, "stopping");
        deadline = Instant::now() + flush_deadline;
        // Open requests get half of the time, the final flush the other half.
        deadline - flush_deadline / 2
    })
    .await;
    let ended = daemon::final_flush(service, deadline, &mut signals, true).await?;
    Ok(ended.exit_code())
}
