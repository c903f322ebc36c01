//! `config show` and `config validate`: the effective settings and where each one comes from.

use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches};
use serde::Serialize;
use serde_json::Value;

use crate::cli::table::Table;
use crate::cli::{exit, help, print, start};
use crate::config::{LoadedFile, Settings, StreamConfig, load};
use crate::error::{Error, ErrorKind, Result, redact_url};
use crate::wire;

/// Settings whose value is a URL that can contain a secret in any part.
const SECRET_URLS: [&str; 2] = ["heartbeat-url", "otlp-endpoint"];

/// Show or validate the settings
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Example:\n  sessiond config show")]
pub(crate) enum Command {
    Show(ShowArgs),
    Validate(ValidateArgs),
}

/// Print every setting, its value and its source, without secrets
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond config show
  sessiond config show --json | jq -r '.settings[] | select(.source != \"default\") | .name'")]
pub struct ShowArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// The settings of the commands that stream.
    #[command(flatten)]
    pub stream: StreamConfig,
}

/// Check a configuration file, or the effective settings
///
/// Parses every value. Connects to no server and creates no file.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond config validate
  sessiond config validate ./config.toml")]
pub struct ValidateArgs {
    /// Configuration file to check [default: the effective settings]
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// The settings of the commands that stream.
    #[command(flatten)]
    pub stream: StreamConfig,
}

/// One setting.
#[derive(Debug, Serialize)]
struct Setting {
    name: String,
    /// The effective value, or the default as the help describes it.
    value: Option<String>,
    /// `flag`, `variable`, `file` or `default`.
    source: &'static str,
    /// The variable or the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    origin: Option<String>,
}

#[derive(Serialize)]
struct ShowOutput {
    file: Option<PathBuf>,
    settings: Vec<Setting>,
}

impl Command {
    /// Whether the command checks a file only, and not the effective settings.
    pub fn checks_file_only(&self) -> bool {
        matches!(self, Command::Validate(args) if args.file.is_some())
    }
}

/// Runs `config show` or `config validate`.
pub(crate) async fn run(
    settings: &Settings,
    command: Command,
    matches: &ArgMatches,
    file: Option<&LoadedFile>,
) -> Result<u8> {
    match command {
        Command::Show(args) => show(settings, &args, matches, file),
        Command::Validate(args) => {
            if let Some(path) = &args.file {
                return validate_file(path).await;
            }
            check(settings, &args.stream).await?;
            print::line(match file {
                Some(file) => format!(
                    "the settings are valid (configuration file: {})",
                    file.path.display()
                ),
                None => "the settings are valid (no configuration file)".to_owned(),
            })?;
            Ok(exit::OK)
        }
    }
}

/// Checks a configuration file alone, without flags and variables.
async fn validate_file(path: &Path) -> Result<u8> {
    let mut settings = Settings {
        config: Some(path.to_owned()),
        ..Settings::default()
    };
    let mut stream = StreamConfig::default();
    load(&mut settings, Some(&mut stream), None)?;
    check(&settings, &stream).await.map_err(|error| {
        error.context(format_args!("use configuration file {}", path.display()))
    })?;
    print::line(format_args!("{} is valid", path.display()))?;
    Ok(exit::OK)
}

async fn check(settings: &Settings, stream: &StreamConfig) -> Result<()> {
    wire::check(settings)?;
    start::check(settings, stream).await
}

fn show(
    settings: &Settings,
    args: &ShowArgs,
    matches: &ArgMatches,
    file: Option<&LoadedFile>,
) -> Result<u8> {
    let leaf = leaf(matches);
    let values = values(settings, &args.stream)?;
    let defaults = wire::default_locations(settings);
    let mut listed: Vec<Setting> = Vec::new();
    let command = help::plain_command();
    let show_command = command
        .find_subcommand("config")
        .and_then(|config| config.find_subcommand("show"));
    let arguments = command.get_arguments().chain(
        show_command
            .into_iter()
            .flat_map(|show| show.get_arguments()),
    );
    for arg in arguments {
        let Some(name) = arg.get_long().filter(|name| values.contains_key(*name)) else {
            continue;
        };
        if !listed.iter().any(|setting| setting.name == name) {
            let value = text_of(name, &values[name]).or_else(|| defaults.get(name).cloned());
            listed.push(setting(name, value, arg, leaf, file));
        }
    }
    listed.push(prices_setting(settings, file));
    let shown = ShowOutput {
        file: file.map(|file| file.path.clone()),
        settings: listed,
    };
    if args.json {
        print::json(&shown)?;
        return Ok(exit::OK);
    }
    print::line(match &shown.file {
        Some(path) => format!("configuration file: {}\n", path.display()),
        None => "configuration file: none\n".to_owned(),
    })?;
    let rows: Vec<Vec<String>> = shown
        .settings
        .into_iter()
        .map(|setting| {
            let source = match (setting.source, &setting.origin) {
                ("file", _) | (_, None) => setting.source.to_owned(),
                (source, Some(origin)) => format!("{source} {origin}"),
            };
            vec![setting.name, setting.value.unwrap_or_default(), source]
        })
        .collect();
    Table::new(&["SETTING", "VALUE", "SOURCE"])
        .flexible(&[1])
        .print(&rows)?;
    Ok(exit::OK)
}

