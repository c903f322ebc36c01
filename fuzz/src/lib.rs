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

/// Every other time, changes one value of one of the first `lines` lines in place, if the result fits into the room; answers
/// its length.
pub fn change_in_place(room: &mut [u8], size: usize, lines: usize, seed: u32) -> Option<usize> {
    let new = mutate::change_a_value(&room[..size], lines, seed)
        .filter(|new| seed % 2 == 0 && new.len() <= room.len())?;
    room[..new.len()].copy_from_slice(&new);
    Some(new.len())
}
