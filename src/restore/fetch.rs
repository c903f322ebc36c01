//! Which objects a restore needs, and getting them: in parallel, decoded on every core, applied in order.

use futures_util::StreamExt;
use futures_util::stream;

use super::assemble::Assembly;
use crate::codec::entry::Entry;
use crate::error::{Error, Kind, Result};
use crate::log::chain::Chain;
use crate::log::{Logs, Numbered};
use crate::model::{At, Digest, LogId, Seq, WriterId};

/// So many objects are on their way or being inflated at a time; with their size it bounds the memory of a restore.
const AT_ONCE: usize = 8;

/// What to read, as a value: a dry run prints it, a restore consumes it.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The log.
    pub id: LogId,
    /// The point to go back to.
    pub at: At,
    /// The snapshot to begin with.
    pub snapshot: Option<Seq>,
    /// The entries behind it, in order.
    pub entries: Vec<Numbered>,
    /// The last number of the log, whatever the point.
    pub head: Seq,
    /// The branch to go on with, behind the entry it left the log at.
    pub branch: Option<(WriterId, Vec<Numbered>)>,
}

/// The end of a log.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    /// The number of its last sound entry.
    pub seq: Seq,
    /// Its digest.
    pub digest: Option<Digest>,
    /// The last number there is; higher if what stands behind the last sound entry is damaged.
    pub end: Seq,
}

impl Plan {
    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.objects() == 0
    }

    /// How many objects will be read.
    pub fn objects(&self) -> usize {
        usize::from(self.snapshot.is_some()) + self.entries.len() + self.branch.as_ref().map_or(0, |(_, entries)| entries.len())
    }
}

/// Asks the bucket what there is, and picks what is needed.
pub async fn plan(logs: &Logs, id: &LogId, at: At, branch: Option<&WriterId>) -> Result<Plan> {
    let (snapshots, entries) = futures_util::future::try_join(logs.snapshots(id), logs.entries(id, 0)).await?;
    let branch_entries = match branch {
        None => None,
        Some(writer) => {
            let found = logs.branch_entries(id, writer).await?;
            if found.is_empty() {
                let known: Vec<String> = logs.branches(id).await?.iter().map(ToString::to_string).collect();
                let known = if known.is_empty() { "it has none".to_owned() } else { format!("it has {}", known.join(", ")) };
                return Err(Error::not_found(format!("{id} has no branch {writer}: {known}")));
            }
            Some((writer.clone(), found))
        }
    };
    let head = entries.last().map(|entry| entry.seq).max(snapshots.last().map(|snapshot| snapshot.seq)).unwrap_or(0);
    if let At::Seq(seq) = at
        && branch.is_none()
        && seq > head
    {
        return Err(Error::not_found(format!("{id} has no entry {seq}: its last is {head}")));
    }
    // A branch goes on from the entry before its first.
    let base = match &branch_entries {
        Some((writer, found)) => match found.first() {
            Some(first) => logs.read_branch(id, writer, first.seq).await?.map(|entry| entry.header.follows()),
            None => None,
        },
        None => None,
    };
    Ok(pick(id, at, &snapshots, entries, head, base, branch_entries))
}

/// Pure: the newest snapshot that is not too new, and what is behind it.
fn pick(
    id: &LogId,
    at: At,
    snapshots: &[Numbered],
    entries: Vec<Numbered>,
    head: Seq,
    base: Option<Seq>,
    branch: Option<(WriterId, Vec<Numbered>)>,
) -> Plan {
    let most = match (base, at) {
        (Some(base), _) => base,
        (None, At::Seq(seq)) => seq,
        (None, At::Latest) => Seq::MAX,
        // Only the entries themselves tell their time: begin at the beginning while it is there.
        (None, At::Time(_)) => entries.first().filter(|first| first.seq == 1).map_or(Seq::MAX, |_| 0),
    };
    let snapshot = snapshots.iter().map(|snapshot| snapshot.seq).rfind(|seq| *seq <= most);
    let behind = snapshot.unwrap_or(0);
    let upper = if let At::Time(_) = at { base.unwrap_or(Seq::MAX) } else { most };
    let entries = entries.into_iter().filter(|entry| entry.seq > behind && entry.seq <= upper).collect();
    Plan { id: id.clone(), at, snapshot, entries, head, branch }
}

