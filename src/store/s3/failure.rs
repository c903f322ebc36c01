//! What went wrong at an S3 server, in the words of this project.
//!
//! Owns the one classification of the SDK's errors. Does not own which answers are no failures at all (a key that is
//! taken, a key that is not there): the calls in `s3.rs` look for those first.

use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};

use crate::error::{Error, ErrorKind};

const CREDENTIALS: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN for temporary keys), or AWS_PROFILE, \
                           or run where a role is attached";
const RIGHTS: &str = "the credentials need s3:GetObject, s3:PutObject, s3:DeleteObject on the objects and s3:ListBucket on the bucket";
const SIGNING: &str = "see that AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN belong together and are still valid";
const FEATURE: &str = "the server does not know a header; with an old server try checksums=required in the store's URL";
const REGION: &str = "name the bucket's own region: region=… in the store's URL, or AWS_REGION";
const CLOCK: &str = "set this machine's clock";
const TRUST: &str = "if the server's certificate is of a private authority, name its PEM file with ca=… in the store's URL";
const PLAIN: &str = "the server does not answer in TLS; if it speaks plain HTTP, write endpoint=http://… in the store's URL";
const SERVER: &str =
    "see whether the server runs and can be reached from here; what streams goes on by itself then";

/// The HTTP status and the error code of an answer; status 0 and no code where there was none.
pub(super) fn answer<E: ProvideErrorMetadata>(error: &SdkError<E, HttpResponse>) -> (u16, &str) {
    match error {
        SdkError::ServiceError(context) => (
            context.raw().status().as_u16(),
            context.err().code().unwrap_or_default(),
        ),
        SdkError::ResponseError(context) => (context.raw().status().as_u16(), ""),
        _ => (0, ""),
    }
}

/// Turns an error of the SDK into ours; `bucket` is for hints, `endpoint` is the server that was named.
pub(super) fn classify<E>(
    context: String,
    bucket: &str,
    endpoint: Option<&str>,
    error: &SdkError<E, HttpResponse>,
) -> Error
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    let (status, code) = answer(error);
    let (kind, what, hint) = match error {
        SdkError::ServiceError(context) => {
            let message = context.err().message().unwrap_or_default();
            let (kind, hint) = refusal(status, code, message);
            (kind, said(status, code, message), hint)
        }
        SdkError::TimeoutError(_) => (
            ErrorKind::Unavailable,
            at(endpoint, "timed out"),
            Some(SERVER),
        ),
        _ => unsent(error, endpoint),
    };
    let error = Error::new(kind, format!("{context}: {what}"));
    match hint {
        _ if code == "NoSuchBucket" => {
            error.hint(format!("make the bucket, for instance with `aws s3 mb s3://{bucket}`, or mend its name in the store's URL"))
        }
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// What a server that answered means by it.
fn refusal(status: u16, code: &str, message: &str) -> (ErrorKind, Option<&'static str>) {
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
        // Bytes hurt on their way, or a request the server lost patience with: the next one may arrive whole.
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
        // 409 says that a racing request is under way: who wins is not known yet. 425 and 429 ask for a later try.
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
        // Not one of 400…: a proxy or something that is no S3 server.
        0..400 => (ErrorKind::Unavailable, Some(SERVER)),
        _ => (ErrorKind::Usage, None),
    }
}

/// Which server it was that did not answer: one that was named may be misspelt.
fn at(endpoint: Option<&str>, what: &str) -> String {
    endpoint.map_or_else(|| what.to_owned(), |endpoint| format!("{endpoint}: {what}"))
}

/// What a request means that got no answer, or none that could be read.
fn unsent(
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
    // The SDK does not export the type of this one.
    if any(&["credential", "no identity", "identity resolver"]) {
        let timed_out = any(&["timed out", "timeout"]);
        let kind = if timed_out {
            ErrorKind::Unavailable
        } else {
            ErrorKind::Usage
        };
        return (
            kind,
            "no credentials were found".to_owned(),
            Some(CREDENTIALS),
        );
    }
    // The outer ones only say that a dispatch failed.
    let root = at(
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

fn said(status: u16, code: &str, message: &str) -> String {
    match (code, message) {
        ("", "") => format!("the server answered {status}"),
        ("", message) => format!("the server answered {status}: {message}"),
        (code, "") => format!("the server answered {status} {code}"),
        (code, message) => format!("the server answered {status} {code}: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_tell_the_caller_what_to_do() {
        let kind = |status, code, message| refusal(status, code, message).0;
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
            refusal(501, "NotImplemented", ""),
            (ErrorKind::Usage, Some(FEATURE))
        );
        assert_eq!(
            refusal(400, "InvalidRequest", "Unsupported x-amz-checksum-crc32"),
            (ErrorKind::Usage, Some(FEATURE))
        );
        assert_eq!(refusal(301, "", ""), (ErrorKind::Usage, Some(REGION)));
        assert_eq!(kind(400, "InvalidArgument", ""), ErrorKind::Usage);
    }
}
