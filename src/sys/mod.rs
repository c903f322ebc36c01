//! The seams to the machine: time, chance, files, back-off. A simulation puts its own world behind each. Beside them: what is
//! counted, and requests to servers that only listen.

pub mod backoff;
pub mod clock;
pub mod counters;
pub mod directory;
pub mod disk;
pub mod notify_ready;
pub mod outbound;
pub mod progress;

pub use backoff::Backoff;
pub use clock::{Clock, Rng, SystemClock, SystemRng};
pub use counters::{Counters, Operation};
pub use directory::{Directory, Item, ItemKind, Meta, OpenFile, Owner};
pub use disk::Disk;
pub use progress::Progress;

/// Our directory below the agent's root: the volume that holds the files also holds the right to write them.
pub const STATE_DIR: &str = ".sessiond";

/// The target of spans that are traced. Not below `sessiond`, so that log lines do not carry them.
pub const TRACED: &str = "traced";
