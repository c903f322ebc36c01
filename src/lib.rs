//! sessiond stores the conversations of coding agents in object storage and restores them on
//! another machine.
//!
//! # Library
//!
//! A program can stream an agent's directory and restore sessions itself. The items at the root of
//! this crate are the supported interface; `examples/embed.rs` uses all of it:
//!
//! - [`Settings`] say which agent, store and index to use, and [`Parts`] connect to them.
//! - [`Service`] streams the agent's directory until it is stopped.
//! - [`RestoreService`] locks the directory and restores sessions into it.
//!
//! # Modules
//!
//! `ARCHITECTURE.md` describes the modules. A module imports only from rows below its own. They are
//! private, so that the compiler finds code that is never used; `.ci/run` checks the crate that way.
//! Builds with debug assertions make them public for the integration tests and the simulation.

#![cfg_attr(
    test,
    allow(
        clippy::too_many_lines,
        reason = "a test is one list of cases or steps"
    )
)]

#[cfg(not(debug_assertions))]
mod adopt;
#[cfg(not(debug_assertions))]
mod agent;
#[cfg(not(debug_assertions))]
mod capture;
#[cfg(not(debug_assertions))]
mod cli;
#[cfg(not(debug_assertions))]
mod codec;
#[cfg(not(debug_assertions))]
mod config;
#[cfg(not(debug_assertions))]
mod daemon;
#[cfg(not(debug_assertions))]
mod error;
#[cfg(not(debug_assertions))]
mod exchange;
#[cfg(not(debug_assertions))]
mod fork;
#[cfg(not(debug_assertions))]
mod history;
#[cfg(not(debug_assertions))]
mod http;
#[cfg(not(debug_assertions))]
mod index;
#[cfg(not(debug_assertions))]
mod log;
#[cfg(not(debug_assertions))]
mod mirror;
#[cfg(not(debug_assertions))]
mod model;
#[cfg(not(debug_assertions))]
mod operations;
#[cfg(not(debug_assertions))]
mod restore;
#[cfg(not(debug_assertions))]
mod serve;
#[cfg(not(debug_assertions))]
mod sessions;
#[cfg(not(debug_assertions))]
mod store;
#[cfg(not(debug_assertions))]
mod sys;
#[cfg(not(debug_assertions))]
mod upkeep;
#[cfg(not(debug_assertions))]
mod verify;
#[cfg(not(debug_assertions))]
mod wire;

#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod adopt;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod agent;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod capture;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod cli;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod codec;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod config;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod daemon;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod error;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod exchange;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fork;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod history;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod http;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod index;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod log;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod mirror;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod model;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod operations;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod restore;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod serve;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod sessions;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod store;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod sys;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod upkeep;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod verify;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod wire;

pub use capture::{CheckpointPolicy, FinishReport, FlushReport, SessionLimit, StreamerHandle};
pub use config::{AgentConfig, IndexConfig, Settings, StoreConfig};
pub use daemon::health::HealthState;
pub use daemon::service::{Service, ServiceOptions};
pub use error::{Error, ErrorKind, Result};
pub use model::{LogPoint, PointSpec, SessionId, SessionMetadata, Version};
pub use operations::history_file::{HistoryFallback, HistoryFile};
pub use operations::restore::{
    FallbackHistory, IfMissing, IndexUpdate, RestoreRequest, RestoreService, RestoreSummary,
    SessionSet,
};
pub use restore::{FileAction, FilePlan, RestoreReport};
pub use sessions::find::{LatestFilter, SessionSelector};
pub use sys::{Counters, Owner, SystemClock};
pub use wire::Parts;

/// The command line: the whole program but its `main` function.
#[doc(hidden)]
pub use cli::main as run_command_line;
