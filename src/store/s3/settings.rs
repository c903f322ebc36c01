//! The settings of an S3 store, and their form in its URL.
//!
//! Owns the URL parameters and their defaults. Does not own credentials, which the SDK's default
//! chain reads from the environment.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use url::Url;

use crate::error::{Error, Result};

/// The parameters of an `s3://` URL.
const PARAMETERS: &str = "endpoint, region, path-style, sse, kms-key, ca, checksums";

/// Default timeout: long enough for a slow server, short enough to retry within a shutdown.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// The location of an S3 store and how to access it.
#[derive(Debug, Clone)]
pub struct S3Settings {
    /// The bucket.
    pub bucket: String,
    /// The prefix of every key, without leading or trailing slash; may be empty.
    pub prefix: String,
    /// The server, if it is not AWS.
    pub endpoint: Option<String>,
    /// The region; by default from the SDK's chain.
    pub region: Option<String>,
    /// Whether the bucket is part of the path instead of the host name. The default is true if
    /// there is an endpoint.
    pub path_style: Option<bool>,
    /// Server-side encryption.
    pub sse: Option<Sse>,
    /// A PEM file of certificates to trust in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// Timeout of one request. A request with a body gets additional time in proportion to its
    /// size.
    pub timeout: Duration,
    /// When requests include a checksum; by default, the SDK decides.
    pub checksums: Option<Checksums>,
    /// Credentials for tests; by default from the SDK's chain. A URL cannot set them.
    pub credentials: Option<Credentials>,
}

/// Server-side encryption.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sse {
    /// With keys of the server.
    Aes256,
    /// With a key of the key management service: the given one, or the bucket's default.
    Kms(Option<String>),
}

/// When requests include a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checksums {
    /// Whenever the operation supports one.
    Supported,
    /// Only if the operation requires one: for old servers that reject the header.
    Required,
}

/// An access key and its secret.
#[derive(Clone)]
pub struct Credentials {
    /// The ID of the access key.
    pub access_key: String,
    /// The secret.
    pub secret_key: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(redacted)")
    }
}

impl S3Settings {
    /// The default settings for `bucket`.
    pub fn new(bucket: impl Into<String>) -> S3Settings {
        S3Settings {
            bucket: bucket.into(),
            prefix: String::new(),
            endpoint: None,
            region: None,
            path_style: None,
            sse: None,
            ca_file: None,
            timeout: DEFAULT_TIMEOUT,
            checksums: None,
            credentials: None,
        }
    }

    /// Parses `s3://bucket/prefix?endpoint=…`. No error contains a value of the URL, because it
    /// could be a secret.
    pub fn from_url(address: &str) -> Result<S3Settings> {
        let url = Url::parse(address)
            .map_err(|cause| invalid_url(format!("it is not a URL: {cause}")))?;
        if url.scheme() != "s3" {
            return Err(invalid_url(format!(
                "its scheme is {}, not s3",
                url.scheme()
            )));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(
                invalid_url("it contains credentials").hint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or use a profile")
            );
        }
        if url.port().is_some() || url.fragment().is_some() {
            return Err(invalid_url("it has a port or a fragment").hint(
                "set the server with ?endpoint=http://HOST:PORT, and write # in a prefix as %23",
            ));
        }
        let bucket = url.host_str().unwrap_or_default();
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if bucket.is_empty() || !bucket.chars().all(is_allowed) {
            return Err(invalid_url("it has no bucket").hint("use the form s3://BUCKET/PREFIX"));
        }
        let path = percent_decode_str(url.path())
            .decode_utf8()
            .map_err(|cause| invalid_url(format!("its prefix is not UTF-8: {cause}")))?;
        let prefix = path.trim_matches('/');
        if !prefix.is_empty()
            && prefix
                .split('/')
                .any(|part| matches!(part, "" | "." | ".."))
        {
            return Err(invalid_url(
                "its prefix has an empty component or a dot component",
            ));
        }
        let mut settings = S3Settings {
            prefix: prefix.to_owned(),
            ..S3Settings::new(bucket)
        };
        settings.apply_parameters(&url)?;
        Ok(settings)
    }

