//! The library of the fuzz targets: the modules of sessiond that parse untrusted bytes, and their
//! checks.
//!
//! The modules are included by path instead of linking the crate: sessiond with its store and
//! database clients takes minutes to build with instrumentation, these modules take seconds. A
//! module that is included here may import only other included ones.

#[path = "../../src/agent/mod.rs"]
pub mod agent;
pub mod checks;
#[path = "../../src/codec/mod.rs"]
pub mod codec;
#[path = "../../src/error.rs"]
pub mod error;
pub mod memory;
#[path = "../../src/model/mod.rs"]
pub mod model;
pub mod mutate;
pub mod seeds;

/// The part of `sys` that the included modules import.
#[path = "../../src/sys"]
pub mod sys {
    pub mod directory;
    pub mod lines;
    pub mod shell;
}

/// For every second seed, changes one value in one of the first `lines` lines in place, if the
/// result fits into the buffer. Returns the new length.
pub fn change_in_place(buffer: &mut [u8], size: usize, lines: usize, seed: u32) -> Option<usize> {
    let new = mutate::change_a_value(&buffer[..size], lines, seed)
        .filter(|new| seed % 2 == 0 && new.len() <= buffer.len())?;
    buffer[..new.len()].copy_from_slice(&new);
    Some(new.len())
}
