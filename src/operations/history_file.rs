//! Writes the conversation of a session as text if the session cannot be restored.

use std::path::PathBuf;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::history::reader::ConversationVisitor;
use crate::history::{ConversationRead, HistoryText};
use crate::model::{LogId, RelPath};
use crate::sys::output::write_file;
use crate::sys::{Directory, Disk, Owner, STATE_DIR};

/// How to write a conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryFallback {
    /// Maximum number of messages, counted from the end.
    pub max_messages: usize,
    /// The file; by default one in sessiond's own directory.
    pub file: Option<PathBuf>,
}

/// A conversation that was written as text.
#[derive(Debug, Clone, Serialize)]
pub struct HistoryFile {
    /// The session.
    pub session: String,
    /// The form of the text: `history`.
    pub fallback: &'static str,
    /// The file.
    pub file: PathBuf,
    /// Number of messages in the text.
    pub messages: usize,
    /// Number of readable messages of the session.
    pub readable_messages: usize,
    /// The last entry before the first damage.
    pub undamaged_to: u64,
    /// The last entry of the log.
    pub head: u64,
    /// The version of the agent that wrote last.
    pub agent_version: Option<String>,
    /// Why the session was not restored.
    pub reason: String,
    /// Whether nothing was written because of `--dry-run`.
    pub dry_run: bool,
}

impl HistoryFallback {
    /// Writes a conversation. `cause` is the error that prevented the restore, and `reason` a
    /// clause for the text.
    pub(super) fn write(
        &self,
        disk: &Disk,
        owner: Option<Owner>,
        id: &LogId,
        history: &ConversationRead<HistoryText>,
        (cause, reason): (&Error, &str),
        dry_run: bool,
    ) -> Result<HistoryFile> {
        let default: RelPath = format!("{STATE_DIR}/history-{}.md", id.name).parse()?;
        let file = match &self.file {
            Some(file) => std::path::absolute(file).unwrap_or_else(|_| file.clone()),
            None => default.below(disk.root()),
        };
        let directory = match &history.facts.cwd {
            Some(cwd) => format!(" It ran in {cwd}."),
            None => String::new(),
        };
        let text = history.visitor.text(&format!(
            "Session {} of {} could not be resumed: {reason}.{directory}",
            id.name, id.agent
        ));
        let written = match &self.file {
            _ if dry_run => Ok(()),
            Some(_) => write_file(&file, owner, |out| {
                out.write_all(text.as_bytes())
                    .map_err(|cause| Error::user_path(format!("write {}", file.display()), cause))
            }),
            None => disk
                .replace(&default, text.as_bytes(), true)
                .map_err(|cause| Error::user_path(format!("write {}", file.display()), cause)),
        };
        written?;
        Ok(HistoryFile {
            session: id.name.to_string(),
            fallback: "history",
            file,
            messages: history.visitor.shown_count(),
            readable_messages: history.visitor.message_count(),
            undamaged_to: history.undamaged_to,
            head: history.head,
            agent_version: history.facts.agent_version.clone(),
            reason: cause.to_string(),
            dry_run,
        })
    }
}