    fn apply_parameters(&mut self, url: &Url) -> Result<()> {
        let mut seen = Vec::new();
        let mut key_id = None;
        for (name, value) in url.query_pairs() {
            if seen.contains(&name) {
                return Err(invalid_url(format!("parameter {name:?} is given twice")));
            }
            let invalid = |expected: &str| {
                Err(invalid_url(format!(
                    "parameter {name:?} is not one of {expected}"
                )))
            };
            match (&*name, &*value) {
                ("endpoint" | "region" | "kms-key" | "ca", "") => {
                    return Err(invalid_url(format!("parameter {name:?} is empty")));
                }
                ("endpoint", value) => self.endpoint = Some(endpoint(value)?),
                ("region", value) => self.region = Some(value.to_owned()),
                ("path-style", "true") => self.path_style = Some(true),
                ("path-style", "false") => self.path_style = Some(false),
                ("path-style", _) => return invalid("true, false"),
                ("sse", "AES256") => self.sse = Some(Sse::Aes256),
                ("sse", "aws:kms") => self.sse = Some(Sse::Kms(None)),
                ("sse", _) => return invalid("AES256, aws:kms"),
                ("kms-key", value) => key_id = Some(value.to_owned()),
                ("ca", value) => self.ca_file = Some(PathBuf::from(value)),
                ("checksums", "supported") => self.checksums = Some(Checksums::Supported),
                ("checksums", "required") => self.checksums = Some(Checksums::Required),
                ("checksums", _) => return invalid("supported, required"),
                _ => {
                    return Err(invalid_url(format!("unknown parameter {name:?}"))
                        .hint(format!("use one of {PARAMETERS}")));
                }
            }
            seen.push(name);
        }
        match (key_id, &mut self.sse) {
            (None, _) => Ok(()),
            (Some(id), Some(Sse::Kms(key))) => {
                *key = Some(id);
                Ok(())
            }
            (Some(_), _) => Err(invalid_url("kms-key requires sse=aws:kms")),
        }
    }
}

/// Checks an endpoint from any source. It becomes part of the store's address, so it must not
/// contain a secret.
pub(super) fn endpoint(value: &str) -> Result<String> {
    const FORM: &str = "write endpoint=http://host:port, or --s3-endpoint http://host:port";
    let url = Url::parse(value)
        .map_err(|cause| invalid_url(format!("its endpoint is not a URL: {cause}")).hint(FORM))?;
    let has_no_extras = url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() || !has_no_extras {
        return Err(invalid_url(
            "its endpoint is not of the form http://host:port or https://host",
        )
        .hint(FORM));
    }
    Ok(value.trim_end_matches('/').to_owned())
}

fn invalid_url(why: impl fmt::Display) -> Error {
    Error::usage(format!("invalid S3 store URL: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_url_with_all_parameters_is_parsed() {
        let settings = S3Settings::from_url(
            "s3://bucket/a%20b/c/?endpoint=http://127.0.0.1:8333&region=eu-west-1&path-style=false&sse=aws:kms&kms-key=arn:aws:kms:x&ca=/ca.pem&checksums=required",
        )
        .expect("url");
        assert_eq!(
            (settings.bucket.as_str(), settings.prefix.as_str()),
            ("bucket", "a b/c")
        );
        assert_eq!(settings.endpoint.as_deref(), Some("http://127.0.0.1:8333"));
        assert_eq!(
            (settings.region.as_deref(), settings.path_style),
            (Some("eu-west-1"), Some(false))
        );
        assert_eq!(settings.sse, Some(Sse::Kms(Some("arn:aws:kms:x".into()))));
        assert_eq!(settings.ca_file, Some(PathBuf::from("/ca.pem")));
        assert_eq!(settings.checksums, Some(Checksums::Required));
    }

    #[test]
    fn a_short_url_has_defaults() {
        let settings = S3Settings::from_url("s3://my.Bucket_1").expect("url");
        assert_eq!(
            (settings.bucket.as_str(), settings.prefix.as_str()),
            ("my.Bucket_1", "")
        );
        assert!(
            settings.endpoint.is_none()
                && settings.path_style.is_none()
                && settings.credentials.is_none()
        );
    }

    #[test]
    fn invalid_urls_are_rejected_without_repeating_secrets() {
        let urls = [
            "bucket",
            "s3://",
            "s3:///prefix",
            "http://bucket",
            "s3://b//c",
            "s3://b/a//c",
            "s3://b:80/",
            "s3://b/#x",
            "s3://AKIA:hunter2@b/",
            "s3://b/?secret=hunter2",
            "s3://b?endpoint=",
            "s3://b?endpoint=hunter2",
            "s3://b?endpoint=http://u:hunter2@h",
            "s3://b?endpoint=ftp://h",
            "s3://b?sse=none",
            "s3://b?kms-key=k",
            "s3://b?sse=AES256&kms-key=k",
            "s3://b?path-style=yes",
            "s3://b?region=a&region=b",
            "s3://b?checksums=hunter2",
            "s3://b/%ff",
            "s3://%20/",
        ];
        for url in urls {
            // A leading double slash is equivalent to a single one.
            if url == "s3://b//c" {
                assert_eq!(S3Settings::from_url(url).expect("url").prefix, "c");
                continue;
            }
            let error = S3Settings::from_url(url).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Usage, "{url}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
        let error = S3Settings::from_url("s3://b/?bogus=1").expect_err("unknown");
        assert!(
            error.to_string().contains("bogus")
                && error
                    .hint_text()
                    .is_some_and(|hint| hint.contains("path-style"))
        );
    }

    #[test]
    fn debug_hides_credentials() {
        let credentials = Some(Credentials {
            access_key: "AKIA".into(),
            secret_key: "hunter2".into(),
        });
        let text = format!(
            "{:?}",
            S3Settings {
                credentials,
                ..S3Settings::new("b")
            }
        );
        assert!(
            !text.contains("hunter2") && !text.contains("AKIA"),
            "{text}"
        );
    }
}
