//! The seams to the machine: time, chance, files, back-off. A simulation puts its own world behind each. Beside them: what is
//! counted, and requests to servers that only listen.

pub mod backoff;
pub mod clock;
pub mod counts;
pub mod disk;
pub mod folder;
pub mod notify_ready;
pub mod outbound;
pub mod progress;

pub use backoff::Backoff;
pub use clock::{Chance, Clock, SystemChance, SystemClock};
pub use counts::{Counts, During};
pub use disk::Disk;
pub use folder::{Folder, Item, ItemKind, Meta, OpenFile, Owner};
pub use progress::Progress;

/// Our folder below the agent's root: the volume that holds the files also holds the right to write them.
pub const STATE_FOLDER: &str = ".sessiond";

/// The target of spans that are traced. Not below `sessiond`, so that log lines do not carry them.
pub const TRACED: &str = "traced";
