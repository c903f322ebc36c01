//! Runs many seeds, or one that is to be looked at.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use sessiond::model::Digest;

use super::run::{Outcome, run};
use super::schedule::{MIXES, Schedule};
use super::shrink::report;

/// So many seeds a plain `cargo test` runs.
const SEEDS: u64 = 20_000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| {
        text.replace('_', "")
            .parse()
            .unwrap_or_else(|_| panic!("{name}={text} is no number"))
    })
}

#[test]
fn whatever_goes_wrong_nothing_acknowledged_is_lost() {
    if number("SESSIOND_SIM_SEED").is_some() {
        return println!("one seed is replayed by the other test");
    }
    let (from, count) = (
        number("SESSIOND_SIM_FROM").unwrap_or(0),
        number("SESSIOND_SIM_SEEDS").unwrap_or(SEEDS),
    );
    let mix = std::env::var("SESSIOND_SIM_MIX").ok().map(|name| {
        let found = MIXES.iter().position(|mix| mix.name == name);
        found.unwrap_or_else(|| panic!("SESSIOND_SIM_MIX={name}: there is no such mix")) as u64
    });
    let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get) as u64;
    let (next, failed, began) = (AtomicU64::new(from), AtomicBool::new(false), Instant::now());
    let (failures, totals) = (Mutex::new(Vec::new()), Mutex::new(Outcome::default()));
    let mixes: Vec<[AtomicU64; 2]> = MIXES.iter().map(|_| Default::default()).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !failed.load(Ordering::Relaxed) {
                    let nth = next.fetch_add(1, Ordering::Relaxed);
                    if nth >= from + count {
                        return;
                    }
                    let seed = mix.map_or(nth, |mix| nth * MIXES.len() as u64 + mix);
                    let schedule = Schedule::of(seed);
                    let began = Instant::now();
                    match run(&schedule, false).0 {
                        Ok(outcome) => {
                            let mix = &mixes[(seed % MIXES.len() as u64) as usize];
                            mix[0].fetch_add(1, Ordering::Relaxed);
                            mix[1].fetch_add(began.elapsed().as_micros() as u64, Ordering::Relaxed);
                            let mut totals = totals.lock().unwrap();
                            totals.acks += outcome.acks;
                            totals.restores += outcome.restores;
                            totals.entries += outcome.entries;
                            totals.crashes += outcome.crashes;
                        }
                        Err(violation) => {
                            failed.store(true, Ordering::Relaxed);
                            failures.lock().unwrap().push((schedule, violation));
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    if let Some((schedule, violation)) = failures
        .into_iter()
        .min_by_key(|(schedule, _)| schedule.seed)
    {
        panic!("{}", report(&schedule, violation));
    }
    let totals = totals.into_inner().unwrap();
    println!("{count} seeds in {:.1?}: {totals:?}", began.elapsed());
    for (mix, [runs, micros]) in MIXES.iter().zip(&mixes) {
        let (runs, micros) = (runs.load(Ordering::Relaxed), micros.load(Ordering::Relaxed));
        println!(
            "  {:<24} {runs:>6} runs, {:>6} µs each",
            mix.name,
            micros / runs.max(1)
        );
    }
    // A net that catches nothing because nothing swims in it is no net.
    assert!(
        totals.acks > count && totals.restores > count && totals.entries > 3 * count,
        "too little happened: {totals:?}"
    );
}

#[test]
fn one_seed_is_replayed_with_its_trace() {
    let Some(seed) = number("SESSIOND_SIM_SEED") else {
        return println!("SESSIOND_SIM_SEED names none");
    };
    let mut schedule = Schedule::of(seed);
    if let Ok(kept) = std::env::var("SESSIOND_SIM_KEEP") {
        let kept: Vec<usize> = kept
            .split(',')
            .filter(|at| !at.is_empty())
            .map(|at| at.parse().expect("a number"))
            .collect();
        schedule = schedule.keeping(&kept);
    }
    let (done, trace) = run(&schedule, true);
    println!("seed {seed} ({})\n{}", schedule.mix.name, trace.join("\n"));
    if let Err(violation) = done {
        panic!("behind action {}: {}", violation.at, violation.what);
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
