//! The only source of randomness: SplitMix64, so that a seed and a purpose give one sequence.

use std::sync::{Mutex, PoisonError};

use sessiond::sys::Rng;

/// A sequence of numbers.
#[derive(Clone)]
pub struct SeededRng(u64);

impl SeededRng {
    /// The sequence of a seed for one purpose.
    pub fn new(seed: u64, purpose: u64) -> SeededRng {
        // Mixed twice: the sequences of two purposes of one seed must not overlap.
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

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// True with this probability in percent.
    pub fn percent(&mut self, probability: u8) -> bool {
        probability > 0 && self.below(100) < u64::from(probability)
    }

    pub fn coin(&mut self) -> bool {
        self.percent(50)
    }
}

/// The random numbers of one process.
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
