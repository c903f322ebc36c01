//! The store over HTTP/1.1: one POST a call, JSON in, JSON or lines out. Owns limits, routes and status codes; decides nothing
//! about sessions.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited, StreamBody};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap, ORIGIN};
use hyper::{Method, Request, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{Batch, Lines, Sent, SessionStore, project};
use crate::daemon::http::{self, Answer, Answers, Limits};
use crate::daemon::listen::Listener;
use crate::error::{Error, ErrorKind, Result};

/// The largest append. The SDK sends a mebibyte or 500 entries, and an entry can hold a tool's whole output.
const LARGEST: u64 = 64 << 20;

/// All requests together hold at most this much, in kibibytes.
const ALL_TOGETHER: u32 = 128 << 10;

/// A summary is a title, a prompt and a few flags.
const LARGEST_SUMMARY: usize = 64 << 10;

/// So many may be connected at a time; who comes next waits.
const CONNECTIONS: usize = 256;

/// A caller has this long to send its headers, and again for the body.
const PATIENCE: Duration = Duration::from_secs(30);

/// So much of a transcript is sent at a time.
const CHUNK: u64 = 64 << 10;

struct Server {
    store: Arc<SessionStore>,
    room: Semaphore,
}

/// Answers until `stop` is done, then lets those finish that have been asked, until the time that it says.
pub async fn serve(
    store: Arc<SessionStore>,
    listener: Listener,
    stop: impl Future<Output = Instant>,
) {
    let server = Server {
        store,
        room: Semaphore::new(ALL_TOGETHER as usize),
    };
    let limits = Limits {
        connections: CONNECTIONS,
        patience: PATIENCE,
        one_call: None,
    };
    http::serve(Arc::new(server), listener, limits, stop).await;
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AppendCall<'a> {
    key: Sent,
    #[serde(default)]
    batch: Option<String>,
    #[serde(borrow)]
    entries: Vec<&'a RawValue>,
    #[serde(borrow, default)]
    summary: Option<SummaryCall<'a>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SummaryCall<'a> {
    after: u64,
    #[serde(borrow)]
    data: &'a RawValue,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyCall {
    key: Sent,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProjectCall {
    project_key: String,
}

#[async_trait::async_trait]
impl Answers for Server {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path().to_owned();
        let answer = match self.call(&path, request).await {
            Ok(answer) => answer,
            Err(error) => refused(&error),
        };
        tracing::debug!(path, status = answer.status().as_u16(), "answered");
        answer
    }
}

impl Server {
    async fn call(&self, path: &str, request: Request<Incoming>) -> Result<Answer> {
        if !from_here(request.headers()) {
            return Err(Error::usage(
                "this is for programs on this machine, not for web pages",
            ));
        }
        if (request.method(), path) == (&Method::GET, "/health") {
            return Ok(http::json(
                StatusCode::OK,
                &json!({ "version": env!("CARGO_PKG_VERSION") }),
            ));
        }
        if !CALLS.contains(&path) {
            return Ok(http::json(
                StatusCode::NOT_FOUND,
                &json!({ "error": format!("there is no call {path}"), "calls": CALLS }),
            ));
        }
        if request.method() != Method::POST
            || request
                .headers()
                .get(CONTENT_TYPE)
                .is_none_or(|kind| kind != "application/json")
        {
            return Err(Error::usage(format!(
                "{path}: a POST of application/json is wanted"
            )));
        }
        let expected = request.body().size_hint().upper().unwrap_or(LARGEST);
        if expected > LARGEST {
            return Ok(too_large());
        }
        let kibibytes = u32::try_from(expected / 1024 + 1).unwrap_or(ALL_TOGETHER);
        let _room =
            self.room.acquire_many(kibibytes).await.map_err(|cause| {
                Error::new(ErrorKind::Internal, "wait for room").caused_by(cause)
            })?;
        let body = Limited::new(request.into_body(), LARGEST as usize).collect();
        let body = match tokio::time::timeout(PATIENCE, body).await {
            Err(_) => {
                return Err(Error::usage(format!(
                    "{path}: the body did not arrive within {PATIENCE:?}"
                )));
            }
            Ok(Err(cause)) if cause.is::<LengthLimitError>() => return Ok(too_large()),
            Ok(Err(cause)) => {
                return Err(Error::usage(format!("{path}: read the body")).caused_by(cause));
            }
            Ok(Ok(body)) => body.to_bytes(),
        };
        let (store, path) = (self.store.clone(), path.to_owned());
        // A caller that hangs up does not leave half a call behind.
        let done = tokio::spawn(async move { dispatch(&store, &path, &body).await }).await;
        done.map_err(|cause| Error::new(ErrorKind::Internal, "answer a call").caused_by(cause))?
    }
}

const APPEND: &str = "/v1/append";
const LOAD: &str = "/v1/load";
const LIST: &str = "/v1/list-sessions";
const SUMMARIES: &str = "/v1/list-session-summaries";
const SUMMARY: &str = "/v1/summary";
const SUBKEYS: &str = "/v1/list-subkeys";
const DELETE: &str = "/v1/delete";
const CALLS: [&str; 7] = [APPEND, LOAD, LIST, SUMMARIES, SUMMARY, SUBKEYS, DELETE];

async fn dispatch(store: &SessionStore, path: &str, body: &[u8]) -> Result<Answer> {
    match path {
        APPEND => append(store, read(body)?).await,
        LIST | SUMMARIES => {
            let project = project(&read::<ProjectCall>(body)?.project_key)?;
            match path {
                LIST => Ok(found(
                    &json!({ "sessions": served(store.list(&project).await)? }),
                )),
                _ => Ok(found(
                    &json!({ "summaries": served(store.summaries(&project))? }),
                )),
            }
        }
        _ => {
            let key = store.key(&read::<KeyCall>(body)?.key)?;
            match path {
                LOAD => Ok(served(store.load(&key).await)?.map_or_else(absent, lines)),
                SUBKEYS => Ok(found(
                    &json!({ "subkeys": served(store.subkeys(&key).await)? }),
                )),
                SUMMARY => Ok(served(store.summary(&key).await)?
                    .map_or_else(absent, |summary| found(&summary))),
                _ => served(store.delete(&key).await).map(|()| found(&json!({}))),
            }
        }
    }
}

/// Once a call is understood, what fails is not the caller's fault: a bucket that does not exist, say.
fn served<T>(done: Result<T>) -> Result<T> {
    done.map_err(|error| match (error.kind(), error.hint_text()) {
        (ErrorKind::Usage | ErrorKind::NotFound, hint) => {
            Error::new(ErrorKind::Internal, error.to_string())
                .hint(hint.unwrap_or("see the server's log"))
        }
        _ => error,
    })
}

async fn append(store: &SessionStore, call: AppendCall<'_>) -> Result<Answer> {
    let key = store.key(&call.key)?;
    if let Some(at) = call
        .entries
        .iter()
        .position(|entry| !entry.get().starts_with('{'))
    {
        return Err(Error::usage(format!(
            "append: entry {at} is not a JSON object"
        )));
    }
    if call
        .batch
        .as_ref()
        .is_some_and(|batch| batch.is_empty() || batch.len() > 128)
    {
        return Err(Error::usage(
            "append: the name of a batch has 1 to 128 characters",
        ));
    }
    let summary = call.summary.map(|summary| (summary.after, summary.data));
    if summary
        .is_some_and(|(_, data)| data.get().len() > LARGEST_SUMMARY || !data.get().starts_with('{'))
    {
        return Err(Error::usage(format!(
            "append: a summary is a JSON object of at most {LARGEST_SUMMARY} bytes"
        )));
    }
    let batch = Batch {
        id: call.batch.as_deref(),
        entries: &call.entries,
        summary,
    };
    match served(store.append(&key, batch).await)? {
        Some(appended) => Ok(found(&appended)),
        None => {
            let error = "the summary was made from another one than there is now; nothing is written: ask for it and send again";
            Ok(http::json(
                StatusCode::PRECONDITION_FAILED,
                &json!({ "error": error }),
            ))
        }
    }
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|cause| Error::usage("read the body").caused_by(cause))
}

/// A page in a browser can reach a port of its own machine: it sends where it comes from, or a name that somebody made point here.
fn from_here(headers: &HeaderMap) -> bool {
    let host = headers
        .get(HOST)
        .and_then(|host| host.to_str().ok())
        .unwrap_or_default();
    let name = host
        .rsplit_once(':')
        .filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()))
        .map_or(host, |(name, _)| name);
    headers.get(ORIGIN).is_none() && matches!(name, "" | "localhost" | "127.0.0.1" | "[::1]")
}

