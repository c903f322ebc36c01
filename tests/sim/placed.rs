//! What a restore must have put in place, and what going on from there must look like.

use sessiond::restore::Report;
use sessiond::restore::place::Action;

use super::history::{Files, whole_lines};

/// A line is a few hundred bytes at most once it is stored, unless it is a long one, which deflates well.
const MOST_FOR_A_LINE: u64 = 2_000;

fn cut(path: &str, bytes: &[u8]) -> usize {
    if path.ends_with(".jsonl") { whole_lines(bytes) } else { bytes.len() }
}

/// The files in place are what the log holds at the restored entry, up to the last whole line.
pub fn is_the_log(report: &Report, held: &Files, before: &Files, placed: &Files) -> Result<(), String> {
    for (path, bytes) in held {
        let Some(plan) = report.files.iter().find(|plan| plan.path.as_str() == path) else {
            // Our own volume, of which nothing needed to be read.
            if report.objects == 0 {
                continue;
            }
            return Err(format!("a restore says nothing of {path}"));
        };
        let whole = &bytes[..cut(path, bytes)];
        let there = placed.get(path);
        let right = match plan.action {
            Action::Write | Action::Replace => there.is_some_and(|there| there == whole),
            // An earlier attempt of the same restore may have put it there.
            Action::Keep => there.is_some_and(|there| there == whole || Some(there) == before.get(path)),
            Action::Superseded => true,
            Action::Conflict => false,
        };
        if !right {
            return Err(format!("a restore put another {path} in place than the log holds ({:?})", plan.action));
        }
    }
    Ok(())
}

/// Restore plus continue is never having died: what was there is there, and the transcript goes on behind it.
pub fn goes_on(before: &Files, now: &Files) -> Result<(), String> {
    for (path, bytes) in before {
        let kept = now.get(path).is_some_and(|now| now.starts_with(&bytes[..cut(path, bytes)]));
        if !kept {
            return Err(format!("{path} is not what it was before a restore and two more lines"));
        }
    }
    Ok(())
}

/// One more line costs one small object, whatever the size of the session.
pub fn cost_of_a_line(bytes: u64) -> Result<(), String> {
    if bytes > MOST_FOR_A_LINE { Err(format!("one more line took {bytes} bytes of upload")) } else { Ok(()) }
}
