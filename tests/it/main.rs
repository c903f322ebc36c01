//! The one integration-test binary: behaviour through the library and the program, against real servers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a test stops at the first surprise, and nobody links against it"
)]

mod agents;
mod asleep;
mod bad_bucket;
mod bad_input;
mod broken;
mod clients;
mod compaction;
mod corpus;
mod cutter_model;
mod deploy;
mod doctor;
mod encryption;
mod errors;
mod examples;
mod exchange;
mod fallback;
mod fencing;
mod format;
mod found;
mod hook;
mod http;
mod index_contract;
mod index_faults;
mod layers;
mod ledger_props;
mod lifecycle;
mod log_props;
mod looking;
mod messages;
mod opencode;
mod other_cwd;
mod outage;
mod private;
mod program;
mod real_transcripts;
mod repair;
mod retention;
mod session_store;
mod snapshot_props;
mod store_contract;
mod streaming;
mod support;
mod support_test;
mod time_travel;
mod torture;
mod torture_disk;
mod torture_net;
mod walkthrough;
mod walls;
