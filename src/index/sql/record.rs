//! Recording one entry in one transaction.
//!
//! Owns the rows that an entry changes, except messages (`messages`). Does not own the connection
//! or retries.

use sqlx::AnyConnection;
use sqlx::any::AnyRow;

use super::error::SqlError;
use super::messages::{self, ParseState, PartOutcome, RunningTotals};
use super::rows::{
    self, MAX_FIELD_LEN, MAX_KEY_LEN, file_kind_column, format_time, log_columns, read_count,
    read_text, to_bigint, truncate, truncate_optional,
};
use super::{IndexOptions, metadata};
use crate::error::{Error, Result};
use crate::index::{EntryRecord, RecordOutcome};
use crate::model::checkpoint::MAX_CHECKPOINTS;
use crate::model::{Checkpoint, Digest, EntryKind, FileMove, LogId, Part, UploadPart};

/// Creates the session's row, or locks the existing one until the transaction ends, so that no
/// other process records into this log. (SQLite does not support `SELECT … FOR UPDATE`; an update
/// that changes nothing has the same effect.)
const LOCK_SESSION: &str = "INSERT INTO sessions (namespace, agent, id, status, created, updated, head, writer, raw_bytes, stored_bytes) \
     VALUES ($1, $2, $3, 'created', $4, $4, 0, $5, 0, 0) \
     ON CONFLICT (namespace, agent, id) DO UPDATE SET head = sessions.head \
     RETURNING created, updated, head, raw_bytes, stored_bytes, closed_status, closed_raw_bytes, messages, turns, \
     input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, cost, unpriced_responses, \
     unparsed_lines";

/// Creates a row for a session of which only branches are known, or extends its times by this
/// branch entry. A row with a main log stays as it is.
const UPSERT_BRANCH_SESSION: &str = "INSERT INTO sessions \
     (namespace, agent, id, status, created, updated, head, writer, raw_bytes, stored_bytes) \
     VALUES ($1, $2, $3, 'created', $4, $4, 0, $5, 0, 0) \
     ON CONFLICT (namespace, agent, id) DO UPDATE SET \
     created = CASE WHEN excluded.created < sessions.created THEN excluded.created ELSE sessions.created END, \
     updated = CASE WHEN excluded.updated > sessions.updated THEN excluded.updated ELSE sessions.updated END, \
     writer = CASE WHEN excluded.updated > sessions.updated THEN excluded.writer ELSE sessions.writer END \
     WHERE sessions.head = 0";

const INSERT_ENTRY: &str = "INSERT INTO entries \
     (namespace, agent, session, branch, seq, kind, writer, at, raw_bytes, stored_bytes, digest) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT (namespace, agent, session, branch, seq) DO NOTHING";

const UPDATE_SESSION: &str = "UPDATE sessions SET status = $4, created = $5, updated = $6, head = $7, writer = $8, raw_bytes = $9, \
     stored_bytes = $10, project = COALESCE($11, project), cwd = COALESCE($12, cwd), title = COALESCE($13, title), \
     model = COALESCE($14, model), agent_version = COALESCE($15, agent_version), messages = $16, turns = $17, \
     input_tokens = $18, output_tokens = $19, cache_read_tokens = $20, cache_write_tokens = $21, cost = $22, \
     unpriced_responses = $23, unparsed_lines = $24, reported_cost = COALESCE($25, reported_cost), \
     origin = COALESCE($27, origin), origin_turn = COALESCE($28, origin_turn), \
     first_prompt = CASE WHEN CAST($29 AS BIGINT) = 1 THEN $26 ELSE COALESCE(first_prompt, $26) END \
     WHERE namespace = $1 AND agent = $2 AND id = $3";

/// Deletes the file at the destination of a move, if the source exists.
const DELETE_MOVE_TARGET: &str = "DELETE FROM files WHERE namespace = $1 AND agent = $2 AND session = $3 AND path_sha256 = $5 AND EXISTS \
     (SELECT 1 FROM files AS old WHERE old.namespace = $1 AND old.agent = $2 AND old.session = $3 AND old.path_sha256 = $4)";

