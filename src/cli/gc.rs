//! `gc`: garbage collection.

use std::time::Duration;

use crate::cli::{exit, print, progress};
use crate::config::{self, Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::log::writer::GRACE;
use crate::model::Ttl;
use crate::operations::gc::{GcOutcome, GcReport, collect_all};
use crate::upkeep::collect::RetentionPolicy;
use crate::upkeep::gc::CollectReport;
use crate::wire::Parts;

/// The default of --history.
const WEEK: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Delete compacted history, expired sessions and removed sessions
///
/// Works on the sessions of one agent in one namespace. It is safe while daemons, restores and
/// other gc processes run. A session expires only if it has a TTL, from "sessiond ttl", the --ttl of its
/// writer, or --ttl here. Archived sessions and sessions with a named checkpoint do not expire,
/// unless they are included. An expired session is first removed, as by "sessiond rm", and deleted
/// permanently after 24 hours. Sessions that cannot be decrypted are left unchanged; the exit code
/// is then 11.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  sessiond gc --dry-run")]
pub struct Args {
    /// Period in which every entry stays restorable
    #[arg(
        long,
        env = "SESSIOND_GC_HISTORY",
        value_name = "TIME",
        default_value = "7d"
    )]
    pub history: String,

    /// TTL of sessions that have none, or never
    #[arg(
        long,
        env = "SESSIOND_GC_TTL",
        value_name = "TIME",
        default_value = "never"
    )]
    pub ttl: String,

    /// Also expire archived sessions
    #[arg(long)]
    pub include_archived: bool,

    /// Also expire sessions that have a named checkpoint
    #[arg(long)]
    pub include_checkpoints: bool,

    /// Print what would be deleted, and delete nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Collects garbage.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let ttl: Ttl = config::ttl("--ttl", &args.ttl)?;
    let policy = RetentionPolicy {
        history: config::duration("--history", Some(&args.history), WEEK)?,
        ttl: ttl.duration(),
        grace: GRACE,
        include_archived: args.include_archived,
        include_checkpoints: args.include_checkpoints,
    };
    let parts = Parts::build(settings, None).await?;
    let progress = progress::show(settings, &parts, "cleaning up");
    let print_now = |collected: &CollectReport| match args.json {
        true => Ok(()),
        false => print_collected(collected),
    };
    let outcome = collect_all(&parts, &policy, args.dry_run, print_now).await?;
    drop(progress);
    let report = &outcome.report;
    if args.json {
        print::json(report)?;
    } else {
        print::line(summary(report))?;
    }
    Ok(exit_code(outcome))
}

/// One line: `3 logs; 1 session expires; would delete 12 objects (3.4 KB)`.
fn summary(report: &GcReport) -> String {
    let mut clauses = vec![print::plural(report.logs, "log", "logs")];
    if report.expired > 0 {
        clauses.push(match report.dry_run {
            true => print::plural(report.expired, "session expires", "sessions expire"),
            false => print::plural(report.expired, "session expired", "sessions expired"),
        });
    }
    if report.exempt > 0 {
        let kept = print::plural(report.exempt, "session is", "sessions are");
        clauses.push(format!(
            "{kept} past the TTL but archived or with a named checkpoint"
        ));
    }
    let objects = report.objects + report.temporary_objects;
    clauses.push(format!(
        "{} {} ({})",
        if report.dry_run {
            "would delete"
        } else {
            "deleted"
        },
        print::plural(objects, "object", "objects"),
        print::bytes(report.bytes)
    ));
    clauses.join("; ")
}

/// Prints the errors of the logs that were not collected, and returns the exit code.
fn exit_code(outcome: GcOutcome) -> u8 {
    let report = &outcome.report;
    outcome.failures.iter().for_each(print::error);
    let total = print::plural(report.logs + report.skipped, "log", "logs");
    let damaged = outcome
        .failures
        .iter()
        .find(|error| error.kind() == ErrorKind::Corrupt);
    if let Some(first) = damaged.or(outcome.failures.first()) {
        print::error(&summarize_failures(report, first, &total));
        return exit::of(first.kind());
    }
    match outcome.unreadable {
        Some(first) => {
            let code = exit::of(first.kind());
            let count = report.unreadable;
            print::error(&first.context(format_args!("clean up {count} of {total}")));
            code
        }
        None => exit::OK,
    }
}

/// One error for all failures, of which `first` determines the exit code.
fn summarize_failures(report: &GcReport, first: &Error, total: &str) -> Error {
    let failed = report.failed.max(1);
    let error = match first.kind() {
        ErrorKind::Corrupt => Error::corrupt("stored objects are damaged")
            .hint("run \"sessiond verify --all --deep\" to see the damage"),
        kind => Error::new(kind, "see the errors above")
            .hint("run \"sessiond gc\" again; it continues where it failed"),
    };
    let skipped = match report.skipped {
        0 => String::new(),
        skipped => format!(" ({skipped} not examined)"),
    };
    error.context(format_args!("clean up {failed} of {total}{skipped}"))
}

fn print_collected(collected: &CollectReport) -> Result<()> {
    let steps: Vec<&str> = collected.steps.iter().map(|step| describe(step)).collect();
    print::line(format_args!(
        "{}  {}  {} ({})",
        print::clean(&collected.session),
        steps.join(", "),
        print::plural(collected.objects, "object", "objects"),
        print::bytes(collected.bytes)
    ))
}

/// A step in words.
fn describe(step: &'static str) -> &'static str {
    match step {
        "merge_small" => "merge small segments",
        "delete_covered" => "delete covered segments",
        "expire" => "remove the expired session",
        "purge" => "delete permanently",
        "delete_purged" => "delete the remaining objects",
        "delete_purge_entry" => "delete the purge entry",
        other => other,
    }
}
