//! Proves that the net catches: each deliberate mistake below must make the simulation fail. The sources are copied,
//! one text is replaced, the copy is built with the same dependencies, and its seeds must find a violation.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::run::run;
use super::schedule::Schedule;

/// A mistake: its name, the file, the text there, and what stands there instead.
struct Mutation {
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    /// The mix of faults in which it can be seen, where that is only one.
    mix: Option<&'static str>,
}

/// So many seeds it may take to find one.
const SEEDS: &str = "4000";

const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "a write that failed is taken as done",
        file: "src/log/pen.rs",
        from: "let done = done.doing_with(|| format!(\"write entry {seq} of {id}\"))?;",
        to: "let done = done.unwrap_or(Appended::Done);",
        mix: None,
    },
    Mutation {
        name: "a refused create is taken as our own without reading it back",
        file: "src/log/pen.rs",
        from: "Created::Exists => self.taken(id, seq, encoded).await,\n            },\n            Fence::Database",
        to: "Created::Exists => Ok(Appended::Done),\n            },\n            Fence::Database",
        mix: None,
    },
    Mutation {
        name: "a restore forgets how far the files are shipped",
        file: "src/restore/mod.rs",
        from: "    ledger.files = going.files;\n",
        to: "    drop(going.files);\n",
        mix: None,
    },
    Mutation {
        name: "a claim does not look at what was written meanwhile",
        file: "src/log/pen.rs",
        from: "if !unseen.is_empty() {",
        to: "if unseen.len() == usize::MAX {",
        mix: None,
    },
    Mutation {
        name: "a restore does not check digests",
        file: "src/log/assemble.rs",
        from: "        if matches {\n",
        to: "        if matches || !by.is_empty() {\n",
        mix: None,
    },
    Mutation {
        name: "an unfinished line is shipped although the agent lives",
        file: "src/capture/look.rs",
        from: "if kind == FileKind::Whole || (all && last) {",
        to: "if kind == FileKind::Whole || all || last {",
        mix: None,
    },
    Mutation {
        name: "the ledger is moved before the entry is written",
        file: "src/capture/ship.rs",
        from: "        match context.logs.append(&self.id, &mut ledger.pen, &encoded).await {\n",
        to: "        ledger.files = cut.cursors.clone();\n        self.save(context, ledger, false);\n        match context.logs.append(&self.id, &mut ledger.pen, &encoded).await {\n",
        mix: None,
    },
    Mutation {
        name: "a writer that lost the session goes on behind the other",
        file: "src/capture/ship.rs",
        from: "            ledger.pen.ground = Ground::Branch;\n",
        to: "            if let Some(entry) = &entry {\n                ledger.pen.follow(entry.header.seq, entry.digest, now);\n            }\n",
        mix: None,
    },
    Mutation {
        name: "a log is adopted without comparing the local files",
        file: "src/capture/adopt.rs",
        from: "    match files {\n",
        to: "    match files.or(Some(BTreeMap::new())) {\n",
        mix: None,
    },
    Mutation {
        name: "an unknown write is tried again with other bytes",
        file: "src/capture/ship.rs",
        from: "self.pending = Some((encoded, cut));",
        to: "drop((encoded, cut));",
        mix: None,
    },
    Mutation {
        name: "the database's fence is not asked after the write",
        file: "src/log/pen.rs",
        from: "            _ => Ok(Appended::Taken(None)),\n        }\n    }\n",
        to: "            _ => Ok(Appended::Done),\n        }\n    }\n",
        mix: Some("database, writers"),
    },
    Mutation {
        name: "what was named while an entry was tried again is forgotten",
        file: "src/capture/ship.rs",
        from: "        self.hints.extend(named_since);\n",
        to: "        drop(named_since);\n",
        mix: None,
    },
    Mutation {
        name: "the newest entry decides what is certain before all are read",
        file: "src/log/chain.rs",
        from: "        match self.newest_certain() {\n",
        to: "        match self.held.back().map(|held| held.header.seq).filter(|_| self.held.len() > 4) {\n",
        mix: Some("database, late effects"),
    },
    Mutation {
        name: "every flush ships the files from their beginning",
        file: "src/capture/look.rs",
        from: "Some(cursor) if unchanged_so_far => Found::from(cursor.len, cursor.clone()),",
        to: "Some(cursor) if unchanged_so_far && cursor.len == stat.size => Found::from(cursor.len, cursor.clone()),",
        mix: None,
    },
    Mutation {
        name: "what a merge stands for is collected at once, without grace",
        file: "src/upkeep/collect.rs",
        from: "piece.to <= past && age(now, piece.modified) >= rules.grace && !is_stray",
        to: "piece.to <= past && !is_stray",
        mix: Some("upkeep, pauses"),
    },
    Mutation {
        name: "who slept does not look whether its number was collected",
        file: "src/log/pen.rs",
        from: "if matches!(appended, Appended::Done) && pen.has_slept(self.clock.now()) {",
        to: "if matches!(appended, Appended::Done) && seq == 0 {",
        mix: Some("upkeep, pauses"),
    },
    Mutation {
        name: "a merge forgets what was appended within it",
        file: "src/log/merge.rs",
        from: "        kept.extend_from_slice(bytes);\n",
        to: "",
        mix: None,
    },
    Mutation {
        name: "a restore reads no further than the merges reach",
        file: "src/log/mod.rs",
        from: "        pieces.extend(entries.objects.iter().filter_map(|object| piece(object, PieceKind::Entry)));\n",
        to: "        if pieces.is_empty() {\n            pieces.extend(entries.objects.iter().filter_map(|object| piece(object, PieceKind::Entry)));\n        }\n",
        mix: None,
    },
    Mutation {
        name: "a collector does not mind forks and names",
        file: "src/upkeep/gc.rs",
        from: "        let mut pins = self.logs.pins(self.id).await?;\n",
        to: "        let mut pins: Vec<Pin> = Vec::new();\n",
        mix: Some("upkeep"),
    },
];

