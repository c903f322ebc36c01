//! What a restore must have written, and what continuing from there must look like.

use sessiond::codec::entry::{decode, encode};
use sessiond::model::{LogId, keys};
use sessiond::restore::{FileAction, FilePlan, RestoreReport};

use super::bucket::{Objects, Stored};
use super::history::{Files, in_project, whole_lines};

fn cut(path: &str, bytes: &[u8]) -> usize {
    if path.ends_with(".jsonl") {
        whole_lines(bytes)
    } else {
        bytes.len()
    }
}

/// The files in place are what the log holds at the restored entry, up to the last whole line.
pub fn is_the_log(
    report: &RestoreReport,
    held: &Files,
    before: &Files,
    placed: &Files,
) -> Result<(), String> {
    for (path, bytes) in held {
        // Where the agent has moved the session meanwhile, it is there.
        let moved = |plan: &&FilePlan| {
            in_project(path).is_some() && in_project(plan.path.as_str()) == in_project(path)
        };
        let exact = report.files.iter().find(|plan| plan.path.as_str() == path);
        let Some(plan) = exact.or_else(|| report.files.iter().find(moved)) else {
            // Our own volume, of which nothing needed to be read.
            if report.objects == 0 {
                continue;
            }
            return Err(format!("a restore says nothing of {path}"));
        };
        let whole = &bytes[..cut(path, bytes)];
        let path = plan.path.as_str();
        let there = placed.get(path);
        let right = match plan.action {
            FileAction::Write | FileAction::Replace => there.is_some_and(|there| there == whole),
            // An earlier attempt of the same restore may have put it there.
            FileAction::Keep => {
                there.is_some_and(|there| there == whole || Some(there) == before.get(path))
            }
            FileAction::Superseded => true,
            FileAction::Aside => there.is_none(),
            FileAction::Conflict => false,
        };
        if !right {
            return Err(format!(
                "a restore put another {path} in place than the log holds ({:?})",
                plan.action
            ));
        }
    }
    Ok(())
}

/// Restore plus continue is never having died: what was there is there, and the transcript goes on behind it.
pub fn goes_on(before: &Files, now: &Files) -> Result<(), String> {
    for (path, bytes) in before {
        let kept = now
            .get(path)
            .is_some_and(|now| now.starts_with(&bytes[..cut(path, bytes)]));
        if !kept {
            return Err(format!(
                "{path} is not what it was before a restore and two more lines"
            ));
        }
    }
    Ok(())
}

/// After a restore only what is new is shipped, whatever the size of the session.
pub fn only_what_is_new(placed: &Files, now: &Files, shipped: u64) -> Result<(), String> {
    let size = |files: &Files| files.values().map(|bytes| bytes.len() as u64).sum::<u64>();
    let new = size(now) - size(placed);
    if shipped == new {
        Ok(())
    } else {
        Err(format!(
            "{new} bytes are new after a restore, and {shipped} were shipped"
        ))
    }
}

/// The bucket with one byte of the last entry changed, and everything but the file's digest in order.
pub fn rotten(objects: &Objects, id: &LogId) -> Option<Objects> {
    let directory = keys::entries_dir(id);
    let (key, stored) = objects
        .iter()
        .rfind(|(key, _)| key.starts_with(&directory))?;
    let entry = decode(key, &stored.bytes).ok()?;
    // What another object stands for is not read.
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
    let mut rotten = objects.clone();
    rotten.insert(
        key.clone(),
        Stored {
            bytes,
            ..stored.clone()
        },
    );
    Some(rotten)
}

/// What files are in a session that begins with another's.
pub fn under_another_id(files: &Files, from: &LogId, to: &LogId) -> Files {
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