const RENAME_FILE: &str = "UPDATE files SET path_sha256 = $5, path = $6 \
     WHERE namespace = $1 AND agent = $2 AND session = $3 AND path_sha256 = $4";

const UPSERT_FILE: &str = "INSERT INTO files \
     (namespace, agent, session, path_sha256, path, kind, len, sha256, mode, mtime_ns, seq, partial_line_bytes, position, \
     unparsed_lines) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) \
     ON CONFLICT (namespace, agent, session, path_sha256) DO UPDATE SET kind = excluded.kind, len = excluded.len, \
     sha256 = excluded.sha256, mode = excluded.mode, mtime_ns = excluded.mtime_ns, seq = excluded.seq, \
     partial_line_bytes = excluded.partial_line_bytes, position = excluded.position, \
     unparsed_lines = excluded.unparsed_lines";

const UPSERT_CHECKPOINT: &str = "INSERT INTO checkpoints (namespace, agent, session, number, name, seq, turn, at, detail) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (namespace, agent, session, number, name) DO UPDATE SET \
     seq = excluded.seq, turn = excluded.turn, at = excluded.at, detail = excluded.detail";

const DELETE_OLD_CHECKPOINTS: &str = "DELETE FROM checkpoints WHERE namespace = $1 AND agent = $2 AND session = $3 AND name = '' AND number <= $4";

/// Sets the bytes of the entries before a reset to 0: they no longer belong to the session.
const CLEAR_RAW_BYTES: &str = "UPDATE entries SET raw_bytes = 0 \
     WHERE namespace = $1 AND agent = $2 AND session = $3 AND branch = '' AND seq < $4 AND raw_bytes > 0";

/// Deletes the rows that are derived from the entries of a log.
const DELETE_CONTENT: [&str; 4] = [
    "DELETE FROM files WHERE namespace = $1 AND agent = $2 AND session = $3",
    "DELETE FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3",
    "DELETE FROM message_texts WHERE namespace = $1 AND agent = $2 AND session = $3",
    "DELETE FROM checkpoints WHERE namespace = $1 AND agent = $2 AND session = $3 AND name = ''",
];

/// Returns the bytes before compression that an entry adds to its session.
fn raw_bytes_of(record: &EntryRecord) -> u64 {
    // The initial files of a fork belong to its origin.
    if record.header.fork.is_some() {
        return 0;
    }
    record
        .header
        .covers
        .as_ref()
        .map_or_else(|| record.header.body_len(), |covers| covers.raw_bytes)
}

/// Returns the stored bytes of an entry, or of the entries that a merge or snapshot replaces.
fn stored_bytes_of(record: &EntryRecord) -> u64 {
    record
        .header
        .covers
        .as_ref()
        .map_or(record.stored_bytes, |covers| covers.stored_bytes)
}

