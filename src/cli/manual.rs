//! `completions` and `man`: generated from the definition that parses the arguments.

use std::path::PathBuf;

use clap_complete::env::Shells;

use crate::cli::{environment, exit, help, print, reference};
use crate::error::{Error, ErrorKind, Result};

/// Print a shell completion script
///
/// The script calls sessiond, which completes commands, flags and session IDs.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  source <(sessiond completions bash)
  sessiond completions zsh > \"${fpath[1]}/_sessiond\"
  sessiond completions fish > ~/.config/fish/completions/sessiond.fish")]
pub struct CompletionsArgs {
    /// bash, elvish, fish, powershell or zsh
    pub shell: clap_complete::Shell,
}

/// Print the manual page, or the CLI reference as Markdown
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond man | man -l -
  sessiond man --to /usr/local/share/man/man1")]
pub struct ManArgs {
    /// Write one page per command into this directory
    #[arg(long, value_name = "DIR")]
    pub to: Option<PathBuf>,

    /// Print the CLI reference as Markdown
    #[arg(long, conflicts_with = "to")]
    pub markdown: bool,
}

/// Prints the completion script of a shell.
pub fn completions(args: &CompletionsArgs) -> Result<u8> {
    let name = args.shell.to_string();
    let failed = || Error::new(ErrorKind::Internal, format!("print completions for {name}"));
    let shells = Shells::builtins();
    let shell = shells
        .completer(&name)
        .ok_or_else(|| Error::usage(format!("no completion script for {name} exists")))?;
    let mut script = Vec::new();
    let program = "sessiond";
    shell
        .write_registration(
            environment::COMPLETE,
            program,
            program,
            program,
            &mut script,
        )
        .map_err(|cause| failed().caused_by(cause))?;
    print::bytes_to_stdout(&script)?;
    Ok(exit::OK)
}

/// Prints or writes the manual.
pub fn man(args: &ManArgs) -> Result<u8> {
    if args.markdown {
        print::bytes_to_stdout(reference::markdown(&help::plain_command()).as_bytes())?;
        return Ok(exit::OK);
    }
    let Some(directory) = &args.to else {
        let mut page = Vec::new();
        clap_mangen::Man::new(help::plain_command())
            .render(&mut page)
            .map_err(|cause| Error::io("render the manual page", cause))?;
        print::bytes_to_stdout(&page)?;
        return Ok(exit::OK);
    };
    let failed = |cause| {
        Error::user_path(
            format!("write manual pages to {}", directory.display()),
            cause,
        )
    };
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(help::plain_command(), directory).map_err(failed)?;
    Ok(exit::OK)
}
