//! Readable without us: the recipe of docs/FORMAT.md, run from its own text, brings a session back with gzip, tar and jq.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use sessiond::codec::snapshot::{self, Manifest};
use sessiond::model::{Digest, FileAt, FileKind, NamedFile};

use crate::support::TempHome;
use crate::support::backend::{Backend, append, transcript};
use crate::support::fetch;

fn recipe() -> String {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/FORMAT.md")).unwrap();
    let (_, behind) = text.split_once("```sh\n").expect("docs/FORMAT.md has a recipe");
    behind.split_once("```").unwrap().0.to_owned()
}

fn recover(folder: &Path, to: &Path) {
    if let Err(why) = fetch::jq() {
        return crate::support::skip(&why);
    }
    let output = Command::new("sh").args(["-euc", &recipe(), "recover"]).args([folder, to]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn files(root: &Path, below: &Path, found: &mut BTreeMap<String, Vec<u8>>) {
    for item in std::fs::read_dir(below).unwrap() {
        let path = item.unwrap().path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".sessiond")) {
            continue;
        }
        if path.is_dir() {
            files(root, &path, found);
        } else {
            found.insert(path.strip_prefix(root).unwrap().to_string_lossy().into_owned(), std::fs::read(&path).unwrap());
        }
    }
}

fn all(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    files(root, root, &mut found);
    found
}

#[test]
fn a_session_comes_back_with_gzip_tar_and_jq_alone() {
    let backend = Backend::file();
    let home = TempHome::new();
    let root = home.home().join(".claude");
    let daemon = backend.daemon(&home, &[]);
    let path = transcript(&home, "s1");
    append(&path, "{\"n\":1,\"text\":\"ä\"}\n{\"n\":2}\n");
    append(&root.join("projects/-work-app/s1/tool-results/with space.txt"), "no newline at its end");
    backend.run(&home, &["flush", "--wait"]).ok();
    append(&path, "{\"n\":3}\n");
    std::fs::write(root.join("projects/-work-app/s1/tool-results/with space.txt"), "replaced").unwrap();
    backend.run(&home, &["flush", "--wait"]).ok();
    // Rewritten by rename, as a compaction does it; then moved to another project folder.
    std::fs::write(root.join("projects/-work-app/new"), "{\"n\":4}\n").unwrap();
    std::fs::rename(root.join("projects/-work-app/new"), &path).unwrap();
    backend.run(&home, &["flush", "--wait"]).ok();
    std::fs::create_dir_all(root.join("projects/-other")).unwrap();
    std::fs::rename(&path, root.join("projects/-other/s1.jsonl")).unwrap();
    append(&root.join("projects/-other/s1.jsonl"), "{\"n\":5}\n");
    backend.run(&home, &["flush", "--wait"]).ok();
    drop(daemon);

    let folder = backend.path().join("bucket/v1/default/claude-code/s1");
    let to = home.path().join("recovered");
    recover(&folder, &to);
    let expected = all(&root);
    assert_eq!(expected["projects/-other/s1.jsonl"], b"{\"n\":4}\n{\"n\":5}\n");
    assert_eq!(all(&to), expected);
    // And with us, the same.
    let other = TempHome::new();
    backend.run(&other, &["restore", "s1"]).ok();
    assert_eq!(all(&other.home().join(".claude")), expected);
}

#[test]
fn a_snapshot_stands_for_the_entries_before_it() {
    let backend = Backend::file();
    let home = TempHome::new();
    append(&transcript(&home, "s1"), "{\"n\":1}\n");
    backend.run(&home, &["run", "--", "true"]).ok();
    let folder = backend.path().join("bucket/v1/default/claude-code/s1");
    let entry = std::fs::read(folder.join("log/000000000002.gz")).unwrap();
    let bytes = std::fs::read(transcript(&home, "s1")).unwrap();
    let manifest = Manifest {
        v: 1,
        agent: "claude-code".parse().unwrap(),
        session: "s1".parse().unwrap(),
        seq: 2,
        digest: Digest::of(&entry),
        at: "2026-05-01T12:00:00Z".parse().unwrap(),
        files: vec![NamedFile {
            path: "projects/-work-app/s1.jsonl".parse().unwrap(),
            at: FileAt {
                kind: FileKind::Append,
                len: bytes.len() as u64,
                sha256: Digest::of(&bytes),
                mode: 0o600,
                mtime_ns: 1_700_000_000_000_000_000,
                seq: 2,
            },
        }],
    };
    std::fs::create_dir(folder.join("snap")).unwrap();
    std::fs::write(folder.join("snap/000000000002.tar.gz"), snapshot::build(&manifest, |_| Ok(&bytes[..])).unwrap()).unwrap();
    append(&transcript(&home, "s1"), "{\"n\":2}\n");
    backend.run(&home, &["run", "--session", "s1", "--", "true"]).ok();
    for collected in ["000000000001.gz", "000000000002.gz"] {
        std::fs::remove_file(folder.join("log").join(collected)).unwrap();
    }
    let to = home.path().join("recovered");
    recover(&folder, &to);
    assert_eq!(all(&to), all(&home.home().join(".claude")));
    let other = TempHome::new();
    backend.run(&other, &["restore", "s1"]).ok();
    assert_eq!(std::fs::read(transcript(&other, "s1")).unwrap(), b"{\"n\":1}\n{\"n\":2}\n");
    backend.run(&other, &["verify", "s1"]).ok();
}

#[test]
fn the_entrypoint_of_the_examples_works() {
    let backend = Backend::file();
    let home = TempHome::new();
    let program = crate::support::sessiond();
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let inner = backend.command(&home, &[]);
    let entrypoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/entrypoint.sh");
    let mut command = Command::new(entrypoint);
    command.env_clear().envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("PATH", path).current_dir(home.home());
    let output = command.args(["s1", "sh", "-c", "echo started; exit 3"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(3), b"started\n".as_slice()), "{output:?}");
}