/// Records one entry. The caller commits if this returns `Recorded`, and rolls back otherwise.
pub(super) async fn record(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    options: &IndexOptions,
) -> Result<RecordOutcome, SqlError> {
    let header = &record.header;
    if header.seq == 0 || header.predecessor() >= header.seq {
        let statement = format!(
            "invalid header of entry {} of {}: an entry cannot follow entry {}",
            header.seq,
            record.log,
            header.predecessor()
        );
        return Err(Error::corrupt(statement).into());
    }
    let at = format_time(header.at);
    let before = lock_session(transaction, record, &at).await?;
    if !insert_entry(transaction, record, &at).await? {
        return Ok(RecordOutcome::AlreadyRecorded);
    }
    let Some(mut before) = before else {
        return Ok(RecordOutcome::Recorded);
    };
    if before.head != header.predecessor() && !(header.resets_log() && before.head < header.seq) {
        return Ok(RecordOutcome::Gap { head: before.head });
    }
    let mut totals = before.totals;
    if header.resets_log() || header.kind == EntryKind::Snapshot {
        totals = RunningTotals::default();
        (before.raw_bytes, before.stored_bytes) = (0, 0);
        delete_content(transaction, record).await?;
    }
    if header.kind == EntryKind::Purge {
        metadata::clear(transaction, &record.log).await?;
        before.closed = None;
    }
    let mut has_deletions = false;
    for rename in &header.moves {
        has_deletions |= apply_move(transaction, record, rename).await?;
    }
    // A file changes with the last part of its upload.
    let is_visible = |part: &&Part| part.upload != Some(UploadPart::More);
    for part in header.parts.iter().filter(is_visible) {
        match messages::apply_part(transaction, (record, options), part, &mut totals).await? {
            PartOutcome::Gap => return Ok(RecordOutcome::Gap { head: before.head }),
            PartOutcome::Applied(state) => {
                has_deletions |= state.has_deletions;
                upsert_file(transaction, record, part, &state).await?;
            }
        }
    }
    if has_deletions {
        totals = messages::recount(transaction, record, totals.turns).await?;
    }
    if let Some(last) = header.all_checkpoints().last() {
        totals.turns = last.turn;
    }
    add_checkpoints(transaction, (record, options)).await?;
    update_session(transaction, (record, options), &at, before, totals).await?;
    Ok(RecordOutcome::Recorded)
}

/// Creates or locks the session's row; returns its state, except for an entry of a branch.
async fn lock_session(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    at: &str,
) -> Result<Option<SessionState>, SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    let lock = sqlx::query(if record.branch.is_some() {
        UPSERT_BRANCH_SESSION
    } else {
        LOCK_SESSION
    })
    .bind(namespace)
    .bind(agent)
    .bind(id)
    .bind(at)
    .bind(record.header.writer.as_str());
    if record.branch.is_some() {
        lock.execute(transaction).await?;
        return Ok(None);
    }
    SessionState::read(&lock.fetch_one(transaction).await?).map(Some)
}

/// Inserts the row of the entry; returns false if it exists.
async fn insert_entry(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    at: &str,
) -> Result<bool, SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    let header = &record.header;
    let inserted = sqlx::query(INSERT_ENTRY)
        .bind(namespace)
        .bind(agent)
        .bind(id)
        .bind(record.branch.as_ref().map_or("", |branch| branch.as_str()))
        .bind(to_bigint("sequence number", header.seq)?)
        .bind(header.kind.as_str())
        .bind(header.writer.as_str())
        .bind(at)
        .bind(to_bigint("length", raw_bytes_of(record))?)
        .bind(to_bigint("stored length", stored_bytes_of(record))?)
        .bind(record.digest.to_string())
        .execute(transaction)
        .await?;
    Ok(inserted.rows_affected() > 0)
}

/// Deletes the rows that are derived from the earlier entries of a log.
async fn delete_content(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
) -> Result<(), SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    for sql in DELETE_CONTENT {
        sqlx::query(sql)
            .bind(namespace)
            .bind(agent)
            .bind(&id)
            .execute(&mut *transaction)
            .await?;
    }
    sqlx::query(CLEAR_RAW_BYTES)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(to_bigint("sequence number", record.header.seq)?)
        .execute(transaction)
        .await?;
    Ok(())
}

/// Adds the checkpoints of an entry, and deletes the oldest ones beyond the maximum.
async fn add_checkpoints(
    transaction: &mut AnyConnection,
    (record, options): (&EntryRecord, &IndexOptions),
) -> Result<(), SqlError> {
    let mut newest = None;
    for point in record.header.all_checkpoints() {
        newest = newest.max(Some(point.number));
        upsert_checkpoint(transaction, (&record.log, options), "", &point).await?;
    }
    let Some(newest) = newest else {
        return Ok(());
    };
    let (namespace, agent, id) = log_columns(&record.log);
    let last_deleted = newest.saturating_sub(MAX_CHECKPOINTS as u64);
    sqlx::query(DELETE_OLD_CHECKPOINTS)
        .bind(namespace)
        .bind(agent)
        .bind(id)
        .bind(to_bigint("checkpoint", last_deleted)?)
        .execute(transaction)
        .await?;
    Ok(())
}

