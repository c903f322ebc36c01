//! `restore`: rehydrate before an agent launches.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::cli::fallback::Outcome;
use crate::cli::inspect::short;
use crate::cli::select::Latest;
use crate::cli::{exit, fallback, from_env, print, progress, select};
use crate::config::Settings;
use crate::daemon::lock;
use crate::error::{ErrorContext, Result};
use crate::mirror::Depth;
use crate::model::{LogId, LogName, PointSpec, RelPath, ToolCall};
use crate::restore::point::{self, ResolvedPoint};
use crate::restore::repair::{Change, Repaired, What};
use crate::restore::{self, Context, Options, RestoreReport, place::Action};
use crate::wire::Parts;

/// Put a session's files back before the agent launches, and take the session over
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond restore 3f2a --if-exists && claude --resume 3f2a…")]
pub struct Args {
    /// The session's id, or the beginning of it
    #[arg(value_name = "ID", conflicts_with_all = ["all", "latest", "request"])]
    pub id: Option<String>,

    /// Every session of the agent
    #[arg(long, env = "SESSIOND_ALL", conflicts_with = "latest")]
    pub all: bool,

    /// The session that was written last
    #[arg(long, env = "SESSIOND_LATEST")]
    pub latest: bool,

    /// The session of this request that was written last
    #[arg(
        long,
        env = "SESSIOND_REQUEST",
        value_name = "ID",
        conflicts_with = "all"
    )]
    pub request: Option<String>,

    /// The session in AGENT_SESSION_BLOB, as sessiond export --base64 writes it, or base64 of a gzipped transcript of
    /// AGENT_SESSION_ID for an agent that runs in this directory; no store is asked
    #[arg(long, env = "SESSIOND_FROM_ENV", conflicts_with_all = ["id", "all", "latest", "request", "at", "salvage"])]
    pub from_env: bool,

    /// With --latest: only sessions of the project in this directory
    #[arg(
        long,
        env = "SESSIOND_PROJECT",
        value_name = "DIR",
        requires = "latest"
    )]
    pub project: Option<PathBuf>,

    /// Restore into this directory instead of the agent's
    #[arg(long, env = "SESSIOND_TO", value_name = "DIR")]
    pub to: Option<PathBuf>,

    /// Put the session where the agent looks for it when it runs in this directory, from whichever project it was in
    #[arg(long, env = "SESSIOND_CWD", value_name = "DIR", conflicts_with_all = ["all", "from_env"])]
    pub cwd: Option<PathBuf>,

    /// The point to go back to: latest, turn, turn:N, seq:N, a time, or a checkpoint's number or name [default: latest]
    #[arg(long, env = "SESSIOND_AT", value_name = "POINT")]
    pub at: Option<String>,

    /// Nothing stored yet is fine: exit 0
    #[arg(long, env = "SESSIOND_IF_EXISTS", conflicts_with = "must_exist")]
    pub if_exists: bool,

    /// Nothing stored yet is an error [default without --if-exists]
    #[arg(long, env = "SESSIOND_MUST_EXIST")]
    pub must_exist: bool,

    /// Move local files that differ aside (to .sessiond/aside) instead of stopping
    #[arg(long, env = "SESSIOND_FORCE")]
    pub force: bool,

    /// Where the log is damaged, bring back the longest sound beginning of it instead of stopping
    #[arg(long, env = "SESSIOND_SALVAGE")]
    pub salvage: bool,

    /// Give the agent transcripts without torn, glued or empty lines; as they were, they are kept in .sessiond/aside
    #[arg(long, env = "SESSIOND_REPAIR")]
    pub repair: bool,

    /// What to do where that does not help.
    #[command(flatten)]
    pub fallback: fallback::Args,

    /// Only say what would be done
    #[arg(long, env = "SESSIOND_DRY_RUN")]
    pub dry_run: bool,

    /// Whose the files shall be, when run as root [default: the owner of the agent's directory]
    #[arg(long, env = "SESSIOND_OWNER", value_name = "USER:GROUP")]
    pub owner: Option<String>,

    /// Print the result as JSON
    #[arg(long, env = "SESSIOND_JSON")]
    pub json: bool,
}

