//! Shell in documents: finds the fenced blocks of a Markdown page, and runs scripts.

use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{TempHome, sessiond};

/// A fenced block of a page.
#[derive(Debug)]
pub struct Block {
    pub language: String,
    pub body: String,
    /// The lines of the body in the page, counted from 0.
    pub lines: Range<usize>,
}

/// Returns the fenced blocks of a page.
pub fn blocks(text: &str) -> Vec<Block> {
    let lines: Vec<_> = text.lines().collect();
    let mut found = Vec::new();
    let mut start = None;
    for (number, line) in lines.iter().enumerate() {
        let Some(language) = line.trim_start().strip_prefix("```") else {
            continue;
        };
        match start.take() {
            None => start = Some((number + 1, language.to_owned())),
            Some((first, language)) => found.push(Block {
                language,
                body: lines[first..number]
                    .iter()
                    .map(|line| format!("{line}\n"))
                    .collect(),
                lines: first..number,
            }),
        }
    }
    assert!(start.is_none(), "a block does not end");
    found
}

/// Returns a command that runs a bash script in a home directory, with the program under test on
/// its `PATH`. It is killed after two minutes.
pub fn shell(script: &str, home: &TempHome) -> Command {
    let directory = sessiond().parent().unwrap().display().to_string();
    let path = std::env::var("PATH").unwrap();
    let mut command = home.command(Path::new("timeout"));
    command
        .args(["120", "bash", "-c", script])
        .env("PATH", format!("{directory}:{path}"))
        .stdin(Stdio::null());
    command
}
