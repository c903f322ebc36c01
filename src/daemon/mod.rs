//! What runs beside the agent: the streaming service, its control socket, the index's follower, the agent as a child.

pub mod child;
pub mod compactor;
pub mod indexer;
pub mod lock;
pub mod sayer;
pub mod service;
pub mod session_store;
pub mod signals;
pub mod socket;
