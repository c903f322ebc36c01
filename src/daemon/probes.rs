//! What an orchestrator and a monitoring system ask over HTTP: `/healthz`, `/readyz` and `/metrics`. No id, path or name of
//! anybody's is in an answer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{ALLOW, HeaderValue};
use hyper::{Method, Request, StatusCode};
use serde_json::json;
use tokio::net::TcpListener;

use crate::daemon::health::HealthState;
use crate::daemon::http::{self, Answer, Answers, Limits};
use crate::daemon::listen::Listener;
use crate::daemon::metrics;
use crate::error::{Error, Result};

/// Where it is asked, unless somebody says otherwise: the port that OpenTelemetry has for Prometheus.
const DEFAULT: &str = "127.0.0.1:9464";

/// A few probes and a scrape or two at a time.
const LIMITS: Limits = Limits {
    connections: 256,
    patience: Duration::from_secs(2),
    one_call: Some(Duration::from_secs(15)),
};

const PATHS: [&str; 3] = ["/healthz", "/readyz", "/metrics"];

struct Probes(Arc<HealthState>);

/// Begins to answer at an address, unless it is `off`. Without one, the default is tried, and who has it already may keep it.
pub async fn start(asked: Option<&str>, vitals: &Arc<HealthState>) -> Result<()> {
    let asked = asked.map(str::trim).filter(|asked| !asked.is_empty());
    if asked == Some("off") {
        return Ok(());
    }
    let text = asked.unwrap_or(DEFAULT);
    let wrong = |why: &str| Error::usage(format!("--http {text}: {why}"));
    let address: SocketAddr = text
        .replacen("localhost:", "127.0.0.1:", 1)
        .parse()
        .map_err(|_| {
            wrong("an address and a port are wanted")
                .hint("--http 127.0.0.1:9464, --http 0.0.0.0:9464 or --http off")
        })?;
    let bound = async {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok::<_, std::io::Error>((listener, address))
    };
    match (bound.await, asked) {
        (Ok((listener, address)), _) => {
            tracing::info!(%address, "answering /healthz, /readyz and /metrics");
            let probes = Arc::new(Probes(vitals.clone()));
            // Until the process ends: also the final flush is asked about.
            tokio::spawn(http::serve(
                probes,
                Listener::Tcp(listener),
                LIMITS,
                std::future::pending(),
            ));
            Ok(())
        }
        (Err(cause), Some(_)) => Err(wrong("it cannot be listened on")
            .caused_by(cause)
            .hint("give another address, or --http off")),
        (Err(error), None) => {
            tracing::warn!(%address, %error, "no /healthz, /readyz and /metrics: the address cannot be had; --http names another, or off");
            Ok(())
        }
    }
}

#[async_trait::async_trait]
impl Answers for Probes {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path();
        if !PATHS.contains(&path) {
            return http::json(
                StatusCode::NOT_FOUND,
                &json!({ "error": "there is no such path", "paths": PATHS }),
            );
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut answer = http::json(
                StatusCode::METHOD_NOT_ALLOWED,
                &json!({ "error": "only GET and HEAD" }),
            );
            answer
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return answer;
        }
        let look = self.0.look().await;
        let well = match path {
            "/healthz" => look.verdict.healthy,
            "/readyz" => look.verdict.ready,
            _ => {
                return http::text(
                    StatusCode::OK,
                    metrics::KIND,
                    metrics::text(self.0.since, &look, &self.0.counts.so_far()),
                );
            }
        };
        http::json(
            if well {
                StatusCode::OK
            } else {
                StatusCode::SERVICE_UNAVAILABLE
            },
            &look.verdict,
        )
    }
}
