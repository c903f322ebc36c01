//! Looking at a conversation: what was said, put in order, for a person to read; and following one that goes on elsewhere.
//!
//! Owns what is shown of a session and how. Reads the log alone: no database, no local files, and never the right to write.

pub mod conversation;
pub mod display;
pub mod follow;
pub mod render;

pub use conversation::{Conversation, Shown};
pub use display::{DisplayBlock, DisplayMessage};
pub use follow::{Follow, News};
pub use render::{Renderer, Style};
