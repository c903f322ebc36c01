//! Settings: flags, then `SESSIOND_*` variables, then a TOML file, then defaults. Plain values; `wire.rs` makes parts of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::model::{Label, SessionMetadata, Tokens, Ttl};

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Settings that every command takes.
#[derive(Debug, Clone, Default, Args, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
#[command(next_help_heading = "Where")]
pub struct Settings {
    /// Object store: file:///PATH or s3://BUCKET/PREFIX?endpoint=URL [default: a directory in the XDG data directory]
    #[arg(long, global = true, env = "SESSIOND_STORE", value_name = "URL")]
    pub store: Option<String>,

    /// Index: sqlite:///PATH or postgres://USER@HOST/DB [default: a file in the XDG data directory]
    #[arg(
        long,
        global = true,
        env = "SESSIOND_INDEX",
        value_name = "URL",
        hide_env_values = true
    )]
    pub index: Option<String>,

    /// The agent's directory [default: the agent's own, such as ~/.claude]
    #[arg(long, global = true, env = "SESSIOND_ROOT", value_name = "DIR")]
    pub root: Option<PathBuf>,

    /// Whose files these are: claude-code, codex, gemini, opencode, or another with a profile table in the configuration [default: claude-code]
    #[arg(long, global = true, env = "SESSIOND_AGENT", value_name = "NAME")]
    pub agent: Option<String>,

    /// The tenant: the first part of every key and a column of every table [default: default]
    #[arg(long, global = true, env = "SESSIOND_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,

    /// What keeps two writers apart: auto, store, database or off [default: auto, which asks the store]
    #[arg(long, global = true, env = "SESSIOND_FENCING", value_name = "HOW")]
    pub fencing: Option<String>,

    /// S3 region [default: by the AWS SDK's own chain]
    #[arg(long, global = true, env = "SESSIOND_REGION", value_name = "NAME")]
    pub region: Option<String>,

    /// S3 endpoint, for servers other than AWS
    #[arg(long, global = true, env = "SESSIOND_ENDPOINT", value_name = "URL")]
    pub endpoint: Option<String>,

    /// Address buckets by path instead of by host name [default: true with an endpoint]
    #[arg(long, global = true, env = "SESSIOND_PATH_STYLE", value_name = "BOOL")]
    pub path_style: Option<bool>,

    /// Encryption at rest by the S3 server: AES256, aws:kms or aws:kms=KEY-ID
    #[arg(long, global = true, env = "SESSIOND_SSE", value_name = "HOW")]
    pub sse: Option<String>,

    /// Encrypt what is stored to this age recipient, or to those in a file; several times, or with commas, for several [default: to the identities, if any]
    #[arg(
        long,
        global = true,
        env = "SESSIOND_ENCRYPT_TO",
        value_name = "RECIPIENT|FILE",
        value_delimiter = ','
    )]
    pub encrypt_to: Vec<String>,

    /// Open what is encrypted with the age identities in this file; several times, or with commas, for several files
    #[arg(
        long,
        global = true,
        env = "SESSIOND_IDENTITY",
        value_name = "FILE",
        value_delimiter = ','
    )]
    pub identity: Vec<PathBuf>,

    /// Trust this certificate authority too (a PEM file) when speaking to S3, a heartbeat's server or a collector
    #[arg(long, global = true, env = "SESSIOND_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,

    /// Give up on one request to the store after this long [default: 30s]
    #[arg(
        long,
        global = true,
        env = "SESSIOND_REQUEST_TIMEOUT",
        value_name = "TIME"
    )]
    pub request_timeout: Option<String>,

    /// Keep what people and agents said in the index too, for sessiond search
    #[arg(long, global = true, env = "SESSIOND_INDEX_TEXT")]
    #[serde(default)]
    pub index_text: bool,

    /// Log lines as text or json [default: text]
    #[arg(
        long,
        global = true,
        env = "SESSIOND_LOG_FORMAT",
        value_name = "FORMAT"
    )]
    pub log_format: Option<LogFormat>,

    /// What to log: error, warn, info, debug, or a filter such as sessiond=debug [default: info]
    #[arg(long, global = true, env = "SESSIOND_LOG", value_name = "LEVEL")]
    pub log: Option<String>,

    /// Tell this OpenTelemetry collector what flushes and restores took (OTLP over HTTP, to URL/v1/traces), or off
    /// [default: OTEL_EXPORTER_OTLP_ENDPOINT, if that is set]
    #[arg(
        long,
        global = true,
        env = "SESSIOND_OTLP_ENDPOINT",
        value_name = "URL",
        hide_env_values = true
    )]
    pub otlp_endpoint: Option<String>,

    /// Only say what was asked for and what is wrong: no progress, no log below warn
    #[arg(long, short, global = true, env = "SESSIOND_QUIET")]
    #[serde(default)]
    pub quiet: bool,

    /// Configuration file [default: sessiond/config.toml in the XDG configuration directory]
    #[arg(long, global = true, env = "SESSIOND_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Which files belong to which session, for a custom agent; from the file alone.
    #[arg(skip)]
    #[serde(skip)]
    pub profile: Option<Patterns>,

    /// What tokens cost; from the file alone.
    #[arg(skip)]
    #[serde(skip)]
    pub prices: Prices,
}

