//! Classification of the errors of the S3 SDK: kind, text and hint.
//!
//! Does not own responses that are not failures, such as an existing or a missing key: the calls in
//! `s3.rs` handle those first.

use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};

use crate::error::{Error, ErrorKind};

const CREDENTIALS: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN for temporary keys), set AWS_PROFILE, \
                           or attach a role";
const RIGHTS: &str = "allow s3:GetObject, s3:PutObject and s3:DeleteObject on the objects and s3:ListBucket on the bucket";
const SIGNING: &str = "check that AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN belong together and have not expired";
const FEATURE: &str =
    "add checksums=required to the store URL if the server is old and rejects checksum headers";
const REGION: &str = "set the region of the bucket: region=… in the store URL, or AWS_REGION";
const CLOCK: &str = "synchronize the clock of this machine with NTP";
const TRUST: &str = "if a private CA issued the server's certificate, add ca=FILE to the store URL";
const PLAIN: &str = "write endpoint=http://… in the store URL if the server does not use TLS";
pub(super) const SERVER: &str =
    "check that the server is running and reachable; a running daemon resumes automatically";

/// The HTTP status and error code of a response; 0 and empty without a response.
pub(super) fn status_and_code<E: ProvideErrorMetadata>(
    error: &SdkError<E, HttpResponse>,
) -> (u16, &str) {
    match error {
        SdkError::ServiceError(context) => (
            context.raw().status().as_u16(),
            context.err().code().unwrap_or_default(),
        ),
        SdkError::ResponseError(context) => (context.raw().status().as_u16(), ""),
        _ => (0, ""),
    }
}

