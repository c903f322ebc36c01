//! Open format: the recipe of docs/reference/format.md, run from its own text, recovers a session
//! with gzip, tar and jq.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use sessiond::capture::flush::LogFlusher;
use sessiond::model::{LogPoint, ResolvedPoint};
use sessiond::restore;
use sessiond::sys::Disk;
use sessiond::upkeep::compact::compact;
use sessiond::verify::verify;

use crate::support::TempHome;
use crate::support::backend::{Backend, transcript};
use crate::support::fetch;
use crate::support::files::append;
use crate::support::needs_tools;
use crate::support::shell_blocks::blocks;
use crate::support::world::World;
use crate::support::writer::FlushAll;

fn recipe() -> String {
    let text = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/format.md"),
    )
    .unwrap();
    let recipe = blocks(&text)
        .into_iter()
        .find(|block| block.language == "sh");
    recipe.expect("docs/reference/format.md has a recipe").body
}

fn recover(directory: &Path, to: &Path) {
    if let Err(why) = fetch::program("jq") {
        return crate::support::skip(&why);
    }
    let output = Command::new("sh")
        .args(["-euc", &recipe(), "recover"])
        .args([directory, to])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn files(root: &Path, below: &Path, found: &mut BTreeMap<String, Vec<u8>>) {
    for item in std::fs::read_dir(below).unwrap() {
        let path = item.unwrap().path();
        if path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(".sessiond"))
        {
            continue;
        }
        if path.is_dir() {
            files(root, &path, found);
        } else {
            found.insert(
                path.strip_prefix(root)
                    .unwrap()
                    .to_string_lossy()
                    .into_owned(),
                std::fs::read(&path).unwrap(),
            );
        }
    }
}

fn all(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    files(root, root, &mut found);
    found
}

needs_tools!(a_session_is_recovered_with_gzip_tar_and_jq_alone);
fn a_session_is_recovered_with_gzip_tar_and_jq_alone() {
    let backend = Backend::file();
    let home = TempHome::new();
    let root = home.home().join(".claude");
    let daemon = backend.daemon(&home, &[]);
    let path = transcript(&home, "s1");
    append(&path, "{\"n\":1,\"text\":\"ä\"}\n{\"n\":2}\n");
    append(
        &root.join("projects/-work-app/s1/tool-results/with space.txt"),
        "no newline at its end",
    );
    backend.run(&home, &["flush", "--wait"]).ok();
    append(&path, "{\"n\":3}\n");
    std::fs::write(
        root.join("projects/-work-app/s1/tool-results/with space.txt"),
        "replaced",
    )
    .unwrap();
    backend.run(&home, &["flush", "--wait"]).ok();
    // Rewritten by rename, as a compaction does it; then moved to another project directory.
    std::fs::write(root.join("projects/-work-app/new"), "{\"n\":4}\n").unwrap();
    std::fs::rename(root.join("projects/-work-app/new"), &path).unwrap();
    backend.run(&home, &["flush", "--wait"]).ok();
    std::fs::create_dir_all(root.join("projects/-other")).unwrap();
    std::fs::rename(&path, root.join("projects/-other/s1.jsonl")).unwrap();
    append(&root.join("projects/-other/s1.jsonl"), "{\"n\":5}\n");
    backend.run(&home, &["flush", "--wait"]).ok();
    drop(daemon);

    let directory = backend.path().join("bucket/v1/default/claude-code/s1");
    let to = home.path().join("recovered");
    recover(&directory, &to);
    let expected = all(&root);
    assert_eq!(
        expected["projects/-other/s1.jsonl"],
        b"{\"n\":4}\n{\"n\":5}\n"
    );
    assert_eq!(all(&to), expected);
    // sessiond gives the same.
    let other = TempHome::new();
    backend.run(&other, &["restore", "s1"]).ok();
    assert_eq!(all(&other.home().join(".claude")), expected);
}