fn found(body: &impl Serialize) -> Answer {
    http::json(StatusCode::OK, body)
}

fn absent() -> Answer {
    http::json(StatusCode::NOT_FOUND, &json!({ "absent": true }))
}

fn too_large() -> Answer {
    http::json(
        StatusCode::PAYLOAD_TOO_LARGE,
        &json!({ "error": format!("the body has more than {LARGEST} bytes"), "hint": "send fewer entries at a time" }),
    )
}

fn refused(error: &Error) -> Answer {
    let status = match error.kind() {
        ErrorKind::Usage => StatusCode::BAD_REQUEST,
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Fenced | ErrorKind::Conflict => StatusCode::CONFLICT,
        ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Corrupt | ErrorKind::Encrypted | ErrorKind::Internal => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    };
    if status.is_server_error() {
        tracing::warn!(%error, "a call failed");
    }
    http::json(
        status,
        &json!({ "error": error.to_string(), "hint": error.hint_text() }),
    )
}

/// A transcript, piece by piece: memory does not grow with it.
fn lines(lines: Lines) -> Answer {
    let len = lines.len;
    let pieces = futures_util::stream::try_unfold((lines, 0), |(lines, at)| async move {
        if at == lines.len {
            return Ok(None);
        }
        let mut piece = vec![0; (lines.len - at).min(CHUNK) as usize];
        let got = lines.file.read_at(&mut piece, at)?;
        if got == 0 {
            return Err(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                "the transcript was cut while it was read",
            ));
        }
        piece.truncate(got);
        Ok(Some((
            Frame::data(Bytes::from(piece)),
            (lines, at + got as u64),
        )))
    });
    http::answer(
        StatusCode::OK,
        "application/x-ndjson",
        BodyExt::boxed_unsync(StreamBody::new(pieces)),
        Some(len),
    )
}
