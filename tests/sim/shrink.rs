//! Shortens a failing schedule: omits actions while it still fails.

use super::run::{Violation, run};
use super::schedule::Schedule;

/// Maximum number of runs.
const MAX_RUNS: usize = 400;

/// Returns the actions that are needed for the schedule to fail, and how it fails then.
pub fn shrink(schedule: &Schedule, violation: Violation) -> (Vec<usize>, Violation) {
    let mut indices: Vec<usize> = (0..schedule.actions.len().min(violation.at + 1)).collect();
    let mut violation = violation;
    let mut runs = 0;
    let mut size = indices.len().div_ceil(2);
    while size > 0 {
        let mut from = 0;
        while from < indices.len() && runs < MAX_RUNS {
            let fewer: Vec<usize> = indices
                .iter()
                .enumerate()
                .filter(|(at, _)| *at < from || *at >= from + size)
                .map(|(_, indices)| *indices)
                .collect();
            runs += 1;
            match run(&schedule.with_actions(&fewer), false).0 {
                Err(found) => (indices, violation) = (fewer, found),
                Ok(_) => from += size,
            }
        }
        size /= 2;
    }
    (indices, violation)
}

/// Formats a failing seed with its shortest schedule and the command that replays it.
pub fn report(schedule: &Schedule, violation: Violation) -> String {
    let first = violation.what.clone();
    let (indices, violation) = shrink(schedule, violation);
    let short = schedule.with_actions(&indices);
    let actions: Vec<String> = short
        .actions
        .iter()
        .map(|action| format!("    {action:?}"))
        .collect();
    let numbers: Vec<String> = indices.iter().map(ToString::to_string).collect();
    format!(
        "seed {} ({}) fails: {first}\n  shortest: {}\n{}\n  replay: SESSIOND_SIM_SEED={} SESSIOND_SIM_KEEP={} cargo test --test sim one_seed -- --ignored --nocapture\n",
        schedule.seed,
        schedule.mix.name,
        violation.what,
        actions.join("\n"),
        schedule.seed,
        numbers.join(","),
    )
}
