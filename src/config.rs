//! Settings: a flag overrides a `SESSIOND_*` variable, which overrides the configuration file,
//! which overrides the default.
//!
//! Owns the settings, in one group per part that uses them, and the configuration file (`file`).
//! Does not own the parts: `wire.rs` builds them and hands each one its own group.

pub mod file;
pub mod value;

use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::model::{Patterns, Prices, SessionMetadata};

pub use file::{LoadedFile, load};
pub use value::{checkpoint_interval, checkpoint_retention, duration, labels, ttl};

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// When output is colored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The settings that every command takes.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(default)]
#[command(next_help_heading = "Global options")]
pub struct Settings {
    /// The agent and its directory.
    #[command(flatten)]
    #[serde(flatten)]
    pub agent: AgentConfig,

    /// The object store.
    #[command(flatten)]
    #[serde(flatten)]
    pub store: StoreConfig,

    /// S3.
    #[command(flatten)]
    #[serde(flatten)]
    pub s3: S3Config,

    /// The index.
    #[command(flatten)]
    #[serde(flatten)]
    pub index: IndexConfig,

    /// Encryption.
    #[command(flatten)]
    #[serde(flatten)]
    pub encryption: EncryptionConfig,

    /// Signatures.
    #[command(flatten)]
    #[serde(flatten)]
    pub signatures: SignatureConfig,

    /// Outgoing connections.
    #[command(flatten)]
    #[serde(flatten)]
    pub network: NetworkConfig,

    /// Traces.
    #[command(flatten)]
    #[serde(flatten)]
    pub telemetry: TelemetryConfig,

    /// Logs and terminal output.
    #[command(flatten)]
    #[serde(flatten)]
    pub output: OutputConfig,

    /// Configuration file [default: $XDG_CONFIG_HOME/sessiond/config.toml]
    #[arg(long, global = true, env = "SESSIOND_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// The `[profile]` table of the configuration file: the files of a custom agent.
    #[arg(skip)]
    #[serde(skip)]
    pub profile: Option<Patterns>,

    /// The `[prices]` table of the configuration file: the price of tokens.
    #[arg(skip)]
    #[serde(skip)]
    pub prices: Prices,
}

/// The agent whose sessions are stored.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct AgentConfig {
    /// Agent whose sessions are stored [default: claude-code]
    ///
    /// One of claude-code, codex, gemini and opencode, or a custom agent whose files the profile
    /// table of the configuration file describes.
    #[arg(
        id = "agent",
        long = "agent",
        global = true,
        env = "SESSIOND_AGENT",
        value_name = "NAME"
    )]
    #[serde(rename = "agent")]
    pub name: Option<String>,

    /// Agent's directory [default: the agent's own, such as ~/.claude]
    #[arg(long, global = true, env = "SESSIOND_ROOT", value_name = "DIR")]
    pub root: Option<PathBuf>,

    /// Namespace (tenant) of the sessions [default: default]
    ///
    /// The first component of every object key and a column of every table.
    #[arg(long, global = true, env = "SESSIOND_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,
}

/// The object store, of any kind.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct StoreConfig {
    /// Object store: file:///DIR or s3://BUCKET/PREFIX [default: a local directory]
    ///
    /// The default is file://$XDG_DATA_HOME/sessiond/store. An S3 URL takes parameters, such as
    /// s3://BUCKET/PREFIX?endpoint=URL&region=NAME.
    #[arg(
        id = "store",
        long = "store",
        global = true,
        env = "SESSIOND_STORE",
        value_name = "URL"
    )]
    #[serde(rename = "store")]
    pub url: Option<String>,

    /// Fencing mechanism: auto, store, database or off [default: auto]
    ///
    /// Fencing lets only one writer append to a session. With auto, sessiond checks once whether
    /// the store supports conditional creates, and uses the database if it does not.
    #[arg(long, global = true, env = "SESSIOND_FENCING", value_name = "MODE")]
    pub fencing: Option<String>,

    /// Timeout of one store request [default: 30s]
    #[arg(
        long,
        global = true,
        env = "SESSIOND_REQUEST_TIMEOUT",
        value_name = "TIME"
    )]
    pub request_timeout: Option<String>,
}

