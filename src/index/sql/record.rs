//! Recording entries in one transaction.
//!
//! Reads what the index knows of the logs, applies the entries to it in memory, and writes the
//! changed rows: a fixed number of statements, however many entries and logs there are. Entries that
//! delete or rename rows are applied one by one. Owns the rows that an entry changes, except messages
//! (`messages`) and the session's own (`session_state`). Does not own the connection or retries.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use sqlx::AnyConnection;

use super::bulk::{Bulk, Column, number, replace_on_conflict};
use super::error::SqlError;
use super::messages::{self, FileState, Known, NewMessages, ParseState, path_sha256};
use super::rows::{
    self, MAX_KEY_LEN, file_kind_column, format_time, log_columns, to_bigint, truncate,
};
use super::session_state::{self, SessionState};
use super::{IndexOptions, metadata};
use crate::error::{Error, Result};
use crate::index::{EntryRecord, RecordOutcome};
use crate::model::{
    Checkpoint, CheckpointRetention, Digest, EntryKind, FileMove, LogId, Part, UploadPart,
};

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

const ENTRY_COLUMNS: [Column; 11] = [
    Column::Text("namespace"),
    Column::Text("agent"),
    Column::Text("session"),
    Column::Text("branch"),
    Column::Number("seq"),
    Column::Text("kind"),
    Column::Text("writer"),
    Column::Text("at"),
    Column::Number("raw_bytes"),
    Column::Number("stored_bytes"),
    Column::Text("digest"),
];

const SELECT_ENTRY: &str = "SELECT seq FROM entries \
     WHERE namespace = $1 AND agent = $2 AND session = $3 AND branch = $4 AND seq = $5";

/// The columns of a file; the first four are the key.
const FILE_COLUMNS: [Column; 14] = [
    Column::Text("namespace"),
    Column::Text("agent"),
    Column::Text("session"),
    Column::Text("path_sha256"),
    Column::Text("path"),
    Column::Text("kind"),
    Column::Number("len"),
    Column::Text("sha256"),
    Column::Number("mode"),
    Column::Number("mtime_ns"),
    Column::Number("seq"),
    Column::Number("partial_line_bytes"),
    Column::Number("position"),
    Column::Number("unparsed_lines"),
];

/// The columns of a checkpoint; the first five are the key.
const CHECKPOINT_COLUMNS: [Column; 12] = [
    Column::Text("namespace"),
    Column::Text("agent"),
    Column::Text("session"),
    Column::Number("number"),
    Column::Text("name"),
    Column::Number("seq"),
    Column::Number("turn"),
    Column::Number("step"),
    Column::Number("parent"),
    Column::Text("status"),
    Column::Text("at"),
    Column::Text("detail"),
];

/// Deletes the file at the destination of a move, if the source exists.
const DELETE_MOVE_TARGET: &str = "DELETE FROM files WHERE namespace = $1 AND agent = $2 AND session = $3 AND path_sha256 = $5 AND EXISTS \
     (SELECT 1 FROM files AS old WHERE old.namespace = $1 AND old.agent = $2 AND old.session = $3 AND old.path_sha256 = $4)";

const RENAME_FILE: &str = "UPDATE files SET path_sha256 = $5, path = $6 \
     WHERE namespace = $1 AND agent = $2 AND session = $3 AND path_sha256 = $4";

/// Deletes the oldest ends of turns beyond the maximum.
const DELETE_OLD_TURNS: &str = "DELETE FROM checkpoints WHERE namespace = $1 AND agent = $2 AND session = $3 AND name = '' AND step = 0 \
     AND number < (SELECT MIN(number) FROM (SELECT number FROM checkpoints WHERE namespace = $1 AND agent = $2 AND session = $3 \
     AND name = '' AND step = 0 ORDER BY number DESC LIMIT $4) AS newest)";

