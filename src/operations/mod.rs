//! Operations that combine several modules: each is one call for a command or the daemon.
//!
//! Owns the order of the steps, such as lock, restore, index. Does not own the steps themselves,
//! nor arguments and printing (`cli`).

pub mod adopt;
pub mod branches;
pub mod export;
pub mod files;
pub mod fork;
pub mod gc;
pub mod history_file;
pub mod import;
pub mod index;
pub mod launch;
pub mod messages;
pub mod pull;
pub mod restore;
pub mod stats;
pub mod verify;
