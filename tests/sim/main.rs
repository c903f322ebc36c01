//! The simulation: the real capture, log, restore and upkeep in one seeded world, on one thread, in virtual time.
//!
//! `cargo test --test sim` runs 20,000 seeds. `SESSIOND_SIM_SEEDS=1000000` runs more (from `SESSIOND_SIM_FROM` on),
//! `SESSIOND_SIM_MIX=crashes` only those of one mix,
//! `SESSIOND_SIM_SEED=7` replays one and prints its trace. A seed that fails prints the command that replays it, made as
//! short as it still fails.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a test stops at the first surprise, and nobody links against it"
)]

mod agent;
mod bucket;
mod crashes;
mod rng;
mod disk;
mod history;
mod process;
mod machine;
mod model;
mod mutations;
mod opencode;
mod oracle;
mod restored_files;
mod run;
mod schedule;
mod seeds;
mod shrink;
mod tables;
mod upkeep;
mod world;
