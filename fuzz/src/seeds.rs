//! The committed corpus: valid encodings, and damaged or malicious variants of them.
//!
//! `cargo run --no-default-features --example seed` writes it. The name of an input is the expected
//! result: `good-` is accepted, `bad-` is rejected. Findings of the fuzzer are added by hand as
//! `found-…`; they must only do no harm.

use super::checks::{gzip, with_checksums};
use super::codec::entry;
use super::codec::snapshot::{self, HEADER};
use super::codec::version;
use super::model::{Digest, EntryHeader, EntryKind, FileKind, FileMove, Part};

/// One input.
pub struct Seed {
    /// The fuzz target.
    pub target: &'static str,
    /// The name in the corpus.
    pub name: &'static str,
    /// The input.
    pub bytes: Vec<u8>,
}

/// All inputs.
pub fn all() -> Vec<Seed> {
    let targets = [
        ("entry", entries()),
        ("snapshot", snapshots()),
        ("transcript", transcripts()),
        ("path", paths()),
    ];
    let seeds = targets.into_iter().flat_map(|(target, seeds)| {
        seeds.into_iter().map(move |(name, bytes)| Seed {
            target,
            name,
            bytes,
        })
    });
    seeds.collect()
}

type Named = Vec<(&'static str, Vec<u8>)>;

const LINES: &[u8] = b"{\"type\":\"user\",\"cwd\":\"/work/app\",\"version\":\"2.1.0\"}\n{\"message\":{\"model\":\"m\"}}\n";
const TRANSCRIPT: &str = "projects/-work-app/3f2a.jsonl";

fn must<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("cannot make a seed: {error}"))
}

fn header(kind: EntryKind, bodies: &[(&str, &[u8])]) -> EntryHeader {
    let part = |(path, body): &(&str, &[u8])| Part {
        path: must(path.parse()),
        kind: if path.ends_with(".jsonl") {
            FileKind::Append
        } else {
            FileKind::Whole
        },
        start: 0,
        len: body.len() as u64,
        file_sha256: Digest::of(body),
        mode: 0o600,
        mtime_ns: 1_777_636_800_000_000_000,
        seq: kind.is_compacted().then_some(2),
        upload: None,
    };
    let text = serde_json::json!({
        "version": version::ENTRY, "kind": kind, "namespace": "team", "agent": "claude-code", "session": "3f2a", "seq": 2, "writer": "9c41",
        "at": "2026-05-01T12:00:00Z", "prev_digest": Digest::of(b"entry 1"),
    });
    // Built from JSON, so that a new field with a default needs no change here.
    let header: EntryHeader = must(serde_json::from_value(text));
    let covers = serde_json::json!({
        "first_seq": 1, "digest": Digest::of(b"entry 2"), "first_at": "2026-05-01T11:00:00Z", "entries": 2, "raw_bytes": 10, "stored_bytes": 20,
        "writers": { "9c41": 2 },
    });
    let covers = kind
        .is_compacted()
        .then(|| must(serde_json::from_value(covers)));
    let (prev_digest, prev_seq) = if kind.is_compacted() {
        (None, Some(0))
    } else {
        (header.prev_digest, None)
    };
    EntryHeader {
        parts: bodies.iter().map(part).collect(),
        covers,
        prev_digest,
        prev_seq,
        ..header
    }
}

/// The JSON of a header, to be changed by replacing text.
fn text(header: &EntryHeader) -> String {
    must(serde_json::to_string(header))
}

/// Replaces text in a header; the text must exist.
fn replaced(line: &str, from: &str, to: &str) -> String {
    assert!(line.contains(from), "{from} is not in {line}");
    line.replace(from, to)
}

/// A gzip stream with a wrong checksum.
fn with_wrong_checksum(stored: &[u8]) -> Vec<u8> {
    let mut bytes = stored.to_vec();
    let at = bytes.len() - 6;
    bytes[at] ^= 1;
    bytes
}

fn plain(header: &str, body: &[u8]) -> Vec<u8> {
    [header.as_bytes(), b"\n", body].concat()
}

