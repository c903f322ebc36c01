//! A crash before and after every step of every process in one scenario: a daemon streams, another
//! machine takes over, and the first one detects it.

use super::agent::FileChoice;
use super::run::run;
use super::schedule::{Action, Mix, Schedule};

static STORE: Mix = Mix {
    name: "every step",
    ignores_conditions: false,
    machines: 2,
    faults: &[],
};
static DATABASE: Mix = Mix {
    name: "every step, database",
    ignores_conditions: true,
    machines: 2,
    faults: &[],
};

/// The processes of the scenario: the first daemon, the restore on the other machine, and the
/// daemon there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Daemon,
    Restore,
    Successor,
}

/// The scenario, in which one process crashes at one of its steps. A crashed process is started
/// again.
fn scenario(victim: Victim, steps: u64, after: bool) -> Vec<Action> {
    let transcript = |on| Action::Append {
        on,
        which: FileChoice::Transcript,
        lines: 2,
    };
    let crash = |of, on| (of == victim).then_some(Action::CrashIn { on, steps, after });
    let mut actions = Vec::new();
    let mut then = |more: Vec<Action>, starts: &[usize]| {
        actions.extend(more);
        actions.push(Action::Advance { millis: 300 });
        actions.extend(starts.iter().map(|on| Action::Start { on: *on }));
    };
    then(crash(Victim::Daemon, 0).into_iter().collect(), &[0]);
    for round in 0..2 {
        then(vec![transcript(0), Action::Flush { on: 0 }], &[0]);
        then(
            vec![
                Action::Tool { on: 0 },
                Action::Side {
                    on: 0,
                    in_place: false,
                },
            ],
            &[0],
        );
        then(
            vec![
                Action::Append {
                    on: 0,
                    which: FileChoice::SubAgent,
                    lines: round,
                },
                Action::Flush { on: 0 },
            ],
            &[0],
        );
    }
    let mut take_over: Vec<Action> = crash(Victim::Restore, 1).into_iter().collect();
    take_over.push(Action::Restore { on: 1, wipe: false });
    then(take_over, &[0]);
    then(crash(Victim::Successor, 1).into_iter().collect(), &[0, 1]);
    for _ in 0..2 {
        then(
            vec![
                transcript(1),
                Action::Flush { on: 1 },
                transcript(0),
                Action::Flush { on: 0 },
            ],
            &[0, 1],
        );
    }
    then(
        vec![Action::Finish { on: 0 }, Action::Finish { on: 1 }],
        &[],
    );
    actions
}

/// Runs the scenario with a crash at each step of one process. Returns the number of steps.
fn every_step(mix: &'static Mix, victim: Victim) -> u64 {
    for steps in 1.. {
        let crashed = [false, true].map(|after| {
            let schedule = Schedule {
                seed: steps,
                mix,
                actions: scenario(victim, steps, after),
            };
            let outcome = run(&schedule, false).0.unwrap_or_else(|violation| {
                let (_, trace) = run(&schedule, true);
                panic!(
                    "{} {victim:?} step {steps} after {after}: {}\n{}",
                    mix.name,
                    violation.what,
                    trace.join("\n")
                )
            });
            outcome.crashes > 0
        });
        if crashed == [false, false] {
            return steps;
        }
    }
    0
}

#[test]
fn a_crash_before_and_after_every_step_loses_nothing() {
    std::thread::scope(|scope| {
        for mix in [&STORE, &DATABASE] {
            scope.spawn(move || {
                for victim in [Victim::Daemon, Victim::Restore, Victim::Successor] {
                    let steps = every_step(mix, victim);
                    assert!(steps > 10, "{} {victim:?} has only {steps} steps", mix.name);
                    println!("{} {victim:?}: {steps} steps", mix.name);
                }
            });
        }
    });
}
