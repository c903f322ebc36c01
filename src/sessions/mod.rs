//! Finding the session and the point that a user names.
//!
//! Owns ID prefixes, the latest session, and the resolution and naming of points. Does not own what
//! is done at a point (`restore`, `history`, `fork`).

pub mod find;
pub mod point;
