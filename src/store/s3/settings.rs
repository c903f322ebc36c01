//! What an S3 store needs to know, and how its URL spells it.
//!
//! Owns the URL's parameters and their defaults. Does not own credentials from the environment: the SDK's chain finds them.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use url::Url;

use crate::error::{Error, Result};

/// The parameters of an `s3://` URL.
const KNOWN: &str = "endpoint, region, path-style, sse, kms-key, ca, checksums";

/// Long enough for a slow server, short enough to try again within a shutdown.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Where an S3 store is and how it is spoken to.
#[derive(Debug, Clone)]
pub struct S3Settings {
    /// The bucket.
    pub bucket: String,
    /// Goes before every key; without slashes at its ends, may be empty.
    pub prefix: String,
    /// The server, where it is not AWS.
    pub endpoint: Option<String>,
    /// The region; the SDK's chain decides where it is not given.
    pub region: Option<String>,
    /// Whether the bucket stands in the path instead of the host name; by default where there is an endpoint.
    pub path_style: Option<bool>,
    /// How the server shall encrypt what it keeps.
    pub sse: Option<Sse>,
    /// A PEM file of certificates to trust besides the system's.
    pub ca_file: Option<PathBuf>,
    /// How long one attempt may take; bodies get some more for their size.
    pub timeout: Duration,
    /// When requests carry a checksum; AWS's defaults where it is not given.
    pub checksums: Option<Checksums>,
    /// Credentials for tests; the SDK's chain finds them where they are not given. No URL sets them.
    pub credentials: Option<Credentials>,
}

/// Encryption by the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sse {
    /// With the server's own keys.
    Aes256,
    /// With a key of the key service: the one named, or the bucket's.
    Kms(Option<String>),
}

/// When requests carry a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checksums {
    /// Wherever the operation has one.
    Supported,
    /// Only where the operation must: for old servers that refuse the header.
    Required,
}

/// An access key and its secret.
#[derive(Clone)]
pub struct Credentials {
    /// The name of the key.
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
    /// The settings for `bucket`, all else by default.
    pub fn new(bucket: impl Into<String>) -> S3Settings {
        S3Settings {
            bucket: bucket.into(),
            prefix: String::new(),
            endpoint: None,
            region: None,
            path_style: None,
            sse: None,
            ca_file: None,
            timeout: TIMEOUT,
            checksums: None,
            credentials: None,
        }
    }

    /// Reads `s3://bucket/prefix?endpoint=…`. No error repeats a value: people paste secrets into the oddest places.
    pub fn from_url(address: &str) -> Result<S3Settings> {
        let url = Url::parse(address).map_err(|cause| wrong("it is no URL").caused_by(cause))?;
        if url.scheme() != "s3" {
            return Err(wrong(format!("its scheme is {}, not s3", url.scheme())));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(
                wrong("it holds credentials").hint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or use a profile")
            );
        }
        if url.port().is_some() || url.fragment().is_some() {
            return Err(wrong("it has a port or a fragment").hint(
                "name the server as ?endpoint=http://host:port, and write # in a prefix as %23",
            ));
        }
        let bucket = url.host_str().unwrap_or_default();
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if bucket.is_empty() || !bucket.chars().all(plain) {
            return Err(wrong("it names no bucket").hint("write s3://BUCKET/PREFIX"));
        }
        let path = percent_decode_str(url.path())
            .decode_utf8()
            .map_err(|cause| wrong("its prefix is not UTF-8").caused_by(cause))?;
        let prefix = path.trim_matches('/');
        if !prefix.is_empty()
            && prefix
                .split('/')
                .any(|part| matches!(part, "" | "." | ".."))
        {
            return Err(wrong("its prefix has an empty part or a dot part"));
        }
        let mut settings = S3Settings {
            prefix: prefix.to_owned(),
            ..S3Settings::new(bucket)
        };
        settings.take_parameters(&url)?;
        Ok(settings)
    }

    fn take_parameters(&mut self, url: &Url) -> Result<()> {
        let mut seen = Vec::new();
        let mut key_id = None;
        for (name, value) in url.query_pairs() {
            if seen.contains(&name) {
                return Err(wrong(format!("parameter {name:?} is there twice")));
            }
            let refused =
                |known: &str| Err(wrong(format!("parameter {name:?} is not one of {known}")));
            match (&*name, &*value) {
                ("endpoint" | "region" | "kms-key" | "ca", "") => {
                    return Err(wrong(format!("parameter {name:?} is empty")));
                }
                ("endpoint", value) => self.endpoint = Some(endpoint(value)?),
                ("region", value) => self.region = Some(value.to_owned()),
                ("path-style", "true") => self.path_style = Some(true),
                ("path-style", "false") => self.path_style = Some(false),
                ("path-style", _) => return refused("true, false"),
                ("sse", "AES256") => self.sse = Some(Sse::Aes256),
                ("sse", "aws:kms") => self.sse = Some(Sse::Kms(None)),
                ("sse", _) => return refused("AES256, aws:kms"),
                ("kms-key", value) => key_id = Some(value.to_owned()),
                ("ca", value) => self.ca_file = Some(PathBuf::from(value)),
                ("checksums", "supported") => self.checksums = Some(Checksums::Supported),
                ("checksums", "required") => self.checksums = Some(Checksums::Required),
                ("checksums", _) => return refused("supported, required"),
                _ => {
                    return Err(wrong(format!("it has an unknown parameter {name:?}"))
                        .hint(format!("the known ones are {KNOWN}")));
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
            (Some(_), _) => Err(wrong("kms-key needs sse=aws:kms")),
        }
    }
}

/// Checks an endpoint, wherever it was named: it becomes part of the store's address, so it holds no secret.
pub(super) fn endpoint(value: &str) -> Result<String> {
    const FORM: &str = "write endpoint=http://host:port, or --endpoint http://host:port";
    let url = Url::parse(value)
        .map_err(|cause| wrong("its endpoint is no URL").caused_by(cause).hint(FORM))?;
    let clean = url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() || !clean {
        return Err(
            wrong("its endpoint is not of the form http://host:port or https://host").hint(FORM),
        );
    }
    Ok(value.trim_end_matches('/').to_owned())
}

fn wrong(why: impl fmt::Display) -> Error {
    Error::usage(format!("read the S3 store's URL: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_full_url_is_read() {
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
    fn wrong_urls_are_refused_without_repeating_secrets() {
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
            // A doubled slash in front is only a spelling of the root.
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
