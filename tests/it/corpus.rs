//! The committed corpus of the fuzz targets, run through the same checks without a fuzzer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

// Where `checks` and `seeds` look for them.
use sessiond::{agent, codec, error, model};

#[path = "../../fuzz/src/checks.rs"]
mod checks;
#[path = "../../fuzz/src/seeds.rs"]
mod seeds;

type Check = fn(&[u8]) -> bool;

const TARGETS: [(&str, Check); 4] = [
    ("entry", checks::entry),
    ("snapshot", checks::snapshot),
    ("transcript", checks::transcript),
    ("path", checks::path),
];

fn verdict(name: &str, accepted: bool) -> Result<(), String> {
    match name.split('-').next() {
        Some("good") if !accepted => Err(format!("{name} is refused")),
        Some("bad") if accepted => Err(format!("{name} is accepted")),
        Some("good" | "bad" | "found") => Ok(()),
        _ => Err(format!(
            "{name} says by its name neither good, bad nor found"
        )),
    }
}

#[test]
fn the_corpus_is_accepted_and_rejected_as_named() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    let directories: BTreeSet<_> = std::fs::read_dir(&corpus)
        .unwrap()
        .map(|item| item.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(
        directories,
        TARGETS
            .iter()
            .map(|(target, _)| (*target).to_owned())
            .collect(),
        "a target without corpus, or the other way round"
    );
    let mut wrong = Vec::new();
    for (target, check) in TARGETS {
        let mut count = BTreeMap::new();
        for item in std::fs::read_dir(corpus.join(target))
            .unwrap()
            .map(|item| item.unwrap())
        {
            let name = item.file_name().into_string().unwrap();
            wrong.extend(
                verdict(&name, check(&std::fs::read(item.path()).unwrap()))
                    .err()
                    .map(|why| format!("{target}/{why}")),
            );
            *count
                .entry(name.split('-').next().unwrap().to_owned())
                .or_insert(0) += 1;
        }
        assert!(
            count["good"] >= 5 && count["bad"] >= 5,
            "hardly any input for {target}: {count:?}"
        );
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// If the encoder changes, the generator gives new inputs, and the committed ones stay: older
/// versions wrote them.
#[test]
fn written_objects_are_accepted_and_mutated_ones_rejected() {
    let checks = BTreeMap::from(TARGETS);
    let wrong = seeds::all().into_iter().filter_map(|seed| {
        let why = verdict(seed.name, checks[seed.target](&seed.bytes)).err()?;
        Some(format!("{}/{why}", seed.target))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_seed_is_in_the_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    let missing: Vec<_> = seeds::all()
        .iter()
        .map(|seed| format!("{}/{}", seed.target, seed.name))
        .filter(|name| !corpus.join(name).exists())
        .collect();
    assert!(
        missing.is_empty(),
        "run cargo run --manifest-path fuzz/Cargo.toml --no-default-features --example seed: {missing:?}"
    );
}
