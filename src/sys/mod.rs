//! The interfaces to the machine: time, randomness, files, locks, backoff, and requests to
//! monitoring servers. The simulation replaces time, randomness and files. Also contains the
//! counters and the progress of the process.

pub mod account;
pub(crate) mod acting;
pub mod atomic_file;
pub mod backoff;
pub(crate) mod beneath;
pub mod blocking;
pub mod clock;
pub mod counters;
pub mod directory;
pub mod disk;
pub mod lines;
pub mod lock;
pub mod mutation;
pub mod outbound;
pub mod output;
pub mod packed;
pub mod private_file;
pub mod program_version;
pub mod progress;
pub mod scratch;
pub(crate) mod shell;
pub mod terminal;

pub use atomic_file::AtomicFile;
pub use backoff::Backoff;
pub use blocking::blocking;
pub use clock::{Clock, Rng, SystemClock, SystemRng};
pub use counters::{Counters, Operation};
pub use directory::{BlockedPath, Directory, FileAttributes, Item, ItemKind, OpenFile, Owner};
pub use disk::Disk;
pub use progress::Progress;

/// The state directory of sessiond below the agent's root. It is on the same volume as the files,
/// so that ownership of a session moves with them.
pub const STATE_DIR: &str = ".sessiond";

/// The target of exported spans. It is not below `sessiond`, so that log lines do not include them.
pub const TRACE_TARGET: &str = "traced";
