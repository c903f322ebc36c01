//! The properties of every input: one function per fuzz target, which returns whether the input was
//! accepted.
//!
//! `tests/it/corpus.rs` runs the same functions on the committed corpus. `super` provides the
//! modules of sessiond: included by path here, imported there.

use std::io::Write;
use std::path::Path;
use std::sync::LazyLock;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::agent::claude_code::ClaudeCode;
use super::agent::generic::Generic;
use super::agent::transcript::TranscriptReader;
use super::agent::{FileClass, Profile};
use super::codec::entry;
use super::codec::snapshot::{self, HEADER};
use super::error::{Error, ErrorKind};
use super::model::{
    Digest, EntryHeader, FileKind, LogName, ParsedTranscripts, Part, Patterns, RelPath, keys,
};

const GZIP: &[u8] = &[0x1f, 0x8b];

/// Created once: parsing its patterns takes longer than checking a path.
static GENERIC: LazyLock<Generic> = LazyLock::new(|| {
    Generic::new(plain("generic"), &Patterns::default())
        .unwrap_or_else(|error| panic!("the default patterns: {error}"))
});

/// A stored entry. An input that is not gzip is compressed first, so that the fuzzer reaches the
/// header.
pub fn entry(input: &[u8]) -> bool {
    let stored = if input.starts_with(GZIP) {
        input.to_vec()
    } else {
        gzip(input)
    };
    let entry = match entry::decode("log/x.gz", &stored) {
        Ok(entry) => entry,
        Err(error) => return rejected(&error),
    };
    check_digest(&entry, &stored);
    let bodies: Vec<Vec<u8>> = entry.parts().map(|(_, bytes)| bytes.to_vec()).collect();
    assert_eq!(
        bodies.concat(),
        entry.body,
        "the parts are not the complete body"
    );
    let again = entry::encode(entry.header.clone(), &bodies)
        .unwrap_or_else(|error| panic!("cannot encode the decoded entry: {error}"));
    let again = entry::decode("log/x.gz", &again.bytes)
        .unwrap_or_else(|error| panic!("cannot decode it again: {error}"));
    assert_eq!(
        (again.header, again.body),
        (entry.header, entry.body),
        "the round trip changed it"
    );
    true
}

/// A stored snapshot, accepted if every file has its digest. An input that starts with a brace is a
/// header line and the bytes of its files; any other input that is not gzip is a tar file, whose
/// checksums are corrected because a fuzzer does not guess them.
pub fn snapshot(input: &[u8]) -> bool {
    let stored = match input.first() {
        _ if input.starts_with(GZIP) => input.to_vec(),
        Some(b'{') => gzip(&archive(input)),
        _ => gzip(&with_checksums(input.to_vec())),
    };
    let entry = match snapshot::decode("snap/x.tar.gz", &stored) {
        Ok(entry) => entry,
        Err(error) => return rejected(&error),
    };
    check_digest(&entry, &stored);
    let bodies: Vec<&[u8]> = entry.parts().map(|(_, bytes)| bytes).collect();
    assert_eq!(
        bodies.concat(),
        entry.body,
        "the files are not the complete body"
    );
    let again = snapshot::encode(entry.header.clone(), &bodies)
        .unwrap_or_else(|error| panic!("cannot encode the decoded entry: {error}"));
    let again = snapshot::decode("snap/x.tar.gz", &again.bytes)
        .unwrap_or_else(|error| panic!("cannot decode it again: {error}"));
    assert_eq!(
        (&again.header, &again.body),
        (&entry.header, &entry.body),
        "the round trip changed it"
    );
    entry
        .parts()
        .all(|(part, bytes)| Digest::of(bytes) == part.file_sha256)
}

/// A compacted segment has the digest of its last entry: the `prev_digest` of the next one.
fn check_digest(entry: &entry::Entry, stored: &[u8]) {
    let digest = entry
        .header
        .covers
        .as_ref()
        .map_or_else(|| Digest::of(stored), |covers| covers.digest);
    assert_eq!(
        (entry.digest, entry.stored_bytes),
        (digest, stored.len() as u64)
    );
}

/// A part of a transcript, accepted if it contains any fact.
pub fn transcript(input: &[u8]) -> bool {
    let profile = ClaudeCode::new(plain("claude-code"));
    let read = |reader: &mut TranscriptReader, path: &str, start: usize, bytes: &[u8]| {
        let path: RelPath = plain(path);
        let (start, len) = (start as u64, bytes.len() as u64);
        let part = Part {
            path,
            kind: FileKind::Append,
            start,
            len,
            file_sha256: Digest::of(b""),
            mode: 0,
            mtime_ns: 0,
            seq: None,
            upload: None,
        };
        reader.read(&profile, [(&part, bytes)].into_iter())
    };
    const PATH: &str = "projects/-work-app/3f2a.jsonl";
    let whole = read(&mut TranscriptReader::default(), PATH, 0, input);
    let facts = [
        &whole.facts.cwd,
        &whole.facts.title,
        &whole.facts.model,
        &whole.facts.agent_version,
    ];
    for text in facts.into_iter().flatten() {
        assert!(text.len() <= input.len(), "a fact is longer than the input");
    }
    let mut end = 0;
    for message in &whole.messages {
        assert!(
            message.start >= end
                && message.len > 0
                && message.start + message.len <= input.len() as u64,
            "messages overlap, or exceed their file"
        );
        end = message.start + message.len;
    }
    // An entry may end anywhere; the result is the same.
    for cut in [
        input.len() / 3,
        input.len() / 2,
        input.len().saturating_sub(1),
    ] {
        let mut reader = TranscriptReader::default();
        let (first, second) = (
            read(&mut reader, PATH, 0, &input[..cut]),
            read(&mut reader, PATH, cut, &input[cut..]),
        );
        let unparsed = |parsed: &ParsedTranscripts| parsed.unparsed_lines.values().sum::<u64>();
        assert_eq!(
            unparsed(&first) + unparsed(&second),
            unparsed(&whole),
            "cut at {cut}"
        );
        assert_eq!(
            [first.messages, second.messages].concat(),
            whole.messages,
            "cut at {cut}"
        );
        assert_eq!(
            first.facts.updated_with(second.facts),
            whole.facts,
            "cut at {cut}"
        );
    }
    // A file that is not a transcript has no facts.
    let other = read(
        &mut TranscriptReader::default(),
        "projects/-work-app/3f2a/tool-results/t.txt",
        0,
        input,
    );
    assert!(other.messages.is_empty() && other.facts == Default::default());
    facts.iter().any(|fact| fact.is_some())
}

