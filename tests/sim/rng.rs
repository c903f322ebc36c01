//! The only source of randomness: SplitMix64, so that a seed and a purpose give one sequence.

use std::sync::{Mutex, PoisonError};

use sessiond::sys::Rng;

/// A sequence of numbers.
#[derive(Clone)]
pub struct SeededRng(u64);

impl SeededRng {
    /// The sequence of a seed for one purpose.
    pub fn new(seed: u64, purpose: u64) -> SeededRng {
        // Stirred twice: two purposes of one seed must not give the same numbers, only later.
        let seed = SeededRng(seed).next();
        SeededRng(SeededRng(seed ^ purpose).next())
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `most`, which is not 0.
    pub fn below(&mut self, most: u64) -> u64 {
        self.next() % most
    }

    /// Whether something happens that happens so often in a hundred.
    pub fn percent(&mut self, of: u8) -> bool {
        of > 0 && self.below(100) < u64::from(of)
    }

    pub fn coin(&mut self) -> bool {
        self.percent(50)
    }
}

/// The chance that one process has.
pub struct ProcessRng(Mutex<SeededRng>);

impl ProcessRng {
    pub fn new(rng: SeededRng) -> ProcessRng {
        ProcessRng(Mutex::new(rng))
    }
}

impl Rng for ProcessRng {
    fn next(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).next()
    }
}
