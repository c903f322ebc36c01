//! Recording a claim in PostgreSQL with one statement.
//!
//! A restore records nothing but its claim, and the server is some milliseconds away. SQLite needs no
//! such path: its database is a local file.

use sqlx::AnyConnection;

use super::bulk::is_postgres;
use super::error::SqlError;
use super::rows::{format_time, log_columns, to_bigint};
use crate::error::Result;
use crate::index::EntryRecord;
use crate::model::{EntryKind, SessionFacts};

/// Maximum number of claims: those of a session and its projects.
const MAX_CLAIMS: usize = 4;

/// Adds the claim to a log whose head is the entry before it. A removed session gets another status,
/// which depends on more than its row.
const RECORD: &str = "WITH claimed AS (\
     UPDATE sessions SET head = $4, writer = $5, stored_bytes = stored_bytes + $6 \
     WHERE namespace = $1 AND agent = $2 AND id = $3 AND head = $7 AND head > 0 AND status <> 'removed' RETURNING 1) \
     INSERT INTO entries (namespace, agent, session, branch, seq, kind, writer, at, raw_bytes, stored_bytes, digest) \
     SELECT $1, $2, $3, '', $4, $8, $5, $9, 0, $6, $10 FROM claimed";

/// Whether the entries are claims that one statement each can record.
pub(super) fn is_possible(connection: &AnyConnection, records: &[EntryRecord]) -> bool {
    is_postgres(connection) && records.len() <= MAX_CLAIMS && records.iter().all(is_plain_claim)
}

/// Records a claim if it follows the indexed head. Returns whether it did.
pub(super) async fn record(
    connection: &mut AnyConnection,
    record: &EntryRecord,
) -> Result<bool, SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    let header = &record.header;
    let recorded = sqlx::query(RECORD)
        .bind(namespace)
        .bind(agent)
        .bind(id)
        .bind(to_bigint("sequence number", header.seq)?)
        .bind(header.writer.as_str())
        .bind(to_bigint("stored length", record.stored_bytes)?)
        .bind(to_bigint("sequence number", header.predecessor())?)
        .bind(header.kind.as_str())
        .bind(format_time(header.at))
        .bind(record.digest.to_string())
        .execute(connection)
        .await?;
    Ok(recorded.rows_affected() > 0)
}

/// Whether the entry changes nothing but the owner of its log.
fn is_plain_claim(record: &EntryRecord) -> bool {
    let header = &record.header;
    record.branch.is_none()
        && header.kind == EntryKind::Claim
        && header.predecessor() < header.seq
        && !header.resets_log()
        && header.covers.is_none()
        && header.moves.is_empty()
        && header.parts.is_empty()
        && header.checkpoints.is_empty()
        && header.fork.is_none()
        && header.rollback_to.is_none()
        && header.adopted.is_empty()
        && record.transcripts.facts == SessionFacts::default()
        && record.transcripts.messages.is_empty()
}
