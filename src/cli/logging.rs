//! Log lines: on stderr, as text or JSON, with a filter.

use std::io::IsTerminal;
use std::sync::Arc;

use tracing_subscriber::Layer;
use tracing_subscriber::filter::{ParseError, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::print;
use crate::config::{LogFormat, OutputConfig};
use crate::daemon::traces::Traces;
use crate::error::{Error, Result};
use crate::sys::terminal::GuardedStderr;

/// Starts logging. With `shares_terminal`, a child process uses the same terminal: by default, only
/// warnings and errors are then logged to it.
pub fn start(
    output: &OutputConfig,
    shares_terminal: bool,
    traces: Option<&Arc<Traces>>,
) -> Result<()> {
    let is_quiet = output.is_quiet() || (shares_terminal && std::io::stderr().is_terminal());
    let default = if is_quiet { "warn" } else { "info" };
    let filter = parse_filter(output.log.as_deref().unwrap_or(default))?;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(GuardedStderr::default)
        .with_target(false);
    let lines = match output.log_format.unwrap_or_default() {
        LogFormat::Text => lines
            .with_ansi(print::colors_stderr())
            .with_filter(filter)
            .boxed(),
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_ansi(false)
            .with_filter(filter)
            .boxed(),
    };
    let layers: Vec<_> = traces
        .map(Traces::layer)
        .into_iter()
        .chain([lines])
        .collect();
    tracing_subscriber::registry().with(layers).init();
    Ok(())
}

/// A level applies to sessiond only. Libraries log warnings; aws_config logs errors only, because
/// sessiond's own error names missing credentials and regions.
fn parse_filter(text: &str) -> Result<Targets> {
    let text = text.trim();
    let directives = if text.contains(['=', ',']) {
        text.to_owned()
    } else {
        format!("warn,aws_config=error,sessiond={text}")
    };
    directives.parse().map_err(|cause: ParseError| {
        Error::usage(format!("invalid --log value {text:?}: {cause}"))
            .hint("use error, warn, info, debug, or a filter such as sessiond=debug")
    })
}
