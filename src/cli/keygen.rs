//! `keygen`: a key to encrypt sessions to, in the form that age has.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use crate::cli::{exit, print};
use crate::error::{Error, Result};
use crate::store::encrypted::keyring;

/// Make a key for --encrypt-to and --identity
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  sessiond keygen -o key.txt\n\nThe file is what --identity takes; the public key that is printed is what --encrypt-to takes. Keep a copy of the file\nwhere no container is: without it, nobody can read what was encrypted. The age tool reads and makes the same files."
)]
pub struct Args {
    /// Write the key to this new file, which only you can read, and print the public key [default: print both]
    #[arg(short, long, env = "SESSIOND_KEYGEN_OUTPUT", value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Does it.
pub fn run(args: &Args) -> Result<u8> {
    let (file, recipient) = keyring::generate();
    let Some(path) = &args.output else {
        print::line(file.trim_end())?;
        return Ok(exit::OK);
    };
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    let written =
        written.and_then(|mut out| out.write_all(file.as_bytes()).and_then(|()| out.sync_all()));
    written.map_err(|cause| match cause.kind() {
        std::io::ErrorKind::AlreadyExists => {
            Error::conflict(format!("write {}: it is there already", path.display()))
                .hint("a key that is lost cannot be made again: name another file")
        }
        _ => Error::named(format!("write {}", path.display()), cause),
    })?;
    print::line(recipient)?;
    Ok(exit::OK)
}
