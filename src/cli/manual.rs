//! `completions` and `man`: made from the same definition that reads the arguments.

use std::path::PathBuf;

use clap::CommandFactory;

use crate::cli::{Cli, exit};
use crate::error::{Error, Result};

/// Print completions for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond completions bash > /etc/bash_completion.d/sessiond")]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// Print the manual page, or write one page per command
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond man | man -l -")]
pub struct ManArgs {
    /// Write sessiond.1, sessiond-run.1, … into this directory
    #[arg(long, env = "SESSIOND_MAN_TO", value_name = "DIR")]
    pub to: Option<PathBuf>,
}

/// Prints completions.
pub fn completions(args: &CompletionsArgs) -> Result<u8> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "sessiond", &mut text);
    write_out(&text)
}

/// Prints or writes manual pages.
pub fn man(args: &ManArgs) -> Result<u8> {
    match &args.to {
        Some(directory) => {
            let failed = |cause| {
                Error::named(
                    format!("write manual pages to {}", directory.display()),
                    cause,
                )
            };
            std::fs::create_dir_all(directory).map_err(failed)?;
            clap_mangen::generate_to(Cli::command(), directory).map_err(failed)?;
            Ok(exit::OK)
        }
        None => {
            let mut text = Vec::new();
            clap_mangen::Man::new(Cli::command())
                .render(&mut text)
                .map_err(|cause| Error::io("make the manual page", cause))?;
            write_out(&text)
        }
    }
}

fn write_out(text: &[u8]) -> Result<u8> {
    use std::io::Write;
    match std::io::stdout().write_all(text) {
        Err(cause) if cause.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io("print", cause))
        }
        _ => Ok(exit::OK),
    }
}
