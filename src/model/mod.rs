//! Plain values that every layer speaks: names, keys, entries, files, points of a log. Nothing here does I/O.

pub mod at;
pub mod checkpoint;
pub mod digest;
pub mod entry;
pub mod facts;
pub mod file;
pub mod ids;
pub mod keys;
pub mod message;
pub mod version;
pub mod wishes;

pub use at::{At, Point};
pub use checkpoint::{Checkpoint, Turns};
pub use digest::{Digest, RunningHash};
pub use entry::{Covers, EntryKind, Fork, Header, Move, Part};
pub use facts::Facts;
pub use file::{FileAt, FileKind, NamedFile, RelPath, Stat};
pub use ids::{AgentName, LogId, LogName, Namespace, Seq, SessionId, WriterId};
pub use message::{Block, Call, Line, Mark, Message, Role, Said, Tokens, Told};
pub use version::Version;
pub use wishes::{AtRest, Label, Rest, Status, Ttl, Wishes};
