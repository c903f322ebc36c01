//! Parsing of values that several settings and arguments share: durations, TTLs and labels.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::model::{Label, Ttl};

/// Parses a duration such as `500ms`, `8s`, `1m 30s`, `7d`, or a number of seconds. `name` is the
/// flag or argument that an error names.
pub fn duration(name: &str, text: Option<&str>, default: Duration) -> Result<Duration> {
    let Some(text) = text.map(str::trim) else {
        return Ok(default);
    };
    parse_duration(text).ok_or_else(|| {
        Error::usage(format!(
            "invalid {name} value {text:?}: expected a duration"
        ))
        .hint("use a duration such as 500ms, 8s, 1m30s or 7d")
    })
}

fn parse_duration(text: &str) -> Option<Duration> {
    let seconds = text
        .parse::<f64>()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    // jiff parses calendar days only; here a day has 24 hours.
    let days_or_weeks = |unit: char, seconds: u64| {
        text.strip_suffix(unit)?
            .trim()
            .parse::<u32>()
            .ok()
            .map(|count| Duration::from_secs(u64::from(count) * seconds))
    };
    seconds
        .or_else(|| days_or_weeks('d', 86_400))
        .or_else(|| days_or_weeks('w', 604_800))
        .or_else(|| {
            let duration = text.parse::<jiff::SignedDuration>().ok()?;
            Duration::try_from(duration).ok()
        })
}

/// Parses a TTL: a duration, or `never`.
pub fn ttl(name: &str, text: &str) -> Result<Ttl> {
    let text = text.trim();
    if text == "never" {
        return Ok(Ttl::Never);
    }
    match parse_duration(text) {
        Some(duration) => Ok(Ttl::Seconds(duration.as_secs())),
        None => Err(Error::usage(format!(
            "invalid {name} value {text:?}: expected a duration or never"
        ))
        .hint("use a duration such as 12h or 7d, or never")),
    }
}

/// Parses labels; an empty text is skipped, so that a trailing comma is harmless.
pub fn labels(texts: &[String]) -> Result<Vec<Label>> {
    texts
        .iter()
        .map(|text| text.trim())
        .filter(|text| !text.is_empty())
        .map(str::parse)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed() {
        let parse = |text| duration("--x", Some(text), Duration::ZERO).ok();
        assert_eq!(parse("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(parse("8"), Some(Duration::from_secs(8)));
        assert_eq!(parse("0.5"), Some(Duration::from_millis(500)));
        assert_eq!(parse("1m30s"), Some(Duration::from_secs(90)));
        assert_eq!(parse("7d"), Some(Duration::from_secs(7 * 86_400)));
        assert_eq!(parse("2w"), Some(Duration::from_secs(14 * 86_400)));
        for invalid in ["", "-1s", "soon", "1 fortnight", "inf", "NaN", "1e300"] {
            assert_eq!(parse(invalid), None, "{invalid:?}");
        }
        let error = duration("--x", Some("soon"), Duration::ZERO).unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid --x value \"soon\": expected a duration"
        );
    }

    #[test]
    fn a_ttl_is_a_duration_or_never() {
        assert_eq!(ttl("--ttl", "never").unwrap(), Ttl::Never);
        assert_eq!(ttl("--ttl", " 1h ").unwrap(), Ttl::Seconds(3600));
        assert!(ttl("--ttl", "forever").is_err());
    }

    #[test]
    fn labels_are_parsed_and_empty_ones_skipped() {
        let texts = ["team=infra".to_owned(), String::new()];
        let parsed = labels(&texts).unwrap();
        assert_eq!((parsed.len(), parsed[0].name.as_str()), (1, "team"));
        assert!(labels(&["team".to_owned()]).is_err());
    }
}
