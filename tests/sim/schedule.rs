//! What happens in a run, made from the seed before it begins, so that a failing run can be made shorter by leaving
//! actions out. Every kind of fault has seeds in which it is alone, and there are seeds with all of them.

use super::agent::Which;
use super::dice::Dice;
use super::disk::Events;
use super::world::Weather;

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
    Weather(Weather),
    Advance {
        millis: u64,
    },
    /// A process that keeps the bucket clean. It may end at one of its steps, or hang at one until somebody wakes it.
    Upkeep {
        chore: Chore,
        ends: Option<(u64, bool)>,
        hangs: bool,
    },
    WakeUpkeep,
}

/// What it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chore {
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
        let mut dice = Dice::new(seed, 1);
        let mut actions = vec![Action::Start { on: 0 }];
        let length = 6 + dice.below(22);
        while (actions.len() as u64) < length {
            if !mix.faults.is_empty() && dice.percent(35) {
                let fault = mix.faults[dice.below(mix.faults.len() as u64) as usize];
                befall(fault, mix, &mut actions, &mut dice);
            } else {
                let action = plain(mix, &mut dice);
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

fn which(dice: &mut Dice) -> Which {
    if dice.percent(75) {
        Which::Transcript
    } else {
        Which::SubAgent
    }
}

fn machine(mix: &Mix, dice: &mut Dice) -> usize {
    dice.below(mix.machines as u64) as usize
}

/// What happens on a good day.
fn plain(mix: &Mix, dice: &mut Dice) -> Action {
    let on = machine(mix, dice);
    match dice.below(100) {
        0..30 => Action::Append {
            on,
            which: which(dice),
            lines: 1 + dice.below(3),
        },
        30..38 => Action::BeginLine {
            on,
            which: which(dice),
        },
        38..44 => Action::Tool { on },
        44..50 => Action::Side {
            on,
            in_place: dice.coin(),
        },
        50..68 => Action::Flush { on },
        68..84 => Action::Advance {
            millis: [5, 40, 300, 1_000, 20_000, 90_000][dice.below(6) as usize],
        },
        84..87 => Action::FileMove { on },
        87..90 => Action::Finish { on },
        90..93 => Action::Restore {
            on,
            wipe: dice.coin(),
        },
        _ => Action::Start { on },
    }
}

fn befall(fault: Fault, mix: &Mix, actions: &mut Vec<Action>, dice: &mut Dice) {
    let on = machine(mix, dice);
    let share = [10, 30, 60, 100][dice.below(4) as usize];
    let calm = Weather::default();
    let weather = |weather: Weather, dice: &mut Dice| {
        Action::Weather(if dice.percent(25) {
            Weather::default()
        } else {
            weather
        })
    };
    let last = match fault {
        Fault::Before => weather(
            Weather {
                before: share,
                ..calm
            },
            dice,
        ),
        Fault::LostReply => weather(
            Weather {
                after: share,
                index: share / 3,
                ..calm
            },
            dice,
        ),
        Fault::Late => weather(
            Weather {
                late: share,
                delay: 20,
                ..calm
            },
            dice,
        ),
        Fault::TwentyPercent => Action::Weather(Weather {
            before: 8,
            after: 7,
            late: 5,
            index: 10,
            ..calm
        }),
        Fault::Reads => weather(
            Weather {
                reads: share,
                ..calm
            },
            dice,
        ),
        Fault::Slow => weather(
            Weather {
                delay: [10, 200, 3_000, 40_000][dice.below(4) as usize],
                ..calm
            },
            dice,
        ),
        Fault::Rewrites if dice.coin() => Action::Rewrite {
            on,
            which: which(dice),
            in_place: dice.coin(),
        },
        Fault::Rewrites => Action::CutBack {
            on,
            which: which(dice),
            anywhere: dice.coin(),
        },
        Fault::Events => Action::Watching {
            on,
            events: [Events::All, Events::Missed, Events::Overflow, Events::Off]
                [dice.below(4) as usize],
        },
        Fault::IndexDown => weather(
            Weather {
                index_down: dice.coin(),
                index: 30,
                ..calm
            },
            dice,
        ),
        Fault::IndexOld => weather(
            Weather {
                index_old: true,
                ..calm
            },
            dice,
        ),
        Fault::FullDisk => Action::FullDisk {
            on,
            full: dice.percent(70),
        },
        Fault::Crash => match dice.below(3) {
            0 => Action::Kill { on },
            _ => Action::CrashIn {
                on,
                steps: 1 + dice.below(12),
                after: dice.coin(),
            },
        },
        Fault::PowerCut => Action::CutPower { on },
        // Where there is a collector, mostly the story that it must stand.
        Fault::Pause
            if mix.faults.contains(&Fault::Upkeep) && mix.machines > 1 && dice.percent(60) =>
        {
            return asleep(actions, dice);
        }
        Fault::Pause if dice.coin() => Action::Pause { on },
        Fault::Pause => {
            actions.push(Action::Advance { millis: 3_600_000 });
            Action::Wake { on }
        }
        Fault::Clock => Action::ClockJump {
            on,
            minutes: dice.below(720) as i64 - 360,
        },
        Fault::LostLedger => {
            actions.push(Action::Kill { on });
            Action::LoseState { on }
        }
        Fault::Upkeep => return upkeep(mix, actions, dice),
        Fault::TakeOver => {
            actions.push(Action::Restore {
                on,
                wipe: dice.percent(70),
            });
            Action::Start { on }
        }
    };
    actions.push(last);
    // What ended is mostly started again.
    if matches!(fault, Fault::Crash | Fault::PowerCut | Fault::LostLedger) && dice.percent(70) {
        actions.push(Action::Start { on });
    }
}

const HOUR: u64 = 3_600_000;

/// A writer hangs with a write under way; another takes the session over, goes on, and what it wrote is merged and collected. The
/// first wakes: sooner than anything may be collected, or so late that its number may be free.
fn asleep(actions: &mut Vec<Action>, dice: &mut Dice) {
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
        chore(Chore::Merge { from: 0, to: 100 }),
        Action::Advance { millis: 1_000 },
        Action::Kill { on: 1 },
    ]);
    actions.push(Action::Advance {
        millis: [1, 25][dice.below(2) as usize] * HOUR,
    });
    actions.push(chore(Chore::Collect {
        history: 0,
        ttl: None,
    }));
    actions.extend([
        Action::Advance { millis: 1_000 },
        Action::Wake { on: 0 },
        Action::Advance { millis: 20_000 },
    ]);
}

