//! The seams to the machine: time, chance, files, back-off. A simulation puts its own world behind each.

pub mod backoff;
pub mod clock;
pub mod disk;
pub mod folder;
pub mod notify_ready;
pub mod progress;

pub use backoff::Backoff;
pub use clock::{Chance, Clock, SystemChance, SystemClock};
pub use disk::Disk;
pub use folder::{Folder, Item, ItemKind, Meta, OpenFile, Owner};
pub use progress::Progress;

/// Our folder below the agent's root: the volume that holds the files also holds the right to write them.
pub const STATE_FOLDER: &str = ".sessiond";
