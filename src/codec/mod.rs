//! Encoding and decoding of stored objects: entries, snapshots, metadata, pins, archive
//! files.
//!
//! Owns the conversion between bytes and values, the format versions, and all limits on bytes from
//! a store. Does not own keys or the meaning of an entry. `docs/reference/format.md` documents the
//! formats.

pub mod archive;
pub mod entry;
pub mod metadata;
mod owner;
pub mod pin;
pub mod snapshot;
mod tar_gz;
pub mod version;
