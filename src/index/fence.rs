//! The fence table: one row per log in the database, for stores that cannot fence by themselves.
//!
//! Separate from `Index`, because the index is derived from the store and may lag or be rebuilt.
//! The fence table is neither: it decides which writer may create the next entry.

use async_trait::async_trait;

use crate::error::Result;
use crate::model::{LogId, Seq, WriterId};

/// The row of one log in the fence table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FenceRow {
    /// The highest `seq` that a writer has reserved.
    pub seq: Seq,
    /// The writer that reserved it.
    pub writer: WriterId,
}

/// A database table that assigns the next `seq` of a log to exactly one writer.
///
/// # Contract
/// For callers:
/// - Any call may fail with `Unavailable`. After such an error of `compare_and_swap_fence`, it is
///   unknown whether the row changed; `read_fence` shows it.
///
/// For implementers:
/// - `compare_and_swap_fence` is atomic across all machines that use the same database.
/// - `read_fence` returns the newest row, never the row of a replica that lags.
/// - Rows survive `Index::delete_log` and a rebuild of the index.
#[async_trait]
pub trait FenceTable: Send + Sync + 'static {
    /// Returns the fence row of a log; none if no writer has reserved a `seq` yet.
    async fn read_fence(&self, log: &LogId) -> Result<Option<FenceRow>>;

    /// Replaces the row by `new` if it equals `expected`; returns whether it did.
    async fn compare_and_swap_fence(
        &self,
        log: &LogId,
        expected: Option<&FenceRow>,
        new: &FenceRow,
    ) -> Result<bool>;
}
