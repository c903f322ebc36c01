//! Plain values that every layer uses: IDs, keys, entry headers, files, points, messages. No I/O.

pub mod checkpoint;
pub mod digest;
pub mod entry;
pub mod facts;
pub mod file;
pub mod ids;
pub mod keys;
pub mod limits;
pub mod message;
pub mod metadata;
pub mod patterns;
pub mod point;
pub mod price_list;
pub mod prices;
pub mod turn_tracker;
pub mod version;

pub use checkpoint::{Checkpoint, CheckpointRetention, CheckpointStatus};
pub use digest::{Digest, FileHash, RunningHash};
pub use entry::{
    AdoptedBranch, CoveredRange, EntryHeader, EntryKind, FileMove, ForkOrigin, Part, UploadPart,
};
pub use facts::SessionFacts;
pub use file::{FileKind, FileStat, FileState, PathState, RelPath};
pub use ids::{AgentName, LogId, LogName, Namespace, ProjectId, Seq, SessionId, WriterId};
pub use message::{
    Block, LocatedMessage, Message, ParsedTranscripts, Role, Tokens, ToolCall, TranscriptLine,
    TurnBoundary,
};
pub use metadata::{Closed, ClosedStatus, Label, SessionMetadata, SessionStatus, Ttl};
pub use patterns::Patterns;
pub use point::{LogPoint, PointSpec, ResolvedPoint};
pub use prices::Prices;
pub use turn_tracker::{CheckpointInterval, TurnTracker};
pub use version::Version;
