//! Runs many seeds, or replays one.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sessiond::model::Digest;

use super::run::{Outcome, Violation, run};
use super::schedule::{MIXES, Schedule};
use super::shrink::report;

/// Number of seeds of a plain `cargo test`.
const SEEDS: u64 = 20_000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| {
        text.replace('_', "")
            .parse()
            .unwrap_or_else(|_| panic!("invalid {name} {text:?}: expected a number"))
    })
}

/// A range of seeds, of all mixes or of one.
pub struct Sweep {
    pub first: u64,
    pub count: u64,
    /// The index of the mix in `MIXES`.
    pub mix: Option<u64>,
}

/// The result of a sweep.
pub struct SweepResult {
    pub totals: Outcome,
    /// Number of runs and microseconds of each mix.
    pub mixes: Vec<(u64, u64)>,
    /// The failed run with the lowest seed. The sweep stops at the first failure.
    pub failure: Option<(Schedule, Violation)>,
}

/// Returns the index of a mix.
pub fn mix_by_name(name: &str) -> u64 {
    let found = MIXES.iter().position(|mix| mix.name == name);
    found.unwrap_or_else(|| panic!("unknown mix {name:?}")) as u64
}

impl Sweep {
    /// Runs the seeds on all cores until one fails.
    pub fn run(&self) -> SweepResult {
        let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let (next, has_failed) = (AtomicU64::new(self.first), AtomicBool::new(false));
        let result = Mutex::new(SweepResult {
            totals: Outcome::default(),
            mixes: vec![(0, 0); MIXES.len()],
            failure: None,
        });
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while !has_failed.load(Ordering::Relaxed) {
                        let nth = next.fetch_add(1, Ordering::Relaxed);
                        if nth >= self.first + self.count {
                            return;
                        }
                        let seed = self.mix.map_or(nth, |mix| nth * MIXES.len() as u64 + mix);
                        let (schedule, started) = (Schedule::of(seed), Instant::now());
                        let done = run(&schedule, false).0;
                        has_failed.fetch_or(done.is_err(), Ordering::Relaxed);
                        result
                            .lock()
                            .unwrap()
                            .add(schedule, done, started.elapsed());
                    }
                });
            }
        });
        result.into_inner().unwrap()
    }
}

impl SweepResult {
    fn add(&mut self, schedule: Schedule, done: Result<Outcome, Violation>, elapsed: Duration) {
        match done {
            Ok(outcome) => {
                let mix = &mut self.mixes[(schedule.seed % MIXES.len() as u64) as usize];
                *mix = (mix.0 + 1, mix.1 + elapsed.as_micros() as u64);
                self.totals.acks += outcome.acks;
                self.totals.restores += outcome.restores;
                self.totals.entries += outcome.entries;
                self.totals.crashes += outcome.crashes;
            }
            Err(violation) => {
                let lowest = self.failure.as_ref().map(|(failed, _)| failed.seed);
                if lowest.is_none_or(|lowest| schedule.seed < lowest) {
                    self.failure = Some((schedule, violation));
                }
            }
        }
    }
}

#[test]
fn no_seed_loses_an_acknowledged_byte() {
    let count = number("SESSIOND_SIM_SEEDS").unwrap_or(SEEDS);
    let sweep = Sweep {
        first: number("SESSIOND_SIM_FROM").unwrap_or(0),
        count,
        mix: std::env::var("SESSIOND_SIM_MIX")
            .ok()
            .map(|name| mix_by_name(&name)),
    };
    let started = Instant::now();
    let result = sweep.run();
    if let Some((schedule, violation)) = result.failure {
        panic!("{}", report(&schedule, violation));
    }
    let totals = result.totals;
    println!("{count} seeds in {:.1?}: {totals:?}", started.elapsed());
    for (mix, (runs, micros)) in MIXES.iter().zip(result.mixes) {
        println!(
            "  {:<24} {runs:>6} runs, {:>6} µs each",
            mix.name,
            micros / runs.max(1)
        );
    }
    // A simulation in which little happens proves nothing.
    assert!(
        totals.acks > count && totals.restores > count && totals.entries > 3 * count,
        "too little happened: {totals:?}"
    );
}

#[test]
#[ignore = "replays the seed of SESSIOND_SIM_SEED"]
fn one_seed_is_replayed_with_its_trace() {
    let seed = number("SESSIOND_SIM_SEED").expect("SESSIOND_SIM_SEED is set");
    let mut schedule = Schedule::of(seed);
    if let Ok(indices) = std::env::var("SESSIOND_SIM_KEEP") {
        let indices: Vec<usize> = indices
            .split(',')
            .filter(|at| !at.is_empty())
            .map(|at| at.parse().expect("a number"))
            .collect();
        schedule = schedule.with_actions(&indices);
    }
    let (done, trace) = run(&schedule, true);
    println!("seed {seed} ({})\n{}", schedule.mix.name, trace.join("\n"));
    if let Err(violation) = done {
        panic!("after action {}: {}", violation.at, violation.what);
    }
}

#[test]
fn the_same_seed_gives_the_same_trace_byte_for_byte() {
    for seed in 0..2 * MIXES.len() as u64 {
        let digest = move || Digest::of(run(&Schedule::of(seed), true).1.join("\n").as_bytes());
        let elsewhere = std::thread::spawn(digest).join().unwrap();
        assert_eq!(digest(), elsewhere, "seed {seed} has two traces");
    }
}
