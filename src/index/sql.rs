//! The index in PostgreSQL or SQLite, with one schema and the same SQL for both.
//!
//! Owns the connection pool and the timeout of each call. Does not own the classification of errors
//! (`error`), connecting (`connect`) or the rows that an entry changes (`record`).

mod bulk;
mod catalog;
mod claim;
mod connect;
mod connection;
mod error;
mod fence;
mod message_page;
mod message_texts;
mod messages;
mod metadata;
mod record;
mod rows;
mod search;
mod session_page;
mod session_state;
mod statement;
mod stats;

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::{AnyConnection, AnyPool, AssertSqlSafe, Connection, Row};
use tokio::sync::Mutex;

use self::connect::{FileIdentity, Target};
use self::connection::IndexConnection;
use self::error::{SqlError, classify};
use self::rows::{MAX_FIELD_LEN, format_time, log_columns, truncate, truncate_optional};
use crate::error::{Error, ErrorKind, Result};
use crate::index::{
    EntryRecord, EntryRow, Failure, Index, RecordOutcome, SessionFilter, SessionPage, SessionRow,
};
use crate::model::{AgentName, Checkpoint, LogId, Namespace, PathState, Prices, SessionMetadata};
use crate::sys::{Rng, SystemRng};

/// Timeout of a call, including connecting and migrating.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a replaced pool may take to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Additional timeout per message of a record. A slow machine needs one millisecond.
const TIMEOUT_PER_MESSAGE: Duration = Duration::from_millis(5);

/// How often entries are recorded again after another process has changed the same new log.
const MAX_RECORD_ATTEMPTS: u32 = 5;

/// Maximum number of failures per namespace.
const MAX_FAILURES: u32 = 1000;

/// An index in a database. It connects with the first call, and reconnects after an outage.
pub struct SqlIndex {
    target: Target,
    options: IndexOptions,
    connected: Mutex<Option<Connected>>,
}

/// A pool, and the index file that it was opened for.
struct Connected {
    pool: AnyPool,
    /// The connection that checked the schema, for the next call: a restore makes a few calls, one
    /// after the other, and connects only once.
    first: Option<AnyConnection>,
    file: Option<FileIdentity>,
}

/// Options for recording entries.
#[derive(Debug, Clone, Default)]
pub struct IndexOptions {
    /// The prices of tokens.
    pub prices: Prices,
    /// Whether to index the text of messages for full-text search.
    pub index_text: bool,
    /// Whether to omit all text of the conversation, such as titles: the store is encrypted, and
    /// the database is not.
    pub omit_text: bool,
}

/// Omits the pool, because its options contain the password.
impl fmt::Debug for SqlIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SqlIndex")
            .field(&self.target.address())
            .finish()
    }
}

impl SqlIndex {
    /// Opens the index at `sqlite:///directory/file.db` or
    /// `postgres://user:password@host/database`. It does not connect yet, so the only possible
    /// error is an invalid URL.
    pub fn open(url: &str) -> Result<SqlIndex> {
        Ok(SqlIndex {
            target: Target::parse(url)?,
            options: IndexOptions::default(),
            connected: Mutex::new(None),
        })
    }

    /// Sets the options.
    pub fn with_options(self, options: IndexOptions) -> SqlIndex {
        SqlIndex { options, ..self }
    }

    /// Returns a connection. The first caller connects while the others wait. If the index file was
    /// deleted or replaced, the open connections write to a file that nobody else sees, so the pool
    /// is replaced too.
    async fn acquire(&self) -> Result<IndexConnection, SqlError> {
        let mut slot = self.connected.lock().await;
        let connected = self.connect_in(&mut slot).await?;
        if let Some(first) = connected.first.take() {
            return Ok(IndexConnection::First(first));
        }
        let pool = connected.pool.clone();
        drop(slot);
        Ok(IndexConnection::Pooled(pool.acquire().await?))
    }

    /// Keeps the first connection for the next call of a restore. The caller has read all of its
    /// response. The last call of a restore records its claim and does not keep the connection, so
    /// that an idle daemon has none.
    async fn keep_first(&self, connection: IndexConnection) {
        if let IndexConnection::First(first) = connection
            && let Some(connected) = &mut *self.connected.lock().await
        {
            connected.first = Some(first);
        }
    }

