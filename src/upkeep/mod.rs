//! Maintenance of stored sessions: compaction, garbage collection, removal, status, and the index.
//!
//! Owns the decisions what to merge and delete, and the update of the index from the store. Does
//! not own when these operations run (`daemon`, `cli`).

pub mod collect;
pub mod compact;
pub mod gc;
pub mod reindex;
pub mod remove;
pub mod status;
