//! The only file that spells object keys. `docs/FORMAT.md` describes them for people.

use crate::error::{Error, Result};
use crate::model::{AgentName, LogId, LogName, Namespace, Seq, WriterId};

/// The version of the layout; another one would live beside it.
const LAYOUT: &str = "v1";

/// Digits of a number in a key: fixed, so that the order of keys is the order of numbers.
const DIGITS: usize = 12;

/// Where the store's own properties are remembered.
pub fn store_facts() -> String {
    format!("{LAYOUT}/.store.json")
}

/// A scratch key for the probe.
pub fn probe(token: &str) -> String {
    format!("{}{token}", probe_dir())
}

/// The directory of a namespace.
pub fn namespace_dir(namespace: &Namespace) -> String {
    format!("{LAYOUT}/{namespace}/")
}

/// The directory that holds one directory per log of an agent.
pub fn agent_dir(namespace: &Namespace, agent: &AgentName) -> String {
    format!("{LAYOUT}/{namespace}/{agent}/")
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

/// The snapshot that stands for all entries up to `seq`.
pub fn snapshot(id: &LogId, seq: Seq) -> String {
    format!("{}{seq:0DIGITS$}.tar.gz", snapshots_dir(id))
}

/// The directory of a log's merges.
pub fn merges_dir(id: &LogId) -> String {
    format!("{}merge/", log_root(id))
}

/// The merge that stands for the entries `from` to `to`.
pub fn merge(id: &LogId, from: Seq, to: Seq) -> String {
    format!("{}{from:0DIGITS$}-{to:0DIGITS$}.gz", merges_dir(id))
}

/// The directory of what people said of a session.
pub fn wishes_dir(id: &LogId) -> String {
    format!("{}wishes/", log_root(id))
}

/// What people said of a session; the highest number counts.
pub fn wishes(id: &LogId, number: u64) -> String {
    format!("{}{number:0DIGITS$}.json", wishes_dir(id))
}

/// The directory of what must stay reachable: named checkpoints and where forks begin.
pub fn pins_dir(id: &LogId) -> String {
    format!("{}pins/", log_root(id))
}

/// A checkpoint that has a name.
pub fn named_point(id: &LogId, name: &str) -> String {
    format!("{}point.{name}.json", pins_dir(id))
}

/// Where a fork begins.
pub fn fork_pin(id: &LogId, fork: &LogName) -> String {
    format!("{}fork.{fork}.json", pins_dir(id))
}

/// A scratch key by which a collector learns the store's time.
pub fn gc_mark(token: &str) -> String {
    format!("{}{token}", gc_dir())
}

/// The directory of those.
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

/// One entry of a writer that lost the session.
pub fn branch_entry(id: &LogId, writer: &WriterId, seq: Seq) -> String {
    format!("{}{seq:0DIGITS$}.gz", branch_dir(id, writer))
}

/// The number in an entry's key, or nothing if the key is not one of ours.
pub fn entry_number(key: &str) -> Option<Seq> {
    number(key, ".gz")
}

/// The number in a snapshot's key, or nothing if the key is not one of ours.
pub fn snapshot_number(key: &str) -> Option<Seq> {
    number(key, ".tar.gz")
}

/// The number in the key of what people said, or nothing if the key is not one of ours.
pub fn wishes_number(key: &str) -> Option<u64> {
    number(key, ".json")
}

/// The numbers in a merge's key, first and last, or nothing if the key is not one of ours.
pub fn merge_range(key: &str) -> Option<(Seq, Seq)> {
    let (from, to) = key.rsplit('/').next()?.split_once('-')?;
    let (from, to) = (number(&format!("{from}.gz"), ".gz")?, number(to, ".gz")?);
    (from < to).then_some((from, to))
}

fn number(key: &str, ending: &str) -> Option<Seq> {
    let digits = key.rsplit('/').next()?.strip_suffix(ending)?;
    let plain = digits.len() >= DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
    plain
        .then(|| digits.parse().ok())
        .flatten()
        .filter(|seq| *seq > 0)
}

/// Whether what is stored there tells something of a conversation: the pieces of a log and of its branches, and checkpoints
/// that have a name. What else there is, a collector or a stranger's probe must be able to read.
pub fn holds_content(key: &str) -> bool {
    let mut names = key.splitn(6, '/');
    if names.next() != Some(LAYOUT) {
        return false;
    }
    match (names.nth(3), names.next()) {
        (Some("log" | "merge" | "snap" | "branch"), Some(_)) => true,
        (Some("pins"), Some(name)) => name.starts_with("point."),
        _ => false,
    }
}

/// Whether an entry is stored there, of a log or of a branch.
pub fn is_entry(key: &str) -> bool {
    matches!(key.split('/').nth(4), Some("log" | "branch"))
}

/// Whether a merge or a snapshot is stored there, which stands for what others wrote.
pub fn is_composite(key: &str) -> bool {
    matches!(key.split('/').nth(4), Some("merge" | "snap"))
}

/// The directory of the log that a key is in; the key itself where that is none.
pub fn log_of(key: &str) -> &str {
    key.match_indices('/')
        .nth(3)
        .map_or(key, |(at, _)| &key[..=at])
}

/// The name of the last directory of a directory key (`…/name/`).
pub fn dir_name(directory: &str) -> Result<&str> {
    directory
        .trim_end_matches('/')
        .rsplit('/')
        .next()
        .filter(|name| !name.is_empty())
        .ok_or_else(|| Error::corrupt(format!("read directory name {directory:?}: it has none")))
}

/// The log that a directory name stands for, or nothing if it is not ours.
pub fn log_name(directory: &str) -> Option<LogName> {
    dir_name(directory).ok()?.parse().ok()
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
    fn what_tells_of_a_conversation_is_known_by_its_key() {
        let writer: WriterId = "w1".parse().expect("plain");
        let tells = [
            entry(&id(), 2),
            snapshot(&id(), 2),
            merge(&id(), 2, 3),
            branch_entry(&id(), &writer, 2),
            named_point(&id(), "green"),
        ];
        for key in &tells {
            assert!(holds_content(key), "{key}");
            assert_eq!(log_of(key), log_root(&id()));
        }
        let others = [
            store_facts(),
            probe("x"),
            gc_mark("x"),
            wishes(&id(), 1),
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
    fn numbers_come_back_and_strangers_do_not() {
        assert_eq!(entry_number(&entry(&id(), 77)), Some(77));
        assert_eq!(snapshot_number(&snapshot(&id(), 77)), Some(77));
        for stranger in [
            "",
            "log/",
            "log/1.gz",
            "log/00000000000x.gz",
            "log/notes.txt",
            "log/000000000000.gz",
            "log/000000000007.tar",
        ] {
            assert_eq!(entry_number(stranger), None, "{stranger:?}");
        }
        assert_eq!(entry_number(&snapshot(&id(), 77)), None);
        assert_eq!(wishes_number(&wishes(&id(), 3)), Some(3));
        assert_eq!(wishes_number("wishes/3.json"), None);
        assert_eq!(merge_range(&merge(&id(), 32, 62)), Some((32, 62)));
        for stranger in [
            "merge/32-62.gz",
            "merge/000000000062-000000000032.gz",
            "merge/000000000032.gz",
        ] {
            assert_eq!(merge_range(stranger), None, "{stranger:?}");
        }
    }
}
