//! A store in an S3 bucket, on AWS or on a compatible server.
//!
//! Owns the requests, their timeouts and the meaning of responses. Does not own retries (the
//! caller) or the probe whether the server honors `If-None-Match` (`log/probe.rs`).

mod failure;
mod settings;

use std::fmt;
use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use aws_config::environment::region::EnvironmentVariableRegionProvider;
use aws_config::meta::region::RegionProviderChain;
use aws_config::profile::region::ProfileFileRegionProvider;
use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::RequestChecksumCalculation;
use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::operation::put_object::builders::PutObjectFluentBuilder;
use aws_sdk_s3::primitives::{ByteStream, ByteStreamError};
use aws_sdk_s3::types::ServerSideEncryption;
use aws_smithy_http_client::tls::{self, TrustStore, rustls_provider::CryptoMode};
use bytes::{Bytes, BytesMut};
use jiff::Timestamp;

use self::failure::{classify, status_and_code};
pub use self::settings::{Checksums, Credentials, S3Settings, Sse};
use super::{CreateOutcome, ListPage, Object, Store, check_len};
use crate::error::{Error, Result};
use crate::sys::outbound::tls_context;

/// Maximum number of objects in a page, by contract and by S3.
const MAX_PAGE: i32 = 1000;

/// Timeout of a connection attempt: one round trip, and some retransmissions.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Minimum throughput in bytes per second. The timeout of a request grows with the size of its body
/// at this rate.
const MIN_BYTES_PER_SECOND: u64 = 32 * 1024;

/// Maximum number of idle connections, equal to the default number of concurrent requests. More
/// would only use memory.
const MAX_IDLE_CONNECTIONS: usize = 72;

/// Maximum memory to allocate for a body in advance, based on its `Content-Length`.
const MAX_RESERVED_BYTES: u64 = 16 << 20;

/// The first character of an `after` value that contains a continuation token of the server. No key
/// contains this character.
const TOKEN_PREFIX: char = '\0';

/// The value of an environment variable; none if it is unset or empty.
fn env_value(variable: &str) -> Option<String> {
    std::env::var(variable)
        .ok()
        .filter(|value| !value.is_empty())
}

/// An object store in a bucket.
pub struct S3Store {
    client: Client,
    bucket: String,
    /// Empty, or ending in a slash.
    prefix: String,
    endpoint: Option<String>,
    sse: Option<Sse>,
    timeout: Duration,
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("S3Store").field(&self.address()).finish()
    }
}

