//! sessiond makes a coding agent's conversation outlive the machine it ran on.
//!
//! `ARCHITECTURE.md` shows how the parts fit together; a module imports only from rows below its own.

pub mod agent;
pub mod capture;
pub mod cli;
pub mod codec;
pub mod config;
pub mod daemon;
pub mod error;
pub mod exchange;
pub mod history;
pub mod index;
pub mod log;
pub mod mirror;
pub mod model;
pub mod restore;
pub mod store;
pub mod sys;
pub mod upkeep;
pub mod wire;