/// Settings of an S3 store. Each one overrides the parameter of the store URL.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(default)]
pub struct S3Config {
    /// S3 region [default: from the AWS configuration]
    #[arg(
        id = "s3-region",
        long = "s3-region",
        global = true,
        env = "SESSIOND_S3_REGION",
        value_name = "NAME"
    )]
    #[serde(rename = "s3-region")]
    pub region: Option<String>,

    /// S3 endpoint URL, for servers other than AWS [default: AWS]
    #[arg(
        id = "s3-endpoint",
        long = "s3-endpoint",
        global = true,
        env = "SESSIOND_S3_ENDPOINT",
        value_name = "URL"
    )]
    #[serde(rename = "s3-endpoint")]
    pub endpoint: Option<String>,

    /// Path-style bucket addresses, true or false [default: true with an endpoint]
    #[arg(
        id = "s3-path-style",
        long = "s3-path-style",
        global = true,
        env = "SESSIOND_S3_PATH_STYLE",
        value_name = "BOOL",
        hide_possible_values = true,
        value_parser = BoolishValueParser::new()
    )]
    #[serde(rename = "s3-path-style")]
    pub path_style: Option<bool>,

    /// Server-side encryption: AES256, aws:kms or aws:kms=KEY-ID [default: none]
    #[arg(
        id = "s3-sse",
        long = "s3-sse",
        global = true,
        env = "SESSIOND_S3_SSE",
        value_name = "MODE"
    )]
    #[serde(rename = "s3-sse")]
    pub sse: Option<String>,
}

/// The index.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct IndexConfig {
    /// Index: sqlite:///FILE or postgres://USER@HOST/DB [default: a local SQLite file]
    ///
    /// The default is sqlite://$XDG_DATA_HOME/sessiond/index.db.
    #[arg(
        id = "index",
        long = "index",
        global = true,
        env = "SESSIOND_INDEX",
        value_name = "URL",
        hide_env_values = true
    )]
    #[serde(rename = "index")]
    pub url: Option<String>,

    /// Store message texts in the index, for "sessiond search" [default: false]
    #[arg(
        id = "index-text",
        long = "index-text",
        global = true,
        env = "SESSIOND_INDEX_TEXT",
        num_args = 0,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new()
    )]
    #[serde(rename = "index-text")]
    pub text: Option<bool>,

    /// Check logs for a rollback against the index: auto, require, off [default: auto]
    ///
    /// With auto, a restore waits for the index up to 500 ms and continues without its answer. With
    /// require, it fails without the answer.
    #[arg(long, global = true, env = "SESSIOND_WITNESS", value_name = "MODE")]
    pub witness: Option<String>,
}

/// Client-side encryption with age.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct EncryptionConfig {
    /// Encrypt to this age recipient or recipients file [default: to the identities]
    ///
    /// Repeat the flag, or separate values with commas. Without recipients and without identities,
    /// nothing is encrypted.
    #[arg(
        long,
        global = true,
        env = "SESSIOND_ENCRYPT_TO",
        value_name = "RECIPIENT|FILE",
        value_delimiter = ','
    )]
    pub encrypt_to: Vec<String>,

    /// Decrypt with the age identities in this file [default: none]
    ///
    /// Repeat the flag, or separate with commas, to name several files.
    #[arg(
        long,
        global = true,
        env = "SESSIOND_IDENTITY",
        value_name = "FILE",
        value_delimiter = ','
    )]
    pub identity: Vec<PathBuf>,

    /// Plaintext rule: reject, before-encrypted, accept [default: reject with keys]
    ///
    /// With before-encrypted, a session that began as plaintext can be read; plaintext after an
    /// encrypted entry is rejected. Without keys, that is the default.
    #[arg(long, global = true, env = "SESSIOND_PLAINTEXT", value_name = "RULE")]
    pub plaintext: Option<String>,
}