/// Reads what the plan names and puts it together. Answers the end of the log.
pub async fn fetch(logs: &Logs, plan: &Plan, assembly: &mut Assembly<'_>) -> Result<Head> {
    if let Some(seq) = plan.snapshot {
        let snapshot = logs.read_snapshot(&plan.id, seq).await?.ok_or_else(|| gone(&format!("snapshot {seq}")))?;
        assembly.begin_with(&snapshot)?;
    }
    let mut chain = Chain::new(plan.id.to_string(), assembly.state.seq, assembly.state.digest);
    let numbers = plan.entries.iter().map(|entry| (None, entry.seq));
    run(logs, plan, numbers, &mut chain, |entry| take(plan, assembly, entry)).await?;
    if let Some((writer, entries)) = &plan.branch {
        let (last, digest) = chain.head();
        let mut chain = Chain::new(format!("branch {writer} of {}", plan.id), last, digest);
        let numbers = entries.iter().map(|entry| (Some(writer.clone()), entry.seq));
        run(logs, plan, numbers, &mut chain, |entry| take(plan, assembly, entry)).await?;
    }
    if assembly.state.seq == 0 && !plan.is_empty() {
        return Err(Error::not_found(format!("{} has no entry as early as {}", plan.id, plan.at)));
    }
    if assembly.state.seq >= plan.head || plan.branch.is_some() {
        return Ok(Head { seq: assembly.state.seq, digest: assembly.state.digest, end: assembly.state.seq });
    }
    // Going on from an earlier point is written behind the end all the same, or, where the log is damaged, behind what is
    // sound of it.
    let mut chain = Chain::new(plan.id.to_string(), assembly.state.seq, assembly.state.digest);
    let rest = logs.entries(&plan.id, assembly.state.seq).await?;
    match run(logs, plan, rest.iter().map(|entry| (None, entry.seq)), &mut chain, |_| Ok(true)).await {
        Err(error) if error.kind() != Kind::Corrupt => return Err(error),
        Err(error) => tracing::warn!(%error, "the log is damaged; it goes on behind its last sound entry"),
        Ok(()) => {}
    }
    let (seq, digest) = chain.head();
    Ok(Head { seq, digest, end: rest.last().map_or(plan.head, |last| last.seq.max(plan.head)) })
}

fn gone(what: &str) -> Error {
    Error::unavailable(format!("read {what}: it was listed and is gone"))
        .hint("try again: it was collected meanwhile, and a snapshot stands for it")
}

async fn run(
    logs: &Logs,
    plan: &Plan,
    numbers: impl Iterator<Item = (Option<WriterId>, Seq)>,
    chain: &mut Chain,
    mut take: impl FnMut(&Entry) -> Result<bool>,
) -> Result<()> {
    let mut entries = stream::iter(numbers)
        .map(|(branch, seq)| {
            let (logs, id) = (logs.clone(), plan.id.clone());
            // A task of its own, so that inflating uses every core.
            let read = tokio::spawn(async move {
                match &branch {
                    None => logs.read_listed(&id, seq).await,
                    Some(writer) => {
                        let entry = logs.read_branch(&id, writer, seq).await?;
                        entry.ok_or_else(|| gone(&format!("entry {seq}")))
                    }
                }
            });
            async move { (seq, read.await) }
        })
        .buffered(AT_ONCE);
    while let Some((seq, read)) = entries.next().await {
        let read = read.map_err(|cause| Error::new(Kind::Internal, "read an entry").because(cause))?;
        if let Some(entry) = chain.push(seq, read)?
            && !take(&entry)?
        {
            return Ok(());
        }
    }
    while let Some(entry) = chain.pop()? {
        if !take(&entry)? {
            return Ok(());
        }
    }
    Ok(())
}

/// False once the point is passed.
fn take(plan: &Plan, assembly: &mut Assembly<'_>, entry: &Entry) -> Result<bool> {
    let wanted = plan.at.includes(&entry.header) || plan.branch.is_some();
    if wanted {
        assembly.apply(entry)?;
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(of: &[Seq]) -> Vec<Numbered> {
        of.iter().map(|seq| Numbered { seq: *seq, size: 1 }).collect()
    }

    fn picked(at: &str, snapshots: &[Seq], entries: &[Seq]) -> (Option<Seq>, Vec<Seq>) {
        let id = LogId { namespace: "n".parse().unwrap(), agent: "a".parse().unwrap(), name: "s".parse().unwrap() };
        let plan = pick(&id, at.parse().unwrap(), &numbers(snapshots), numbers(entries), 9, None, None);
        (plan.snapshot, plan.entries.iter().map(|entry| entry.seq).collect())
    }

    #[test]
    fn a_restore_begins_at_the_newest_snapshot_that_is_not_too_new() {
        assert_eq!(picked("latest", &[], &[1, 2, 3]), (None, vec![1, 2, 3]));
        assert_eq!(picked("latest", &[2, 5], &[4, 5, 6, 7]), (Some(5), vec![6, 7]));
        assert_eq!(picked("seq:4", &[2, 5], &[1, 2, 3, 4, 5, 6]), (Some(2), vec![3, 4]));
        assert_eq!(picked("seq:5", &[2, 5], &[1, 2, 3, 4, 5, 6]), (Some(5), vec![]));
        assert_eq!(picked("2026-05-01T12:00:00Z", &[2], &[1, 2, 3]), (None, vec![1, 2, 3]));
    }
}