/// The session's row before this entry.
struct SessionState {
    created: String,
    updated: String,
    head: u64,
    raw_bytes: u64,
    stored_bytes: u64,
    closed: Option<metadata::ClosedColumns>,
    totals: RunningTotals,
}

impl SessionState {
    fn read(row: &AnyRow) -> Result<SessionState, SqlError> {
        Ok(SessionState {
            created: read_text(row, "created")?,
            updated: read_text(row, "updated")?,
            head: read_count(row, "head")?,
            raw_bytes: read_count(row, "raw_bytes")?,
            stored_bytes: read_count(row, "stored_bytes")?,
            closed: metadata::ClosedColumns::read(row)?,
            totals: RunningTotals::read(row)?,
        })
    }
}

/// The time of the newest content. A claim changes nothing that a user sees, so it does not make a
/// session the latest one.
fn updated_at(record: &EntryRecord, before: &SessionState, at: &str, is_first: bool) -> String {
    match record.header.written_at().map(format_time) {
        Some(written_at) if is_first || before.raw_bytes == 0 => written_at,
        Some(written_at) => written_at.max(before.updated.clone()),
        None if is_first => at.to_owned(),
        None => before.updated.clone(),
    }
}

async fn update_session(
    transaction: &mut AnyConnection,
    (record, options): (&EntryRecord, &IndexOptions),
    at: &str,
    before: SessionState,
    totals: RunningTotals,
) -> Result<(), SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    let (header, facts) = (&record.header, &record.transcripts.facts);
    let raw_bytes = before.raw_bytes.saturating_add(raw_bytes_of(record));
    let first_at = header
        .covers
        .as_ref()
        .map_or_else(|| at.to_owned(), |covers| format_time(covers.first_at));
    let status = if header.kind.is_removal() {
        "removed"
    } else {
        metadata::status(raw_bytes, before.closed.as_ref())
    };
    // A row with head 0 comes from branches. The main log determines the times, even if a branch
    // was recorded first. A log that starts over determines them again, because its earlier entries
    // may be deleted.
    let is_first = before.head == 0 || header.resets_log();
    let updated = updated_at(record, &before, at, is_first);
    sqlx::query(UPDATE_SESSION)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(status)
        .bind(if is_first {
            first_at.as_str()
        } else {
            before.created.as_str()
        })
        .bind(updated)
        .bind(to_bigint("sequence number", header.seq)?)
        .bind(header.writer.as_str())
        .bind(to_bigint("length", raw_bytes)?)
        .bind(to_bigint(
            "stored length",
            before.stored_bytes.saturating_add(stored_bytes_of(record)),
        )?)
        .bind(truncate_optional(facts.project.as_deref(), MAX_KEY_LEN))
        .bind(truncate_optional(facts.cwd.as_deref(), MAX_FIELD_LEN))
        .bind(truncate_optional(
            facts.title.as_deref().filter(|_| !options.omit_text),
            MAX_FIELD_LEN,
        ))
        .bind(truncate_optional(facts.model.as_deref(), MAX_FIELD_LEN))
        .bind(truncate_optional(
            facts.agent_version.as_deref(),
            MAX_FIELD_LEN,
        ))
        .bind(to_bigint("messages", totals.messages)?)
        .bind(to_bigint("turns", totals.turns)?)
        .bind(to_bigint("tokens", totals.tokens.input)?)
        .bind(to_bigint("tokens", totals.tokens.output)?)
        .bind(to_bigint("tokens", totals.tokens.cache_read)?)
        .bind(to_bigint("tokens", totals.tokens.cache_write)?)
        .bind(to_bigint("cost", totals.cost)?)
        .bind(to_bigint("responses", totals.unpriced_responses)?)
        .bind(to_bigint("lines", totals.unparsed_lines)?)
        .bind(facts.cost.map(|cost| to_bigint("cost", cost)).transpose()?)
        .bind(truncate_optional(
            facts.first_prompt.as_deref().filter(|_| !options.omit_text),
            MAX_FIELD_LEN,
        ))
        .bind(header.fork.as_ref().map(|fork| fork.session.to_string()))
        .bind(
            header
                .fork
                .as_ref()
                .map(|fork| to_bigint("turn", fork.turn))
                .transpose()?,
        )
        .bind(i64::from(record.transcripts.is_from_start))
        .execute(transaction)
        .await?;
    Ok(())
}