/// Settings of what streams.
#[derive(Debug, Clone, Default, Args, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
#[command(next_help_heading = "Streaming")]
pub struct Stream {
    /// Flush at most this long after the first unsaved byte [default: 1s]
    #[arg(long, env = "SESSIOND_FLUSH_INTERVAL", value_name = "TIME")]
    pub flush_interval: Option<String>,

    /// The final flush gives up after this long; keep it below the platform's stop budget [default: 8s]
    #[arg(long, env = "SESSIOND_FLUSH_DEADLINE", value_name = "TIME")]
    pub flush_deadline: Option<String>,

    /// So many sessions are flushed, and requests to the store on their way, at a time [default: 8 and 32]
    #[arg(long, env = "SESSIOND_PARALLEL", value_name = "N")]
    pub parallel: Option<usize>,

    /// Create this file when everything is restored and streaming
    #[arg(long, env = "SESSIOND_READY_FILE", value_name = "FILE")]
    pub ready_file: Option<PathBuf>,

    /// Say of every session that is written to that it belongs to this request
    #[arg(long, env = "SESSIOND_REQUEST_ID", value_name = "ID")]
    pub request_id: Option<String>,

    /// Give every session that is written to this label; several times, or with commas, for several labels
    #[arg(
        long,
        env = "SESSIOND_LABELS",
        value_name = "NAME=VALUE",
        value_delimiter = ','
    )]
    pub label: Vec<String>,

    /// Say of every session that is written to how long to keep it after its last change: a length of time, or never
    #[arg(long, env = "SESSIOND_TTL", value_name = "TIME")]
    pub ttl: Option<String>,

    /// Answer /healthz, /readyz and /metrics here, or off [default: 127.0.0.1:9464, if nobody else has it]
    #[arg(long, env = "SESSIOND_HTTP", value_name = "ADDR")]
    pub http: Option<String>,

    /// Call this URL in an interval, only while everything is durable; use the variable if it holds a secret
    #[arg(
        long,
        env = "SESSIOND_HEARTBEAT_URL",
        value_name = "URL",
        hide_env_values = true
    )]
    pub heartbeat_url: Option<String>,

    /// From one such call to the next [default: 60s]
    #[arg(long, env = "SESSIOND_HEARTBEAT_INTERVAL", value_name = "TIME")]
    pub heartbeat_interval: Option<String>,
}

impl Stream {
    /// What is said of every session that is written to. A variable that is set to nothing says nothing.
    pub fn wishes(&self) -> Result<SessionMetadata> {
        let said = |text: &&str| !text.trim().is_empty();
        let labels = self
            .label
            .iter()
            .map(String::as_str)
            .filter(said)
            .map(str::parse)
            .collect::<Result<Vec<Label>>>()?;
        let wishes = SessionMetadata {
            ttl: self
                .ttl
                .as_deref()
                .filter(said)
                .map(|text| ttl("--ttl", text))
                .transpose()?,
            labels: labels
                .into_iter()
                .map(|label| (label.name, label.value))
                .collect(),
            request_id: self.request_id.as_deref().filter(said).map(str::to_owned),
            status: None,
        };
        wishes.check()?;
        Ok(wishes)
    }
}

/// The `[profile]` table: which files of a custom agent belong to which session.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct Patterns {
    /// Which files to keep; `{session}` stands for the session's id, `*` for anything within a name, `**` across directories.
    pub sessions: Vec<String>,
    /// Which of them are appended to line by line.
    pub append: Vec<String>,
    /// Which never to touch.
    pub never: Vec<String>,
}

