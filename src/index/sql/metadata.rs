//! Session metadata: labels, request ID, TTL and closed status.
//!
//! Owns the columns that hold it. Metadata and entries may arrive in any order with the same
//! result: each computes the status from both.

use sqlx::any::AnyRow;
use sqlx::{AnyConnection, Row};

use super::error::SqlError;
use super::rows::{log_columns, read_count, read_text, to_bigint, ttl_column};
use crate::error::Result;
use crate::model::{LogId, SessionMetadata, SessionStatus};

/// Locks the session's row, as `record` does, unless it has newer metadata.
const LOCK_SESSION: &str = "UPDATE sessions SET head = head WHERE namespace = $1 AND agent = $2 AND id = $3 AND metadata_version <= $4 \
     RETURNING status, raw_bytes";

const UPDATE_SESSION: &str = "UPDATE sessions SET status = $4, request_id = $5, ttl = $6, closed_status = $7, \
     closed_raw_bytes = $8, metadata_version = $9 \
     WHERE namespace = $1 AND agent = $2 AND id = $3";

const DELETE_LABELS: &str =
    "DELETE FROM labels WHERE namespace = $1 AND agent = $2 AND session = $3";

const INSERT_LABEL: &str =
    "INSERT INTO labels (namespace, agent, session, name, value) VALUES ($1, $2, $3, $4, $5)";

const CLEAR_SESSION: &str = "UPDATE sessions SET request_id = NULL, ttl = NULL, closed_status = NULL, \
     closed_raw_bytes = NULL, metadata_version = 0 \
     WHERE namespace = $1 AND agent = $2 AND id = $3";

/// The closed status of a session, and its raw bytes when it was closed.
pub(super) struct ClosedColumns {
    status: String,
    raw_bytes: u64,
}

impl ClosedColumns {
    /// Reads the columns of a session's row.
    pub(super) fn read(row: &AnyRow) -> Result<Option<ClosedColumns>, SqlError> {
        let status: Option<String> = row.try_get("closed_status")?;
        status
            .map(|status| {
                Ok(ClosedColumns {
                    status,
                    raw_bytes: read_count(row, "closed_raw_bytes")?,
                })
            })
            .transpose()
    }
}

/// Returns the status of a session that is not removed.
pub(super) fn status(raw_bytes: u64, closed: Option<&ClosedColumns>) -> &str {
    match closed {
        _ if raw_bytes == 0 => SessionStatus::Created.as_str(),
        Some(closed) if closed.raw_bytes == raw_bytes => &closed.status,
        _ => SessionStatus::Active.as_str(),
    }
}

/// Replaces the metadata of a session.
pub(super) async fn set(
    transaction: &mut AnyConnection,
    log: &LogId,
    version: u64,
    metadata: &SessionMetadata,
) -> Result<(), SqlError> {
    let (namespace, agent, id) = log_columns(log);
    let lock = sqlx::query(LOCK_SESSION)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(to_bigint("metadata version", version)?);
    let Some(row) = lock.fetch_optional(&mut *transaction).await? else {
        return Ok(());
    };
    let closed = metadata.closed.map(|closed| ClosedColumns {
        status: SessionStatus::from(closed.status).as_str().to_owned(),
        raw_bytes: closed.raw_bytes,
    });
    let before = read_text(&row, "status")?;
    let status = if before == "removed" {
        "removed"
    } else {
        status(read_count(&row, "raw_bytes")?, closed.as_ref())
    };
    sqlx::query(UPDATE_SESSION)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(status)
        .bind(metadata.request_id.as_deref())
        .bind(metadata.ttl.map(ttl_column).transpose()?)
        .bind(closed.as_ref().map(|closed| closed.status.as_str()))
        .bind(
            closed
                .as_ref()
                .map(|closed| to_bigint("length", closed.raw_bytes))
                .transpose()?,
        )
        .bind(to_bigint("metadata version", version)?)
        .execute(&mut *transaction)
        .await?;
    sqlx::query(DELETE_LABELS)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .execute(&mut *transaction)
        .await?;
    for (name, value) in &metadata.labels {
        sqlx::query(INSERT_LABEL)
            .bind(namespace)
            .bind(agent)
            .bind(&id)
            .bind(name.as_str())
            .bind(value.as_str())
            .execute(&mut *transaction)
            .await?;
    }
    Ok(())
}

/// Deletes all metadata of a purged session, so that a new session with the same ID starts without
/// any.
pub(super) async fn clear(transaction: &mut AnyConnection, log: &LogId) -> Result<(), SqlError> {
    let (namespace, agent, id) = log_columns(log);
    for sql in [CLEAR_SESSION, DELETE_LABELS] {
        sqlx::query(sql)
            .bind(namespace)
            .bind(agent)
            .bind(&id)
            .execute(&mut *transaction)
            .await?;
    }
    Ok(())
}
