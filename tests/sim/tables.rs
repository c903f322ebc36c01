//! The database: rows in memory by the index's contract, and each process's way to it. A copy that is behind may answer
//! for the rows, never for the fence.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use sessiond::error::{Error, Result};
use sessiond::index::{
    EntryRecord, EntryRow, Failure, FenceRow, Filter, Index, RecordOutcome, SessionPage,
    SessionRow, Totals,
};
use sessiond::model::{AgentName, Checkpoint, LogId, Namespace, PathState, Seq, SessionMetadata};

use super::life::Life;
use super::world::{Fate, World};

/// The rows of all logs: main entries by number, branch entries by writer and number.
#[derive(Clone, Default)]
struct Rows {
    main: BTreeMap<LogId, BTreeMap<Seq, EntryRecord>>,
    branches: BTreeMap<LogId, BTreeMap<(String, Seq), EntryRecord>>,
    named: BTreeMap<LogId, Vec<(String, Checkpoint)>>,
    said: BTreeMap<LogId, (u64, SessionMetadata)>,
}

impl Rows {
    fn record(&mut self, record: &EntryRecord) -> RecordOutcome {
        let seq = record.header.seq;
        if let Some(writer) = &record.branch {
            let rows = self.branches.entry(record.log.clone()).or_default();
            return match rows.insert((writer.to_string(), seq), record.clone()) {
                None => RecordOutcome::New,
                Some(_) => RecordOutcome::Already,
            };
        }
        let rows = self.main.entry(record.log.clone()).or_default();
        let have = rows.last_key_value().map_or(0, |(seq, _)| *seq);
        if rows.contains_key(&seq) {
            return RecordOutcome::Already;
        }
        if record.header.follows() != have && !(record.header.begins_anew() && have < seq) {
            return RecordOutcome::Gap { have };
        }
        rows.insert(seq, record.clone());
        RecordOutcome::New
    }

    fn session(&self, log: &LogId) -> Option<SessionRow> {
        let rows = self.main.get(log)?;
        let (first, last) = (rows.first_key_value()?.1, rows.last_key_value()?.1);
        let mut branches: Vec<String> = self
            .branches
            .get(log)
            .into_iter()
            .flat_map(BTreeMap::keys)
            .map(|(writer, _)| writer.clone())
            .collect();
        branches.dedup();
        Some(SessionRow {
            namespace: log.namespace.to_string(),
            agent: log.agent.to_string(),
            id: log.name.to_string(),
            project: None,
            cwd: None,
            title: None,
            model: None,
            agent_version: None,
            status: "active".to_owned(),
            request_id: self
                .said
                .get(log)
                .and_then(|(_, wishes)| wishes.request_id.clone()),
            ttl: self.said.get(log).and_then(|(_, wishes)| wishes.ttl),
            labels: self
                .said
                .get(log)
                .map(|(_, wishes)| wishes.labels.clone())
                .unwrap_or_default(),
            created: first.header.at,
            updated: last.header.at,
            head: last.header.seq,
            writer: last.header.writer.to_string(),
            raw_bytes: rows.values().map(|row| row.header.body_len()).sum(),
            stored_bytes: rows.values().map(|row| row.stored).sum(),
            totals: Totals::default(),
            branches,
        })
    }

    fn entries(&self, log: &LogId) -> Vec<EntryRow> {
        let main = self.main.get(log).into_iter().flat_map(BTreeMap::values);
        let branches = self
            .branches
            .get(log)
            .into_iter()
            .flat_map(BTreeMap::values);
        let row = |record: &EntryRecord| EntryRow {
            seq: record.header.seq,
            branch: record.branch.as_ref().map(ToString::to_string),
            kind: record.header.kind.word().to_owned(),
            writer: record.header.writer.to_string(),
            at: record.header.at,
            raw_bytes: record.header.body_len(),
            stored_bytes: record.stored,
            digest: record.digest,
        };
        main.chain(branches).map(row).collect()
    }
}

#[derive(Default)]
struct Inner {
    rows: Rows,
    /// What a copy that is behind still holds.
    old: Rows,
    fences: BTreeMap<LogId, FenceRow>,
}

/// The database.
#[derive(Default)]
pub struct Tables(Mutex<Inner>);

impl Tables {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The copy that answers while the weather says so stays at what is known now.
    pub fn copy(&self) {
        let mut inner = self.inner();
        inner.old = inner.rows.clone();
    }

    /// What the rows say of a log: its entries, main first.
    pub fn entries(&self, log: &LogId) -> Vec<EntryRow> {
        self.inner().rows.entries(log)
    }
}

