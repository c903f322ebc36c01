//! Exit codes: documented in `docs/OPERATIONS.md`, and stable.

use crate::daemon::child::NotStarted;
use crate::error::ErrorKind;

/// Done, or nothing to do.
pub const OK: u8 = 0;
/// Failed.
pub const FAILED: u8 = 1;
/// The request is wrong.
pub const USAGE: u8 = 2;
/// What was named does not exist.
pub const NOT_FOUND: u8 = 3;
/// Another writer holds the session.
pub const FENCED: u8 = 4;
/// The store or the index does not answer.
pub const UNAVAILABLE: u8 = 5;
/// Stored bytes are not what they should be.
pub const CORRUPT: u8 = 6;
/// Local files disagree.
pub const CONFLICT: u8 = 7;
/// `run`, `daemon`: the restore failed, and nothing was begun.
pub const NOT_RESTORED: u8 = 8;
/// Stopped with bytes that are not durable.
pub const GAVE_UP: u8 = 9;
/// `restore --fallback`: not restored; the conversation was written as text instead.
pub const FELL_BACK: u8 = 10;
/// It is encrypted, and not to any identity at hand.
pub const SEALED: u8 = 11;

/// The code for an error.
pub fn of(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Usage => USAGE,
        ErrorKind::NotFound => NOT_FOUND,
        ErrorKind::Fenced => FENCED,
        ErrorKind::Unavailable => UNAVAILABLE,
        ErrorKind::Corrupt => CORRUPT,
        ErrorKind::Conflict => CONFLICT,
        ErrorKind::Encrypted => SEALED,
        ErrorKind::Internal => FAILED,
    }
}

/// The code for a command that could not be started, as shells have it.
pub fn of_command(why: NotStarted) -> u8 {
    match why {
        NotStarted::NotFound => 127,
        NotStarted::NotExecutable => 126,
    }
}