/// Converts an error of the SDK. `bucket` is for hints, `endpoint` is the configured server.
pub(super) fn classify<E>(
    context: String,
    bucket: &str,
    endpoint: Option<&str>,
    error: &SdkError<E, HttpResponse>,
) -> Error
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    let (status, code) = status_and_code(error);
    let (kind, statement, hint) = match error {
        SdkError::ServiceError(context) => {
            let message = context.err().message().unwrap_or_default();
            let (kind, hint) = classify_response(status, code, message);
            (kind, describe_response(status, code, message), hint)
        }
        SdkError::TimeoutError(_) => (
            ErrorKind::Unavailable,
            with_endpoint(endpoint, "timed out"),
            Some(SERVER),
        ),
        _ => classify_without_response(error, endpoint),
    };
    let error = Error::new(kind, statement).context(context);
    match hint {
        _ if code == "NoSuchBucket" => {
            error.hint(format!(
                "run \"aws s3 mb s3://{bucket}\" to create the bucket, or correct its name in the store URL"
            ))
        }
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// The kind of an error response, and a hint.
fn classify_response(status: u16, code: &str, message: &str) -> (ErrorKind, Option<&'static str>) {
    match code {
        "NoSuchBucket" => return (ErrorKind::Usage, None),
        "AccessDenied" | "AllAccessDisabled" | "AccountProblem" => {
            return (ErrorKind::Usage, Some(RIGHTS));
        }
        "InvalidAccessKeyId"
        | "SignatureDoesNotMatch"
        | "ExpiredToken"
        | "ExpiredTokenException"
        | "InvalidToken"
        | "TokenRefreshRequired" => {
            return (ErrorKind::Usage, Some(SIGNING));
        }
        "AuthorizationHeaderMalformed"
        | "PermanentRedirect"
        | "IllegalLocationConstraintException" => return (ErrorKind::Usage, Some(REGION)),
        "RequestTimeTooSkewed" => return (ErrorKind::Unavailable, Some(CLOCK)),
        // The body was damaged or truncated in transit; the next attempt may succeed.
        "BadDigest"
        | "InvalidDigest"
        | "XAmzContentSHA256Mismatch"
        | "XAmzContentChecksumMismatch"
        | "IncompleteBody"
        | "RequestTimeout" => {
            return (ErrorKind::Unavailable, None);
        }
        "SlowDown"
        | "Throttling"
        | "ThrottlingException"
        | "RequestLimitExceeded"
        | "TooManyRequests" => return (ErrorKind::Unavailable, None),
        "NotImplemented" => return (ErrorKind::Usage, Some(FEATURE)),
        _ => {}
    }
    match status {
        // 409 means that a conflicting request is in progress, whose outcome is unknown. 425 and
        // 429 request a later attempt.
        408 | 409 | 425 | 429 => (ErrorKind::Unavailable, None),
        501 => (ErrorKind::Usage, Some(FEATURE)),
        500.. => (ErrorKind::Unavailable, Some(SERVER)),
        401 | 403 => (ErrorKind::Usage, Some(RIGHTS)),
        300..400 => (ErrorKind::Usage, Some(REGION)),
        400 if ["checksum", "if-none-match", "header", "trailer"]
            .iter()
            .any(|word| message.to_lowercase().contains(word)) =>
        {
            (ErrorKind::Usage, Some(FEATURE))
        }
        // Below 400: a proxy, or a server that does not implement S3.
        0..400 => (ErrorKind::Unavailable, Some(SERVER)),
        _ => (ErrorKind::Usage, None),
    }
}

/// Prefixes a text with the configured server, whose name may be misspelled.
fn with_endpoint(endpoint: Option<&str>, what: &str) -> String {
    endpoint.map_or_else(|| what.to_owned(), |endpoint| format!("{endpoint}: {what}"))
}

/// The kind of a failure without a readable response, its text, and a hint.
fn classify_without_response(
    error: &(dyn std::error::Error + 'static),
    endpoint: Option<&str>,
) -> (ErrorKind, String, Option<&'static str>) {
    let mut texts = Vec::new();
    let mut cause = Some(error);
    while let Some(error) = cause {
        texts.push(error.to_string());
        cause = error.source();
    }
    let any = |words: &[&str]| {
        texts
            .iter()
            .any(|text| words.iter().any(|word| text.to_lowercase().contains(word)))
    };
    // The SDK does not export the type of credential errors.
    if any(&["credential", "no identity", "identity resolver"]) {
        let timed_out = any(&["timed out", "timeout"]);
        let kind = if timed_out {
            ErrorKind::Unavailable
        } else {
            ErrorKind::Usage
        };
        return (
            kind,
            "no credentials are configured".to_owned(),
            Some(CREDENTIALS),
        );
    }
    // The outer errors contain no detail about the cause.
    let root = with_endpoint(
        endpoint,
        texts.last().map(String::as_str).unwrap_or_default(),
    );
    if any(&["certificate", "unknownissuer"]) {
        return (ErrorKind::Unavailable, root, Some(TRUST));
    }
    if any(&["invalidcontenttype"]) {
        return (ErrorKind::Unavailable, root, Some(PLAIN));
    }
    if any(&["failed to construct request", "construction failure"]) {
        return (ErrorKind::Usage, root, None);
    }
    (ErrorKind::Unavailable, root, Some(SERVER))
}

fn describe_response(status: u16, code: &str, message: &str) -> String {
    match (code, message) {
        ("", "") => format!("the server returned {status}"),
        ("", message) => format!("the server returned {status}: {message}"),
        (code, "") => format!("the server returned {status} {code}"),
        (code, message) => format!("the server returned {status} {code}: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_classified_by_code_and_status() {
        let kind = |status, code, message| classify_response(status, code, message).0;
        assert_eq!(kind(404, "NoSuchBucket", ""), ErrorKind::Usage);
        for code in [
            "AccessDenied",
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "ExpiredToken",
        ] {
            assert_eq!(kind(403, code, ""), ErrorKind::Usage, "{code}");
        }
        assert_eq!(
            kind(409, "ConditionalRequestConflict", ""),
            ErrorKind::Unavailable
        );
        assert_eq!(kind(503, "SlowDown", ""), ErrorKind::Unavailable);
        assert_eq!(kind(500, "", ""), ErrorKind::Unavailable);
        assert_eq!(kind(502, "", ""), ErrorKind::Unavailable);
        assert_eq!(kind(400, "RequestTimeout", ""), ErrorKind::Unavailable);
        assert_eq!(
            classify_response(501, "NotImplemented", ""),
            (ErrorKind::Usage, Some(FEATURE))
        );
        assert_eq!(
            classify_response(400, "InvalidRequest", "Unsupported x-amz-checksum-crc32"),
            (ErrorKind::Usage, Some(FEATURE))
        );
        assert_eq!(
            classify_response(301, "", ""),
            (ErrorKind::Usage, Some(REGION))
        );
        assert_eq!(kind(400, "InvalidArgument", ""), ErrorKind::Usage);
    }
}