/// One process's way to the database.
pub struct Session {
    pub tables: Arc<Tables>,
    pub world: Arc<World>,
    pub life: Arc<Life>,
}

impl Session {
    async fn statement<T>(
        &self,
        what: &str,
        run: impl FnOnce(&mut Inner) -> T + Send,
    ) -> Result<T> {
        let step = self.life.enter().await;
        self.world.delay().await;
        let fate = self.world.fate_of_statement();
        let failed = || Error::unavailable(format!("{what}: the database did not answer"));
        let answer = match fate {
            Fate::Well => Ok(run(&mut self.tables.inner())),
            Fate::After => {
                run(&mut self.tables.inner());
                Err(failed())
            }
            _ => Err(failed()),
        };
        self.world
            .note(|| format!("life {}: step {step} {what}: {fate:?}", self.life.number));
        self.world.delay().await;
        self.life.leave(step).await;
        answer
    }

    async fn query<T>(&self, what: &str, run: impl FnOnce(&Rows) -> T + Send) -> Result<T> {
        let old = self.world.weather().index_old;
        self.statement(what, move |inner| {
            run(if old { &inner.old } else { &inner.rows })
        })
        .await
    }
}

#[async_trait]
impl Index for Session {
    async fn record(&self, record: &EntryRecord) -> Result<RecordOutcome> {
        self.statement("record", |inner| inner.rows.record(record))
            .await
    }

    async fn say(&self, log: &LogId, number: u64, wishes: &SessionMetadata) -> Result<()> {
        self.statement("say", |inner| {
            if inner.rows.main.contains_key(log)
                && inner
                    .rows
                    .said
                    .get(log)
                    .is_none_or(|(known, _)| *known <= number)
            {
                inner
                    .rows
                    .said
                    .insert(log.clone(), (number, wishes.clone()));
            }
        })
        .await
    }

    async fn session(&self, log: &LogId) -> Result<Option<SessionRow>> {
        self.query("select session", |rows| rows.session(log)).await
    }

    async fn sessions(&self, _filter: &Filter) -> Result<SessionPage> {
        let list = |rows: &Rows| {
            rows.main
                .keys()
                .filter(|log| !log.name.is_project())
                .filter_map(|log| rows.session(log))
                .collect()
        };
        Ok(SessionPage {
            sessions: self.query("select sessions", list).await?,
            next: None,
        })
    }

    async fn files(&self, _log: &LogId) -> Result<Vec<PathState>> {
        Err(Error::unavailable(
            "select files: nobody asks for them here",
        ))
    }

    async fn entries(&self, log: &LogId) -> Result<Vec<EntryRow>> {
        self.query("select entries", |rows| rows.entries(log)).await
    }

    async fn logs(&self, _namespace: &Namespace, _agent: &AgentName) -> Result<Vec<LogId>> {
        self.query("select logs", |rows| rows.main.keys().cloned().collect())
            .await
    }

    async fn name_points(&self, log: &LogId, named: &[(String, Checkpoint)]) -> Result<()> {
        self.statement("name points", |inner| {
            inner.rows.named.insert(log.clone(), named.to_vec());
        })
        .await
    }

    async fn forget(&self, log: &LogId) -> Result<()> {
        self.statement("forget", |inner| {
            inner.rows.main.remove(log);
            inner.rows.branches.remove(log);
            inner.rows.named.remove(log);
            inner.rows.said.remove(log);
        })
        .await
    }

    async fn note_failure(&self, _failure: &Failure) -> Result<()> {
        self.statement("note failure", |_| ()).await
    }

    async fn failures(&self, _namespace: &Namespace, _limit: u32) -> Result<Vec<Failure>> {
        Ok(Vec::new())
    }

    async fn fence(&self, log: &LogId) -> Result<Option<FenceRow>> {
        self.statement("select fence", |inner| inner.fences.get(log).cloned())
            .await
    }

    async fn move_fence(
        &self,
        log: &LogId,
        from: Option<&FenceRow>,
        to: &FenceRow,
    ) -> Result<bool> {
        let what = format!("move fence to {} {}", to.seq, to.writer);
        self.statement(&what, |inner| {
            let at = inner.fences.get(log) == from;
            if at {
                inner.fences.insert(log.clone(), to.clone());
            }
            at
        })
        .await
    }

    async fn ping(&self) -> Result<()> {
        self.statement("ping", |_| ()).await
    }

    fn address(&self) -> String {
        "sim://tables".to_owned()
    }
}