fn upkeep(mix: &Mix, actions: &mut Vec<Action>, dice: &mut Dice) {
    let merge = |dice: &mut Dice| {
        let from = if dice.coin() { 0 } else { dice.below(90) };
        Chore::Merge {
            from,
            to: if dice.coin() {
                100
            } else {
                from + 10 + dice.below(90 - from.min(89))
            },
        }
    };
    let collect = |dice: &mut Dice| Chore::Collect {
        history: [0, 1, 30][dice.below(3) as usize],
        ttl: dice.percent(20).then_some(20),
    };
    let process = |chore: Chore, dice: &mut Dice| Action::Upkeep {
        chore,
        ends: dice.percent(15).then(|| (1 + dice.below(30), dice.coin())),
        hangs: dice.percent(10),
    };
    match dice.below(10) {
        0..3 => {
            let chore = merge(dice);
            actions.push(process(chore, dice));
        }
        // In the order in which it happens: merged, a day later collected.
        3..7 => {
            for chore in [merge(dice), merge(dice)] {
                actions.push(process(chore, dice));
            }
            // A daemon that lives through it scans every 15 seconds, which takes its time here too.
            let asleep = 0..if dice.percent(70) { mix.machines } else { 0 };
            actions.extend(asleep.clone().map(|on| Action::Kill { on }));
            actions.push(Action::Advance {
                millis: [13, 25, 40][dice.below(3) as usize] * HOUR,
            });
            actions.extend(
                asleep
                    .filter(|_| dice.percent(80))
                    .map(|on| Action::Start { on }),
            );
            let chore = collect(dice);
            actions.push(process(chore, dice));
        }
        7 => {
            let chore = collect(dice);
            actions.push(process(chore, dice));
        }
        8 => {
            let chore = if dice.percent(70) {
                Chore::Remove
            } else {
                Chore::Undelete
            };
            actions.push(process(chore, dice));
        }
        9 if dice.percent(40) => {
            let chore = if dice.percent(60) {
                Chore::ForkOrigin
            } else {
                Chore::Name
            };
            actions.push(process(chore, dice));
        }
        _ => actions.push(if dice.coin() {
            Action::WakeUpkeep
        } else {
            Action::Advance { millis: 25 * HOUR }
        }),
    }
}
