//! What people say of a session: how long to keep it, its labels, the request it belongs to, and that it is done with.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The most labels of one session: they are listed with it.
pub const MOST_LABELS: usize = 64;
/// The longest name of a label, in bytes.
const LONGEST_NAME: usize = 128;
/// The longest value of a label, in bytes: PostgreSQL takes 2704 bytes into an index row, other columns included.
const LONGEST_VALUE: usize = 1024;
/// The longest request id, in bytes.
const LONGEST_REQUEST: usize = 512;

/// How long a session is kept after its last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ttl {
    /// For ever.
    Never,
    /// So many seconds.
    Seconds(u64),
}

impl Ttl {
    /// The time; none is for ever.
    pub fn duration(self) -> Option<Duration> {
        match self {
            Ttl::Never => None,
            Ttl::Seconds(seconds) => Some(Duration::from_secs(seconds)),
        }
    }
}

/// Where a session is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It has no bytes yet.
    Created,
    /// It is written to.
    Active,
    /// Somebody said that it is done.
    Completed,
    /// Somebody put it away.
    Archived,
}

impl Status {
    /// The word for it, in the index and for people.
    pub fn word(self) -> &'static str {
        match self {
            Status::Created => "created",
            Status::Active => "active",
            Status::Completed => "completed",
            Status::Archived => "archived",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// That somebody is done with a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClosedStatus {
    /// It is done.
    Completed,
    /// It is put away.
    Archived,
}

impl From<ClosedStatus> for Status {
    fn from(rest: ClosedStatus) -> Status {
        match rest {
            ClosedStatus::Completed => Status::Completed,
            ClosedStatus::Archived => Status::Archived,
        }
    }
}

/// The same, and the bytes that the session had then: once it has more, somebody went on, and this does not hold any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closed {
    /// What was said.
    pub is: ClosedStatus,
    /// Bytes shipped by then, before compression.
    pub raw: u64,
}

/// What people said of a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionMetadata {
    /// How long to keep it; none: as the collector is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Ttl>,
    /// Words by which it is found.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The request that it belongs to, by the caller's own id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// That it is done with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Closed>,
}

impl SessionMetadata {
    /// Refuses what cannot be kept.
    pub fn check(&self) -> Result<()> {
        if self.labels.len() > MOST_LABELS {
            return Err(Error::usage(format!(
                "a session has at most {MOST_LABELS} labels, these are {}",
                self.labels.len()
            )));
        }
        for (name, value) in &self.labels {
            check_name(name)?;
            check_text("the value of a label", value, 0, LONGEST_VALUE)?;
        }
        self.request_id.as_deref().map_or(Ok(()), check_request)
    }

    /// Where a session of so many bytes is in its life.
    pub fn status(&self, raw: u64) -> Status {
        match self.status {
            _ if raw == 0 => Status::Created,
            Some(rest) if rest.raw == raw => rest.is.into(),
            _ => Status::Active,
        }
    }

    /// What is said after `more` was said too: it replaces what it names and leaves the rest. Of the status it says nothing.
    #[must_use]
    pub fn then(&self, more: &SessionMetadata) -> SessionMetadata {
        let mut all = self.clone();
        all.ttl = more.ttl.or(all.ttl);
        all.request_id = more.request_id.clone().or(all.request_id);
        all.labels.extend(more.labels.clone());
        all
    }
}

/// Refuses a request id that cannot be kept.
pub fn check_request(id: &str) -> Result<()> {
    check_text("a request id", id, 1, LONGEST_REQUEST)
}

/// Refuses a name that no label can have.
pub fn check_name(name: &str) -> Result<()> {
    check_text("the name of a label", name, 1, LONGEST_NAME)?;
    if name.contains(['=', ',']) || name.starts_with('-') {
        return Err(Error::usage(format!(
            "the name of a label {name:?} holds '=' or ',', or begins with '-'"
        )));
    }
    Ok(())
}

fn check_text(what: &str, text: &str, least: usize, most: usize) -> Result<()> {
    if !(least..=most).contains(&text.len()) {
        return Err(Error::usage(format!(
            "{what} has {least} to {most} bytes, this has {}",
            text.len()
        )));
    }
    if text.chars().any(char::is_control) {
        return Err(Error::usage(format!(
            "{what} {text:?} holds a control character"
        )));
    }
    Ok(())
}

/// One label, as `NAME=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
}

impl FromStr for Label {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let Some((name, value)) = text.split_once('=') else {
            return Err(
                Error::usage(format!("read label {text:?}")).hint("NAME=VALUE, such as team=infra")
            );
        };
        let label = Label {
            name: name.trim().to_owned(),
            value: value.to_owned(),
        };
        check_name(&label.name)?;
        check_text("the value of a label", &label.value, 0, LONGEST_VALUE)?;
        Ok(label)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_read_and_strange_ones_refused() {
        let label: Label = "team=a=b c".parse().unwrap();
        assert_eq!(
            (label.name.as_str(), label.value.as_str()),
            ("team", "a=b c")
        );
        assert_eq!("empty=".parse::<Label>().unwrap().value, "");
        let long = "x".repeat(LONGEST_NAME + 1);
        let longer = format!("a={}", "x".repeat(LONGEST_VALUE + 1));
        for bad in [
            "",
            "team",
            "=x",
            "a\nb=c",
            "a=b\u{7}",
            "a,b=c",
            "-a=b",
            &format!("{long}=x"),
            &longer,
        ] {
            assert!(bad.parse::<Label>().is_err(), "{bad:?}");
        }
        let many = (0..=MOST_LABELS)
            .map(|at| (at.to_string(), String::new()))
            .collect();
        assert!(
            SessionMetadata {
                labels: many,
                ..SessionMetadata::default()
            }
            .check()
            .is_err()
        );
        assert!(
            check_request("").is_err()
                && check_request("a\nb").is_err()
                && check_request("r 1").is_ok()
        );
    }

    #[test]
    fn a_status_holds_until_the_session_is_written_to_again() {
        let done = SessionMetadata {
            status: Some(Closed {
                is: ClosedStatus::Completed,
                raw: 7,
            }),
            ..SessionMetadata::default()
        };
        assert_eq!(
            (done.status(7), done.status(8)),
            (Status::Completed, Status::Active)
        );
        assert_eq!(
            (done.status(0), SessionMetadata::default().status(1)),
            (Status::Created, Status::Active)
        );
    }

    #[test]
    fn what_is_said_later_replaces_only_what_it_names() {
        let say = |ttl, label: &str, request: Option<&str>| {
            let label: Label = label.parse().unwrap();
            SessionMetadata {
                ttl,
                labels: [(label.name, label.value)].into(),
                request_id: request.map(str::to_owned),
                status: None,
            }
        };
        let both = say(Some(Ttl::Never), "a=1", Some("r"))
            .then(&say(None, "b=2", None))
            .then(&say(None, "a=3", None));
        assert_eq!(
            (both.ttl, both.request_id.as_deref()),
            (Some(Ttl::Never), Some("r"))
        );
        assert_eq!(
            both.labels,
            [
                ("a".to_owned(), "3".to_owned()),
                ("b".to_owned(), "2".to_owned())
            ]
            .into()
        );
    }
}
