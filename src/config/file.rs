//! The configuration file: TOML, with one key per flag and the tables `[profile]` and `[prices]`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Args as _;
use serde::Deserialize;

use super::{Settings, StreamConfig};
use crate::error::{Error, Result, redact_url};
use crate::model::{Patterns, Prices};
use crate::sys::private_file::is_open_to_others;

/// A configuration file that was read.
#[derive(Debug, Clone, Default)]
pub struct LoadedFile {
    /// Its path.
    pub path: PathBuf,
    /// The keys that it sets.
    pub keys: BTreeSet<String>,
    /// The file has a password, and other users can read it.
    pub is_exposed: bool,
}

/// The content of the file.
#[derive(Debug, Default, Deserialize)]
struct Content {
    #[serde(flatten)]
    settings: Settings,
    #[serde(flatten)]
    stream: StreamConfig,
    profile: Option<Patterns>,
    #[serde(default)]
    prices: Prices,
}

impl Content {
    /// Whether a setting has a password or a token.
    fn has_secret(&self) -> bool {
        let urls = [
            &self.settings.store.url,
            &self.settings.index.url,
            &self.settings.s3.endpoint,
            &self.settings.telemetry.otlp_endpoint,
        ];
        let has_password = |url: &String| *url != redact_url(url);
        self.stream.probes.heartbeat_url.is_some() || urls.into_iter().flatten().any(has_password)
    }
}

/// The keys that a configuration file may have: one per setting, and the two tables.
///
/// serde cannot reject unknown keys: each flattened group ignores the keys of the others.
fn known_keys() -> BTreeSet<String> {
    let command = Settings::augment_args(clap::Command::new("settings"));
    let command = StreamConfig::augment_args(command);
    let flags = command.get_arguments().filter_map(clap::Arg::get_long);
    flags
        .filter(|flag| *flag != "config")
        .chain(["profile", "prices"])
        .map(str::to_owned)
        .collect()
}

macro_rules! fill {
    ($upper:expr, $lower:expr, $($field:ident),+ $(,)?) => {
        $( if $upper.$field.is_none() { $upper.$field = $lower.$field; } )+
    };
}

/// Fills the settings that neither a flag nor a variable sets from the configuration file:
/// `settings.config`, or `default_path` if that file exists.
pub fn load(
    settings: &mut Settings,
    stream: Option<&mut StreamConfig>,
    default_path: Option<PathBuf>,
) -> Result<Option<LoadedFile>> {
    let Some(path) = settings
        .config
        .clone()
        .or_else(|| default_path.filter(|path| path.exists()))
    else {
        return Ok(None);
    };
    let text = std::fs::read_to_string(&path)
        .map_err(|cause| Error::unreadable_file(format!("read {}", path.display()), cause))?;
    let (content, keys) = parse(&path, &text)?;
    let has_secret = content.has_secret();
    settings.profile = content.profile;
    settings.prices = content.prices;
    fill_settings(settings, content.settings);
    if let Some(stream) = stream {
        fill_stream(stream, content.stream);
    }
    let is_exposed = has_secret && is_open_to_others(&path).unwrap_or(false);
    Ok(Some(LoadedFile {
        path,
        keys,
        is_exposed,
    }))
}

fn fill_settings(settings: &mut Settings, file: Settings) {
    fill!(settings.agent, file.agent, name, root, namespace);
    fill!(settings.store, file.store, url, fencing, request_timeout);
    fill!(settings.s3, file.s3, region, endpoint, path_style, sse);
    fill!(settings.index, file.index, url, text, witness);
    fill!(settings.encryption, file.encryption, plaintext);
    fill!(settings.signatures, file.signatures, signing_key);
    if settings.signatures.trust_key.is_empty() {
        settings.signatures.trust_key = file.signatures.trust_key;
    }
    fill!(settings.network, file.network, ca_file);
    fill!(settings.telemetry, file.telemetry, otlp_endpoint);
    fill!(
        settings.output,
        file.output,
        log,
        log_format,
        log_file,
        color,
        quiet
    );
    let encryption = &mut settings.encryption;
    if encryption.encrypt_to.is_empty() {
        encryption.encrypt_to = file.encryption.encrypt_to;
    }
    if encryption.identity.is_empty() {
        encryption.identity = file.encryption.identity;
    }
}

fn fill_stream(stream: &mut StreamConfig, file: StreamConfig) {
    let (flush, metadata, probes) = (file.flush, file.metadata, file.probes);
    fill!(
        stream.flush,
        flush,
        flush_interval,
        flush_deadline,
        checkpoint_every,
        keep_checkpoints,
        parallel
    );
    fill!(stream.metadata, metadata, request, ttl);
    if stream.metadata.label.is_empty() {
        stream.metadata.label = metadata.label;
    }
    fill!(
        stream.probes,
        probes,
        http,
        ready_file,
        heartbeat_url,
        heartbeat_interval,
    );
}

/// Whether a flag belongs to streaming; all others are global.
fn is_stream_flag(flag: &str) -> bool {
    StreamConfig::augment_args(clap::Command::new("streaming"))
        .get_arguments()
        .any(|arg| arg.get_long() == Some(flag))
}

/// The message of a wrong type, without the names of Rust types.
fn plain_message(message: &str) -> String {
    let found = message
        .strip_prefix("invalid type: ")
        .and_then(|rest| rest.split_once(", expected "));
    let Some((found, expected)) = found else {
        return message.to_owned();
    };
    let expected = match expected {
        "usize" | "u64" | "u32" => "a whole number",
        "f64" => "a number",
        other => other,
    };
    format!("expected {expected}, found {found}")
}

