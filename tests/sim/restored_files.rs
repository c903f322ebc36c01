//! What a restore must have written, and what continuing from there must look like.

use sessiond::codec::entry::{decode, encode};
use sessiond::model::{LogId, keys};
use sessiond::restore::{FileAction, FilePlan, RestoreReport};

use super::bucket::{Objects, Stored};
use super::history::{Files, complete_lines_len, in_project};

fn cut(path: &str, bytes: &[u8]) -> usize {
    if path.ends_with(".jsonl") {
        complete_lines_len(bytes)
    } else {
        bytes.len()
    }
}

/// Checks that the files on disk are those of the log at the restored entry, up to the last
/// complete line.
pub fn check_restored_files(
    report: &RestoreReport,
    held: &Files,
    before: &Files,
    placed: &Files,
) -> Result<(), String> {
    for (path, bytes) in held {
        // The agent may have moved the session to another project since.
        let moved = |plan: &&FilePlan| {
            in_project(path).is_some() && in_project(plan.path.as_str()) == in_project(path)
        };
        let exact = report.files.iter().find(|plan| plan.path.as_str() == path);
        let Some(plan) = exact.or_else(|| report.files.iter().find(moved)) else {
            // The writer's own volume: nothing had to be read.
            if report.objects == 0 {
                continue;
            }
            return Err(format!("the restore report lacks {path}"));
        };
        let complete = &bytes[..cut(path, bytes)];
        let path = plan.path.as_str();
        let found = placed.get(path);
        let is_correct = match plan.action {
            FileAction::Write | FileAction::Replace => found.is_some_and(|found| found == complete),
            // An earlier attempt of the same restore may have written it.
            FileAction::Keep => {
                found.is_some_and(|found| found == complete || Some(found) == before.get(path))
            }
            FileAction::Superseded => true,
            FileAction::Aside => found.is_none(),
            FileAction::Conflict => false,
        };
        if !is_correct {
            return Err(format!(
                "a restore wrote another {path} than the log has ({:?})",
                plan.action
            ));
        }
    }
    Ok(())
}

/// Checks that every file of the log is still a prefix of the current one after a restore and more
/// lines.
pub fn check_continuation(before: &Files, now: &Files) -> Result<(), String> {
    for (path, bytes) in before {
        let is_kept = now
            .get(path)
            .is_some_and(|now| now.starts_with(&bytes[..cut(path, bytes)]));
        if !is_kept {
            return Err(format!(
                "{path} is not what it was before a restore and two more lines"
            ));
        }
    }
    Ok(())
}

/// Checks that only new bytes are uploaded after a restore, whatever the size of the session.
pub fn check_uploaded_bytes(placed: &Files, now: &Files, raw_bytes: u64) -> Result<(), String> {
    let size = |files: &Files| files.values().map(|bytes| bytes.len() as u64).sum::<u64>();
    let new = size(now) - size(placed);
    if raw_bytes == new {
        Ok(())
    } else {
        Err(format!(
            "{new} bytes are new after a restore, and {raw_bytes} were uploaded"
        ))
    }
}

/// Returns the bucket with one changed byte in the last entry. Only the digest of the file is
/// wrong.
pub fn with_damaged_entry(objects: &Objects, id: &LogId) -> Option<Objects> {
    let directory = keys::entries_dir(id);
    let (key, stored) = objects
        .iter()
        .rfind(|(key, _)| key.starts_with(&directory))?;
    let entry = decode(key, &stored.bytes).ok()?;
    // An entry that a compacted segment covers is not read.
    let ends = |key: &String| {
        keys::merge_range(key)
            .map(|(_, to)| to)
            .or_else(|| keys::snapshot_seq(key))
    };
    if objects
        .keys()
        .filter_map(ends)
        .any(|to| to >= entry.header.seq)
    {
        return None;
    }
    let mut body = entry.body.clone();
    *body.first_mut()? ^= 1;
    let bytes = encode(entry.header, &[body]).ok()?.bytes;
    let mut damaged = objects.clone();
    damaged.insert(
        key.clone(),
        Stored {
            bytes,
            ..stored.clone()
        },
    );
    Some(damaged)
}

/// Returns the files of a fork: the session ID is replaced.
pub fn rename_session(files: &Files, from: &LogId, to: &LogId) -> Files {
    let (from, to) = (from.name.to_string(), to.name.to_string());
    let file = |(path, bytes): (&String, &Vec<u8>)| {
        let bytes = match path.ends_with(".jsonl") || path.ends_with(".json") {
            true => String::from_utf8_lossy(bytes)
                .replace(&from, &to)
                .into_bytes(),
            false => bytes.clone(),
        };
        (path.replace(&from, &to), bytes)
    };
    files.iter().map(file).collect()
}
