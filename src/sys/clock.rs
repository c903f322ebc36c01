//! Wall-clock time and chance. Timers are tokio's, which a simulation pauses and moves by itself.

use std::sync::Arc;

use jiff::Timestamp;

use crate::model::WriterId;

/// Tells the time.
pub trait Clock: Send + Sync + 'static {
    /// The time now, to the microsecond, which is what every format of ours keeps.
    fn now(&self) -> Timestamp;
}

/// Throws dice.
pub trait Rng: Send + Sync + 'static {
    /// A number that nobody can foretell.
    fn next(&self) -> u64;
}

/// A new writer's name.
pub fn new_writer(rng: &Arc<dyn Rng>) -> WriterId {
    #[allow(clippy::expect_used, reason = "hex digits are always plain")]
    format!("{:016x}{:016x}", rng.next(), rng.next())
        .parse()
        .expect("hex digits are plain")
}

/// The machine's clock.
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        #[allow(clippy::disallowed_methods, reason = "this is the seam")]
        let now = Timestamp::now();
        Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now)
    }
}

/// The machine's source of randomness.
pub struct SystemRng;

impl Rng for SystemRng {
    fn next(&self) -> u64 {
        #[allow(clippy::disallowed_methods, reason = "this is the seam")]
        let uuid = uuid::Uuid::new_v4();
        // Six bits of a version 4 UUID are fixed; folding the halves hides them behind random ones.
        let (high, low) = uuid.as_u64_pair();
        high ^ low.rotate_left(32)
    }
}
