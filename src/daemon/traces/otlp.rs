//! The OTLP JSON encoding of spans (opentelemetry-proto, `ExportTraceServiceRequest`): IDs in hex,
//! 64-bit numbers as text.

use std::fmt;

use jiff::Timestamp;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tracing::field::{Field, Visit};

/// A span that has ended.
pub(super) struct Span {
    pub(super) name: &'static str,
    pub(super) trace_id: u128,
    pub(super) id: u64,
    pub(super) parent_id: Option<u64>,
    pub(super) started_at: Timestamp,
    pub(super) ended_at: Timestamp,
    pub(super) attributes: SpanAttributes,
}

/// The attributes of a span, in the order in which they were first recorded.
#[derive(Default)]
pub(super) struct SpanAttributes {
    values: Vec<(&'static str, Value)>,
    /// The error message, if the operation failed.
    error: Option<String>,
}

impl SpanAttributes {
    fn set(&mut self, field: &Field, value: Value) {
        match self
            .values
            .iter_mut()
            .find(|(name, _)| *name == field.name())
        {
            Some(recorded) => recorded.1 = value,
            None => self.values.push((field.name(), value)),
        }
    }
}

impl Visit for SpanAttributes {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "error" {
            self.error = Some(value.to_owned());
        } else {
            self.set(field, json!({ "stringValue": value }));
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, json!({ "boolValue": value }));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, json!({ "intValue": value.to_string() }));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.record_i64(field, i64::try_from(value).unwrap_or(i64::MAX));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, json!({ "doubleValue": value }));
    }
}

/// The resource attributes: the process that the spans come from.
pub(super) struct Resource(Vec<(String, String)>);

impl Resource {
    pub(super) fn new(service: Option<&str>, attributes: Option<&str>) -> Resource {
        let mut all = parse_pairs(attributes);
        if let Some(service) = service {
            all.retain(|(name, _)| name != "service.name");
            all.push(("service.name".to_owned(), service.to_owned()));
        }
        for (name, value) in [
            ("service.name", "sessiond"),
            ("service.version", env!("CARGO_PKG_VERSION")),
        ] {
            if !all.iter().any(|(present, _)| present == name) {
                all.push((name.to_owned(), value.to_owned()));
            }
        }
        Resource(all)
    }
}

/// Parses `name=value,name=value` with percent-encoding, the format of OpenTelemetry's variables.
/// Invalid pairs are ignored.
pub(super) fn parse_pairs(text: Option<&str>) -> Vec<(String, String)> {
    let decode = |text: &str| {
        percent_decode_str(text.trim())
            .decode_utf8_lossy()
            .into_owned()
    };
    let pairs = text
        .unwrap_or_default()
        .split(',')
        .filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(name, value)| (decode(name), decode(value)))
        .filter(|(name, _)| !name.is_empty())
        .collect()
}

/// Encodes an export request.
pub(super) fn encode_request(resource: &Resource, spans: &[Span]) -> Vec<u8> {
    let attributes: Vec<Value> = resource
        .0
        .iter()
        .map(|(name, value)| json!({ "key": name, "value": { "stringValue": value } }))
        .collect();
    let body = json!({ "resourceSpans": [{
        "resource": { "attributes": attributes },
        "scopeSpans": [{
            "scope": { "name": "sessiond", "version": env!("CARGO_PKG_VERSION") },
            "spans": spans.iter().map(encode_span).collect::<Vec<_>>(),
        }],
    }] });
    serde_json::to_vec(&body).unwrap_or_default()
}

fn encode_span(span: &Span) -> Value {
    let attributes: Vec<Value> = span
        .attributes
        .values
        .iter()
        .map(|(name, value)| json!({ "key": name, "value": value }))
        .collect();
    let mut encoded = json!({
        "traceId": format!("{:032x}", span.trace_id),
        "spanId": format!("{:016x}", span.id),
        "name": span.name,
        // SPAN_KIND_INTERNAL: neither a client nor a server request.
        "kind": 1,
        "startTimeUnixNano": span.started_at.as_nanosecond().to_string(),
        "endTimeUnixNano": span.ended_at.as_nanosecond().to_string(),
        "attributes": attributes,
        "status": match &span.attributes.error {
            Some(error) => json!({ "code": 2, "message": error }),
            None => json!({}),
        },
    });
    if let Some(parent_id) = span.parent_id {
        encoded["parentSpanId"] = format!("{parent_id:016x}").into();
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_parsed_and_invalid_ones_are_ignored() {
        let parse = |text| parse_pairs(Some(text));
        assert_eq!(
            parse("a=b, c = d%20e ,,x,=y"),
            [("a".into(), "b".into()), ("c".into(), "d e".into())] as [(String, String); 2]
        );
        assert!(parse_pairs(None).is_empty());
        let service_name = |service, attributes| {
            Resource::new(service, attributes)
                .0
                .into_iter()
                .find(|(name, _)| name == "service.name")
        };
        assert_eq!(service_name(None, None).unwrap().1, "sessiond");
        assert_eq!(service_name(None, Some("service.name=a")).unwrap().1, "a");
        assert_eq!(
            service_name(Some("b"), Some("service.name=a")).unwrap().1,
            "b"
        );
    }
}
