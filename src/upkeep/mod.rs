//! Keeping clean: what makes the index follow the bucket.

pub mod reindex;
