//! HTTP/1.1 servers: listen addresses, connection limits, and the checks that keep web pages away
//! from a local server.
//!
//! Owns what every server of the program has in common. Does not own routes: `daemon` and `serve`
//! have their own.

pub mod browser;
pub mod listen;
pub mod server;
pub mod write_limit;
