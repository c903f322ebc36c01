//! What people said of a session becomes rows.
//!
//! Owns the columns that follow from it. What was said and what was written may arrive in any order, with the same result:
//! the status is made of both whenever one of them comes.

use sqlx::any::AnyRow;
use sqlx::{AnyConnection, Row};

use super::failure::Fault;
use super::rows::{count, log_columns, text, ttl_column, whole};
use crate::error::Result;
use crate::model::{LogId, SessionMetadata, Status};

/// Locks the session's row, as `record` does, unless a later word is known.
const LOCK: &str = "UPDATE sessions SET head = head WHERE namespace = $1 AND agent = $2 AND id = $3 AND wishes <= $4 \
     RETURNING status, raw_bytes";

const SESSION: &str = "UPDATE sessions SET status = $4, request_id = $5, ttl = $6, rest = $7, rest_bytes = $8, wishes = $9 \
     WHERE namespace = $1 AND agent = $2 AND id = $3";

const CLEAR: &str = "DELETE FROM labels WHERE namespace = $1 AND agent = $2 AND session = $3";

const LABEL: &str =
    "INSERT INTO labels (namespace, agent, session, name, value) VALUES ($1, $2, $3, $4, $5)";

const FORGET: &str = "UPDATE sessions SET request_id = NULL, ttl = NULL, rest = NULL, rest_bytes = NULL, wishes = 0 \
     WHERE namespace = $1 AND agent = $2 AND id = $3";

/// What somebody said of the status, and the bytes that the session had then.
pub(super) struct ClosedStatus {
    word: String,
    bytes: u64,
}

impl ClosedStatus {
    /// Reads it from a session's row.
    pub(super) fn read(row: &AnyRow) -> Result<Option<ClosedStatus>, Fault> {
        let word: Option<String> = row.try_get("rest")?;
        word.map(|word| {
            Ok(ClosedStatus {
                word,
                bytes: count(row, "rest_bytes")?,
            })
        })
        .transpose()
    }
}

/// The status of a session of so many bytes that is not removed.
pub(super) fn status(raw: u64, rest: Option<&ClosedStatus>) -> &str {
    match rest {
        _ if raw == 0 => Status::Created.word(),
        Some(rest) if rest.bytes == raw => &rest.word,
        _ => Status::Active.word(),
    }
}

/// Takes in what was said.
pub(super) async fn say(
    transaction: &mut AnyConnection,
    log: &LogId,
    number: u64,
    wishes: &SessionMetadata,
) -> Result<(), Fault> {
    let (namespace, agent, id) = log_columns(log);
    let lock = sqlx::query(LOCK)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(whole("number", number)?);
    let Some(known) = lock.fetch_optional(&mut *transaction).await? else {
        return Ok(());
    };
    let rest = wishes.status.map(|rest| ClosedStatus {
        word: Status::from(rest.is).word().to_owned(),
        bytes: rest.raw,
    });
    let before = text(&known, "status")?;
    let status = if before == "removed" {
        "removed"
    } else {
        status(count(&known, "raw_bytes")?, rest.as_ref())
    };
    sqlx::query(SESSION)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(status)
        .bind(wishes.request_id.as_deref())
        .bind(wishes.ttl.map(ttl_column).transpose()?)
        .bind(rest.as_ref().map(|rest| rest.word.as_str()))
        .bind(
            rest.as_ref()
                .map(|rest| whole("length", rest.bytes))
                .transpose()?,
        )
        .bind(whole("number", number)?)
        .execute(&mut *transaction)
        .await?;
    sqlx::query(CLEAR)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .execute(&mut *transaction)
        .await?;
    for (name, value) in &wishes.labels {
        sqlx::query(LABEL)
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

/// Forgets all that was said: the session was deleted for good, and whoever uses its id again begins with nothing.
pub(super) async fn forget(transaction: &mut AnyConnection, log: &LogId) -> Result<(), Fault> {
    let (namespace, agent, id) = log_columns(log);
    for sql in [FORGET, CLEAR] {
        sqlx::query(sql)
            .bind(namespace)
            .bind(agent)
            .bind(&id)
            .execute(&mut *transaction)
            .await?;
    }
    Ok(())
}