/// The prices, which have no flag.
fn prices_setting(settings: &Settings, file: Option<&LoadedFile>) -> Setting {
    let file = file.filter(|file| file.keys.contains("prices"));
    Setting {
        name: "prices".to_owned(),
        value: Some(settings.prices.source()),
        source: file.map_or("default", |_| "file"),
        origin: file.map(|file| file.path.display().to_string()),
    }
}

/// The matches of the innermost subcommand.
fn leaf(matches: &ArgMatches) -> &ArgMatches {
    match matches.subcommand() {
        Some((_, nested)) => leaf(nested),
        None => matches,
    }
}

/// The values by setting name.
fn values(settings: &Settings, stream: &StreamConfig) -> Result<serde_json::Map<String, Value>> {
    let object = |value: Result<Value, serde_json::Error>| match value {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Ok(serde_json::Map::new()),
        Err(cause) => Err(Error::new(ErrorKind::Usage, "print the settings").caused_by(cause)),
    };
    let mut values = object(serde_json::to_value(settings))?;
    values.extend(object(serde_json::to_value(stream))?);
    let config = settings.config.as_ref();
    values.insert(
        "config".to_owned(),
        config.map_or(Value::Null, |path| path.display().to_string().into()),
    );
    Ok(values)
}

/// A value as text, without secrets; none if it is not set.
fn text_of(name: &str, value: &Value) -> Option<String> {
    let text = match value {
        Value::Null => return None,
        Value::Array(items) if items.is_empty() => return None,
        Value::Array(items) => {
            let texts: Vec<&str> = items.iter().filter_map(Value::as_str).collect();
            texts.join(", ")
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Some(if SECRET_URLS.contains(&name) && text != "off" {
        hide_path(&text)
    } else {
        redact_url(&text)
    })
}

/// The scheme and host of a URL; its path can be a secret.
fn hide_path(text: &str) -> String {
    match url::Url::parse(text) {
        Ok(url) => format!(
            "{}://{}/…",
            url.scheme(),
            url.host_str().unwrap_or_default()
        ),
        Err(_) => "…".to_owned(),
    }
}

fn setting(
    name: &str,
    value: Option<String>,
    arg: &Arg,
    matches: &ArgMatches,
    file: Option<&LoadedFile>,
) -> Setting {
    let variable = || {
        arg.get_env()
            .map(|name| name.to_string_lossy().into_owned())
    };
    let (source, origin) = match matches.value_source(arg.get_id().as_str()) {
        Some(ValueSource::CommandLine) => ("flag", Some(format!("--{name}"))),
        Some(ValueSource::EnvVariable) => ("variable", variable()),
        _ => match file.filter(|file| file.keys.contains(name)) {
            Some(file) => ("file", Some(file.path.display().to_string())),
            None => ("default", None),
        },
    };
    Setting {
        name: name.to_owned(),
        value: value.or_else(|| default_of(arg)),
        source,
        origin,
    }
}

/// The default in the help text of a flag.
fn default_of(arg: &Arg) -> Option<String> {
    let help = arg.get_help()?.to_string();
    let (_, default) = help.split_once("[default: ")?;
    Some(default.trim_end_matches(']').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        let shown = |name, value: &str| text_of(name, &Value::from(value)).unwrap();
        assert_eq!(
            shown("index", "postgres://u:secret@db/x"),
            "postgres://…@db/x"
        );
        assert_eq!(
            shown("heartbeat-url", "https://hc.example/ping/secret?key=secret"),
            "https://hc.example/…"
        );
        assert_eq!(shown("otlp-endpoint", "off"), "off");
    }

    #[test]
    fn every_setting_names_its_default() {
        let command = help::plain_command();
        let settings = serde_json::to_value(Settings::default()).unwrap();
        for arg in command.get_arguments() {
            let long = arg.get_long().unwrap_or_default();
            if settings.get(long).is_some() {
                assert!(default_of(arg).is_some(), "--{long}");
            }
        }
    }
}