/// Deletes the steps that are thinned out: `CheckpointRetention::apply` in SQL.
const DELETE_OLD_STEPS: &str = "DELETE FROM checkpoints WHERE namespace = $1 AND agent = $2 AND session = $3 AND name = '' AND step > 0 \
     AND parent > 0 AND parent = number - 1 AND number <= $4 - $5 * (number & -number)";

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

/// Records entries; those of one log are in order. The caller commits if no outcome is a gap, and
/// rolls back otherwise.
pub(super) async fn record(
    connection: &mut AnyConnection,
    records: &[EntryRecord],
    options: &IndexOptions,
) -> Result<Vec<RecordOutcome>, SqlError> {
    records.iter().try_for_each(check_header)?;
    let mut recorder = Recorder {
        messages: NewMessages::new(connection),
        connection,
        records,
        options,
        logs: BTreeMap::new(),
        entries: Bulk::new(&ENTRY_COLUMNS),
        files: BTreeMap::new(),
        checkpoints: BTreeMap::new(),
        kept_checkpoints: BTreeMap::new(),
    };
    recorder.load().await?;
    let mut outcomes = Vec::with_capacity(records.len());
    for record in records {
        let outcome = match record.branch.is_some() {
            true => recorder.record_on_branch(record).await?,
            false => recorder.record(record).await?,
        };
        outcomes.push(outcome);
    }
    recorder.write().await?;
    Ok(outcomes)
}

fn check_header(record: &EntryRecord) -> Result<()> {
    let header = &record.header;
    if header.seq == 0 || header.predecessor() >= header.seq {
        let statement = format!(
            "invalid header of entry {} of {}: an entry cannot follow entry {}",
            header.seq,
            record.log,
            header.predecessor()
        );
        return Err(Error::corrupt(statement));
    }
    Ok(())
}

/// The state of a log in memory.
#[derive(Default)]
struct LogRows {
    session: SessionState,
    known: Known,
}

/// Applies entries, and collects the rows to write.
struct Recorder<'a> {
    connection: &'a mut AnyConnection,
    records: &'a [EntryRecord],
    options: &'a IndexOptions,
    logs: BTreeMap<LogId, LogRows>,
    entries: Bulk,
    messages: NewMessages,
    /// By log and SHA-256 of the path. A later entry replaces the row of an earlier one.
    files: BTreeMap<(LogId, String), Vec<Value>>,
    /// By log and number.
    checkpoints: BTreeMap<(LogId, u64), Vec<Value>>,
    /// The number of the newest checkpoint, and which ones to keep, by log.
    kept_checkpoints: BTreeMap<LogId, (u64, CheckpointRetention)>,
}

