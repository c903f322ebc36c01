//! Fuzz target: a stored entry. Its properties are in `src/checks.rs`.

#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use sessiond_fuzz::{change_in_place, checks, memory};

fuzz_target!(|input: &[u8]| memory::bounded(checks::entry, input));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    change_in_place(&mut data[..max_size], size, 1, seed)
        .unwrap_or_else(|| fuzzer_mutate(data, size, max_size))
});
