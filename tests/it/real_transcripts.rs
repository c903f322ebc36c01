//! Parsing of real transcripts: `tests/fixtures/claude`, `codex` and `gemini` were written by the
//! agents against a model server with invented responses. Only directory names were changed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use crate::support::files::files_below;
use sessiond::agent::Profile;
use sessiond::agent::claude_code::ClaudeCode;
use sessiond::agent::codex::Codex;
use sessiond::agent::gemini::Gemini;
use sessiond::agent::transcript::TranscriptReader;
use sessiond::model::{
    CheckpointInterval, Digest, FileKind, Part, RelPath, Role, Tokens, TurnTracker,
};

/// Summarizes the session in a directory, with a few words per line.
fn summarize_session(profile: &dyn Profile, root: &Path) -> String {
    let files: BTreeMap<RelPath, Vec<u8>> = files_below(root)
        .into_iter()
        .map(|(path, bytes)| (path.parse().unwrap(), bytes))
        .collect();
    let (mut reader, mut turns, mut out) = (
        TranscriptReader::default(),
        TurnTracker::default(),
        String::new(),
    );
    let mut took: BTreeMap<String, Tokens> = BTreeMap::new();
    let mut unread = 0;
    for (path, bytes) in files.iter().filter(|(path, _)| profile.has_messages(path)) {
        let part = Part {
            path: path.clone(),
            kind: FileKind::Append,
            start: 0,
            len: bytes.len() as u64,
            file_sha256: Digest::of(bytes),
            mode: 0o600,
            mtime_ns: 0,
            seq: None,
            upload: None,
        };
        let summarize_session = reader.read(profile, [(&part, bytes.as_slice())].into_iter());
        let mut roles: BTreeMap<Role, u64> = BTreeMap::new();
        for said in &summarize_session.messages {
            *roles.entry(said.message.role).or_default() += 1;
            if let (Some(answer), Some(tokens)) = (&said.message.response_id, said.message.tokens) {
                took.insert(answer.clone(), tokens);
            }
        }
        let side = if profile.is_transcript(path) {
            "main"
        } else {
            "sub-agent"
        };
        let counts: Vec<String> = roles
            .iter()
            .map(|(role, count)| format!(" {count} {}", role.as_str()))
            .collect();
        writeln!(out, "{side}:{}", counts.join(",")).unwrap();
        for point in turns.apply(
            &summarize_session.turn_events,
            &BTreeMap::new(),
            CheckpointInterval::default(),
        ) {
            writeln!(
                out,
                "  turn {}{} checkpoint {} {}{}",
                point.turn,
                point
                    .step
                    .map_or_else(String::new, |step| format!(" step {step}")),
                point.number,
                point.status.as_str(),
                point
                    .stop_reason
                    .map_or_else(String::new, |reason| format!(" {reason}"))
            )
            .unwrap();
        }
        if profile.is_transcript(path) {
            for call in &turns.pending_calls {
                writeln!(out, "  pending {} {}", call.name, call.input).unwrap();
            }
            if let Some(model) = summarize_session
                .facts
                .model
                .filter(|_| profile.name().as_str() != ClaudeCode::NAME)
            {
                let known = |fact: Option<String>| fact.unwrap_or_else(|| "?".to_owned());
                writeln!(
                    out,
                    "  {model} in {} by {}",
                    known(summarize_session.facts.cwd),
                    known(summarize_session.facts.agent_version)
                )
                .unwrap();
            }
            if let Some(cost) = summarize_session.facts.cost {
                writeln!(out, "  cost {cost}").unwrap();
            }
        }
        unread += summarize_session.unparsed_lines.values().sum::<u64>();
    }
    let all = took
        .values()
        .fold(Tokens::default(), |all, tokens| all.plus(*tokens));
    writeln!(
        out,
        "tokens {} {} {} {}; unread {unread}",
        all.input, all.output, all.cache_read, all.cache_write
    )
    .unwrap();
    out
}

/// Summarizes all sessions of an agent.
fn summarize_sessions(profile: &dyn Profile, directory: &str) -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(directory);
    let mut roots: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    roots.sort();
    roots
        .iter()
        .map(|root| {
            format!(
                "== {}\n{}",
                root.file_name().unwrap().to_str().unwrap(),
                summarize_session(profile, root)
            )
        })
        .collect()
}

#[test]
fn claude_code_transcripts_are_parsed() {
    let profile = ClaudeCode::new("claude-code".parse().unwrap());
    assert_eq!(
        summarize_sessions(&profile, "claude"),
        include_str!("real_transcripts.txt")
    );
}

#[test]
fn codex_transcripts_are_parsed() {
    let profile = Codex::new("codex".parse().unwrap());
    assert_eq!(
        summarize_sessions(&profile, "codex"),
        include_str!("real_transcripts_codex.txt")
    );
}

#[test]
fn gemini_transcripts_are_parsed() {
    let profile = Gemini::new("gemini".parse().unwrap());
    assert_eq!(
        summarize_sessions(&profile, "gemini"),
        include_str!("real_transcripts_gemini.txt")
    );
}
