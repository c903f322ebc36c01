//! Errors as responses: RFC 9457 problems, with the hint of the error.

use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;

use crate::error::{Error, ErrorKind};

/// The media type of problems.
pub const MEDIA_TYPE: &str = "application/problem+json";

/// An error, as RFC 9457 defines it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Problem {
    /// The kind of problem as a URI, such as `urn:sessiond:problem:not_found`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The kind of problem in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What went wrong.
    pub detail: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Problem {
    /// A problem that has no error behind it.
    pub fn new(status: StatusCode, kind: &str, detail: impl Into<String>) -> Problem {
        Problem {
            kind: format!("urn:sessiond:problem:{kind}"),
            title: status.canonical_reason().unwrap_or("Error").to_owned(),
            status: status.as_u16(),
            detail: detail.into(),
            hint: None,
        }
    }

    /// The caller may not do this.
    pub fn forbidden(detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::FORBIDDEN, "forbidden", detail)
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Problem {
        self.hint = Some(hint.into());
        self
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        let (status, title) = match error.kind() {
            ErrorKind::Usage => (StatusCode::BAD_REQUEST, "Invalid request"),
            ErrorKind::NotFound => (StatusCode::NOT_FOUND, "Not found"),
            ErrorKind::Fenced => (StatusCode::CONFLICT, "Another writer owns the session"),
            ErrorKind::Conflict => (StatusCode::CONFLICT, "Conflict"),
            ErrorKind::Unavailable => (
                StatusCode::SERVICE_UNAVAILABLE,
                "The store or the index is unavailable",
            ),
            ErrorKind::Corrupt => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "Stored bytes are damaged",
            ),
            ErrorKind::Encrypted => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "The server cannot decrypt the session",
            ),
            ErrorKind::NewerFormat => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "A newer sessiond wrote the session",
            ),
            ErrorKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "Internal error"),
        };
        if status.is_server_error() {
            tracing::warn!(%error, "a request failed");
        }
        Problem {
            kind: format!("urn:sessiond:problem:{}", error.kind().as_str()),
            title: title.to_owned(),
            status: status.as_u16(),
            detail: error.to_string(),
            hint: error.hint_text().map(str::to_owned),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self).unwrap_or_default();
        let mut response = (status, body).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("5"));
        }
        response
    }
}