fn source() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The target directory that this test was built in: its dependencies serve the copy too.
fn target() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.ancestors().nth(3).unwrap().to_owned()
}

/// Writes a file if it differs, so that only what changed is built anew.
fn write(path: &Path, bytes: &[u8]) {
    if fs::read(path).ok().as_deref() != Some(bytes) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

fn copy_dir(from: &Path, to: &Path) {
    for item in fs::read_dir(from).unwrap() {
        let item = item.unwrap();
        let target = to.join(item.file_name());
        match item.file_type().unwrap().is_dir() {
            true => copy_dir(&item.path(), &target),
            false => write(&target, &fs::read(item.path()).unwrap()),
        }
    }
}

fn cargo(copy: &Path, mix: Option<&str>, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO"));
    command
        .arg("test")
        .args([
            "--quiet",
            "--offline",
            "--locked",
            "--test",
            "sim",
            "--target-dir",
        ])
        .arg(target())
        .args(arguments);
    command
        .env("SESSIOND_SIM_SEEDS", SEEDS)
        .env("SESSIOND_SIM_LONG", "1")
        .env_remove("SESSIOND_SIM_SEED")
        .env_remove("SESSIOND_SIM_FROM");
    command
        .env_remove("SESSIOND_SIM_MIX")
        .envs(mix.map(|mix| ("SESSIOND_SIM_MIX", mix)));
    command.current_dir(copy).output().unwrap()
}

/// What the simulation says of a mutation; an error if it says nothing.
fn caught(copy: &Path, mutation: &Mutation) -> Result<String, String> {
    let path = source().join(mutation.file);
    let text = fs::read_to_string(&path).unwrap();
    let found = text.matches(mutation.from).count();
    if found != 1 {
        return Err(format!(
            "its text occurs {found} times in {}: bring it up to date",
            mutation.file
        ));
    }
    let mutated = copy.join(mutation.file);
    write(
        &mutated,
        text.replace(mutation.from, mutation.to).as_bytes(),
    );
    let built = cargo(copy, mutation.mix, &["--no-run"]);
    let done = built
        .status
        .success()
        .then(|| cargo(copy, mutation.mix, &["whatever_goes_wrong"]));
    write(&mutated, text.as_bytes());
    let Some(done) = done else {
        return Err(format!(
            "it does not compile:\n{}",
            String::from_utf8_lossy(&built.stderr)
        ));
    };
    let said =
        String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    match said
        .lines()
        .find(|line| line.starts_with("seed ") && line.contains(" fails: "))
    {
        // The same seed must pass without the mistake: a net that is torn itself proves nothing.
        Some(line) if !done.status.success() => match line["seed ".len()..]
            .split(' ')
            .next()
            .map(str::parse::<u64>)
        {
            Some(Ok(seed)) if run(&Schedule::of(seed), false).0.is_ok() => {
                Ok(line.chars().take(200).collect())
            }
            _ => Err(format!("it fails without it too: {line}")),
        },
        _ => Err(format!("{SEEDS} seeds do not notice it")),
    }
}

#[test]
fn every_deliberate_mistake_is_found() {
    let only = std::env::var("SESSIOND_SIM_MUTATION").unwrap_or_default();
    let copy = target().join("sim-mutations");
    for directory in ["src", "migrations", "tests/sim"] {
        copy_dir(&source().join(directory), &copy.join(directory));
    }
    let manifest = fs::read_to_string(source().join("Cargo.toml")).unwrap();
    // The copy has no program and no other tests; it is built often and run shortly, so it is not optimised.
    let manifest = manifest
        .replace("[[test]]\nname = \"it\"\npath = \"tests/it/main.rs\"\n", "")
        .replace("[[bin]]\nname = \"sessiond\"\npath = \"src/main.rs\"\n", "")
        .replace("edition = ", "autobins = false\nedition = ")
        .replace(
            "sessiond = { opt-level = 1 }",
            "sessiond = { opt-level = 0 }",
        );
    write(&copy.join("Cargo.toml"), manifest.as_bytes());
    write(
        &copy.join("Cargo.lock"),
        &fs::read(source().join("Cargo.lock")).unwrap(),
    );
    let mut missed = Vec::new();
    for mutation in MUTATIONS
        .iter()
        .filter(|mutation| mutation.name.contains(&only))
    {
        let began = std::time::Instant::now();
        match caught(&copy, mutation) {
            Ok(how) => println!("{:>5.1?} {}: {how}", began.elapsed(), mutation.name),
            Err(why) => missed.push(format!("{}: {why}", mutation.name)),
        }
    }
    assert!(missed.is_empty(), "not found:\n{}", missed.join("\n"));
}
