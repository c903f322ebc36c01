//! The agent's directory: its owner, the files that are stored, and problems for the agent.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::{DoctorReport, Grade};
use crate::agent::{FileClass, Profile};
use crate::capture::scan::{DirectoryScan, scan};
use crate::cli::print;
use crate::model::{FileKind, RelPath};
use crate::sys::{Directory, ItemKind, STATE_DIR};
use crate::wire::Parts;

/// The check warns this long before the agent deletes a session.
const WARNING_PERIOD: Duration = Duration::from_secs(3 * 24 * 60 * 60);

/// Maximum number of file names in a list.
const MAX_NAMES: usize = 12;

/// Checks the directory.
pub fn check(parts: &Parts, report: &mut DoctorReport) {
    let root = match parts.root() {
        Ok(root) => root,
        Err(error) => return report.fail("directory", &error),
    };
    let Some(owner) = check_root(root, report) else {
        return;
    };
    let Ok(disk) = parts.directory() else { return };
    match scan(&*disk, &*parts.profile, None) {
        Err(error) => report.fail("directory", &error),
        Ok(scan) => {
            report_scan(root, &scan, report);
            check_owners(root, owner, &scan, report);
            check_duplicates(&*parts.profile, &scan, report);
            check_retention(parts, &*disk, &scan, report);
        }
    }
    if parts.mirror.is_none() {
        list_files(&*parts.profile, &*disk, report);
    }
    check_watches(parts, &*disk, report);
}

/// Checks that the directory exists and that sessiond can write to it. Returns its owner; none if
/// there is no directory.
fn check_root(root: &Path, report: &mut DoctorReport) -> Option<u32> {
    if root.is_symlink() && !root.exists() {
        let text = format!("{} is a dangling symbolic link", root.display());
        report.add(
            "directory",
            Grade::Fail,
            text,
            Some("create its target, or use --root DIR"),
        );
        return None;
    }
    let Ok(found) = std::fs::metadata(root) else {
        report.add(
            "directory",
            Grade::Warn,
            format!("{} does not exist yet", root.display()),
            Some("start the agent or the daemon to create it, or use --root DIR for another directory"),
        );
        return None;
    };
    let me = rustix::process::geteuid();
    if !me.is_root() && found.uid() != me.as_raw() {
        let text = format!(
            "{} belongs to user {}, but sessiond runs as user {}",
            root.display(),
            found.uid(),
            me.as_raw()
        );
        report.add(
            "directory",
            Grade::Fail,
            text,
            Some("run sessiond as the agent's user"),
        );
    }
    if let Err(cause) = rustix::fs::access(root, rustix::fs::Access::WRITE_OK) {
        let text = format!("{} is not writable: {cause}", root.display());
        report.add(
            "directory",
            Grade::Fail,
            text,
            Some("fix its mount or permissions: sessiond stores its state in it"),
        );
    }
    Some(found.uid())
}

/// Reports how much is stored, and what is not.
fn report_scan(root: &Path, scan: &DirectoryScan, report: &mut DoctorReport) {
    let sessions = scan.logs.keys().filter(|name| !name.is_project()).count();
    let files: usize = scan.logs.values().map(Vec::len).sum();
    let all = || scan.logs.values().flatten();
    let bytes: u64 = all().map(|file| file.stat.size).sum();
    let transcripts = all().filter(|file| file.kind == FileKind::Append).count();
    let text = format!(
        "{}: {} in {} ({}), {}",
        root.display(),
        print::plural(sessions, "session", "sessions"),
        print::plural(files, "file", "files"),
        print::plural(transcripts, "transcript", "transcripts"),
        print::bytes(bytes)
    );
    report.ok("directory", text);
    for skipped in &scan.skipped {
        report.add(
            "directory",
            Grade::Warn,
            format!("not stored: {skipped}"),
            None,
        );
    }
}

/// An agent that does not own its transcript resumes the session, but silently saves nothing.
fn check_owners(root: &Path, owner: u32, scan: &DirectoryScan, report: &mut DoctorReport) {
    let all = || scan.logs.values().flatten().map(|file| &file.path);
    let foreign: Vec<&RelPath> = all()
        .filter(|path| {
            std::fs::symlink_metadata(path.below(root)).is_ok_and(|found| found.uid() != owner)
        })
        .collect();
    if let Some(first) = foreign.first() {
        let text = format!(
            "{} not owned by user {owner}, the owner of the directory, such as {first}",
            print::plural(foreign.len(), "file is", "files are")
        );
        let hint = format!(
            "run \"chown -R {owner} {}\": the agent cannot write to files of other users",
            root.display()
        );
        report.add("owner", Grade::Fail, text, Some(&hint));
    }
    let unreadable: Vec<&RelPath> = all()
        .filter(|path| rustix::fs::access(path.below(root), rustix::fs::Access::READ_OK).is_err())
        .collect();
    if let Some(first) = unreadable.first() {
        let text = format!(
            "{} not readable, such as {first}",
            print::plural(unreadable.len(), "file is", "files are")
        );
        report.add(
            "owner",
            Grade::Fail,
            text,
            Some("run sessiond as the agent's user, or fix the permissions"),
        );
    }
}

