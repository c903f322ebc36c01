//! OpenCode's SQLite database.
//!
//! Owns the queries. Reads through a connection that cannot write; writes only after a restore
//! (`write`).

mod write;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::TryStreamExt;
use sqlx::sqlite::{SqliteConnectOptions, SqliteRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row, SqliteConnection};

use super::database::{
    DatabaseSnapshot, DatabaseStamp, LastChange, MirrorRow, SessionDatabase, SessionInfo,
};
use super::lines::SessionRows;
use super::tables::{MIGRATIONS, PROJECT, PROJECT_INDEX, TABLES, is_stored};
use crate::error::{Error, Result};
use crate::sys::acting::poll_as;
use crate::sys::{BlockedPath, Clock, Directory, Disk, OpenFile, SystemClock};

/// Maximum time to wait for another connection; OpenCode's transactions take milliseconds.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);

/// A database without a write-ahead log that has not changed for this long will not get one.
const CREATION_PERIOD: Duration = Duration::from_secs(10);

/// The common table expression of a session, ?1, and the sessions of its sub-agents.
const FAMILY: &str = "WITH RECURSIVE family(id) AS (SELECT ?1 UNION SELECT session.id FROM session JOIN family ON session.parent_id = family.id) ";

/// The name of the database in OpenCode's directory.
const FILE: &str = "opencode.db";

/// The files that SQLite opens besides the database.
const COMPANIONS: [&str; 3] = ["opencode.db-wal", "opencode.db-shm", "opencode.db-journal"];

/// OpenCode's database.
pub struct SqliteDatabase {
    directory: Disk,
}

impl SqliteDatabase {
    /// The database in OpenCode's directory, which need not exist.
    pub fn new(directory: Disk) -> SqliteDatabase {
        SqliteDatabase { directory }
    }

    fn options(&self) -> SqliteConnectOptions {
        SqliteConnectOptions::new()
            .filename(self.directory.resolved_root().join(FILE))
            .foreign_keys(false)
            .busy_timeout(BUSY_TIMEOUT)
            .disable_statement_logging()
    }

    /// Connects, with the rights of the directory's owner if sessiond acts as it.
    ///
    /// SQLite opens files by path and follows links. The files are therefore checked before and
    /// after. The agent can still exchange one for a link in between; then SQLite opens the target
    /// with these rights, and the second check fails.
    async fn connect(&self, options: SqliteConnectOptions) -> io::Result<SqliteConnection> {
        self.check_files()?;
        let connect = options.connect();
        let connected = poll_as(self.directory.acting_user(), connect).await?;
        let connection = connected.map_err(io::Error::other)?;
        self.check_files()?;
        Ok(connection)
    }

    /// Checks that no link is in the place of the database or the files next to it.
    fn check_files(&self) -> io::Result<()> {
        for name in std::iter::once(FILE).chain(COMPANIONS) {
            let path = name.parse().map_err(io::Error::other)?;
            match self.directory.open_path(Some(&path)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                opened => {
                    if !opened?.metadata()?.is_file() {
                        let path = self.directory.root().join(name);
                        return Err(BlockedPath::not_a_file(path));
                    }
                }
            }
        }
        Ok(())
    }

    fn open_file(&self, name: &str) -> io::Result<Option<Box<dyn OpenFile>>> {
        self.directory
            .open(&name.parse().map_err(io::Error::other)?)
    }
}

#[async_trait]
impl SessionDatabase for SqliteDatabase {
    fn name(&self) -> String {
        self.directory.root().join(FILE).display().to_string()
    }

    fn stamp(&self) -> Option<DatabaseStamp> {
        let stamp = |name: &str| {
            let stat = self.directory.stat(&name.parse().ok()?).ok()??;
            Some((stat.size, stat.mtime_ns))
        };
        let stamps = [stamp(FILE), stamp(COMPANIONS[0])];
        // A link in the place of the database is an error of the query, not a missing database.
        (stamps[0].is_some() || self.check_files().is_err()).then_some(DatabaseStamp(stamps))
    }

