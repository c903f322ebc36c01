//! The actions of a run, generated from the seed before it begins, so that a failing run can be
//! shortened by omitting actions.
//!
//! Every kind of fault has seeds in which it occurs alone; other seeds combine all of them.

use super::agent::FileChoice;
use super::disk::Events;
use super::rng::SeededRng;
use super::world::FaultConditions;

/// One action. `on` is one of the machines. An action that is not possible there is skipped.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    // The agent.
    Append {
        on: usize,
        which: FileChoice,
        lines: u64,
    },
    BeginLine {
        on: usize,
        which: FileChoice,
    },
    Rewrite {
        on: usize,
        which: FileChoice,
        in_place: bool,
    },
    Truncate {
        on: usize,
        which: FileChoice,
        anywhere: bool,
    },
    FileMove {
        on: usize,
    },
    Tool {
        on: usize,
    },
    Side {
        on: usize,
        in_place: bool,
    },
    // sessiond.
    Start {
        on: usize,
    },
    Flush {
        on: usize,
    },
    Finish {
        on: usize,
    },
    Restore {
        on: usize,
        wipe: bool,
    },
    // Faults.
    Kill {
        on: usize,
    },
    CutPower {
        on: usize,
    },
    CrashIn {
        on: usize,
        steps: u64,
        after: bool,
    },
    Pause {
        on: usize,
    },
    Wake {
        on: usize,
    },
    LoseState {
        on: usize,
    },
    FullDisk {
        on: usize,
        full: bool,
    },
    ClockJump {
        on: usize,
        minutes: i64,
    },
    Watching {
        on: usize,
        events: Events,
    },
    FaultConditions(FaultConditions),
    Advance {
        millis: u64,
    },
    /// A maintenance process. It can crash at one of its steps, or hang until it is woken.
    Upkeep {
        task_kind: MaintenanceTask,
        ends: Option<(u64, bool)>,
        hangs: bool,
    },
    WakeUpkeep,
}

/// The task of a maintenance process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaintenanceTask {
    /// Merges a range of the acknowledged entries; the range is in percent.
    Merge {
        from: u64,
        to: u64,
    },
    /// Runs garbage collection; the history period and the TTL are in hours.
    Collect {
        history: u64,
        ttl: Option<u64>,
    },
    Remove,
    Undelete,
    /// Forks the session at its head.
    Fork,
    /// Creates a named checkpoint at the head.
    NameCheckpoint,
}

/// A family of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Before,
    LostReply,
    Late,
    TwentyPercent,
    Reads,
    Slow,
    Rewrites,
    Events,
    IndexDown,
    IndexOld,
    FullDisk,
    Crash,
    PowerCut,
    Pause,
    Clock,
    LostLedger,
    TakeOver,
    Upkeep,
}

/// A mix of faults. The seed selects the mix.
pub struct Mix {
    pub name: &'static str,
    /// The store ignores conditional creates, and the database fences.
    pub ignores_conditions: bool,
    pub machines: usize,
    pub faults: &'static [Fault],
}

const ALL: &[Fault] = &[
    Fault::Before,
    Fault::LostReply,
    Fault::Late,
    Fault::TwentyPercent,
    Fault::Reads,
    Fault::Slow,
    Fault::Rewrites,
    Fault::Events,
    Fault::IndexDown,
    Fault::IndexOld,
    Fault::FullDisk,
    Fault::Crash,
    Fault::PowerCut,
    Fault::Pause,
    Fault::Clock,
    Fault::LostLedger,
    Fault::TakeOver,
    Fault::Upkeep,
];

const fn mix(name: &'static str, machines: usize, faults: &'static [Fault]) -> Mix {
    Mix {
        name,
        ignores_conditions: false,
        machines,
        faults,
    }
}

const fn mix_without_fence(name: &'static str, machines: usize, faults: &'static [Fault]) -> Mix {
    Mix {
        name,
        ignores_conditions: true,
        machines,
        faults,
    }
}

