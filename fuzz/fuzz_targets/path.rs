//! A path and a key. What must hold of it is in `src/checks.rs`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sessiond_fuzz::{checks, memory};

fuzz_target!(|input: &[u8]| memory::bounded(checks::path, input));
