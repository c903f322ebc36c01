//! The long-running process next to the agent: the streaming service and its background tasks, the
//! agent as a child process, the control socket, probes, metrics and traces.

pub mod child;
pub mod child_environment;
pub mod compactor;
pub mod health;
pub mod heartbeat;
pub mod index_watch;
pub mod indexer;
pub mod metadata_writer;
pub mod metrics;
pub mod probes;
pub mod service;
pub mod session_store;
pub mod signals;
pub mod socket;
pub mod state_guard;
pub mod traces;
