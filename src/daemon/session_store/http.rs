//! The session store over HTTP/1.1: one POST per call, JSON in, JSON or JSON lines out.
//!
//! Owns routes, request limits and status codes. Does not own what each call does (`super`).

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::header::{
    AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, ORIGIN, WWW_AUTHENTICATE,
};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::token::Token;
use super::{
    Append, RequestKey, SessionStore, SessionSummary, SummaryUpdate, TranscriptLines, project_id,
};
use crate::error::{Error, ErrorKind, Result};
use crate::http::browser::has_local_host;
use crate::http::listen::Listener;
use crate::http::server::{self, ServerLimits};

/// Maximum size of a request body. The SDK sends up to a mebibyte or 500 entries at a time, and one
/// entry can contain the complete output of a tool.
const MAX_BODY_BYTES: u64 = 64 << 20;

/// Maximum size of all request bodies in memory together, in kibibytes.
const BODY_BUDGET_KIB: u32 = 128 << 10;

/// Maximum size of a summary, which holds a title, a prompt and a few flags.
const MAX_SUMMARY_BYTES: usize = 64 << 10;

/// Maximum length of a batch ID.
const MAX_BATCH_ID_LEN: usize = 128;

/// Maximum number of concurrent connections; further connections wait.
const MAX_CONNECTIONS: usize = 256;

/// Time limit for the headers of a request, and again for its body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a response may wait for the client to read. After that, its connection is closed: it
/// would take the place of another client.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Time limit for a complete response. The largest transcripts have a gigabyte.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(600);

/// Size of the chunks in which a transcript is sent.
const CHUNK_BYTES: u64 = 64 << 10;

const PATHS: [&str; 7] = [
    "/v1/append",
    "/v1/load",
    "/v1/list-sessions",
    "/v1/list-session-summaries",
    "/v1/summary",
    "/v1/list-subkeys",
    "/v1/delete",
];

/// Serves requests until `shutdown` completes, then finishes the pending ones before the deadline
/// that `shutdown` returned.
pub async fn serve(
    store: Arc<SessionStore>,
    listener: Listener,
    token: Option<Token>,
    shutdown: impl Future<Output = Instant>,
) {
    let limits = ServerLimits {
        max_connections: MAX_CONNECTIONS,
        header_timeout: READ_TIMEOUT,
        max_head_len: None,
        single_request_timeout: None,
        write_timeout: WRITE_TIMEOUT,
    };
    server::serve(router(store, token), listener, limits, shutdown).await;
}

/// The state that all handlers share.
#[derive(Clone)]
struct Api {
    store: Arc<SessionStore>,
    body_budget: Arc<Semaphore>,
}

fn router(store: Arc<SessionStore>, token: Option<Token>) -> Router {
    let token = Arc::new(token);
    let api = Api {
        store,
        body_budget: Arc::new(Semaphore::new(BODY_BUDGET_KIB as usize)),
    };
    Router::new()
        .route("/health", get(health))
        .route("/v1/append", post(append))
        .route("/v1/load", post(load))
        .route("/v1/list-sessions", post(list_sessions))
        .route("/v1/list-session-summaries", post(list_session_summaries))
        .route("/v1/summary", post(summary))
        .route("/v1/list-subkeys", post(list_subkeys))
        .route("/v1/delete", post(delete))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        // `JsonBody` limits bodies itself.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn(run_to_completion))
        .layer(from_fn(move |request: Request, next: Next| {
            let token = token.clone();
            async move { authorize(token.as_ref().as_ref(), request, next).await }
        }))
        .layer(from_fn(log_response))
        .with_state(api)
}

async fn log_response(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let response = next.run(request).await;
    tracing::debug!(path, status = response.status().as_u16(), "responded");
    response
}

/// Rejects requests without the token. Without a token to check, rejects requests that a web page
/// can make to a port of the local machine: a browser sends the page's origin, or a host name that
/// an attacker made resolve to this machine.
async fn authorize(token: Option<&Token>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let is_web_page = headers.get(ORIGIN).is_some() || token.is_none() && !has_local_host(headers);
    if is_web_page {
        let error = Error::usage("the session store serves local programs only, not web pages");
        return ApiError(error).into_response();
    }
    let authorization = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
    if token.is_some_and(|token| !token.is_in(authorization)) {
        return unauthorized();
    }
    next.run(request).await
}

fn unauthorized() -> Response {
    let body = json!({
        "error": "the token is missing or wrong",
        "hint": "send the token of --token-file as \"Authorization: Bearer TOKEN\"",
    });
    let scheme = [(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))];
    (StatusCode::UNAUTHORIZED, scheme, Json(body)).into_response()
}