    async fn connect_in<'a>(
        &self,
        slot: &'a mut Option<Connected>,
    ) -> Result<&'a mut Connected, SqlError> {
        let connected = match slot.take() {
            Some(connected) if connected.file == self.target.file_identity() => connected,
            replaced => {
                if let Some(replaced) = replaced {
                    self.close(replaced).await;
                }
                let (pool, first) = self.target.connect().await?;
                let file = self.target.file_identity();
                Connected { pool, first, file }
            }
        };
        Ok(slot.insert(connected))
    }

    async fn close(&self, replaced: Connected) {
        tracing::warn!(
            index = self.target.address(),
            "the index file was deleted or replaced; opening it again"
        );
        // SQLite deletes the side files of a database by name when its last connection closes, so
        // the old connections close before the new file has side files.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, replaced.pool.close()).await;
    }

    /// Runs one call with the usual timeout and classifies its error.
    async fn call<T>(&self, work: impl Future<Output = Result<T, SqlError>> + Send) -> Result<T> {
        self.call_within(CALL_TIMEOUT, work).await
    }

    /// Records entries in one transaction. Records nothing if an outcome is a gap.
    async fn try_record(&self, records: &[EntryRecord]) -> Result<Vec<RecordOutcome>> {
        // The first entry of a fork can contain a hundred thousand messages.
        let messages = records
            .iter()
            .map(|record| record.transcripts.messages.len());
        let messages = u32::try_from(messages.sum::<usize>()).unwrap_or(u32::MAX);
        let timeout = CALL_TIMEOUT + TIMEOUT_PER_MESSAGE * messages;
        self.call_within(timeout, async {
            let mut attempts_left = MAX_RECORD_ATTEMPTS;
            loop {
                attempts_left -= 1;
                match self.record_attempt(records).await {
                    Err(error) if attempts_left > 0 && error.is_race() => {}
                    outcomes => return outcomes,
                }
            }
        })
        .await
    }

    async fn record_attempt(
        &self,
        records: &[EntryRecord],
    ) -> Result<Vec<RecordOutcome>, SqlError> {
        let mut connection = self.acquire().await?;
        if !claim::is_possible(&connection, records) {
            return self.record_on(&mut connection, records).await;
        }
        let mut outcomes = Vec::new();
        for record in records {
            if claim::record(&mut connection, record).await? {
                outcomes.push(RecordOutcome::Recorded);
            } else {
                let record = std::slice::from_ref(record);
                outcomes.extend(self.record_on(&mut connection, record).await?);
            }
        }
        Ok(outcomes)
    }

    async fn record_on(
        &self,
        connection: &mut AnyConnection,
        records: &[EntryRecord],
    ) -> Result<Vec<RecordOutcome>, SqlError> {
        let mut transaction = connection.begin_with(self.target.begin()).await?;
        let outcomes = record::record(&mut transaction, records, &self.options).await?;
        match outcomes.iter().any(RecordOutcome::is_gap) {
            true => transaction.rollback().await?,
            false => transaction.commit().await?,
        }
        Ok(outcomes)
    }

    async fn call_within<T>(
        &self,
        timeout: Duration,
        work: impl Future<Output = Result<T, SqlError>> + Send,
    ) -> Result<T> {
        let error = match tokio::time::timeout(timeout, work).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => error,
            Err(_) => SqlError::Timeout,
        };
        if error.breaks_connections() {
            // A hanging connection would stay in the pool. Without a pool, the next call connects
            // by itself and reports why that fails. If another call is connecting, there is no
            // pool.
            if let Ok(mut slot) = self.connected.try_lock() {
                *slot = None;
            }
        }
        Err(classify(error, self.target.address()))
    }
}

#[async_trait]
impl Index for SqlIndex {
    async fn connect(&self) -> Result<()> {
        self.call(async {
            let mut slot = self.connected.lock().await;
            self.connect_in(&mut slot).await.map(|_| ())
        })
        .await
    }

    async fn record(&self, record: &EntryRecord) -> Result<RecordOutcome> {
        let outcomes = self.try_record(std::slice::from_ref(record)).await?;
        let outcome = outcomes.into_iter().next();
        outcome.ok_or_else(|| Error::new(ErrorKind::Internal, "an entry has no outcome"))
    }

