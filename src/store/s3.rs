//! A store in a bucket of S3 or of a server that speaks its protocol.
//!
//! Owns the requests, their time-outs and what their answers mean. Does not own retries, which are the caller's, nor the
//! question whether the server honours `If-None-Match`, which only a probe can answer.

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
use aws_config::{BehaviorVersion, Region};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::RequestChecksumCalculation;
use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::operation::put_object::builders::PutObjectFluentBuilder;
use aws_sdk_s3::primitives::{ByteStream, ByteStreamError};
use aws_sdk_s3::types::ServerSideEncryption;
use aws_smithy_http_client::tls::{self, TrustStore, rustls_provider::CryptoMode};
use bytes::{Bytes, BytesMut};
use jiff::Timestamp;

use self::failure::{answer, classify};
pub use self::settings::{Checksums, Credentials, S3Settings, Sse};
use super::{Created, Object, Page, Store};
use crate::error::{Error, Result};
use crate::sys::outbound::tls_context;

/// The contract's bound on a page, and S3's own.
const PAGE: i32 = 1000;

/// A server that is there answers a connect within a round trip; the rest is for lost packets.
const CONNECT: Duration = Duration::from_secs(5);

/// The slowest line, in bytes a second, on which a body may still arrive in time.
const SLOWEST: u64 = 32 * 1024;

/// Enough for the requests that are in flight at once; more would only keep memory.
const IDLE_CONNECTIONS: usize = 32;

/// Room that is made for a body because its server says that it is so long.
const MOST_FORESEEN: u64 = 16 << 20;

/// Begins an `after` that carries the server's own mark of a page. No key holds this character.
const MARK: char = '\0';

fn said(variable: &str) -> Option<String> {
    std::env::var(variable)
        .ok()
        .filter(|value| !value.is_empty())
}

