//! One entry becomes rows, in one transaction.
//!
//! Owns what a record changes. Does not own the connection or trying again.

use sqlx::AnyConnection;
use sqlx::any::AnyRow;

use super::IndexOptions;
use super::failure::Fault;
use super::messages::{self, Taken, Totals};
use super::metadata;
use super::rows::{
    self, LONGEST, LONGEST_PROJECT, clip, clip_some, count, file_kind, log_columns, stamp, text,
    whole,
};
use crate::error::{Error, Result};
use crate::index::{EntryRecord, RecordOutcome};
use crate::model::checkpoint::MOST_CHECKPOINTS;
use crate::model::{Checkpoint, Digest, EntryKind, FileMove, LogId, Part};

/// Makes the session's row, or locks the one there is: from here on no other process records into this log. (An update
/// that changes nothing, since `SELECT … FOR UPDATE` is not known to SQLite.)
const LOCK: &str = "INSERT INTO sessions (namespace, agent, id, status, created, updated, head, writer, raw_bytes, stored_bytes) \
     VALUES ($1, $2, $3, 'created', $4, $4, 0, $5, 0, 0) \
     ON CONFLICT (namespace, agent, id) DO UPDATE SET head = sessions.head \
     RETURNING created, updated, head, raw_bytes, stored_bytes, rest, rest_bytes, messages, turns, input_tokens, output_tokens, \
     cache_read_tokens, cache_write_tokens, cost, uncosted, unread";

/// Makes a row for a session of which only branches are known, and lets it span them; a row that has a head of its own
/// stays as it is.
const BRANCH_SESSION: &str = "INSERT INTO sessions \
     (namespace, agent, id, status, created, updated, head, writer, raw_bytes, stored_bytes) \
     VALUES ($1, $2, $3, 'created', $4, $4, 0, $5, 0, 0) \
     ON CONFLICT (namespace, agent, id) DO UPDATE SET \
     created = CASE WHEN excluded.created < sessions.created THEN excluded.created ELSE sessions.created END, \
     updated = CASE WHEN excluded.updated > sessions.updated THEN excluded.updated ELSE sessions.updated END, \
     writer = CASE WHEN excluded.updated > sessions.updated THEN excluded.writer ELSE sessions.writer END \
     WHERE sessions.head = 0";

const ENTRY: &str = "INSERT INTO entries \
     (namespace, agent, session, branch, seq, kind, writer, at, raw_bytes, stored_bytes, digest) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT (namespace, agent, session, branch, seq) DO NOTHING";

const SESSION: &str = "UPDATE sessions SET status = $4, created = $5, updated = $6, head = $7, writer = $8, raw_bytes = $9, \
     stored_bytes = $10, project = COALESCE($11, project), cwd = COALESCE($12, cwd), title = COALESCE($13, title), \
     model = COALESCE($14, model), agent_version = COALESCE($15, agent_version), messages = $16, turns = $17, \
     input_tokens = $18, output_tokens = $19, cache_read_tokens = $20, cache_write_tokens = $21, cost = $22, uncosted = $23, \
     unread = $24, told_cost = COALESCE($25, told_cost) \
     WHERE namespace = $1 AND agent = $2 AND id = $3";

const UNCOVER: &str = "DELETE FROM files WHERE namespace = $1 AND agent = $2 AND session = $3 AND path_sha256 = $5 AND EXISTS \
     (SELECT 1 FROM files AS old WHERE old.namespace = $1 AND old.agent = $2 AND old.session = $3 AND old.path_sha256 = $4)";

const RENAME: &str = "UPDATE files SET path_sha256 = $5, path = $6 \
     WHERE namespace = $1 AND agent = $2 AND session = $3 AND path_sha256 = $4";

const FILE: &str = "INSERT INTO files \
     (namespace, agent, session, path_sha256, path, kind, len, sha256, mode, mtime_ns, seq, open, position, unread) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) \
     ON CONFLICT (namespace, agent, session, path_sha256) DO UPDATE SET kind = excluded.kind, len = excluded.len, \
     sha256 = excluded.sha256, mode = excluded.mode, mtime_ns = excluded.mtime_ns, seq = excluded.seq, open = excluded.open, \
     position = excluded.position, unread = excluded.unread";

const CHECKPOINT: &str = "INSERT INTO checkpoints (namespace, agent, session, number, name, seq, turn, at, body) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (namespace, agent, session, number, name) DO UPDATE SET \
     seq = excluded.seq, turn = excluded.turn, at = excluded.at, body = excluded.body";

const FORGET: &str = "DELETE FROM checkpoints WHERE namespace = $1 AND agent = $2 AND session = $3 AND name = '' AND number <= $4";

const CLEAR: [&str; 4] = [
    "DELETE FROM files WHERE namespace = $1 AND agent = $2 AND session = $3",
    "DELETE FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3",
    "DELETE FROM texts WHERE namespace = $1 AND agent = $2 AND session = $3",
    "DELETE FROM checkpoints WHERE namespace = $1 AND agent = $2 AND session = $3 AND name = ''",
];

