//! The directory that is kept: whose it is, what in it is kept and what not, and what an agent would stumble over.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::{Findings, Grade};
use crate::agent::{FileClass, Profile};
use crate::capture::scan::{DirectoryScan, survey};
use crate::cli::print;
use crate::model::{FileKind, RelPath};
use crate::sys::{Directory, ItemKind, STATE_DIR};
use crate::wire::Parts;

/// So long before an agent deletes a session it is told.
const SOON: Duration = Duration::from_secs(3 * 24 * 60 * 60);

/// So many names are listed.
const MOST_NAMES: usize = 12;

/// Looks at it.
pub fn look(parts: &Parts, findings: &mut Findings) {
    let root = match parts.root() {
        Ok(root) => root,
        Err(error) => return findings.wrong("directory", &error),
    };
    if root.is_symlink() && !root.exists() {
        let text = format!("{} is a link to nowhere", root.display());
        return findings.add(
            "directory",
            Grade::Wrong,
            text,
            Some("make what it points to, or give --root"),
        );
    }
    let Ok(found) = std::fs::metadata(root) else {
        return findings.add(
            "directory",
            Grade::Warn,
            format!("{} does not exist yet", root.display()),
            Some("it is made when the agent, a restore or the daemon starts; --root names another"),
        );
    };
    let me = rustix::process::geteuid();
    if !me.is_root() && found.uid() != me.as_raw() {
        let text = format!(
            "{} belongs to user {} and sessiond runs as {}",
            root.display(),
            found.uid(),
            me.as_raw()
        );
        findings.add(
            "directory",
            Grade::Wrong,
            text,
            Some("run sessiond as the agent's user"),
        );
    }
    if let Err(cause) = rustix::fs::access(root, rustix::fs::Access::WRITE_OK) {
        let text = format!("{} cannot be written: {cause}", root.display());
        findings.add(
            "directory",
            Grade::Wrong,
            text,
            Some("sessiond keeps its ledgers in it; mend its mount or permissions"),
        );
    }
    let Ok(disk) = parts.directory() else { return };
    match survey(&*disk, &*parts.profile, None) {
        Err(error) => findings.wrong("directory", &error),
        Ok(survey) => {
            let sessions = survey.logs.keys().filter(|name| !name.is_project()).count();
            let files: usize = survey.logs.values().map(Vec::len).sum();
            let bytes: u64 = survey
                .logs
                .values()
                .flatten()
                .map(|file| file.stat.size)
                .sum();
            let lines = survey
                .logs
                .values()
                .flatten()
                .filter(|file| file.kind == FileKind::Append)
                .count();
            let text = format!(
                "{}: {sessions} sessions in {files} files ({lines} transcripts), {}",
                root.display(),
                print::bytes(bytes)
            );
            findings.add("directory", Grade::Ok, text, None);
            for oddity in &survey.oddities {
                findings.add(
                    "directory",
                    Grade::Warn,
                    format!("not kept: {oddity}"),
                    None,
                );
            }
            owners(root, found.uid(), &survey, findings);
            twins(&*parts.profile, &survey, findings);
            sweep(parts, &*disk, &survey, findings);
        }
    }
    if parts.mirror.is_none() {
        kept(&*parts.profile, &*disk, findings);
    }
    watches(parts, &*disk, findings);
}

/// An agent that does not own its transcript resumes and then saves nothing, without a word.
fn owners(root: &Path, owner: u32, survey: &DirectoryScan, findings: &mut Findings) {
    let all = || survey.logs.values().flatten().map(|file| &file.path);
    let foreign: Vec<&RelPath> = all()
        .filter(|path| {
            std::fs::symlink_metadata(path.below(root)).is_ok_and(|found| found.uid() != owner)
        })
        .collect();
    if let Some(first) = foreign.first() {
        let text = format!(
            "{} files do not belong to the directory's owner (user {owner}), such as {first}",
            foreign.len()
        );
        findings.add(
            "owner",
            Grade::Wrong,
            text,
            Some("chown -R to the agent's user: with another owner the agent resumes and saves nothing"),
        );
    }
    let closed: Vec<&RelPath> = all()
        .filter(|path| rustix::fs::access(path.below(root), rustix::fs::Access::READ_OK).is_err())
        .collect();
    if let Some(first) = closed.first() {
        let text = format!("{} files cannot be read, such as {first}", closed.len());
        findings.add(
            "owner",
            Grade::Wrong,
            text,
            Some("run sessiond as the agent's user, or mend their permissions"),
        );
    }
}