    async fn record_all(&self, records: &[EntryRecord]) -> Result<Vec<RecordOutcome>> {
        let outcomes = self.try_record(records).await?;
        if !outcomes.iter().any(RecordOutcome::is_gap) {
            return Ok(outcomes);
        }
        // Nothing was recorded. The entries before and beside the gap are recorded one by one.
        let mut outcomes = Vec::with_capacity(records.len());
        for record in records {
            outcomes.push(self.record(record).await?);
        }
        Ok(outcomes)
    }

    async fn replace_named_checkpoints(
        &self,
        log: &LogId,
        named: &[(String, Checkpoint)],
    ) -> Result<()> {
        self.call(async {
            let mut connection = self.acquire().await?;
            let mut transaction = connection.begin_with(self.target.begin()).await?;
            record::replace_named_checkpoints(&mut transaction, (log, &self.options), named)
                .await?;
            transaction.commit().await?;
            Ok(())
        })
        .await
    }

    async fn set_metadata(
        &self,
        log: &LogId,
        version: u64,
        metadata: &SessionMetadata,
    ) -> Result<()> {
        self.call(async {
            let mut connection = self.acquire().await?;
            let mut transaction = connection.begin_with(self.target.begin()).await?;
            metadata::set(&mut transaction, log, version, metadata).await?;
            transaction.commit().await?;
            Ok(())
        })
        .await
    }