/// Bytes before compression that a record stands for.
fn raw_of(record: &EntryRecord) -> u64 {
    // What a fork begins with is another's.
    if record.header.fork.is_some() {
        return 0;
    }
    record
        .header
        .covers
        .as_ref()
        .map_or_else(|| record.header.body_len(), |covers| covers.raw)
}

/// Bytes that the entries had, of which a record is one or for which it stands.
fn stored_of(record: &EntryRecord) -> u64 {
    record
        .header
        .covers
        .as_ref()
        .map_or(record.stored, |covers| covers.stored)
}

/// Takes in one entry. The caller commits if it answers `New`, and rolls back otherwise.
pub(super) async fn record(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    terms: &IndexOptions,
) -> Result<RecordOutcome, Fault> {
    let header = &record.header;
    if header.seq == 0 || header.follows() >= header.seq {
        let context = format!(
            "record entry {} of {}: it cannot follow entry {}",
            header.seq,
            record.log,
            header.follows()
        );
        return Err(Error::corrupt(context).into());
    }
    let (namespace, agent, id) = log_columns(&record.log);
    let at = stamp(header.at);
    let head = sqlx::query(if record.branch.is_some() {
        BRANCH_SESSION
    } else {
        LOCK
    })
    .bind(namespace)
    .bind(agent)
    .bind(&id)
    .bind(&at)
    .bind(header.writer.as_str());
    let known = match record.branch {
        Some(_) => head.execute(&mut *transaction).await.map(|_| None)?,
        None => Some(Known::read(&head.fetch_one(&mut *transaction).await?)?),
    };
    let added = sqlx::query(ENTRY)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(record.branch.as_ref().map_or("", |branch| branch.as_str()))
        .bind(whole("entry number", header.seq)?)
        .bind(header.kind.word())
        .bind(header.writer.as_str())
        .bind(&at)
        .bind(whole("length", raw_of(record))?)
        .bind(whole("stored length", stored_of(record))?)
        .bind(record.digest.to_string())
        .execute(&mut *transaction)
        .await?;
    if added.rows_affected() == 0 {
        return Ok(RecordOutcome::Already);
    }
    let Some(mut known) = known else {
        return Ok(RecordOutcome::New);
    };
    if known.head != header.follows() && !(header.begins_anew() && known.head < header.seq) {
        return Ok(RecordOutcome::Gap { have: known.head });
    }
    let mut totals = known.totals;
    if header.begins_anew() || header.kind == EntryKind::Snapshot {
        totals = Totals::default();
        (known.raw, known.stored) = (0, 0);
        for sql in CLEAR {
            sqlx::query(sql)
                .bind(namespace)
                .bind(agent)
                .bind(&id)
                .execute(&mut *transaction)
                .await?;
        }
    }
    if header.kind == EntryKind::Purge {
        metadata::forget(transaction, &record.log).await?;
        known.rest = None;
    }
    let mut deleted = false;
    for rename in &header.moves {
        deleted |= apply_move(transaction, record, rename).await?;
    }
    for part in &header.parts {
        match messages::take(transaction, (record, terms), part, &mut totals).await? {
            Taken::Gap => return Ok(RecordOutcome::Gap { have: known.head }),
            Taken::Read(read) => {
                deleted |= read.deleted;
                apply_part(transaction, record, part, &read).await?;
            }
        }
    }
    if deleted {
        totals = messages::count_anew(transaction, record, totals.turns).await?;
    }
    for point in header.points() {
        totals.turns = point.turn;
        add_checkpoint(transaction, (&record.log, terms), "", &point).await?;
    }
    if let Some(newest) = header.points().map(|point| point.number).max() {
        let past = whole("checkpoint", newest.saturating_sub(MOST_CHECKPOINTS as u64))?;
        sqlx::query(FORGET)
            .bind(namespace)
            .bind(agent)
            .bind(&id)
            .bind(past)
            .execute(&mut *transaction)
            .await?;
    }
    update_session(transaction, (record, terms), &at, known, totals).await?;
    Ok(RecordOutcome::New)
}

/// What the session's row says before this entry.
struct Known {
    created: String,
    updated: String,
    head: u64,
    raw: u64,
    stored: u64,
    rest: Option<metadata::ClosedStatus>,
    totals: Totals,
}

impl Known {
    fn read(row: &AnyRow) -> Result<Known, Fault> {
        Ok(Known {
            created: text(row, "created")?,
            updated: text(row, "updated")?,
            head: count(row, "head")?,
            raw: count(row, "raw_bytes")?,
            stored: count(row, "stored_bytes")?,
            rest: metadata::ClosedStatus::read(row)?,
            totals: Totals::read(row)?,
        })
    }
}

