//! The index in PostgreSQL or SQLite: one schema, one text of SQL for both.
//!
//! Owns when a connection is made and how long a call may take. Does not own what an error means (`fault`), where the
//! database is (`connect`) or what a record changes (`record`).

mod browse;
mod catalog;
mod connect;
mod failure;
mod list;
mod messages;
mod metadata;
mod record;
mod rows;
mod search;
mod stats;
mod texts;

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::{AnyPool, AssertSqlSafe, Row};
use tokio::sync::Mutex;

use self::connect::Target;
use self::failure::{Fault, classify};
use self::rows::{LONGEST, clip, clip_some, log_columns, stamp, whole};
use crate::config::Prices;
use crate::error::Result;
use crate::index::{
    EntryRecord, EntryRow, Failure, FenceRow, Filter, Index, RecordOutcome, SessionPage, SessionRow,
};
use crate::model::{AgentName, Checkpoint, LogId, Namespace, PathState, SessionMetadata};
use crate::sys::{Rng, SystemRng};

/// How long a call may take, connecting and migrating included.
const LONGEST_CALL: Duration = Duration::from_secs(15);

/// What one message more may take; a slow machine takes a millisecond.
const PER_MESSAGE: Duration = Duration::from_millis(5);

/// How many failures of a namespace are kept.
const FAILURES: u32 = 1000;

/// An index in a database. It connects at the first call and again after each outage; until a call succeeds, the
/// next one tries anew.
pub struct SqlIndex {
    target: Target,
    terms: IndexOptions,
    pool: Mutex<Option<AnyPool>>,
}

/// How records are taken in.
#[derive(Debug, Clone, Default)]
pub struct IndexOptions {
    /// What tokens cost.
    pub prices: Prices,
    /// Keep what was said, to search in it.
    pub text: bool,
    /// Keep nothing that anybody said, not even a title: what is stored is encrypted, and the database is not.
    pub sealed: bool,
}

/// Without the pool, whose options hold the password.
impl fmt::Debug for SqlIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SqlIndex")
            .field(&self.target.address())
            .finish()
    }
}

impl SqlIndex {
    /// An index at `sqlite:///directory/file.db` or `postgres://user:password@host/database`. Nothing is connected yet, so
    /// only a URL that can never work is refused.
    pub fn open(url: &str) -> Result<SqlIndex> {
        Ok(SqlIndex {
            target: Target::parse(url)?,
            terms: IndexOptions::default(),
            pool: Mutex::new(None),
        })
    }

    /// The same on other terms.
    pub fn on(self, terms: IndexOptions) -> SqlIndex {
        SqlIndex { terms, ..self }
    }

    /// The connections, made if there are none; the first caller makes them and the others wait.
    async fn pool(&self) -> Result<AnyPool, Fault> {
        let mut slot = self.pool.lock().await;
        if let Some(pool) = &*slot {
            return Ok(pool.clone());
        }
        let pool = self.target.connect().await?;
        *slot = Some(pool.clone());
        Ok(pool)
    }

    /// Runs one call: bounded in time, its error put into our words.
    async fn call<T>(&self, work: impl Future<Output = Result<T, Fault>> + Send) -> Result<T> {
        self.call_within(LONGEST_CALL, work).await
    }

    async fn call_within<T>(
        &self,
        most: Duration,
        work: impl Future<Output = Result<T, Fault>> + Send,
    ) -> Result<T> {
        let fault = match tokio::time::timeout(most, work).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(fault)) => fault,
            Err(_) => Fault::Slow,
        };
        if fault.breaks_connections() {
            // A connection that hangs would keep its place in the pool; and a new first connection says at once why
            // it fails, where the pool waits. If another call is just connecting, there is nothing to drop.
            if let Ok(mut slot) = self.pool.try_lock() {
                *slot = None;
            }
        }
        Err(classify(fault, self.target.address()))
    }
}