/// Signatures of stored objects.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct SignatureConfig {
    /// Sign every object with the key in this file [default: none]
    #[arg(long, global = true, env = "SESSIOND_SIGNING_KEY", value_name = "FILE")]
    pub signing_key: Option<PathBuf>,

    /// Accept only objects that this key signed (repeatable) [default: accept all]
    ///
    /// A public key, ed25519:…, or a file with one public key per line. Repeat the flag, or separate
    /// values with commas, to trust several keys.
    #[arg(
        long,
        global = true,
        env = "SESSIOND_TRUST_KEY",
        value_name = "KEY|FILE",
        value_delimiter = ','
    )]
    pub trust_key: Vec<String>,
}

/// Outgoing TLS connections.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct NetworkConfig {
    /// Additional CA certificates (PEM) for outgoing TLS [default: system CAs only]
    ///
    /// Used for S3, for the heartbeat URL and for the OpenTelemetry collector.
    #[arg(long, global = true, env = "SESSIOND_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
}

/// Traces of flushes and restores.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct TelemetryConfig {
    /// OpenTelemetry collector (OTLP/HTTP), or off [default: the OTEL_* variables]
    ///
    /// Spans of flushes and restores are sent to URL/v1/traces. The default is
    /// OTEL_EXPORTER_OTLP_ENDPOINT; if that is not set, sessiond sends nothing.
    #[arg(
        long,
        global = true,
        env = "SESSIOND_OTLP_ENDPOINT",
        value_name = "URL",
        hide_env_values = true
    )]
    pub otlp_endpoint: Option<String>,
}

/// Logs and terminal output.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct OutputConfig {
    /// Log level or filter, such as debug or sessiond=debug [default: info]
    #[arg(long, global = true, env = "SESSIOND_LOG", value_name = "LEVEL")]
    pub log: Option<String>,

    /// File to which log lines are also appended [default: none]
    ///
    /// While run executes a command on a terminal, no log line is written to the terminal. The file
    /// gets all of them.
    #[arg(long, global = true, env = "SESSIOND_LOG_FILE", value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// Log format: text or json [default: text]
    #[arg(
        long,
        global = true,
        env = "SESSIOND_LOG_FORMAT",
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    pub log_format: Option<LogFormat>,

    /// Color of output and logs: auto, always or never [default: auto]
    ///
    /// With auto, output to a terminal is colored unless NO_COLOR is set.
    #[arg(
        long,
        global = true,
        env = "SESSIOND_COLOR",
        value_name = "WHEN",
        hide_possible_values = true
    )]
    pub color: Option<ColorChoice>,

    /// Print results and warnings only: no progress, no info logs [default: false]
    #[arg(
        long,
        short,
        global = true,
        env = "SESSIOND_QUIET",
        num_args = 0,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new()
    )]
    pub quiet: Option<bool>,
}

impl OutputConfig {
    /// Whether progress and informational logs are off.
    pub fn is_quiet(&self) -> bool {
        self.quiet.unwrap_or(false)
    }
}

/// The settings of the commands that stream: `run`, `daemon` and `serve-store`.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(default)]
#[command(next_help_heading = "Streaming options")]
pub struct StreamConfig {
    /// Flushing.
    #[command(flatten)]
    #[serde(flatten)]
    pub flush: FlushConfig,

    /// Metadata of the sessions that this process writes.
    #[command(flatten)]
    #[serde(flatten)]
    pub metadata: MetadataConfig,

    /// Probes and metrics.
    #[command(flatten)]
    #[serde(flatten)]
    pub probes: ProbeConfig,
}