/// Newer clients ignore a session whose transcript is in two directories; older clients use either.
fn check_duplicates(profile: &dyn Profile, scan: &DirectoryScan, report: &mut DoctorReport) {
    for (name, files) in &scan.logs {
        let mut places: BTreeMap<&str, Vec<&RelPath>> = BTreeMap::new();
        for file in files
            .iter()
            .filter(|file| profile.is_transcript(&file.path))
        {
            places.entry(file.path.name()).or_default().push(&file.path);
        }
        for (_, places) in places.into_iter().filter(|(_, places)| places.len() > 1) {
            let listed = places
                .iter()
                .map(|path| path.as_str())
                .collect::<Vec<_>>()
                .join(" and ");
            let text = format!(
                "session {name} is in {} directories: {listed}",
                places.len()
            );
            report.add(
                "directory",
                Grade::Fail,
                text,
                Some("move the older transcript to another directory: the agent ignores a session that it finds twice"),
            );
        }
    }
}

/// The agent's own retention. The store keeps its sessions; sessions that are only local are lost.
fn check_retention(
    parts: &Parts,
    directory: &dyn Directory,
    scan: &DirectoryScan,
    report: &mut DoctorReport,
) {
    let settings = "settings.json"
        .parse()
        .ok()
        .and_then(|path| directory.read(&path).ok().flatten());
    let settings: Value = settings
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let Some(after) = parts.profile.retention(&settings) else {
        return;
    };
    let now = parts.logs.clock.now().as_nanosecond();
    let soon = after.saturating_sub(WARNING_PERIOD).as_nanos();
    let old = |files: &&Vec<crate::capture::scan::ScannedFile>| {
        let last = files
            .iter()
            .filter(|file| parts.profile.is_transcript(&file.path))
            .map(|file| i128::from(file.stat.mtime_ns))
            .max();
        last.is_some_and(|last| u128::try_from(now - last).is_ok_and(|age| age > soon))
    };
    let days = after.as_secs() / 86_400;
    match scan.logs.values().filter(old).count() {
        0 => {}
        sessions => report.add(
            "retention",
            Grade::Warn,
            format!(
                "the agent deletes {} within {} days: it keeps sessions for {}",
                print::plural(sessions, "local session", "local sessions"),
                WARNING_PERIOD.as_secs() / 86_400,
                print::plural(days, "day", "days")
            ),
            Some("set cleanupPeriodDays or sessionRetention in the agent's settings.json to keep local files longer; stored sessions can be restored"),
        ),
    }
}

/// Lists which top-level files and directories are stored and which are ignored.
fn list_files(profile: &dyn Profile, directory: &dyn Directory, report: &mut DoctorReport) {
    let (mut stored, mut ignored) = (Vec::new(), Vec::new());
    for item in directory.list(None).unwrap_or_default() {
        let Ok(path) = item.name.parse::<RelPath>() else {
            continue;
        };
        let is_stored = match item.kind {
            ItemKind::Directory => profile.is_scanned(&path),
            _ => profile.classify(&path) != FileClass::Ignored,
        };
        match (is_stored, item.name.as_str()) {
            (_, STATE_DIR) => {}
            (true, name) => stored.push(print::clean(name)),
            (false, name) => ignored.push(print::clean(name)),
        }
    }
    let list = |mut names: Vec<String>| {
        let more = names.len().saturating_sub(MAX_NAMES);
        names.truncate(MAX_NAMES);
        let listed = if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(", ")
        };
        if more > 0 {
            format!("{listed} and {more} more")
        } else {
            listed
        }
    };
    report.ok(
        "files",
        format!("stored: {}; ignored: {}", list(stored), list(ignored)),
    );
}

/// Each directory needs a watch. If the limit is too low, sessiond scans instead.
fn check_watches(parts: &Parts, directory: &dyn Directory, report: &mut DoctorReport) {
    let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_user_watches")
        .ok()
        .and_then(|text| text.trim().parse::<usize>().ok());
    let mut open: Vec<Option<RelPath>> = vec![None];
    let mut directories: usize = 0;
    while let Some(at) = open.pop() {
        directories += 1;
        for item in directory.list(at.as_ref()).unwrap_or_default() {
            let path = at
                .as_ref()
                .map_or_else(|| item.name.parse(), |at| at.join(&item.name));
            if let (ItemKind::Directory, Ok(path)) = (item.kind, path)
                && parts.profile.is_scanned(&path)
            {
                open.push(Some(path));
            }
        }
    }
    let watched = print::plural(directories, "directory", "directories");
    match limit {
        Some(limit) if directories * 2 > limit => {
            report.add(
                "watches",
                Grade::Warn,
                format!("{watched} to watch, but the inotify limit is {limit}"),
                Some(
                    "run \"sysctl fs.inotify.max_user_watches=524288\"; until then sessiond only scans",
                ),
            );
        }
        _ => report.ok("watches", format!("{watched} to watch")),
    }
}
