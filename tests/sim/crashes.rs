//! A crash before and after every step of every process of a story in which a daemon streams, another machine takes the
//! session over, and the first one finds out.

use super::agent::Which;
use super::run::run;
use super::schedule::{Action, Mix, Schedule};

static STORE: Mix = Mix { name: "every step", lax: false, machines: 2, faults: &[] };
static DATABASE: Mix = Mix { name: "every step, database", lax: true, machines: 2, faults: &[] };

/// The processes of the story: the first daemon, the restore elsewhere, and the daemon behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Daemon,
    Restore,
    Successor,
}

/// The story, in which one process ends at one of its steps. What ended is started again.
fn story(victim: Victim, steps: u64, after: bool) -> Vec<Action> {
    let transcript = |on| Action::Append { on, which: Which::Transcript, lines: 2 };
    let crash = |of, on| (of == victim).then_some(Action::CrashIn { on, steps, after });
    let mut actions = Vec::new();
    let mut then = |more: Vec<Action>, starts: &[usize]| {
        actions.extend(more);
        actions.push(Action::Advance { millis: 300 });
        actions.extend(starts.iter().map(|on| Action::Start { on: *on }));
    };
    then(crash(Victim::Daemon, 0).into_iter().collect(), &[0]);
    for round in 0..3 {
        then(vec![transcript(0), Action::Flush { on: 0 }], &[0]);
        then(vec![Action::Tool { on: 0 }, Action::Side { on: 0, in_place: false }], &[0]);
        then(vec![Action::Append { on: 0, which: Which::SubAgent, lines: round }, Action::Flush { on: 0 }], &[0]);
    }
    let mut take_over: Vec<Action> = crash(Victim::Restore, 1).into_iter().collect();
    take_over.push(Action::Restore { on: 1, wipe: false });
    then(take_over, &[0]);
    then(crash(Victim::Successor, 1).into_iter().collect(), &[0, 1]);
    for _ in 0..3 {
        then(vec![transcript(1), Action::Flush { on: 1 }, transcript(0), Action::Flush { on: 0 }], &[0, 1]);
    }
    then(vec![Action::Finish { on: 0 }, Action::Finish { on: 1 }], &[]);
    actions
}

#[test]
fn a_crash_before_and_after_every_step_loses_nothing() {
    let mut runs = 0;
    for mix in [&STORE, &DATABASE] {
        for victim in [Victim::Daemon, Victim::Restore, Victim::Successor] {
            let mut steps = 1;
            loop {
                let mut crashed = false;
                for after in [false, true] {
                    let schedule = Schedule { seed: steps, mix, actions: story(victim, steps, after) };
                    let (done, _) = run(&schedule, false);
                    let outcome = done.unwrap_or_else(|violation| {
                        let (_, trace) = run(&schedule, true);
                        panic!("{} {victim:?} step {steps} after {after}: {}\n{}", mix.name, violation.what, trace.join("\n"))
                    });
                    crashed |= outcome.crashes > 0;
                    runs += 1;
                }
                if !crashed {
                    break;
                }
                steps += 1;
            }
            assert!(steps > 10, "{} {victim:?} has only {steps} steps", mix.name);
            println!("{} {victim:?}: {steps} steps", mix.name);
        }
    }
    println!("{runs} runs");
}
