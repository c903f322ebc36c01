//! What the fuzz targets stand on: the modules of sessiond that read untrusted bytes, and what must hold of them.
//!
//! The modules are mounted from their files and not taken from the crate: all of sessiond with its store and database
//! clients takes minutes to build with instrumentation, these take seconds. A module that is mounted here may import only
//! other mounted ones, which rows 0 and 1 of ARCHITECTURE.md do.

#[path = "../../src/agent/mod.rs"]
pub mod agent;
pub mod checks;
#[path = "../../src/codec/mod.rs"]
pub mod codec;
#[path = "../../src/config.rs"]
pub mod config;
#[path = "../../src/error.rs"]
pub mod error;
pub mod memory;
#[path = "../../src/model/mod.rs"]
pub mod model;
pub mod mutate;
pub mod seeds;