    /// OpenCode switches a new database to a write-ahead log, which fails while another connection
    /// reads. With a write-ahead log, readers and writers never wait for each other.
    fn is_being_created(&self) -> bool {
        let check = || -> io::Result<bool> {
            let Some(file) = self.open_file(FILE)? else {
                return Ok(false);
            };
            let stat = file.stat()?;
            let mut header = [0; 20];
            // A file that is not a database is an error of the query.
            let has_no_wal = stat.size == 0
                || file.read_at(&mut header, 0)? == header.len()
                    && header.starts_with(b"SQLite format 3\0")
                    && header[18..20] != [2, 2];
            let age = SystemClock.now().as_nanosecond() - i128::from(stat.mtime_ns);
            Ok(has_no_wal && (0..CREATION_PERIOD.as_nanos() as i128).contains(&age))
        };
        check().unwrap_or(false)
    }

    async fn snapshot(&self) -> Result<Box<dyn DatabaseSnapshot>> {
        let failed = |cause| read_error(&self.name(), cause);
        let mut connection = self
            .connect(self.options().read_only(true))
            .await
            .map_err(|cause| failed(sqlx::Error::Io(cause)))?;
        sqlx::query("BEGIN")
            .execute(&mut connection)
            .await
            .map_err(failed)?;
        Ok(Box::new(SqliteSnapshot {
            name: self.name(),
            connection,
        }))
    }

    async fn replace_session(&self, session: &str, rows: &SessionRows) -> Result<()> {
        self.directory
            .open_or_create(&FILE.parse()?)
            .map_err(|cause| Error::io(format!("create {}", self.name()), cause))?;
        let mut connection = self
            .connect(self.options())
            .await
            .map_err(|cause| Error::unavailable("open the database").caused_by(cause))?;
        let written = write::replace_session(&mut connection, session, rows).await;
        let _ = connection.close().await;
        written.map_err(|cause| write::classify(session, cause))
    }
}

fn read_error(name: &str, cause: sqlx::Error) -> Error {
    Error::unavailable(format!("read {name}")).caused_by(cause)
}

struct SqliteSnapshot {
    name: String,
    connection: SqliteConnection,
}

impl SqliteSnapshot {
    fn failed(&self) -> impl Fn(sqlx::Error) -> Error + use<> {
        let name = self.name.clone();
        move |cause| read_error(&name, cause)
    }
}

#[async_trait]
impl DatabaseSnapshot for SqliteSnapshot {
    async fn sessions(&mut self) -> Result<Option<HashMap<String, SessionInfo>>> {
        let failed = self.failed();
        sessions(&mut self.connection).await.map_err(failed)
    }

    async fn schema_line(&mut self) -> Result<String> {
        let failed = self.failed();
        schema_line(&mut self.connection).await.map_err(failed)
    }

    async fn project(&mut self, session: &str) -> Result<Option<MirrorRow>> {
        let failed = self.failed();
        project(&mut self.connection, session).await.map_err(failed)
    }

    async fn changed_rows(
        &mut self,
        session: &str,
        since_ms: i64,
        add: &mut (dyn FnMut(MirrorRow) -> Result<()> + Send),
    ) -> Result<()> {
        let failed = self.failed();
        let sql = select_changed(
            &existing_tables(&mut self.connection)
                .await
                .map_err(&failed)?,
        );
        let mut rows = sqlx::query(AssertSqlSafe(sql))
            .bind(session)
            .bind(since_ms)
            .fetch(&mut self.connection);
        while let Some(row) = rows.try_next().await.map_err(&failed)? {
            add(mirror_row(&row).map_err(&failed)?)?;
        }
        Ok(())
    }

    async fn row_counts(&mut self, session: &str) -> Result<Vec<(usize, usize)>> {
        let failed = self.failed();
        let tables = existing_tables(&mut self.connection)
            .await
            .map_err(&failed)?;
        let counts = tables.iter().map(|table| {
            let Table {
                index, name, owner, ..
            } = table;
            format!("SELECT {index}, count(*) FROM {name} WHERE {owner} IN family")
        });
        let counts: Vec<(i64, i64)> = pairs(&mut self.connection, union(counts), session)
            .await
            .map_err(failed)?;
        let as_usize = |number: i64| usize::try_from(number).unwrap_or_default();
        Ok(counts
            .into_iter()
            .map(|(table, count)| (as_usize(table), as_usize(count)))
            .collect())
    }

    async fn row_keys(&mut self, session: &str) -> Result<HashSet<(usize, String)>> {
        let failed = self.failed();
        let tables = existing_tables(&mut self.connection)
            .await
            .map_err(&failed)?;
        let keys = tables.iter().map(|table| {
            let Table {
                index,
                name,
                owner,
                key,
                ..
            } = table;
            format!("SELECT {index}, {key} FROM {name} WHERE {owner} IN family")
        });
        let keys: Vec<(i64, String)> = pairs(&mut self.connection, union(keys), session)
            .await
            .map_err(failed)?;
        Ok(keys
            .into_iter()
            .map(|(table, key)| (usize::try_from(table).unwrap_or_default(), key))
            .collect())
    }

