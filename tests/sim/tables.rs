//! The database: rows in memory under the contract of `Index`, and each process's connection to it.
//!
//! A lagging replica may serve rows, never the fence.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use sessiond::error::{Error, Result};
use sessiond::index::{
    EntryRecord, EntryRow, Failure, FenceRow, FenceTable, Index, RecordOutcome, SessionFilter,
    SessionPage, SessionRow, SessionTotals,
};
use sessiond::model::{AgentName, Checkpoint, LogId, Namespace, PathState, Seq, SessionMetadata};

use super::process::ProcessLifetime;
use super::world::{InjectedOutcome, World};

/// The rows of all logs: main entries by seq, branch entries by writer and seq.
#[derive(Clone, Default)]
struct Rows {
    main: BTreeMap<LogId, BTreeMap<Seq, EntryRecord>>,
    branches: BTreeMap<LogId, BTreeMap<(String, Seq), EntryRecord>>,
    named: BTreeMap<LogId, Vec<(String, Checkpoint)>>,
    metadata: BTreeMap<LogId, (u64, SessionMetadata)>,
}

impl Rows {
    fn record(&mut self, record: &EntryRecord) -> RecordOutcome {
        let seq = record.header.seq;
        if let Some(writer) = &record.branch {
            let rows = self.branches.entry(record.log.clone()).or_default();
            return match rows.insert((writer.to_string(), seq), record.clone()) {
                None => RecordOutcome::Recorded,
                Some(_) => RecordOutcome::AlreadyRecorded,
            };
        }
        let rows = self.main.entry(record.log.clone()).or_default();
        let have = rows.last_key_value().map_or(0, |(seq, _)| *seq);
        if rows.contains_key(&seq) {
            return RecordOutcome::AlreadyRecorded;
        }
        if record.header.predecessor() != have && !(record.header.resets_log() && have < seq) {
            return RecordOutcome::Gap { head: have };
        }
        rows.insert(seq, record.clone());
        RecordOutcome::Recorded
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
            origin: None,
            origin_turn: None,
            model: None,
            agent_version: None,
            status: "active".to_owned(),
            request_id: self
                .metadata
                .get(log)
                .and_then(|(_, metadata)| metadata.request_id.clone()),
            ttl: self
                .metadata
                .get(log)
                .and_then(|(_, metadata)| metadata.ttl),
            labels: self
                .metadata
                .get(log)
                .map(|(_, metadata)| metadata.labels.clone())
                .unwrap_or_default(),
            created: first.header.at,
            updated: rows
                .values()
                .filter_map(|row| row.header.written_at())
                .max()
                .unwrap_or(first.header.at),
            head: last.header.seq,
            writer: last.header.writer.to_string(),
            raw_bytes: rows.values().map(|row| row.header.body_len()).sum(),
            stored_bytes: rows.values().map(|row| row.stored_bytes).sum(),
            totals: SessionTotals::default(),
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
            kind: record.header.kind.as_str().to_owned(),
            writer: record.header.writer.to_string(),
            at: record.header.at,
            raw_bytes: record.header.body_len(),
            stored_bytes: record.stored_bytes,
            digest: record.digest,
        };
        main.chain(branches).map(row).collect()
    }
}

#[derive(Default)]
struct Inner {
    rows: Rows,
    /// The rows of the lagging replica.
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

    /// Freezes the lagging replica at the current rows. The fault `index_old` reads from it.
    pub fn freeze_copy(&self) {
        let mut inner = self.inner();
        inner.old = inner.rows.clone();
    }

    /// The recorded entries of a log, main first.
    pub fn entries(&self, log: &LogId) -> Vec<EntryRow> {
        self.inner().rows.entries(log)
    }
}

/// One process's connection to the database.
pub struct Session {
    pub tables: Arc<Tables>,
    pub world: Arc<World>,
    pub lifetime: Arc<ProcessLifetime>,
}

impl Session {
    async fn statement<T>(
        &self,
        what: &str,
        run: impl FnOnce(&mut Inner) -> T + Send,
    ) -> Result<T> {
        let step = self.lifetime.enter().await;
        self.world.delay().await;
        let outcome = self.world.statement_outcome();
        let failed = || Error::unavailable(format!("{what}: the database did not answer"));
        let reply = match outcome {
            InjectedOutcome::Success => Ok(run(&mut self.tables.inner())),
            InjectedOutcome::After => {
                run(&mut self.tables.inner());
                Err(failed())
            }
            _ => Err(failed()),
        };
        self.world.note(|| {
            format!(
                "process {}: step {step} {what}: {outcome:?}",
                self.lifetime.number
            )
        });
        self.world.delay().await;
        self.lifetime.leave(step).await;
        reply
    }

