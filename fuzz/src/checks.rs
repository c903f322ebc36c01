//! What must hold of every input, whoever made it: one function a fuzz target, which says whether the input was accepted.
//!
//! `tests/it/corpus.rs` runs the same functions over the committed corpus. `super` is where sessiond's modules are: mounted
//! here, imported there.

use std::io::Write;
use std::path::Path;
use std::sync::LazyLock;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::agent::claude_code::ClaudeCode;
use super::agent::generic::Generic;
use super::agent::transcript::Reader;
use super::agent::{FileClass, Profile};
use super::codec::entry;
use super::codec::snapshot::{self, HEADER};
use super::config::Patterns;
use super::error::{Error, ErrorKind};
use super::model::{
    Digest, EntryHeader, FileKind, LogName, ParsedTranscripts, Part, RelPath, keys,
};

const GZIP: &[u8] = &[0x1f, 0x8b];

/// Made once: its patterns take longer to read than a path.
static GENERIC: LazyLock<Generic> = LazyLock::new(|| {
    Generic::new(plain("generic"), &Patterns::default())
        .unwrap_or_else(|error| panic!("the default patterns: {error}"))
});

/// A stored entry. What does not begin as gzip is compressed first, so that a fuzzer gets to the header.
pub fn entry(input: &[u8]) -> bool {
    let stored = if input.starts_with(GZIP) {
        input.to_vec()
    } else {
        gzip(input)
    };
    let entry = match entry::decode("log/x.gz", &stored) {
        Ok(entry) => entry,
        Err(error) => return refused(&error),
    };
    check_digest(&entry, &stored);
    let bodies: Vec<Vec<u8>> = entry.parts().map(|(_, bytes)| bytes.to_vec()).collect();
    assert_eq!(
        bodies.concat(),
        entry.body,
        "the parts are not the whole body"
    );
    let again = entry::encode(entry.header.clone(), &bodies)
        .unwrap_or_else(|error| panic!("encode what was decoded: {error}"));
    let again = entry::decode("log/x.gz", &again.bytes)
        .unwrap_or_else(|error| panic!("decode it again: {error}"));
    assert_eq!(
        (again.header, again.body),
        (entry.header, entry.body),
        "it did not survive a round trip"
    );
    true
}

/// A stored snapshot, accepted if every file has its digest. What begins with a brace is a header in one line and the
/// bytes of its files; what is neither that nor gzip is a tar archive whose checksums are set right: a fuzzer does not
/// guess those.
pub fn snapshot(input: &[u8]) -> bool {
    let stored = match input.first() {
        _ if input.starts_with(GZIP) => input.to_vec(),
        Some(b'{') => gzip(&archive(input)),
        _ => gzip(&with_checksums(input.to_vec())),
    };
    let entry = match snapshot::decode("snap/x.tar.gz", &stored) {
        Ok(entry) => entry,
        Err(error) => return refused(&error),
    };
    check_digest(&entry, &stored);
    let bodies: Vec<&[u8]> = entry.parts().map(|(_, bytes)| bytes).collect();
    assert_eq!(
        bodies.concat(),
        entry.body,
        "the files are not the whole body"
    );
    let again = snapshot::encode(entry.header.clone(), &bodies)
        .unwrap_or_else(|error| panic!("encode what was decoded: {error}"));
    let again = snapshot::decode("snap/x.tar.gz", &again.bytes)
        .unwrap_or_else(|error| panic!("decode it again: {error}"));
    assert_eq!(
        (&again.header, &again.body),
        (&entry.header, &entry.body),
        "it did not survive a round trip"
    );
    entry
        .parts()
        .all(|(part, bytes)| Digest::of(bytes) == part.file_sha256)
}

/// What stands for many entries has the digest of the last of them: the next one names that.
fn check_digest(entry: &entry::Entry, stored: &[u8]) {
    let digest = entry
        .header
        .covers
        .as_ref()
        .map_or_else(|| Digest::of(stored), |covers| covers.digest);
    assert_eq!((entry.digest, entry.stored), (digest, stored.len() as u64));
}