    async fn last_row_change_ms(&mut self, session: &str) -> Result<i64> {
        let failed = self.failed();
        let sql = format!(
            "{FAMILY} SELECT coalesce(max(time_updated), 0) FROM part WHERE session_id IN family"
        );
        sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(session)
            .fetch_one(&mut self.connection)
            .await
            .map_err(failed)
    }

    async fn close(self: Box<Self>) {
        let _ = self.connection.close().await;
    }
}

/// Quotes a name for SQL.
fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The columns of a table that are stored, and those of its primary key; both empty if there is no
/// such table.
async fn columns(
    connection: &mut SqliteConnection,
    table: &str,
) -> sqlx::Result<(Vec<String>, Vec<String>)> {
    let rows = sqlx::query("SELECT name, pk FROM pragma_table_info(?1) ORDER BY cid")
        .bind(table)
        .fetch_all(connection)
        .await?;
    let (mut columns, mut key) = (Vec::new(), BTreeMap::new());
    for row in rows {
        let (name, position): (String, i64) = (row.try_get(0)?, row.try_get(1)?);
        if position > 0 {
            key.insert(position, name.clone());
        }
        if is_stored(table, &name) {
            columns.push(name);
        }
    }
    Ok((columns, key.into_values().collect()))
}

async fn has_table(connection: &mut SqliteConnection, table: &str) -> sqlx::Result<bool> {
    Ok(!columns(connection, table).await?.0.is_empty())
}

async fn sessions(
    connection: &mut SqliteConnection,
) -> sqlx::Result<Option<HashMap<String, SessionInfo>>> {
    if !has_table(connection, "session").await? {
        return Ok(None);
    }
    let sql = if has_table(connection, "event_sequence").await? {
        "SELECT session.id, parent_id, time_updated, coalesce(event_sequence.seq, 0) FROM session \
         LEFT JOIN event_sequence ON event_sequence.aggregate_id = session.id"
    } else {
        "SELECT id, parent_id, time_updated, NULL FROM session"
    };
    let session = |row: &SqliteRow| {
        let last_change = LastChange {
            time_ms: row.try_get(2)?,
            event_seq: row.try_get(3)?,
        };
        let parent = row.try_get(1)?;
        Ok((
            row.try_get(0)?,
            SessionInfo {
                parent,
                last_change,
            },
        ))
    };
    let rows = sqlx::query(sql).fetch_all(connection).await?;
    rows.iter()
        .map(session)
        .collect::<sqlx::Result<_>>()
        .map(Some)
}

/// An SQL expression for a row as JSON. SQLite produces the same text for the same row.
fn row_as_json(table: &str, columns: &[String]) -> String {
    let pairs: Vec<String> = columns
        .iter()
        .map(|column| {
            format!(
                "'{}', {}.{}",
                column.replace('\'', "''"),
                quote(table),
                quote(column)
            )
        })
        .collect();
    format!("json_object({})", pairs.join(", "))
}

/// A table that exists in the database. All names are quoted.
struct Table {
    index: usize,
    name: String,
    /// The column with the session ID.
    owner: &'static str,
    /// The columns, not quoted.
    columns: Vec<String>,
    /// An expression for the primary key as text.
    key: String,
}

impl Table {
    fn has_column(&self, column: &str) -> bool {
        self.columns.iter().any(|name| name == column)
    }
}

async fn existing_tables(connection: &mut SqliteConnection) -> sqlx::Result<Vec<Table>> {
    let mut tables = Vec::new();
    for (index, (table, owner)) in TABLES.iter().enumerate() {
        let (columns, key) = columns(connection, table).await?;
        if !columns.is_empty() && !key.is_empty() {
            let name = quote(table);
            let key: Vec<String> = key
                .iter()
                .map(|column| format!("{name}.{}", quote(column)))
                .collect();
            tables.push(Table {
                index,
                key: format!("CAST({} AS TEXT)", key.join(" || '/' || ")),
                name,
                owner,
                columns,
            });
        }
    }
    Ok(tables)
}

