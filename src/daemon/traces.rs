//! Traces of flushes and restores: `tracing` spans with the target `traced`, exported in batches to
//! a collector over OTLP/HTTP with JSON.
//!
//! Owns the bounded queue of spans and its export. No operation waits for the collector: spans that
//! it does not accept are dropped. Does not own the encoding of a span (`otlp`).

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

use self::otlp::{Resource, Span, SpanAttributes};
use crate::error::{Error, Result};
use crate::sys::outbound::OutboundEndpoint;
use crate::sys::{Clock, Rng, SystemClock, SystemRng, TRACE_TARGET};

/// Maximum number of spans in the queue: an hour of a busy session, half a mebibyte.
const MAX_QUEUED_SPANS: usize = 2048;
/// Maximum number of spans per request.
const MAX_BATCH_SPANS: usize = 512;
/// Time to wait for more spans before a batch is sent.
const BATCH_DELAY: Duration = Duration::from_secs(5);
/// Time limit for the last export before the process ends.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// Names of the spans that start a trace. All other spans are part of one of them.
const ROOT_SPANS: [&str; 2] = ["flush", "restore"];

/// Where traces are sent, according to the settings.
#[derive(Debug, Clone, Default)]
pub struct TraceSettings {
    /// The collector, or `off`. Traces are sent to `v1/traces` below it.
    pub endpoint: Option<String>,
    /// The variables of OpenTelemetry.
    pub environment: Environment,
}

