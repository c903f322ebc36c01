//! What real transcripts of Claude Code say: `tests/fixtures/claude` was written by the program itself, against a model server
//! that made its answers up.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use sessiond::agent::Profile;
use sessiond::agent::claude_code::ClaudeCode;
use sessiond::agent::transcript::Reader;
use sessiond::model::{Digest, FileKind, Part, RelPath, Role, Tokens, Turns};

use crate::support::world::files_below;

/// What a session says, in a few words a line.
fn told(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/claude").join(name);
    let profile = ClaudeCode::new("claude-code".parse().unwrap());
    let files: BTreeMap<RelPath, Vec<u8>> = files_below(&root).into_iter().map(|(path, bytes)| (path.parse().unwrap(), bytes)).collect();
    let (mut reader, mut turns, mut out) = (Reader::default(), Turns::default(), String::new());
    let mut took: BTreeMap<String, Tokens> = BTreeMap::new();
    let mut unread = 0;
    for (path, bytes) in files.iter().filter(|(path, _)| profile.is_conversation(path)) {
        let part = Part {
            path: path.clone(),
            kind: FileKind::Append,
            start: 0,
            len: bytes.len() as u64,
            file_sha256: Digest::of(bytes),
            mode: 0o600,
            mtime_ns: 0,
            seq: None,
        };
        let told = reader.read(&profile, [(&part, bytes.as_slice())].into_iter());
        let mut roles: BTreeMap<Role, u64> = BTreeMap::new();
        for said in &told.said {
            *roles.entry(said.message.role).or_default() += 1;
            if let (Some(answer), Some(tokens)) = (&said.message.answer, said.message.tokens) {
                took.insert(answer.clone(), tokens);
            }
        }
        let side = if profile.is_transcript(path) { "main" } else { "sub-agent" };
        writeln!(out, "{side}: {}", roles.iter().map(|(role, count)| format!("{count} {}", role.word())).collect::<Vec<_>>().join(", "))
            .unwrap();
        for point in turns.take(&told.marks, &BTreeMap::new()) {
            writeln!(out, "  turn {} checkpoint {} {}", point.turn, point.number, point.stop.unwrap_or_default()).unwrap();
        }
        if profile.is_transcript(path) {
            for call in &turns.pending {
                writeln!(out, "  pending {} {}", call.name, call.input).unwrap();
            }
            if let Some(cost) = told.facts.cost {
                writeln!(out, "  cost {cost}").unwrap();
            }
        }
        unread += told.unread.values().sum::<u64>();
    }
    let all = took.values().fold(Tokens::default(), |all, tokens| all.and(*tokens));
    writeln!(out, "tokens {} {} {} {}; unread {unread}", all.input, all.output, all.cache_read, all.cache_write).unwrap();
    out
}

#[test]
fn what_the_real_program_wrote_is_understood() {
    let names = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/claude")).unwrap();
    let mut names: Vec<String> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let all: String = names.iter().map(|name| format!("== {name}\n{}", told(name))).collect();
    assert_eq!(all, include_str!("real_transcripts.txt"));
}