fn entries() -> Named {
    let one = header(EntryKind::Delta, &[(TRANSCRIPT, LINES)]);
    let line = text(&one);
    let many: [(&str, &[u8]); 4] = [
        (TRANSCRIPT, LINES),
        ("projects/-work-app/3f2a/subagents/agent-1.jsonl", b"{}\n"),
        ("tasks/3f2a/1.json", b"{\"id\":1}"),
        ("projects/-work-app/3f2a/tool-results/empty.txt", b""),
    ];
    let several = header(EntryKind::Delta, &many);
    let bodies: Vec<Vec<u8>> = many.iter().map(|(_, body)| body.to_vec()).collect();
    let stored = must(entry::encode(one.clone(), &[LINES])).bytes.to_vec();
    let claim = header(EntryKind::Claim, &[]);
    let mut moved = several.clone();
    moved.moves = vec![FileMove {
        from: must("projects/-work-old/3f2a.jsonl".parse()),
        to: must(TRANSCRIPT.parse()),
    }];
    moved.prev_seq = Some(0);
    let half = LINES.len() / 2;
    let with = |from: &str, to: &str| plain(&replaced(&line, from, to), LINES);
    let crc = with_wrong_checksum(&stored);
    let length = format!("\"len\":{}", LINES.len());
    let mut zeroes = header(EntryKind::Delta, &[(TRANSCRIPT, LINES)]);
    zeroes.parts[0].len = 20_000;
    let zeroes = must(entry::encode(zeroes, &[vec![0; 20_000]]))
        .bytes
        .to_vec();
    vec![
        ("good-delta.gz", stored.clone()),
        ("good-delta", plain(&line, LINES)),
        (
            "good-many-parts.gz",
            must(entry::encode(several.clone(), &bodies)).bytes.to_vec(),
        ),
        ("good-many-parts", plain(&text(&several), &bodies.concat())),
        (
            "good-moves-and-a-gap",
            plain(&text(&moved), &bodies.concat()),
        ),
        (
            "good-merge",
            plain(&text(&header(EntryKind::Merge, &many)), &bodies.concat()),
        ),
        (
            "good-tombstone",
            plain(&text(&header(EntryKind::Tombstone, &[])), b""),
        ),
        (
            "good-purge",
            plain(&text(&header(EntryKind::Purge, &[])), b""),
        ),
        (
            "bad-snapshot",
            plain(&text(&header(EntryKind::Snapshot, &many)), &bodies.concat()),
        ),
        (
            "bad-tombstone-with-parts",
            with("\"kind\":\"delta\"", "\"kind\":\"tombstone\""),
        ),
        ("bad-seq-zero", with("\"seq\":2", "\"seq\":0")),
        (
            "bad-prev-seq-equals-seq",
            with("\"version\":1", "\"version\":1,\"prev_seq\":2"),
        ),
        ("good-claim", plain(&text(&claim), b"")),
        (
            "good-claim-of-a-project",
            plain(&text(&claim).replace("3f2a", "@-work-app"), b""),
        ),
        (
            "good-two-members.gz",
            [gzip(&plain(&line, &LINES[..half])), gzip(&LINES[half..])].concat(),
        ),
        ("good-zeroes.gz", zeroes),
        (
            "good-unknown-field",
            with("\"version\":1", "\"version\":1,\"color\":\"blue\""),
        ),
        (
            "good-whitespace-before-newline",
            plain(&format!("{line}  \t\r"), LINES),
        ),
        (
            "bad-maximum-offset",
            with("\"start\":0", "\"start\":18446744073709551615"),
        ),
        ("bad-empty", vec![]),
        ("bad-magic-only.gz", vec![0x1f, 0x8b]),
        ("bad-truncated.gz", stored[..stored.len() / 2].to_vec()),
        (
            "bad-without-its-trailer.gz",
            stored[..stored.len() - 8].to_vec(),
        ),
        ("bad-checksum.gz", crc),
        (
            "bad-trailing-data.gz",
            [stored.as_slice(), b"more"].concat(),
        ),
        ("bad-extra-member.gz", [stored, gzip(b"more")].concat()),
        ("bad-no-newline", line.clone().into_bytes()),
        ("bad-newer-version", with("\"version\":1", "\"version\":9")),
        (
            "bad-version-as-text",
            with("\"version\":1", "\"version\":\"1\""),
        ),
        (
            "bad-two-versions",
            with("\"version\":1", "\"version\":1,\"version\":1"),
        ),
        ("bad-bomb", with(&length, "\"len\":1099511627776")),
        (
            "bad-lengths-that-overflow",
            with(&length, "\"len\":18446744073709551615"),
        ),
        ("bad-negative-length", with(&length, "\"len\":-1")),
        ("bad-length-with-a-fraction", with(&length, "\"len\":1e2")),
        ("bad-too-few-bytes", plain(&line, &LINES[..half])),
        ("bad-too-many-bytes", plain(&line, &[LINES, b"\n"].concat())),
        (
            "bad-claim-with-parts",
            with("\"kind\":\"delta\"", "\"kind\":\"claim\""),
        ),
        (
            "bad-kind",
            with("\"kind\":\"delta\"", "\"kind\":\"unknown\""),
        ),
        ("bad-path-above", with(TRANSCRIPT, "../../etc/passwd")),
        ("bad-path-absolute", with(TRANSCRIPT, "/etc/passwd")),
        ("bad-path-with-nul", with(TRANSCRIPT, "a\\u0000b")),
        (
            "bad-digest",
            with("\"file_sha256\":\"", "\"file_sha256\":\"zz"),
        ),
        (
            "bad-time",
            with("2026-05-01T12:00:00Z", "2026-13-01T12:00:00Z"),
        ),
        (
            "bad-session-as-path",
            with("\"session\":\"3f2a\"", "\"session\":\"../3f2a\""),
        ),
        ("bad-deep-nesting", plain(&"[".repeat(400), b"")),
        (
            "bad-utf8",
            plain("{\"version\":1,\"kind\":\"\u{fffd}", b"\xff\xfe"),
        ),
        ("bad-braces", b"}{\n".to_vec()),
    ]
}

