//! Proves that the simulation detects mistakes: with each mutation of `sys/mutation.rs`, a seed
//! fails.
//!
//! A mutation applies to a whole process, so each one runs in a child process of this test binary.
//! `SESSIOND_SIM_MUTATION=IgnorePins cargo test --test sim mutation` tests only one.

#![cfg(debug_assertions)]

use std::process::Command;
use std::time::Instant;

use sessiond::sys::mutation::{self, Mutation};

use super::opencode;
use super::run::run;
use super::schedule::Schedule;
use super::seeds::{Sweep, mix_by_name};

/// Maximum number of seeds until a mutation must be detected.
const MAX_SEEDS: u64 = 20_000;

/// Selects a mutation by name.
const VARIABLE: &str = "SESSIOND_SIM_MUTATION";

/// How the child process reports the seed that failed.
const DETECTED: &str = "detected by seed ";

/// Returns the mix of faults that detects a mutation, if only one mix does.
fn mix(mutation: Mutation) -> Option<&'static str> {
    match mutation {
        Mutation::SkipFenceCheckAfterWrite => Some("database, writers"),
        Mutation::TrustNewestEntry => Some("database, late effects"),
        Mutation::CollectWithoutGrace | Mutation::SkipIdleCheck => Some("upkeep, pauses"),
        Mutation::IgnorePins => Some("upkeep"),
        Mutation::ClaimWithoutComparison => Some("everything, database"),
        _ => None,
    }
}

/// Returns whether the simulation of OpenCode must detect a mutation.
fn is_in_mirror(mutation: Mutation) -> bool {
    mutation == Mutation::ForgetDeletedRows
}

/// Runs the seeds with one mutation; prints the seed that fails.
#[test]
#[ignore = "runs in the child processes of every_mutation_is_detected"]
fn one_mutation() {
    let name = std::env::var(VARIABLE).unwrap();
    let mutation = Mutation::ALL
        .into_iter()
        .find(|mutation| format!("{mutation:?}") == name)
        .unwrap_or_else(|| panic!("unknown mutation {name:?}"));
    mutation::activate(mutation);
    if is_in_mirror(mutation) {
        if let Some((seed, violation)) = opencode::first_failure(MAX_SEEDS) {
            println!("{DETECTED}{seed}: {violation}");
        }
        return;
    }
    let sweep = Sweep {
        first: 0,
        count: MAX_SEEDS,
        mix: mix(mutation).map(mix_by_name),
    };
    if let Some((schedule, violation)) = sweep.run().failure {
        println!("{DETECTED}{}: {}", schedule.seed, violation.what);
    }
}

/// Returns how the simulation detects a mutation, or why it does not.
fn detect(mutation: Mutation) -> Result<String, String> {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture"])
        .arg("mutations::one_mutation")
        .env(VARIABLE, format!("{mutation:?}"))
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout);
    if !child.status.success() {
        let errors = String::from_utf8_lossy(&child.stderr);
        return Err(format!("the child process failed:\n{output}{errors}"));
    }
    // libtest prints the name of the test on the same line.
    let Some((_, report)) = output.split_once(DETECTED) else {
        return Err(format!("{MAX_SEEDS} seeds do not detect it"));
    };
    let report = report.lines().next().unwrap_or_default();
    let seed = report.split(':').next().unwrap_or_default();
    // The same seed must pass without the mutation. Otherwise it proves nothing.
    let seed = seed.parse().unwrap();
    let passes = if is_in_mirror(mutation) {
        opencode::simulate(seed, false).0.is_ok()
    } else {
        run(&Schedule::of(seed), false).0.is_ok()
    };
    if passes {
        Ok(report.chars().take(200).collect())
    } else {
        Err(format!("seed {report} fails without it, too"))
    }
}

#[test]
fn every_mutation_is_detected() {
    let only = std::env::var(VARIABLE).unwrap_or_default();
    let selected: Vec<Mutation> = Mutation::ALL
        .into_iter()
        .filter(|mutation| format!("{mutation:?}").contains(&only))
        .collect();
    assert!(!selected.is_empty(), "no mutation matches {only:?}");
    let mut missed = Vec::new();
    for mutation in selected {
        let started = Instant::now();
        match detect(mutation) {
            Ok(report) => println!("{:>5.1?} {mutation:?}: seed {report}", started.elapsed()),
            Err(reason) => missed.push(format!("{mutation:?}: {reason}")),
        }
    }
    assert!(missed.is_empty(), "not detected:\n{}", missed.join("\n"));
}