/// A piece of a transcript, accepted if it told anything.
pub fn transcript(input: &[u8]) -> bool {
    let profile = ClaudeCode::new(plain("claude-code"));
    let read = |reader: &mut Reader, path: &str, start: usize, bytes: &[u8]| {
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
        };
        reader.read(&profile, [(&part, bytes)].into_iter())
    };
    const PATH: &str = "projects/-work-app/3f2a.jsonl";
    let whole = read(&mut Reader::default(), PATH, 0, input);
    let facts = [
        &whole.facts.cwd,
        &whole.facts.title,
        &whole.facts.model,
        &whole.facts.agent_version,
    ];
    for text in facts.into_iter().flatten() {
        assert!(
            text.len() <= input.len(),
            "a fact is longer than all that was read"
        );
    }
    let mut behind = 0;
    for said in &whole.said {
        assert!(
            said.start >= behind && said.len > 0 && said.start + said.len <= input.len() as u64,
            "messages overlap, or leave their file"
        );
        behind = said.start + said.len;
    }
    // An entry may end anywhere: what is said is the same.
    for cut in [
        input.len() / 3,
        input.len() / 2,
        input.len().saturating_sub(1),
    ] {
        let mut reader = Reader::default();
        let (first, second) = (
            read(&mut reader, PATH, 0, &input[..cut]),
            read(&mut reader, PATH, cut, &input[cut..]),
        );
        let unread = |told: &ParsedTranscripts| told.unread.values().sum::<u64>();
        assert_eq!(
            unread(&first) + unread(&second),
            unread(&whole),
            "cut at {cut}"
        );
        assert_eq!(
            [first.said, second.said].concat(),
            whole.said,
            "cut at {cut}"
        );
        assert_eq!(first.facts.then(second.facts), whole.facts, "cut at {cut}");
    }
    // Bytes that are no transcript's tell nothing.
    let other = read(
        &mut Reader::default(),
        "projects/-work-app/3f2a/tool-results/t.txt",
        0,
        input,
    );
    assert!(other.said.is_empty() && other.facts == Default::default());
    facts.iter().any(|fact| fact.is_some())
}

/// A path, as an entry or a directory names it; accepted if a file may have it.
pub fn path(input: &[u8]) -> bool {
    let text = String::from_utf8_lossy(input);
    // Listings hand over whatever stands in the bucket.
    if let Some(seq) = keys::entry_number(&text).or_else(|| keys::snapshot_number(&text)) {
        assert!(seq > 0);
    }
    if let Some(name) = keys::log_name(&text) {
        survives(&name);
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
        inside.components().count() == path.parts().count()
            && path.parts().next_back() == Some(path.name())
    );
    let claude_code = ClaudeCode::new(plain("claude-code"));
    for profile in [&claude_code as &dyn Profile, &*GENERIC] {
        let FileClass::Keep(name, _) = profile.place(&path) else {
            continue;
        };
        survives(&name);
        assert!(
            !path.parts().any(|part| part == ".sessiond"),
            "{path}: our own state was kept"
        );
        // Every directory on the way is entered, or a scan would not find it.
        let mut directory = path.parent();
        while let Some(at) = directory {
            assert!(
                profile.enter(&at),
                "{path} is kept, and {at} is not entered"
            );
            directory = at.parent();
        }
        for directory in profile.directories(&name, &[&path].into()) {
            assert!(!directory.as_str().is_empty());
        }
        profile.project_log(&path).iter().for_each(survives);
    }
    true
}

/// A name that a key is made of must be read back from the key as the same.
fn survives(name: &LogName) {
    assert_eq!(
        keys::log_name(&format!("v1/n/a/{name}/")).as_ref(),
        Some(name)
    );
}

fn refused(error: &Error) -> bool {
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    false
}

fn plain<T: std::str::FromStr<Err = Error>>(text: &str) -> T {
    text.parse()
        .unwrap_or_else(|error| panic!("{text} is plain: {error}"))
}

/// Stored, not compressed: as fast as a copy, and a small input stays what it is.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::none());
    gzip.write_all(bytes)
        .and_then(|()| gzip.finish())
        .unwrap_or_else(|error| panic!("write to memory: {error}"))
}

/// A tar archive of a header, as it is, and of the files it names, as far as there are bytes for them.
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
        let (bytes, behind) = rest.split_at(
            rest.len()
                .min(usize::try_from(part.len).unwrap_or(usize::MAX)),
        );
        members.push((part.path.to_string(), bytes));
        rest = behind;
    }
    let mut tar = tar::Builder::new(Vec::new());
    for (path, bytes) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        // A name that tar cannot write is what the reader is to refuse: leave the member out.
        let _ = tar.append_data(&mut header, path, bytes);
    }
    tar.into_inner()
        .unwrap_or_else(|error| panic!("write to memory: {error}"))
}

/// Sets the checksum of every header of a tar archive right.
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