impl Recorder<'_> {
    /// Reads and locks the logs of the records.
    async fn load(&mut self) -> Result<(), SqlError> {
        let main = self.records.iter();
        let main: Vec<&EntryRecord> = main.filter(|record| record.branch.is_none()).collect();
        let logs: BTreeSet<&LogId> = main.iter().map(|record| &record.log).collect();
        let mut sessions = session_state::lock(self.connection, logs.into_iter()).await?;
        for (log, known) in messages::load(self.connection, &main, self.options).await? {
            let session = sessions.remove(&log).unwrap_or_default();
            self.logs.insert(log, LogRows { session, known });
        }
        Ok(())
    }

    /// Reads again what the index knows of a log, after rows were deleted or renamed.
    async fn reload(&mut self, record: &EntryRecord, rows: &mut LogRows) -> Result<(), SqlError> {
        let is_next = |other: &&EntryRecord| {
            other.branch.is_none()
                && other.log == record.log
                && other.header.seq >= record.header.seq
        };
        let next: Vec<&EntryRecord> = self.records.iter().filter(is_next).collect();
        let mut known = messages::load(self.connection, &next, self.options).await?;
        rows.known = known.remove(&record.log).unwrap_or_default();
        Ok(())
    }

    /// Writes the collected rows.
    async fn write(&mut self) -> Result<(), SqlError> {
        // The entries come first: of two processes that record the same new log, one fails here.
        self.entries
            .insert_into(self.connection, "entries", "")
            .await?;
        self.messages.write(self.connection).await?;
        let mut files = Bulk::new(&FILE_COLUMNS);
        for row in std::mem::take(&mut self.files).into_values() {
            files.push(row);
        }
        let replace = replace_on_conflict(&FILE_COLUMNS, 4);
        files
            .insert_into(self.connection, "files", &replace)
            .await?;
        let mut checkpoints = Bulk::new(&CHECKPOINT_COLUMNS);
        for row in std::mem::take(&mut self.checkpoints).into_values() {
            checkpoints.push(row);
        }
        insert_checkpoints(self.connection, &mut checkpoints).await?;
        for (log, (last, keep)) in std::mem::take(&mut self.kept_checkpoints) {
            let (namespace, agent, id) = log_columns(&log);
            sqlx::query(DELETE_OLD_TURNS)
                .bind(namespace)
                .bind(agent)
                .bind(id.clone())
                .bind(to_bigint("number of turns", keep.turns)?)
                .execute(&mut *self.connection)
                .await?;
            sqlx::query(DELETE_OLD_STEPS)
                .bind(namespace)
                .bind(agent)
                .bind(id)
                .bind(to_bigint("checkpoint", last)?)
                .bind(to_bigint("number of steps", keep.steps)?)
                .execute(&mut *self.connection)
                .await?;
        }
        let sessions = self.logs.iter_mut();
        let sessions = sessions.map(|(log, rows)| (log, &mut rows.session));
        session_state::write(self.connection, sessions).await
    }

    /// Records an entry of a branch, which changes no other rows than its own and, if there is no
    /// main log, the session's.
    async fn record_on_branch(&mut self, record: &EntryRecord) -> Result<RecordOutcome, SqlError> {
        // The main log determines the session's row, whichever comes first.
        self.write().await?;
        let (namespace, agent, id) = log_columns(&record.log);
        sqlx::query(UPSERT_BRANCH_SESSION)
            .bind(namespace)
            .bind(agent)
            .bind(id)
            .bind(format_time(record.header.at))
            .bind(record.header.writer.as_str())
            .execute(&mut *self.connection)
            .await?;
        if self.has_entry(record).await? {
            return Ok(RecordOutcome::AlreadyRecorded);
        }
        self.entries.push(entry_row(record)?);
        self.write().await?;
        // The branch may have created the row of a session that a later record continues.
        if let Some(rows) = self.logs.get_mut(&record.log) {
            let locked = session_state::lock(self.connection, [&record.log].into_iter()).await?;
            rows.session = locked.into_values().next().unwrap_or_default();
        }
        Ok(RecordOutcome::Recorded)
    }

    async fn has_entry(&mut self, record: &EntryRecord) -> Result<bool, SqlError> {
        let (namespace, agent, id) = log_columns(&record.log);
        let found = sqlx::query(SELECT_ENTRY)
            .bind(namespace)
            .bind(agent)
            .bind(id)
            .bind(record.branch.as_ref().map_or("", |branch| branch.as_str()))
            .bind(to_bigint("sequence number", record.header.seq)?)
            .fetch_optional(&mut *self.connection)
            .await?;
        Ok(found.is_some())
    }

    /// Records an entry of a main log.
    async fn record(&mut self, record: &EntryRecord) -> Result<RecordOutcome, SqlError> {
        let header = &record.header;
        let mut rows = self.logs.remove(&record.log).unwrap_or_default();
        let head = rows.session.head;
        let outcome = if header.seq <= head {
            self.write().await?;
            match self.has_entry(record).await? {
                true => RecordOutcome::AlreadyRecorded,
                false => RecordOutcome::Gap { head },
            }
        } else if head != header.predecessor() && !header.resets_log() {
            RecordOutcome::Gap { head }
        } else {
            match self.apply(record, &mut rows).await? {
                true => RecordOutcome::Recorded,
                false => RecordOutcome::Gap { head },
            }
        };
        self.logs.insert(record.log.clone(), rows);
        Ok(outcome)
    }

    /// Applies the next entry of a log. Returns false if a part starts within a line whose first
    /// bytes are not indexed.
    async fn apply(&mut self, record: &EntryRecord, rows: &mut LogRows) -> Result<bool, SqlError> {
        let header = &record.header;
        self.entries.push(entry_row(record)?);
        let mut has_deletions = self.reset(record, rows).await?;
        // A file changes with the last part of its upload.
        let is_visible = |part: &&Part| part.upload != Some(UploadPart::More);
        for part in header.parts.iter().filter(is_visible) {
            match self.apply_part(record, part, rows).await? {
                Some(has_deleted) => has_deletions |= has_deleted,
                None => return Ok(false),
            }
        }
        if has_deletions {
            self.write_rows_of(record, rows).await?;
            let turns = rows.session.totals.turns;
            rows.session.totals = messages::recount(self.connection, record, turns).await?;
        }
        if let Some(last) = header.all_checkpoints().last() {
            rows.session.totals.turns = last.complete_turns();
        }
        self.add_checkpoints(record)?;
        let added = (raw_bytes_of(record), stored_bytes_of(record));
        rows.session.apply((record, self.options), added);
        Ok(true)
    }

    /// Applies what an entry deletes and renames before its parts. Returns whether the totals must
    /// be counted again.
    async fn reset(&mut self, record: &EntryRecord, rows: &mut LogRows) -> Result<bool, SqlError> {
        let header = &record.header;
        if header.resets_log() || header.kind == EntryKind::Snapshot {
            self.write_rows_of(record, rows).await?;
            delete_content(self.connection, record).await?;
            rows.known = Known::default();
            let session = &mut rows.session;
            session.totals = Default::default();
            (session.raw_bytes, session.stored_bytes) = (0, 0);
        }
        if header.kind == EntryKind::Purge {
            metadata::clear(self.connection, &record.log).await?;
            rows.session.clear();
        }
        let mut has_deletions = false;
        for (at, rename) in header.moves.iter().enumerate() {
            if at == 0 {
                self.write_rows_of(record, rows).await?;
            }
            has_deletions |= apply_move(self.connection, record, rename).await?;
        }
        if !header.moves.is_empty() {
            self.reload(record, rows).await?;
        }
        Ok(has_deletions)
    }

    /// Writes all rows, including those of the log that is being changed.
    async fn write_rows_of(
        &mut self,
        record: &EntryRecord,
        rows: &mut LogRows,
    ) -> Result<(), SqlError> {
        self.write().await?;
        let session = [(&record.log, &mut rows.session)];
        session_state::write(self.connection, session.into_iter()).await
    }

    /// Applies a part of an entry. Returns whether the totals must be counted again, or none if the
    /// part starts within a line whose first bytes are not indexed.
    async fn apply_part(
        &mut self,
        record: &EntryRecord,
        part: &Part,
        rows: &mut LogRows,
    ) -> Result<Option<bool>, SqlError> {
        let file = path_sha256(&part.path);
        let mut has_deleted = false;
        if let Some(span) = record.transcripts.spans.get(&part.path) {
            let FileState { len, parse } = rows.known.files.get(&file).copied().unwrap_or_default();
            let line_start = len - parse.partial_line_bytes.min(len);
            if part.start == len && part.start > 0 && span.start != line_start {
                return Ok(None);
            }
            if part.start < len {
                self.write_rows_of(record, rows).await?;
                let parse =
                    messages::delete_from(self.connection, record, &file, span.start).await?;
                self.reload(record, rows).await?;
                let state = FileState { len, parse };
                rows.known.files.insert(file.clone(), state);
                has_deleted = true;
            }
        }
        let LogRows { session, known } = rows;
        let record_options = (record, self.options);
        let totals = &mut session.totals;
        let added = self
            .messages
            .add_part(self.connection, record_options, part, known, totals);
        let parse = added.await?;
        let len = part.end();
        known.files.insert(file.clone(), FileState { len, parse });
        let row = file_row(record, (&file, part), &parse)?;
        self.files.insert((record.log.clone(), file), row);
        Ok(Some(has_deleted))
    }

    /// Adds the checkpoints of an entry, and deletes those that are no longer kept.
    fn add_checkpoints(&mut self, record: &EntryRecord) -> Result<()> {
        for point in record.header.all_checkpoints() {
            let row = checkpoint_row((&record.log, self.options), "", &point)?;
            let key = (record.log.clone(), point.number);
            self.checkpoints.insert(key, row);
            let keep = record.header.retention();
            let kept = self
                .kept_checkpoints
                .entry(record.log.clone())
                .or_insert((0, keep));
            *kept = (point.number.max(kept.0), keep);
        }
        Ok(())
    }
}

