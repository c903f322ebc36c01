//! The HTTP endpoints for orchestrators and monitoring: `/healthz`, `/readyz` and `/metrics`.
//!
//! No response contains the ID, path or name of a session, a file or a person.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;
use tokio::net::TcpListener;

use crate::daemon::health::{HealthReport, HealthState};
use crate::daemon::metrics;
use crate::error::{Error, Result};
use crate::http::listen::Listener;
use crate::http::server::{self, MAX_HEAD_LEN, ServerLimits};

/// The default address. OpenTelemetry reserves this port for Prometheus.
const DEFAULT_ADDRESS: &str = "127.0.0.1:9464";

/// The limits suit a few probes and scrapes at a time.
const LIMITS: ServerLimits = ServerLimits {
    max_connections: 256,
    header_timeout: Duration::from_secs(2),
    max_head_len: Some(MAX_HEAD_LEN),
    single_request_timeout: Some(Duration::from_secs(15)),
    write_timeout: Duration::from_secs(15),
};

const PATHS: [&str; 3] = ["/healthz", "/readyz", "/metrics"];

/// Parses an address; none for `off`.
pub fn parse_address(text: &str) -> Result<Option<SocketAddr>> {
    if text == "off" {
        return Ok(None);
    }
    let address = text.replacen("localhost:", "127.0.0.1:", 1).parse();
    address.map(Some).map_err(|_| {
        Error::usage(format!(
            "invalid --http value {text:?}: expected ADDRESS:PORT or off"
        ))
        .hint("use --http 127.0.0.1:9464, --http 0.0.0.0:9464 or --http off")
    })
}

/// Starts serving at `address`, unless it is `off`. Without an address, the default is tried; if
/// another process uses it, a warning is logged and nothing is served.
pub async fn start(address: Option<&str>, health: &Arc<HealthState>) -> Result<()> {
    let requested = address.map(str::trim).filter(|text| !text.is_empty());
    let text = requested.unwrap_or(DEFAULT_ADDRESS);
    let Some(address) = parse_address(text)? else {
        return Ok(());
    };
    let bound = async {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok::<_, std::io::Error>((listener, address))
    };
    match (bound.await, requested) {
        (Ok((listener, address)), _) => {
            tracing::info!(%address, "serving /healthz, /readyz and /metrics");
            // The server runs until the process ends: probes also watch the final flush.
            tokio::spawn(server::serve(
                router(health.clone()),
                Listener::Tcp(listener),
                LIMITS,
                std::future::pending(),
            ));
            Ok(())
        }
        (Err(cause), Some(_)) => Err(Error::usage(format!("serve HTTP on {text}"))
            .caused_by(cause)
            .hint("pass another address, or --http off")),
        (Err(error), None) => {
            tracing::warn!(
                %address,
                %error,
                "cannot serve /healthz, /readyz and /metrics; set --http to another address, or to off"
            );
            Ok(())
        }
    }
}

fn router(health: Arc<HealthState>) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics_page))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(health)
}

async fn healthz(State(health): State<Arc<HealthState>>) -> Response {
    let report = health.report().await;
    probe_response(report.healthy, &report)
}

async fn readyz(State(health): State<Arc<HealthState>>) -> Response {
    let report = health.report().await;
    probe_response(report.ready, &report)
}

fn probe_response(passes: bool, report: &HealthReport) -> Response {
    let status = if passes {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, Json(report)).into_response()
}

async fn metrics_page(State(health): State<Arc<HealthState>>) -> Response {
    let snapshot = health.snapshot().await;
    match metrics::render(health.started_at, &snapshot, &health.counters) {
        Ok(page) => ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], page).into_response(),
        Err(error) => {
            tracing::error!(%error, "cannot render /metrics");
            let body = Json(json!({ "error": error.to_string() }));
            (StatusCode::INTERNAL_SERVER_ERROR, body).into_response()
        }
    }
}

async fn not_found() -> Response {
    let body = Json(json!({ "error": "unknown path", "paths": PATHS }));
    (StatusCode::NOT_FOUND, body).into_response()
}

async fn method_not_allowed() -> Response {
    let body = Json(json!({ "error": "method not allowed: use GET or HEAD" }));
    (StatusCode::METHOD_NOT_ALLOWED, body).into_response()
}
