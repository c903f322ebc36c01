//! The limits of the storage format: sizes, numbers, counts and depths. `docs/reference/format.md`
//! documents them.
//!
//! Writers and readers apply the same limits: a writer never creates an object that a reader
//! rejects, and a reader never allocates more than a writer may have written. Every limit on stored
//! data is defined here.

use crate::error::{Error, Result};
use crate::model::Seq;

/// The highest number of an entry, and the highest version of metadata: as many as 12 digits of a
/// key hold. One entry per millisecond reaches it after 31 years.
pub const MAX_SEQ: Seq = 999_999_999_999;

/// Maximum raw bytes of an entry, merge or snapshot: the parts without the header. Writers stay
/// below half of it. It bounds the memory of a reader.
pub const MAX_RAW_BYTES: u64 = 16 << 20;

/// Maximum length of a header: enough for every list below with paths of a usual length.
pub const MAX_HEADER_LEN: u64 = 8 << 20;

/// Maximum number of parts, and of moves, of an entry, merge or snapshot.
pub const MAX_PARTS: usize = 20_000;

/// Maximum number of files that a fork starts with. Their list cannot be split.
pub const MAX_FORK_FILES: usize = 25_000;

/// Maximum number of checkpoints in a header. A reader keeps the newest 100 of a session.
pub const MAX_HEADER_CHECKPOINTS: usize = 1_000;

/// Maximum number of writers in the range of a merge or snapshot. Each claim adds one.
pub const MAX_WRITERS: usize = 100_000;

/// Maximum size of a stored segment or branch entry: its raw bytes, its header, and the overhead of
/// tar, gzip and age.
pub const MAX_SEGMENT_LEN: u64 = MAX_RAW_BYTES + MAX_HEADER_LEN + (8 << 20);

/// Maximum size of any other object, such as metadata: 64 labels have up to 75 kB.
pub const MAX_RECORD_LEN: u64 = 1 << 20;

/// Maximum number of objects, or of directories, in one directory of the store: the entries of a
/// session that changes every second for eleven days without garbage collection. It bounds the memory
/// of a listing.
pub const MAX_LISTED: usize = 1_000_000;

/// Maximum length of a file: that of ext4.
pub const MAX_FILE_LEN: u64 = 16 << 40;

/// Maximum value of a sum of bytes or entries in a header. The sums of 100,000 such logs still fit
/// into a column of the index.
pub const MAX_TOTAL: u64 = 64 << 40;

/// Maximum number of a checkpoint or turn.
pub const MAX_TURN: u64 = MAX_SEQ;

/// Maximum TTL in seconds: 10,000 years.
pub const MAX_TTL_SECONDS: u64 = 10_000 * 366 * 86_400;

/// Maximum number of forks between a session and the session that is not a fork. A reader reads
/// and rewrites the files once per fork.
pub const MAX_FORK_DEPTH: usize = 100;

/// Checks a number from a stored object. `what` names it, such as "turn".
pub fn check(what: &str, value: u64, max: u64) -> Result<()> {
    if value > max {
        return Err(Error::corrupt(format!(
            "invalid {what} {value}: the maximum is {max}"
        )));
    }
    Ok(())
}

/// Checks the length of a list from a stored object. `what` names its items, such as "parts".
pub fn check_count(what: &str, count: usize, max: usize) -> Result<()> {
    if count > max {
        return Err(Error::corrupt(format!(
            "too many {what}: {count}, but the maximum is {max}"
        )));
    }
    Ok(())
}