pub const MIXES: &[Mix] = &[
    mix("calm", 1, &[]),
    mix("fails before", 1, &[Fault::Before]),
    mix("lost replies", 1, &[Fault::LostReply]),
    mix("late effects", 1, &[Fault::Late]),
    mix("twenty percent", 1, &[Fault::TwentyPercent]),
    mix("reads fail", 2, &[Fault::Reads]),
    mix("slow and reordered", 2, &[Fault::Slow]),
    mix("rewrites", 1, &[Fault::Rewrites]),
    mix("events", 1, &[Fault::Events]),
    mix("index", 1, &[Fault::IndexDown, Fault::IndexOld]),
    mix("full disk", 1, &[Fault::FullDisk]),
    mix("crashes", 1, &[Fault::Crash]),
    mix("power cuts", 1, &[Fault::PowerCut]),
    mix("pauses", 2, &[Fault::Pause, Fault::TakeOver]),
    mix("clocks", 2, &[Fault::Clock, Fault::TakeOver]),
    mix("lost ledgers", 2, &[Fault::LostLedger]),
    mix("two writers", 2, &[Fault::TakeOver]),
    mix("three writers", 3, &[Fault::TakeOver, Fault::Slow]),
    mix(
        "crashing writers",
        2,
        &[Fault::TakeOver, Fault::Crash, Fault::Late, Fault::LostReply],
    ),
    mix_without_fence("database", 1, &[Fault::LostReply, Fault::IndexDown]),
    mix_without_fence("database, writers", 3, &[Fault::TakeOver, Fault::Slow]),
    mix_without_fence(
        "database, crashes",
        2,
        &[Fault::TakeOver, Fault::Crash, Fault::LostReply],
    ),
    mix_without_fence(
        "database, late effects",
        2,
        &[Fault::TakeOver, Fault::Late, Fault::Pause],
    ),
    mix_without_fence(
        "database, crashes and late effects",
        2,
        &[Fault::Crash, Fault::Late],
    ),
    mix("upkeep", 1, &[Fault::Upkeep]),
    mix(
        "upkeep, writers",
        2,
        &[Fault::Upkeep, Fault::Upkeep, Fault::TakeOver],
    ),
    mix(
        "upkeep, crashes",
        2,
        &[Fault::Upkeep, Fault::Upkeep, Fault::Crash, Fault::TakeOver],
    ),
    mix(
        "upkeep, pauses",
        2,
        &[Fault::Upkeep, Fault::Upkeep, Fault::Pause, Fault::TakeOver],
    ),
    mix(
        "upkeep, bad network",
        2,
        &[
            Fault::Upkeep,
            Fault::Upkeep,
            Fault::TwentyPercent,
            Fault::Reads,
            Fault::Slow,
        ],
    ),
    mix(
        "upkeep, rewrites",
        1,
        &[
            Fault::Upkeep,
            Fault::Upkeep,
            Fault::Rewrites,
            Fault::LostLedger,
        ],
    ),
    mix_without_fence(
        "upkeep, database",
        2,
        &[Fault::Upkeep, Fault::Upkeep, Fault::TakeOver, Fault::Crash],
    ),
    mix("everything", 3, ALL),
    mix_without_fence("everything, database", 3, ALL),
];

/// The actions of a run.
pub struct Schedule {
    pub seed: u64,
    pub mix: &'static Mix,
    pub actions: Vec<Action>,
}

impl Schedule {
    /// The schedule of a seed.
    pub fn of(seed: u64) -> Schedule {
        let mix = &MIXES[(seed % MIXES.len() as u64) as usize];
        let mut rng = SeededRng::new(seed, 1);
        let mut actions = vec![Action::Start { on: 0 }];
        let length = 6 + rng.below(22);
        while (actions.len() as u64) < length {
            if !mix.faults.is_empty() && rng.percent(35) {
                let fault = mix.faults[rng.below(mix.faults.len() as u64) as usize];
                add_fault_actions(fault, mix, &mut actions, &mut rng);
            } else {
                let action = pick_action(mix, &mut rng);
                actions.push(action);
            }
        }
        Schedule { seed, mix, actions }
    }

    /// The same schedule with only the actions at these indices.
    pub fn with_actions(&self, indices: &[usize]) -> Schedule {
        let actions = indices
            .iter()
            .filter_map(|at| self.actions.get(*at).cloned())
            .collect();
        Schedule {
            seed: self.seed,
            mix: self.mix,
            actions,
        }
    }
}

fn pick_file(rng: &mut SeededRng) -> FileChoice {
    if rng.percent(75) {
        FileChoice::Transcript
    } else {
        FileChoice::SubAgent
    }
}

fn machine(mix: &Mix, rng: &mut SeededRng) -> usize {
    rng.below(mix.machines as u64) as usize
}