async fn update_session(
    transaction: &mut AnyConnection,
    (record, terms): (&EntryRecord, &IndexOptions),
    at: &str,
    known: Known,
    totals: Totals,
) -> Result<(), Fault> {
    let (namespace, agent, id) = log_columns(&record.log);
    let (header, facts) = (&record.header, &record.told.facts);
    let raw = known.raw.saturating_add(raw_of(record));
    let began = header
        .covers
        .as_ref()
        .map_or_else(|| at.to_owned(), |covers| stamp(covers.began));
    let status = if header.kind.is_removal() {
        "removed"
    } else {
        metadata::status(raw, known.rest.as_ref())
    };
    // A head of 0 is a row that only branches made: the log itself says when it began, whichever was seen first. One that begins
    // anew says so again: what comes before it is not always there to be read.
    let first = known.head == 0 || header.begins_anew();
    sqlx::query(SESSION)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(status)
        .bind(if first {
            began.as_str()
        } else {
            known.created.as_str()
        })
        .bind(if first {
            at
        } else {
            at.max(known.updated.as_str())
        })
        .bind(whole("entry number", header.seq)?)
        .bind(header.writer.as_str())
        .bind(whole("length", raw)?)
        .bind(whole(
            "stored length",
            known.stored.saturating_add(stored_of(record)),
        )?)
        .bind(clip_some(facts.project.as_deref(), LONGEST_PROJECT))
        .bind(clip_some(facts.cwd.as_deref(), LONGEST))
        .bind(clip_some(
            facts.title.as_deref().filter(|_| !terms.sealed),
            LONGEST,
        ))
        .bind(clip_some(facts.model.as_deref(), LONGEST))
        .bind(clip_some(facts.agent_version.as_deref(), LONGEST))
        .bind(whole("messages", totals.messages)?)
        .bind(whole("turns", totals.turns)?)
        .bind(whole("tokens", totals.tokens.input)?)
        .bind(whole("tokens", totals.tokens.output)?)
        .bind(whole("tokens", totals.tokens.cache_read)?)
        .bind(whole("tokens", totals.tokens.cache_write)?)
        .bind(whole("cost", totals.cost)?)
        .bind(whole("answers", totals.uncosted)?)
        .bind(whole("lines", totals.unread)?)
        .bind(facts.cost.map(|cost| whole("cost", cost)).transpose()?)
        .execute(transaction)
        .await?;
    Ok(())
}

/// True if a file was replaced by it.
async fn apply_move(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    rename: &FileMove,
) -> Result<bool, Fault> {
    if rename.from == rename.to {
        return Ok(false);
    }
    let (namespace, agent, id) = log_columns(&record.log);
    let from = Digest::of(rename.from.as_str().as_bytes()).to_string();
    let to = Digest::of(rename.to.as_str().as_bytes()).to_string();
    let uncover = sqlx::query(UNCOVER)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(&from)
        .bind(&to);
    let covered = uncover.execute(&mut *transaction).await?.rows_affected() > 0;
    let moved = sqlx::query(RENAME)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(&from)
        .bind(&to)
        .bind(rename.to.as_str());
    if moved.execute(&mut *transaction).await?.rows_affected() > 0 {
        messages::rename(transaction, record, &from, &to).await?;
    }
    Ok(covered)
}

async fn apply_part(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    part: &Part,
    read: &messages::ReadTo,
) -> Result<(), Fault> {
    let (namespace, agent, id) = log_columns(&record.log);
    sqlx::query(FILE)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(Digest::of(part.path.as_str().as_bytes()).to_string())
        .bind(part.path.as_str())
        .bind(file_kind(part.kind))
        .bind(whole("length", part.end())?)
        .bind(part.file_sha256.to_string())
        .bind(i64::from(part.mode))
        .bind(part.mtime_ns)
        .bind(whole(
            "entry number",
            part.seq.unwrap_or(record.header.seq),
        )?)
        .bind(whole("length", read.open)?)
        .bind(read.position)
        .bind(whole("lines", read.unread)?)
        .execute(transaction)
        .await?;
    Ok(())
}

/// The named checkpoints of a log, instead of those there are.
pub(super) async fn name_points(
    transaction: &mut AnyConnection,
    (log, terms): (&LogId, &IndexOptions),
    named: &[(String, Checkpoint)],
) -> Result<(), Fault> {
    const CLEAR: &str = "DELETE FROM checkpoints WHERE namespace = $1 AND agent = $2 AND session = $3 AND name <> ''";
    let (namespace, agent, id) = log_columns(log);
    sqlx::query(CLEAR)
        .bind(namespace)
        .bind(agent)
        .bind(id)
        .execute(&mut *transaction)
        .await?;
    for (name, point) in named {
        add_checkpoint(transaction, (log, terms), name, point).await?;
    }
    Ok(())
}

async fn add_checkpoint(
    transaction: &mut AnyConnection,
    (log, terms): (&LogId, &IndexOptions),
    name: &str,
    point: &Checkpoint,
) -> Result<(), Fault> {
    let (namespace, agent, id) = log_columns(log);
    let body = if terms.sealed {
        rows::json(&point.without_text())?
    } else {
        rows::json(point)?
    };
    sqlx::query(CHECKPOINT)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(whole("checkpoint", point.number)?)
        .bind(clip(name, LONGEST_PROJECT))
        .bind(whole("entry number", point.seq.unwrap_or(0))?)
        .bind(whole("turn", point.turn)?)
        .bind(stamp(point.at))
        .bind(body)
        .execute(transaction)
        .await?;
    Ok(())
}
