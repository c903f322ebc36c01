//! The only file that builds and parses object keys. `docs/reference/format.md` documents them.

use crate::error::{Error, Result};
use crate::model::{AgentName, LogId, LogName, Namespace, Seq, SessionId, WriterId, ids, limits};

/// The version of the layout, the first component of every key.
const LAYOUT: &str = "v1";

/// Number of digits of a `seq` in a key: fixed, so that keys sort by number.
const DIGITS: usize = 12;

/// The result of the probe: whether the store honors conditional creates.
pub fn probe_record() -> String {
    format!("{LAYOUT}/.store.json")
}

/// A scratch key of the probe.
pub fn probe(token: &str) -> String {
    format!("{}{token}", probe_dir())
}

/// The directory that holds one directory per log of an agent.
pub fn agent_dir(namespace: &Namespace, agent: &AgentName) -> String {
    format!("{LAYOUT}/{namespace}/{agent}/")
}

/// The directory of the references of one request ID.
pub fn request_dir(namespace: &Namespace, agent: &AgentName, request_id: &str) -> String {
    let name = ids::escape(request_id);
    format!("{}.requests/{name}/", agent_dir(namespace, agent))
}

/// The reference of a request ID to one of its sessions.
pub fn request_reference(id: &LogId, request_id: &str) -> String {
    let directory = request_dir(&id.namespace, &id.agent, request_id);
    format!("{directory}{}.json", id.name)
}

/// The session in the key of a request reference; none if it is not such a key.
pub fn referenced_session(key: &str) -> Option<SessionId> {
    let name = key.rsplit('/').next()?.strip_suffix(".json")?;
    name.parse().ok()
}

/// The directory of one log.
pub fn log_root(id: &LogId) -> String {
    format!("{LAYOUT}/{}/{}/{}/", id.namespace, id.agent, id.name)
}

/// The directory of a log's entries.
pub fn entries_dir(id: &LogId) -> String {
    format!("{}log/", log_root(id))
}

/// One entry.
pub fn entry(id: &LogId, seq: Seq) -> String {
    format!("{}{seq:0DIGITS$}.gz", entries_dir(id))
}

/// The directory of a log's snapshots.
pub fn snapshots_dir(id: &LogId) -> String {
    format!("{}snap/", log_root(id))
}

/// The snapshot that replaces all entries up to `seq`.
pub fn snapshot(id: &LogId, seq: Seq) -> String {
    format!("{}{seq:0DIGITS$}.tar.gz", snapshots_dir(id))
}

/// The directory of a log's merges.
pub fn merges_dir(id: &LogId) -> String {
    format!("{}merge/", log_root(id))
}

/// The merge that replaces the entries `first` to `last`.
pub fn merge(id: &LogId, first: Seq, last: Seq) -> String {
    format!("{}{first:0DIGITS$}-{last:0DIGITS$}.gz", merges_dir(id))
}

/// The directory of a session's metadata.
pub fn metadata_dir(id: &LogId) -> String {
    format!("{}meta/", log_root(id))
}

/// One version of a session's metadata; the highest is current.
pub fn metadata(id: &LogId, version: u64) -> String {
    format!("{}{version:0DIGITS$}.json", metadata_dir(id))
}

/// The directory of a log's pins: named checkpoints and the origins of forks.
pub fn pins_dir(id: &LogId) -> String {
    format!("{}pins/", log_root(id))
}

/// The pin of a named checkpoint.
pub fn checkpoint_pin(id: &LogId, name: &str) -> String {
    format!("{}checkpoint.{name}.json", pins_dir(id))
}

/// The pin of a fork's origin.
pub fn fork_pin(id: &LogId, fork: &LogName) -> String {
    format!("{}fork.{fork}.json", pins_dir(id))
}

/// A scratch key by which garbage collection reads the store's clock.
pub fn gc_clock(token: &str) -> String {
    format!("{}{token}", gc_dir())
}

/// The directory of these scratch keys.
pub fn gc_dir() -> String {
    format!("{LAYOUT}/.gc/")
}

/// The directory of the probe's scratch keys.
pub fn probe_dir() -> String {
    format!("{LAYOUT}/.probe/")
}

/// The directory of a log's branches, one directory per writer.
pub fn branches_dir(id: &LogId) -> String {
    format!("{}branch/", log_root(id))
}

/// The directory of one writer's branch.
pub fn branch_dir(id: &LogId, writer: &WriterId) -> String {
    format!("{}{writer}/", branches_dir(id))
}