/// Moves a file; returns whether it replaced another one.
async fn apply_move(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    rename: &FileMove,
) -> Result<bool, SqlError> {
    if rename.from == rename.to {
        return Ok(false);
    }
    let (namespace, agent, id) = log_columns(&record.log);
    let from = Digest::of(rename.from.as_str().as_bytes()).to_string();
    let to = Digest::of(rename.to.as_str().as_bytes()).to_string();
    let delete = sqlx::query(DELETE_MOVE_TARGET)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(&from)
        .bind(&to);
    let replaced = delete.execute(&mut *transaction).await?.rows_affected() > 0;
    let moved = sqlx::query(RENAME_FILE)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(&from)
        .bind(&to)
        .bind(rename.to.as_str());
    if moved.execute(&mut *transaction).await?.rows_affected() > 0 {
        messages::rename_file(transaction, record, &from, &to).await?;
    }
    Ok(replaced)
}

async fn upsert_file(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    part: &Part,
    state: &ParseState,
) -> Result<(), SqlError> {
    let (namespace, agent, id) = log_columns(&record.log);
    sqlx::query(UPSERT_FILE)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(Digest::of(part.path.as_str().as_bytes()).to_string())
        .bind(part.path.as_str())
        .bind(file_kind_column(part.kind))
        .bind(to_bigint("length", part.end())?)
        .bind(part.file_sha256.to_string())
        .bind(i64::from(part.mode))
        .bind(part.mtime_ns)
        .bind(to_bigint(
            "sequence number",
            part.seq.unwrap_or(record.header.seq),
        )?)
        .bind(to_bigint("length", state.partial_line_bytes)?)
        .bind(state.position)
        .bind(to_bigint("lines", state.unparsed_lines)?)
        .execute(transaction)
        .await?;
    Ok(())
}

/// Replaces the named checkpoints of a log.
pub(super) async fn replace_named_checkpoints(
    transaction: &mut AnyConnection,
    (log, options): (&LogId, &IndexOptions),
    named: &[(String, Checkpoint)],
) -> Result<(), SqlError> {
    const DELETE: &str = "DELETE FROM checkpoints WHERE namespace = $1 AND agent = $2 AND session = $3 AND name <> ''";
    let (namespace, agent, id) = log_columns(log);
    sqlx::query(DELETE)
        .bind(namespace)
        .bind(agent)
        .bind(id)
        .execute(&mut *transaction)
        .await?;
    for (name, point) in named {
        upsert_checkpoint(transaction, (log, options), name, point).await?;
    }
    Ok(())
}

async fn upsert_checkpoint(
    transaction: &mut AnyConnection,
    (log, options): (&LogId, &IndexOptions),
    name: &str,
    point: &Checkpoint,
) -> Result<(), SqlError> {
    let (namespace, agent, id) = log_columns(log);
    let detail = if options.omit_text {
        rows::to_json(&point.without_text())?
    } else {
        rows::to_json(point)?
    };
    sqlx::query(UPSERT_CHECKPOINT)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(to_bigint("checkpoint", point.number)?)
        .bind(truncate(name, MAX_KEY_LEN))
        .bind(to_bigint("sequence number", point.seq.unwrap_or(0))?)
        .bind(to_bigint("turn", point.turn)?)
        .bind(format_time(point.at))
        .bind(detail)
        .execute(transaction)
        .await?;
    Ok(())
}