impl S3Store {
    /// Creates a client. Credentials and region come from the SDK's default chain if `settings` has
    /// none. Sends no request yet.
    pub async fn connect(settings: S3Settings) -> Result<S3Store> {
        let shared = load_aws_config(&settings).await?;
        if shared.region().is_none() {
            return Err(Error::usage("no region is configured")
                .context(format_args!("open store s3://{}", settings.bucket))
                .hint("set region=… in the store URL, or AWS_REGION"));
        }
        let endpoint = shared.endpoint_url().map(settings::endpoint).transpose()?;
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(CONNECT_TIMEOUT.min(settings.timeout))
            .build();
        let mut config = aws_sdk_s3::config::Builder::from(&shared)
            .retry_config(RetryConfig::disabled())
            .timeout_config(timeouts)
            .force_path_style(settings.path_style.unwrap_or(endpoint.is_some()));
        if endpoint
            .as_deref()
            .is_some_and(|endpoint| endpoint.starts_with("http://"))
        {
            config = config.http_client(http_client(TrustStore::empty(), None).await?);
        }
        let prefix = if settings.prefix.is_empty() {
            String::new()
        } else {
            format!("{}/", settings.prefix.trim_matches('/'))
        };
        let S3Settings {
            bucket,
            sse,
            timeout,
            ..
        } = settings;
        Ok(S3Store {
            client: Client::from_conf(config.build()),
            bucket,
            prefix,
            endpoint,
            sse,
            timeout,
        })
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn context(&self, verb: &str, key: &str) -> String {
        format!("{verb} {key} in {}", self.url())
    }

    fn url(&self) -> String {
        format!("s3://{}/{}", self.bucket, self.prefix)
            .trim_end_matches('/')
            .to_owned()
    }

    /// Applies a timeout to one call. The SDK's attempt timeout is not sufficient: it ends when the
    /// body of a response starts to arrive, and it ignores the size of an upload.
    async fn with_timeout<T>(
        &self,
        context: &str,
        bytes: u64,
        call: impl Future<Output = T>,
    ) -> Result<T> {
        let limit = self.timeout + Duration::from_secs(bytes / MIN_BYTES_PER_SECOND);
        tokio::time::timeout(limit, call).await.map_err(|_| {
            Error::unavailable(format!("no response within {limit:?}"))
                .context(context)
                .hint(failure::SERVER)
        })
    }

    fn upload(&self, key: &str, body: Bytes) -> PutObjectFluentBuilder {
        let request = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(self.key(key))
            .body(ByteStream::from(body));
        match &self.sse {
            None => request,
            Some(Sse::Aes256) => request.server_side_encryption(ServerSideEncryption::Aes256),
            Some(Sse::Kms(id)) => request
                .server_side_encryption(ServerSideEncryption::AwsKms)
                .set_ssekms_key_id(id.clone()),
        }
    }

    /// Whether a listing succeeds and does not contain `key`.
    async fn is_not_listed(&self, key: &str) -> bool {
        self.list(key, None).await.is_ok_and(|page| {
            page.next.is_none() && page.objects.iter().all(|object| object.key != key)
        })
    }

    /// Converts the response to a list request that starts after `after`, or at a continuation
    /// token.
    fn page(
        &self,
        context: &str,
        response: &ListObjectsV2Output,
        after: Option<&str>,
        token: Option<&str>,
    ) -> Result<ListPage> {
        let is_after = |key: &&str| after.is_none_or(|after| *key > after);
        let without_prefix =
            |key: &'_ str| key.strip_prefix(self.prefix.as_str()).map(str::to_owned);
        let mut page = ListPage::default();
        for found in response.contents() {
            let size = found
                .size()
                .and_then(|size| u64::try_from(size).ok())
                .unwrap_or(0);
            // Consoles create "directories" as empty objects with a trailing slash; they are ignored.
            let key = found
                .key()
                .and_then(without_prefix)
                .filter(|key| !key.ends_with('/') && is_after(&key.as_str()));
            let modified = found
                .last_modified()
                .and_then(|time| Timestamp::from_nanosecond(time.as_nanos()).ok());
            // An object without a time counts as new, so that it is never collected.
            let modified = modified.unwrap_or(Timestamp::MAX);
            page.objects.extend(key.map(|key| Object {
                key,
                size,
                modified,
            }));
        }
        let directories = response
            .common_prefixes()
            .iter()
            .filter_map(|found| found.prefix());
        page.directories.extend(
            directories
                .filter_map(without_prefix)
                .filter(|directory| is_after(&directory.as_str())),
        );
        // Servers that are backed by a filesystem may use another order.
        page.objects.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        page.directories.sort_unstable();
        if response.is_truncated() == Some(true) {
            let next = response
                .next_continuation_token()
                .filter(|next| Some(*next) != token && !next.is_empty());
            let next = next.ok_or_else(|| {
                Error::unavailable(
                    "the server returned a truncated page without a continuation token",
                )
                .context(context)
            })?;
            page.next = Some(format!("{TOKEN_PREFIX}{next}"));
        }
        Ok(page)
    }
}

/// Loads the configuration of the SDK: its default chain, and the settings in place of it.
async fn load_aws_config(settings: &S3Settings) -> Result<SdkConfig> {
    // The SDK reads this variable too, but does not expose it; the address must name the server.
    let endpoint_url = settings
        .endpoint
        .clone()
        .or_else(|| env_value("AWS_ENDPOINT_URL_S3"));
    // Without TLS and with static credentials, there is no need to load the system's
    // certificates.
    let has_keys = settings.credentials.is_some()
        || env_value("AWS_ACCESS_KEY_ID")
            .and(env_value("AWS_SECRET_ACCESS_KEY"))
            .is_some();
    let is_plain_http = endpoint_url
        .as_deref()
        .is_some_and(|url| url.starts_with("http://"));
    let trust = if is_plain_http && has_keys {
        TrustStore::empty()
    } else {
        TrustStore::default()
    };
    let mut loader = aws_config::defaults(BehaviorVersion::latest())
        .http_client(http_client(trust, settings.ca_file.as_deref()).await?);
    if let Some(endpoint) = endpoint_url {
        loader = loader.endpoint_url(endpoint);
        // The region of the EC2 instance does not apply to another server, so the metadata
        // service is not queried.
        let chain = RegionProviderChain::first_try(EnvironmentVariableRegionProvider::new());
        loader = loader.region(
            chain
                .or_else(ProfileFileRegionProvider::new())
                .or_else("us-east-1"),
        );
    }
    if let Some(region) = settings.region.clone() {
        loader = loader.region(Region::new(region));
    }
    if let Some(Credentials {
        access_key,
        secret_key,
    }) = settings.credentials.clone()
    {
        loader = loader.credentials_provider(aws_sdk_s3::config::Credentials::new(
            access_key, secret_key, None, None, "settings",
        ));
    }
    if let Some(checksums) = settings.checksums {
        loader = loader.request_checksum_calculation(match checksums {
            Checksums::Supported => RequestChecksumCalculation::WhenSupported,
            Checksums::Required => RequestChecksumCalculation::WhenRequired,
        });
    }
    Ok(loader.load().await)
}

#[async_trait]
impl Store for S3Store {
    async fn create(&self, key: &str, body: Bytes) -> Result<CreateOutcome> {
        let context = self.context("create", key);
        let size = body.len() as u64;
        check_len(key, size).map_err(|error| error.context(&context))?;
        match self
            .with_timeout(
                &context,
                size,
                self.upload(key, body).if_none_match("*").send(),
            )
            .await?
        {
            Ok(_) => Ok(CreateOutcome::Created),
            Err(error) if status_and_code(&error).0 == 412 => Ok(CreateOutcome::AlreadyExists),
            Err(error) => Err(classify(
                context,
                &self.bucket,
                self.endpoint.as_deref(),
                &error,
            )),
        }
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        let context = self.context("put", key);
        let size = body.len() as u64;
        check_len(key, size).map_err(|error| error.context(&context))?;
        match self
            .with_timeout(&context, size, self.upload(key, body).send())
            .await?
        {
            Ok(_) => Ok(()),
            Err(error) => Err(classify(
                context,
                &self.bucket,
                self.endpoint.as_deref(),
                &error,
            )),
        }
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        let context = self.context("get", key);
        let request = self
            .client
            .get_object()
            .bucket(&self.bucket)
            .key(self.key(key))
            .send();
        let found = match self.with_timeout(&context, 0, request).await? {
            Ok(found) => found,
            Err(error) if is_missing(status_and_code(&error)) => return Ok(None),
            // If the bucket policy allows listing only some prefixes, AWS returns 403 for a missing
            // key.
            Err(error) if status_and_code(&error).0 == 403 && self.is_not_listed(key).await => {
                return Ok(None);
            }
            Err(error) => {
                return Err(classify(
                    context,
                    &self.bucket,
                    self.endpoint.as_deref(),
                    &error,
                ));
            }
        };
        let size = found
            .content_length()
            .and_then(|size| u64::try_from(size).ok())
            .unwrap_or(0);
        check_len(key, size).map_err(|error| error.context(&context))?;
        match self
            .with_timeout(&context, size, read_body(key, found.body, size))
            .await?
        {
            Ok(body) => body.map(Some).map_err(|error| error.context(&context)),
            Err(cause) => {
                let error = Error::unavailable("read the response").caused_by(cause);
                // TCP and TLS protect the transfer, so a wrong checksum means that the object is
                // damaged.
                let error = if error.to_string().contains("checksum") {
                    Error::corrupt(error.to_string())
                } else {
                    error
                };
                Err(error.context(context))
            }
        }
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage> {
        let context = self.context("list", prefix);
        let token = after.and_then(|after| after.strip_prefix(TOKEN_PREFIX));
        let after = after.filter(|_| token.is_none());
        let request = self
            .client
            .list_objects_v2()
            .bucket(&self.bucket)
            .prefix(self.key(prefix))
            .delimiter("/")
            .max_keys(MAX_PAGE);
        let request = request
            .set_continuation_token(token.map(str::to_owned))
            .set_start_after(after.map(|after| self.key(after)));
        match self.with_timeout(&context, 0, request.send()).await? {
            Ok(response) => self.page(&context, &response, after, token),
            Err(error) => Err(classify(
                context,
                &self.bucket,
                self.endpoint.as_deref(),
                &error,
            )),
        }
    }

    async fn list_tree(&self, directory: &str) -> Result<ListPage> {
        let context = self.context("list", directory);
        let request = self
            .client
            .list_objects_v2()
            .bucket(&self.bucket)
            .prefix(self.key(directory))
            .max_keys(MAX_PAGE);
        match self.with_timeout(&context, 0, request.send()).await? {
            Ok(response) => self.page(&context, &response, None, None),
            Err(error) => Err(classify(
                context,
                &self.bucket,
                self.endpoint.as_deref(),
                &error,
            )),
        }
    }

    async fn delete(&self, key: &str) -> Result<()> {
        let context = self.context("delete", key);
        let request = self
            .client
            .delete_object()
            .bucket(&self.bucket)
            .key(self.key(key))
            .send();
        match self.with_timeout(&context, 0, request).await? {
            Ok(_) => Ok(()),
            Err(error) if is_missing(status_and_code(&error)) => Ok(()),
            Err(error) => Err(classify(
                context,
                &self.bucket,
                self.endpoint.as_deref(),
                &error,
            )),
        }
    }

    fn has_atomic_create(&self) -> Option<bool> {
        None
    }

    fn address(&self) -> String {
        match &self.endpoint {
            Some(endpoint) => format!("{} at {endpoint}", self.url()),
            None => self.url(),
        }
    }
}

/// Reads a body chunk by chunk, which avoids a second copy in memory. Stops at the size limit of the
/// object, because a server may send more than it declares.
async fn read_body(
    key: &str,
    mut body: ByteStream,
    size: u64,
) -> std::result::Result<Result<Bytes>, ByteStreamError> {
    let mut bytes = BytesMut::with_capacity(size.min(MAX_RESERVED_BYTES) as usize);
    while let Some(chunk) = body.try_next().await? {
        if let Err(error) = check_len(key, (bytes.len() + chunk.len()) as u64) {
            return Ok(Err(error));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(Ok(bytes.freeze()))
}

/// Whether a response means that the object does not exist although the bucket does.
fn is_missing((status, code): (u16, &str)) -> bool {
    status == 404 && code != "NoSuchBucket"
}

async fn http_client(
    trust: TrustStore,
    ca_file: Option<&Path>,
) -> Result<aws_sdk_s3::config::SharedHttpClient> {
    Ok(aws_smithy_http_client::Builder::new()
        .pool_max_idle_per_host(MAX_IDLE_CONNECTIONS)
        .tls_provider(tls::Provider::rustls(CryptoMode::Ring))
        .tls_context(tls_context(trust, ca_file).await?)
        .build_https())
}
