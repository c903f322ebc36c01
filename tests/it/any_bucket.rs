//! The fuzz target "any bucket": whatever a bucket contains, every reader ends in time, with little
//! memory, with a documented exit code, and writes nothing outside its target directories.
//!
//! A bucket is a valid one with mutations: other numbers, names and owners in keys, other values in
//! headers, other bytes. `fuzz/run any-bucket` runs it for a while; the test below runs the attacks in
//! `fuzz/buckets` and a few random buckets. `SESSIOND_FUZZ_SEED=N` repeats one bucket.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sessiond::upkeep::compact::merge_range;

use crate::bad_bucket::{Bucket, gzip, local, put_fork};
use crate::ledger_props::mutate;
use crate::support::slow;
use crate::support::storage::SESSION;
use crate::support::{TempHome, sessiond};

/// Maximum data segment of a reader, in KiB.
const MAX_MEMORY_KIB: u32 = 512 << 10;

/// Maximum time of one command, on a busy machine.
const MAX_TIME: Duration = Duration::from_secs(60);

/// How long a daemon may run before it is stopped.
const DAEMON_TIME: Duration = Duration::from_secs(2);

/// Numbers near the limits of the format and of integers, for keys.
const NUMBERS: [&str; 9] = [
    "000000000000",
    "000000000001",
    "000000000002",
    "000000000007",
    "999999999999",
    "1000000000000",
    "18446744073709551615",
    "99999999999999999999999999",
    "7",
];

/// Objects by key.
type Objects = BTreeMap<String, Vec<u8>>;

/// A valid bucket: entries, a snapshot, a merge, forks, metadata, a pin and a request.
static VALID: LazyLock<Objects> = LazyLock::new(|| {
    let bucket = local(async {
        let bucket = Bucket::new().await;
        let (logs, id) = (bucket.storage.logs(), bucket.storage.id(SESSION));
        merge_range(&logs, &id, 1, 3).await.unwrap();
        merge_range(&logs, &id, 4, 5).await.unwrap();
        put_fork(&bucket, "f1", SESSION, 6).await;
        put_fork(&bucket, "f2", "f1", 1).await;
        bucket
    });
    let mut objects = read_objects(&bucket.home.path().join("store"));
    let owner = json!({"version": 1, "namespace": "team", "agent": "claude-code", "session": "s1"});
    let mut add = |key: &str, fields: Value| {
        let mut object = owner.clone();
        let fields = fields.as_object().unwrap().clone();
        object.as_object_mut().unwrap().extend(fields);
        let key = format!("v1/team/claude-code/{key}");
        objects.insert(key, object.to_string().into_bytes());
    };
    add(
        "s1/meta/000000000001.json",
        json!({"ttl": {"seconds": 86400}, "labels": {"team": "infra"}, "request_id": "r1"}),
    );
    add("s1/pins/fork.f1.json", json!({"seq": 6, "fork": "f1"}));
    add(
        "s1/pins/checkpoint.green.json",
        json!({"name": "green", "created_at": "2026-05-01T12:00:00Z", "number": 1, "seq": 3,
            "turn": 1, "at": "2026-05-01T12:00:00Z", "transcript_lengths": {}}),
    );
    add(".requests/r1/s1.json", json!({}));
    objects
});

fn read_objects(store: &Path) -> Objects {
    let mut objects = Objects::new();
    let mut open = vec![store.to_owned()];
    while let Some(directory) = open.pop() {
        for item in std::fs::read_dir(&directory).unwrap().flatten() {
            let key = item.path().strip_prefix(store).unwrap().to_owned();
            match item.file_type().unwrap().is_dir() {
                true => open.push(item.path()),
                false => {
                    let key = key.to_str().unwrap().to_owned();
                    objects.insert(key, std::fs::read(item.path()).unwrap());
                }
            }
        }
    }
    objects.retain(|key, _| key.starts_with("v1/"));
    objects
}

/// A seeded generator of random numbers.
struct SeededRng(u64);

impl SeededRng {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound.max(1)
    }

    fn of<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// The bucket of a seed.
fn bucket_of(seed: u64) -> Objects {
    let mut rng = SeededRng(seed);
    rng.below(2);
    let mut objects = VALID.clone();
    for _ in 0..=rng.below(5) {
        let keys: Vec<String> = objects.keys().cloned().collect();
        let key = rng.of(&keys).clone();
        let bytes = objects[&key].clone();
        match rng.below(8) {
            0 => {
                objects.remove(&key);
            }
            1 => {
                objects.insert(key, other_bytes(&bytes, &mut rng));
            }
            2 => {
                objects.insert(other_key(&key, &mut rng), bytes);
            }
            3 => {
                let other = objects[rng.of(&keys)].clone();
                objects.insert(key, other);
            }
            _ => {
                let seed = rng.below(usize::MAX) as u32;
                objects.insert(key, other_value(&bytes, seed).unwrap_or(bytes));
            }
        }
    }
    objects
}

