//! Server-sent events: new messages of a session, and changed rows of the list.

use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use super::access::Role;
use super::endpoint::{Call, Endpoint, NoQuery, get};
use super::feed::SessionChange;
use super::problem::Problem;
use super::sessions::redacted;
use crate::error::Result;
use crate::log::errors;

/// Time after which a comment is sent, so that proxies keep the connection open and a client that is
/// gone is noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

pub fn endpoints() -> Vec<Endpoint> {
    vec![
        get(
            "/sessions/{agent}/{session}/events",
            "followSession",
            Role::Reader,
            "Follow a session: an event for each new message.",
        )
        .bytes("text/event-stream", session),
        get(
            "/events",
            "followSessions",
            Role::Metadata,
            "Follow the list of sessions: an event for each session that changes.",
        )
        .bytes("text/event-stream", list),
    ]
}

async fn session(call: Call, NoQuery {}: NoQuery) -> Result<Response, Problem> {
    let permit = subscription(&call)?;
    let (parts, id) = call.session()?;
    if parts.logs.list_newest_segments(&id).await?.is_empty() {
        return Err(errors::not_found(&id).into());
    }
    let feed = call.api.feeds.session(&parts.logs, &parts.profile, &id);
    Ok(stream(&call, feed, permit, |change| match change {
        SessionChange::Message(message) => event("message", &*message),
        SessionChange::Removed => event("removed", &json!({})),
        SessionChange::Damaged(damage) => event("damaged", &json!({ "detail": &*damage })),
        SessionChange::Failed(error) => event("failed", &json!({ "detail": &*error })),
    }))
}

async fn list(call: Call, NoQuery {}: NoQuery) -> Result<Response, Problem> {
    let permit = subscription(&call)?;
    let feed = call.api.feeds.list(&call.api.parts.index, &call.namespace);
    let reads_content = call.reads_content();
    Ok(stream(&call, feed, permit, move |row| {
        event("session", &redacted((*row).clone(), reads_content))
    }))
}

/// A place for another subscriber. They must leave connections to other clients.
fn subscription(call: &Call) -> Result<OwnedSemaphorePermit, Problem> {
    let permit = call.api.subscriptions.clone().try_acquire_owned();
    permit.map_err(|_| {
        Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable",
            "too many clients follow sessions",
        )
        .hint("retry later, or use another server")
    })
}

/// One event, as the standard for event streams defines it. JSON has no line breaks.
fn event(name: &str, data: &impl Serialize) -> String {
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n")
}

/// Sends the events of a feed until it ends, the client leaves or the server stops.
fn stream<T: Clone + Send + 'static>(
    call: &Call,
    feed: Receiver<T>,
    permit: OwnedSemaphorePermit,
    format: impl Fn(T) -> String + Send + 'static,
) -> Response {
    let stopping = call.api.stopping.subscribe();
    let state = (feed, permit, stopping, format, true);
    let events = futures_util::stream::unfold(
        state,
        |(mut feed, permit, mut stopping, format, is_first)| async move {
            if is_first {
                // The client sees at once that it is subscribed.
                let started = Bytes::from_static(b": subscribed\n\n");
                return Some((
                    Ok::<_, io::Error>(started),
                    (feed, permit, stopping, format, false),
                ));
            }
            let text = tokio::select! {
                _ = stopping.wait_for(|is_stopping| *is_stopping) => return None,
                () = tokio::time::sleep(KEEP_ALIVE) => ": keep-alive\n\n".to_owned(),
                change = feed.recv() => match change {
                    Ok(change) => format(change),
                    Err(RecvError::Lagged(lost)) => event("lost", &json!({ "events": lost })),
                    Err(RecvError::Closed) => return None,
                },
            };
            Some((
                Ok(Bytes::from(text)),
                (feed, permit, stopping, format, false),
            ))
        },
    );
    let media_type = HeaderValue::from_static("text/event-stream");
    ([(CONTENT_TYPE, media_type)], Body::from_stream(events)).into_response()
}