/// One member of a tar file, with a custom header.
fn member(name: &str, kind: u8, size: &str, bytes: &[u8]) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..107].copy_from_slice(b"0000600");
    block[124..124 + size.len()].copy_from_slice(size.as_bytes());
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar  \0");
    block.extend_from_slice(bytes);
    block.resize(block.len().next_multiple_of(512), 0);
    block
}

fn snapshots() -> Named {
    let long = format!(
        "projects/-work-app/3f2a/tool-results/{}/{}.txt",
        "d".repeat(90),
        "n".repeat(200)
    );
    let files: [(&str, &[u8]); 4] = [
        (TRANSCRIPT, LINES),
        ("tasks/3f2a/empty", b""),
        (&long, b"x"),
        ("tasks/3f2a/1.json", b"{}"),
    ];
    let header_of = |files: &[(&str, &[u8])]| header(EntryKind::Snapshot, files);
    let bodies: Vec<&[u8]> = files.iter().map(|(_, bytes)| *bytes).collect();
    let stored = must(snapshot::encode(header_of(&files), &bodies))
        .bytes
        .to_vec();
    let none = must(snapshot::encode::<&[u8]>(header_of(&[]), &[]))
        .bytes
        .to_vec();
    let line = text(&header_of(&[(TRANSCRIPT, LINES)]));
    let body: Vec<u8> = files.iter().flat_map(|(_, bytes)| bytes.to_vec()).collect();
    let octal = |bytes: &[u8]| format!("{:011o}", bytes.len());
    let first = member(HEADER, b'0', &octal(line.as_bytes()), line.as_bytes());
    let end = [0; 1024];
    let file = |name: &str, kind: u8, size: &str| {
        with_checksums([&first, &member(name, kind, size, LINES), &end[..]].concat())
    };
    let pax = b"25 path=../../etc/passwd\n";
    let with = |from: &str, to: &str| plain(&replaced(&line, from, to), LINES);
    let crc = with_wrong_checksum(&stored);
    vec![
        ("good-files.gz", stored.clone()),
        ("good-files", plain(&text(&header_of(&files)), &body)),
        ("good-no-files.gz", none.clone()),
        ("good-archive", file(TRANSCRIPT, b'0', &octal(LINES))),
        (
            "good-two-members.gz",
            [
                gzip(&with_checksums(first.clone())),
                gzip(&with_checksums(
                    [member(TRANSCRIPT, b'0', &octal(LINES), LINES), end.to_vec()].concat(),
                )),
            ]
            .concat(),
        ),
        ("bad-empty", vec![]),
        ("bad-truncated.gz", stored[..stored.len() / 2].to_vec()),
        (
            "bad-without-its-trailer.gz",
            stored[..stored.len() - 8].to_vec(),
        ),
        ("bad-checksum.gz", crc),
        ("bad-trailing-data.gz", [none.as_slice(), b"more"].concat()),
        ("bad-newer-version", with("\"version\":1", "\"version\":9")),
        (
            "bad-wrong-digest",
            with(&Digest::of(LINES).to_string(), &Digest::of(b"").to_string()),
        ),
        (
            "bad-wrong-length",
            with(&format!("\"len\":{}", LINES.len()), "\"len\":3"),
        ),
        (
            "bad-bomb",
            with(
                &format!("\"len\":{}", LINES.len()),
                "\"len\":18446744073709551615",
            ),
        ),
        (
            "bad-kind",
            with("\"kind\":\"snapshot\"", "\"kind\":\"merge\""),
        ),
        ("bad-incomplete-file", with("\"start\":0", "\"start\":1")),
        (
            "bad-covers-later-entries",
            with("\"first_seq\":1", "\"first_seq\":3"),
        ),
        ("bad-covers-nothing", with("\"covers\":{", "\"covered\":{")),
        ("bad-path-above", with(TRANSCRIPT, "../../etc/passwd")),
        ("bad-header", b"{\n".to_vec()),
        (
            "bad-no-header",
            with_checksums([member(TRANSCRIPT, b'0', &octal(LINES), LINES), end.to_vec()].concat()),
        ),
        (
            "bad-missing-file",
            with_checksums([first.clone(), end.to_vec()].concat()),
        ),
        (
            "bad-other-name",
            file("projects/-work-app/other.jsonl", b'0', &octal(LINES)),
        ),
        ("bad-symbolic-link", file(TRANSCRIPT, b'2', &octal(LINES))),
        ("bad-sparse", file(TRANSCRIPT, b'S', &octal(LINES))),
        ("bad-device", file(TRANSCRIPT, b'3', &octal(LINES))),
        (
            "bad-size-beyond-the-end",
            file(TRANSCRIPT, b'0', "77777777777"),
        ),
        (
            "bad-size-in-binary",
            with_checksums({
                let mut bytes = file(TRANSCRIPT, b'0', &octal(LINES));
                let at = first.len() + 124;
                bytes[at..at + 12].copy_from_slice(&[0xff; 12]);
                bytes
            }),
        ),
        (
            "bad-size-not-a-number",
            file(TRANSCRIPT, b'0', "0000000009z"),
        ),
        (
            "bad-name-in-pax-header",
            with_checksums(
                [
                    &first,
                    &member("pax", b'x', &octal(pax), pax),
                    &member(TRANSCRIPT, b'0', &octal(LINES), LINES),
                    &end[..],
                ]
                .concat(),
            ),
        ),
        (
            "bad-unterminated-long-name",
            with_checksums(member("././@LongLink", b'L', "77777777777", b"name")),
        ),
        (
            "bad-extra-file",
            with_checksums(
                [
                    &first,
                    &member(TRANSCRIPT, b'0', &octal(LINES), LINES),
                    &member("tasks/3f2a/2.json", b'0', &octal(LINES), LINES),
                    &end[..],
                ]
                .concat(),
            ),
        ),
    ]
}