/// One entry of a branch.
pub fn branch_entry(id: &LogId, writer: &WriterId, seq: Seq) -> String {
    format!("{}{seq:0DIGITS$}.gz", branch_dir(id, writer))
}

/// The `seq` in the key of an entry; none if it is not such a key.
pub fn entry_seq(key: &str) -> Option<Seq> {
    number(key, ".gz")
}

/// The `seq` in the key of a snapshot; none if it is not such a key.
pub fn snapshot_seq(key: &str) -> Option<Seq> {
    number(key, ".tar.gz")
}

/// The version in the key of a metadata object; none if it is not such a key.
pub fn metadata_version(key: &str) -> Option<u64> {
    number(key, ".json")
}

/// The first and last `seq` in the key of a merge; none if it is not such a key.
pub fn merge_range(key: &str) -> Option<(Seq, Seq)> {
    let (first, last) = key.rsplit('/').next()?.split_once('-')?;
    let (first, last) = (number(&format!("{first}.gz"), ".gz")?, number(last, ".gz")?);
    (first < last).then_some((first, last))
}

fn number(key: &str, suffix: &str) -> Option<Seq> {
    let digits = key.rsplit('/').next()?.strip_suffix(suffix)?;
    let plain = digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
    plain
        .then(|| digits.parse().ok())
        .flatten()
        .filter(|seq| (1..=limits::MAX_SEQ).contains(seq))
}

/// Maximum size of the object at `key`. Stores check it before they read or write the object.
pub fn max_object_len(key: &str) -> u64 {
    let mut names = key.split('/').skip(1);
    let (namespace, kind) = (names.next(), names.nth(2));
    match kind {
        Some("pins") if holds_content(key) => limits::MAX_HEADER_LEN,
        Some("pins" | "meta") => limits::MAX_RECORD_LEN,
        _ if namespace.is_some_and(|name| name.starts_with('.')) => limits::MAX_RECORD_LEN,
        _ => limits::MAX_SEGMENT_LEN,
    }
}

/// Whether the object holds content of a conversation, and is therefore encrypted: the segments of
/// a log and of its branches, and named checkpoints. Garbage collection and the probe must be able
/// to read all other objects without a key.
pub fn holds_content(key: &str) -> bool {
    let mut names = key.splitn(6, '/');
    if names.next() != Some(LAYOUT) {
        return false;
    }
    match (names.nth(3), names.next()) {
        (Some("log" | "merge" | "snap" | "branch"), Some(_)) => true,
        (Some("pins"), Some(name)) => name.starts_with("checkpoint."),
        _ => false,
    }
}

/// Whether the object is signed, where signatures are configured: everything that belongs to a log,
/// and request references. The objects of the probe and of garbage collection are not.
pub fn is_signed(key: &str) -> bool {
    let mut names = key.splitn(6, '/');
    if names.next() != Some(LAYOUT) {
        return false;
    }
    matches!(
        (names.nth(2), names.next(), names.next()),
        (Some(".requests"), Some(_), Some(_))
            | (
                Some(_),
                Some("log" | "merge" | "snap" | "branch" | "meta" | "pins"),
                Some(_)
            )
    )
}

/// The name of the last directory of a directory key (`…/name/`).
pub fn dir_name(directory: &str) -> Result<&str> {
    directory
        .trim_end_matches('/')
        .rsplit('/')
        .next()
        .filter(|name| !name.is_empty())
        .ok_or_else(|| {
            Error::corrupt(format!(
                "invalid directory key {directory:?}: it has no name"
            ))
        })
}

/// The log whose directory this is; none if it is no such key.
pub fn log_name(directory: &str) -> Option<LogName> {
    dir_name(directory).ok()?.parse().ok()
}

/// What an object is, for messages: `entry 4 of session 3f2a`. The key itself if it is no segment
/// of a log.
pub fn describe(key: &str) -> String {
    let parts: Vec<&str> = key.split('/').collect();
    let described = match parts.as_slice() {
        [LAYOUT, _, _, log, rest @ ..] => log
            .parse::<LogName>()
            .ok()
            .and_then(|log| describe_segment(&log.description(), rest)),
        _ => None,
    };
    described.unwrap_or_else(|| key.to_owned())
}

