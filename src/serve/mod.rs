//! The API of `sessiond serve`: sessions, conversations and files of a store over HTTP.
//!
//! Owns authorization, limits, the audit log and the routes. Does not own what an operation does:
//! handlers call the same library as the command line. The process keeps no state of its own, so
//! that any number of them can run next to each other.

pub mod access;
pub mod api;
pub mod audit;
mod changes;
mod content;
mod endpoint;
mod events;
pub mod feed;
mod openapi;
mod problem;
mod reading;
mod reports;
mod schema;
mod sessions;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, FromRequestParts, RawPathParams, Request};
use axum::http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use axum::http::request;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, get, on};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::http::listen::Listener;
use crate::http::server::{self, MAX_HEAD_LEN, Peer, ServerLimits};
use crate::model::Namespace;

use access::{Caller, Role};
use api::{Api, Authentication};
use audit::AuditRecord;
use endpoint::{Audit, Call, Endpoint};
use openapi::PREFIX;
use problem::Problem;

/// Maximum size of a request body: labels and metadata of a session.
const MAX_BODY_BYTES: usize = 256 << 10;

/// Time limit for the headers of a request, and again for its body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Time limit for an operation until its response begins.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(120);

/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 256;

/// Headers of every response. No page may load, frame or interpret anything that the API returns.
const SECURITY_HEADERS: [(HeaderName, &str); 6] = [
    (
        HeaderName::from_static("content-security-policy"),
        "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
    (HeaderName::from_static("x-content-type-options"), "nosniff"),
    (HeaderName::from_static("cache-control"), "no-store"),
    (HeaderName::from_static("referrer-policy"), "no-referrer"),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (HeaderName::from_static("x-frame-options"), "DENY"),
];

/// All operations.
fn endpoints() -> Vec<Endpoint> {
    let lists = [
        sessions::endpoints(),
        reading::endpoints(),
        content::endpoints(),
        reports::endpoints(),
        changes::endpoints(),
        events::endpoints(),
    ];
    lists.into_iter().flatten().collect()
}

/// Serves requests until `shutdown` completes, then finishes the pending ones before the deadline
/// that `shutdown` returned.
pub async fn serve(api: Arc<Api>, listener: Listener, shutdown: impl Future<Output = Instant>) {
    let limits = ServerLimits {
        max_connections: MAX_CONNECTIONS,
        header_timeout: READ_TIMEOUT,
        max_head_len: Some(MAX_HEAD_LEN),
        single_request_timeout: None,
        write_timeout: Duration::from_secs(30),
    };
    let shutdown = async {
        let deadline = shutdown.await;
        api.stopping.send_replace(true);
        deadline
    };
    server::serve(router(api.clone()), listener, limits, shutdown).await;
}

fn router(api: Arc<Api>) -> Router {
    let has_tokens = matches!(api.authentication, Authentication::Access(_));
    let endpoints = endpoints();
    let document = openapi::document(&endpoints, has_tokens).to_string();
    let document = Bytes::from(document);
    let mut router = Router::new().route(
        &format!("{PREFIX}/openapi.json"),
        get(move || async move {
            let json = HeaderValue::from_static("application/json");
            ([(CONTENT_TYPE, json)], document)
        }),
    );
    for endpoint in endpoints {
        let Ok(filter) = MethodFilter::try_from(endpoint.method.clone()) else {
            continue;
        };
        let path = openapi::full_path(endpoint.path);
        let (api, endpoint) = (api.clone(), Arc::new(endpoint));
        let handler = move |request: Request| handle(api.clone(), endpoint.clone(), request);
        router = router.route(&path, on(filter, handler));
    }
    router
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        // `read_body` limits bodies itself.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn(add_security_headers))
}

async fn add_security_headers(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    for (name, value) in SECURITY_HEADERS {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn not_found(uri: Uri) -> Response {
    let detail = format!("path {:?} does not exist", uri.path());
    Problem::new(StatusCode::NOT_FOUND, "not_found", detail)
        .hint(format!("see {PREFIX}/openapi.json for all paths"))
        .into_response()
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let detail = format!("method {method} is not allowed for {:?}", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail).into_response()
}

/// Runs an operation for a caller that may run it, and writes the audit log before the response is
/// sent.
async fn handle(api: Arc<Api>, endpoint: Arc<Endpoint>, request: Request) -> Response {
    let (mut head, body) = request.into_parts();
    let Some(peer) = head.extensions.get::<Peer>().copied() else {
        let error = Error::new(ErrorKind::Internal, "the address of the client is unknown");
        return Problem::from(error).into_response();
    };
    let caller = match api.authenticate(&head.headers, peer) {
        Ok(caller) => caller,
        Err(problem) => return problem.into_response(),
    };
    let call = match call(&api, &endpoint, (&caller, peer), &mut head).await {
        Ok(call) => call,
        Err(problem) => return problem.into_response(),
    };
    let (namespace, session, role) = (call.namespace.clone(), call.session.clone(), call.role);
    let response = if role < endpoint.role {
        let detail = format!(
            "{} has the role {} in namespace {namespace}, but {} needs the role {}",
            caller.name,
            role.as_str(),
            endpoint.name,
            endpoint.role.as_str()
        );
        Problem::forbidden(detail).into_response()
    } else {
        run(&endpoint, call, &head, body).await
    };
    let is_audited = match endpoint.audit {
        Audit::Never => false,
        Audit::IfReader => role >= Role::Reader,
        Audit::Always => true,
    };
    if !is_audited {
        return response;
    }
    let (agent, session) = session.unzip();
    let written = api.audit.write(&AuditRecord {
        agent: agent.as_ref().map(|agent| agent.as_str()),
        session: session.as_ref().map(|session| session.as_str()),
        status: response.status().as_u16(),
        ..api.audit_record(&caller, peer, endpoint.name, &namespace)
    });
    match written {
        Ok(()) => response,
        // What cannot be recorded is not shown.
        Err(error) => Problem::from(error).into_response(),
    }
}

/// Parses the path. A caller without a role in the namespace learns nothing about it.
async fn call(
    api: &Arc<Api>,
    endpoint: &Endpoint,
    (caller, peer): (&Caller, Peer),
    head: &mut request::Parts,
) -> Result<Call, Problem> {
    let params = RawPathParams::from_request_parts(head, &())
        .await
        .map_err(|_| Error::usage("invalid path: expected percent-encoded UTF-8"))?;
    let value = |wanted: &str| {
        let found = params.iter().find(|(name, _)| *name == wanted);
        found.map(|(_, value)| value.to_owned())
    };
    let namespace: Namespace = value("namespace").unwrap_or_default().parse()?;
    let Some(role) = caller.roles.in_namespace(&namespace) else {
        let record = api.audit_record(caller, peer, endpoint.name, &namespace);
        api.audit.write(&record)?;
        let detail = format!("{} has no role in namespace {namespace}", caller.name);
        return Err(Problem::forbidden(detail));
    };
    let session = match (value("agent"), value("session")) {
        (Some(agent), Some(session)) => Some((agent.parse()?, session.parse()?)),
        _ => None,
    };
    Ok(Call {
        api: api.clone(),
        role,
        namespace,
        session,
        item: value("item"),
        headers: head.headers.clone(),
    })
}

/// Runs an operation. A change runs to its end even if the client disconnects.
async fn run(endpoint: &Endpoint, call: Call, head: &request::Parts, body: Body) -> Response {
    let body = match endpoint.body {
        Some(_) => match read_body(&head.headers, body).await {
            Ok(bytes) => Some(bytes),
            Err(problem) => return problem.into_response(),
        },
        None => None,
    };
    let query = head.uri.query().unwrap_or_default().to_owned();
    let operation = (endpoint.handler)(call, query, body);
    let limited = tokio::time::timeout(OPERATION_TIMEOUT, operation);
    let outcome = match endpoint.method == Method::GET {
        true => limited.await,
        false => match tokio::spawn(limited).await {
            Ok(outcome) => outcome,
            Err(cause) => {
                let error = Error::new(ErrorKind::Internal, "handle the request").caused_by(cause);
                return Problem::from(error).into_response();
            }
        },
    };
    match outcome {
        Ok(Ok(response)) => response,
        Ok(Err(problem)) => problem.into_response(),
        Err(_) => Problem::from(Error::unavailable(format!(
            "the operation did not complete within {OPERATION_TIMEOUT:?}"
        )))
        .into_response(),
    }
}

/// Reads a JSON body within the limits. The content type makes a browser ask before it sends the
/// request from a page of another origin.
async fn read_body(headers: &HeaderMap, body: Body) -> Result<Bytes, Problem> {
    let media_type = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(';').next())
        .map(str::trim);
    if !media_type.is_some_and(|name| name.eq_ignore_ascii_case("application/json")) {
        return Err(Problem::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            "invalid content type: expected application/json",
        ));
    }
    let body = Limited::new(body, MAX_BODY_BYTES).collect();
    match tokio::time::timeout(READ_TIMEOUT, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(cause)) if cause.is::<LengthLimitError>() => Err(Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "too_large",
            format!("the request body is larger than {MAX_BODY_BYTES} bytes"),
        )),
        Ok(Err(cause)) => Err(Error::usage("read the request body")
            .caused_by(cause)
            .into()),
        Err(_) => Err(Error::usage(format!(
            "the request body did not arrive within {READ_TIMEOUT:?}"
        ))
        .into()),
    }
}
