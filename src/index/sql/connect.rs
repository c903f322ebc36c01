//! Connecting to the database: the URL, the first connection, the schema and the pool.
//!
//! Owns index URLs (and keeps their passwords private), the index file and migrations. Does not own
//! when to connect (`super`) or the classification of errors (`error`).

use std::fmt;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use sqlx::any::{AnyConnectOptions, AnyPoolOptions, AnyRow};
use sqlx::migrate::Migrator;
use sqlx::{AnyConnection, AnyPool, AssertSqlSafe, ConnectOptions, Connection, Row};
use url::Url;

use super::error::SqlError;
use super::message_texts;
use crate::error::{Error, Result};

/// The hint that shows both forms of an index URL.
pub(super) const URL_FORMS: &str = "set --index sqlite:///DIR/index.db or postgres://USER:PASSWORD@HOST:5432/DATABASE?sslmode=verify-full";

/// Timeout for a connection. A reachable server responds within milliseconds.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after which an unused connection is closed, so that an idle daemon holds none.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of connections: one to write and one to read. Many daemons share a database.
const MAX_CONNECTIONS: u32 = 2;

/// The table of applied migrations. Other programs may share the database, so it has a unique name.
const MIGRATIONS_TABLE: &str = "sessiond_migrations";

/// Lists the applied migrations.
const LIST_VERSIONS: &str = "SELECT version FROM sessiond_migrations ORDER BY version";

/// The key of the advisory lock in PostgreSQL that serializes migrations.
const MIGRATION_LOCK: i64 = 0x5e55_104d;

/// Path characters that need no escape in a URL.
const PATH_CHARACTERS: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'.')
    .remove(b'-')
    .remove(b'_');

/// Device and inode of an index file.
pub(super) type FileIdentity = (u64, u64);

/// The database system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Engine {
    /// A file.
    Sqlite(PathBuf),
    /// A server.
    Postgres,
}

/// The location of a database.
#[derive(Clone)]
pub(super) struct Target {
    engine: Engine,
    /// Contains the password; never printed.
    url: Url,
    address: String,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Target").field(&self.address).finish()
    }
}

impl Target {
    /// Parses an index URL. No error repeats the URL, because it may contain a password.
    pub(super) fn parse(text: &str) -> Result<Target> {
        let text = text.trim();
        let scheme = text.split(':').next().unwrap_or_default();
        match scheme {
            "sqlite" => Target::sqlite(text),
            "postgres" | "postgresql" if text[scheme.len()..].starts_with("://") => {
                Target::postgres(text)
            }
            _ => Err(
                Error::usage("invalid index URL: expected sqlite:// or postgres://")
                    .hint(URL_FORMS),
            ),
        }
    }

    fn sqlite(text: &str) -> Result<Target> {
        let invalid = |reason: &str| {
            Error::usage(format!("invalid index URL {text:?}: {reason}")).hint(URL_FORMS)
        };
        let path = text
            .strip_prefix("sqlite://")
            .filter(|path| path.starts_with('/'))
            .ok_or_else(|| invalid("the path is not absolute"))?;
        if path.contains(['?', '#']) {
            return Err(invalid("parameters are not supported"));
        }
        let path = percent_decode_str(path)
            .decode_utf8()
            .map_err(|_| invalid("the path is not UTF-8"))?;
        if path.contains('\0') || path.ends_with('/') {
            return Err(invalid("the path is not a file name"));
        }
        let url = format!(
            "sqlite://{}?mode=rw",
            utf8_percent_encode(&path, PATH_CHARACTERS)
        );
        let url = Url::parse(&url).map_err(|_| invalid("the path cannot be part of a URL"))?;
        Ok(Target {
            address: format!("sqlite://{path}"),
            engine: Engine::Sqlite(PathBuf::from(path.as_ref())),
            url,
        })
    }

