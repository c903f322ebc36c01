//! Makes the index follow the bucket: from where it stopped, or from nothing.

use crate::agent::Profile;
use crate::agent::transcript::Reader;
use crate::codec::entry::Entry;
use crate::error::{Doing, Error, Kind, Result};
use crate::index::{Index, Record, Recorded};
use crate::log::Logs;
use crate::log::pieces::Prefer;
use crate::log::walk::{Reading, Sink};
use crate::log::wishes::Said;
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
    // What the index knows is not read again; the first link is then not checked, all others are.
    let reading = Reading { prefer: Prefer::Short, after: have, ..Reading::default() };
    let read = logs.read_log(id, reading, || Records { id, profile, reader: Reader::default(), records: Vec::new() }).await?;
    let damage = read.damage;
    for record in read.sink.records {
        recorded += tell(index, &record).await?;
    }
    if let Some(error) = damage {
        return Err(error);
    }
    for writer in logs.branches(id).await? {
        for piece in logs.branch_pieces(id, &writer).await? {
            if let Some(entry) = logs.read_piece(id, &piece, Some(&writer)).await? {
                recorded += tell(index, &record(&mut Reader::default(), profile, id, Some(writer.clone()), &entry)).await?;
            }
        }
    }
    tell_wishes(logs, index, id).await?;
    Ok(recorded)
}

/// Tells the index what people said of a session.
async fn tell_wishes(logs: &Logs, index: &dyn Index, id: &LogId) -> Result<()> {
    if id.name.is_project() {
        return Ok(());
    }
    match logs.said(id).await {
        Ok(Said { number: 0, .. }) => Ok(()),
        Ok(said) => index.say(id, said.number, &said.wishes).await,
        // The rest of the rows is right without them.
        Err(error) if error.kind() == Kind::Corrupt => {
            tracing::warn!(%error, %id, "what was said of it is not in the index");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Gathers what the index takes in; the bytes of the files are not kept.
struct Records<'a> {
    id: &'a LogId,
    profile: &'a dyn Profile,
    reader: Reader,
    records: Vec<Record>,
}

impl Sink for Records<'_> {
    fn take(&mut self, entry: &Entry) -> Result<()> {
        self.records.push(record(&mut self.reader, self.profile, self.id, None, entry));
        Ok(())
    }
}

fn record(reader: &mut Reader, profile: &dyn Profile, id: &LogId, branch: Option<WriterId>, entry: &Entry) -> Record {
    let told = reader.read(profile, entry.parts());
    Record { log: id.clone(), branch, header: entry.header.clone(), stored: entry.stored, digest: entry.digest, told }
}

async fn tell(index: &dyn Index, record: &Record) -> Result<u64> {
    match index.record(record).await? {
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
