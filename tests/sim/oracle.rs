//! The invariants that must hold at every moment.
//!
//! The history of a log is the concatenation of its writers' histories, each cut where the next
//! writer took over. The content of the log must be a version of it, and no older than any
//! acknowledged version.

use std::collections::BTreeMap;

use sessiond::model::{Digest, EntryKind, LogId, Seq, WriterId};

use super::bucket::Objects;
use super::history::{Files, Version, contains_files_of, new_bytes, newest_match};
use super::model::{Content, Reader, Written, one_writer_at_a_time, path_to};

/// A version that `flush` called durable.
#[derive(Debug, Clone)]
pub struct Ack {
    pub version: u64,
    /// The head that the flush reported.
    pub head: Seq,
    /// The branch; none for the main log.
    pub branch: Option<WriterId>,
}

/// The content of the bucket by the format rules; a restore must give the same.
#[derive(Default)]
pub struct Expected {
    /// The files of the log; none if there is no log or it was removed.
    pub main: Option<Files>,
    pub removed: bool,
    pub branches: BTreeMap<WriterId, Files>,
}

/// Records every version on the volumes and every acknowledgment, and checks the bucket against
/// them.
pub struct Oracle {
    id: LogId,
    /// Whether the seqs must have no gaps. With a database fence, a reserved seq may stay unused.
    has_contiguous_seqs: bool,
    histories: BTreeMap<u64, Vec<Version>>,
    versions: u64,
    acks: Vec<Ack>,
    reader: Reader,
}

impl Oracle {
    pub fn new(id: LogId, has_contiguous_seqs: bool) -> Oracle {
        Oracle {
            id,
            has_contiguous_seqs,
            histories: BTreeMap::new(),
            versions: 0,
            acks: Vec::new(),
            reader: Reader::default(),
        }
    }

    /// Records the files of a volume. Returns the number of the version.
    pub fn record_version(&mut self, volume: u64, files: Files) -> u64 {
        let history = self.histories.entry(volume).or_default();
        let version = Version::following(history.last(), self.versions + 1, files);
        if let Some(last) = history.last()
            && last.files.len() == version.files.len()
            && last
                .files
                .iter()
                .zip(&version.files)
                .all(|(a, b)| a.0 == b.0 && std::sync::Arc::ptr_eq(a.1, b.1))
        {
            return last.number;
        }
        self.versions += 1;
        history.push(version);
        self.versions
    }

    pub fn last(&self, volume: u64) -> Option<&Version> {
        self.histories.get(&volume)?.last()
    }

    pub fn record_ack(&mut self, ack: Ack) {
        self.acks.push(ack);
    }

    /// Discards all acknowledgments: the session was deleted completely.
    pub fn reset(&mut self) {
        self.acks.clear();
    }

    /// Whether a version has bytes that a log can contain.
    fn has_complete_lines(&self, version: u64) -> bool {
        let found = self
            .histories
            .values()
            .flatten()
            .find(|known| known.number == version);
        found.is_some_and(|version| version.files.values().any(|file| file.cut > 0))
    }

    /// Checks the bucket as it is now.
    pub fn check(&mut self, objects: &Objects) -> Result<Expected, String> {
        let main = self.reader.main(objects, &self.id)?;
        let branches = self.reader.branches(objects, &self.id)?;
        let mut expected = Expected::default();
        let last = main.last_key_value().map_or(0, |(seq, _)| *seq);
        let path = path_to(&main, last)?;
        let first = path.first().map_or(0, |first| first.entry.header.seq);
        if self.has_contiguous_seqs && path.len() != main.range(first..).count() {
            return Err(format!(
                "the log has {} entries and only {} are linked",
                main.len(),
                path.len()
            ));
        }
        one_writer_at_a_time(&path)?;
        self.check_upload_volume(&main, &branches)?;
        let reset_seq = path
            .iter()
            .rev()
            .find(|written| written.entry.header.resets_log())
            .map_or(0, |written| written.entry.header.seq);
        // Acknowledgments from before the log was removed and reset are no longer valid.
        self.acks
            .retain(|ack| ack.branch.is_some() || ack.head > reset_seq);
        if main
            .values()
            .any(|written| written.entry.header.kind == EntryKind::Purge)
        {
            self.acks.retain(|ack| {
                ack.branch
                    .as_ref()
                    .is_none_or(|writer| branches.contains_key(writer))
            });
        }
        let promised: Vec<u64> = self
            .acks
            .iter()
            .filter(|ack| ack.branch.is_none())
            .map(|ack| ack.version)
            .collect();
        let held = self.check_history("the log", &path, &promised)?;
        expected.removed = path
            .last()
            .is_some_and(|last| last.entry.header.kind.is_removal());
        expected.main = (!path.is_empty() && !expected.removed).then_some(held);
        for (writer, entries) in branches {
            let path = branch_path(&main, &entries)?;
            let promised = self
                .acks
                .iter()
                .filter(|ack| ack.branch.as_ref() == Some(&writer))
                .map(|ack| ack.version);
            let held = self.check_history(
                &format!("branch {writer}"),
                &path,
                &promised.collect::<Vec<_>>(),
            )?;
            expected.branches.insert(writer, held);
        }
        let has_no_branch = |ack: &&Ack| {
            ack.branch
                .as_ref()
                .is_some_and(|writer| !expected.branches.contains_key(writer))
        };
        let lost = self
            .acks
            .iter()
            .filter(has_no_branch)
            .find(|ack| self.has_complete_lines(ack.version));
        match lost {
            Some(ack) => Err(format!(
                "version {} was acknowledged on a branch that does not exist",
                ack.version
            )),
            None => Ok(expected),
        }
    }

