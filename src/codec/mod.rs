//! The formats of what is stored: entries (deltas and claims), snapshots, and archives to hand around. `docs/FORMAT.md` describes them for people.
//!
//! Owns bytes ↔ values, and every bound on what may come out of a bucket. Does not own keys or what an entry means.

pub mod archive;
pub mod entry;
pub mod snapshot;
