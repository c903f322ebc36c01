//! `verify`: checks whether sessions can be restored.

use crate::cli::{exit, print, progress};
use crate::config::Settings;
use crate::error::{Error, ErrorKind, Result};
use crate::operations::verify::verify;
use crate::verify::VerifyReport;
use crate::wire::Parts;

/// Check that sessions can be restored
///
/// Reads the objects that a restore reads. Exits with 6 if a log is damaged. If no log is damaged,
/// exits with 11 if objects cannot be decrypted, or with 12 if a newer sessiond wrote them. For a
/// log with such objects, it only checks that no entry number is missing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  sessiond verify --all\n  sessiond verify 3f2a --deep")]
pub struct Args {
    /// Session ID or unambiguous prefix [default: every session and project]
    #[arg(value_name = "ID", conflicts_with = "all")]
    pub id: Option<String>,

    /// Check every session and project of the agent (the default)
    #[arg(long)]
    pub all: bool,

    /// Read every object, not only those that a restore needs
    #[arg(long)]
    pub deep: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Verifies the sessions.
pub async fn run(settings: &Settings, args: Args) -> Result<u8> {
    let parts = Parts::build(settings, None).await?;
    let progress = progress::show(settings, &parts, "verifying");
    let print_now = |report: &VerifyReport| match args.json {
        true => Ok(()),
        false => print_report(report),
    };
    let reports = verify(&parts, args.id.as_deref(), args.deep, print_now).await?;
    drop(progress);
    if args.json {
        print::json(&reports)?;
    }
    summarize(&reports, args.json)
}

/// Prints the totals and returns the exit code.
fn summarize(reports: &[VerifyReport], json: bool) -> Result<u8> {
    let total = print::plural(reports.len(), "log", "logs");
    let damaged = reports.iter().filter(|it| !it.damage.is_empty()).count();
    let unreadable = reports.iter().filter(|it| it.unreadable > 0).count();
    if !json {
        let unreadable = match unreadable {
            0 => String::new(),
            count => format!(", {count} unreadable"),
        };
        print::line(format_args!("{total}, {damaged} damaged{unreadable}"))?;
    }
    if damaged > 0 {
        let error = Error::corrupt(format!(
            "{damaged} of {total} {} damaged",
            is_or_are(damaged)
        ));
        let incomplete: Vec<&VerifyReport> = reports
            .iter()
            .filter(|report| 0 < report.undamaged_to && report.undamaged_to < report.head)
            .collect();
        let remedy = match incomplete.iter().any(|report| has_files(report)) {
            true => "--salvage\" to restore the entries before the damage",
            false => "--fallback history\" to write the readable messages as text",
        };
        print::error(&match incomplete.is_empty() {
            true => error,
            false => error.hint(format!("run \"sessiond restore ID {remedy}")),
        });
        return Ok(exit::CORRUPT);
    }
    let newer = reports.iter().filter(|it| it.newer_format > 0).count();
    if newer > 0 {
        let error = Error::new(
            ErrorKind::NewerFormat,
            format!("a newer sessiond wrote objects in {newer} of {total}"),
        );
        print::error(&error.hint("upgrade sessiond"));
        return Ok(exit::NEWER_FORMAT);
    }
    if unreadable > 0 {
        let error = Error::new(
            ErrorKind::Encrypted,
            format!("no configured identity can decrypt {unreadable} of {total}"),
        );
        print::error(&error.hint("set --identity FILE to the file with the private key"));
        return Ok(exit::ENCRYPTED);
    }
    Ok(exit::OK)
}

/// Whether a restore of the undamaged entries writes any file.
fn has_files(report: &VerifyReport) -> bool {
    report.files > 0
}

fn is_or_are(count: usize) -> &'static str {
    if count == 1 { "is" } else { "are" }
}

fn print_report(report: &VerifyReport) -> Result<()> {
    let session = print::clean(&report.session);
    let verdict = match (report.damage.is_empty(), report.unreadable) {
        (true, 0) => "ok",
        (true, _) => "UNREADABLE",
        (false, _) => "DAMAGED",
    };
    let branches = match report.branches.len() {
        0 => String::new(),
        count => format!(", {}", print::plural(count, "branch", "branches")),
    };
    if report.unreadable > 0 {
        return print_unreadable(report, verdict, &branches);
    }
    let removed = if report.removed { ", removed" } else { "" };
    print::line(format_args!(
        "{verdict:<10} {session}  {}, {}, {}{branches}{removed}",
        print::plural(report.objects, "object", "objects"),
        print::plural(report.files, "file", "files"),
        print::bytes(report.bytes)
    ))?;
    report.damage.iter().try_for_each(detail)?;
    for damage in &report.irrelevant_damage {
        detail(format!(
            "no effect on a restore, because a later rollback skips it: {damage}"
        ))?;
    }
    if report.damage.is_empty() {
        return Ok(());
    }
    print_remedy(report, &session)
}

/// Prints an indented line.
fn detail(text: impl AsRef<str>) -> Result<()> {
    print::line(format_args!("           {}", print::clean(text.as_ref())))
}

/// Prints what can be restored of a damaged log.
fn print_remedy(report: &VerifyReport, session: &str) -> Result<()> {
    for key in &report.contradicting {
        detail(format!(
            "delete object {key}: a restore then reads the entries that it replaces"
        ))?;
    }
    let (last, head) = (report.undamaged_to, report.head);
    if report.rollback.is_some() {
        return detail(match head {
            0 => "restore the objects from a backup, or from earlier object versions if the bucket has versioning".to_owned(),
            head => format!(
                "restore the objects from a backup, or run \"sessiond restore {session} --accept-rollback\" to continue after entry {head}"
            ),
        });
    }
    if last == head && !report.contradicting.is_empty() {
        detail("until the object is deleted, a restore may read it")
    } else if last == head {
        detail("the session can be restored completely: other objects hold the same entries")
    } else if last > 0 && !has_files(report) {
        detail(format!(
            "entries 1 to {last} of {head} are undamaged but hold no file: run \"sessiond restore {session} --fallback history\""
        ))
    } else if last > 0 {
        detail(format!(
            "undamaged up to entry {last} of {head}: run \"sessiond restore {session} --at seq:{last}\", or use --salvage"
        ))
    } else {
        detail(
            "no entry can be restored: restore the object from a backup, or from an earlier object version if the bucket has versioning",
        )
    }
}

/// Prints what can be checked of a log with unreadable objects.
fn print_unreadable(report: &VerifyReport, verdict: &str, branches: &str) -> Result<()> {
    let (session, head) = (print::clean(&report.session), report.head);
    let missing: Vec<String> = report
        .missing
        .iter()
        .map(|(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first} to {last}"),
        })
        .collect();
    let numbers = match missing.is_empty() {
        true => format!("entries 1 to {head} exist"),
        false => format!(
            "of entries 1 to {head}, these are missing or were skipped: {}",
            missing.join(", ")
        ),
    };
    print::line(format_args!(
        "{verdict:<10} {session}  {} of {} unreadable; {numbers}{branches}",
        report.unreadable,
        print::plural(report.objects, "object", "objects")
    ))?;
    report.damage.iter().try_for_each(detail)
}
