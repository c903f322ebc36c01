//! Makes the index follow the bucket: from where it stopped, or from nothing.

use crate::agent::{self, Profile};
use crate::codec::entry::Entry;
use crate::error::{Doing, Error, Kind, Result};
use crate::index::{Index, Record, Recorded};
use crate::log::Logs;
use crate::log::chain::Chain;
use crate::model::{LogId, WriterId};

/// Records what the index does not know of a log yet; answers how many entries that were.
pub async fn catch_up(logs: &Logs, index: &dyn Index, profile: &dyn Profile, id: &LogId) -> Result<u64> {
    let have = index.session(id).await?.map_or(0, |row| row.head);
    match follow(logs, index, profile, id, have).await {
        // The index holds something else than the bucket (or what it holds was passed over): begin anew.
        Err(error) if error.kind() == Kind::Conflict || error.kind() == Kind::Corrupt && have > 0 => {
            index.forget(id).await?;
            follow(logs, index, profile, id, 0).await
        }
        done => done,
    }
    .doing_with(|| format!("index {id}"))
}

async fn follow(logs: &Logs, index: &dyn Index, profile: &dyn Profile, id: &LogId, have: u64) -> Result<u64> {
    let mut recorded = 0;
    // The digest of the entry before is not in the index's hands: the first link is not checked, all others are.
    let mut chain = Chain::new(id.to_string(), have, None);
    for found in logs.entries(id, have).await? {
        if let Some(entry) = chain.push(found.seq, logs.read_listed(id, found.seq).await)? {
            recorded += record(index, profile, id, None, entry).await?;
        }
    }
    while let Some(entry) = chain.pop()? {
        recorded += record(index, profile, id, None, entry).await?;
    }
    for writer in logs.branches(id).await? {
        for found in logs.branch_entries(id, &writer).await? {
            if let Some(entry) = logs.read_branch(id, &writer, found.seq).await? {
                recorded += record(index, profile, id, Some(writer.clone()), entry).await?;
            }
        }
    }
    Ok(recorded)
}

async fn record(index: &dyn Index, profile: &dyn Profile, id: &LogId, branch: Option<WriterId>, entry: Entry) -> Result<u64> {
    let facts = agent::facts(profile, entry.parts().map(|(part, bytes)| (&part.path, bytes)));
    let record = Record { log: id.clone(), branch, header: entry.header, stored: entry.stored, digest: entry.digest, facts };
    match index.record(&record).await? {
        Recorded::New => Ok(1),
        Recorded::Already => Ok(0),
        Recorded::Gap { have } => Err(Error::conflict(format!("the index knows entry {have} and the bucket gives {}", record.header.seq))),
    }
}

/// What a rebuild did.
#[derive(Debug, Default, Clone, Copy, serde::Serialize)]
pub struct Rebuilt {
    /// Logs in the bucket.
    pub logs: usize,
    /// Entries recorded.
    pub entries: u64,
    /// Logs that the index knew and the bucket does not have.
    pub forgotten: usize,
    /// Logs that could not be read.
    pub failed: usize,
}

/// Rebuilds the index of an agent from the bucket alone. A log that cannot be read is told and passed over.
pub async fn rebuild(logs: &Logs, index: &dyn Index, profile: &dyn Profile, mut tell: impl FnMut(&LogId, &Result<u64>)) -> Result<Rebuilt> {
    let mut rebuilt = Rebuilt::default();
    let names = logs.names("").await?;
    for known in index.logs(&logs.namespace, &logs.agent).await? {
        if !names.contains(&known.name) {
            index.forget(&known).await?;
            rebuilt.forgotten += 1;
        }
    }
    for name in names {
        let id = logs.id(name);
        index.forget(&id).await?;
        let done = follow(logs, index, profile, &id, 0).await;
        match &done {
            Ok(entries) => rebuilt.entries += entries,
            // Without the database there is no point in going on.
            Err(error) if error.is_retryable() => return done.map(|_| rebuilt).doing_with(|| format!("index {id}")),
            Err(_) => rebuilt.failed += 1,
        }
        tell(&id, &done);
        rebuilt.logs += 1;
    }
    Ok(rebuilt)
}