    async fn query<T>(&self, what: &str, run: impl FnOnce(&Rows) -> T + Send) -> Result<T> {
        let old = self.world.fault_conditions().index_old;
        self.statement(what, move |inner| {
            run(if old { &inner.old } else { &inner.rows })
        })
        .await
    }
}

#[async_trait]
impl Index for Session {
    async fn connect(&self) -> Result<()> {
        Ok(())
    }

    async fn record(&self, record: &EntryRecord) -> Result<RecordOutcome> {
        self.statement("record", |inner| inner.rows.record(record))
            .await
    }

    async fn record_all(&self, records: &[EntryRecord]) -> Result<Vec<RecordOutcome>> {
        let record = |inner: &mut Inner| {
            let records = records.iter();
            records.map(|record| inner.rows.record(record)).collect()
        };
        self.statement("record", record).await
    }

    async fn set_metadata(
        &self,
        log: &LogId,
        version: u64,
        metadata: &SessionMetadata,
    ) -> Result<()> {
        self.statement("set metadata", |inner| {
            if inner.rows.main.contains_key(log)
                && inner
                    .rows
                    .metadata
                    .get(log)
                    .is_none_or(|(known, _)| *known <= version)
            {
                inner
                    .rows
                    .metadata
                    .insert(log.clone(), (version, metadata.clone()));
            }
        })
        .await
    }

    async fn session(&self, log: &LogId) -> Result<Option<SessionRow>> {
        self.query("select session", |rows| rows.session(log)).await
    }

    async fn sessions(&self, _filter: &SessionFilter) -> Result<SessionPage> {
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
        Err(Error::unavailable("select files: not simulated"))
    }

    async fn entries(&self, log: &LogId) -> Result<Vec<EntryRow>> {
        self.query("select entries", |rows| rows.entries(log)).await
    }

    async fn newest_entries(&self, log: &LogId, limit: u32) -> Result<Vec<EntryRow>> {
        let mut entries = self.entries(log).await?;
        entries.retain(|row| row.branch.is_none());
        entries.reverse();
        entries.truncate(limit as usize);
        Ok(entries)
    }

    async fn logs(&self, _namespace: &Namespace, _agent: &AgentName) -> Result<Vec<LogId>> {
        self.query("select logs", |rows| rows.main.keys().cloned().collect())
            .await
    }

    async fn replace_named_checkpoints(
        &self,
        log: &LogId,
        named: &[(String, Checkpoint)],
    ) -> Result<()> {
        self.statement("replace named checkpoints", |inner| {
            inner.rows.named.insert(log.clone(), named.to_vec());
        })
        .await
    }

    async fn delete_log(&self, log: &LogId) -> Result<()> {
        self.statement("delete log", |inner| {
            inner.rows.main.remove(log);
            inner.rows.branches.remove(log);
            inner.rows.named.remove(log);
            inner.rows.metadata.remove(log);
        })
        .await
    }

    async fn record_failure(&self, _failure: &Failure) -> Result<()> {
        self.statement("record failure", |_| ()).await
    }

    async fn failures(&self, _namespace: &Namespace, _limit: u32) -> Result<Vec<Failure>> {
        Ok(Vec::new())
    }

    async fn ping(&self) -> Result<()> {
        self.statement("ping", |_| ()).await
    }

    fn address(&self) -> String {
        "sim://tables".to_owned()
    }
}

#[async_trait]
impl FenceTable for Session {
    async fn read_fence(&self, log: &LogId) -> Result<Option<FenceRow>> {
        self.statement("select fence", |inner| inner.fences.get(log).cloned())
            .await
    }

    async fn compare_and_swap_fence(
        &self,
        log: &LogId,
        expected: Option<&FenceRow>,
        new: &FenceRow,
    ) -> Result<bool> {
        let what = format!("move fence to {} {}", new.seq, new.writer);
        self.statement(&what, |inner| {
            let is_current = inner.fences.get(log) == expected;
            if is_current {
                inner.fences.insert(log.clone(), new.clone());
            }
            is_current
        })
        .await
    }
}