    fn postgres(text: &str) -> Result<Target> {
        let invalid =
            |reason: &str| Error::usage(format!("invalid index URL: {reason}")).hint(URL_FORMS);
        let url = Url::parse(text)
            .map_err(|_| invalid("it is not a URL; in a password, write %40 for @, %2F for /, %23 for #, %3A for :, %25 for %"))?;
        // The driver parses the URL again for each connection; parsing it now reports mistakes
        // early. Its message may repeat a part of the URL, so the error does not include it.
        sqlx::postgres::PgConnectOptions::from_url(&url)
            .map_err(|_| invalid("unknown parameter or invalid parameter value"))?;
        let parameter = |name: &str| {
            url.query_pairs()
                .find(|(key, _)| key == name)
                .map(|(_, value)| value.into_owned())
        };
        let user = Some(url.username())
            .filter(|user| !user.is_empty())
            .map(str::to_owned)
            .or_else(|| parameter("user"));
        let host = url
            .host_str()
            .filter(|host| !host.is_empty())
            .map(str::to_owned)
            .or_else(|| parameter("host"));
        let port = url
            .port()
            .map(|port| port.to_string())
            .or_else(|| parameter("port"))
            .unwrap_or_else(|| "5432".to_owned());
        let database = Some(url.path().trim_start_matches('/'))
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .or_else(|| parameter("dbname"));
        let user = user.map(|user| format!("{user}@")).unwrap_or_default();
        let address = format!(
            "postgres://{user}{}:{port}/{}",
            host.unwrap_or_default(),
            database.unwrap_or_default()
        );
        Ok(Target {
            engine: Engine::Postgres,
            url,
            address,
        })
    }

    /// The index file that exists now; none if there is none, or the database is a server.
    pub(super) fn file_identity(&self) -> Option<FileIdentity> {
        match &self.engine {
            Engine::Sqlite(path) => {
                let found = std::fs::metadata(path).ok()?;
                Some((found.dev(), found.ino()))
            }
            Engine::Postgres => None,
        }
    }

