//! How long to wait before the next try: exponential, with jitter, so that a fleet does not knock in step.

use std::sync::Arc;
use std::time::Duration;

use crate::sys::Rng;

/// First wait; the mean of the jitter is three quarters of it.
const FIRST: Duration = Duration::from_millis(200);
/// Longest wait: lag after an outage stays within it.
const LONGEST: Duration = Duration::from_secs(15);

/// Counts attempts and spaces them.
#[derive(Clone)]
pub struct Backoff {
    rng: Arc<dyn Rng>,
    failed: u32,
}

impl Backoff {
    /// Nothing has failed yet.
    pub fn new(rng: Arc<dyn Rng>) -> Self {
        Backoff { rng, failed: 0 }
    }

    /// Takes note of a failed attempt and answers how long to wait: between half and the whole of a step that doubles.
    pub fn wait_after_failure(&mut self) -> Duration {
        let step = FIRST.saturating_mul(1 << self.failed.min(10)).min(LONGEST);
        self.failed = self.failed.saturating_add(1);
        let half = step / 2;
        let share = (self.rng.next() % 1000) as u32;
        half + half * share / 1000
    }

    /// How many attempts have failed in a row.
    pub fn failed(&self) -> u32 {
        self.failed
    }

    /// An attempt went well.
    pub fn reset(&mut self) {
        self.failed = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(u64);
    impl Rng for Fixed {
        fn next(&self) -> u64 {
            self.0
        }
    }

    #[test]
    fn waits_grow_and_are_bounded() {
        let mut low = Backoff::new(Arc::new(Fixed(0)));
        let mut high = Backoff::new(Arc::new(Fixed(999)));
        let mut last = Duration::ZERO;
        for _ in 0..40 {
            let wait = low.wait_after_failure();
            assert!(wait >= last && wait <= LONGEST);
            assert!(high.wait_after_failure() >= wait);
            last = wait;
        }
        assert_eq!(last, LONGEST / 2);
        assert_eq!(low.failed(), 40);
    }
}