/// The key with one name replaced: another number, session, namespace, agent or writer.
fn other_key(key: &str, rng: &mut SeededRng) -> String {
    let mut names: Vec<String> = key.split('/').map(str::to_owned).collect();
    let last = names.len() - 1;
    match rng.below(4) {
        0 => names[3.min(last)] = rng.of(&["s1", "s2", "f1", "@p", "x y"]).to_string(),
        1 => names[1] = rng.of(&["team", "other", ".gc"]).to_string(),
        _ => {
            let suffix = names[last]
                .split_once('.')
                .map_or("gz", |(_, suffix)| suffix);
            let (first, second) = (*rng.of(&NUMBERS), *rng.of(&NUMBERS));
            names[last] = match rng.below(3) {
                0 => format!("{first}-{second}.{suffix}"),
                _ => format!("{first}.{suffix}"),
            };
        }
    }
    names.join("/")
}

/// Damaged bytes: none, some, wrong ones, or a stream that expands a thousandfold.
fn other_bytes(bytes: &[u8], rng: &mut SeededRng) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    match rng.below(6) {
        0 => Vec::new(),
        1 => bytes[..rng.below(bytes.len())].to_vec(),
        2 => gzip(&vec![b'{'; 40 << 20]),
        3 => {
            let header = json!({"version": 1}).to_string();
            gzip(&[header.as_bytes(), b"\n", &vec![0; 80 << 20]].concat())
        }
        4 => b"\x1f\x8b\x08\x00 no gzip".to_vec(),
        _ => {
            let at = rng.below(bytes.len());
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << rng.below(8);
            }
            bytes
        }
    }
}

/// The object with one value of its header, or of its JSON, changed.
fn other_value(bytes: &[u8], seed: u32) -> Option<Vec<u8>> {
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return mutate::change_a_value(bytes, 1, seed);
    }
    let mut plain = Vec::new();
    let mut decoder = flate2::read::MultiGzDecoder::new(bytes);
    decoder.read_to_end(&mut plain).ok()?;
    if plain.first() == Some(&b'{') {
        return Some(gzip(&mutate::change_a_value(&plain, 1, seed)?));
    }
    // A snapshot: change any byte of the tar, or a value of its header with the same length.
    let at = seed as usize % plain.len().max(1);
    *plain.get_mut(at)? ^= 1 << (seed % 8);
    Some(gzip(&plain))
}

/// An attack from `fuzz/buckets`: changes of the valid bucket, in order.
fn attack(text: &str) -> Objects {
    let mut objects = VALID.clone();
    let changes: Vec<Value> = serde_json::from_str(text).unwrap();
    for change in &changes {
        let key = change["key"].as_str().unwrap().to_owned();
        let from = change["from"].as_str().unwrap_or(&key);
        let len = change["repeat"].as_u64().unwrap_or(1) as usize;
        let bytes = match &change["content"] {
            Value::Null if change["header"].is_null() => objects[from].clone(),
            Value::Null => {
                let fields = change["header"].as_object().unwrap().clone();
                with_header(&objects[from], fields)
            }
            Value::String(text) => text.as_bytes().repeat(len),
            other => other.to_string().into_bytes(),
        };
        let bytes = match change["gzip"].as_bool() {
            Some(true) => gzip(&bytes),
            _ => bytes,
        };
        objects.insert(key, bytes);
    }
    objects
}

/// The entry with other fields in its header.
fn with_header(entry: &[u8], fields: serde_json::Map<String, Value>) -> Vec<u8> {
    let mut plain = Vec::new();
    let mut decoder = flate2::read::GzDecoder::new(entry);
    decoder.read_to_end(&mut plain).unwrap();
    let end = plain.iter().position(|byte| *byte == b'\n').unwrap();
    let mut header: Value = serde_json::from_slice(&plain[..end]).unwrap();
    header.as_object_mut().unwrap().extend(fields);
    gzip(&[header.to_string().as_bytes(), &plain[end..]].concat())
}

/// Runs every reader on a bucket; returns what they did wrong.
fn check(objects: &Objects) -> Vec<String> {
    let home = TempHome::new();
    let store = home.path().join("store");
    for (key, bytes) in objects {
        // A file store cannot hold an object and a directory of the same name.
        let path = store.join(key);
        if std::fs::create_dir_all(path.parent().unwrap()).is_ok() {
            let _ = std::fs::write(path, bytes);
        }
    }
    let outside = home.path().join("outside");
    std::fs::create_dir_all(&outside).unwrap();
    std::fs::write(outside.join("file"), "unchanged").unwrap();
    let mut wrong = Vec::new();
    let before = tree(home.path());
    let commands: [&[&str]; 9] = [
        &["verify", "--all", "--deep"],
        &["restore", "s1"],
        &["restore", "f2"],
        &["pull", "s1", "--to", "../pulled"],
        &["pull", "s1", "--raw", "--to", "../raw"],
        &["messages", "f2"],
        &["reindex"],
        &["gc", "--history", "1s"],
        &["daemon"],
    ];
    for arguments in commands {
        wrong.extend(run(&home, arguments).err());
    }
    let after = tree(home.path());
    for (path, item) in &after {
        if before.get(path) != Some(item) {
            wrong.push(format!("{} was written", path.display()));
        }
    }
    for path in before.keys().filter(|path| !after.contains_key(*path)) {
        wrong.push(format!("{} was removed", path.display()));
    }
    wrong
}