    async fn session(&self, log: &LogId) -> Result<Option<SessionRow>> {
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let mut connection = self.acquire().await?;
            let sql = format!(
                "SELECT {} FROM sessions WHERE namespace = $1 AND agent = $2 AND id = $3",
                rows::SESSION_COLUMNS
            );
            let row = sqlx::query(AssertSqlSafe(sql))
                .bind(namespace)
                .bind(agent)
                .bind(&id)
                .fetch_optional(&mut *connection)
                .await?;
            let Some(row) = row else {
                return Ok(None);
            };
            let mut sessions = [rows::read_session(&row)?];
            session_page::add_branches(&mut connection, namespace, &mut sessions).await?;
            session_page::add_labels(&mut connection, namespace, &mut sessions).await?;
            let [session] = sessions;
            Ok(Some(session))
        })
        .await
    }

    async fn sessions(&self, filter: &SessionFilter) -> Result<SessionPage> {
        let cursor = filter
            .cursor
            .as_deref()
            .map(session_page::Cursor::parse)
            .transpose()?;
        self.call(async {
            let mut connection = self.acquire().await?;
            session_page::page(&mut connection, filter, cursor).await
        })
        .await
    }

    async fn files(&self, log: &LogId) -> Result<Vec<PathState>> {
        const SQL: &str = "SELECT path, kind, len, sha256, mode, mtime_ns, seq FROM files \
             WHERE namespace = $1 AND agent = $2 AND session = $3 ORDER BY path";
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let rows = sqlx::query(SQL)
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .fetch_all(&mut *self.acquire().await?)
                .await?;
            rows.iter().map(rows::read_file).collect()
        })
        .await
    }

    async fn entries(&self, log: &LogId) -> Result<Vec<EntryRow>> {
        const SQL: &str = "SELECT branch, seq, kind, writer, at, raw_bytes, stored_bytes, digest FROM entries \
             WHERE namespace = $1 AND agent = $2 AND session = $3 ORDER BY branch, seq";
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let rows = sqlx::query(SQL)
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .fetch_all(&mut *self.acquire().await?)
                .await?;
            rows.iter().map(rows::read_entry).collect()
        })
        .await
    }

    async fn newest_entries(&self, log: &LogId, limit: u32) -> Result<Vec<EntryRow>> {
        const SQL: &str = "SELECT branch, seq, kind, writer, at, raw_bytes, stored_bytes, digest FROM entries \
             WHERE namespace = $1 AND agent = $2 AND session = $3 AND branch = '' ORDER BY seq DESC LIMIT $4";
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let mut connection = self.acquire().await?;
            let rows = sqlx::query(SQL)
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .bind(i64::from(limit))
                .fetch_all(&mut *connection)
                .await?;
            self.keep_first(connection).await;
            rows.iter().map(rows::read_entry).collect()
        })
        .await
    }

    async fn logs(&self, namespace: &Namespace, agent: &AgentName) -> Result<Vec<LogId>> {
        const SQL: &str = "SELECT id FROM sessions WHERE namespace = $1 AND agent = $2 ORDER BY id";
        self.call(async {
            let rows = sqlx::query(SQL)
                .bind(namespace.as_str())
                .bind(agent.as_str())
                .fetch_all(&mut *self.acquire().await?)
                .await?;
            let log = |row| {
                Ok(LogId {
                    namespace: namespace.clone(),
                    agent: agent.clone(),
                    name: rows::read_parsed(row, "id")?,
                })
            };
            rows.iter().map(log).collect()
        })
        .await
    }

    async fn delete_log(&self, log: &LogId) -> Result<()> {
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let mut connection = self.acquire().await?;
            let mut transaction = connection.begin_with(self.target.begin()).await?;
            // The session's row comes first, because `record` locks it too.
            for sql in [
                "DELETE FROM sessions WHERE namespace = $1 AND agent = $2 AND id = $3",
                "DELETE FROM files WHERE namespace = $1 AND agent = $2 AND session = $3",
                "DELETE FROM entries WHERE namespace = $1 AND agent = $2 AND session = $3",
                "DELETE FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3",
                "DELETE FROM message_texts WHERE namespace = $1 AND agent = $2 AND session = $3",
                "DELETE FROM checkpoints WHERE namespace = $1 AND agent = $2 AND session = $3",
                "DELETE FROM labels WHERE namespace = $1 AND agent = $2 AND session = $3",
            ] {
                sqlx::query(sql)
                    .bind(namespace)
                    .bind(agent)
                    .bind(&id)
                    .execute(&mut *transaction)
                    .await?;
            }
            transaction.commit().await?;
            Ok(())
        })
        .await
    }

    async fn record_failure(&self, failure: &Failure) -> Result<()> {
        const INSERT: &str = "INSERT INTO failures (\
             namespace, at, id, agent, session, attempt, message) VALUES ($1, $2, $3, $4, $5, $6, $7)";
        const DELETE_OLDEST: &str = "DELETE FROM failures WHERE namespace = $1 AND (at, id) < \
             (SELECT at, id FROM failures WHERE namespace = $1 ORDER BY at DESC, id DESC LIMIT 1 OFFSET $2)";
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        // The counter orders the failures of one process; the random number keeps processes apart.
        let id = format!(
            "{:016x}-{:016x}",
            NEXT_ID.fetch_add(1, Ordering::Relaxed),
            SystemRng.next()
        );
        self.call(async {
            let mut connection = self.acquire().await?;
            sqlx::query(INSERT)
                .bind(failure.namespace.as_str())
                .bind(format_time(failure.at))
                .bind(id)
                .bind(failure.agent.as_str())
                .bind(truncate_optional(failure.session.as_deref(), MAX_FIELD_LEN))
                .bind(i64::from(failure.attempt))
                .bind(truncate(&failure.message, MAX_FIELD_LEN))
                .execute(&mut *connection)
                .await?;
            sqlx::query(DELETE_OLDEST)
                .bind(failure.namespace.as_str())
                .bind(i64::from(MAX_FAILURES) - 1)
                .execute(&mut *connection)
                .await?;
            Ok(())
        })
        .await
    }

    async fn failures(&self, namespace: &Namespace, limit: u32) -> Result<Vec<Failure>> {
        const SQL: &str = "SELECT namespace, agent, session, at, attempt, message FROM failures \
             WHERE namespace = $1 ORDER BY at DESC, id DESC LIMIT $2";
        self.call(async {
            let limit = i64::from(limit.min(MAX_FAILURES));
            let rows = sqlx::query(SQL)
                .bind(namespace.as_str())
                .bind(limit)
                .fetch_all(&mut *self.acquire().await?)
                .await?;
            rows.iter().map(rows::read_failure).collect()
        })
        .await
    }

    async fn ping(&self) -> Result<()> {
        self.call(async {
            // Queries a table, because a database without the schema is unusable.
            let row = sqlx::query("SELECT COUNT(*) FROM (SELECT 1 FROM sessions LIMIT 1) AS one")
                .fetch_one(&mut *self.acquire().await?)
                .await?;
            let _: i64 = row.try_get(0)?;
            Ok(())
        })
        .await
    }

    fn address(&self) -> String {
        self.target.address().to_owned()
    }
}
