//! The one integration-test binary: behaviour through the library and the program, against real servers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "a test stops at the first surprise, and nobody links against it"
)]

mod bad_bucket;
mod fencing;
mod index_contract;
mod index_faults;
mod layers;
mod outage;
mod store_contract;
mod support;
mod support_test;
