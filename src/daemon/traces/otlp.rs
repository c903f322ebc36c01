//! How spans are spelt in OTLP's JSON (opentelemetry-proto, `ExportTraceServiceRequest`): ids in hex, 64-bit numbers as text.

use std::fmt;

use jiff::Timestamp;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tracing::field::{Field, Visit};

/// Something that took time.
pub(super) struct Span {
    pub(super) name: &'static str,
    pub(super) trace: u128,
    pub(super) id: u64,
    pub(super) parent: Option<u64>,
    pub(super) began: Timestamp,
    pub(super) ended: Timestamp,
    pub(super) attributes: Attributes,
}

/// What is said of a span, in the order in which it was first said.
#[derive(Default)]
pub(super) struct Attributes {
    named: Vec<(&'static str, Value)>,
    /// Why it failed.
    error: Option<String>,
}

impl Attributes {
    fn set(&mut self, field: &Field, value: Value) {
        match self
            .named
            .iter_mut()
            .find(|(name, _)| *name == field.name())
        {
            Some(known) => known.1 = value,
            None => self.named.push((field.name(), value)),
        }
    }
}

impl Visit for Attributes {
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

/// Who tells.
pub(super) struct Resource(Vec<(String, String)>);

impl Resource {
    pub(super) fn new(service: Option<&str>, attributes: Option<&str>) -> Resource {
        let mut all = pairs(attributes);
        if let Some(service) = service {
            all.retain(|(name, _)| name != "service.name");
            all.push(("service.name".to_owned(), service.to_owned()));
        }
        for (name, value) in [
            ("service.name", "sessiond"),
            ("service.version", env!("CARGO_PKG_VERSION")),
        ] {
            if !all.iter().any(|(known, _)| known == name) {
                all.push((name.to_owned(), value.to_owned()));
            }
        }
        Resource(all)
    }
}

/// `name=value,name=value` with percent-encoding, as OpenTelemetry's variables have it. What is none is passed over.
pub(super) fn pairs(text: Option<&str>) -> Vec<(String, String)> {
    let plain = |text: &str| {
        percent_decode_str(text.trim())
            .decode_utf8_lossy()
            .into_owned()
    };
    let pairs = text
        .unwrap_or_default()
        .split(',')
        .filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(name, value)| (plain(name), plain(value)))
        .filter(|(name, _)| !name.is_empty())
        .collect()
}

/// A request that tells of these.
pub(super) fn request(resource: &Resource, spans: &[Span]) -> Vec<u8> {
    let who: Vec<Value> = resource
        .0
        .iter()
        .map(|(name, value)| json!({ "key": name, "value": { "stringValue": value } }))
        .collect();
    let body = json!({ "resourceSpans": [{
        "resource": { "attributes": who },
        "scopeSpans": [{
            "scope": { "name": "sessiond", "version": env!("CARGO_PKG_VERSION") },
            "spans": spans.iter().map(spelt).collect::<Vec<_>>(),
        }],
    }] });
    serde_json::to_vec(&body).unwrap_or_default()
}

fn spelt(span: &Span) -> Value {
    let attributes: Vec<Value> = span
        .attributes
        .named
        .iter()
        .map(|(name, value)| json!({ "key": name, "value": value }))
        .collect();
    let mut spelt = json!({
        "traceId": format!("{:032x}", span.trace),
        "spanId": format!("{:016x}", span.id),
        "name": span.name,
        // Internal: neither a request nor an answer to one.
        "kind": 1,
        "startTimeUnixNano": span.began.as_nanosecond().to_string(),
        "endTimeUnixNano": span.ended.as_nanosecond().to_string(),
        "attributes": attributes,
        "status": match &span.attributes.error {
            Some(error) => json!({ "code": 2, "message": error }),
            None => json!({}),
        },
    });
    if let Some(parent) = span.parent {
        spelt["parentSpanId"] = format!("{parent:016x}").into();
    }
    spelt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read_and_what_is_none_is_passed_over() {
        let read = |text| pairs(Some(text));
        assert_eq!(
            read("a=b, c = d%20e ,,x,=y"),
            [("a".into(), "b".into()), ("c".into(), "d e".into())] as [(String, String); 2]
        );
        assert!(pairs(None).is_empty());
        let named = |service, attributes| {
            Resource::new(service, attributes)
                .0
                .into_iter()
                .find(|(name, _)| name == "service.name")
        };
        assert_eq!(named(None, None).unwrap().1, "sessiond");
        assert_eq!(named(None, Some("service.name=a")).unwrap().1, "a");
        assert_eq!(named(Some("b"), Some("service.name=a")).unwrap().1, "b");
    }
}