fn transcripts() -> Named {
    let text = |text: &str| text.as_bytes().to_vec();
    vec![
        ("good-lines", LINES.to_vec()),
        (
            "good-crlf",
            text("{\"cwd\":\"/work/app\"}\r\n{\"version\":\"2\"}\r\n"),
        ),
        (
            "good-titles",
            text(
                "{\"type\":\"summary\",\"summary\":\"first\"}\n{\"customTitle\":\"mine\"}\n{\"summary\":\"last\"}\n",
            ),
        ),
        (
            "good-synthetic-response",
            text("{\"message\":{\"model\":\"m\"}}\n{\"message\":{\"model\":\"<synthetic>\"}}\n"),
        ),
        (
            "good-side-chain",
            text(
                "{\"isSidechain\":true,\"cwd\":\"/other\"}\n{\"isSidechain\":false,\"cwd\":\"/work\"}\n",
            ),
        ),
        (
            "good-between-broken-lines",
            text("}{\n{\"cwd\":\"/work/app\"}\n{\"cwd\":\"/torn"),
        ),
        (
            "good-escapes",
            text("{\"cwd\":\"\\ud83d\\ude00 \\u0000 \\\"\\\\\"}\n"),
        ),
        (
            "good-huge-line",
            format!(
                "{{\"cwd\":\"/w\",\"message\":{{\"content\":\"{}\"}}}}\n",
                "x".repeat(20_000)
            )
            .into_bytes(),
        ),
        ("bad-no-newline", text("{\"cwd\":\"/work/app\"}")),
        (
            "good-known-and-unknown",
            text(
                "{\"uuid\":\"u\",\"parentUuid\":null,\"message\":{\"model\":\"m\",\"usage\":{\"input_tokens\":1}}}\n",
            ),
        ),
        ("bad-empty", vec![]),
        ("bad-only-newlines", text("\n\n\r\n\n")),
        ("bad-braces", text("}{\n")),
        ("bad-nul", vec![0; 64]),
        ("bad-utf8", b"{\"cwd\":\"\xff\xfe\"}\n\xc3\x28\n".to_vec()),
        ("bad-lone-surrogate", text("{\"cwd\":\"\\ud83d\"}\n")),
        (
            "bad-types",
            text("{\"cwd\":1}\n{\"message\":\"text\"}\n{\"version\":[]}\n[]\nnull\n7\n\"cwd\"\n"),
        ),
        (
            "bad-duplicate-key",
            text("{\"cwd\":\"/a\",\"cwd\":\"/b\"}\n"),
        ),
        (
            "bad-deep-nesting",
            format!("{{\"x\":{}\n", "[".repeat(5000)).into_bytes(),
        ),
        (
            "good-huge-number",
            text("{\"x\":1e999999,\"cwd\":\"/w\"}\n"),
        ),
        (
            "bad-byte-order-mark",
            text("\u{feff}{\"cwd\":\"/work/app\"}\n"),
        ),
    ]
}