fn entry_row(record: &EntryRecord) -> Result<Vec<Value>> {
    let (namespace, agent, id) = log_columns(&record.log);
    let header = &record.header;
    Ok(vec![
        namespace.into(),
        agent.into(),
        id.into(),
        record
            .branch
            .as_ref()
            .map_or("", |branch| branch.as_str())
            .into(),
        number("sequence number", header.seq)?,
        header.kind.as_str().into(),
        header.writer.as_str().into(),
        format_time(header.at).into(),
        number("length", raw_bytes_of(record))?,
        number("stored length", stored_bytes_of(record))?,
        record.digest.to_string().into(),
    ])
}

fn file_row(
    record: &EntryRecord,
    (path_sha256, part): (&str, &Part),
    state: &ParseState,
) -> Result<Vec<Value>> {
    let (namespace, agent, id) = log_columns(&record.log);
    Ok(vec![
        namespace.into(),
        agent.into(),
        id.into(),
        path_sha256.into(),
        part.path.as_str().into(),
        file_kind_column(part.kind).into(),
        number("length", part.end())?,
        part.file_sha256.to_string().into(),
        part.mode.into(),
        part.mtime_ns.into(),
        number("sequence number", part.seq.unwrap_or(record.header.seq))?,
        number("length", state.partial_line_bytes)?,
        state.position.into(),
        number("lines", state.unparsed_lines)?,
    ])
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
    let mut rows = BTreeMap::new();
    for (name, point) in named {
        let name = truncate(name, MAX_KEY_LEN);
        let row = checkpoint_row((log, options), &name, point)?;
        rows.insert((point.number, name), row);
    }
    let mut checkpoints = Bulk::new(&CHECKPOINT_COLUMNS);
    rows.into_values().for_each(|row| checkpoints.push(row));
    insert_checkpoints(transaction, &mut checkpoints).await
}

async fn insert_checkpoints(
    connection: &mut AnyConnection,
    checkpoints: &mut Bulk,
) -> Result<(), SqlError> {
    let replace = replace_on_conflict(&CHECKPOINT_COLUMNS, 5);
    let insert = checkpoints.insert_into(connection, "checkpoints", &replace);
    insert.await
}

fn checkpoint_row(
    (log, options): (&LogId, &IndexOptions),
    name: &str,
    point: &Checkpoint,
) -> Result<Vec<Value>> {
    let (namespace, agent, id) = log_columns(log);
    let detail = if options.omit_text {
        rows::to_json(&point.without_text())?
    } else {
        rows::to_json(point)?
    };
    Ok(vec![
        namespace.into(),
        agent.into(),
        id.into(),
        number("checkpoint", point.number)?,
        name.into(),
        number("sequence number", point.seq.unwrap_or(0))?,
        number("turn", point.turn)?,
        number("step", point.step.unwrap_or(0))?,
        number("parent", point.parent.unwrap_or(0))?,
        point.status.as_str().into(),
        format_time(point.at).into(),
        detail.into(),
    ])
}
