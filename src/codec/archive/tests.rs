use flate2::write::GzEncoder;
use proptest::prelude::*;

use super::tar_gz::append;
use super::*;

fn member(path: &str, bytes: &[u8]) -> Member {
    let path = path.parse().unwrap();
    Member {
        path,
        kind: FileKind::Append,
        len: bytes.len() as u64,
        mode: 0o640,
        mtime_ns: 1_700_000_000_123_456_789,
        sha256: Digest::of(bytes),
    }
}

fn manifest(files: &[(&str, &[u8])]) -> Manifest {
    let metadata = SessionMetadata {
        labels: [("team".to_owned(), "infra".to_owned())].into(),
        ..SessionMetadata::default()
    };
    let exported_at = "2026-05-01T12:00:00Z".parse().unwrap();
    let files = files
        .iter()
        .map(|(path, bytes)| member(path, bytes))
        .collect();
    Manifest {
        files,
        ..Manifest::new(
            "claude-code".parse().unwrap(),
            "s1".parse().unwrap(),
            7,
            exported_at,
            &metadata,
        )
    }
}

fn packed(manifest: &Manifest, files: &[(&str, &[u8])], base64: bool) -> Vec<u8> {
    let mut out = Vec::new();
    let mut bodies = files.iter().map(|(_, bytes)| bytes.to_vec());
    write(&mut out, base64, manifest, |_| {
        Ok(Box::new(std::io::Cursor::new(bodies.next().unwrap())))
    })
    .unwrap();
    out
}

fn unpacked(archive: &[u8]) -> Result<(Manifest, Vec<Vec<u8>>)> {
    let mut files = InMemoryFiles::default();
    let manifest = read("x", archive, &mut files)?;
    Ok((manifest, files.0))
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

/// A tar of a manifest and any members.
fn tar_of(text: &[u8], members: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    append(&mut tar, MANIFEST, (0o600, 0), text.len() as u64, text).unwrap();
    members(&mut tar);
    gzip(&tar.into_inner().unwrap())
}

fn rejected(archive: &[u8], why: &str) {
    let error = unpacked(archive).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Corrupt && error.to_string().contains(why),
        "{error}"
    );
}

proptest! {
    #[test]
    fn an_archive_round_trips(bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..2000), 0..5), base64: bool) {
        let names: Vec<String> = (0..bodies.len()).map(|at| format!("projects/{}/{at}.jsonl", "long/".repeat(at * 30))).collect();
        let names: Vec<String> = names.iter().map(|name| name.replace("//", "/")).collect();
        let files: Vec<(&str, &[u8])> = names.iter().map(String::as_str).zip(bodies.iter().map(Vec::as_slice)).collect();
        let manifest = manifest(&files);
        let archive = packed(&manifest, &files, base64);
        let (read, out) = unpacked(&archive).unwrap();
        prop_assert_eq!(read, manifest);
        prop_assert_eq!(out, bodies);
        if base64 {
            prop_assert!(archive.is_ascii());
            let broken: Vec<u8> = archive.chunks(76).flat_map(|line| [line, b"\r\n"].concat()).collect();
            prop_assert!(unpacked(&broken).is_ok());
        }
    }

    #[test]
    fn a_flipped_or_missing_byte_is_detected_and_nothing_panics(at in any::<proptest::sample::Index>(), flip in 1u8..) {
        let files: &[(&str, &[u8])] = &[("a", b"hello\n"), ("b", &[7; 700])];
        let archive = packed(&manifest(files), files, false);
        let at = at.index(archive.len());
        let mut bytes = archive.clone();
        bytes[at] ^= flip;
        if let Ok((manifest, out)) = unpacked(&bytes) {
            // The gzip header holds a time and a flag that carry no data.
            prop_assert_eq!(&out[0], b"hello\n");
            prop_assert_eq!(manifest, self::manifest(files));
        }
        prop_assert!(unpacked(&archive[..at]).is_err());
    }

    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
        let _ = unpacked(&bytes);
        let _ = unpacked(&gzip(&bytes));
        let _ = inflate("x", bytes.as_slice(), 100);
    }
}

