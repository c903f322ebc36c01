//! Restoring a session: read and verify its log, plan and write its files, claim it.
//!
//! Owns what a restore does to local files. Does not own the rules of the log (`log`), the formats
//! (`codec`), or the steps around a restore such as the lock and the index (`operations`).

mod claim;
mod compare;
pub mod inline;
mod log;
mod options;
mod ownership;
pub mod plan;
mod project;
pub mod repair;
mod report;
mod session;
mod write;

pub use log::restore;
pub use options::{Options, Purpose, RestoreContext, TargetProject};
pub use plan::{FileAction, FilePlan};
pub use project::{find_project, write_root_file};
pub use report::{RestoreReport, Restored};
pub use session::restore_with_projects;
