//! The integration tests: behavior through the library and the program, on files and on real
//! servers.
//!
//! One binary, because linking is slow. `support` is the harness; CONTRIBUTING.md describes the
//! quick loop.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::too_many_lines,
    missing_docs,
    reason = "a test may panic and may be long, and no crate links against it"
)]

mod agents;
mod any_bucket;
mod bad_bucket;
mod bad_input;
mod branches;
mod clients;
mod command_line;
mod compaction;
mod corpus;
mod damaged_stores;
mod deploy;
mod docs;
mod doctor;
mod downgrade;
mod encryption;
mod errors;
mod examples;
mod exchange;
mod fallback;
mod fencing;
mod file_operations;
mod format;
mod gemini;
mod heavy;
mod hook;
mod hostile_folder;
mod http;
mod idle_writer;
mod index_contract;
mod index_faults;
mod layers;
mod ledger_props;
mod lifecycle;
mod log_props;
mod messages;
mod namespace_isolation;
mod opencode;
mod outage;
mod permissions;
mod plans;
mod privacy;
mod program;
mod real_transcripts;
mod regressions;
mod repair;
mod restore_cwd;
mod retention;
mod rollback;
mod scratch;
mod self_healing;
mod serve;
mod session_store;
mod show_and_tail;
mod signing;
mod snapshot_props;
mod start;
mod steps;
mod stopping;
mod store_contract;
mod streaming;
mod support;
mod support_test;
mod terminal;
mod time_travel;
mod torture;
mod torture_disk;
mod torture_net;
mod walkthrough;
