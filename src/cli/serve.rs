//! `serve`: the HTTP API for sessions of all agents and namespaces of a store.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use axum::http::HeaderName;
use tokio::time::Instant;

use crate::cli::{exit, print};
use crate::config::Settings;
use crate::daemon::signals::Signals;
use crate::error::{Error, ErrorContext, Result};
use crate::http::listen::ListenAddress;
use crate::serve::access::{AccessControl, ProxyAddress, TrustedProxies};
use crate::serve::api::{Api, Authentication};
use crate::serve::audit::AuditLog;
use crate::serve::serve;
use crate::wire::Parts;

/// The default port.
const DEFAULT_PORT: u16 = 7475;

/// How long open requests may take after a signal.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Serve an HTTP API: list, read, search, label and fork sessions
///
/// The API is described at /api/v1/openapi.json. Without --access, it listens on this machine only,
/// and everybody who can connect is an administrator. SIGTERM or SIGINT ends it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond serve
  sessiond serve --listen http://0.0.0.0:7475 --access access.toml")]
pub struct Args {
    /// Address: unix:///PATH or http://ADDRESS:PORT [default: http://127.0.0.1:7475]
    #[arg(long, env = "SESSIOND_SERVE_LISTEN", value_name = "URL")]
    pub listen: Option<String>,

    /// File with tokens, users and their roles; "sessiond token" adds to it
    ///
    /// Required for an address that other machines can reach. The connection is not encrypted, so
    /// let only a private network or a TLS proxy reach the port.
    #[arg(long, env = "SESSIOND_ACCESS", value_name = "FILE")]
    pub access: Option<PathBuf>,

    /// Proxy that authenticates users: address, network or unix (repeatable)
    #[arg(
        long,
        env = "SESSIOND_TRUSTED_PROXY",
        value_name = "ADDRESS",
        value_delimiter = ',',
        requires = "access"
    )]
    pub trusted_proxy: Vec<String>,

    /// Header in which a trusted proxy names the user
    #[arg(
        long,
        env = "SESSIOND_USER_HEADER",
        value_name = "NAME",
        default_value = "X-Forwarded-User"
    )]
    pub user_header: String,

    /// File for the audit log [default: stderr]
    #[arg(long, env = "SESSIOND_AUDIT_LOG", value_name = "FILE")]
    pub audit_log: Option<PathBuf>,
}

/// Serves the API.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let address = match args.listen.as_deref() {
        Some(text) => text.parse()?,
        None => ListenAddress::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT))),
    };
    let authentication = authentication(&args, &address)?;
    let audit = AuditLog::open(args.audit_log.as_deref())?;
    let parts = Parts::build(settings, None).await?;
    // A mistake in the settings must not become an error of every request.
    parts.index.connect().await.context("open the index")?;
    // No ID starts with this character.
    parts.logs.log_names("~").await.context("open the store")?;
    let mut signals = Signals::for_termination()?;
    let (listener, bound) = address.bind().await?;
    print::line(format_args!("listening on {bound}"))?;
    let prices = settings.prices.clone().with_list();
    let api = Api::new(parts, prices, authentication, audit);
    serve(api, listener, async {
        let signal = signals.termination().await;
        tracing::info!(signal = signal.number, "stopping");
        Instant::now() + SHUTDOWN_TIMEOUT
    })
    .await;
    Ok(exit::OK)
}

/// Rejects an address that other machines can reach without authentication.
fn authentication(args: &Args, address: &ListenAddress) -> Result<Authentication> {
    let Some(path) = &args.access else {
        if address.is_remote() {
            return Err(Error::usage(format!(
                "invalid --listen value {:?}: an address of other machines needs --access",
                args.listen.as_deref().unwrap_or_default()
            ))
            .hint("run \"sessiond token --access access.toml --name NAME --role reader\", then pass --access access.toml"));
        }
        return Ok(Authentication::Local);
    };
    let user_header = HeaderName::try_from(args.user_header.as_str()).map_err(|_| {
        Error::usage(format!(
            "invalid --user-header value {:?}: it is not the name of a header",
            args.user_header
        ))
    })?;
    let proxies = TrustedProxies {
        addresses: args
            .trusted_proxy
            .iter()
            .map(|text| text.trim().parse())
            .collect::<Result<Vec<ProxyAddress>>>()?,
        user_header,
    };
    let control = AccessControl::open(path.clone(), proxies)?;
    if control.is_empty() {
        tracing::warn!(
            "{} has neither tokens nor users: nobody is admitted",
            path.display()
        );
    }
    Ok(Authentication::Access(control))
}
