//! What runs beside the agent: the streaming service, its control socket, the index's follower, the agent as a child, and what
//! operators see of them.

pub mod child;
pub mod compactor;
pub mod health;
pub mod heartbeat;
pub mod http;
pub mod indexer;
pub mod listen;
pub mod lock;
pub mod metadata_writer;
pub mod metrics;
pub mod probes;
pub mod service;
pub mod session_store;
pub mod signals;
pub mod socket;
pub mod traces;
