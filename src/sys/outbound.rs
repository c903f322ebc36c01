//! HTTP requests to monitoring endpoints: a heartbeat URL or a trace collector.
//!
//! Owns TLS, timeouts and the decision which part of a URL may be logged. Does not own the content
//! of requests.

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

/// Timeout of a request. No other operation waits for one.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A server that receives requests. Its path and query may contain a secret, so they are never
/// printed or logged.
pub struct OutboundEndpoint {
    connector: Connector,
    url: Url,
}

impl fmt::Debug for OutboundEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OutboundEndpoint")
            .field(&self.origin())
            .finish()
    }
}

impl OutboundEndpoint {
    /// Parses `url`, which the user passed as `setting`, and prepares TLS. Sends nothing.
    pub async fn new(setting: &str, url: &str, ca_file: Option<&Path>) -> Result<OutboundEndpoint> {
        // The value is not part of the message: it may contain a secret.
        let invalid = |reason: &str| {
            Error::usage(format!("invalid {setting} value: {reason}")).hint(format!(
                "set {setting} to http://HOST:PORT/PATH or https://…"
            ))
        };
        let url: Url = url.trim().parse().map_err(|_| invalid("not a URL"))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
            return Err(invalid("expected http:// or https:// and a host"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(invalid("a user name and password are not supported"));
        }
        // Without TLS, there is no need to load the system's certificates.
        let context = if url.scheme() == "https" {
            tls_context(TrustStore::default(), ca_file).await?
        } else {
            tls_context(TrustStore::empty(), None).await?
        };
        // Connections are not pooled: minutes pass between two requests.
        let connector = Connector::builder()
            .pool_max_idle_per_host(0)
            .proxy_config(ProxyConfig::from_env())
            .tls_provider(tls::Provider::rustls(CryptoMode::Ring))
            .tls_context(context)
            .build();
        Ok(OutboundEndpoint { connector, url })
    }

    /// The endpoint at `path` below this one.
    #[must_use]
    pub fn join(mut self, path: &str) -> OutboundEndpoint {
        let joined = format!("{}/{path}", self.url.path().trim_end_matches('/'));
        self.url.set_path(&joined);
        self
    }

    /// Scheme, host and port: the part of the URL that may be logged.
    pub fn origin(&self) -> String {
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

    /// Sends a GET request. The response body is ignored.
    pub async fn get(&self) -> Result<()> {
        let request = HttpRequest::empty();
        self.send("GET", request).await
    }

    /// Sends a POST request. The response body is ignored.
    pub async fn post(&self, headers: &[(String, String)], body: impl Into<Bytes>) -> Result<()> {
        let mut request = HttpRequest::new(body.into().into());
        for (name, value) in headers {
            let invalid = |_| {
                Error::usage(format!("invalid value of header {name}"))
                    .context(format!("send a request to {}", self.origin()))
            };
            request
                .headers_mut()
                .try_append(name.clone(), value.clone())
                .map_err(invalid)?;
        }
        self.send("POST", request).await
    }

    async fn send(&self, method: &str, request: HttpRequest) -> Result<()> {
        self.try_send(method, request)
            .await
            .map_err(|error| error.context(format!("send a request to {}", self.origin())))
    }

    async fn try_send(&self, method: &str, mut request: HttpRequest) -> Result<()> {
        let is_prepared =
            request.set_method(method).is_ok() && request.set_uri(self.url.as_str()).is_ok();
        if !is_prepared {
            return Err(Error::usage("the URL is not a valid HTTP request target"));
        }
        request.headers_mut().insert(
            "user-agent",
            concat!("sessiond/", env!("CARGO_PKG_VERSION")),
        );
        let response = tokio::time::timeout(REQUEST_TIMEOUT, self.connector.call(request))
            .await
            .map_err(|_| Error::unavailable(format!("no response within {REQUEST_TIMEOUT:?}")))?
            .map_err(|cause| Error::unavailable("connect").caused_by(cause))?;
        if response.status().is_success() {
            return Ok(());
        }
        Err(Error::unavailable(format!(
            "the server responded with status {}",
            response.status().as_u16()
        )))
    }
}

/// A TLS context that trusts `trust` and the certificates in `ca_file`.
pub async fn tls_context(mut trust: TrustStore, ca_file: Option<&Path>) -> Result<TlsContext> {
    if let Some(path) = ca_file {
        trust = trust.with_pem_certificate(read_ca_file(path).await?);
    }
    TlsContext::builder()
        .with_trust_store(trust)
        .build()
        .map_err(|cause| Error::usage("prepare TLS").caused_by(cause))
}

/// Reads a PEM file and checks every certificate in it: the connector panics on an invalid one.
async fn read_ca_file(path: &Path) -> Result<Vec<u8>> {
    const HINT: &str = "pass a PEM file with BEGIN CERTIFICATE blocks to --ca-file or ca=";
    let phrase = || format!("read CA file {}", path.display());
    let pem = tokio::fs::read(path)
        .await
        .map_err(|cause| Error::usage(phrase()).caused_by(cause).hint(HINT))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate
            .map_err(|cause| Error::usage("parse PEM").caused_by(cause).hint(HINT))
            .map_err(|error| error.context(phrase()))?;
        roots
            .add(certificate)
            .map_err(|cause| {
                Error::usage("parse a certificate")
                    .caused_by(cause)
                    .hint(HINT)
            })
            .map_err(|error| error.context(phrase()))?;
    }
    if roots.is_empty() {
        return Err(Error::usage("the file contains no certificate")
            .context(phrase())
            .hint(HINT));
    }
    Ok(pem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_url_is_printed_without_the_parts_that_may_be_secret() {
        let endpoint = OutboundEndpoint::new(
            "--heartbeat-url",
            "http://127.0.0.1:1/ping/t0ken?key=t0ken",
            None,
        )
        .await
        .unwrap();
        assert_eq!(endpoint.origin(), "http://127.0.0.1:1");
        let error = endpoint.get().await.unwrap_err();
        assert!(
            !format!("{error} {error:?} {endpoint:?}").contains("t0ken"),
            "{error:?}"
        );
        for bad in [
            "t0ken",
            "ftp://host/t0ken",
            "http://u:t0ken@host/",
            "unix:///t0ken",
        ] {
            let error = OutboundEndpoint::new("--heartbeat-url", bad, None)
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
    async fn a_path_is_appended_to_the_path_of_the_url() {
        let joined = |url| async move {
            OutboundEndpoint::new("x", url, None)
                .await
                .unwrap()
                .join("v1/traces")
                .url
                .to_string()
        };
        assert_eq!(joined("http://c:4318").await, "http://c:4318/v1/traces");
        assert_eq!(
            joined("http://c:4318/otlp/").await,
            "http://c:4318/otlp/v1/traces"
        );
    }
}
