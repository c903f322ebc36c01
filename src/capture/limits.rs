//! The size of entries, and with it the memory of flushes.
//!
//! A flush that fits into a small entry runs beside many others. A flush that needs a large entry
//! waits for one of few slots, writes one entry, and goes to the end of the queue. All flushes
//! together therefore have a bounded number of bytes in memory, and a session with gigabytes of
//! changes delays no other session.

use crate::codec::entry::{MAX_DELTA_RAW_BYTES, TARGET_RAW_BYTES};

/// The sizes of entries, in raw bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryLimits {
    /// Maximum size of a small entry.
    pub small: u64,
    /// Size at which a large entry is complete.
    pub target: u64,
    /// Maximum size of a part. A larger side file is uploaded in parts of this size, each in an entry
    /// of its own.
    pub part: u64,
    /// Maximum size of an entry. A longer line of a transcript is uploaded in parts of this size.
    pub max: u64,
}

/// Size of the parts of a large side file. The memory of a flush is a multiple of it, because an
/// allocator keeps memory per thread.
const MAX_PART_BYTES: u64 = 1 << 20;

/// Maximum number of flushes that write a large entry at the same time.
pub const MAX_LARGE_FLUSHES: usize = 2;

impl Default for EntryLimits {
    /// With the default of 8 parallel flushes: 8 small and 2 large ones, each with its raw and its
    /// encoded bytes, have at most 40 MiB.
    fn default() -> Self {
        EntryLimits {
            small: 512 << 10,
            target: TARGET_RAW_BYTES,
            part: MAX_PART_BYTES,
            max: MAX_DELTA_RAW_BYTES,
        }
    }
}
