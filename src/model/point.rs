//! Points: positions in the history of a session.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

use crate::error::{Error, Result};
use crate::model::{Checkpoint, EntryHeader, Seq, WriterId};

/// A position in a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogPoint {
    /// The head of the log.
    #[default]
    Latest,
    /// After an entry.
    Seq(Seq),
    /// After the last entry that was written by this time.
    Time(Timestamp),
}

impl LogPoint {
    /// Whether an entry is at or before this point.
    pub fn includes(&self, header: &EntryHeader) -> bool {
        match self {
            LogPoint::Latest => true,
            LogPoint::Seq(seq) => header.seq <= *seq,
            LogPoint::Time(time) => header.at <= *time,
        }
    }
}

/// A resolved point: how far to read the log, and where to cut the transcripts.
#[derive(Debug, Clone, Default)]
pub struct ResolvedPoint {
    /// The last entry to read.
    pub at: LogPoint,
    /// The checkpoint within that entry; none if the whole entry is included.
    pub checkpoint: Option<Checkpoint>,
    /// The writer whose branch the point is on; none for the main line.
    pub branch: Option<WriterId>,
}

impl ResolvedPoint {
    /// The end of the main line, or of a branch.
    pub fn latest(branch: Option<&WriterId>) -> ResolvedPoint {
        ResolvedPoint {
            branch: branch.cloned(),
            ..ResolvedPoint::default()
        }
    }
}

impl FromStr for LogPoint {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        if text == "latest" {
            return Ok(LogPoint::Latest);
        }
        let invalid = || {
            Error::usage(format!(
                "invalid point {text:?}: expected latest, seq:N or a time such as 2026-05-01T12:00:00Z"
            ))
        };
        if let Some(number) = text.strip_prefix("seq:") {
            return number
                .parse()
                .ok()
                .filter(|seq| *seq > 0)
                .map(LogPoint::Seq)
                .ok_or_else(invalid);
        }
        text.strip_prefix("time:")
            .unwrap_or(text)
            .parse()
            .map(LogPoint::Time)
            .map_err(|_| invalid())
    }
}

/// A point as a user specifies it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PointSpec {
    /// A position in the log.
    Log(LogPoint),
    /// The end of a turn; none means the last complete one.
    Turn(Option<u64>),
    /// The end of a step of a turn.
    Step {
        /// The turn.
        turn: u64,
        /// The step; none means its last complete one.
        step: Option<u64>,
    },
    /// A checkpoint, by number.
    Checkpoint(u64),
    /// A named checkpoint.
    Name(String),
}

impl Default for PointSpec {
    fn default() -> Self {
        PointSpec::Log(LogPoint::Latest)
    }
}

impl FromStr for PointSpec {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        PointSpec::parse("point", text)
    }
}

impl PointSpec {
    /// Parses a point. `what` names it in errors, such as `--at value`.
    pub(crate) fn parse(what: &str, text: &str) -> Result<Self> {
        let text = text.trim();
        let invalid = || {
            Error::usage(format!("invalid {what} {text:?}: it is not a point")).hint(
                "use latest, turn, turn:N, turn:N.step:N, seq:N, a time such as 2026-05-01T12:00:00Z, a day, or the number or name of a checkpoint",
            )
        };
        let number = |text: &str| text.parse::<u64>().ok().filter(|number| *number > 0);
        if matches!(text, "turn:0" | "seq:0") {
            return Err(Error::usage(format!(
                "invalid {what} {text:?}: turns and entries are counted from 1"
            )));
        }
        if let Some(turn) = text.strip_prefix("turn:") {
            if let Some((turn, step)) = turn.split_once(".step") {
                let step = match step.strip_prefix(':') {
                    Some(step) => Some(number(step).ok_or_else(invalid)?),
                    None if step.is_empty() => None,
                    None => return Err(invalid()),
                };
                let turn = number(turn).ok_or_else(invalid)?;
                return Ok(PointSpec::Step { turn, step });
            }
            return number(turn)
                .map(|turn| PointSpec::Turn(Some(turn)))
                .ok_or_else(invalid);
        }
        if text == "turn" {
            return Ok(PointSpec::Turn(None));
        }
        if text.starts_with("seq:") || text.starts_with("time:") {
            return text.parse().map(PointSpec::Log).map_err(|_| invalid());
        }
        if let Ok(at) = text.parse() {
            return Ok(PointSpec::Log(at));
        }
        if let Some(day) = text
            .parse::<Date>()
            .ok()
            .filter(|_| text.contains('-'))
            .and_then(|day| day.to_zoned(TimeZone::UTC).ok())
        {
            return Ok(PointSpec::Log(LogPoint::Time(day.timestamp())));
        }
        let name = text.strip_prefix("ckpt:").unwrap_or(text);
        match number(name) {
            Some(number) => Ok(PointSpec::Checkpoint(number)),
            None => parse_checkpoint_name(name)
                .map(PointSpec::Name)
                .map_err(|_| invalid()),
        }
    }
}

