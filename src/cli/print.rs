//! Printing for people: sizes, ages, tables, and names that cannot play tricks on a terminal.

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::Serialize;

use crate::error::{Error, ErrorKind, Result};

/// Text from files and buckets without control characters.
pub fn clean(text: &str) -> String {
    text.chars()
        .map(|letter| {
            if letter.is_control() {
                '\u{fffd}'
            } else {
                letter
            }
        })
        .collect()
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

/// A large number, to three digits or so.
pub fn count(count: u64) -> String {
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

/// Millionths of a dollar as dollars; what is unknown says so.
pub fn cost(cost: Option<u64>) -> String {
    match cost.map(|cost| cost as f64 / 1e6) {
        None => "?".to_owned(),
        Some(dollars) if dollars < 1.0 => format!("${dollars:.4}"),
        Some(dollars) => format!("${dollars:.2}"),
    }
}

/// A time, to the second, in UTC.
pub fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// A length of time, in the largest unit that fits without a rest.
pub fn length(seconds: u64) -> String {
    let units = [(86_400, "days"), (3600, "hours"), (60, "minutes")];
    let (count, unit) = units
        .iter()
        .find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit))
        .map_or((seconds, "seconds"), |(unit, word)| (seconds / unit, word));
    format!(
        "{count} {}",
        if count == 1 {
            unit.trim_end_matches('s')
        } else {
            unit
        }
    )
}

/// How long ago something was.
pub fn age(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(then).as_secs().max(0);
    match seconds {
        0..60 => format!("{seconds}s ago"),
        60..3600 => format!("{}m ago", seconds / 60),
        3600..86400 => format!("{}h ago", seconds / 3600),
        _ => format!("{}d ago", seconds / 86400),
    }
}

/// Whether what is printed may have colours.
pub fn colour() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

/// Prints a line; a reader that has gone away is not an error.
pub fn line(text: impl std::fmt::Display) -> Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(cause) if cause.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io("print", cause))
        }
        _ => Ok(()),
    }
}

/// Prints text as it is; false if the reader has gone away.
pub fn text(text: &str) -> Result<bool> {
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(cause) if cause.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(cause) => Err(Error::io("print", cause)),
        Ok(()) => Ok(true),
    }
}

/// Prints a value as JSON.
pub fn json(value: &impl Serialize) -> Result<()> {
    line(
        serde_json::to_string_pretty(value)
            .map_err(|cause| Error::new(ErrorKind::Internal, "print JSON").caused_by(cause))?,
    )
}

/// Prints rows under a heading, in columns as wide as they need to be.
pub fn table(heading: &[&str], rows: &[Vec<String>]) -> Result<()> {
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| clean(cell)).collect())
        .collect();
    let width = |column: usize| {
        let cells = rows
            .iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count());
        cells
            .chain([heading[column].chars().count()])
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heading.len()).map(width).collect();
    let print = |cells: &mut dyn Iterator<Item = &str>| {
        let text: String = cells
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}  "))
            .collect();
        line(text.trim_end())
    };
    print(&mut heading.iter().copied())?;
    rows.iter()
        .try_for_each(|row| print(&mut row.iter().map(String::as_str)))
}

/// Prints an error the way every error is printed.
pub fn error(error: &Error) {
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let (red, cyan, end) = if colour {
        ("\x1b[1;31m", "\x1b[36m", "\x1b[0m")
    } else {
        ("", "", "")
    };
    let _ = writeln!(
        std::io::stderr(),
        "{red}error:{end} {}",
        clean(&error.to_string())
    );
    if let Some(hint) = error.hint_text() {
        let _ = writeln!(std::io::stderr(), "{cyan}hint:{end} {}", clean(hint));
    }
}

/// Where a file that somebody named is written.
pub enum Target {
    /// A file that is made, or replaced as one; links are followed.
    File(PathBuf),
    /// A device, a pipe or the like, which is written to and stays what it is.
    Other(File),
}

/// What to write to for a path that somebody named.
pub fn target(path: &Path) -> std::io::Result<Target> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => std::fs::canonicalize(path).map(Target::File),
        // The error of the attempt to write says what is wrong.
        Ok(found) if found.is_dir() => Ok(Target::File(path.to_owned())),
        Ok(_) => OpenOptions::new().write(true).open(path).map(Target::Other),
        // A link that leads to nothing leads to what is made.
        Err(_) => Ok(Target::File(std::fs::read_link(path).map_or_else(
            |_| path.to_owned(),
            |to| {
                path.parent()
                    .map_or_else(|| to.clone(), |directory| directory.join(&to))
            },
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_play_tricks_on_a_terminal() {
        assert_eq!(clean("a\x1b[31mb\nc"), "a\u{fffd}[31mb\u{fffd}c");
    }

    #[test]
    fn sizes_and_ages_are_short() {
        assert_eq!(
            (bytes(999).as_str(), bytes(1_234_567).as_str()),
            ("999 B", "1.2 MB")
        );
        assert_eq!(
            ["0", "999", "1.0k", "12.3k", "1.0M"],
            [0, 999, 1000, 12_345, 999_960]
                .map(count)
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
    }
}
