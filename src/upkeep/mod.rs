//! Keeping clean: what makes the index follow the bucket, the bucket small, and old things go.

pub mod collect;
pub mod compact;
pub mod gc;
pub mod reindex;
pub mod remove;
pub mod status;
