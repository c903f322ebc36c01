//! `gc`: garbage collection.

use std::time::Duration;

use crate::cli::{exit, print, progress};
use crate::config::{self, Settings};
use crate::error::{Error, Result};
use crate::log::writer::GRACE;
use crate::model::Ttl;
use crate::operations::gc::{GcOutcome, collect_all};
use crate::upkeep::collect::RetentionPolicy;
use crate::upkeep::gc::CollectReport;
use crate::wire::Parts;

/// The default of --history.
const WEEK: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Delete compacted history, expired sessions and removed sessions
///
/// Works on the sessions of one agent in one namespace. It is safe while daemons, restores and
/// other gc processes run. An expired session is first removed, as by "sessiond rm", and deleted
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
        default_value = "7d"
    )]
    pub ttl: String,

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
        let objects = report.objects + report.temporary_objects;
        print::line(format_args!(
            "{}; {} {} ({})",
            print::plural(report.logs, "log", "logs"),
            if args.dry_run {
                "would delete"
            } else {
                "deleted"
            },
            print::plural(objects, "object", "objects"),
            print::bytes(report.bytes)
        ))?;
    }
    Ok(exit_code(outcome))
}

/// Prints the errors of the logs that were not collected, and returns the exit code.
fn exit_code(outcome: GcOutcome) -> u8 {
    let report = &outcome.report;
    outcome.failures.iter().for_each(print::error);
    let total = print::plural(report.logs, "log", "logs");
    if report.failed > 0 {
        print::error(
            &Error::corrupt("stored objects are damaged")
                .context(format_args!("clean up {} of {total}", report.failed))
                .hint("run \"sessiond verify --all --deep\" to see the damage"),
        );
        return exit::CORRUPT;
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
