//! Shortens a failing schedule: omits actions while it still fails.

use super::run::{Violation, run};
use super::schedule::Schedule;

/// So many runs are spent on it.
const MOST_RUNS: usize = 400;

/// The actions that are needed for the schedule to fail, and how it fails then.
pub fn shrink(schedule: &Schedule, violation: Violation) -> (Vec<usize>, Violation) {
    let mut kept: Vec<usize> = (0..schedule.actions.len().min(violation.at + 1)).collect();
    let mut violation = violation;
    let mut runs = 0;
    let mut size = kept.len().div_ceil(2);
    while size > 0 {
        let mut from = 0;
        while from < kept.len() && runs < MOST_RUNS {
            let fewer: Vec<usize> = kept
                .iter()
                .enumerate()
                .filter(|(at, _)| *at < from || *at >= from + size)
                .map(|(_, kept)| *kept)
                .collect();
            runs += 1;
            match run(&schedule.keeping(&fewer), false).0 {
                Err(found) => (kept, violation) = (fewer, found),
                Ok(_) => from += size,
            }
        }
        size /= 2;
    }
    (kept, violation)
}

/// What a person needs to see of a failing seed.
pub fn report(schedule: &Schedule, violation: Violation) -> String {
    let first = violation.what.clone();
    let (kept, violation) = shrink(schedule, violation);
    let short = schedule.keeping(&kept);
    let actions: Vec<String> = short
        .actions
        .iter()
        .map(|action| format!("    {action:?}"))
        .collect();
    let numbers: Vec<String> = kept.iter().map(ToString::to_string).collect();
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