#[test]
fn an_invalid_archive_is_rejected() {
    let one: &[(&str, &[u8])] = &[("a", b"x")];
    let text = serde_json::to_vec(&manifest(one)).unwrap();
    let changed = |from: &str, to: &str| {
        String::from_utf8(text.clone())
            .unwrap()
            .replace(from, to)
            .into_bytes()
    };
    let good =
        |tar: &mut tar::Builder<Vec<u8>>| append(tar, "a", (0o600, 0), 1, b"x".as_slice()).unwrap();
    unpacked(&tar_of(&text, good)).unwrap();
    rejected(
        &tar_of(&changed("\"a\"", "\"../a\""), good),
        "are not allowed",
    );
    rejected(&tar_of(&changed("\"a\"", "\"/a\""), good), "absolute");
    rejected(
        &tar_of(&changed("\"version\":1", "\"version\":0"), good),
        "format version 0 is invalid",
    );
    let newer = unpacked(&tar_of(&changed("\"version\":1", "\"version\":2"), good)).unwrap_err();
    assert_eq!(newer.kind(), ErrorKind::NewerFormat);
    assert_eq!(
        newer.to_string(),
        "x has format version 2; this sessiond reads up to version 1"
    );
    rejected(
        &tar_of(&changed("\"len\":1", "\"len\":2"), good),
        "differs from its manifest",
    );
    rejected(&tar_of(&text, |_| ()), "a is missing");
    rejected(
        &tar_of(&text, |tar| {
            append(tar, "a", (0o600, 0), 1, b"y".as_slice()).unwrap()
        }),
        "does not have the digest",
    );
    rejected(
        &tar_of(&text, |tar| {
            append(tar, "b", (0o600, 0), 1, b"x".as_slice()).unwrap()
        }),
        "differs from its manifest",
    );
    let twice = |tar: &mut tar::Builder<Vec<u8>>| {
        good(tar);
        good(tar);
    };
    rejected(&tar_of(&text, twice), "does not list");
    rejected(
        &tar_of(
            &serde_json::to_vec(&manifest(&[("a", b"x"), ("a", b"x")])).unwrap(),
            twice,
        ),
        "it lists a twice",
    );
    rejected(
        &tar_of(
            &serde_json::to_vec(&manifest(&[("a", b"x"), ("a/b", b"x")])).unwrap(),
            twice,
        ),
        "the parent directory of a/b is a file",
    );
    for kind in [
        tar::EntryType::Symlink,
        tar::EntryType::Link,
        tar::EntryType::Char,
        tar::EntryType::Directory,
        tar::EntryType::XHeader,
    ] {
        let link = |tar: &mut tar::Builder<Vec<u8>>| {
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            header.set_entry_type(kind);
            header.set_link_name("/etc/passwd").unwrap();
            tar.append_data(&mut header, "a", std::io::empty()).unwrap();
        };
        rejected(&tar_of(&text, link), "not a regular file");
    }
    rejected(b"", "it is empty");
    rejected(b"hello, world, this is not an archive", "neither gzip");
    rejected(&gzip(b"not a tar"), "it is truncated");
    rejected(&gzip(&[b'x'; 2048]), "not a tar file");
}

#[test]
fn decompression_bombs_are_rejected_early() {
    // As a manifest, as a file that is longer than its manifest says, after the end, and as a
    // stream of zeros.
    let zeros = gzip(&vec![0; 80 << 20]);
    rejected(&zeros, "it is empty");
    let mut header = tar::Header::new_gnu();
    header.set_size(1 << 40);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_path(MANIFEST).unwrap();
    header.set_cksum();
    rejected(
        &[gzip(header.as_bytes()), zeros.clone()].concat(),
        "not a manifest",
    );
    header.set_entry_type(tar::EntryType::GNULongName);
    header.set_cksum();
    rejected(
        &[gzip(header.as_bytes()), zeros.clone()].concat(),
        "not a regular file",
    );
    let mut bomb = manifest(&[("a", b"x")]);
    bomb.files[0].len = 1 << 62;
    rejected(
        &tar_of(&serde_json::to_vec(&bomb).unwrap(), |_| ()),
        "it declares",
    );
    let long = vec![0; 8 << 20];
    let files: &[(&str, &[u8])] = &[("a", &long)];
    let archive = packed(&manifest(files), files, false);
    unpacked(&archive).unwrap();
    let mut gzip = BoundedGzip::new("x", archive.as_slice())
        .unwrap()
        .with_any_ratio_up_to(1 << 20);
    let error = read_tar("x", &mut gzip, &mut InMemoryFiles::default()).unwrap_err();
    assert!(error.to_string().contains("200 times its size"), "{error}");
    let one: &[(&str, &[u8])] = &[("a", b"x")];
    rejected(&[packed(&manifest(one), one, false), zeros].concat(), "");
    assert!(
        inflate("x", self::gzip(&[0; 5000]).as_slice(), 4000)
            .unwrap_err()
            .to_string()
            .contains("longer than allowed")
    );
}

#[test]
fn plain_tar_opens_it() {
    let one: &[(&str, &[u8])] = &[("projects/-w/s1.jsonl", b"{}\n")];
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join("x.tar.gz"),
        packed(&manifest(one), one, false),
    )
    .unwrap();
    let done = std::process::Command::new("tar")
        .args(["-xzf", "x.tar.gz"])
        .current_dir(directory.path())
        .status()
        .unwrap();
    assert!(done.success());
    assert_eq!(
        std::fs::read(directory.path().join("projects/-w/s1.jsonl")).unwrap(),
        b"{}\n"
    );
    assert!(directory.path().join(MANIFEST).exists());
}
