//! Printing for people: sizes, times, tables, colors, and text that cannot control the terminal.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU8, Ordering};

use jiff::Timestamp;
use serde::Serialize;

use crate::config::ColorChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::shell::quote;
use crate::sys::terminal::{escape_json, guard};

pub use crate::sys::lines::one_line;
pub use crate::sys::terminal::clean;

/// Minimum length of a shortened session ID.
const MIN_ID_LEN: usize = 8;

/// The point that a fork started from.
pub fn origin(session: &str, turn: u64) -> String {
    format!("{} after turn {turn}", clean(session))
}

/// A number of bytes.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit < UNITS.len() - 1 {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{count} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// A large number with a unit, such as 12.3k.
pub fn number(count: u64) -> String {
    const UNITS: [&str; 4] = ["", "k", "M", "G"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 999.5 && unit < UNITS.len() - 1 {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 {
        count.to_string()
    } else {
        format!("{value:.1}{}", UNITS[unit])
    }
}

/// A count with its noun: `1 file`, `2 files`.
pub fn plural<N: Display + PartialEq + From<u8>>(count: N, one: &str, many: &str) -> String {
    let noun = if count == N::from(1) { one } else { many };
    format!("{count} {noun}")
}

/// Millionths of a US dollar as dollars; `?` if the cost is unknown.
pub fn cost(cost: Option<u64>) -> String {
    match cost.map(|cost| cost as f64 / 1e6) {
        None => "?".to_owned(),
        Some(dollars) if dollars < 1.0 => format!("${dollars:.4}"),
        Some(dollars) => format!("${dollars:.2}"),
    }
}

/// A time in UTC, to the second, in the form that `--at` and `--since` accept.
pub fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// A duration, in the largest unit that divides it.
pub fn length(seconds: u64) -> String {
    let units = [
        (86_400, "day", "days"),
        (3600, "hour", "hours"),
        (60, "minute", "minutes"),
    ];
    let (length, one, many) = units
        .into_iter()
        .find(|(length, _, _)| seconds >= *length && seconds.is_multiple_of(*length))
        .unwrap_or((1, "second", "seconds"));
    plural(seconds / length, one, many)
}

/// The time between `then` and `now`, in the largest unit.
pub fn age(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(then).as_secs().max(0);
    match seconds {
        0..60 => format!("{seconds}s ago"),
        60..3600 => format!("{}m ago", seconds / 60),
        3600..86400 => format!("{}h ago", seconds / 3600),
        _ => format!("{}d ago", seconds / 86400),
    }
}

/// The shortest prefix of `id` that no other ID in `all` has, at least `MIN_ID_LEN` characters
/// long if `id` is that long.
pub fn short_id<'a>(id: &str, all: impl IntoIterator<Item = &'a str>) -> String {
    let shared = all
        .into_iter()
        .filter(|other| *other != id)
        .map(|other| {
            let same = id.chars().zip(other.chars()).take_while(|(a, b)| a == b);
            same.count()
        })
        .max()
        .unwrap_or(0);
    id.chars().take((shared + 1).max(MIN_ID_LEN)).collect()
}

/// Whether session IDs are shortened: on a terminal, unless `full` is set.
pub fn shortens_ids(full: bool) -> bool {
    !full && std::io::stdout().is_terminal()
}

static COLOR: AtomicU8 = AtomicU8::new(0);

/// Sets when output is colored; `NO_COLOR` decides if this is never called.
pub fn set_color(choice: ColorChoice) {
    COLOR.store(choice as u8, Ordering::Relaxed);
}

/// Reads `--color` and its variable before the command line is parsed, for the parser's own errors.
pub fn color_choice_of_arguments() -> clap::ColorChoice {
    let mut arguments = std::env::args().take_while(|word| word != "--");
    let mut text = std::env::var("SESSIOND_COLOR").unwrap_or_default();
    while let Some(word) = arguments.next() {
        if word == "--color" {
            text = arguments.next().unwrap_or_default();
        } else if let Some(value) = word.strip_prefix("--color=") {
            text = value.to_owned();
        }
    }
    let (ours, theirs) = match text.as_str() {
        "always" => (ColorChoice::Always, clap::ColorChoice::Always),
        "never" => (ColorChoice::Never, clap::ColorChoice::Never),
        _ => (ColorChoice::Auto, clap::ColorChoice::Auto),
    };
    set_color(ours);
    theirs
}

fn colors(is_terminal: bool) -> bool {
    let choice = COLOR.load(Ordering::Relaxed);
    if choice == ColorChoice::Always as u8 {
        true
    } else if choice == ColorChoice::Never as u8 {
        false
    } else {
        is_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
    }
}

/// Whether standard output is colored.
pub fn colors_stdout() -> bool {
    colors(std::io::stdout().is_terminal())
}

/// Whether standard error is colored.
pub fn colors_stderr() -> bool {
    colors(std::io::stderr().is_terminal())
}

/// Prints a line. A closed pipe is not an error.
pub fn line(text: impl Display) -> Result<()> {
    self::text(&format!("{text}\n")).map(|_| ())
}

/// Prints the command that lists the next page: this one, with another cursor.
pub fn next_page(cursor: &str) -> Result<()> {
    let arguments = std::env::args_os().skip(1);
    let mut arguments = arguments.map(|argument| argument.to_string_lossy().into_owned());
    let mut command = "next page: sessiond".to_owned();
    while let Some(argument) = arguments.next() {
        if argument == "--cursor" {
            arguments.next();
        } else if !argument.starts_with("--cursor=") {
            command.push(' ');
            command.push_str(&quote(&clean(&argument)));
        }
    }
    line(format_args!("{command} --cursor {}", quote(&clean(cursor))))
}

/// Prints lines of text; false if the pipe is closed.
pub fn text(text: &str) -> Result<bool> {
    bytes_to_stdout(guard(text).as_bytes())
}

/// Prints bytes as they are; false if the pipe is closed.
pub fn bytes_to_stdout(bytes: &[u8]) -> Result<bool> {
    let mut out = std::io::stdout();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(cause) if cause.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(cause) => Err(Error::io("write to standard output", cause)),
        Ok(()) => Ok(true),
    }
}

