//! `serve-store`: the same log, fence and index for users of an Agent SDK who have no directory to share.

use std::sync::Arc;

use tokio::time::Instant;

use crate::agent::claude_code::ClaudeCode;
use crate::cli::{daemon, exit, print, select, start};
use crate::config::{Settings, Stream};
use crate::daemon::listen::Listen;
use crate::daemon::lock::{self, state_dir};
use crate::daemon::service::Service;
use crate::daemon::session_store::{SessionStore, http};
use crate::daemon::signals::Signals;
use crate::error::{Error, Result};
use crate::wire::{self, Parts};

/// Be the session store of a Claude Agent SDK: what it appends is durable when it is answered
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond serve-store --listen http://127.0.0.1:7474 --store 's3://bucket/agents'\n\nThe adapters for TypeScript and Python are in examples/. Its directory is its own (--root; by default one in the XDG data\ndirectory), never the one of an agent. SIGTERM or SIGINT starts the final flush; a second one gives up (exit code 9)."
)]
pub struct Args {
    /// Where to listen: unix:///PATH, or http://127.0.0.1:PORT (0 takes a free one) [default: a socket in its directory]
    #[arg(long, env = "SESSIOND_LISTEN", value_name = "URL")]
    pub listen: Option<String>,

    /// How to stream.
    #[command(flatten)]
    pub stream: Stream,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let deadline = start::deadline(&args.stream)?;
    if settings
        .agent
        .as_deref()
        .is_some_and(|agent| agent != ClaudeCode::NAME)
    {
        return Err(Error::usage(format!(
            "serve-store keeps sessions of {} alone",
            ClaudeCode::NAME
        ))
        .hint("leave --agent out"));
    }
    let root = wire::store_dir(settings)?;
    let listen = args
        .listen
        .as_deref()
        .map(str::parse::<Listen>)
        .transpose()?;
    let options = start::options(settings, &args.stream).await?;
    let vitals = start::vitals(&args.stream, false).await?;
    let parts = Parts::make(settings, args.stream.parallel)
        .await?
        .rooted_at(root);
    let mut signals = Signals::to_stop()?;
    let disk = parts.directory()?;
    let owner = select::owner(None, &disk)?;
    let _lock = lock::take(disk.root(), owner)?;
    let listen =
        listen.unwrap_or_else(|| Listen::Unix(state_dir(disk.root()).join("session-store")));
    let (listener, bound) = listen.bind().await?;
    let service = Service::start(&parts, options, Vec::new(), &vitals).await?;
    let store = Arc::new(SessionStore::new(&parts, &service)?);
    print::line(format_args!("listening on {bound}"))?;
    let mut until = Instant::now();
    http::serve(store, listener, async {
        let stop = signals.stop().await;
        tracing::info!(signal = stop.number, "stopping");
        until = Instant::now() + deadline;
        // Who has asked waits for the store, as the final flush does after that.
        until - deadline / 2
    })
    .await;
    let flushed = daemon::final_flush(service, until, &mut signals, true).await?;
    daemon::hand_over(&disk, owner);
    Ok(if flushed { exit::OK } else { exit::GAVE_UP })
}
