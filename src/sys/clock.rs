//! Wall-clock time and randomness. Timers come from tokio, which the simulation controls.

use std::sync::Arc;

use jiff::Timestamp;

use crate::model::WriterId;

/// A wall clock.
pub trait Clock: Send + Sync + 'static {
    /// The current time in microseconds, the resolution of all stored formats.
    fn now(&self) -> Timestamp;
}

/// A source of random numbers.
pub trait Rng: Send + Sync + 'static {
    /// A random number.
    fn next(&self) -> u64;
}

/// A random writer ID. It only has to be unique among the writers of one session.
pub fn new_writer_id(rng: &Arc<dyn Rng>) -> WriterId {
    #[allow(clippy::expect_used, reason = "hex digits are a valid ID")]
    format!("{:016x}", rng.next())
        .parse()
        .expect("hex digits are a valid ID")
}

/// The machine's clock.
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        #[allow(clippy::disallowed_methods, reason = "the only place that may call it")]
        let now = Timestamp::now();
        Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now)
    }
}

/// The machine's source of randomness.
pub struct SystemRng;

impl Rng for SystemRng {
    fn next(&self) -> u64 {
        #[allow(clippy::disallowed_methods, reason = "the only place that may call it")]
        let uuid = uuid::Uuid::new_v4();
        // Six bits of a version 4 UUID are constant; combining the halves makes all bits random.
        let (high, low) = uuid.as_u64_pair();
        high ^ low.rotate_left(32)
    }
}