impl Default for Patterns {
    /// Each top directory and each file beside them is a session.
    fn default() -> Self {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        Patterns {
            sessions: list(&["{session}/**", "{session}.jsonl", "{session}"]),
            append: list(&["**/*.jsonl", "**/*.ndjson"]),
            never: Vec::new(),
        }
    }
}

/// The `[prices]` table: what tokens cost, by model.
#[derive(Debug, Clone, Default, Deserialize, PartialEq)]
#[serde(transparent)]
pub struct Prices(BTreeMap<String, Price>);

/// Dollars for a million tokens, which is millionths of a dollar for one.
#[derive(Debug, Clone, Copy, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Price {
    input: f64,
    output: f64,
    #[serde(default)]
    cache_read: f64,
    #[serde(default)]
    cache_write: f64,
}

impl Prices {
    /// What an answer cost, in millionths of a dollar; none if nothing is said of the model. The longest name counts that the
    /// model's begins with.
    pub fn cost(&self, model: &str, tokens: Tokens) -> Option<u64> {
        let price = self
            .0
            .iter()
            .filter(|(name, _)| model.starts_with(name.as_str()))
            .max_by_key(|(name, _)| name.len())?
            .1;
        let of = |count: u64, price: f64| count as f64 * price;
        let cost = of(tokens.input, price.input)
            + of(tokens.output, price.output)
            + of(tokens.cache_read, price.cache_read)
            + of(tokens.cache_write, price.cache_write);
        Some(cost.round() as u64)
    }
}

/// The whole file.
#[derive(Debug, Default, Deserialize)]
struct File {
    #[serde(flatten)]
    settings: Settings,
    #[serde(flatten)]
    stream: Stream,
    profile: Option<Patterns>,
    #[serde(default)]
    prices: Prices,
    #[serde(flatten)]
    unknown: BTreeMap<String, toml::Value>,
}

macro_rules! fill {
    ($upper:expr, $lower:expr, $($field:ident),+) => { $( if $upper.$field.is_none() { $upper.$field = $lower.$field; } )+ };
}

/// Fills what flags and variables left open from the configuration file, if there is one.
pub fn fill_from_file(
    settings: &mut Settings,
    stream: Option<&mut Stream>,
    default_file: Option<PathBuf>,
) -> Result<()> {
    let named = settings.config.clone();
    let Some(path) = named
        .clone()
        .or_else(|| default_file.filter(|path| path.exists()))
    else {
        return Ok(());
    };
    let text = std::fs::read_to_string(&path)
        .map_err(|cause| Error::named(format!("read configuration {}", path.display()), cause))?;
    let file = parse(&path, &text)?;
    fill!(
        settings,
        file.settings,
        store,
        index,
        root,
        agent,
        namespace,
        fencing,
        region,
        endpoint,
        path_style,
        sse,
        ca_file,
        request_timeout,
        log_format,
        log,
        otlp_endpoint
    );
    if settings.encrypt_to.is_empty() {
        settings.encrypt_to = file.settings.encrypt_to;
    }
    if settings.identity.is_empty() {
        settings.identity = file.settings.identity;
    }
    settings.index_text |= file.settings.index_text;
    settings.quiet |= file.settings.quiet;
    settings.profile = file.profile;
    settings.prices = file.prices;
    if let Some(stream) = stream {
        fill!(
            stream,
            file.stream,
            flush_interval,
            flush_deadline,
            parallel,
            ready_file,
            request_id,
            ttl,
            http,
            heartbeat_url,
            heartbeat_interval
        );
        if stream.label.is_empty() {
            stream.label = file.stream.label;
        }
    }
    Ok(())
}