/// Does it.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let mut parts = Parts::make(settings, None).await?;
    if let Some(to) = &args.to {
        parts = parts.rooted_at(std::path::absolute(to).unwrap_or_else(|_| to.clone()));
    }
    if args.from_env {
        return from_env::run(&parts, &args).await;
    }
    let project = args
        .cwd
        .as_deref()
        .map(|cwd| select::next_project(&parts, cwd))
        .transpose()?;
    let ids = match (&args.id, args.all) {
        (None, true) => {
            // Sessions first: each brings its project along.
            let mut names = parts.logs.names("").await?;
            names.sort_by_key(LogName::is_project);
            names.into_iter().map(|name| parts.logs.id(name)).collect()
        }
        (None, false) if !args.latest && args.request.is_none() => {
            return Err(crate::error::Error::usage("restore: which session?")
                .hint("give an ID, --latest, --request or --all; sessiond ls shows them"));
        }
        _ => {
            let latest = Latest {
                latest: args.latest,
                project: args.project.as_deref(),
                request: args.request.as_deref(),
            };
            select::session(&parts, args.id.as_deref(), latest)
                .await?
                .into_iter()
                .collect::<Vec<_>>()
        }
    };
    if ids.is_empty() {
        return nothing(&parts, &args);
    }
    let fallback = fallback::Fallback::of(args.fallback.clone(), &*parts.profile).await?;
    let disk = parts.directory()?;
    let point = select::point(args.at.as_deref())?;
    let options = Options {
        force: args.force,
        dry_run: args.dry_run,
        claim: true,
        owner: select::owner(args.owner.as_deref(), &disk)?,
        salvage: args.salvage,
        repair: args.repair,
        project,
        ..Options::default()
    };
    let _lock = if args.dry_run {
        None
    } else {
        Some(lock::take(disk.root(), options.owner)?)
    };
    let mut reports = Vec::new();
    let mut told = Vec::new();
    let mut failed = None;
    let shown = progress::show(settings, &parts, "restoring");
    for id in &ids {
        if reports
            .iter()
            .any(|report: &RestoreReport| report.session == id.name.to_string())
        {
            continue;
        }
        if args.all {
            parts.logs.progress.next_log();
        }
        match fallback.session(&parts, id, &point, &options).await {
            Ok(Outcome::Restored(done)) => reports.extend(done),
            Ok(Outcome::WrittenHistory(history)) => told.push(history),
            // One that fails does not hold up the others.
            Err(error) if args.all => {
                print::error(&error);
                failed.get_or_insert(exit::of(error.kind()));
            }
            Err(error) if select::is_missing(&parts, args.id.as_deref(), &error).await? => {
                return nothing(&parts, &args);
            }
            Err(error) => return Err(error),
        }
    }
    drop(shown);
    if !args.dry_run {
        select::tell_index(&parts, &reports).await;
    }
    if args.json {
        print::json(&fallback::rows(&reports, &told))?;
    } else {
        reports.iter().try_for_each(|report| say(&parts, report))?;
        told.iter().try_for_each(fallback::say)?;
    }
    Ok(failed.unwrap_or(if told.is_empty() {
        exit::OK
    } else {
        exit::FELL_BACK
    }))
}

/// There is no such session.
fn nothing(parts: &Parts, args: &Args) -> Result<u8> {
    if !args.if_exists {
        return Err(select::nothing(
            parts,
            args.id.as_deref(),
            args.request.as_deref(),
        ));
    }
    if args.json {
        print::json(&Vec::<RestoreReport>::new())?;
    } else {
        print::line("nothing to restore")?;
    }
    Ok(exit::OK)
}

/// Restores a session and what belongs to its projects.
pub async fn session(
    parts: &Parts,
    id: &LogId,
    point: &PointSpec,
    options: &Options,
) -> Result<Vec<RestoreReport>> {
    let goal = point::find_in(&parts.logs, id, point, options.salvage).await?;
    all(parts, one(parts, id, point, &goal, options).await?, options)
}

/// Restores a session, and notes in its report what became of its projects.
pub async fn one(
    parts: &Parts,
    id: &LogId,
    point: &PointSpec,
    goal: &ResolvedPoint,
    options: &Options,
) -> Result<RestoreReport> {
    let options = Options {
        at: goal.at,
        cut: goal.cut.clone(),
        last_turn: *point == PointSpec::Turn(None),
        along: true,
        ..options.clone()
    };
    if let (Some(mirror), false) = (&parts.mirror, options.dry_run) {
        // What is only in the agent's database is only here: nothing of it may be overwritten.
        mirror.pull(Depth::Now).await?;
    }
    let context = Context {
        directory: parts.directory()?,
        profile: parts.profile.clone(),
        logs: parts.logs.clone(),
    };
    let report = restore::restore(&context, id, &options).await?;
    settle(parts, &report, &options).await?;
    Ok(report)
}

