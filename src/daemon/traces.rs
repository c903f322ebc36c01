//! Traces of what a flush and a restore took: spans of `tracing` with the target `traced`, gathered and told to a collector in
//! batches over OTLP/HTTP with JSON.
//!
//! Owns the queue, which is bounded, and when it is emptied. Nothing ever waits for a collector: what it does not take is dropped.
//! Does not own how a span is spelt (`otlp`).

mod otlp;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::Notify;
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};
use tracing_subscriber::filter::{LevelFilter, filter_fn};
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

use self::otlp::{Attributes as Gathered, Resource, Span};
use crate::error::{Error, Result};
use crate::sys::outbound::Outbound;
use crate::sys::{Clock, Rng, SystemClock, SystemRng, TRACED};

/// So many spans wait at most: an hour of a busy session, half a mebibyte.
const MOST_WAITING: usize = 2048;
/// So many are told at once.
const BATCH: usize = 512;
/// What comes within this is told together.
const GATHER: Duration = Duration::from_secs(5);
/// At the end the collector has this long.
const LAST: Duration = Duration::from_secs(1);
/// A span of its own; all others are part of one.
const WHOLE: [&str; 2] = ["flush", "restore"];

/// Where traces go, as it was asked for.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// The collector; traces go to `v1/traces` below it.
    pub endpoint: Option<String>,
    /// What OpenTelemetry's own variables say.
    pub environment: Environment,
}