fn describe_segment(log: &str, rest: &[&str]) -> Option<String> {
    match rest {
        ["log", name] => entry_seq(name).map(|seq| format!("entry {seq} of {log}")),
        ["snap", name] => snapshot_seq(name).map(|seq| format!("snapshot {seq} of {log}")),
        ["merge", name] => {
            merge_range(name).map(|(first, last)| format!("merge {first}-{last} of {log}"))
        }
        ["branch", writer, name] => {
            entry_seq(name).map(|seq| format!("entry {seq} of branch {writer} of {log}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> LogId {
        LogId {
            namespace: "team".parse().expect("plain"),
            agent: "claude-code".parse().expect("plain"),
            name: "3f2a".parse().expect("plain"),
        }
    }

    #[test]
    fn keys_are_spelled_as_documented() {
        let writer: WriterId = "w1".parse().expect("plain");
        assert_eq!(
            entry(&id(), 2),
            "v1/team/claude-code/3f2a/log/000000000002.gz"
        );
        assert_eq!(
            snapshot(&id(), 187),
            "v1/team/claude-code/3f2a/snap/000000000187.tar.gz"
        );
        assert_eq!(
            branch_entry(&id(), &writer, 188),
            "v1/team/claude-code/3f2a/branch/w1/000000000188.gz"
        );
    }

    #[test]
    fn the_sessions_of_a_request_are_in_a_directory_that_is_no_log() {
        let key = request_reference(&id(), "job/7");
        assert_eq!(key, "v1/team/claude-code/.requests/job=2F7/3f2a.json");
        assert_eq!(referenced_session(&key), "3f2a".parse().ok());
        assert_eq!(
            referenced_session("v1/team/claude-code/.requests/x/.json"),
            None
        );
        assert_eq!(log_name("v1/team/claude-code/.requests/"), None);
        assert!(!holds_content(&key));
    }

    #[test]
    fn content_is_recognized_by_its_key() {
        let writer: WriterId = "w1".parse().expect("plain");
        let content = [
            entry(&id(), 2),
            snapshot(&id(), 2),
            merge(&id(), 2, 3),
            branch_entry(&id(), &writer, 2),
            checkpoint_pin(&id(), "green"),
        ];
        for key in &content {
            assert!(holds_content(key), "{key}");
            assert!(key.starts_with(&log_root(&id())), "{key}");
        }
        let others = [
            probe_record(),
            probe("x"),
            gc_clock("x"),
            metadata(&id(), 1),
            fork_pin(&id(), &"f".parse().expect("plain")),
        ];
        for key in others.iter().map(String::as_str).chain([
            "",
            "log/1",
            "v1/log/log/log/log",
            "v2/team/claude-code/3f2a/log/1",
        ]) {
            assert!(!holds_content(key), "{key}");
        }
    }

    #[test]
    fn numbers_are_parsed_and_foreign_keys_are_not() {
        assert_eq!(entry_seq(&entry(&id(), 77)), Some(77));
        assert_eq!(snapshot_seq(&snapshot(&id(), 77)), Some(77));
        for foreign in [
            "",
            "log/",
            "log/1.gz",
            "log/00000000000x.gz",
            "log/notes.txt",
            "log/000000000000.gz",
            "log/000000000007.tar",
            "log/0000000000007.gz",
            "log/1000000000000.gz",
            "log/18446744073709551615.gz",
        ] {
            assert_eq!(entry_seq(foreign), None, "{foreign:?}");
        }
        assert_eq!(
            entry_seq(&entry(&id(), limits::MAX_SEQ)),
            Some(limits::MAX_SEQ)
        );
        assert_eq!(entry_seq(&entry(&id(), limits::MAX_SEQ + 1)), None);
        assert_eq!(entry_seq(&snapshot(&id(), 77)), None);
        assert_eq!(metadata_version(&metadata(&id(), 3)), Some(3));
        assert_eq!(metadata_version("meta/3.json"), None);
        assert_eq!(merge_range(&merge(&id(), 32, 62)), Some((32, 62)));
        for foreign in [
            "merge/32-62.gz",
            "merge/000000000062-000000000032.gz",
            "merge/000000000032.gz",
        ] {
            assert_eq!(merge_range(foreign), None, "{foreign:?}");
        }
    }

    #[test]
    fn segments_are_described_for_messages() {
        let writer: WriterId = "w1".parse().expect("plain");
        for (key, text) in [
            (entry(&id(), 4), "entry 4 of session 3f2a"),
            (snapshot(&id(), 31), "snapshot 31 of session 3f2a"),
            (merge(&id(), 32, 61), "merge 32-61 of session 3f2a"),
            (
                branch_entry(&id(), &writer, 188),
                "entry 188 of branch w1 of session 3f2a",
            ),
        ] {
            assert_eq!(describe(&key), text);
        }
        for other in [metadata(&id(), 1), "x".to_owned(), String::new()] {
            assert_eq!(describe(&other), other);
        }
    }
}
