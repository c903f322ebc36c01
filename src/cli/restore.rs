//! `restore`: restores the files of a session before the agent starts.

use std::path::PathBuf;
use std::sync::Arc;

use clap::builder::BoolishValueParser;

use crate::cli::{exit, fallback, from_env, print, progress, restore_report, select};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::operations::restore::{
    IfMissing, IndexUpdate, RestoreRequest, RestoreService, RestoreSummary, SessionSet,
};
use crate::wire::Parts;

/// Restore a session's files and claim the session
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  sessiond restore 3f2a --if-exists && claude --resume 3f2a…
  sessiond restore 3f2a --at turn:4
  sessiond restore --latest --project .")]
pub struct Args {
    /// Session ID or unambiguous prefix
    #[arg(value_name = "ID", conflicts_with_all = ["all", "latest", "request"])]
    pub id: Option<String>,

    /// Restore every session of the agent
    #[arg(long, conflicts_with = "latest")]
    pub all: bool,

    /// Restore the most recently changed session
    #[arg(long)]
    pub latest: bool,

    /// Restore the most recently changed session with this request ID
    #[arg(long, value_name = "ID", conflicts_with = "all")]
    pub request: Option<String>,

    /// Restore the session in AGENT_SESSION_BLOB, without a store
    ///
    /// The variable contains the output of "sessiond export --base64", or the base64 text of a
    /// gzipped transcript of session AGENT_SESSION_ID. The transcript is written to the project of
    /// the current directory.
    #[arg(long, conflicts_with_all = ["id", "all", "latest", "request", "at", "salvage"])]
    pub from_env: bool,

    /// With --latest: only sessions of the project in this directory
    #[arg(long, value_name = "DIR", requires = "latest")]
    pub project: Option<PathBuf>,

    /// Restore into this directory [default: the agent's directory]
    #[arg(long, value_name = "DIR")]
    pub to: Option<PathBuf>,

    /// Working directory of the agent; the session moves to its project
    #[arg(long, value_name = "DIR", conflicts_with_all = ["all", "from_env"])]
    pub cwd: Option<PathBuf>,

    /// The point
    #[arg(long, value_name = "POINT", help = select::AT_HELP)]
    pub at: Option<String>,

    /// Exit with 0 if the session does not exist
    #[arg(long, conflicts_with = "must_exist")]
    pub if_exists: bool,

    /// Fail if the session does not exist (the default)
    #[arg(long)]
    pub must_exist: bool,

    /// Move local files that differ to .sessiond/aside instead of failing
    #[arg(long)]
    pub force: bool,

    /// If the log is damaged, restore the entries before the damage
    #[arg(long)]
    pub salvage: bool,

    /// Repair damaged transcripts; keep the originals in .sessiond/aside
    #[arg(
        long,
        env = "SESSIOND_REPAIR",
        num_args = 0,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new()
    )]
    pub repair: Option<bool>,

    /// Continue after the last stored entry if the index knows a later one
    ///
    /// The log lost its newest entries, for example because objects were deleted. The rows of the
    /// index are replaced, and "sessiond doctor" lists the rollback.
    #[arg(long)]
    pub accept_rollback: bool,

    /// What to do if the session cannot be restored.
    #[command(flatten)]
    pub fallback: fallback::Args,

    /// Print what would be written, and write nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Owner of new files (user:group) [default: owner of the directory]
    ///
    /// Applies if sessiond runs as root. It then accesses the directory with the rights of this
    /// user only.
    #[arg(long, env = "SESSIOND_OWNER", value_name = "USER:GROUP")]
    pub owner: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Restores the session.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let mut parts = Parts::build(settings, None).await?;
    if let Some(to) = &args.to {
        parts = parts.with_root(std::path::absolute(to).unwrap_or_else(|_| to.clone()));
    }
    let request = request(&parts, &args).await?;
    let inline = match args.from_env {
        true => from_env::decode(&parts)?,
        false => None,
    };
    let parts = select::with_owner(parts, args.owner.as_deref())?;
    let (counters, index) = (Arc::default(), IndexUpdate::Immediate);
    let service = match args.dry_run {
        true => RestoreService::without_lock(&parts, counters, index)?,
        false => RestoreService::open(&parts, counters, index)?,
    };
    let progress = progress::show(settings, &parts, "restoring");
    let summary = match inline {
        Some(session) => service.restore_inline(session, &request).await?,
        None if args.from_env && args.if_exists => RestoreSummary::default(),
        None if args.from_env => return Err(from_env::not_set()),
        None => service.restore(&request).await?,
    };
    drop(progress);
    print_summary(&parts, &summary, args.json)
}

async fn request(parts: &Parts, args: &Args) -> Result<RestoreRequest> {
    let selector = select::selector(
        parts,
        args.id.as_deref(),
        args.latest,
        args.project.as_deref(),
        args.request.as_deref(),
    );
    let sessions = match selector {
        Some(selector) => SessionSet::Selected(selector),
        None if args.all || args.from_env => SessionSet::All,
        None => {
            return Err(Error::usage("no session is selected")
                .hint("pass a session ID, or use --latest, --request ID or --all"));
        }
    };
    let project = args.cwd.as_deref();
    Ok(RestoreRequest {
        if_missing: match args.if_exists {
            true => IfMissing::Skip,
            false => IfMissing::Fail,
        },
        point: select::at(args.at.as_deref())?,
        project: project
            .map(|directory| select::target_project(parts, directory))
            .transpose()?,
        force: args.force,
        salvage: args.salvage,
        repair: args.repair.unwrap_or(false),
        accept_rollback: args.accept_rollback,
        dry_run: args.dry_run,
        max_agent_version: args.fallback.max_version(&*parts.profile).await?,
        fallback: args.fallback.history(),
        ..RestoreRequest::new(sessions)
    })
}

/// Prints the result and returns the exit code.
fn print_summary(parts: &Parts, summary: &RestoreSummary, json: bool) -> Result<u8> {
    for history in &summary.histories {
        // Without its hint: the fallback that the hint suggests is what was done.
        let cause = &history.cause;
        print::error(&Error::new(cause.kind(), cause.to_string()));
    }
    summary.failures.iter().for_each(print::error);
    if json {
        print::json(&summary.rows())?;
    } else if summary.is_empty() {
        print::line("nothing to restore")?;
    } else {
        let root = parts.root()?;
        for report in &summary.restored {
            restore_report::print_restored(report, root)?;
        }
        // Print only the path, for scripts.
        for history in &summary.histories {
            print::line(history.file.file.display())?;
        }
    }
    Ok(
        match (summary.failures.first(), summary.histories.is_empty()) {
            (Some(error), _) => exit::of(error.kind()),
            (None, false) => exit::FELL_BACK,
            (None, true) => exit::OK,
        },
    )
}
