//! `token`: a new token for the API of `sessiond serve`.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use crate::cli::{exit, print};
use crate::config;
use crate::error::{Error, Result};
use crate::serve::access::{NewToken, RoleGrant};
use crate::sys::output::write_file;
use crate::sys::{Clock, SystemClock};

/// How long a token is valid by default.
const DEFAULT_LIFETIME: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// Create a token for "sessiond serve"
///
/// Prints the token once. The access file has only its SHA-256, its roles and its expiry. A running
/// server reads the file again when it changes. Delete the table of a token to revoke it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond token --access access.toml --name ci --role reader
  sessiond token --access access.toml --name ops --role metadata --role admin@team-a --expires 7d")]
pub struct Args {
    /// File with tokens, users and their roles; "sessiond token" adds to it
    #[arg(long, env = "SESSIOND_ACCESS", value_name = "FILE")]
    pub access: PathBuf,

    /// Name of the token in the audit log
    #[arg(long, value_name = "NAME")]
    pub name: String,

    /// metadata, reader, operator or admin; @NAMESPACE limits it (repeatable)
    #[arg(long, value_name = "ROLE", required = true)]
    pub role: Vec<String>,

    /// How long the token is valid [default: 90d]
    #[arg(long, value_name = "TIME")]
    pub expires: Option<String>,
}

/// Creates the token.
pub fn run(args: &Args) -> Result<u8> {
    let lifetime = config::duration("--expires", args.expires.as_deref(), DEFAULT_LIFETIME)?;
    let grants: Vec<RoleGrant> = args
        .role
        .iter()
        .map(|text| text.parse())
        .collect::<Result<_>>()?;
    let expires = SystemClock.now().checked_add(lifetime).map_err(|_| {
        Error::usage("invalid --expires value: it is too far in the future")
            .hint("use a duration such as 90d")
    })?;
    let path = &args.access;
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(cause) if cause.kind() == ErrorKind::NotFound => String::new(),
        Err(cause) => {
            let phrase = format!("read the access file {}", path.display());
            return Err(Error::user_path(phrase, cause));
        }
    };
    let new = NewToken::generate(&args.name, &grants, expires)?;
    let text = new.add_to(&args.name, &text)?;
    write_file(path, None, |out| {
        out.write_all(text.as_bytes())
            .map_err(|cause| Error::io(format!("write {}", path.display()), cause))
    })?;
    print::line(&new.token)?;
    Ok(exit::OK)
}