#[async_trait]
impl Index for SqlIndex {
    async fn record(&self, record: &EntryRecord) -> Result<RecordOutcome> {
        // A fork can begin with a hundred thousand messages.
        let most =
            LONGEST_CALL + PER_MESSAGE * u32::try_from(record.told.said.len()).unwrap_or(u32::MAX);
        self.call_within(most, async {
            let mut transaction = self.pool().await?.begin_with(self.target.begin()).await?;
            let recorded = record::record(&mut transaction, record, &self.terms).await?;
            match recorded {
                RecordOutcome::New => transaction.commit().await?,
                RecordOutcome::Already | RecordOutcome::Gap { .. } => {
                    transaction.rollback().await?
                }
            }
            Ok(recorded)
        })
        .await
    }

    async fn name_points(&self, log: &LogId, named: &[(String, Checkpoint)]) -> Result<()> {
        self.call(async {
            let mut transaction = self.pool().await?.begin_with(self.target.begin()).await?;
            record::name_points(&mut transaction, (log, &self.terms), named).await?;
            transaction.commit().await?;
            Ok(())
        })
        .await
    }

    async fn say(&self, log: &LogId, number: u64, wishes: &SessionMetadata) -> Result<()> {
        self.call(async {
            let mut transaction = self.pool().await?.begin_with(self.target.begin()).await?;
            metadata::say(&mut transaction, log, number, wishes).await?;
            transaction.commit().await?;
            Ok(())
        })
        .await
    }

