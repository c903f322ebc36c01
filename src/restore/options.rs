//! The context and the options of a restore.

use std::path::PathBuf;
use std::sync::Arc;

use crate::agent::Profile;
use crate::log::Logs;
use crate::log::witness::Witness;
use crate::model::ResolvedPoint;
use crate::sys::{Directory, Owner};

/// The parts that a restore works with.
#[derive(Clone)]
pub struct RestoreContext {
    /// The directory that receives the files.
    pub directory: Arc<dyn Directory>,
    /// The agent's profile.
    pub profile: Arc<dyn Profile>,
    /// The logs to read.
    pub logs: Logs,
}

/// The project that a session is restored into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetProject {
    /// The agent's name for it.
    pub name: String,
    /// Its directory, in which the agent will run.
    pub root: PathBuf,
}

/// The command that reads a log. Errors and hints name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Purpose {
    /// A restore, which claims the log.
    #[default]
    Restore,
    /// A copy in a directory.
    Pull,
    /// An archive file.
    Export,
}

impl Purpose {
    /// The name of the command.
    pub fn as_str(self) -> &'static str {
        match self {
            Purpose::Restore => "restore",
            Purpose::Pull => "pull",
            Purpose::Export => "export",
        }
    }
}

/// How to restore a log.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The command.
    pub purpose: Purpose,
    /// The point to restore.
    pub point: ResolvedPoint,
    /// Whether the point is the last complete turn. If this volume continued from it, its files are
    /// kept.
    pub is_last_turn: bool,
    /// The project to restore the session into.
    pub project: Option<TargetProject>,
    /// Move local files that differ aside instead of failing.
    pub force: bool,
    /// Restore the undamaged part of a damaged log instead of failing.
    pub salvage: bool,
    /// Write transcripts without damaged lines, and keep the originals aside.
    pub repair: bool,
    /// Only plan; change nothing.
    pub dry_run: bool,
    /// Claim the log. False for a copy.
    pub claim: bool,
    /// The owner of the files.
    pub owner: Option<Owner>,
    /// The index that is asked whether the log was rolled back.
    pub witness: Witness,
}

impl Options {
    /// Whether the end of the main line is restored.
    pub fn is_latest(&self) -> bool {
        self.point.at == crate::model::LogPoint::Latest
            && self.point.checkpoint.is_none()
            && self.point.branch.is_none()
    }
}