/// The environment variables of OpenTelemetry. They may be set for the agent only, so an unusable
/// value is not an error.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub endpoint: Option<String>,
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`: the complete URL.
    pub traces_endpoint: Option<String>,
    /// `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` or `OTEL_EXPORTER_OTLP_PROTOCOL`.
    pub protocol: Option<String>,
    /// `OTEL_EXPORTER_OTLP_TRACES_HEADERS` or `OTEL_EXPORTER_OTLP_HEADERS`.
    pub headers: Option<String>,
    /// `OTEL_SERVICE_NAME`.
    pub service: Option<String>,
    /// `OTEL_RESOURCE_ATTRIBUTES`.
    pub resource: Option<String>,
    /// Whether `OTEL_SDK_DISABLED` or `OTEL_TRACES_EXPORTER` disables traces.
    pub disabled: bool,
}

impl TraceSettings {
    /// Whether traces are enabled.
    pub fn is_enabled(&self) -> bool {
        let variables = &self.environment;
        let has_endpoint = variables.endpoint.is_some() || variables.traces_endpoint.is_some();
        self.endpoint
            .as_deref()
            .map_or(!variables.disabled && has_endpoint, |url| url != "off")
    }
}

impl Environment {
    /// Reads the variables. An empty variable counts as unset.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Environment {
        let value = |name: &str| {
            variable(name)
                .map(|text| text.trim().to_owned())
                .filter(|text| !text.is_empty())
        };
        let equals = |name: &str, expected: &str| {
            value(name).is_some_and(|value| value.eq_ignore_ascii_case(expected))
        };
        Environment {
            endpoint: value("OTEL_EXPORTER_OTLP_ENDPOINT"),
            traces_endpoint: value("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
            protocol: value("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
                .or_else(|| value("OTEL_EXPORTER_OTLP_PROTOCOL")),
            headers: value("OTEL_EXPORTER_OTLP_TRACES_HEADERS")
                .or_else(|| value("OTEL_EXPORTER_OTLP_HEADERS")),
            service: value("OTEL_SERVICE_NAME"),
            resource: value("OTEL_RESOURCE_ATTRIBUTES"),
            disabled: equals("OTEL_SDK_DISABLED", "true") || equals("OTEL_TRACES_EXPORTER", "none"),
        }
    }
}

/// The spans that were not exported yet.
pub struct Traces {
    queue: Mutex<SpanQueue>,
    pushed: Notify,
    clock: Arc<dyn Clock>,
    rng: Arc<dyn Rng>,
}

#[derive(Default)]
struct SpanQueue {
    spans: VecDeque<Span>,
    dropped: u64,
}

impl Traces {
    /// Creates an empty queue.
    pub fn new() -> Arc<Traces> {
        Arc::new(Traces {
            queue: Mutex::default(),
            pushed: Notify::new(),
            clock: Arc::new(SystemClock),
            rng: Arc::new(SystemRng),
        })
    }

    fn lock(&self) -> MutexGuard<'_, SpanQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The `tracing` layer that collects the spans.
    pub fn layer(self: &Arc<Self>) -> Box<dyn Layer<Registry> + Send + Sync> {
        let is_traced = filter_fn(|metadata: &Metadata<'_>| {
            metadata.is_span() && metadata.target() == TRACE_TARGET
        });
        SpanCollector(self.clone())
            .with_filter(is_traced.with_max_level_hint(LevelFilter::INFO))
            .boxed()
    }

    fn push(&self, span: Span) {
        let mut queue = self.lock();
        if queue.spans.len() == MAX_QUEUED_SPANS {
            queue.spans.pop_front();
            queue.dropped += 1;
        }
        queue.spans.push_back(span);
        drop(queue);
        self.pushed.notify_one();
    }

    /// The next batch, and the number of spans dropped since the previous one.
    fn take_batch(&self) -> (Vec<Span>, u64) {
        let mut queue = self.lock();
        let len = queue.spans.len().min(MAX_BATCH_SPANS);
        (
            queue.spans.drain(..len).collect(),
            std::mem::take(&mut queue.dropped),
        )
    }
}

/// Sends spans to a collector.
pub struct Exporter {
    traces: Arc<Traces>,
    collector: OutboundEndpoint,
    headers: Vec<(String, String)>,
    resource: Resource,
    /// Whether the collector accepted the last batch, if there was one.
    last_succeeded: Option<bool>,
}

impl Exporter {
    /// Creates the exporter that the settings describe; `None` if they name no usable collector.
    pub async fn new(
        settings: &TraceSettings,
        traces: &Arc<Traces>,
        ca_file: Option<&std::path::Path>,
    ) -> Result<Option<Exporter>> {
        let variables = &settings.environment;
        let endpoints = (
            &settings.endpoint,
            &variables.traces_endpoint,
            &variables.endpoint,
        );
        let collector = match endpoints {
            (Some(url), _, _) => Some(
                OutboundEndpoint::new("--otlp-endpoint", url, ca_file)
                    .await?
                    .join("v1/traces"),
            ),
            (None, None, None) => None,
            // The variables may be set for the agent only, so an unusable value is not an error.
            _ if variables.protocol.as_deref() == Some("grpc") => {
                tracing::info!(
                    "traces are disabled: OTEL_EXPORTER_OTLP_PROTOCOL is grpc, but sessiond \
                     supports only HTTP; set --otlp-endpoint to an HTTP collector"
                );
                None
            }
            (None, Some(url), _) => {
                let setting = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
                or_warn(OutboundEndpoint::new(setting, url, ca_file).await)
            }
            (None, None, Some(url)) => {
                let setting = "OTEL_EXPORTER_OTLP_ENDPOINT";
                or_warn(OutboundEndpoint::new(setting, url, ca_file).await)
                    .map(|collector| collector.join("v1/traces"))
            }
        };
        let Some(collector) = collector else {
            return Ok(None);
        };
        let mut headers = otlp::parse_pairs(variables.headers.as_deref());
        headers.push(("content-type".to_owned(), "application/json".to_owned()));
        let resource = Resource::new(variables.service.as_deref(), variables.resource.as_deref());
        Ok(Some(Exporter {
            traces: traces.clone(),
            collector,
            headers,
            resource,
            last_succeeded: None,
        }))
    }

    /// Exports spans forever; drop the future to stop.
    pub async fn run(&mut self) {
        loop {
            self.traces.pushed.notified().await;
            tokio::time::sleep(BATCH_DELAY).await;
            self.export().await;
        }
    }

    /// Exports the queued spans batch by batch, and drops those that the collector does not accept.
    pub async fn export(&mut self) {
        loop {
            let (spans, mut dropped) = self.traces.take_batch();
            let mut failed = None;
            if !spans.is_empty() {
                let body = otlp::encode_request(&self.resource, &spans);
                if let Err(error) = self.collector.post(&self.headers, body).await {
                    dropped += spans.len() as u64;
                    failed = Some(error);
                }
                let succeeded = failed.is_none();
                // Only a change is logged.
                if self.last_succeeded.replace(succeeded) != Some(succeeded) {
                    let to = self.collector.origin();
                    match &failed {
                        Some(error) => {
                            tracing::warn!(to, %error, "the trace export failed; traces are dropped, streaming continues")
                        }
                        None => tracing::info!(to, "exporting traces"),
                    }
                }
            }
            if dropped > 0 {
                tracing::debug!(dropped, "dropped spans");
            }
            // After a failure, the next batch waits for the next export.
            if spans.len() < MAX_BATCH_SPANS || failed.is_some() {
                return;
            }
        }
    }
}

/// A running export.
pub struct TraceExport(
    Option<(
        tokio::task::JoinHandle<()>,
        Arc<tokio::sync::Mutex<Exporter>>,
    )>,
);

impl TraceExport {
    /// Starts the exporter, if there is one.
    pub fn start(exporter: Option<Exporter>) -> TraceExport {
        TraceExport(exporter.map(|exporter| {
            let exporter = Arc::new(tokio::sync::Mutex::new(exporter));
            let running = exporter.clone();
            (
                tokio::spawn(async move { running.lock().await.run().await }),
                exporter,
            )
        }))
    }

    /// Exports the remaining spans, within a short time limit.
    pub async fn finish(self) {
        let Some((task, exporter)) = self.0 else {
            return;
        };
        task.abort();
        let last = async { exporter.lock().await.export().await };
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, last).await.is_err() {
            tracing::warn!("the trace collector is unresponsive; the last traces are dropped");
        }
    }
}

/// The endpoint; if it is unusable, logs why and returns `None`.
fn or_warn(endpoint: Result<OutboundEndpoint>) -> Option<OutboundEndpoint> {
    let warn = |error: &Error| tracing::warn!(%error, "traces are disabled");
    endpoint.inspect_err(warn).ok()
}

/// Collects spans when they end.
struct SpanCollector(Arc<Traces>);

/// A span that has not ended.
struct OpenSpan {
    trace_id: u128,
    id: u64,
    parent_id: Option<u64>,
    started_at: Timestamp,
    attributes: SpanAttributes,
}

impl<S> Layer<S> for SpanCollector
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let parent = span.parent().and_then(|parent| {
            parent
                .extensions()
                .get::<OpenSpan>()
                .map(|open| (open.trace_id, open.id))
        });
        // Other operations read logs too. Only parts of a flush or a restore are exported.
        if parent.is_none() && !ROOT_SPANS.contains(&span.name()) {
            return;
        }
        let random_id = || self.0.rng.next().max(1);
        let mut values = SpanAttributes::default();
        attributes.record(&mut values);
        span.extensions_mut().insert(OpenSpan {
            trace_id: parent.map_or_else(
                || u128::from(random_id()) << 64 | u128::from(random_id()),
                |(trace_id, _)| trace_id,
            ),
            id: random_id(),
            parent_id: parent.map(|(_, id)| id),
            started_at: self.0.clock.now(),
            attributes: values,
        });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<OpenSpan>() {
            values.record(&mut open.attributes);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else {
            return;
        };
        let Some(OpenSpan {
            trace_id,
            id,
            parent_id,
            started_at,
            attributes,
        }) = span.extensions_mut().remove::<OpenSpan>()
        else {
            return;
        };
        let ended_at = self.0.clock.now().max(started_at);
        self.0.push(Span {
            name: span.name(),
            trace_id,
            id,
            parent_id,
            started_at,
            ended_at,
            attributes,
        });
    }
}