/// Whether the commands may write to a path.
fn is_target(path: &Path) -> bool {
    ["store", "home/root", "pulled", "raw", "tmp"]
        .iter()
        .any(|prefix| path.starts_with(prefix))
        || path.to_string_lossy().starts_with("index.db")
}

/// A file with its mode and content, or a link with its target.
#[derive(PartialEq)]
enum Item {
    Directory,
    Link(PathBuf),
    File(u32, Vec<u8>),
}

/// Every path below a directory to which the commands may not write.
fn tree(root: &Path) -> BTreeMap<PathBuf, Item> {
    let mut all = BTreeMap::new();
    let mut open = vec![root.to_owned()];
    while let Some(directory) = open.pop() {
        for item in std::fs::read_dir(&directory).into_iter().flatten() {
            let full = item.unwrap().path();
            let path = full.strip_prefix(root).unwrap().to_owned();
            if is_target(&path) {
                continue;
            }
            let metadata = std::fs::symlink_metadata(&full).unwrap();
            let item = if metadata.is_dir() {
                open.push(full);
                Item::Directory
            } else if metadata.is_symlink() {
                Item::Link(std::fs::read_link(&full).unwrap())
            } else {
                Item::File(metadata.mode(), std::fs::read(&full).unwrap())
            };
            all.insert(path, item);
        }
    }
    all
}

/// Runs a command with limits.
fn run(home: &TempHome, arguments: &[&str]) -> Result<(), String> {
    let is_daemon = arguments[0] == "daemon";
    let mut command: Command = home.command(Path::new("/bin/sh"));
    command
        .args([
            "-c",
            "ulimit -d \"$0\" && exec \"$@\"",
            &MAX_MEMORY_KIB.to_string(),
        ])
        .arg(sessiond())
        .args(arguments)
        .args(["--namespace", "team", "--root"])
        .arg(home.home().join("root"))
        .arg("--store")
        .arg(format!("file://{}", home.path().join("store").display()))
        .arg("--index")
        .arg(format!(
            "sqlite://{}",
            home.path().join("index.db").display()
        ))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = stderr.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let started = Instant::now();
    let mut is_stopped = false;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if is_daemon && !is_stopped && started.elapsed() > DAEMON_TIME {
            is_stopped = true;
            let pid = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        }
        if started.elapsed() > MAX_TIME {
            child.kill().unwrap();
            child.wait().unwrap();
            return Err(format!("{arguments:?} did not end within {MAX_TIME:?}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let text = reader.join().unwrap();
    match status.code() {
        Some(0..=12) if !text.contains("panicked at") => Ok(()),
        _ => Err(format!("{arguments:?} ended with {status}: {text}")),
    }
}

slow!(any_bucket_is_read_within_limits);
fn any_bucket_is_read_within_limits() {
    let attacks = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/buckets");
    let mut count = 0;
    let mut wrong: Vec<String> = Vec::new();
    let mut report = |name: &str, objects: &Objects| {
        let found = check(objects);
        wrong.extend(found.into_iter().map(|why| format!("{name}: {why}")));
    };
    report("the valid bucket", &VALID);
    for item in std::fs::read_dir(attacks).unwrap().flatten() {
        let text = std::fs::read_to_string(item.path()).unwrap();
        report(&item.path().display().to_string(), &attack(&text));
        count += 1;
    }
    assert!(count >= 10, "only {count} attacks");
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    if let Some(seed) = number("SESSIOND_FUZZ_SEED") {
        report(&format!("seed {seed}"), &bucket_of(seed));
    } else {
        let (started, seconds) = (Instant::now(), number("SESSIOND_FUZZ_SECONDS"));
        // Different buckets in every longer run; the same few in every test run.
        let base = seconds.map_or(0, |_| u64::from(std::process::id()) << 20);
        let is_due = |done: u64| match seconds {
            Some(seconds) => started.elapsed() < Duration::from_secs(seconds),
            None => done < 4,
        };
        let mut done = 0;
        while is_due(done) {
            let seed = base + done;
            report(
                &format!("seed {seed} (SESSIOND_FUZZ_SEED={seed})"),
                &bucket_of(seed),
            );
            done += 1;
        }
        let _ = writeln!(
            std::io::stderr(),
            "any-bucket: {count} attacks, {done} random buckets"
        );
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
