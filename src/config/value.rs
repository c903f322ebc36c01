//! Parsing of values that several settings and arguments share: durations, TTLs and labels.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::model::{CheckpointInterval, CheckpointRetention, Label, Ttl};

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

/// Parses how often a step gets a checkpoint: `10steps`, `60s`, `10steps,60s` or `turn`.
pub fn checkpoint_interval(name: &str, text: Option<&str>) -> Result<CheckpointInterval> {
    let Some(text) = text.map(str::trim) else {
        return Ok(CheckpointInterval::default());
    };
    let invalid = || {
        Error::usage(format!(
            "invalid {name} value {text:?}: expected a number of steps, a duration, or both"
        ))
        .hint("use a value such as 10steps, 60s or 10steps,60s; turn for no checkpoints within a turn")
    };
    let mut interval = CheckpointInterval {
        steps: None,
        time: None,
    };
    if text == "turn" {
        return Ok(interval);
    }
    for item in text.split(',').map(str::trim) {
        if let Some(steps) = counted(item, "step") {
            interval.steps = Some(steps).filter(|steps| *steps > 0);
            interval.steps.ok_or_else(invalid)?;
        } else {
            let time = parse_duration(item).filter(|time| !time.is_zero());
            let time = jiff::SignedDuration::try_from(time.ok_or_else(invalid)?);
            interval.time = Some(time.map_err(|_| invalid())?);
        }
    }
    Ok(interval)
}

/// Parses which checkpoints are kept: `200`, `200turns`, `32steps` or `200turns,32steps`. None for
/// the default.
pub fn checkpoint_retention(name: &str, text: Option<&str>) -> Result<Option<CheckpointRetention>> {
    let Some(text) = text.map(str::trim) else {
        return Ok(None);
    };
    let max = CheckpointRetention::MAX;
    let mut keep = CheckpointRetention::default();
    let mut is_valid = true;
    for item in text.split(',').map(str::trim) {
        if let Some(steps) = counted(item, "step") {
            keep.steps = steps;
        } else if let Some(turns) = counted(item, "turn").or_else(|| item.parse().ok()) {
            keep.turns = turns;
        } else {
            is_valid = false;
        }
    }
    if is_valid && (1..=max.turns).contains(&keep.turns) && keep.steps <= max.steps {
        return Ok(Some(keep));
    }
    Err(Error::usage(format!(
        "invalid {name} value {text:?}: expected at most {} turns and {} steps",
        max.turns, max.steps
    ))
    .hint("use a value such as 100turns,16steps"))
}

/// The number in front of a unit: `1step`, `10steps`.
fn counted(text: &str, unit: &str) -> Option<u64> {
    let number = text.strip_suffix('s').unwrap_or(text).strip_suffix(unit)?;
    number.trim().parse().ok()
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
    fn a_checkpoint_interval_has_steps_or_a_time() {
        let parse = |text| checkpoint_interval("--x", Some(text)).ok();
        let interval = |steps, seconds: Option<i64>| {
            let time = seconds.map(jiff::SignedDuration::from_secs);
            Some(CheckpointInterval { steps, time })
        };
        assert_eq!(parse("10steps,60s"), interval(Some(10), Some(60)));
        assert_eq!(parse("1step"), interval(Some(1), None));
        assert_eq!(parse("2m"), interval(None, Some(120)));
        assert_eq!(parse("turn"), interval(None, None));
        for bad in ["", "0steps", "steps", "0s", "often", "10steps,"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn kept_checkpoints_are_bounded() {
        let parse = |text| checkpoint_retention("--x", Some(text)).ok().flatten();
        let keep = |turns, steps| Some(CheckpointRetention { turns, steps });
        assert_eq!(parse("200"), keep(200, 16));
        assert_eq!(parse("32steps"), keep(100, 32));
        assert_eq!(parse("1turn,0steps"), keep(1, 0));
        for bad in ["", "0", "401", "101steps", "many", "-1"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
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