/// When and how much to flush.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct FlushConfig {
    /// Maximum delay between a change and its flush [default: 1s]
    #[arg(long, env = "SESSIOND_FLUSH_INTERVAL", value_name = "TIME")]
    pub flush_interval: Option<String>,

    /// Time limit of the final flush; keep it below the stop timeout [default: 8s]
    ///
    /// The platform kills the process after its stop timeout: 10s for Docker, 30s for Kubernetes
    /// and ECS.
    #[arg(long, env = "SESSIOND_FLUSH_DEADLINE", value_name = "TIME")]
    pub flush_deadline: Option<String>,

    /// Checkpoint a turn every N steps or TIME, such as 10steps,60s [default: 1step]
    ///
    /// A step is one tool round. With both, whichever comes first; the time is that of the messages.
    /// "turn" makes no checkpoints within a turn.
    #[arg(long, env = "SESSIOND_CHECKPOINT_EVERY", value_name = "N,TIME")]
    pub checkpoint_every: Option<String>,

    /// Number of checkpoints to keep [default: 100turns,16steps]
    ///
    /// The newest turns are kept, and all steps among the newest checkpoints. Older steps are
    /// thinned out: every second, then every fourth, and so on. At most 400turns,100steps.
    #[arg(long, env = "SESSIOND_KEEP_CHECKPOINTS", value_name = "N")]
    pub keep_checkpoints: Option<String>,

    /// Maximum concurrent flushes and store requests [default: 8 and 72]
    #[arg(long, env = "SESSIOND_PARALLEL", value_name = "N")]
    pub parallel: Option<usize>,
}

/// Metadata of the sessions that this process writes.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MetadataConfig {
    /// Your ID of the job: finds its session, and is set on new ones [default: none]
    ///
    /// "run" and "daemon" restore the latest session with this request ID first. Every session that
    /// this process writes gets the request ID.
    #[arg(long, env = "SESSIOND_REQUEST", value_name = "ID")]
    pub request: Option<String>,

    /// Set a label on every session this process writes (repeatable) [default: none]
    #[arg(
        long,
        env = "SESSIOND_LABEL",
        value_name = "NAME=VALUE",
        value_delimiter = ','
    )]
    pub label: Vec<String>,

    /// TTL of every session this process writes, or never [default: none]
    ///
    /// The TTL starts with the last change of the session. "sessiond gc" removes expired sessions.
    #[arg(long, env = "SESSIOND_TTL", value_name = "TIME")]
    pub ttl: Option<String>,
}

impl MetadataConfig {
    /// The metadata to set on every session that this process writes.
    pub fn parse(&self) -> Result<SessionMetadata> {
        let metadata = SessionMetadata {
            ttl: self
                .ttl
                .as_deref()
                .map(|text| ttl("--ttl", text))
                .transpose()?,
            labels: labels(&self.label)?
                .into_iter()
                .map(|label| (label.name, label.value))
                .collect(),
            request_id: self.request.clone(),
            closed: None,
        };
        metadata.validate()?;
        Ok(metadata)
    }
}

/// Probes, metrics and readiness.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ProbeConfig {
    /// Address for /healthz, /readyz and /metrics, or off [default: 127.0.0.1:9464]
    ///
    /// If another process uses the default address, sessiond logs a warning and serves nothing.
    #[arg(long, env = "SESSIOND_HTTP", value_name = "ADDR")]
    pub http: Option<String>,

    /// File to create when sessiond is ready (restored and streaming) [default: none]
    #[arg(long, env = "SESSIOND_READY_FILE", value_name = "FILE")]
    pub ready_file: Option<PathBuf>,

    /// URL to request periodically while everything is durable [default: none]
    ///
    /// If the URL contains a secret, set the variable instead of the flag.
    #[arg(
        long,
        env = "SESSIOND_HEARTBEAT_URL",
        value_name = "URL",
        hide_env_values = true
    )]
    pub heartbeat_url: Option<String>,

    /// Interval between heartbeats [default: 60s]
    #[arg(long, env = "SESSIOND_HEARTBEAT_INTERVAL", value_name = "TIME")]
    pub heartbeat_interval: Option<String>,
}
