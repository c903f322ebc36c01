//! Exponential backoff with jitter, so that many processes do not retry at the same time.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sys::Rng;

/// The first step; the mean delay is three quarters of it.
const FIRST_STEP: Duration = Duration::from_millis(200);
/// The longest step, which bounds the lag after an outage.
const MAX_STEP: Duration = Duration::from_secs(15);

/// Runs an idempotent operation until it succeeds, with a delay after each retryable error. Returns
/// the last error after `max_attempts`, and an error that is not retryable immediately.
pub async fn retry<T, F: Future<Output = Result<T>>>(
    rng: &Arc<dyn Rng>,
    max_attempts: u32,
    mut attempt: impl FnMut() -> F,
) -> Result<T> {
    let mut backoff = Backoff::new(rng.clone());
    loop {
        match attempt().await {
            Ok(value) => return Ok(value),
            Err(error) => backoff.wait(error, max_attempts).await?,
        }
    }
}

/// Counts failed attempts and computes the delay before the next one.
#[derive(Clone)]
pub struct Backoff {
    rng: Arc<dyn Rng>,
    failures: u32,
}

impl Backoff {
    /// A backoff without failures.
    pub fn new(rng: Arc<dyn Rng>) -> Self {
        Backoff { rng, failures: 0 }
    }

    /// Counts a failed attempt and returns the delay before the next one.
    pub fn delay_after_failure(&mut self) -> Duration {
        let delay = Backoff::delay(self.failures, self.rng.next());
        self.failures = self.failures.saturating_add(1);
        delay
    }

    /// The delay after a failure that follows `failures` others: between half a step and a whole
    /// step. The step doubles with each failure.
    pub fn delay(failures: u32, random: u64) -> Duration {
        let step = FIRST_STEP
            .saturating_mul(1 << failures.min(10))
            .min(MAX_STEP);
        let half = step / 2;
        half + half * (random % 1000) as u32 / 1000
    }

    /// Waits before the next attempt after `error`. Returns the error if it is not retryable, or if
    /// `max_attempts` were made. [`retry`] is the loop around it; a
    /// loop of its own is only for attempts that change a value of the caller.
    pub async fn wait(&mut self, error: Error, max_attempts: u32) -> Result<()> {
        if !error.is_retryable() || self.failures + 1 >= max_attempts {
            return Err(error);
        }
        let delay = self.delay_after_failure();
        tracing::debug!(%error, attempt = self.failures, retry_in = ?delay, "retrying");
        tokio::time::sleep(delay).await;
        Ok(())
    }

    /// Number of consecutive failures.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Records a success.
    pub fn reset(&mut self) {
        self.failures = 0;
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

    #[tokio::test(start_paused = true)]
    async fn only_retryable_errors_are_retried_a_limited_number_of_times() {
        let rng: Arc<dyn Rng> = Arc::new(Fixed(0));
        let mut attempts = 0;
        let value = retry(&rng, 4, || {
            attempts += 1;
            std::future::ready(if attempts < 3 {
                Err(Error::unavailable("no response"))
            } else {
                Ok(attempts)
            })
        });
        assert_eq!(value.await.unwrap(), 3);
        for (error, expected) in [
            (Error::unavailable as fn(&'static str) -> Error, 4),
            (Error::usage, 1),
        ] {
            let mut attempts = 0;
            let failed = retry(&rng, 4, || {
                attempts += 1;
                std::future::ready(Err::<(), Error>(error("failed")))
            });
            assert!(failed.await.is_err());
            assert_eq!(attempts, expected);
        }
    }

    #[test]
    fn delays_grow_and_are_bounded() {
        let mut low = Backoff::new(Arc::new(Fixed(0)));
        let mut high = Backoff::new(Arc::new(Fixed(999)));
        let mut last = Duration::ZERO;
        for _ in 0..40 {
            let delay = low.delay_after_failure();
            assert!(delay >= last && delay <= MAX_STEP);
            assert!(high.delay_after_failure() >= delay);
            last = delay;
        }
        assert_eq!(last, MAX_STEP / 2);
        assert_eq!(low.failures(), 40);
    }
}
