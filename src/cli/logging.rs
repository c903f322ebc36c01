//! Log lines: on stderr and in a file, as text or JSON, with a filter.
//!
//! Owns where log lines go. While a command runs on the terminal of `run`, nothing is written to
//! that terminal; a summary follows when the command has exited.

use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::Field;
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::{ParseError, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::print;
use crate::config::{LogFormat, OutputConfig};
use crate::daemon::traces::Traces;
use crate::error::{Error, Result};
use crate::sys::terminal::{GuardedStderr, clean, guard};

/// Maximum number of lines in the summary of what was withheld: one for each kind of event.
const MAX_SUMMARY_LINES: usize = 20;

/// Starts logging. With `shares_terminal`, a child process uses the same terminal: by default, only
/// warnings and errors are then logged to it.
pub fn start(
    output: &OutputConfig,
    shares_terminal: bool,
    traces: Option<&Arc<Traces>>,
) -> Result<()> {
    let is_on_terminal = shares_terminal && io::stderr().is_terminal();
    let is_quiet = output.is_quiet() || is_on_terminal;
    let default = if is_quiet { "warn" } else { "info" };
    let format = output.log_format.unwrap_or_default();
    let filter = parse_filter(output.log.as_deref().unwrap_or(default))?;
    let stderr = lines(Stderr, format, print::colors_stderr(), filter);
    let file = match &output.log_file {
        Some(path) => {
            let filter = parse_filter(output.log.as_deref().unwrap_or("info"))?;
            Some(lines(open_log(path)?, format, false, filter))
        }
        None => None,
    };
    let layers: Vec<_> = traces
        .map(Traces::layer)
        .into_iter()
        .chain([stderr])
        .chain(file)
        .collect();
    tracing_subscriber::registry().with(layers).init();
    Ok(())
}

/// The layer that writes lines.
fn lines<S, W>(
    writer: W,
    format: LogFormat,
    colors: bool,
    filter: Targets,
) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(writer)
        .with_target(false);
    match format {
        LogFormat::Text => lines
            .fmt_fields(debug_fn(write_field).delimited(" "))
            .with_ansi(colors)
            .with_filter(filter)
            .boxed(),
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_ansi(false)
            .with_filter(filter)
            .boxed(),
    }
}

/// Writes the message or a field of a line. It may contain text from objects and transcripts.
fn write_field(
    writer: &mut Writer<'_>,
    field: &Field,
    value: &dyn std::fmt::Debug,
) -> std::fmt::Result {
    let value = clean(&format!("{value:?}"));
    match field.name() {
        "message" => write!(writer, "{value}"),
        name => write!(writer, "{name}={value}"),
    }
}

/// Opens the log file, for this user only. A new line is appended.
fn open_log(path: &Path) -> Result<Mutex<std::fs::File>> {
    let opened = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path);
    let opened = opened.map_err(|cause| {
        Error::user_path(format!("open the log file {}", path.display()), cause)
    })?;
    Ok(Mutex::new(opened))
}

/// The lines that were not written to the terminal: the last one of each kind, and how many there
/// were. None if lines are written.
static WITHHELD: Mutex<Option<Vec<WithheldLine>>> = Mutex::new(None);

#[derive(Debug)]
struct WithheldLine {
    /// The place in the code that logs it.
    kind: &'static str,
    count: u64,
    line: Vec<u8>,
}

/// Withholds log lines from the terminal until it is dropped; then writes a summary of the warnings
/// and errors.
#[must_use]
pub struct TerminalSilence(());

impl TerminalSilence {
    /// Withholds log lines if stderr is a terminal. On any other stderr, such as that of a
    /// container, logging continues.
    pub fn start() -> Option<TerminalSilence> {
        io::stderr().is_terminal().then(|| {
            *WITHHELD.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
            TerminalSilence(())
        })
    }
}

impl Drop for TerminalSilence {
    fn drop(&mut self) {
        let withheld = WITHHELD
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let mut out = io::stderr().lock();
        for WithheldLine { count, line, .. } in withheld.into_iter().flatten() {
            let line = String::from_utf8_lossy(&line);
            let line = guard(line.trim_end());
            let _ = match count {
                1 => writeln!(out, "{line}"),
                count => writeln!(out, "{line} ({count} times while the command ran)"),
            };
        }
    }
}

/// Standard error, or the summary while lines are withheld.
struct Stderr;

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = LineWriter;

    fn make_writer(&'a self) -> LineWriter {
        LineWriter {
            kind: "",
            is_warning: false,
            line: Vec::new(),
        }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> LineWriter {
        LineWriter {
            kind: metadata.name(),
            is_warning: *metadata.level() <= Level::WARN,
            line: Vec::new(),
        }
    }
}

/// Collects one line and writes it when it is dropped.
struct LineWriter {
    kind: &'static str,
    is_warning: bool,
    line: Vec<u8>,
}

impl Write for LineWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.line.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LineWriter {
    fn drop(&mut self) {
        let mut withheld = WITHHELD.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(lines) = withheld.as_mut() else {
            let _ = GuardedStderr.write_all(&self.line);
            return;
        };
        if !self.is_warning {
            return;
        }
        let line = std::mem::take(&mut self.line);
        if let Some(known) = lines.iter_mut().find(|known| known.kind == self.kind) {
            known.count += 1;
            known.line = line;
        } else if lines.len() < MAX_SUMMARY_LINES {
            lines.push(WithheldLine {
                kind: self.kind,
                count: 1,
                line,
            });
        }
    }
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
