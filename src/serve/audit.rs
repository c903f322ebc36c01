//! The audit log: one line for each view of content and each change. It says who did what and when,
//! and never contains a text of a conversation.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use serde::Serialize;

use crate::error::{Error, ErrorKind, Result};

/// One line of the audit log.
#[derive(Debug, Serialize)]
pub struct AuditRecord<'a> {
    /// When.
    pub at: Timestamp,
    /// Who: `local`, `token:NAME` or `user:NAME`.
    pub who: &'a str,
    /// The address of the client; none for a client of a Unix socket.
    pub from: Option<std::net::IpAddr>,
    /// The operation of the API, such as `getTranscript`.
    pub action: &'a str,
    /// The namespace.
    pub namespace: &'a str,
    /// The agent, if the operation concerns one session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<&'a str>,
    /// The session, if the operation concerns one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<&'a str>,
    /// The HTTP status of the response.
    pub status: u16,
}

/// Where the lines go.
pub struct AuditLog(Option<Mutex<File>>);

impl AuditLog {
    /// A log that is appended to a file, or written to stderr.
    pub fn open(path: Option<&Path>) -> Result<AuditLog> {
        let open = |path: &Path| {
            let opened = OpenOptions::new()
                .create(true)
                .append(true)
                .mode(0o600)
                .open(path);
            opened.map(Mutex::new).map_err(|cause| {
                Error::user_path(format!("open the audit log {}", path.display()), cause)
            })
        };
        Ok(AuditLog(path.map(open).transpose()?))
    }

    /// Writes a line with one system call.
    pub fn write(&self, record: &AuditRecord<'_>) -> Result<()> {
        let mut line = serde_json::to_vec(record).map_err(|cause| {
            Error::new(ErrorKind::Internal, "encode an audit record").caused_by(cause)
        })?;
        line.push(b'\n');
        let written = match &self.0 {
            Some(file) => file
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .write_all(&line),
            None => std::io::stderr().lock().write_all(&line),
        };
        written.map_err(|cause| Error::io("write to the audit log", cause))
    }
}