    /// Returns the address for messages, without secrets.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Returns the statement that begins a write transaction. A plain BEGIN in SQLite starts as a
    /// reader, and a reader that starts to write during another write fails at once instead of
    /// waiting.
    pub(super) fn begin(&self) -> &'static str {
        match self.engine {
            Engine::Sqlite(_) => "BEGIN IMMEDIATE",
            Engine::Postgres => "BEGIN",
        }
    }

    /// Returns the prefix that makes a statement return its plan, and the column that contains the
    /// plan.
    pub(super) fn explain(&self) -> (&'static str, usize) {
        match self.engine {
            Engine::Sqlite(_) => ("EXPLAIN QUERY PLAN ", 3),
            Engine::Postgres => ("EXPLAIN ", 0),
        }
    }

    /// Returns the statements that configure a new connection. The server's statement timeout is
    /// shorter than [`super::CALL_TIMEOUT`], so that the server cancels before the client.
    fn settings(&self) -> &'static str {
        match self.engine {
            Engine::Sqlite(_) => {
                "PRAGMA busy_timeout = 5000; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = OFF"
            }
            Engine::Postgres => {
                "SET statement_timeout = 14000; SET idle_in_transaction_session_timeout = 30000"
            }
        }
    }

    /// Connects once, migrates the schema, and returns a pool, and the connection to a server.
    ///
    /// The first connection is not part of the pool: a pool reports only a timeout, not why it
    /// cannot connect.
    pub(super) async fn connect(&self) -> Result<(AnyPool, Option<AnyConnection>), SqlError> {
        // An error means that the drivers are installed already.
        let _ =
            sqlx::any::install_drivers(&[sqlx::sqlite::any::DRIVER, sqlx::postgres::any::DRIVER]);
        if let Engine::Sqlite(path) = &self.engine {
            let path = path.clone();
            tokio::task::spawn_blocking(move || create_file(&path))
                .await
                .map_err(|error| Error::unavailable("create the index file").caused_by(error))??;
        }
        let options = AnyConnectOptions::from_url(&self.url)?.disable_statement_logging();
        let mut connection = tokio::time::timeout(CONNECT_TIMEOUT, options.connect())
            .await
            .map_err(|_| SqlError::Timeout)??;
        let first = match &self.engine {
            Engine::Sqlite(_) => {
                let settings = sqlx::raw_sql(self.settings());
                settings.execute(&mut connection).await?;
                enable_wal(&mut connection).await?;
                self.migrate(&mut connection).await?;
                // A replaced file must have no open connection that nobody closes. The migration is
                // committed, so an error while closing does not matter.
                let _ = connection.close().await;
                None
            }
            Engine::Postgres => {
                if !self.configure_current(&mut connection).await? {
                    let settings = sqlx::raw_sql(self.settings());
                    settings.execute(&mut connection).await?;
                    self.migrate(&mut connection).await?;
                }
                Some(connection)
            }
        };

        let settings = self.settings();
        let pool = AnyPoolOptions::new()
            .max_connections(MAX_CONNECTIONS)
            .min_connections(0)
            .idle_timeout(IDLE_TIMEOUT)
            .acquire_timeout(CONNECT_TIMEOUT)
            .after_connect(move |connection, _| {
                Box::pin(async move {
                    sqlx::raw_sql(settings)
                        .execute(connection)
                        .await
                        .map(|_| ())
                })
            })
            .connect_lazy_with(options);
        Ok((pool, first))
    }

    /// Configures a connection and checks the version of the schema, in one round trip. Returns
    /// whether the schema is current; otherwise the connection may not be configured.
    async fn configure_current(&self, connection: &mut AnyConnection) -> Result<bool, SqlError> {
        let sql = format!("{}; {LIST_VERSIONS}", self.settings());
        let query = sqlx::raw_sql(AssertSqlSafe(sql));
        match query.fetch_all(connection).await {
            Ok(rows) => is_current(&sqlx::migrate!("./migrations"), &rows),
            Err(sqlx::Error::Database(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Migrates the schema in one transaction, one process at a time.
    async fn migrate(&self, connection: &mut AnyConnection) -> Result<(), SqlError> {
        let mut migrator = sqlx::migrate!("./migrations");
        // Usually there is nothing to do, and a role without the right to create tables must not
        // try.
        let versions = sqlx::query(LIST_VERSIONS).fetch_all(&mut *connection).await;
        if let Ok(rows) = &versions
            && is_current(&migrator, rows)?
        {
            return Ok(());
        }
        // A lock that ends with the transaction also works behind a connection pooler; the lock of
        // the migrator does not.
        migrator.set_locking(false);
        migrator.dangerous_set_table_name(MIGRATIONS_TABLE);
        let mut transaction = connection.begin_with(self.begin()).await?;
        if self.engine == Engine::Postgres {
            sqlx::query("SELECT 1 FROM (SELECT pg_advisory_xact_lock($1)) AS held")
                .bind(MIGRATION_LOCK)
                .execute(&mut *transaction)
                .await?;
            let domain = sqlx::query("SELECT 1 WHERE to_regtype('bytewise_text') IS NOT NULL")
                .fetch_optional(&mut *transaction)
                .await?;
            if domain.is_none() {
                sqlx::raw_sql("CREATE DOMAIN bytewise_text AS TEXT COLLATE \"C\"")
                    .execute(&mut *transaction)
                    .await?;
            }
        }
        migrator.run_direct(None, &mut *transaction, false).await?;
        sqlx::raw_sql(match self.engine {
            Engine::Sqlite(_) => message_texts::SQLITE,
            Engine::Postgres => message_texts::POSTGRES,
        })
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }
}

/// Whether these are the versions of all migrations.
fn is_current(migrator: &Migrator, versions: &[AnyRow]) -> Result<bool, SqlError> {
    let found = versions.iter().map(|row| row.try_get(0));
    let found: Vec<i64> = found.collect::<Result<_, _>>()?;
    Ok(migrator.iter().map(|migration| migration.version).eq(found))
}

/// Enables write-ahead logging, which allows readers during a write and is a property of the file.
/// SQLite does not wait for locks here, so this function retries.
async fn enable_wal(connection: &mut AnyConnection) -> Result<(), SqlError> {
    let mut attempts_left = 100;
    loop {
        match sqlx::raw_sql("PRAGMA journal_mode = WAL")
            .execute(&mut *connection)
            .await
        {
            Ok(_) => return Ok(()),
            Err(sqlx::Error::Database(error))
                if attempts_left > 0
                    && error
                        .code()
                        .is_some_and(|code| code == "5" || code == "261") =>
            {
                attempts_left -= 1;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Creates the index file if it does not exist, readable only by its owner. SQLite gives its side
/// files the same permissions.
fn create_file(path: &Path) -> Result<()> {
    // Closing a file drops all locks of this process on it, including those of SQLite. So this
    // function opens the file only to create it, and no other thread can open it in between.
    static LOCK: Mutex<()> = Mutex::new(());
    let _guard = LOCK.lock();
    if let Some(directory) = path.parent() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|error| cannot_create(directory, error))?;
    }
    match std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
    {
        Ok(_) => return Ok(()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(cannot_create(path, error)),
    }
    if path.is_dir() {
        return Err(cannot_create(path, ErrorKind::IsADirectory.into()));
    }
    use rustix::fs::{Access, access};
    access(path, Access::READ_OK | Access::WRITE_OK)
        .map_err(|error| cannot_create(path, error.into()))
}

fn cannot_create(path: &Path, error: std::io::Error) -> Error {
    Error::user_path(format!("create {}", path.display()), error)
}