/// Keeps objects in a bucket.
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
    /// Prepares a client; credentials and region come from the SDK's own chain where `settings` has none. Asks the server
    /// nothing yet.
    pub async fn connect(settings: S3Settings) -> Result<S3Store> {
        // The SDK would follow this variable too, but tells nobody; the address must name the server that is meant.
        let named = settings
            .endpoint
            .clone()
            .or_else(|| said("AWS_ENDPOINT_URL_S3"));
        // Without TLS, and with keys at hand, the system's hundred-odd certificates need not be read, nor kept in memory.
        let keys = settings.credentials.is_some()
            || said("AWS_ACCESS_KEY_ID")
                .and(said("AWS_SECRET_ACCESS_KEY"))
                .is_some();
        let plain = named
            .as_deref()
            .is_some_and(|url| url.starts_with("http://"));
        let trust = if plain && keys {
            TrustStore::empty()
        } else {
            TrustStore::default()
        };
        let mut loader = aws_config::defaults(BehaviorVersion::latest())
            .http_client(http_client(trust, settings.ca_file.as_deref()).await?);
        if let Some(endpoint) = named {
            loader = loader.endpoint_url(endpoint);
            // A server of one's own has no use for the region of the machine, so the metadata service is not asked for it.
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
        let shared = loader.load().await;
        if shared.region().is_none() {
            return Err(Error::usage(format!(
                "open store s3://{}: no region was found",
                settings.bucket
            ))
            .hint("name it with region=… in the store's URL, or set AWS_REGION"));
        }
        let endpoint = shared.endpoint_url().map(settings::endpoint).transpose()?;
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(CONNECT.min(settings.timeout))
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
        format!("{verb} {key} in {}", self.place())
    }

    fn place(&self) -> String {
        format!("s3://{}/{}", self.bucket, self.prefix)
            .trim_end_matches('/')
            .to_owned()
    }

    /// Bounds one call. The SDK's own attempt time-out does not serve: it no longer watches once a body begins to arrive,
    /// and it gives an upload of any size the same time.
    async fn bounded<T>(
        &self,
        context: &str,
        bytes: u64,
        call: impl Future<Output = T>,
    ) -> Result<T> {
        let limit = self.timeout + Duration::from_secs(bytes / SLOWEST);
        tokio::time::timeout(limit, call).await.map_err(|_| {
            Error::unavailable(format!("{context}: no answer within {limit:?}"))
                .hint("see whether the server runs and can be reached from here; what streams goes on by itself then")
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

    /// Whether the server lists what begins like `key`, and `key` is not among it.
    async fn is_not_listed(&self, key: &str) -> bool {
        self.list(key, None).await.is_ok_and(|page| {
            page.next.is_none() && page.objects.iter().all(|object| object.key != key)
        })
    }

    /// Reads an answer to a listing that asked for what is behind `after`, or for the server's page `mark`.
    fn page(
        &self,
        context: &str,
        answer: &ListObjectsV2Output,
        after: Option<&str>,
        mark: Option<&str>,
    ) -> Result<Page> {
        let behind = |key: &&str| after.is_none_or(|after| *key > after);
        let own = |key: &'_ str| key.strip_prefix(self.prefix.as_str()).map(str::to_owned);
        let mut page = Page::default();
        for found in answer.contents() {
            let size = found
                .size()
                .and_then(|size| u64::try_from(size).ok())
                .unwrap_or(0);
            // Consoles make "directories" as empty objects whose key ends in a slash; they are none of ours.
            let key = found
                .key()
                .and_then(own)
                .filter(|key| !key.ends_with('/') && behind(&key.as_str()));
            let modified = found
                .last_modified()
                .and_then(|time| Timestamp::from_nanosecond(time.as_nanos()).ok());
            // Every server says when; one that does not gets no object of its collected.
            let modified = modified.unwrap_or(Timestamp::MAX);
            page.objects.extend(key.map(|key| Object {
                key,
                size,
                modified,
            }));
        }
        let directories = answer
            .common_prefixes()
            .iter()
            .filter_map(|found| found.prefix());
        page.directories.extend(
            directories
                .filter_map(own)
                .filter(|directory| behind(&directory.as_str())),
        );
        // Servers that keep directories as such list them in an order of their own.
        page.objects.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        page.directories.sort_unstable();
        if answer.is_truncated() == Some(true) {
            let next = answer
                .next_continuation_token()
                .filter(|next| Some(*next) != mark && !next.is_empty());
            let next = next.ok_or_else(|| {
                Error::unavailable(format!(
                    "{context}: the server says that there is more, but not where"
                ))
            })?;
            page.next = Some(format!("{MARK}{next}"));
        }
        Ok(page)
    }
}

#[async_trait]
impl Store for S3Store {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created> {
        let context = self.context("create", key);
        let size = body.len() as u64;
        match self
            .bounded(
                &context,
                size,
                self.upload(key, body).if_none_match("*").send(),
            )
            .await?
        {
            Ok(_) => Ok(Created::New),
            Err(error) if answer(&error).0 == 412 => Ok(Created::Exists),
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
        match self
            .bounded(&context, size, self.upload(key, body).send())
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
        let found = match self.bounded(&context, 0, request).await? {
            Ok(found) => found,
            Err(error) if is_missing(answer(&error)) => return Ok(None),
            // Who may list only some prefixes is told by AWS that a missing key is denied.
            Err(error) if answer(&error).0 == 403 && self.is_not_listed(key).await => {
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
        match self
            .bounded(&context, size, gather(found.body, size))
            .await?
        {
            Ok(body) => Ok(Some(body)),
            Err(cause) => {
                let error = Error::unavailable(context).caused_by(cause);
                // TCP and TLS check the way here, so a wrong checksum is the stored object's.
                if error.to_string().contains("checksum") {
                    Err(Error::corrupt(error.to_string()))
                } else {
                    Err(error)
                }
            }
        }
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        let context = self.context("list", prefix);
        let mark = after.and_then(|after| after.strip_prefix(MARK));
        let after = after.filter(|_| mark.is_none());
        let request = self
            .client
            .list_objects_v2()
            .bucket(&self.bucket)
            .prefix(self.key(prefix))
            .delimiter("/")
            .max_keys(PAGE);
        let request = request
            .set_continuation_token(mark.map(str::to_owned))
            .set_start_after(after.map(|after| self.key(after)));
        match self.bounded(&context, 0, request.send()).await? {
            Ok(answer) => self.page(&context, &answer, after, mark),
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
        match self.bounded(&context, 0, request).await? {
            Ok(_) => Ok(()),
            Err(error) if is_missing(answer(&error)) => Ok(()),
            Err(error) => Err(classify(
                context,
                &self.bucket,
                self.endpoint.as_deref(),
                &error,
            )),
        }
    }

    fn fences_by_itself(&self) -> Option<bool> {
        None
    }

    fn address(&self) -> String {
        match &self.endpoint {
            Some(endpoint) => format!("{} at {endpoint}", self.place()),
            None => self.place(),
        }
    }
}

/// Takes a body in, piece by piece: it is in memory once.
async fn gather(mut body: ByteStream, size: u64) -> std::result::Result<Bytes, ByteStreamError> {
    let mut held = BytesMut::with_capacity(size.min(MOST_FORESEEN) as usize);
    while let Some(piece) = body.try_next().await? {
        held.extend_from_slice(&piece);
    }
    Ok(held.freeze())
}

/// Whether an answer says that there is no such object, in a bucket that is there.
fn is_missing((status, code): (u16, &str)) -> bool {
    status == 404 && code != "NoSuchBucket"
}

async fn http_client(
    trust: TrustStore,
    ca_file: Option<&Path>,
) -> Result<aws_sdk_s3::config::SharedHttpClient> {
    Ok(aws_smithy_http_client::Builder::new()
        .pool_max_idle_per_host(IDLE_CONNECTIONS)
        .tls_provider(tls::Provider::rustls(CryptoMode::Ring))
        .tls_context(tls_context(trust, ca_file).await?)
        .build_https())
}
