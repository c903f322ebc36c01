//! The simulation: the real capture, log, restore and upkeep in one seeded world, on one thread and
//! in virtual time.
//!
//! `cargo test --test sim` runs 20,000 seeds. `SESSIOND_SIM_SEEDS=1000000` runs more, from
//! `SESSIOND_SIM_FROM` on; `SESSIOND_SIM_MIX=crashes` runs the seeds of one mix of faults. A
//! failing seed prints the command that replays it, with a schedule as short as possible.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::too_many_lines,
    missing_docs,
    reason = "a test may panic and may be long, and no crate links against it"
)]

mod agent;
mod attacks;
mod bucket;
mod crashes;
mod disk;
mod history;
mod machine;
mod model;
mod mutations;
mod opencode;
mod oracle;
mod process;
mod restored_files;
mod rng;
mod run;
mod schedule;
mod seeds;
mod shrink;
mod tables;
mod upkeep;
mod world;
