//! Exit codes: documented in `docs/reference/exit-codes.md`, and stable.

use crate::daemon::child::StartFailure;
use crate::error::ErrorKind;

/// Success, or nothing to do.
pub const OK: u8 = 0;
/// Failure.
pub const FAILED: u8 = 1;
/// The request is invalid.
pub const USAGE: u8 = 2;
/// The named object does not exist.
pub const NOT_FOUND: u8 = 3;
/// Another writer owns the session.
pub const FENCED: u8 = 4;
/// The store or the index is unavailable.
pub const UNAVAILABLE: u8 = 5;
/// Stored bytes are damaged.
pub const CORRUPT: u8 = 6;
/// Local files differ from what would be written.
pub const CONFLICT: u8 = 7;
/// `run`, `daemon`: the restore failed, and nothing was started.
pub const NOT_RESTORED: u8 = 8;
/// Stopped before everything was durable.
pub const NOT_DURABLE: u8 = 9;
/// `restore --fallback`: the session was not restored; its history was written as text.
pub const FELL_BACK: u8 = 10;
/// The object is encrypted, and no configured identity can decrypt it.
pub const ENCRYPTED: u8 = 11;
/// A newer sessiond wrote the object.
pub const NEWER_FORMAT: u8 = 12;

/// The exit code of an error.
pub fn of(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Usage => USAGE,
        ErrorKind::NotFound => NOT_FOUND,
        ErrorKind::Fenced => FENCED,
        ErrorKind::Unavailable => UNAVAILABLE,
        ErrorKind::Corrupt => CORRUPT,
        ErrorKind::Conflict => CONFLICT,
        ErrorKind::Encrypted => ENCRYPTED,
        ErrorKind::NewerFormat => NEWER_FORMAT,
        ErrorKind::Internal => FAILED,
    }
}

/// The exit code of a command that could not be started, as in a shell.
pub fn of_command(failure: StartFailure) -> u8 {
    match failure {
        StartFailure::NotFound => 127,
        StartFailure::NotExecutable => 126,
    }
}