    /// The files of the log at an entry.
    pub fn at(&mut self, objects: &Objects, seq: Seq) -> Result<Files, String> {
        let main = self.reader.main(objects, &self.id)?;
        let mut content = Content::default();
        for written in path_to(&main, seq)? {
            content.apply(&written.entry)?;
        }
        Ok(content.files)
    }

    /// The files of the log at an entry; none if the entry is not on the log's path.
    pub fn find_files_at(&mut self, objects: &Objects, seq: Seq) -> Result<Option<Files>, String> {
        let main = self.reader.main(objects, &self.id)?;
        let last = main.last_key_value().map_or(0, |(seq, _)| *seq);
        let path = path_to(&main, last)?;
        let is_match = |written: &Written| {
            written.entry.header.seq == seq && !written.entry.header.kind.is_removal()
        };
        if path.iter().any(is_match) {
            self.at(objects, seq).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Every entry that the index should have: those of the log, then those of the branches by
    /// writer.
    pub fn entries(
        &mut self,
        objects: &Objects,
    ) -> Result<Vec<(Option<String>, Seq, Digest)>, String> {
        let main = self.reader.main(objects, &self.id)?;
        let last = main.last_key_value().map_or(0, |(seq, _)| *seq);
        let mut all: Vec<_> = path_to(&main, last)?
            .iter()
            .map(|written| (None, written.entry.header.seq, written.entry.digest))
            .collect();
        for (writer, entries) in self.reader.branches(objects, &self.id)? {
            all.extend(
                entries
                    .iter()
                    .map(|(seq, written)| (Some(writer.to_string()), *seq, written.entry.digest)),
            );
        }
        Ok(all)
    }

    /// Bytes before compression that a volume's processes have written to the log.
    pub fn raw_bytes_by(&mut self, objects: &Objects, volume: u64) -> Result<u64, String> {
        let main = self.reader.main(objects, &self.id)?;
        Ok(main
            .values()
            .filter(|written| written.author == volume)
            .map(|written| written.entry.header.body_len())
            .sum())
    }

    /// Checks that retries do not store bytes twice. A volume uploads its new bytes, and all its
    /// files again only after a takeover or at the start of a branch, where it may not know the
    /// content of the log.
    fn check_upload_volume(
        &self,
        main: &BTreeMap<Seq, Written>,
        branches: &BTreeMap<WriterId, BTreeMap<Seq, Written>>,
    ) -> Result<(), String> {
        for (volume, history) in &self.histories {
            let by = |entries: &BTreeMap<Seq, Written>| -> (u64, u64) {
                let own: Vec<&Written> = entries
                    .values()
                    .filter(|written| written.author == *volume)
                    .collect();
                let claims = own
                    .iter()
                    .filter(|written| written.entry.header.kind == EntryKind::Claim)
                    .count();
                (
                    own.iter()
                        .map(|written| written.entry.header.body_len())
                        .sum(),
                    claims as u64,
                )
            };
            let (mut stored, mut full_uploads) = by(main);
            for (bytes, _) in branches.values().map(by).filter(|(bytes, _)| *bytes > 0) {
                (stored, full_uploads) = (stored + bytes, full_uploads + 1);
            }
            let all = history.iter().map(Version::size).max().unwrap_or(0);
            let max = new_bytes(history) + all * full_uploads;
            if stored > max {
                return Err(format!(
                    "{stored} bytes of volume {volume} are stored, expected at most {max} (with {full_uploads} full uploads)"
                ));
            }
        }
        Ok(())
    }

    /// Checks that the content of these entries is a version of their writers' history, and that it
    /// has every acknowledged version.
    fn check_history(
        &self,
        what: &str,
        path: &[Written],
        promised: &[u64],
    ) -> Result<Files, String> {
        let mut chain: Vec<&Version> = Vec::new();
        let mut content = Content::default();
        let mut author = None;
        for written in path {
            if written.entry.header.resets_log() {
                content.clear();
                chain.clear();
                author = None;
                continue;
            }
            // The process that removes a session has no files.
            if written.entry.header.kind.is_removal() {
                continue;
            }
            if author != Some(written.author) {
                author = Some(written.author);
                let held = &content.files;
                match newest_match(held, &chain) {
                    Some(at) => chain.truncate(at + 1),
                    None if held.is_empty() => chain.clear(),
                    None => {
                        return Err(format!(
                            "{what} before entry {} is no version of its writer's history",
                            written.entry.header.seq
                        ));
                    }
                }
                chain.extend(self.histories.get(&written.author).into_iter().flatten());
            }
            content.apply(&written.entry)?;
        }
        let held = content.files;
        check_tool_references(what, &held)?;
        let at = newest_match(&held, &chain);
        if at.is_none() && !held.is_empty() {
            return Err(format!(
                "{what} is no version of its writers' history: {}",
                describe(&held, &chain)
            ));
        }
        let versions = &chain[..at.map_or(0, |at| at + 1)];
        for version in promised {
            let found = versions.iter().position(|known| known.number == *version);
            if !found.is_some_and(|at| contains_files_of(&held, versions, at)) {
                return Err(format!(
                    "{what} lost version {version}, which was acknowledged; it is at {:?}",
                    versions.last().map(|last| last.number)
                ));
            }
        }
        Ok(held)
    }
}

fn branch_path(
    main: &BTreeMap<Seq, Written>,
    entries: &BTreeMap<Seq, Written>,
) -> Result<Vec<Written>, String> {
    let Some((first, _)) = entries.first_key_value() else {
        return Ok(Vec::new());
    };
    let mut all: BTreeMap<Seq, Written> = main
        .range(..first)
        .map(|(seq, written)| (*seq, written.clone()))
        .collect();
    all.extend(entries.iter().map(|(seq, written)| (*seq, written.clone())));
    let last = entries.last_key_value().map_or(0, |(seq, _)| *seq);
    let path = path_to(&all, last)?;
    let linked = path
        .iter()
        .filter(|written| written.entry.header.seq >= *first)
        .count();
    if linked == entries.len() {
        Ok(path)
    } else {
        Err(format!(
            "a branch has {} entries and {linked} are linked",
            entries.len()
        ))
    }
}

/// Checks that each tool result that a transcript refers to is present: it was written before the
/// line that refers to it.
fn check_tool_references(what: &str, held: &Files) -> Result<(), String> {
    const NAMES: &[u8] = b"\"ref\":\"";
    for bytes in held
        .iter()
        .filter(|(path, _)| path.ends_with(".jsonl"))
        .map(|(_, bytes)| bytes)
    {
        for line in bytes.split(|byte| *byte == b'\n') {
            let Some(at) = line.windows(NAMES.len()).position(|window| window == NAMES) else {
                continue;
            };
            let name = line[at + NAMES.len()..]
                .split(|byte| *byte == b'"')
                .next()
                .unwrap_or_default();
            let name = format!("/tool-results/{}", String::from_utf8_lossy(name));
            if line.ends_with(b"}") && !held.keys().any(|path| path.ends_with(&name)) {
                return Err(format!("{what} refers to {name} and does not contain it"));
            }
        }
    }
    Ok(())
}

fn describe(held: &Files, chain: &[&Version]) -> String {
    let held: Vec<String> = held
        .iter()
        .map(|(path, bytes)| format!("{path} {} bytes", bytes.len()))
        .collect();
    let last = chain.last().map(|version| {
        let files = version
            .files
            .iter()
            .map(|(path, file)| format!("{path} {} of {} bytes", file.cut, file.bytes.len()));
        format!(
            "version {}: {}",
            version.number,
            files.collect::<Vec<_>>().join(", ")
        )
    });
    format!(
        "it has {}; the last version is {}",
        held.join(", "),
        last.unwrap_or_default()
    )
}
