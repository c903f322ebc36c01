//! The HTTP/1.1 server: accepts connections and passes their requests to an axum router.
//!
//! Owns connection limits, time-outs and graceful shutdown, which `axum::serve` does not offer.
//! Does not own routes: each server has its own router.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::http::listen::{Connection, Listener};
use crate::http::write_limit::WriteLimited;

/// Maximum size of the request line and all headers of a request without a body. A browser sends
/// one or two kibibytes.
pub const MAX_HEAD_LEN: usize = 16 << 10;

/// Pause after a failed `accept`, for example while the process is out of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// The address of the client; none for a client of a Unix socket. Each request has it as an
/// extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub Option<IpAddr>);

/// The limits of a server.
#[derive(Debug, Clone, Copy)]
pub struct ServerLimits {
    /// Maximum number of concurrent connections; further connections wait.
    pub max_connections: usize,
    /// Time limit for the headers of a request.
    pub header_timeout: Duration,
    /// Maximum size of the request line and all headers; none for the default of the library.
    pub max_head_len: Option<usize>,
    /// If set, a connection serves one request and is closed after this time.
    pub single_request_timeout: Option<Duration>,
    /// How long a write may wait for the client to read.
    pub write_timeout: Duration,
}

/// Serves requests until `shutdown` completes, then finishes the pending ones before the deadline
/// that `shutdown` returned.
pub async fn serve(
    router: Router,
    listener: Listener,
    limits: ServerLimits,
    shutdown: impl Future<Output = Instant>,
) {
    let slots = Arc::new(Semaphore::new(limits.max_connections));
    let graceful = GracefulShutdown::new();
    tokio::pin!(shutdown);
    let deadline = loop {
        let next = async {
            let slot = slots.clone().acquire_owned().await;
            (slot, listener.accept().await)
        };
        tokio::select! {
            deadline = &mut shutdown => break deadline,
            (slot, connection) = next => match connection {
                Ok(Connection::Unix(stream)) => {
                    let router = router.clone().layer(Extension(Peer(None)));
                    spawn(&router, limits, &graceful, stream, slot);
                }
                Ok(Connection::Tcp(stream)) => {
                    let peer = stream.peer_addr().ok().map(|address| address.ip());
                    let router = router.clone().layer(Extension(Peer(peer)));
                    spawn(&router, limits, &graceful, stream, slot);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection; retrying");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    };
    drop(listener);
    if tokio::time::timeout_at(deadline, graceful.shutdown())
        .await
        .is_err()
    {
        tracing::warn!("the shutdown deadline passed; some requests got no response");
    }
}

fn spawn<S, P>(
    router: &Router,
    limits: ServerLimits,
    graceful: &GracefulShutdown,
    stream: S,
    slot: P,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    P: Send + 'static,
{
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout);
    if limits.single_request_timeout.is_some() {
        builder.keep_alive(false);
    }
    if let Some(len) = limits.max_head_len {
        builder.max_buf_size(len);
    }
    let service = TowerToHyperService::new(router.clone());
    let stream = WriteLimited::new(stream, limits.write_timeout);
    let connection = graceful.watch(builder.serve_connection(TokioIo::new(stream), service));
    tokio::spawn(async move {
        let result = match limits.single_request_timeout {
            None => connection.await,
            Some(limit) => tokio::time::timeout(limit, connection)
                .await
                .unwrap_or(Ok(())),
        };
        if let Err(error) = result {
            tracing::debug!(%error, "a connection ended with an error");
        }
        drop(slot);
    });
}
