//! Session metadata: labels, request ID, TTL and closed status, as users set them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::limits::{self, check};

/// Maximum number of labels per session. It is low, because every listing returns all labels.
pub const MAX_LABELS: usize = 64;
/// Maximum length of a label's name, in bytes.
const MAX_NAME_LEN: usize = 128;
/// Maximum length of a label's value, in bytes: an index row of PostgreSQL holds 2704 bytes, other
/// columns included.
const MAX_VALUE_LEN: usize = 1024;
/// Maximum length of a request ID, in bytes.
const MAX_REQUEST_ID_LEN: usize = 512;

/// How long to keep a session after its last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Ttl {
    /// The session never expires.
    Never,
    /// Number of seconds.
    Seconds(u64),
}

impl Ttl {
    /// The duration; none if the session never expires.
    pub fn duration(self) -> Option<Duration> {
        match self {
            Ttl::Never => None,
            Ttl::Seconds(seconds) => Some(Duration::from_secs(seconds)),
        }
    }
}

/// The status of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionStatus {
    /// It has no bytes yet.
    Created,
    /// It is in use.
    Active,
    /// A user has closed it.
    Completed,
    /// A user has archived it.
    Archived,
}

impl SessionStatus {
    /// The name in the index and in output.
    pub fn as_str(self) -> &'static str {
        match self {
            SessionStatus::Created => "created",
            SessionStatus::Active => "active",
            SessionStatus::Completed => "completed",
            SessionStatus::Archived => "archived",
        }
    }
}

impl fmt::Display for SessionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The status of a session that a user has closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClosedStatus {
    /// The work is done.
    Completed,
    /// The session is archived.
    Archived,
}

impl From<ClosedStatus> for SessionStatus {
    fn from(status: ClosedStatus) -> SessionStatus {
        match status {
            ClosedStatus::Completed => SessionStatus::Completed,
            ClosedStatus::Archived => SessionStatus::Archived,
        }
    }
}

/// A closed status and the size of the session at that time. Once the session has grown, the status
/// no longer applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closed {
    /// The status.
    pub status: ClosedStatus,
    /// Raw bytes of the session when it was closed.
    pub raw_bytes: u64,
}

/// The metadata of a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionMetadata {
    /// How long to keep the session; without it the default of `gc` applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Ttl>,
    /// Labels to find the session by.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The caller's own ID for the job that the session belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The closed status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closed: Option<Closed>,
}

impl SessionMetadata {
    /// Checks the limits on labels and the request ID.
    pub fn validate(&self) -> Result<()> {
        if self.labels.len() > MAX_LABELS {
            return Err(Error::usage(format!(
                "too many labels: {}, but the maximum is {MAX_LABELS}",
                self.labels.len()
            )));
        }
        for (name, value) in &self.labels {
            validate_label_name(name)?;
            validate_text("label value", value, 0, MAX_VALUE_LEN)?;
        }
        if let Some(Ttl::Seconds(seconds)) = self.ttl {
            check("TTL", seconds, limits::MAX_TTL_SECONDS)?;
        }
        if let Some(closed) = self.closed {
            check("number of raw bytes", closed.raw_bytes, limits::MAX_TOTAL)?;
        }
        self.request_id
            .as_deref()
            .map_or(Ok(()), validate_request_id)
    }

    /// The status of a session that has `raw_bytes` bytes now.
    pub fn status(&self, raw_bytes: u64) -> SessionStatus {
        match self.closed {
            _ if raw_bytes == 0 => SessionStatus::Created,
            Some(closed) if closed.raw_bytes == raw_bytes => closed.status.into(),
            _ => SessionStatus::Active,
        }
    }

    /// This metadata with the fields that `changes` sets; labels are added. The closed status does
    /// not change.
    #[must_use]
    pub fn updated_with(&self, changes: &SessionMetadata) -> SessionMetadata {
        let mut updated = self.clone();
        updated.ttl = changes.ttl.or(updated.ttl);
        updated.request_id = changes.request_id.clone().or(updated.request_id);
        updated.labels.extend(changes.labels.clone());
        updated
    }
}

/// Checks the limits on a request ID.
pub fn validate_request_id(id: &str) -> Result<()> {
    validate_text("request ID", id, 1, MAX_REQUEST_ID_LEN)
}

/// Checks the limits on a label's name.
pub fn validate_label_name(name: &str) -> Result<()> {
    validate_text("label name", name, 1, MAX_NAME_LEN)?;
    if name.contains(['=', ',']) || name.starts_with('-') {
        return Err(Error::usage(format!(
            "invalid label name {name:?}: it must not contain '=' or ',', nor begin with '-'"
        )));
    }
    Ok(())
}

fn validate_text(what: &str, text: &str, min: usize, max: usize) -> Result<()> {
    if !(min..=max).contains(&text.len()) {
        return Err(Error::usage(format!(
            "invalid {what}: it must have {min} to {max} bytes, and has {}",
            text.len()
        )));
    }
    if text.chars().any(char::is_control) {
        return Err(Error::usage(format!(
            "invalid {what} {text:?}: it contains a control character"
        )));
    }
    Ok(())
}

/// One label, as `NAME=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// The name.
    pub name: String,
    /// The value.
    pub value: String,
}

impl FromStr for Label {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let Some((name, value)) = text.split_once('=') else {
            return Err(Error::usage(format!(
                "invalid label {text:?}: expected NAME=VALUE, such as team=infra"
            )));
        };
        let label = Label {
            name: name.trim().to_owned(),
            value: value.to_owned(),
        };
        validate_label_name(&label.name)?;
        validate_text("label value", &label.value, 0, MAX_VALUE_LEN)?;
        Ok(label)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_parsed_and_invalid_ones_rejected() {
        let label: Label = "team=a=b c".parse().unwrap();
        assert_eq!(
            (label.name.as_str(), label.value.as_str()),
            ("team", "a=b c")
        );
        assert_eq!("empty=".parse::<Label>().unwrap().value, "");
        let long = "x".repeat(MAX_NAME_LEN + 1);
        let longer = format!("a={}", "x".repeat(MAX_VALUE_LEN + 1));
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
        let many = (0..=MAX_LABELS)
            .map(|at| (at.to_string(), String::new()))
            .collect();
        assert!(
            SessionMetadata {
                labels: many,
                ..SessionMetadata::default()
            }
            .validate()
            .is_err()
        );
        assert!(
            validate_request_id("").is_err()
                && validate_request_id("a\nb").is_err()
                && validate_request_id("r 1").is_ok()
        );
    }

    #[test]
    fn a_closed_status_ends_when_the_session_grows() {
        let done = SessionMetadata {
            closed: Some(Closed {
                status: ClosedStatus::Completed,
                raw_bytes: 7,
            }),
            ..SessionMetadata::default()
        };
        assert_eq!(
            (done.status(7), done.status(8)),
            (SessionStatus::Completed, SessionStatus::Active)
        );
        assert_eq!(
            (done.status(0), SessionMetadata::default().status(1)),
            (SessionStatus::Created, SessionStatus::Active)
        );
    }

    #[test]
    fn an_update_replaces_only_the_fields_that_it_sets() {
        let metadata = |ttl, label: &str, request: Option<&str>| {
            let label: Label = label.parse().unwrap();
            SessionMetadata {
                ttl,
                labels: [(label.name, label.value)].into(),
                request_id: request.map(str::to_owned),
                closed: None,
            }
        };
        let both = metadata(Some(Ttl::Never), "a=1", Some("r"))
            .updated_with(&metadata(None, "b=2", None))
            .updated_with(&metadata(None, "a=3", None));
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
