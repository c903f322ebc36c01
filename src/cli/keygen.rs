//! `keygen`: a key pair for encryption, in the format of age, or one for signatures.

use std::path::PathBuf;

use crate::cli::{exit, print};
use crate::error::{Error, Result};
use crate::store::encrypted::keyring;
use crate::store::signature;
use crate::sys::output::create_file;

/// Generate a key pair for encryption or signatures
///
/// Pass the file to --identity, and the printed public key to --encrypt-to. Keep a copy of the file
/// outside the containers: without it, nobody can decrypt the sessions.
/// The age tool reads and writes the same files.
///
/// With --signing, pass the file to --signing-key of a writer, and the printed public key to
/// --trust-key of all readers and writers.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  sessiond keygen -o key.txt\n  sessiond keygen --signing -o signing.key"
)]
pub struct Args {
    /// Generate a signing key
    #[arg(long)]
    pub signing: bool,

    /// New file for the key pair; prints only the public key [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Generates the key pair.
pub fn run(args: &Args) -> Result<u8> {
    let (file, public) = match args.signing {
        true => signature::generate()?,
        false => keyring::generate(),
    };
    let Some(path) = &args.output else {
        print::line(file.trim_end())?;
        return Ok(exit::OK);
    };
    create_file(path, file.as_bytes()).map_err(|cause| match cause.kind() {
        std::io::ErrorKind::AlreadyExists => {
            Error::conflict(format!("{} already exists", path.display()))
                .hint("choose another file: an overwritten key cannot be recovered")
        }
        _ => Error::user_path(format!("write {}", path.display()), cause),
    })?;
    print::line(public)?;
    Ok(exit::OK)
}
