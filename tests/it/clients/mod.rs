//! The programs people run: real clients from npm, around them the program under test, before them a model that does what it is told.
//!
//! Owns installing the clients, the model's server and the containers they run in. Every scenario asserts on what reached the
//! model, on bytes and on exit codes: a client resumes without a word where half of a transcript is missing.

mod anthropic;
mod anywhere;
mod claude;
pub mod client;
pub mod container;
pub mod install;
pub mod model;
mod openai;
mod others;