    async fn session(&self, log: &LogId) -> Result<Option<SessionRow>> {
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let mut connection = self.pool().await?.acquire().await?;
            let sql = format!(
                "SELECT {} FROM sessions WHERE namespace = $1 AND agent = $2 AND id = $3",
                rows::SESSION
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
            let mut sessions = [rows::session(&row)?];
            list::add_branches(&mut connection, namespace, &mut sessions).await?;
            list::add_labels(&mut connection, namespace, &mut sessions).await?;
            let [session] = sessions;
            Ok(Some(session))
        })
        .await
    }

    async fn sessions(&self, filter: &Filter) -> Result<SessionPage> {
        let cursor = filter
            .cursor
            .as_deref()
            .map(list::Cursor::parse)
            .transpose()?;
        self.call(async {
            let mut connection = self.pool().await?.acquire().await?;
            list::page(&mut connection, filter, cursor).await
        })
        .await
    }

    async fn files(&self, log: &LogId) -> Result<Vec<PathState>> {
        const SQL: &str = "SELECT path, kind, len, sha256, mode, mtime_ns, seq FROM files \
             WHERE namespace = $1 AND agent = $2 AND session = $3 ORDER BY path";
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let found = sqlx::query(SQL)
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .fetch_all(&self.pool().await?)
                .await?;
            found.iter().map(rows::file).collect()
        })
        .await
    }

    async fn entries(&self, log: &LogId) -> Result<Vec<EntryRow>> {
        const SQL: &str = "SELECT branch, seq, kind, writer, at, raw_bytes, stored_bytes, digest FROM entries \
             WHERE namespace = $1 AND agent = $2 AND session = $3 ORDER BY branch, seq";
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let found = sqlx::query(SQL)
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .fetch_all(&self.pool().await?)
                .await?;
            found.iter().map(rows::entry).collect()
        })
        .await
    }

    async fn logs(&self, namespace: &Namespace, agent: &AgentName) -> Result<Vec<LogId>> {
        const SQL: &str = "SELECT id FROM sessions WHERE namespace = $1 AND agent = $2 ORDER BY id";
        self.call(async {
            let found = sqlx::query(SQL)
                .bind(namespace.as_str())
                .bind(agent.as_str())
                .fetch_all(&self.pool().await?)
                .await?;
            let log = |row| {
                Ok(LogId {
                    namespace: namespace.clone(),
                    agent: agent.clone(),
                    name: rows::parsed(row, "id")?,
                })
            };
            found.iter().map(log).collect()
        })
        .await
    }

    async fn forget(&self, log: &LogId) -> Result<()> {
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let mut transaction = self.pool().await?.begin_with(self.target.begin()).await?;
            // The session's row first: it is the lock that `record` takes too.
            for sql in [
                "DELETE FROM sessions WHERE namespace = $1 AND agent = $2 AND id = $3",
                "DELETE FROM files WHERE namespace = $1 AND agent = $2 AND session = $3",
                "DELETE FROM entries WHERE namespace = $1 AND agent = $2 AND session = $3",
                "DELETE FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3",
                "DELETE FROM texts WHERE namespace = $1 AND agent = $2 AND session = $3",
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

    async fn note_failure(&self, failure: &Failure) -> Result<()> {
        const ADD: &str = "INSERT INTO errors (namespace, at, id, agent, session, attempt, message) VALUES ($1, $2, $3, $4, $5, $6, $7)";
        const CUT: &str = "DELETE FROM errors WHERE namespace = $1 AND (at, id) < \
             (SELECT at, id FROM errors WHERE namespace = $1 ORDER BY at DESC, id DESC LIMIT 1 OFFSET $2)";
        static NOTED: AtomicU64 = AtomicU64::new(0);
        // Failures of one process and the same time stay in order; those of several never meet.
        let id = format!(
            "{:016x}-{:016x}",
            NOTED.fetch_add(1, Ordering::Relaxed),
            SystemRng.next()
        );
        self.call(async {
            let mut connection = self.pool().await?.acquire().await?;
            sqlx::query(ADD)
                .bind(failure.namespace.as_str())
                .bind(stamp(failure.at))
                .bind(id)
                .bind(failure.agent.as_str())
                .bind(clip_some(failure.session.as_deref(), LONGEST))
                .bind(i64::from(failure.attempt))
                .bind(clip(&failure.message, LONGEST))
                .execute(&mut *connection)
                .await?;
            sqlx::query(CUT)
                .bind(failure.namespace.as_str())
                .bind(i64::from(FAILURES) - 1)
                .execute(&mut *connection)
                .await?;
            Ok(())
        })
        .await
    }

    async fn failures(&self, namespace: &Namespace, limit: u32) -> Result<Vec<Failure>> {
        const SQL: &str = "SELECT namespace, agent, session, at, attempt, message FROM errors \
             WHERE namespace = $1 ORDER BY at DESC, id DESC LIMIT $2";
        self.call(async {
            let limit = i64::from(limit.min(FAILURES));
            let found = sqlx::query(SQL)
                .bind(namespace.as_str())
                .bind(limit)
                .fetch_all(&self.pool().await?)
                .await?;
            found.iter().map(rows::failure).collect()
        })
        .await
    }

    async fn fence(&self, log: &LogId) -> Result<Option<FenceRow>> {
        const SQL: &str =
            "SELECT seq, writer FROM fences WHERE namespace = $1 AND agent = $2 AND session = $3";
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let found = sqlx::query(SQL)
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .fetch_optional(&self.pool().await?)
                .await?;
            found.as_ref().map(rows::fence).transpose()
        })
        .await
    }

    async fn move_fence(
        &self,
        log: &LogId,
        from: Option<&FenceRow>,
        to: &FenceRow,
    ) -> Result<bool> {
        const FIRST: &str = "INSERT INTO fences (namespace, agent, session, seq, writer) VALUES ($1, $2, $3, $4, $5) \
             ON CONFLICT (namespace, agent, session) DO NOTHING";
        const NEXT: &str = "UPDATE fences SET seq = $4, writer = $5 \
             WHERE namespace = $1 AND agent = $2 AND session = $3 AND seq = $6 AND writer = $7";
        self.call(async {
            let (namespace, agent, id) = log_columns(log);
            let seq = whole("entry number", to.seq)?;
            let mut query = sqlx::query(if from.is_some() { NEXT } else { FIRST });
            query = query
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .bind(seq)
                .bind(to.writer.as_str());
            if let Some(from) = from {
                query = query
                    .bind(whole("entry number", from.seq)?)
                    .bind(from.writer.as_str());
            }
            Ok(query.execute(&self.pool().await?).await?.rows_affected() == 1)
        })
        .await
    }

    async fn ping(&self) -> Result<()> {
        self.call(async {
            // A table of ours, as a database that answers but has lost its schema is of no use.
            let row = sqlx::query("SELECT COUNT(*) FROM (SELECT 1 FROM sessions LIMIT 1) AS one")
                .fetch_one(&self.pool().await?)
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