/// Runs each request in a task of its own, so that a client that disconnects does not interrupt it
/// halfway.
async fn run_to_completion(request: Request, next: Next) -> Response {
    tokio::spawn(next.run(request))
        .await
        .unwrap_or_else(|cause| {
            let error = Error::new(ErrorKind::Internal, "handle the request").caused_by(cause);
            ApiError(error).into_response()
        })
}

/// A complete request body of type `application/json`, read within the limits.
struct JsonBody {
    bytes: Bytes,
    /// The share of the body budget, until the request is done.
    _permit: OwnedSemaphorePermit,
}

impl JsonBody {
    fn parse<'a, T: Deserialize<'a>>(&'a self) -> Result<T> {
        serde_json::from_slice(&self.bytes)
            .map_err(|cause| Error::usage(format!("invalid request body: {cause}")))
    }
}

impl FromRequest<Api> for JsonBody {
    type Rejection = Response;

    async fn from_request(request: Request, api: &Api) -> Result<JsonBody, Response> {
        let reject = |error| ApiError(error).into_response();
        let content_type = request.headers().get(CONTENT_TYPE);
        if content_type.is_none_or(|value| value != "application/json") {
            return Err(reject(Error::usage(
                "invalid content type: expected application/json",
            )));
        }
        let expected = request.body().size_hint().upper().unwrap_or(MAX_BODY_BYTES);
        if expected > MAX_BODY_BYTES {
            return Err(too_large());
        }
        let kibibytes = u32::try_from(expected / 1024 + 1).unwrap_or(BODY_BUDGET_KIB);
        let permit = api.body_budget.clone().acquire_many_owned(kibibytes).await;
        let permit = permit.map_err(|cause| {
            reject(Error::new(ErrorKind::Internal, "reserve memory").caused_by(cause))
        })?;
        let body = Limited::new(request.into_body(), MAX_BODY_BYTES as usize).collect();
        match tokio::time::timeout(READ_TIMEOUT, body).await {
            Ok(Ok(body)) => Ok(JsonBody {
                bytes: body.to_bytes(),
                _permit: permit,
            }),
            Ok(Err(cause)) if cause.is::<LengthLimitError>() => Err(too_large()),
            Ok(Err(cause)) => Err(reject(
                Error::usage("read the request body").caused_by(cause),
            )),
            Err(_) => Err(reject(Error::usage(format!(
                "the request body did not arrive within {READ_TIMEOUT:?}"
            )))),
        }
    }
}

/// An error as a response.
struct ApiError(Error);

impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        ApiError(error)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let ApiError(error) = self;
        let status = match error.kind() {
            ErrorKind::Usage => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Fenced | ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Corrupt
            | ErrorKind::Encrypted
            | ErrorKind::NewerFormat
            | ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        if status.is_server_error() {
            tracing::warn!(%error, "a request failed");
        }
        let body = json!({ "error": error.to_string(), "hint": error.hint_text() });
        (status, Json(body)).into_response()
    }
}