fn union(selects: impl Iterator<Item = String>) -> String {
    format!(
        "{FAMILY} {}",
        selects.collect::<Vec<_>>().join(" UNION ALL ")
    )
}

/// Selects the rows of a family that changed at ?2 or later, ordered by creation: table, key, role,
/// model and row.
fn select_changed(tables: &[Table]) -> String {
    let selects = tables.iter().map(|table| {
        let Table {
            index,
            name,
            owner,
            columns,
            key,
        } = table;
        let plain_name = TABLES[*index].0;
        // A part does not have the role and the model of its message.
        let of_message = |path: &str| match plain_name {
            "part" => format!("(SELECT CAST(json_extract(message.data, '{path}') AS TEXT) FROM message WHERE message.id = part.message_id)"),
            _ => "NULL".to_owned(),
        };
        let (role, model) = (of_message("$.role"), of_message("$.modelID"));
        let created = if table.has_column("time_created") && plain_name != "session" {
            format!("{name}.time_created")
        } else {
            "0".to_owned()
        };
        let is_changed = if table.has_column("time_updated") {
            format!("{name}.time_updated >= ?2")
        } else {
            "?2 >= 0".to_owned()
        };
        // SQLite accepts any bytes as text.
        let row = format!("CAST({} AS BLOB)", row_as_json(plain_name, columns));
        format!("SELECT {index}, {key}, {role}, {model}, {row}, {created} FROM {name} WHERE {name}.{owner} IN family AND {is_changed}")
    });
    format!("{} ORDER BY 6, 1, 2", union(selects))
}

fn mirror_row(row: &SqliteRow) -> sqlx::Result<MirrorRow> {
    let table: i64 = row.try_get(0)?;
    let json: Vec<u8> = row.try_get(4)?;
    Ok(MirrorRow {
        table: usize::try_from(table).unwrap_or(PROJECT_INDEX),
        key: row.try_get(1)?,
        role: row.try_get(2)?,
        model: row.try_get(3)?,
        json: String::from_utf8_lossy(&json).into_owned(),
    })
}

/// Runs a query for a session that returns a table index and another value.
async fn pairs<T>(
    connection: &mut SqliteConnection,
    sql: String,
    session: &str,
) -> sqlx::Result<Vec<(i64, T)>>
where
    T: for<'r> sqlx::Decode<'r, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
{
    let rows = sqlx::query(AssertSqlSafe(sql))
        .bind(session)
        .fetch_all(connection)
        .await?;
    rows.iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .collect()
}

/// The line with the schema: the tables, the indexes and the applied migrations, but no user data.
async fn schema_line(connection: &mut SqliteConnection) -> sqlx::Result<String> {
    const STATEMENTS: &str = "SELECT json_group_array(sql) FROM (SELECT sql FROM sqlite_schema WHERE type IN ('table', 'index') \
         AND sql IS NOT NULL AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY rowid)";
    let statements: String = sqlx::query_scalar(STATEMENTS)
        .fetch_one(&mut *connection)
        .await?;
    let mut migrations = Vec::new();
    for table in MIGRATIONS {
        let (columns, _) = columns(connection, table).await?;
        if !columns.is_empty() {
            let sql = format!(
                "SELECT json_group_array(json({})) FROM {table}",
                row_as_json(table, &columns)
            );
            let rows: String = sqlx::query_scalar(AssertSqlSafe(sql))
                .fetch_one(&mut *connection)
                .await?;
            migrations.push(format!("\"{table}\":{rows}"));
        }
    }
    Ok(format!(
        "{{\"schema\":{{\"sql\":{statements},\"migrations\":{{{}}}}}}}\n",
        migrations.join(",")
    ))
}

async fn project(
    connection: &mut SqliteConnection,
    session: &str,
) -> sqlx::Result<Option<MirrorRow>> {
    let (columns, _) = columns(connection, PROJECT).await?;
    if columns.is_empty() {
        return Ok(None);
    }
    let sql = format!(
        "SELECT project.id, {} FROM project JOIN session ON session.project_id = project.id WHERE session.id = ?1",
        row_as_json(PROJECT, &columns)
    );
    let row = sqlx::query(AssertSqlSafe(sql))
        .bind(session)
        .fetch_optional(connection)
        .await?;
    row.map(|row| {
        Ok(MirrorRow {
            table: PROJECT_INDEX,
            key: row.try_get(0)?,
            role: None,
            model: None,
            json: row.try_get(1)?,
        })
    })
    .transpose()
}
