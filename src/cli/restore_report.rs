//! Prints what a restore or a pull did.

use std::collections::BTreeMap;
use std::path::Path;

use crate::cli::print;
use crate::error::Result;
use crate::model::{RelPath, ToolCall};
use crate::restore::repair::{LineDamage, LineRepair, RepairedFile};
use crate::restore::{FileAction, FilePlan, RestoreReport};

/// Maximum length of the input of a tool call, in bytes.
const MAX_INPUT_LEN: usize = 200;

/// What a restore did as a whole. Only a dry run reports conflicts; a restore fails.
fn headline(report: &RestoreReport, root: &Path) -> String {
    let conflicts = report.count(FileAction::Conflict);
    let verb = match report.dry_run {
        true if conflicts > 0 => "would not restore",
        true => "would restore",
        false => "restored",
    };
    // A session from an environment variable has no entries.
    let entry = match report.seq {
        0 => String::new(),
        seq => format!(" at entry {seq}"),
    };
    let target = format!(
        "{verb} {}{entry} to {}",
        print::clean(&report.session),
        root.display()
    );
    if conflicts > 0 {
        let conflicts = print::plural(conflicts, "conflict", "conflicts");
        return format!("{target}: {conflicts}");
    }
    let moved = report.files.iter().filter(|file| file.is_only_moved());
    let moved = moved.count();
    let mut parts = vec![format!(
        "{} written ({})",
        print::plural(report.written(), "file", "files"),
        print::bytes(report.bytes)
    )];
    if moved > 0 {
        parts.push(format!("{moved} moved"));
    }
    parts.push(match report.count(FileAction::Keep) - moved {
        0 => "0 unchanged".to_owned(),
        count => format!(
            "{count} unchanged ({})",
            print::bytes(report.unchanged_bytes())
        ),
    });
    format!("{target}: {}", parts.join(", "))
}

/// Prints what would be done with a file.
fn print_planned(file: &FilePlan) -> Result<()> {
    let action = match file.is_only_moved() {
        true => "move".to_owned(),
        false => format!("{:?}", file.action).to_lowercase(),
    };
    let from = match file.is_only_moved() {
        true => format!("{} → ", print::clean(file.local_path.as_str())),
        false => String::new(),
    };
    print::line(format_args!(
        "  {action:<10} {:>10}  {from}{}",
        print::bytes(file.bytes),
        print::clean(file.path.as_str())
    ))
}

/// Prints a restored session.
pub fn print_restored(report: &RestoreReport, root: &Path) -> Result<()> {
    print::line(headline(report, root))?;
    // A session from an environment variable has no log.
    if report.count(FileAction::Keep) > 0 && report.seq > 0 {
        let lag = match report.lag_bytes {
            0 => String::new(),
            bytes => format!(
                "; {} of local files are not in the log yet",
                print::bytes(bytes)
            ),
        };
        print::line(format_args!(
            "  the log holds {} ({}){lag}",
            print::plural(report.log_files(), "file", "files"),
            print::bytes(report.log_bytes)
        ))?;
    }
    if report.dry_run {
        report.files.iter().try_for_each(print_planned)?;
    }
    if report.count(FileAction::Conflict) > 0 {
        return Ok(());
    }
    if report.partial_line_bytes() > 0 {
        print::line(format_args!(
            "  {} of a partial line were not restored; run \"sessiond pull {}\" to fetch them",
            print::bytes(report.partial_line_bytes()),
            print::clean(&report.session)
        ))?;
    }
    print_rewound(&report.rewound_bytes, &report.rewound_calls)?;
    print_repaired(&report.repaired)?;
    for file in &report.files {
        let reason = match file.action {
            FileAction::Superseded => "not restored, replaced by a newer file",
            FileAction::Aside => {
                "moved to .sessiond/aside, because it is a second copy of the session"
            }
            _ => continue,
        };
        print::line(format_args!(
            "  {reason}: {}",
            print::clean(file.path.as_str())
        ))?;
    }
    if !report.session.starts_with('@') {
        print::line(format_args!(
            "resume with session ID {}",
            print::clean(&report.session)
        ))?;
    }
    Ok(())
}

/// Prints the bytes and tool calls after the restored point.
pub fn print_rewound(bytes: &BTreeMap<RelPath, u64>, calls: &[ToolCall]) -> Result<()> {
    for (path, bytes) in bytes {
        print::line(format_args!(
            "  {} after that point stay in the log: {}",
            print::bytes(*bytes),
            print::clean(path.as_str())
        ))?;
    }
    for call in calls {
        let since = call
            .started
            .map_or_else(String::new, |at| format!(" since {}", print::time(at)));
        print::line(format_args!(
            "  pending tool call{since}: {} {}",
            print::clean(&call.name),
            print::clean(&print::one_line(&call.input, MAX_INPUT_LEN))
        ))?;
    }
    Ok(())
}

/// Prints the repaired lines.
pub fn print_repaired(repaired: &[RepairedFile]) -> Result<()> {
    for file in repaired {
        let path = print::clean(file.path.as_str());
        print::line(format_args!("  repaired {path}:"))?;
        for repair in &file.changes {
            let LineRepair {
                line,
                offset,
                damage,
                bytes,
            } = repair;
            let count = print::plural(*bytes, "byte", "bytes");
            let change = match damage {
                LineDamage::ZeroBytes => {
                    format!(
                        "removed {}",
                        print::plural(*bytes, "zero byte", "zero bytes")
                    )
                }
                LineDamage::TornRecord => format!("removed {count} of a torn record"),
                LineDamage::JoinedRecords => format!("split {} records into lines", bytes + 1),
                LineDamage::InvalidLine => format!("removed an invalid line ({count})"),
                LineDamage::MissingNewline => "added the newline at the end".to_owned(),
                LineDamage::PartialLine => format!("removed {count} of a partial line"),
            };
            print::line(format_args!("    line {line}, byte {offset}: {change}"))?;
        }
        if let Some(original) = &file.original {
            let original = print::clean(original.as_str());
            print::line(format_args!("    original: {original}"))?;
        }
    }
    Ok(())
}
