//! Reading conversations: one reader for `show`, `tail`, `inspect`, `diff` and the history
//! fallback.
//!
//! Owns which messages are read, their order, and how they are presented. Reads the log alone: no
//! database, no local files, and no claim.

pub mod conversation;
pub mod diff;
pub mod display;
pub mod follow;
pub mod inspect;
mod message_list;
mod messages;
pub mod reader;
pub mod render;
pub mod text;

pub use conversation::{Conversation, ThreadedMessage};
pub use follow::{FollowEvent, Follower};
pub use message_list::{ContentFilter, MessageContent, MessageList};
pub use reader::{ConversationRead, ConversationReader, Extent, Origin};
pub use render::{Renderer, Style};
pub use text::HistoryText;