/// Prints a value as indented JSON.
pub fn json(value: &impl Serialize) -> Result<()> {
    let json = serde_json::to_string_pretty(value)
        .map_err(|cause| Error::new(ErrorKind::Internal, "print JSON").caused_by(cause))?;
    line(escape_json(&json))
}

/// Prints a line of JSON; false if the pipe is closed.
pub fn json_line(json: &str) -> Result<bool> {
    text(&format!("{}\n", escape_json(json)))
}

/// Prints an error and its hint to standard error.
pub fn error(error: &Error) {
    let (red, cyan, reset) = if colors_stderr() {
        ("\x1b[1;31m", "\x1b[36m", "\x1b[0m")
    } else {
        ("", "", "")
    };
    let _ = writeln!(
        std::io::stderr(),
        "{red}error:{reset} {}",
        clean(&error.to_string())
    );
    if let Some(hint) = error.hint_text() {
        let _ = writeln!(std::io::stderr(), "{cyan}hint:{reset} {}", clean(hint));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_ages_are_short() {
        assert_eq!(
            (bytes(999).as_str(), bytes(1_234_567).as_str()),
            ("999 B", "1.2 MB")
        );
        assert_eq!(
            ["0", "999", "1.0k", "12.3k", "1.0M"],
            [0, 999, 1000, 12_345, 999_960]
                .map(number)
                .each_ref()
                .map(String::as_str)
        );
        assert_eq!(
            (cost(None), cost(Some(11_690)), cost(Some(12_345_678))),
            ("?".into(), "$0.0117".into(), "$12.35".into())
        );
        let then: Timestamp = "2026-05-01T12:00:00Z".parse().unwrap();
        let now: Timestamp = "2026-05-01T15:00:01Z".parse().unwrap();
        assert_eq!(age(then, now), "3h ago");
        assert_eq!(age(now, then), "0s ago");
        assert_eq!(time(now), "2026-05-01T15:00:01Z");
    }

    #[test]
    fn counts_agree_with_their_nouns() {
        assert_eq!(plural(1u64, "entry", "entries"), "1 entry");
        assert_eq!(plural(0usize, "file", "files"), "0 files");
        assert_eq!(
            [length(1), length(7200), length(86_400), length(90)],
            ["1 second", "2 hours", "1 day", "90 seconds"]
        );
    }

    #[test]
    fn ids_are_shortened_to_an_unambiguous_prefix() {
        let all = ["0b5e551d-0000", "0b5e551d-1111", "77777777-0000", "s1"];
        let short = |id| short_id(id, all);
        assert_eq!(short("0b5e551d-0000"), "0b5e551d-0");
        assert_eq!(short("77777777-0000"), "77777777");
        assert_eq!(short("s1"), "s1");
        // An ID that is a prefix of another is not shortened.
        assert_eq!(short_id("abcdefghij", ["abcdefghijkl"]), "abcdefghij");
    }

    #[test]
    fn text_is_cut_at_a_character() {
        assert_eq!(one_line("a\n  b", 10), "a b");
        assert_eq!(one_line("ääää", 5), "ää…");
    }
}