fn parse(path: &Path, text: &str) -> Result<File> {
    let wrong = |cause: toml::de::Error| {
        // Not the line itself: it may hold a password.
        let line = cause
            .span()
            .map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        let line = line
            .map(|line| format!("line {line}: "))
            .unwrap_or_default();
        Error::usage(format!(
            "read configuration {}: {line}{}",
            path.display(),
            cause.message()
        ))
        .hint("it is TOML: NAME = VALUE, texts in quotes")
    };
    let table: toml::Table = toml::from_str(text).map_err(wrong)?;
    let file: File = table.clone().try_into().map_err(|cause: toml::de::Error| {
        let alone = |(key, value): (&String, &toml::Value)| {
            toml::Table::from_iter([(key.clone(), value.clone())])
        };
        let wrong = |table: &toml::Table| table.clone().try_into::<File>().is_err();
        let setting = table
            .iter()
            .map(alone)
            .find(wrong)
            .and_then(|table| table.keys().next().cloned())
            .unwrap_or_default();
        Error::usage(format!(
            "read configuration {}: {setting}: {}",
            path.display(),
            cause.message()
        ))
        .hint("docs/OPERATIONS.md lists the settings and what each of them takes")
    })?;
    if let Some(key) = file.unknown.keys().next() {
        return Err(Error::usage(format!("read configuration {}: it has no setting {key:?}", path.display()))
            .hint("every flag is a setting of the same name without the dashes in front; see docs/OPERATIONS.md"));
    }
    Ok(file)
}

/// Reads a length of time: `500ms`, `8s`, `1m 30s`, or a number of seconds.
pub fn duration(what: &str, text: Option<&str>, default: Duration) -> Result<Duration> {
    let Some(text) = text.map(str::trim) else {
        return Ok(default);
    };
    let seconds = text
        .parse::<f64>()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    // Days and weeks of 24 hours; the library knows only calendar days.
    let long = |letter: char, seconds: u64| {
        text.strip_suffix(letter)?
            .trim()
            .parse::<u32>()
            .ok()
            .map(|count| Duration::from_secs(u64::from(count) * seconds))
    };
    let seconds = seconds
        .or_else(|| long('d', 86_400))
        .or_else(|| long('w', 604_800));
    let read = seconds.or_else(|| {
        text.parse::<jiff::SignedDuration>()
            .ok()
            .and_then(|time| Duration::try_from(time).ok())
    });
    read.ok_or_else(|| {
        Error::usage(format!("read {what} {text:?}"))
            .hint("a length of time, such as 500ms, 8s, 1m30s or 7d")
    })
}

/// Reads how long to keep a session: a length of time, or `never`.
pub fn ttl(what: &str, text: &str) -> Result<Ttl> {
    match text.trim() {
        "never" => Ok(Ttl::Never),
        text => match duration(what, Some(text), Duration::ZERO) {
            Ok(time) => Ok(Ttl::Seconds(time.as_secs())),
            Err(_) => Err(Error::usage(format!("read {what} {text:?}"))
                .hint("a length of time, such as 12h or 7d, or never")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_time_are_read() {
        let read = |text| duration("x", Some(text), Duration::ZERO).ok();
        assert_eq!(read("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(read("8"), Some(Duration::from_secs(8)));
        assert_eq!(read("0.5"), Some(Duration::from_millis(500)));
        assert_eq!(read("1m30s"), Some(Duration::from_secs(90)));
        assert_eq!(read("7d"), Some(Duration::from_secs(7 * 86_400)));
        assert_eq!(read("2w"), Some(Duration::from_secs(14 * 86_400)));
        for bad in ["", "-1s", "soon", "1 fortnight", "inf", "NaN", "1e300"] {
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_file_fills_only_what_is_open_and_refuses_what_it_does_not_know() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("c.toml");
        std::fs::write(
            &path,
            "store = \"file:///a\"\nnamespace = \"team\"\nflush-interval = \"2s\"\n[profile]\nsessions = [\"{session}.json\"]\n",
        )
        .unwrap();
        let mut settings = Settings {
            config: Some(path.clone()),
            store: Some("file:///flag".into()),
            ..Settings::default()
        };
        let mut stream = Stream::default();
        fill_from_file(&mut settings, Some(&mut stream), None).unwrap();
        assert_eq!(
            (settings.store.as_deref(), settings.namespace.as_deref()),
            (Some("file:///flag"), Some("team"))
        );
        assert_eq!(stream.flush_interval.as_deref(), Some("2s"));
        assert_eq!(settings.profile.unwrap().sessions, ["{session}.json"]);

        std::fs::write(&path, "sotre = \"x\"\n").unwrap();
        let mut settings = Settings {
            config: Some(path),
            ..Settings::default()
        };
        let error = fill_from_file(&mut settings, None, None).unwrap_err();
        assert!(error.to_string().contains("sotre"), "{error}");
    }
}