/// A transcript that stands in two directories is not found by newer clients, and older ones take either.
fn twins(profile: &dyn Profile, survey: &DirectoryScan, findings: &mut Findings) {
    for (name, files) in &survey.logs {
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
                "session {name} stands in {} directories: {listed}",
                places.len()
            );
            findings.add(
                "directory",
                Grade::Wrong,
                text,
                Some("move the older one away: a client that finds two takes neither"),
            );
        }
    }
}

/// The agent's own clean-up. What is stored stays; what is only here would be gone.
fn sweep(
    parts: &Parts,
    directory: &dyn Directory,
    survey: &DirectoryScan,
    findings: &mut Findings,
) {
    let settings = "settings.json"
        .parse()
        .ok()
        .and_then(|path| directory.read(&path).ok().flatten());
    let settings: Value = settings
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let Some(after) = parts.profile.sweeps_after(&settings) else {
        return;
    };
    let now = parts.logs.clock.now().as_nanosecond();
    let soon = after.saturating_sub(SOON).as_nanos();
    let old = |files: &&Vec<crate::capture::scan::Seen>| {
        let last = files
            .iter()
            .filter(|file| parts.profile.is_transcript(&file.path))
            .map(|file| i128::from(file.stat.mtime_ns))
            .max();
        last.is_some_and(|last| u128::try_from(now - last).is_ok_and(|age| age > soon))
    };
    let days = after.as_secs() / 86_400;
    match survey.logs.values().filter(old).count() {
        0 => {}
        sessions => findings.add(
            "clean-up",
            Grade::Warn,
            format!("the agent deletes {sessions} sessions here within {} days: it keeps them for {days} days", SOON.as_secs() / 86_400),
            Some("what is stored stays and can be restored; cleanupPeriodDays or sessionRetention in the agent's settings.json keep them longer"),
        ),
    }
}

/// What of the directory is kept and what is left alone, by its top names.
fn kept(profile: &dyn Profile, directory: &dyn Directory, findings: &mut Findings) {
    let (mut kept, mut left) = (Vec::new(), Vec::new());
    for item in directory.list(None).unwrap_or_default() {
        let Ok(path) = item.name.parse::<RelPath>() else {
            continue;
        };
        let ours = match item.kind {
            ItemKind::Directory => profile.enter(&path),
            _ => profile.place(&path) != FileClass::Ignore,
        };
        match (ours, item.name.as_str()) {
            (_, STATE_DIR) => {}
            (true, name) => kept.push(print::clean(name)),
            (false, name) => left.push(print::clean(name)),
        }
    }
    let list = |mut names: Vec<String>| {
        let more = names.len().saturating_sub(MOST_NAMES);
        names.truncate(MOST_NAMES);
        let listed = if names.is_empty() {
            "nothing".to_owned()
        } else {
            names.join(", ")
        };
        if more > 0 {
            format!("{listed} and {more} more")
        } else {
            listed
        }
    };
    findings.add(
        "kept",
        Grade::Ok,
        format!("sessions in {}; left alone: {}", list(kept), list(left)),
        None,
    );
}

/// Each directory takes a watch; where the limit is too low, sessiond scans instead.
fn watches(parts: &Parts, directory: &dyn Directory, findings: &mut Findings) {
    let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_user_watches")
        .ok()
        .and_then(|text| text.trim().parse::<usize>().ok());
    let mut open: Vec<Option<RelPath>> = vec![None];
    let mut directories = 0;
    while let Some(at) = open.pop() {
        directories += 1;
        for item in directory.list(at.as_ref()).unwrap_or_default() {
            let path = at
                .as_ref()
                .map_or_else(|| item.name.parse(), |at| at.join(&item.name));
            if let (ItemKind::Directory, Ok(path)) = (item.kind, path)
                && parts.profile.enter(&path)
            {
                open.push(Some(path));
            }
        }
    }
    match limit {
        Some(limit) if directories * 2 > limit => {
            findings.add(
                "watches",
                Grade::Warn,
                format!("{directories} directories, and the limit of watches is {limit}"),
                Some("sysctl fs.inotify.max_user_watches=524288; until then sessiond scans"),
            );
        }
        _ => findings.add(
            "watches",
            Grade::Ok,
            format!("{directories} directories to watch"),
            None,
        ),
    }
}
