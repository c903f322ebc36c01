//! What the parts of an entry say becomes rows.
//!
//! Owns the order of a conversation and what is counted. The rows are what the files at the head say, however they came to
//! be there: cut into entries, merged, or read all at once.

use std::collections::BTreeMap;

use sqlx::any::AnyRow;
use sqlx::{Any, AnyConnection, AssertSqlSafe, Row};

use super::IndexOptions;
use super::failure::Fault;
use super::rows::{
    LONGEST_PROJECT, clip, clip_some, count, log_columns, stamp, text, tokens, whole,
};
use super::texts;
use crate::config::Prices;
use crate::error::Result;
use crate::index::EntryRecord;
use crate::model::{Digest, LocatedMessage, Message, Part, Tokens};

/// Rows in one statement: SQLite takes 32766 values, PostgreSQL 65535.
const ROWS: usize = 200;

const COLUMNS: &str = "namespace, agent, session, position, file, start, len, uuid, parent, role, kind, at, model, answer, \
     input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, cost, sub_agent";

const KNOWN: &str = "SELECT len, open, position, unread FROM files \
     WHERE namespace = $1 AND agent = $2 AND session = $3 AND path_sha256 = $4";

const CUT: [&str; 2] = [
    "DELETE FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $4 AND start >= $5",
    "DELETE FROM texts WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $4 AND start >= $5",
];

const CORRECT: &str = "UPDATE messages SET input_tokens = $5, output_tokens = $6, cache_read_tokens = $7, cache_write_tokens = $8, \
     cost = $9 WHERE namespace = $1 AND agent = $2 AND session = $3 AND answer = $4 AND input_tokens IS NOT NULL";

const LAST: &str = "SELECT position FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $4 \
     ORDER BY start DESC LIMIT 1";

const RENAME: [&str; 4] = [
    "DELETE FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $5 AND $4 <> ''",
    "DELETE FROM texts WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $5 AND $4 <> ''",
    "UPDATE messages SET file = $5 WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $4",
    "UPDATE texts SET file = $5 WHERE namespace = $1 AND agent = $2 AND session = $3 AND file = $4",
];

const COUNT: &str = "SELECT COUNT(*) AS messages, CAST(COALESCE(SUM(input_tokens), 0) AS BIGINT) AS input_tokens, \
     CAST(COALESCE(SUM(output_tokens), 0) AS BIGINT) AS output_tokens, \
     CAST(COALESCE(SUM(cache_read_tokens), 0) AS BIGINT) AS cache_read_tokens, \
     CAST(COALESCE(SUM(cache_write_tokens), 0) AS BIGINT) AS cache_write_tokens, \
     CAST(COALESCE(SUM(cost), 0) AS BIGINT) AS cost, \
     CAST(COALESCE(SUM(CASE WHEN input_tokens IS NOT NULL AND cost IS NULL THEN 1 ELSE 0 END), 0) AS BIGINT) AS uncosted, \
     CAST((SELECT COALESCE(SUM(unread), 0) FROM files WHERE namespace = $1 AND agent = $2 AND session = $3) AS BIGINT) AS unread, \
     CAST(0 AS BIGINT) AS turns FROM messages WHERE namespace = $1 AND agent = $2 AND session = $3";

/// What a session amounts to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub messages: u64,
    pub turns: u64,
    pub tokens: Tokens,
    pub cost: u64,
    pub uncosted: u64,
    pub unread: u64,
}

impl Totals {
    pub(super) fn read(row: &AnyRow) -> Result<Totals, Fault> {
        Ok(Totals {
            messages: count(row, "messages")?,
            turns: count(row, "turns")?,
            tokens: tokens(row)?,
            cost: count(row, "cost")?,
            uncosted: count(row, "uncosted")?,
            unread: count(row, "unread")?,
        })
    }
}

/// How far a file is read.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReadTo {
    pub open: u64,
    pub position: i64,
    pub unread: u64,
    /// Rows went.
    pub deleted: bool,
}

pub(super) enum Taken {
    Read(ReadTo),
    /// It begins within a line whose beginning the reader did not know.
    Gap,
}

