//! `export`: a session as one archive file.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use crate::cli::{exit, print, select};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::operations::export::Export;
use crate::sessions::find;
use crate::sys::output::write_file;
use crate::wire::Parts;

/// Export a session to one tar.gz file
///
/// "sessiond import" reads the file into another store, and tar lists its content.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond export 3f2a -o 3f2a.tar.gz
  sessiond export 3f2a | ssh other sessiond import -
  AGENT_SESSION_BLOB=$(sessiond export 3f2a --base64)")]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID")]
    pub id: String,

    /// The point
    #[arg(long, value_name = "POINT", help = select::AT_HELP)]
    pub at: Option<String>,

    /// The branch
    #[arg(long, value_name = "WRITER", help = select::BRANCH_HELP)]
    pub branch: Option<String>,

    /// File to write, or - for standard output
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,

    /// Write base64 text, for a request body or a variable
    #[arg(long)]
    pub base64: bool,
}

/// Exports the session.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let to_stdout = args.output == Path::new("-");
    if to_stdout && !args.base64 && std::io::stdout().is_terminal() {
        return Err(
            Error::usage("an archive is binary and cannot be printed to a terminal")
                .hint("use -o FILE to write a file, or --base64 to print text"),
        );
    }
    let point = select::at(args.at.as_deref())?;
    let parts = Parts::build(settings, None).await?;
    let id = find::by_id(&parts.logs, &args.id).await?;
    let branch = select::branch(&parts, &id, args.branch.as_deref()).await?;
    let export = Export::fetch(&parts, &id, branch.as_ref(), &point).await?;
    if to_stdout {
        let mut out = std::io::stdout().lock();
        export.write(args.base64, &mut out)?;
        if args.base64 {
            writeln!(out).map_err(|cause| Error::io("write to standard output", cause))?;
        }
        return Ok(exit::OK);
    }
    let manifest = write_file(&args.output, None, |out| export.write(args.base64, out))?;
    print::line(format_args!(
        "exported {} at entry {}: {}, {}, to {}",
        print::clean(&id.name.to_string()),
        manifest.seq,
        print::plural(manifest.files.len(), "file", "files"),
        print::bytes(manifest.bytes()),
        args.output.display()
    ))?;
    Ok(exit::OK)
}
