//! The actions of a run, generated from the seed before it begins, so that a failing run can be
//! shortened by omitting actions.
//!
//! Every kind of fault has seeds in which it occurs alone; other seeds combine all of them.

use super::agent::Which;
use super::disk::Events;
use super::rng::SeededRng;
use super::world::FaultConditions;

/// One thing that happens. `on` is one of the machines; what makes no sense there is passed over.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    // The agent.
    Append {
        on: usize,
        which: Which,
        lines: u64,
    },
    BeginLine {
        on: usize,
        which: Which,
    },
    Rewrite {
        on: usize,
        which: Which,
        in_place: bool,
    },
    CutBack {
        on: usize,
        which: Which,
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
    // What befalls it.
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
    /// A process that keeps the bucket clean. It may end at one of its steps, or hang at one until somebody wakes it.
    Upkeep {
        chore: MaintenanceTask,
        ends: Option<(u64, bool)>,
        hangs: bool,
    },
    WakeUpkeep,
}

/// What it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaintenanceTask {
    /// Makes one piece of a part of what was acknowledged, in percent.
    Merge {
        from: u64,
        to: u64,
    },
    /// Collects, with so many hours of history, and removes what has not changed for so long.
    Collect {
        history: u64,
        ttl: Option<u64>,
    },
    Remove,
    Undelete,
    /// Begins another session with what is there.
    ForkOrigin,
    /// Gives the end a name.
    Name,
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

/// A mix of faults. A seed has the mix that its number says.
pub struct Mix {
    pub name: &'static str,
    /// The store ignores conditions, and the database fences.
    pub lax: bool,
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
        lax: false,
        machines,
        faults,
    }
}

const fn lax(name: &'static str, machines: usize, faults: &'static [Fault]) -> Mix {
    Mix {
        name,
        lax: true,
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
    lax("database", 1, &[Fault::LostReply, Fault::IndexDown]),
    lax("database, writers", 3, &[Fault::TakeOver, Fault::Slow]),
    lax(
        "database, crashes",
        2,
        &[Fault::TakeOver, Fault::Crash, Fault::LostReply],
    ),
    lax(
        "database, late effects",
        2,
        &[Fault::TakeOver, Fault::Late, Fault::Pause],
    ),
    lax(
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
    lax(
        "upkeep, database",
        2,
        &[Fault::Upkeep, Fault::Upkeep, Fault::TakeOver, Fault::Crash],
    ),
    mix("everything", 3, ALL),
    lax("everything, database", 3, ALL),
];

/// A run, before it begins.
pub struct Schedule {
    pub seed: u64,
    pub mix: &'static Mix,
    pub actions: Vec<Action>,
}

impl Schedule {
    /// The run of a seed.
    pub fn of(seed: u64) -> Schedule {
        let mix = &MIXES[(seed % MIXES.len() as u64) as usize];
        let mut rng = SeededRng::new(seed, 1);
        let mut actions = vec![Action::Start { on: 0 }];
        let length = 6 + rng.below(22);
        while (actions.len() as u64) < length {
            if !mix.faults.is_empty() && rng.percent(35) {
                let fault = mix.faults[rng.below(mix.faults.len() as u64) as usize];
                befall(fault, mix, &mut actions, &mut rng);
            } else {
                let action = plain(mix, &mut rng);
                actions.push(action);
            }
        }
        Schedule { seed, mix, actions }
    }

    /// The same run with only these of its actions.
    pub fn keeping(&self, kept: &[usize]) -> Schedule {
        let actions = kept
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

fn which(rng: &mut SeededRng) -> Which {
    if rng.percent(75) {
        Which::Transcript
    } else {
        Which::SubAgent
    }
}

fn machine(mix: &Mix, rng: &mut SeededRng) -> usize {
    rng.below(mix.machines as u64) as usize
}

/// What happens on a good day.
fn plain(mix: &Mix, rng: &mut SeededRng) -> Action {
    let on = machine(mix, rng);
    match rng.below(100) {
        0..30 => Action::Append {
            on,
            which: which(rng),
            lines: 1 + rng.below(3),
        },
        30..38 => Action::BeginLine {
            on,
            which: which(rng),
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

fn befall(fault: Fault, mix: &Mix, actions: &mut Vec<Action>, rng: &mut SeededRng) {
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
            which: which(rng),
            in_place: rng.coin(),
        },
        Fault::Rewrites => Action::CutBack {
            on,
            which: which(rng),
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
        // Where there is a collector, mostly the story that it must stand.
        Fault::Pause
            if mix.faults.contains(&Fault::Upkeep) && mix.machines > 1 && rng.percent(60) =>
        {
            return asleep(actions, rng);
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
    // What ended is mostly started again.
    if matches!(fault, Fault::Crash | Fault::PowerCut | Fault::LostLedger) && rng.percent(70) {
        actions.push(Action::Start { on });
    }
}

const HOUR: u64 = 3_600_000;

/// A writer hangs with a write under way; another takes the session over, goes on, and what it wrote is merged and collected. The
/// first wakes: sooner than anything may be collected, or so late that its number may be free.
fn asleep(actions: &mut Vec<Action>, rng: &mut SeededRng) {
    let append = |on| Action::Append {
        on,
        which: Which::Transcript,
        lines: 1,
    };
    let chore = |chore| Action::Upkeep {
        chore,
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
        chore(MaintenanceTask::Merge { from: 0, to: 100 }),
        Action::Advance { millis: 1_000 },
        Action::Kill { on: 1 },
    ]);
    actions.push(Action::Advance {
        millis: [1, 25][rng.below(2) as usize] * HOUR,
    });
    actions.push(chore(MaintenanceTask::Collect {
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
    let process = |chore: MaintenanceTask, rng: &mut SeededRng| Action::Upkeep {
        chore,
        ends: rng.percent(15).then(|| (1 + rng.below(30), rng.coin())),
        hangs: rng.percent(10),
    };
    match rng.below(10) {
        0..3 => {
            let chore = merge(rng);
            actions.push(process(chore, rng));
        }
        // In the order in which it happens: merged, a day later collected.
        3..7 => {
            for chore in [merge(rng), merge(rng)] {
                actions.push(process(chore, rng));
            }
            // A daemon that lives through it scans every 15 seconds, which takes its time here too.
            let asleep = 0..if rng.percent(70) { mix.machines } else { 0 };
            actions.extend(asleep.clone().map(|on| Action::Kill { on }));
            actions.push(Action::Advance {
                millis: [13, 25, 40][rng.below(3) as usize] * HOUR,
            });
            actions.extend(
                asleep
                    .filter(|_| rng.percent(80))
                    .map(|on| Action::Start { on }),
            );
            let chore = collect(rng);
            actions.push(process(chore, rng));
        }
        7 => {
            let chore = collect(rng);
            actions.push(process(chore, rng));
        }
        8 => {
            let chore = if rng.percent(70) {
                MaintenanceTask::Remove
            } else {
                MaintenanceTask::Undelete
            };
            actions.push(process(chore, rng));
        }
        9 if rng.percent(40) => {
            let chore = if rng.percent(60) {
                MaintenanceTask::ForkOrigin
            } else {
                MaintenanceTask::Name
            };
            actions.push(process(chore, rng));
        }
        _ => actions.push(if rng.coin() {
            Action::WakeUpkeep
        } else {
            Action::Advance { millis: 25 * HOUR }
        }),
    }
}