/// Takes in what one part says.
pub(super) async fn take(
    transaction: &mut AnyConnection,
    (record, terms): (&EntryRecord, &IndexOptions),
    part: &Part,
    totals: &mut Totals,
) -> Result<Taken, Fault> {
    let Some(span) = record.told.read.get(&part.path) else {
        return Ok(Taken::Read(ReadTo::default()));
    };
    let (namespace, agent, id) = log_columns(&record.log);
    let file = Digest::of(part.path.as_str().as_bytes()).to_string();
    let known = sqlx::query(KNOWN)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .bind(&file)
        .fetch_optional(&mut *transaction)
        .await?;
    let (len, mut read) = match &known {
        None => (0, ReadTo::default()),
        Some(row) => {
            let read = ReadTo {
                open: count(row, "open")?,
                position: row.try_get("position")?,
                unread: count(row, "unread")?,
                deleted: false,
            };
            (count(row, "len")?, read)
        }
    };
    if part.start == len && part.start > 0 && span.from != len - read.open.min(len) {
        return Ok(Taken::Gap);
    }
    if part.start < len {
        for sql in CUT {
            let cut = sqlx::query(sql)
                .bind(namespace)
                .bind(agent)
                .bind(&id)
                .bind(&file)
                .bind(whole("length", span.from)?);
            cut.execute(&mut *transaction).await?;
        }
        let last = sqlx::query(LAST)
            .bind(namespace)
            .bind(agent)
            .bind(&id)
            .bind(&file)
            .fetch_optional(&mut *transaction)
            .await?;
        read = ReadTo {
            position: last.map_or(Ok(0), |row| row.try_get("position"))?,
            deleted: true,
            unread: 0,
            open: 0,
        };
    }
    let said: Vec<&LocatedMessage> = record
        .told
        .said
        .iter()
        .filter(|said| said.path == part.path)
        .collect();
    for some in said.chunks(ROWS) {
        insert(transaction, (record, terms), &file, some, &mut read, totals).await?;
        if terms.text {
            texts::insert(transaction, record, &file, some).await?;
        }
    }
    let unread = record.told.unread.get(&part.path).copied().unwrap_or(0);
    read.unread += unread;
    totals.unread += unread;
    read.open = span.open;
    Ok(Taken::Read(read))
}

/// What an answer took, and what that cost if it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Took {
    tokens: Tokens,
    cost: Option<u64>,
}

impl Took {
    fn of(message: &Message, prices: &Prices) -> Option<Took> {
        let tokens = message.tokens?;
        Some(Took {
            tokens,
            cost: message
                .cost
                .or_else(|| prices.cost(message.model.as_deref()?, tokens)),
        })
    }

    fn count(self, totals: &mut Totals) {
        totals.tokens = totals.tokens.and(self.tokens);
        totals.cost = totals.cost.saturating_add(self.cost.unwrap_or(0));
        totals.uncosted += u64::from(self.cost.is_none());
    }

    fn uncount(self, totals: &mut Totals) {
        totals.tokens = totals.tokens.without(self.tokens);
        totals.cost = totals.cost.saturating_sub(self.cost.unwrap_or(0));
        totals.uncosted = totals
            .uncosted
            .saturating_sub(u64::from(self.cost.is_none()));
    }

    /// As columns.
    fn numbers(self) -> Result<[Option<i64>; 5]> {
        let Tokens {
            input,
            output,
            cache_read,
            cache_write,
        } = self.tokens;
        let number = |number: u64| whole("tokens", number).map(Some);
        Ok([
            number(input)?,
            number(output)?,
            number(cache_read)?,
            number(cache_write)?,
            self.cost.map(|cost| whole("cost", cost)).transpose()?,
        ])
    }
}