fn parse(path: &Path, text: &str) -> Result<(Content, BTreeSet<String>)> {
    let path = path.display();
    let table: toml::Table = toml::from_str(text).map_err(|cause: toml::de::Error| {
        // The error does not repeat the line: it may contain a password.
        let line = cause
            .span()
            .map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1)
            .map(|line| format!(", line {line}"))
            .unwrap_or_default();
        Error::usage(format!(
            "invalid configuration file {path}{line}: {}",
            cause.message()
        ))
        .hint("write one NAME = VALUE per line, with quotes around text")
    })?;
    let content: Content = table.clone().try_into().map_err(|cause: toml::de::Error| {
        // The flattened groups hide the key from the error: find the one that fails on its own.
        let fails_alone = |(key, value): &(&String, &toml::Value)| {
            toml::Table::from_iter([((*key).clone(), (*value).clone())])
                .try_into::<Content>()
                .is_err()
        };
        let key = table
            .iter()
            .find(fails_alone)
            .map(|(key, _)| key.as_str())
            .unwrap_or_default();
        Error::usage(format!(
            "invalid value of {key} in configuration file {path}: {}",
            plain_message(cause.message())
        ))
        .hint(match key {
            "profile" => "see docs/reference/profiles.md for the fields of [profile]".to_owned(),
            "prices" => "see docs/guides/reading-sessions.md for the fields of [prices]".to_owned(),
            flag if is_stream_flag(flag) => {
                format!("run \"sessiond daemon --help\" to see the values of --{flag}")
            }
            flag => format!("run \"sessiond --help\" to see the values of --{flag}"),
        })
    })?;
    let known = known_keys();
    if let Some(key) = table.keys().find(|key| !known.contains(*key)) {
        return Err(Error::usage(format!(
            "unknown setting {key:?} in configuration file {path}"
        ))
        .hint("run \"sessiond config show\" to list the settings"));
    }
    Ok((content, table.keys().cloned().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every key, each with a value that is not its default.
    const EVERY_KEY: &str = r#"
agent = "codex"
root = "/r"
namespace = "team"
store = "file:///a"
fencing = "store"
request-timeout = "9s"
s3-region = "eu-west-1"
s3-endpoint = "http://h"
s3-path-style = true
s3-sse = "AES256"
index = "sqlite:///i"
index-text = true
witness = "require"
encrypt-to = ["age1x"]
identity = ["/k"]
plaintext = "accept"
signing-key = "/s"
trust-key = ["t1"]
ca-file = "/c"
otlp-endpoint = "off"
log = "debug"
log-format = "json"
log-file = "/l"
color = "never"
quiet = true
flush-interval = "2s"
flush-deadline = "3s"
parallel = 4
request = "r1"
label = ["a=b"]
checkpoint-every = "10steps,60s"
keep-checkpoints = "50turns,8steps"
ttl = "1h"
http = "off"
ready-file = "/f"
heartbeat-url = "http://b"
heartbeat-interval = "5s"
"#;

    fn load_text(text: &str, settings: &mut Settings, stream: &mut StreamConfig) -> Result<()> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        settings.config = Some(path);
        load(settings, Some(stream), None).map(|_| ())
    }

    #[test]
    fn every_key_of_the_file_reaches_its_setting() {
        let (mut settings, mut stream) = (Settings::default(), StreamConfig::default());
        load_text(EVERY_KEY, &mut settings, &mut stream).unwrap();
        let file: toml::Table = toml::from_str(EVERY_KEY).unwrap();
        let mut set = serde_json::to_value(&settings).unwrap();
        let more = serde_json::to_value(&stream).unwrap();
        set.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let set = set.as_object().unwrap();
        assert_eq!(
            set.keys().collect::<BTreeSet<_>>(),
            file.keys().collect::<BTreeSet<_>>()
        );
        for (key, value) in set {
            let expected = serde_json::to_value(&file[key]).unwrap();
            assert_eq!(value, &expected, "{key}");
        }
    }

    #[test]
    fn flags_and_variables_override_the_file() {
        let mut settings = Settings::default();
        settings.store.url = Some("file:///flag".into());
        settings.index.text = Some(false);
        settings.encryption.identity = vec!["/flag".into()];
        let mut stream = StreamConfig::default();
        stream.metadata.label = vec!["from=flag".into()];
        load_text(EVERY_KEY, &mut settings, &mut stream).unwrap();
        assert_eq!(settings.store.url.as_deref(), Some("file:///flag"));
        assert_eq!(settings.index.text, Some(false));
        assert_eq!(settings.encryption.identity, [PathBuf::from("/flag")]);
        assert_eq!(stream.metadata.label, ["from=flag"]);
        assert_eq!(settings.agent.namespace.as_deref(), Some("team"));
    }

    #[test]
    fn tables_are_read_and_unknown_keys_rejected() {
        let load = |text: &str| {
            let mut settings = Settings::default();
            load_text(text, &mut settings, &mut StreamConfig::default()).map(|()| settings)
        };
        let settings = load("[profile]\nsessions = [\"{session}.json\"]\n").unwrap();
        assert_eq!(settings.profile.unwrap().sessions, ["{session}.json"]);
        let error = load("sotre = \"x\"\n").unwrap_err().to_string();
        assert!(error.contains("unknown setting \"sotre\""), "{error}");
        let error = load("store = \"x\"\nparallel = \"many\"\n").unwrap_err();
        assert!(
            error
                .to_string()
                .contains("expected a whole number, found string \"many\""),
            "{error}"
        );
        let error = load("store = \"x\"\nindex = postgres://u:secret@h\n").unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("line 2") && !error.contains("secret"),
            "{error}"
        );
    }
}
