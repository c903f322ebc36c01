//! A point of a log to go back to.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;

use crate::error::{Error, Result};
use crate::model::{Header, Seq};

/// A point of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum At {
    /// The end.
    #[default]
    Latest,
    /// Just behind an entry.
    Seq(Seq),
    /// Just behind the last entry that was written by then.
    Time(Timestamp),
}

impl At {
    /// Whether an entry comes no later than this point.
    pub fn includes(&self, header: &Header) -> bool {
        match self {
            At::Latest => true,
            At::Seq(seq) => header.seq <= *seq,
            At::Time(time) => header.at <= *time,
        }
    }
}

impl FromStr for At {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        if text == "latest" {
            return Ok(At::Latest);
        }
        let refuse = || Error::usage(format!("read point {text:?}")).hint("use latest, seq:N or a time such as 2026-05-01T12:00:00Z");
        if let Some(number) = text.strip_prefix("seq:") {
            return number.parse().ok().filter(|seq| *seq > 0).map(At::Seq).ok_or_else(refuse);
        }
        text.strip_prefix("time:").unwrap_or(text).parse().map(At::Time).map_err(|_| refuse())
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            At::Latest => f.write_str("latest"),
            At::Seq(seq) => write!(f, "seq:{seq}"),
            At::Time(time) => write!(f, "time:{time}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_read() {
        assert_eq!("latest".parse::<At>().ok(), Some(At::Latest));
        assert_eq!("seq:7".parse::<At>().ok(), Some(At::Seq(7)));
        assert!(matches!("2026-05-01T12:00:00Z".parse(), Ok(At::Time(_))));
        assert!(matches!("time:2026-05-01T12:00:00Z".parse(), Ok(At::Time(_))));
        for bad in ["", "seq:", "seq:0", "seq:-1", "yesterday-ish", "turn:x"] {
            assert!(bad.parse::<At>().is_err(), "{bad:?}");
        }
    }
}
