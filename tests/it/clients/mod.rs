//! Real agents from npm, run by the program under test against a scripted model on loopback.
//!
//! Owns the installation of the clients, the model server and the containers. Every scenario
//! asserts on requests to the model, on bytes and on exit codes, because a client resumes without a
//! warning even if half of a transcript is missing.

mod anthropic;
mod anywhere;
mod claude;
pub mod client;
pub mod container;
pub mod install;
pub mod model;
mod openai;
mod others;
mod start;