/// Turns a usage error into a server error. Once a request is parsed, a failure is not the client's
/// fault: the bucket may not exist, for example.
fn server_side<T>(result: Result<T>) -> Result<T> {
    result.map_err(|error| match (error.kind(), error.hint_text()) {
        (ErrorKind::Usage | ErrorKind::NotFound, hint) => {
            Error::new(ErrorKind::Internal, error.to_string())
                .hint(hint.unwrap_or("check the output of \"sessiond serve-store\""))
        }
        _ => error,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AppendRequest<'a> {
    key: RequestKey,
    #[serde(default)]
    batch_id: Option<String>,
    #[serde(borrow)]
    entries: Vec<&'a RawValue>,
    #[serde(borrow, default)]
    summary: Option<SummaryRequest<'a>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SummaryRequest<'a> {
    base_version: u64,
    #[serde(borrow)]
    data: &'a RawValue,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyRequest {
    key: RequestKey,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProjectRequest {
    project_key: String,
}

/// A struct, because `json!` would not keep the summaries byte for byte.
#[derive(Serialize)]
struct SummariesResponse {
    summaries: Vec<SessionSummary>,
}

async fn health() -> Response {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") })).into_response()
}

async fn append(State(api): State<Api>, body: JsonBody) -> Result<Response, ApiError> {
    let request: AppendRequest<'_> = body.parse()?;
    let key = api.store.key(&request.key)?;
    let is_object = |value: &RawValue| value.get().starts_with('{');
    if let Some(position) = request.entries.iter().position(|entry| !is_object(entry)) {
        return Err(Error::usage(format!("entry {position} is not a JSON object")).into());
    }
    let is_valid_id = |id: &String| (1..=MAX_BATCH_ID_LEN).contains(&id.len());
    if !request.batch_id.as_ref().is_none_or(is_valid_id) {
        return Err(Error::usage(format!(
            "invalid batch_id: expected 1 to {MAX_BATCH_ID_LEN} characters"
        ))
        .into());
    }
    let summary = request.summary.map(|summary| SummaryUpdate {
        base_version: summary.base_version,
        data: summary.data,
    });
    if summary.is_some_and(|summary| {
        summary.data.get().len() > MAX_SUMMARY_BYTES || !is_object(summary.data)
    }) {
        return Err(Error::usage(format!(
            "invalid summary: expected a JSON object of at most {MAX_SUMMARY_BYTES} bytes"
        ))
        .into());
    }
    let append = Append {
        batch_id: request.batch_id.as_deref(),
        entries: &request.entries,
        summary,
    };
    match server_side(api.store.append(&key, append).await)? {
        Some(appended) => Ok(Json(appended).into_response()),
        None => {
            let error = "the summary is outdated: its base_version is not the current version";
            let hint = "get the current summary from /v1/summary and append again";
            let body = Json(json!({ "error": error, "hint": hint }));
            Ok((StatusCode::PRECONDITION_FAILED, body).into_response())
        }
    }
}

async fn load(State(api): State<Api>, body: JsonBody) -> Result<Response, ApiError> {
    let key = api.store.key(&body.parse::<KeyRequest>()?.key)?;
    let lines = server_side(api.store.load(&key).await)?;
    Ok(lines.map_or_else(absent, stream_lines))
}

async fn list_sessions(State(api): State<Api>, body: JsonBody) -> Result<Response, ApiError> {
    let project = project_id(&body.parse::<ProjectRequest>()?.project_key)?;
    let sessions = server_side(api.store.list(&project).await)?;
    Ok(Json(json!({ "sessions": sessions })).into_response())
}

async fn list_session_summaries(
    State(api): State<Api>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let project = project_id(&body.parse::<ProjectRequest>()?.project_key)?;
    let summaries = server_side(api.store.summaries(&project))?;
    Ok(Json(SummariesResponse { summaries }).into_response())
}

async fn summary(State(api): State<Api>, body: JsonBody) -> Result<Response, ApiError> {
    let key = api.store.key(&body.parse::<KeyRequest>()?.key)?;
    let summary = server_side(api.store.summary(&key).await)?;
    Ok(summary.map_or_else(absent, |summary| Json(summary).into_response()))
}

async fn list_subkeys(State(api): State<Api>, body: JsonBody) -> Result<Response, ApiError> {
    let key = api.store.key(&body.parse::<KeyRequest>()?.key)?;
    let subkeys = server_side(api.store.subkeys(&key).await)?;
    Ok(Json(json!({ "subkeys": subkeys })).into_response())
}

async fn delete(State(api): State<Api>, body: JsonBody) -> Result<Response, ApiError> {
    let key = api.store.key(&body.parse::<KeyRequest>()?.key)?;
    server_side(api.store.delete(&key).await)?;
    Ok(Json(json!({})).into_response())
}

async fn not_found(uri: Uri) -> Response {
    let body = json!({ "error": format!("unknown path {:?}", uri.path()), "paths": PATHS });
    (StatusCode::NOT_FOUND, Json(body)).into_response()
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let error = format!("method {method} is not allowed for {}", uri.path());
    (
        StatusCode::METHOD_NOT_ALLOWED,
        Json(json!({ "error": error })),
    )
        .into_response()
}

/// The response for a transcript or summary that does not exist.
fn absent() -> Response {
    let body = json!({ "error": "not found" });
    (StatusCode::NOT_FOUND, Json(body)).into_response()
}

fn too_large() -> Response {
    let body = json!({
        "error": format!("the request body is larger than {MAX_BODY_BYTES} bytes"),
        "hint": "send fewer entries per request",
    });
    (StatusCode::PAYLOAD_TOO_LARGE, Json(body)).into_response()
}

/// Sends a transcript in chunks, so that memory does not grow with its size. A client that reads too
/// slowly loses its connection.
fn stream_lines(lines: TranscriptLines) -> Response {
    let len = lines.len;
    let deadline = Instant::now() + RESPONSE_TIMEOUT;
    let chunks = futures_util::stream::try_unfold((lines, 0), move |(lines, offset)| async move {
        if offset == lines.len {
            return Ok(None);
        }
        if Instant::now() >= deadline {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        let mut chunk = vec![0; (lines.len - offset).min(CHUNK_BYTES) as usize];
        let read = lines.file.read_at(&mut chunk, offset)?;
        if read == 0 {
            return Err(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                "the transcript was truncated while it was read",
            ));
        }
        chunk.truncate(read);
        Ok(Some((Bytes::from(chunk), (lines, offset + read as u64))))
    });
    let headers = [
        (
            CONTENT_TYPE,
            HeaderValue::from_static("application/x-ndjson"),
        ),
        (CONTENT_LENGTH, HeaderValue::from(len)),
    ];
    (headers, Body::from_stream(chunks)).into_response()
}