/// Where the agent has its sessions in a database, puts what was restored there.
pub async fn settle(parts: &Parts, report: &RestoreReport, options: &Options) -> Result<()> {
    let Some(mirror) = parts.mirror.as_ref().filter(|_| !options.dry_run) else {
        return Ok(());
    };
    if report.written() > 0 || !mirror.has(&report.session).await {
        mirror.push(&report.session, options.owner).await?;
    }
    Ok(())
}

/// A session's report and those of its projects.
pub fn all(
    parts: &Parts,
    mut report: RestoreReport,
    options: &Options,
) -> Result<Vec<RestoreReport>> {
    let along: Result<Vec<RestoreReport>> = std::mem::take(&mut report.along).into_iter().collect();
    let reports = std::iter::once(report).chain(along?).collect();
    if let (Some(owner), false) = (options.owner, options.dry_run) {
        let disk = parts.directory()?;
        disk.give_state(owner)
            .map_err(|cause| crate::error::Error::io("hand sessiond's own directory over", cause))
            .context("restore")?;
    }
    Ok(reports)
}

/// Tells what stays in the log behind a point.
pub fn say_left(cut_off: &BTreeMap<RelPath, u64>, dropped: &[ToolCall]) -> Result<()> {
    for (path, bytes) in cut_off {
        print::line(format_args!(
            "  {} behind that point stay in the log: {}",
            print::bytes(*bytes),
            print::clean(path.as_str())
        ))?;
    }
    for call in dropped {
        let since = call
            .started
            .map_or_else(String::new, |at| format!(" since {at:.0}"));
        print::line(format_args!(
            "  was running{since}: {} {}",
            print::clean(&call.name),
            print::clean(&short(&call.input))
        ))?;
    }
    Ok(())
}

/// Tells a person.
pub fn say(parts: &Parts, report: &RestoreReport) -> Result<()> {
    let would = if report.dry_run {
        "would restore"
    } else {
        "restored"
    };
    let root = parts.root()?.display();
    let kept = report
        .files
        .iter()
        .filter(|file| file.action == Action::Keep)
        .count();
    print::line(format_args!(
        "{would} {} at entry {}: {} files written ({}), {kept} kept, in {root}",
        print::clean(&report.session),
        report.seq,
        report.written(),
        print::bytes(report.bytes)
    ))?;
    if report.dry_run {
        for file in &report.files {
            let action = format!("{:?}", file.action).to_lowercase();
            print::line(format_args!(
                "  {action:<10} {:>10}  {}",
                print::bytes(file.bytes),
                print::clean(file.path.as_str())
            ))?;
        }
    }
    if report.torn() > 0 {
        print::line(format_args!(
            "  {} of an unfinished line stay in the log; sessiond pull shows them",
            print::bytes(report.torn())
        ))?;
    }
    say_left(&report.cut_off, &report.dropped)?;
    say_repaired(&report.repaired)?;
    for file in report
        .files
        .iter()
        .filter(|file| file.action == Action::Superseded)
    {
        print::line(format_args!(
            "  left in the log, a newer one has its place: {}",
            print::clean(file.path.as_str())
        ))?;
    }
    for file in report
        .files
        .iter()
        .filter(|file| file.action == Action::Aside)
    {
        print::line(format_args!(
            "  a second place of the session, moved to .sessiond/aside: {}",
            print::clean(file.path.as_str())
        ))?;
    }
    if !report.session.starts_with('@') {
        print::line(format_args!(
            "resume with {}",
            print::clean(&report.session)
        ))?;
    }
    Ok(())
}

/// Tells what was repaired, line by line.
pub fn say_repaired(repaired: &[Repaired]) -> Result<()> {
    for file in repaired {
        print::line(format_args!(
            "  repaired {}:",
            print::clean(file.path.as_str())
        ))?;
        for Change {
            line,
            at,
            what,
            bytes,
        } in &file.changes
        {
            let told = match what {
                What::Zeros => format!("{bytes} zero bytes left out"),
                What::Torn => format!("{bytes} bytes of a torn line before the record left out"),
                What::Split => format!("{} records on one line got a line each", bytes + 1),
                What::Unreadable => format!("{bytes} bytes that are no record left out"),
                What::Ended => "the end of the line added".to_owned(),
                What::Unfinished => format!("{bytes} bytes of an unfinished line left out"),
            };
            print::line(format_args!("    line {line}, byte {at}: {told}"))?;
        }
        if let Some(original) = &file.original {
            print::line(format_args!(
                "    as it was: {}",
                print::clean(original.as_str())
            ))?;
        }
    }
    Ok(())
}