needs_tools!(async snapshots_and_merges_replace_their_entries_in_the_recipe);
async fn snapshots_and_merges_replace_their_entries_in_the_recipe() {
    let world = World::new();
    let (logs, id) = (world.logs(), world.id("s1"));
    let mut shipment = LogFlusher::new(id.clone());
    let mut path = "projects/-work-app/s1.jsonl";
    for number in 0..118 {
        match number {
            // Within the merge: rewritten, moved, then appended to. A file of the snapshot is
            // replaced.
            70 => world.write(path, "{\"n\":\"anew\"}\n"),
            80 => {
                std::fs::create_dir_all(world.root().join("projects/-other")).unwrap();
                std::fs::rename(
                    world.root().join(path),
                    world.root().join("projects/-other/s1.jsonl"),
                )
                .unwrap();
                path = "projects/-other/s1.jsonl";
            }
            _ => {}
        }
        world.append(path, format!("{{\"n\":{number}}}\n"));
        if number % 9 == 0 {
            world.write("tasks/s1/1.json", format!("{number}"));
        }
        shipment
            .paths
            .extend([path.parse().unwrap(), "tasks/s1/1.json".parse().unwrap()]);
        shipment.flush(&world.context(), false).await.unwrap();
    }
    let expected = all(&world.root());
    let made = compact(&logs, &id, 119).await.unwrap();
    assert_eq!(made.segments, 2);
    assert_eq!(
        compact(&logs, &id, 119).await.unwrap().segments,
        0,
        "nothing is made twice"
    );
    let directory = world.path("bucket").join("v1/team/claude-code/s1");
    for seq in 1..=93 {
        // The first half only as compacted segments, the second also as entries.
        let earlier = world.stored_at("s1", seq).await;
        assert!(
            earlier.contains_key("projects/-work-app/s1.jsonl") || seq > 80 || seq == 1,
            "entry {seq}: {:?}",
            earlier.keys()
        );
    }
    for collected in 1..=93 {
        std::fs::remove_file(directory.join(format!("log/{collected:012}.gz"))).unwrap();
    }
    let to = world.path("recovered");
    recover(&directory, &to);
    assert_eq!(all(&to), expected);
    assert_eq!(world.stored("s1").await.unwrap(), expected);
    let verdict = verify(
        (&logs, world.profile()),
        &id,
        &[],
        &Disk::new(world.path("scratch")),
        true,
    )
    .await
    .unwrap();
    assert_eq!(
        (verdict.damage, verdict.undamaged_to, verdict.objects),
        (vec![], 119, 28)
    );
    // A point inside a merge cannot be restored any more, and the error lists the points that can.
    let target = Disk::new(world.path("target"));
    let context = restore::RestoreContext {
        directory: Arc::new(target),
        profile: world.writer.context.profile.clone(),
        logs,
    };
    let options = restore::Options {
        point: ResolvedPoint {
            at: LogPoint::Seq(60),
            ..ResolvedPoint::default()
        },
        ..restore::Options::default()
    };
    let error = restore::restore(&context, &id, &options).await.unwrap_err();
    assert_eq!(error.kind(), sessiond::error::ErrorKind::NotFound);
    assert!(
        error
            .hint_text()
            .unwrap()
            .contains("--at seq:47 or --at seq:93"),
        "{error} {:?}",
        error.hint_text()
    );
}

#[test]
fn the_entrypoint_of_the_examples_works() {
    let backend = Backend::file();
    let home = TempHome::new();
    let program = crate::support::sessiond();
    let path = format!(
        "{}:{}",
        program.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let inner = backend.command(&home, &[]);
    let entrypoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/entrypoint.sh");
    let mut command = Command::new(entrypoint);
    command
        .env_clear()
        .envs(
            inner
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        )
        .env("PATH", path)
        .current_dir(home.home());
    let output = command
        .args(["s1", "sh", "-c", "echo started; exit 3"])
        .output()
        .unwrap();
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(3), b"started\n".as_slice()),
        "{output:?}"
    );
}

needs_tools!(the_recipe_refuses_paths_outside_of_its_target);
fn the_recipe_refuses_paths_outside_of_its_target() {
    if let Err(why) = fetch::program("jq") {
        return crate::support::skip(&why);
    }
    for path in ["../escaped", "/tmp/escaped", "a/../../escaped"] {
        let home = TempHome::new();
        let (directory, to) = (home.path().join("session"), home.path().join("to"));
        std::fs::create_dir_all(directory.join("log")).unwrap();
        let header = serde_json::json!({"parts": [{"start": 0, "len": 1, "path": path}]});
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut gzip, format!("{header}\nx").as_bytes()).unwrap();
        let entry = directory.join("log/000000000001.gz");
        std::fs::write(entry, gzip.finish().unwrap()).unwrap();
        let output = Command::new("sh")
            .args(["-c", &recipe(), "recover"])
            .args([&directory, &to])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{path}");
        assert!(text.contains("error: unsafe path: "), "{path}: {text}");
        assert!(!home.path().join("escaped").exists(), "{path}");
    }
}