fn paths() -> Named {
    let text = |text: &str| text.as_bytes().to_vec();
    vec![
        ("good-transcript", text(TRANSCRIPT)),
        (
            "good-sub-agent",
            text("projects/-work-app/3f2a/subagents/agent-1.jsonl"),
        ),
        (
            "good-old-sub-agent",
            text("projects/-work-app/agent-9c.jsonl"),
        ),
        ("good-memory", text("projects/-work-app/memory/MEMORY.md")),
        ("good-task", text("tasks/3f2a/1.json")),
        ("good-history", text("file-history/3f2a/abc@v1")),
        (
            "good-temporary-directory",
            text("projects/-work-app/3f2a/x.tmp/file"),
        ),
        (
            "good-state-directory",
            text(".sessiond/ledger/n/a/3f2a.json"),
        ),
        ("good-odd-letters", text("projects/ä =@/.😀.jsonl")),
        (
            "good-long",
            format!("projects/{}/{}.jsonl", "p".repeat(255), "é".repeat(124)).into_bytes(),
        ),
        (
            "good-entry-key",
            text("v1/team/claude-code/3f2a/log/000000000002.gz"),
        ),
        ("good-huge-number", text("snap/99999999999999999999.tar.gz")),
        ("good-invalid-utf8", b"projects/\xff/3f2a.jsonl".to_vec()),
        ("bad-directory-key", text("v1/team/claude-code/@-work-app/")),
        ("bad-above", text("projects/../../etc/passwd")),
        ("bad-absolute", text("/etc/passwd")),
        ("bad-empty", vec![]),
        ("bad-dot", text("projects/./x")),
        ("bad-nul", text("projects/-w/a\0.jsonl")),
        ("bad-newline", text("projects/-w/a\n.jsonl")),
        (
            "bad-component-too-long",
            format!("projects/{}", "n".repeat(256)).into_bytes(),
        ),
        ("bad-too-long", "projects/".repeat(400).into_bytes()),
    ]
}