async fn insert(
    transaction: &mut AnyConnection,
    (record, terms): (&EntryRecord, &IndexOptions),
    file: &str,
    said: &[&LocatedMessage],
    read: &mut ReadTo,
    totals: &mut Totals,
) -> Result<(), Fault> {
    let (namespace, agent, id) = log_columns(&record.log);
    // What an answer took is told with each of its pieces; the last one that is complete is right, and it counts once.
    let mut took: BTreeMap<String, (Took, bool)> = BTreeMap::new();
    for message in said.iter().map(|said| &said.message) {
        let (Some(answer), Some(now)) = (
            clip_some(message.answer.as_deref(), LONGEST_PROJECT),
            Took::of(message, &terms.prices),
        ) else {
            continue;
        };
        let known = took.entry(answer).or_insert((now, message.complete));
        if message.complete {
            *known = (now, true);
        }
    }
    for (answer, before) in counted(transaction, record, &took).await? {
        if let Some((now, true)) = took.remove(&answer)
            && now != before
        {
            before.uncount(totals);
            now.count(totals);
            let mut correct = sqlx::query(CORRECT)
                .bind(namespace)
                .bind(agent)
                .bind(&id)
                .bind(answer);
            for number in now.numbers()? {
                correct = correct.bind(number);
            }
            correct.execute(&mut *transaction).await?;
        }
    }
    let width = COLUMNS.split(',').count();
    let row = |row: usize| {
        let values: Vec<String> = (1..=width)
            .map(|column| format!("${}", row * width + column))
            .collect();
        format!("({})", values.join(", "))
    };
    let rows: Vec<String> = (0..said.len()).map(row).collect();
    let sql = format!(
        "INSERT INTO messages ({COLUMNS}) VALUES {}",
        rows.join(", ")
    );
    let mut query = sqlx::query::<Any>(AssertSqlSafe(sql)).persistent(false);
    for said in said {
        let message = &said.message;
        read.position = message
            .at
            .map_or(0, jiff::Timestamp::as_microsecond)
            .max(read.position.saturating_add(1));
        totals.messages += 1;
        let answer = clip_some(message.answer.as_deref(), LONGEST_PROJECT);
        let counts = match &answer {
            Some(answer) => took.remove(answer).map(|(took, _)| took),
            None => Took::of(message, &terms.prices),
        };
        if let Some(took) = counts {
            took.count(totals);
        }
        query = query
            .bind(namespace)
            .bind(agent)
            .bind(id.clone())
            .bind(read.position)
            .bind(file)
            .bind(whole("offset", said.start)?)
            .bind(whole("length", said.len)?)
            .bind(clip_some(message.uuid.as_deref(), LONGEST_PROJECT))
            .bind(clip_some(message.parent.as_deref(), LONGEST_PROJECT))
            .bind(message.role.word())
            .bind(clip(&message.kind, LONGEST_PROJECT))
            .bind(message.at.map(stamp))
            .bind(clip_some(message.model.as_deref(), LONGEST_PROJECT))
            .bind(answer);
        for number in counts.map_or(Ok([None; 5]), Took::numbers)? {
            query = query.bind(number);
        }
        query = query.bind(clip_some(message.sub_agent.as_deref(), LONGEST_PROJECT));
    }
    query.execute(transaction).await?;
    Ok(())
}

/// Which of these answers are counted in a row already, and as what.
async fn counted(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    answers: &BTreeMap<String, (Took, bool)>,
) -> Result<Vec<(String, Took)>, Fault> {
    if answers.is_empty() {
        return Ok(Vec::new());
    }
    let (namespace, agent, id) = log_columns(&record.log);
    let places: Vec<String> = (0..answers.len())
        .map(|at| format!("${}", at + 4))
        .collect();
    let sql = format!(
        "SELECT answer, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, cost FROM messages \
         WHERE namespace = $1 AND agent = $2 AND session = $3 AND input_tokens IS NOT NULL AND answer IN ({})",
        places.join(", ")
    );
    let mut query = sqlx::query::<Any>(AssertSqlSafe(sql))
        .persistent(false)
        .bind(namespace)
        .bind(agent)
        .bind(id);
    for answer in answers.keys() {
        query = query.bind(answer.clone());
    }
    let read = |row: &AnyRow| {
        let cost: Option<i64> = row.try_get("cost")?;
        Ok((
            text(row, "answer")?,
            Took {
                tokens: tokens(row)?,
                cost: cost.and_then(|cost| u64::try_from(cost).ok()),
            },
        ))
    };
    query
        .fetch_all(transaction)
        .await?
        .iter()
        .map(read)
        .collect()
}

/// A file got another path.
pub(super) async fn rename(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    from: &str,
    to: &str,
) -> Result<(), Fault> {
    let (namespace, agent, id) = log_columns(&record.log);
    for sql in RENAME {
        sqlx::query(sql)
            .bind(namespace)
            .bind(agent)
            .bind(&id)
            .bind(from)
            .bind(to)
            .execute(&mut *transaction)
            .await?;
    }
    Ok(())
}

/// Counts all that is there: after rows went.
pub(super) async fn count_anew(
    transaction: &mut AnyConnection,
    record: &EntryRecord,
    turns: u64,
) -> Result<Totals, Fault> {
    let (namespace, agent, id) = log_columns(&record.log);
    let row = sqlx::query(COUNT)
        .bind(namespace)
        .bind(agent)
        .bind(&id)
        .fetch_one(transaction)
        .await?;
    Ok(Totals {
        turns,
        ..Totals::read(&row)?
    })
}
