//! Fuzz target: a path and a key. Its properties are in `src/checks.rs`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sessiond_fuzz::{checks, memory};

fuzz_target!(|input: &[u8]| memory::bounded(checks::path, input));