/// A path from an entry or a listing, accepted if a file may have it.
pub fn path(input: &[u8]) -> bool {
    let text = String::from_utf8_lossy(input);
    // Listings return any key in the bucket.
    if let Some(seq) = keys::entry_seq(&text).or_else(|| keys::snapshot_seq(&text)) {
        assert!(seq > 0);
    }
    if let Some(name) = keys::log_name(&text) {
        check_round_trip(&name);
    }
    let Ok(path) = text.parse::<RelPath>() else {
        return false;
    };
    let root = Path::new("/root-of-all");
    let below = path.below(root);
    let inside = below
        .strip_prefix(root)
        .unwrap_or_else(|_| panic!("{below:?} is not below the root"));
    assert!(
        inside
            .components()
            .all(|part| matches!(part, std::path::Component::Normal(_))),
        "{below:?} leaves the root"
    );
    assert!(
        inside.components().count() == path.components().count()
            && path.components().next_back() == Some(path.name())
    );
    let claude_code = ClaudeCode::new(plain("claude-code"));
    for profile in [&claude_code as &dyn Profile, &*GENERIC] {
        let FileClass::Stored(name, _) = profile.classify(&path) else {
            continue;
        };
        check_round_trip(&name);
        assert!(
            !path.components().any(|part| part == ".sessiond"),
            "{path}: the state of sessiond is stored"
        );
        // A scan finds the file only if it enters all parent directories.
        let mut directory = path.parent();
        while let Some(at) = directory {
            assert!(
                profile.is_scanned(&at),
                "{path} is stored, but {at} is not scanned"
            );
            directory = at.parent();
        }
        for directory in profile.log_directories(&name, &[&path].into()) {
            assert!(!directory.as_str().is_empty());
        }
        profile.project_log(&path).iter().for_each(check_round_trip);
    }
    true
}

/// A log name must be the same after parsing its key.
fn check_round_trip(name: &LogName) {
    assert_eq!(
        keys::log_name(&format!("v1/n/a/{name}/")).as_ref(),
        Some(name)
    );
}

/// A rejected input is damaged or of a newer format, and nothing else.
fn rejected(error: &Error) -> bool {
    assert!(
        matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NewerFormat),
        "{error}"
    );
    false
}

fn plain<T: std::str::FromStr<Err = Error>>(text: &str) -> T {
    text.parse()
        .unwrap_or_else(|error| panic!("{text} is plain: {error}"))
}

/// A gzip stream without compression: as fast as a copy, and the input stays visible in it.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::none());
    gzip.write_all(bytes)
        .and_then(|()| gzip.finish())
        .unwrap_or_else(|error| panic!("write to memory: {error}"))
}

/// A tar file of a header and of the files that it lists, as far as the input has bytes for them.
fn archive(input: &[u8]) -> Vec<u8> {
    let end = input
        .iter()
        .position(|byte| *byte == b'\n')
        .unwrap_or(input.len());
    let (text, mut rest) = (&input[..end], input.get(end + 1..).unwrap_or_default());
    let mut members = vec![(HEADER.to_owned(), text)];
    for part in serde_json::from_slice::<EntryHeader>(text)
        .into_iter()
        .flat_map(|header| header.parts)
    {
        let (bytes, following) = rest.split_at(
            rest.len()
                .min(usize::try_from(part.len).unwrap_or(usize::MAX)),
        );
        members.push((part.path.to_string(), bytes));
        rest = following;
    }
    let mut tar = tar::Builder::new(Vec::new());
    for (path, bytes) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        // A name that tar cannot write is left out; the reader must reject the result.
        let _ = tar.append_data(&mut header, path, bytes);
    }
    tar.into_inner()
        .unwrap_or_else(|error| panic!("write to memory: {error}"))
}

/// Corrects the checksum of every header of a tar file.
pub fn with_checksums(mut bytes: Vec<u8>) -> Vec<u8> {
    let mut at = 0usize;
    while let Some(block) = bytes.get_mut(at..at.saturating_add(512)) {
        if block.iter().any(|byte| *byte != 0) {
            block[148..156].fill(b' ');
            let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        let digits = String::from_utf8_lossy(&block[124..136]).into_owned();
        let size = usize::from_str_radix(digits.trim_matches(['\0', ' ']), 8).unwrap_or(0);
        at = at
            .saturating_add(512)
            .saturating_add(size.div_ceil(512).saturating_mul(512));
    }
    bytes
}
