//! Maintenance of stored sessions: compaction, garbage collection, removal, status, and the index.
//!
//! Owns what is merged and deleted, and how the index follows the store. Does not own when these
//! run (`daemon`, `cli`).

pub mod collect;
pub mod compact;
pub mod gc;
pub mod reindex;
pub mod remove;
pub mod status;
