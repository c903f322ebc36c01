//! Parsing of times in arguments: a time, a day, or an age.

use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

use crate::config;
use crate::error::{Error, Result};

/// Parses a time such as `2026-05-01T12:00:00Z`, a day such as `2026-05-01` (UTC), or an age such
/// as `2h`, counted back from `now`. `name` is the flag that an error names.
pub fn parse(name: &str, text: &str, now: Timestamp) -> Result<Timestamp> {
    let text = text.trim();
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    let day = text
        .parse::<Date>()
        .ok()
        .and_then(|day| day.to_zoned(TimeZone::UTC).ok())
        .map(|day| day.timestamp());
    // A bare number is more likely a mistake than a number of seconds.
    let has_unit = text.ends_with(|letter: char| letter.is_ascii_alphabetic());
    let age = has_unit
        .then(|| config::duration(name, Some(text), Duration::ZERO).ok())
        .flatten()
        .and_then(|age| now.checked_sub(age).ok());
    day.or(age).ok_or_else(|| {
        Error::usage(format!(
            "invalid {name} value {text:?}: expected a time, a day or an age"
        ))
        .hint("use a time such as 2026-05-01T12:00:00Z, a day such as 2026-05-01, or an age such as 2h or 7d")
    })
}

/// Parses an optional time.
pub fn parse_optional(name: &str, text: Option<&str>, now: Timestamp) -> Result<Option<Timestamp>> {
    text.map(|text| parse(name, text, now)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_days_and_ages_are_parsed() {
        let now: Timestamp = "2026-05-02T12:00:00Z".parse().unwrap();
        let parse = |text| {
            let time = parse("--since", text, now).ok();
            time.map(|time| time.to_string())
        };
        assert_eq!(
            parse("2026-05-01T12:00:00+02:00").as_deref(),
            Some("2026-05-01T10:00:00Z")
        );
        assert_eq!(parse("2026-05-01").as_deref(), Some("2026-05-01T00:00:00Z"));
        assert_eq!(parse("36h").as_deref(), Some("2026-05-01T00:00:00Z"));
        assert_eq!(parse("1d").as_deref(), Some("2026-05-01T12:00:00Z"));
        for invalid in ["", "7", "yesterday", "2026-13-01", "-1h", "99999999w"] {
            assert_eq!(parse(invalid), None, "{invalid:?}");
        }
    }
}
