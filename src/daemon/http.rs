//! HTTP/1.1 to this machine: who is let in, how many, for how long, and how an answer looks. What is answered is decided elsewhere.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::daemon::listen::{Caller, Listener};

/// The longest request line with all headers, where nothing else is sent; a browser sends a kibibyte or two.
const LONGEST_HEAD: usize = 16 << 10;

/// What is answered.
pub type Answer = Response<UnsyncBoxBody<Bytes, std::io::Error>>;

/// What a server puts up with.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// So many may be connected at a time; who comes next waits.
    pub connections: usize,
    /// A caller has this long to send its headers.
    pub patience: Duration,
    /// A connection carries one call, and is cut after this long; without it, as many as the caller likes.
    pub one_call: Option<Duration>,
}

/// Answers calls.
#[async_trait::async_trait]
pub trait Answers: Send + Sync + 'static {
    /// Answers one.
    async fn answer(&self, request: Request<Incoming>) -> Answer;
}

/// Answers until `stop` is done, then lets those finish that have been asked, until the time that it says.
pub async fn serve(
    answers: Arc<impl Answers>,
    listener: Listener,
    limits: Limits,
    stop: impl Future<Output = Instant>,
) {
    let seats = Arc::new(Semaphore::new(limits.connections));
    let graceful = GracefulShutdown::new();
    tokio::pin!(stop);
    let deadline = loop {
        let next = async {
            let seat = seats.clone().acquire_owned().await;
            (seat, listener.accept().await)
        };
        tokio::select! {
            deadline = &mut stop => break deadline,
            (seat, caller) = next => match caller {
                Ok(Caller::Unix(stream)) => connect(&answers, limits, &graceful, stream, seat),
                Ok(Caller::Tcp(stream)) => connect(&answers, limits, &graceful, stream, seat),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    };
    drop(listener);
    if tokio::time::timeout_at(deadline, graceful.shutdown())
        .await
        .is_err()
    {
        tracing::warn!("out of time: some callers were not answered");
    }
}

fn connect<S, P>(
    answers: &Arc<impl Answers>,
    limits: Limits,
    graceful: &GracefulShutdown,
    stream: S,
    seat: P,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    P: Send + 'static,
{
    let answers = answers.clone();
    let service = service_fn(move |request| {
        let answers = answers.clone();
        async move { Ok::<_, Infallible>(answers.answer(request).await) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.patience);
    if limits.one_call.is_some() {
        builder.keep_alive(false).max_buf_size(LONGEST_HEAD);
    }
    let connection = graceful.watch(builder.serve_connection(TokioIo::new(stream), service));
    tokio::spawn(async move {
        let ended = match limits.one_call {
            None => connection.await,
            Some(limit) => tokio::time::timeout(limit, connection)
                .await
                .unwrap_or(Ok(())),
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection broke off");
        }
        drop(seat);
    });
}

/// Says something as JSON.
pub fn json(status: StatusCode, body: &impl Serialize) -> Answer {
    text(
        status,
        "application/json",
        serde_json::to_vec(body).unwrap_or_default(),
    )
}

/// Says something in one piece.
pub fn text(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    answer(
        status,
        kind,
        UnsyncBoxBody::new(Full::new(body.into()).map_err(|never| match never {})),
        None,
    )
}

/// Says something that may come in pieces.
pub fn answer(
    status: StatusCode,
    kind: &'static str,
    body: UnsyncBoxBody<Bytes, std::io::Error>,
    len: Option<u64>,
) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    if let Some(len) = len {
        answer.headers_mut().insert(CONTENT_LENGTH, len.into());
    }
    answer
}
