//! Times as people give them: a time, a day, or how long ago.

use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

use crate::config;
use crate::error::{Error, Result};

/// Reads a time: `2026-05-01T12:00:00Z`, `2026-05-01` (UTC), or `2h` and the like, which is so long before `now`.
pub fn read(flag: &str, text: &str, now: Timestamp) -> Result<Timestamp> {
    let text = text.trim();
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    let day = text
        .parse::<Date>()
        .ok()
        .and_then(|day| day.to_zoned(TimeZone::UTC).ok())
        .map(|day| day.timestamp());
    // A bare number is more likely a mistake than so many seconds ago.
    let ago = text.ends_with(|letter: char| letter.is_ascii_alphabetic());
    let ago = ago
        .then(|| config::duration(flag, Some(text), Duration::ZERO).ok())
        .flatten()
        .and_then(|ago| now.checked_sub(ago).ok());
    day.or(ago).ok_or_else(|| {
        Error::usage(format!("read {flag} {text:?}"))
            .hint("a time such as 2026-05-01T12:00:00Z, a day such as 2026-05-01, or 2h or 7d for so long ago")
    })
}

/// The same where it may be missing.
pub fn maybe(flag: &str, text: Option<&str>, now: Timestamp) -> Result<Option<Timestamp>> {
    text.map(|text| read(flag, text, now)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_give_them() {
        let now: Timestamp = "2026-05-02T12:00:00Z".parse().unwrap();
        let read = |text| read("--since", text, now).ok().map(|time| time.to_string());
        assert_eq!(
            read("2026-05-01T12:00:00+02:00").as_deref(),
            Some("2026-05-01T10:00:00Z")
        );
        assert_eq!(read("2026-05-01").as_deref(), Some("2026-05-01T00:00:00Z"));
        assert_eq!(read("36h").as_deref(), Some("2026-05-01T00:00:00Z"));
        assert_eq!(read("1d").as_deref(), Some("2026-05-01T12:00:00Z"));
        for bad in ["", "7", "yesterday", "2026-13-01", "-1h", "99999999w"] {
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }
}