impl fmt::Display for PointSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PointSpec::Log(at) => at.fmt(f),
            PointSpec::Turn(None) => f.write_str("turn"),
            PointSpec::Turn(Some(turn)) => write!(f, "turn:{turn}"),
            PointSpec::Step { turn, step: None } => write!(f, "turn:{turn}.step"),
            PointSpec::Step {
                turn,
                step: Some(step),
            } => write!(f, "turn:{turn}.step:{step}"),
            PointSpec::Checkpoint(number) => write!(f, "ckpt:{number}"),
            PointSpec::Name(name) => write!(f, "ckpt:{name}"),
        }
    }
}

/// Checks the name of a checkpoint: it is part of a key, and must differ from a number.
pub fn parse_checkpoint_name(text: &str) -> Result<String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let reason = if text.is_empty() {
        "it is empty"
    } else if text.len() > 64 {
        "it is too long"
    } else if !text.bytes().all(is_allowed) {
        "it contains a character that is not allowed"
    } else if text.bytes().all(|byte| byte.is_ascii_digit()) {
        "it has only digits"
    } else if matches!(text, "latest" | "turn" | "." | "..") {
        "it is reserved"
    } else {
        return Ok(text.to_owned());
    };
    Err(
        Error::usage(format!("invalid checkpoint name {text:?}: {reason}")).hint(
            "use at most 64 letters, digits, '-', '_' and '.'; not digits only, not latest or turn",
        ),
    )
}

impl fmt::Display for LogPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LogPoint::Latest => f.write_str("latest"),
            LogPoint::Seq(seq) => write!(f, "seq:{seq}"),
            LogPoint::Time(time) => write!(f, "{time}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_points_are_parsed() {
        assert_eq!("latest".parse::<LogPoint>().ok(), Some(LogPoint::Latest));
        assert_eq!("seq:7".parse::<LogPoint>().ok(), Some(LogPoint::Seq(7)));
        assert!(matches!(
            "2026-05-01T12:00:00Z".parse(),
            Ok(LogPoint::Time(_))
        ));
        assert!(matches!(
            "time:2026-05-01T12:00:00Z".parse(),
            Ok(LogPoint::Time(_))
        ));
        for bad in ["", "seq:", "seq:0", "seq:-1", "yesterday-ish", "turn:x"] {
            assert!(bad.parse::<LogPoint>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn point_specs_are_parsed_and_printed() {
        let parse = |text: &str| text.parse::<PointSpec>().ok();
        assert_eq!(parse("turn"), Some(PointSpec::Turn(None)));
        assert_eq!(parse("turn:3"), Some(PointSpec::Turn(Some(3))));
        assert_eq!(parse("7"), Some(PointSpec::Checkpoint(7)));
        assert_eq!(parse("20260501"), Some(PointSpec::Checkpoint(20_260_501)));
        assert_eq!(
            parse("2026-05-01"),
            Some(PointSpec::Log(LogPoint::Time(
                "2026-05-01T00:00:00Z".parse().unwrap()
            )))
        );
        assert_eq!(
            parse("ckpt:before-deploy"),
            Some(PointSpec::Name("before-deploy".into()))
        );
        assert_eq!(
            parse("before-deploy"),
            Some(PointSpec::Name("before-deploy".into()))
        );
        for text in [
            "latest",
            "seq:7",
            "turn:3",
            "turn:3.step:12",
            "turn:3.step",
            "ckpt:7",
            "ckpt:x",
        ] {
            assert_eq!(
                parse(text).map(|point| point.to_string()).as_deref(),
                Some(text)
            );
        }
        assert!(matches!(
            parse("2026-05-01T12:00:00Z"),
            Some(PointSpec::Log(LogPoint::Time(_)))
        ));
        for bad in [
            "",
            "turn:",
            "turn:0",
            "turn:x",
            "turn:3.step:0",
            "turn:3.step:",
            "turn:.step:1",
            "turn:3.stepx",
            "seq:x",
            "time:x",
            "a/b",
            "..",
            "ckpt:",
            "a b",
        ] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
