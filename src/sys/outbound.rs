//! Requests to servers that are only told something: a heartbeat's, a collector's. Owns TLS, time-outs and what of an address may
//! be shown. Knows nothing of what is sent.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use aws_smithy_http_client::Connector;
use aws_smithy_http_client::proxy::ProxyConfig;
use aws_smithy_http_client::tls::{self, TlsContext, TrustStore, rustls_provider::CryptoMode};
use aws_smithy_runtime_api::client::http::HttpConnector;
use aws_smithy_runtime_api::client::orchestrator::HttpRequest;
use bytes::Bytes;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use url::Url;

use crate::error::{Error, Result};

/// A server has this long to answer. Nothing waits for it.
const PATIENCE: Duration = Duration::from_secs(10);

/// A server that is told something. What its address holds behind the host may be a secret: it is never shown.
pub struct Outbound {
    connector: Connector,
    url: Url,
}

impl fmt::Debug for Outbound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Outbound").field(&self.place()).finish()
    }
}

impl Outbound {
    /// Reads an address that was given as `what`, and prepares to speak to it; asks it nothing.
    pub async fn to(what: &str, url: &str, ca_file: Option<&Path>) -> Result<Outbound> {
        let wrong = |why: &str| {
            Error::usage(format!("read {what}: {why}"))
                .hint(format!("{what} http://HOST:PORT/PATH or https://…"))
        };
        let url: Url = url.trim().parse().map_err(|_| wrong("it is not a URL"))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
            return Err(wrong("neither http:// nor https://"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(wrong("a user and a password are not sent"));
        }
        // Without TLS there is no need for the system's hundred-odd certificates in memory.
        let context = if url.scheme() == "https" {
            tls_context(TrustStore::default(), ca_file).await?
        } else {
            tls_context(TrustStore::empty(), None).await?
        };
        // No connection is kept: minutes pass between two calls.
        let connector = Connector::builder()
            .pool_max_idle_per_host(0)
            .proxy_config(ProxyConfig::from_env())
            .tls_provider(tls::Provider::rustls(CryptoMode::Ring))
            .tls_context(context)
            .build();
        Ok(Outbound { connector, url })
    }

    /// The same server, at another path below this one.
    #[must_use]
    pub fn below(mut self, path: &str) -> Outbound {
        let joined = format!("{}/{path}", self.url.path().trim_end_matches('/'));
        self.url.set_path(&joined);
        self
    }

    /// Where it is, as a person may see it.
    pub fn place(&self) -> String {
        let port = self
            .url
            .port()
            .map_or_else(String::new, |port| format!(":{port}"));
        format!(
            "{}://{}{port}",
            self.url.scheme(),
            self.url.host_str().unwrap_or_default()
        )
    }

    /// Asks, and hears only whether it went well.
    pub async fn get(&self) -> Result<()> {
        let request = HttpRequest::empty();
        self.send("GET", request).await
    }

    /// Tells it something.
    pub async fn post(&self, headers: &[(String, String)], body: impl Into<Bytes>) -> Result<()> {
        let mut request = HttpRequest::new(body.into().into());
        for (name, value) in headers {
            let failed = |_| {
                Error::usage(format!(
                    "call {}: the header {name} cannot be sent",
                    self.place()
                ))
            };
            request
                .headers_mut()
                .try_append(name.clone(), value.clone())
                .map_err(failed)?;
        }
        self.send("POST", request).await
    }

    async fn send(&self, method: &str, mut request: HttpRequest) -> Result<()> {
        let context = || format!("call {}", self.place());
        let prepared =
            request.set_method(method).is_ok() && request.set_uri(self.url.as_str()).is_ok();
        if !prepared {
            return Err(Error::usage(format!(
                "{}: its address cannot be sent",
                context()
            )));
        }
        request.headers_mut().insert(
            "user-agent",
            concat!("sessiond/", env!("CARGO_PKG_VERSION")),
        );
        let answered = tokio::time::timeout(PATIENCE, self.connector.call(request)).await;
        let answer = answered.map_err(|_| {
            Error::unavailable(format!("{}: no answer within {PATIENCE:?}", context()))
        })?;
        let answer = answer.map_err(|cause| Error::unavailable(context()).caused_by(cause))?;
        if answer.status().is_success() {
            return Ok(());
        }
        Err(Error::unavailable(format!(
            "{}: it answered {}",
            context(),
            answer.status().as_u16()
        )))
    }
}

/// What is trusted: `trust`, and the certificates of a file.
pub async fn tls_context(mut trust: TrustStore, ca_file: Option<&Path>) -> Result<TlsContext> {
    let wrong = |path: &Path, what: &str| {
        Error::usage(format!("read CA file {}: {what}", path.display()))
            .hint("ca=… names a PEM file with BEGIN CERTIFICATE blocks")
    };
    if let Some(path) = ca_file {
        let pem = tokio::fs::read(path)
            .await
            .map_err(|cause| wrong(path, "it cannot be read").caused_by(cause))?;
        // The connector panics on a bad certificate, so each one is tried here in the same way first.
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate =
                certificate.map_err(|cause| wrong(path, "it is not PEM").caused_by(cause))?;
            roots
                .add(certificate)
                .map_err(|cause| wrong(path, "a certificate in it is broken").caused_by(cause))?;
        }
        if roots.is_empty() {
            return Err(wrong(path, "it holds no certificate"));
        }
        trust = trust.with_pem_certificate(pem);
    }
    TlsContext::builder()
        .with_trust_store(trust)
        .build()
        .map_err(|cause| Error::usage("prepare TLS").caused_by(cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_is_shown_without_what_may_be_secret() {
        let outbound = Outbound::to(
            "--heartbeat-url",
            "http://127.0.0.1:1/ping/t0ken?key=t0ken",
            None,
        )
        .await
        .unwrap();
        assert_eq!(outbound.place(), "http://127.0.0.1:1");
        let error = outbound.get().await.unwrap_err();
        assert!(
            !format!("{error} {error:?} {outbound:?}").contains("t0ken"),
            "{error:?}"
        );
        for bad in [
            "t0ken",
            "ftp://host/t0ken",
            "http://u:t0ken@host/",
            "unix:///t0ken",
        ] {
            let error = Outbound::to("--heartbeat-url", bad, None)
                .await
                .unwrap_err();
            assert!(
                error.to_string().contains("--heartbeat-url")
                    && !format!("{error} {error:?}").contains("t0ken"),
                "{bad}: {error:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_path_goes_below_the_one_that_is_there() {
        let below = |url| async move {
            Outbound::to("x", url, None)
                .await
                .unwrap()
                .below("v1/traces")
                .url
                .to_string()
        };
        assert_eq!(below("http://c:4318").await, "http://c:4318/v1/traces");
        assert_eq!(
            below("http://c:4318/otlp/").await,
            "http://c:4318/otlp/v1/traces"
        );
    }
}