/// An action without a fault.
fn pick_action(mix: &Mix, rng: &mut SeededRng) -> Action {
    let on = machine(mix, rng);
    match rng.below(100) {
        0..30 => Action::Append {
            on,
            which: pick_file(rng),
            lines: 1 + rng.below(3),
        },
        30..38 => Action::BeginLine {
            on,
            which: pick_file(rng),
        },
        38..44 => Action::Tool { on },
        44..50 => Action::Side {
            on,
            in_place: rng.coin(),
        },
        50..68 => Action::Flush { on },
        68..84 => Action::Advance {
            millis: [5, 40, 300, 1_000, 20_000, 90_000][rng.below(6) as usize],
        },
        84..87 => Action::FileMove { on },
        87..90 => Action::Finish { on },
        90..93 => Action::Restore {
            on,
            wipe: rng.coin(),
        },
        _ => Action::Start { on },
    }
}

fn add_fault_actions(fault: Fault, mix: &Mix, actions: &mut Vec<Action>, rng: &mut SeededRng) {
    let on = machine(mix, rng);
    let share = [10, 30, 60, 100][rng.below(4) as usize];
    let calm = FaultConditions::default();
    let fault_conditions = |fault_conditions: FaultConditions, rng: &mut SeededRng| {
        Action::FaultConditions(if rng.percent(25) {
            FaultConditions::default()
        } else {
            fault_conditions
        })
    };
    let last = match fault {
        Fault::Before => fault_conditions(
            FaultConditions {
                before: share,
                ..calm
            },
            rng,
        ),
        Fault::LostReply => fault_conditions(
            FaultConditions {
                after: share,
                index: share / 3,
                ..calm
            },
            rng,
        ),
        Fault::Late => fault_conditions(
            FaultConditions {
                late: share,
                delay: 20,
                ..calm
            },
            rng,
        ),
        Fault::TwentyPercent => Action::FaultConditions(FaultConditions {
            before: 8,
            after: 7,
            late: 5,
            index: 10,
            ..calm
        }),
        Fault::Reads => fault_conditions(
            FaultConditions {
                reads: share,
                ..calm
            },
            rng,
        ),
        Fault::Slow => fault_conditions(
            FaultConditions {
                delay: [10, 200, 3_000, 40_000][rng.below(4) as usize],
                ..calm
            },
            rng,
        ),
        Fault::Rewrites if rng.coin() => Action::Rewrite {
            on,
            which: pick_file(rng),
            in_place: rng.coin(),
        },
        Fault::Rewrites => Action::Truncate {
            on,
            which: pick_file(rng),
            anywhere: rng.coin(),
        },
        Fault::Events => Action::Watching {
            on,
            events: [Events::All, Events::Missed, Events::Overflow, Events::Off]
                [rng.below(4) as usize],
        },
        Fault::IndexDown => fault_conditions(
            FaultConditions {
                index_down: rng.coin(),
                index: 30,
                ..calm
            },
            rng,
        ),
        Fault::IndexOld => fault_conditions(
            FaultConditions {
                index_old: true,
                ..calm
            },
            rng,
        ),
        Fault::FullDisk => Action::FullDisk {
            on,
            full: rng.percent(70),
        },
        Fault::Crash => match rng.below(3) {
            0 => Action::Kill { on },
            _ => Action::CrashIn {
                on,
                steps: 1 + rng.below(12),
                after: rng.coin(),
            },
        },
        Fault::PowerCut => Action::CutPower { on },
        // With garbage collection, mostly the sequence that tests its grace period.
        Fault::Pause
            if mix.faults.contains(&Fault::Upkeep) && mix.machines > 1 && rng.percent(60) =>
        {
            return add_pause_actions(actions, rng);
        }
        Fault::Pause if rng.coin() => Action::Pause { on },
        Fault::Pause => {
            actions.push(Action::Advance { millis: 3_600_000 });
            Action::Wake { on }
        }
        Fault::Clock => Action::ClockJump {
            on,
            minutes: rng.below(720) as i64 - 360,
        },
        Fault::LostLedger => {
            actions.push(Action::Kill { on });
            Action::LoseState { on }
        }
        Fault::Upkeep => return upkeep(mix, actions, rng),
        Fault::TakeOver => {
            actions.push(Action::Restore {
                on,
                wipe: rng.percent(70),
            });
            Action::Start { on }
        }
    };
    actions.push(last);
    // A crashed daemon is usually started again.
    if matches!(fault, Fault::Crash | Fault::PowerCut | Fault::LostLedger) && rng.percent(70) {
        actions.push(Action::Start { on });
    }
}