/// OpenTelemetry's own variables. They may be meant for the agent alone, so nothing in them is an error.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub endpoint: Option<String>,
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`: the whole address.
    pub traces_endpoint: Option<String>,
    /// `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` or `OTEL_EXPORTER_OTLP_PROTOCOL`.
    pub protocol: Option<String>,
    /// `OTEL_EXPORTER_OTLP_TRACES_HEADERS` or `OTEL_EXPORTER_OTLP_HEADERS`.
    pub headers: Option<String>,
    /// `OTEL_SERVICE_NAME`.
    pub service: Option<String>,
    /// `OTEL_RESOURCE_ATTRIBUTES`.
    pub resource: Option<String>,
    /// `OTEL_SDK_DISABLED` or `OTEL_TRACES_EXPORTER` turn traces off.
    pub disabled: bool,
}

impl Asked {
    /// Whether there may be somebody to tell.
    pub fn wanted(&self) -> bool {
        let told = &self.environment;
        self.endpoint.as_deref().map_or(
            !told.disabled && (told.endpoint.is_some() || told.traces_endpoint.is_some()),
            |url| url != "off",
        )
    }
}

impl Environment {
    /// Reads them.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Environment {
        let told = |name: &str| {
            variable(name)
                .map(|text| text.trim().to_owned())
                .filter(|text| !text.is_empty())
        };
        let is =
            |name: &str, text: &str| told(name).is_some_and(|told| told.eq_ignore_ascii_case(text));
        Environment {
            endpoint: told("OTEL_EXPORTER_OTLP_ENDPOINT"),
            traces_endpoint: told("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
            protocol: told("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
                .or_else(|| told("OTEL_EXPORTER_OTLP_PROTOCOL")),
            headers: told("OTEL_EXPORTER_OTLP_TRACES_HEADERS")
                .or_else(|| told("OTEL_EXPORTER_OTLP_HEADERS")),
            service: told("OTEL_SERVICE_NAME"),
            resource: told("OTEL_RESOURCE_ATTRIBUTES"),
            disabled: is("OTEL_SDK_DISABLED", "true") || is("OTEL_TRACES_EXPORTER", "none"),
        }
    }
}

/// A collector, and what is to be told to it.
pub struct Traces {
    queue: Mutex<Queue>,
    arrived: Notify,
    clock: Arc<dyn Clock>,
    rng: Arc<dyn Rng>,
}

#[derive(Default)]
struct Queue {
    spans: VecDeque<Span>,
    dropped: u64,
}

impl Traces {
    /// Begins to gather.
    pub fn new() -> Arc<Traces> {
        Arc::new(Traces {
            queue: Mutex::default(),
            arrived: Notify::new(),
            clock: Arc::new(SystemClock),
            rng: Arc::new(SystemRng),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What sees the spans.
    pub fn layer(self: &Arc<Self>) -> Box<dyn Layer<Registry> + Send + Sync> {
        let wanted =
            filter_fn(|metadata: &Metadata<'_>| metadata.is_span() && metadata.target() == TRACED);
        Gatherer(self.clone())
            .with_filter(wanted.with_max_level_hint(LevelFilter::INFO))
            .boxed()
    }

    fn add(&self, span: Span) {
        let mut queue = self.lock();
        if queue.spans.len() == MOST_WAITING {
            queue.spans.pop_front();
            queue.dropped += 1;
        }
        queue.spans.push_back(span);
        drop(queue);
        self.arrived.notify_one();
    }

    fn take(&self) -> (Vec<Span>, u64) {
        let mut queue = self.lock();
        let most = queue.spans.len().min(BATCH);
        (
            queue.spans.drain(..most).collect(),
            std::mem::take(&mut queue.dropped),
        )
    }
}

/// Tells a collector.
pub struct Exporter {
    traces: Arc<Traces>,
    server: Outbound,
    headers: Vec<(String, String)>,
    resource: Resource,
    /// Whether the collector took the last batch, if there was one.
    heard: Option<bool>,
}

impl Exporter {
    /// One for what was asked; none if nothing was.
    pub async fn of(
        asked: &Asked,
        traces: &Arc<Traces>,
        ca_file: Option<&std::path::Path>,
    ) -> Result<Option<Exporter>> {
        let told = &asked.environment;
        let server = match (&asked.endpoint, &told.traces_endpoint, &told.endpoint) {
            (Some(url), _, _) => Some(
                Outbound::to("--otlp-endpoint", url, ca_file)
                    .await?
                    .below("v1/traces"),
            ),
            (None, None, None) => None,
            // They may be meant for the agent alone, so what we cannot use is no error.
            _ if told.protocol.as_deref() == Some("grpc") => {
                tracing::info!(
                    "no traces: OTEL_EXPORTER_OTLP_PROTOCOL is grpc, and sessiond speaks HTTP; --otlp-endpoint names a collector"
                );
                None
            }
            (None, Some(url), _) => {
                usable(Outbound::to("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url, ca_file).await)
            }
            (None, None, Some(url)) => {
                usable(Outbound::to("OTEL_EXPORTER_OTLP_ENDPOINT", url, ca_file).await)
                    .map(|server| server.below("v1/traces"))
            }
        };
        let Some(server) = server else {
            return Ok(None);
        };
        let mut headers = otlp::pairs(told.headers.as_deref());
        headers.push(("content-type".to_owned(), "application/json".to_owned()));
        let resource = Resource::new(told.service.as_deref(), told.resource.as_deref());
        Ok(Some(Exporter {
            traces: traces.clone(),
            server,
            headers,
            resource,
            heard: None,
        }))
    }

    /// Tells for ever; drop it to stop.
    pub async fn run(&mut self) {
        loop {
            self.traces.arrived.notified().await;
            tokio::time::sleep(GATHER).await;
            self.empty().await;
        }
    }

    /// Tells what is there, batch by batch, and drops what is not taken.
    pub async fn empty(&mut self) {
        loop {
            let (spans, mut dropped) = self.traces.take();
            let mut failed = None;
            if !spans.is_empty() {
                let body = otlp::request(&self.resource, &spans);
                if let Err(error) = self.server.post(&self.headers, body).await {
                    dropped += spans.len() as u64;
                    failed = Some(error);
                }
                let heard = failed.is_none();
                if self.heard.replace(heard) != Some(heard) {
                    match &failed {
                        Some(error) => {
                            tracing::warn!(%error, "the collector does not take traces; they are dropped, streaming goes on")
                        }
                        None => {
                            tracing::info!(to = self.server.place(), "the collector takes traces")
                        }
                    }
                }
            }
            if dropped > 0 {
                tracing::debug!(dropped, "spans were dropped");
            }
            // Who did not take one batch is not asked to take the next at once.
            if spans.len() < BATCH || failed.is_some() {
                return;
            }
        }
    }
}

/// An exporter at work.
pub struct Telling(
    Option<(
        tokio::task::JoinHandle<()>,
        Arc<tokio::sync::Mutex<Exporter>>,
    )>,
);

impl Telling {
    /// Starts it, if there is one.
    pub fn start(exporter: Option<Exporter>) -> Telling {
        Telling(exporter.map(|exporter| {
            let exporter = Arc::new(tokio::sync::Mutex::new(exporter));
            let at_work = exporter.clone();
            (
                tokio::spawn(async move { at_work.lock().await.run().await }),
                exporter,
            )
        }))
    }

    /// Tells what is left, if the collector takes it soon.
    pub async fn finish(self) {
        let Some((task, exporter)) = self.0 else {
            return;
        };
        task.abort();
        let last = async { exporter.lock().await.empty().await };
        if tokio::time::timeout(LAST, last).await.is_err() {
            tracing::warn!("the collector does not answer; the last traces are dropped");
        }
    }
}

fn usable(server: Result<Outbound>) -> Option<Outbound> {
    let told = |error: &Error| tracing::warn!(%error, "no traces");
    server.inspect_err(told).ok()
}

/// Sees spans begin and end.
struct Gatherer(Arc<Traces>);

/// What is known of a span that has not ended.
struct Open {
    trace: u128,
    id: u64,
    parent: Option<u64>,
    began: Timestamp,
    attributes: Gathered,
}

impl<S> Layer<S> for Gatherer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let above = span.parent().and_then(|parent| {
            parent
                .extensions()
                .get::<Open>()
                .map(|open| (open.trace, open.id))
        });
        // Others read logs too; only what is part of a flush or a restore is told.
        if above.is_none() && !WHOLE.contains(&span.name()) {
            return;
        }
        let rng = || self.0.rng.next().max(1);
        let mut gathered = Gathered::default();
        attributes.record(&mut gathered);
        span.extensions_mut().insert(Open {
            trace: above.map_or_else(
                || u128::from(rng()) << 64 | u128::from(rng()),
                |(trace, _)| trace,
            ),
            id: rng(),
            parent: above.map(|(_, id)| id),
            began: self.0.clock.now(),
            attributes: gathered,
        });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            values.record(&mut open.attributes);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else {
            return;
        };
        let Some(Open {
            trace,
            id,
            parent,
            began,
            attributes,
        }) = span.extensions_mut().remove::<Open>()
        else {
            return;
        };
        let ended = self.0.clock.now().max(began);
        self.0.add(Span {
            name: span.name(),
            trace,
            id,
            parent,
            began,
            ended,
            attributes,
        });
    }
}