const HOUR: u64 = 3_600_000;

/// A writer hangs during a write. Another takes over the session and continues, and its entries are
/// merged and collected. Then the first writer wakes: before anything may be collected, or so late
/// that its seq may be free.
fn add_pause_actions(actions: &mut Vec<Action>, rng: &mut SeededRng) {
    let append = |on| Action::Append {
        on,
        which: FileChoice::Transcript,
        lines: 1,
    };
    let task_kind = |task_kind| Action::Upkeep {
        task_kind,
        ends: None,
        hangs: false,
    };
    actions.extend([
        Action::Start { on: 0 },
        append(0),
        Action::Flush { on: 0 },
        Action::Advance { millis: 1_000 },
    ]);
    actions.extend([
        Action::Pause { on: 0 },
        append(0),
        Action::Flush { on: 0 },
        Action::Advance { millis: 1_000 },
    ]);
    actions.extend([
        Action::Restore { on: 1, wipe: true },
        Action::Advance { millis: 1_000 },
        Action::Start { on: 1 },
    ]);
    for _ in 0..2 {
        actions.extend([
            append(1),
            Action::Flush { on: 1 },
            Action::Advance { millis: 1_000 },
        ]);
    }
    actions.extend([
        task_kind(MaintenanceTask::Merge { from: 0, to: 100 }),
        Action::Advance { millis: 1_000 },
        Action::Kill { on: 1 },
    ]);
    actions.push(Action::Advance {
        millis: [1, 25][rng.below(2) as usize] * HOUR,
    });
    actions.push(task_kind(MaintenanceTask::Collect {
        history: 0,
        ttl: None,
    }));
    actions.extend([
        Action::Advance { millis: 1_000 },
        Action::Wake { on: 0 },
        Action::Advance { millis: 20_000 },
    ]);
}

fn upkeep(mix: &Mix, actions: &mut Vec<Action>, rng: &mut SeededRng) {
    let merge = |rng: &mut SeededRng| {
        let from = if rng.coin() { 0 } else { rng.below(90) };
        MaintenanceTask::Merge {
            from,
            to: if rng.coin() {
                100
            } else {
                from + 10 + rng.below(90 - from.min(89))
            },
        }
    };
    let collect = |rng: &mut SeededRng| MaintenanceTask::Collect {
        history: [0, 1, 30][rng.below(3) as usize],
        ttl: rng.percent(20).then_some(20),
    };
    let process = |task_kind: MaintenanceTask, rng: &mut SeededRng| Action::Upkeep {
        task_kind,
        ends: rng.percent(15).then(|| (1 + rng.below(30), rng.coin())),
        hangs: rng.percent(10),
    };
    match rng.below(10) {
        0..3 => {
            let task_kind = merge(rng);
            actions.push(process(task_kind, rng));
        }
        // The usual order: compaction, and garbage collection a day later.
        3..7 => {
            for task_kind in [merge(rng), merge(rng)] {
                actions.push(process(task_kind, rng));
            }
            // A daemon that keeps running scans every 15 seconds, which is slow in the simulation
            // too.
            let stopped = 0..if rng.percent(70) { mix.machines } else { 0 };
            actions.extend(stopped.clone().map(|on| Action::Kill { on }));
            actions.push(Action::Advance {
                millis: [13, 25, 40][rng.below(3) as usize] * HOUR,
            });
            actions.extend(
                stopped
                    .filter(|_| rng.percent(80))
                    .map(|on| Action::Start { on }),
            );
            let task_kind = collect(rng);
            actions.push(process(task_kind, rng));
        }
        7 => {
            let task_kind = collect(rng);
            actions.push(process(task_kind, rng));
        }
        8 => {
            let task_kind = if rng.percent(70) {
                MaintenanceTask::Remove
            } else {
                MaintenanceTask::Undelete
            };
            actions.push(process(task_kind, rng));
        }
        9 if rng.percent(40) => {
            let task_kind = if rng.percent(60) {
                MaintenanceTask::Fork
            } else {
                MaintenanceTask::NameCheckpoint
            };
            actions.push(process(task_kind, rng));
        }
        _ => actions.push(if rng.coin() {
            Action::WakeUpkeep
        } else {
            Action::Advance { millis: 25 * HOUR }
        }),
    }
}
