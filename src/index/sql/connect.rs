//! The way to the database: what a URL means, the first connection, the schema, the pool.
//!
//! Owns URLs (and keeps their passwords to itself), the index file and migrations. Does not own when to connect
//! (`super`) or what an error means (`fault`).

use std::fmt;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use sqlx::any::{AnyConnectOptions, AnyPoolOptions};
use sqlx::{AnyConnection, AnyPool, ConnectOptions, Connection, Row};
use url::Url;

use super::failure::Fault;
use super::texts;
use crate::error::{Error, Result};

/// The two forms of an index URL.
pub(super) const FORMS: &str =
    "use sqlite:///DIR/index.db or postgres://USER:PASSWORD@HOST:5432/DATABASE?sslmode=verify-full";

/// How long to wait for a connection; a server that is up answers in milliseconds.
const CONNECT: Duration = Duration::from_secs(5);

/// How long an unused connection stays, so that an idle daemon holds none.
const IDLE: Duration = Duration::from_secs(30);

/// One to write and one to read; an index that is shared by many daemons has few connections to give.
const CONNECTIONS: u32 = 2;

/// Where the applied migrations are noted: a name of our own, as other programs may share the database.
const VERSIONS: &str = "sessiond_migrations";

/// What was applied so far.
const LIST_VERSIONS: &str = "SELECT version FROM sessiond_migrations ORDER BY version";

/// Any number, the same for every sessiond: who holds it in PostgreSQL is changing the schema.
const MIGRATION_LOCK: i64 = 0x5e55_104d;

/// Path characters that need no escape in a URL.
const PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'.')
    .remove(b'-')
    .remove(b'_');

/// Which database it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Engine {
    /// A file of ours.
    Sqlite(PathBuf),
    /// A server.
    Postgres,
}

/// A database that may or may not be there.
#[derive(Clone)]
pub(super) struct Target {
    engine: Engine,
    /// Holds the password; never printed.
    url: Url,
    address: String,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Target").field(&self.address).finish()
    }
}

impl Target {
    /// Reads an index URL. No error repeats it, as there may be a password in it.
    pub(super) fn parse(text: &str) -> Result<Target> {
        let text = text.trim();
        let scheme = text.split(':').next().unwrap_or_default();
        match scheme {
            "sqlite" => Target::sqlite(text),
            "postgres" | "postgresql" if text[scheme.len()..].starts_with("://") => {
                Target::postgres(text)
            }
            _ => Err(Error::usage(
                "read the index URL: it begins with neither sqlite:// nor postgres://",
            )
            .hint(FORMS)),
        }
    }

    fn sqlite(text: &str) -> Result<Target> {
        let refuse =
            |why: &str| Error::usage(format!("read index URL {text:?}: {why}")).hint(FORMS);
        let path = text
            .strip_prefix("sqlite://")
            .filter(|path| path.starts_with('/'))
            .ok_or_else(|| refuse("its path is not absolute"))?;
        if path.contains(['?', '#']) {
            return Err(refuse("it takes no parameters"));
        }
        let path = percent_decode_str(path)
            .decode_utf8()
            .map_err(|_| refuse("its path is not UTF-8"))?;
        if path.contains('\0') || path.ends_with('/') {
            return Err(refuse("its path names no file"));
        }
        let url = format!("sqlite://{}?mode=rw", utf8_percent_encode(&path, PATH));
        let url = Url::parse(&url).map_err(|_| refuse("its path makes no URL"))?;
        Ok(Target {
            address: format!("sqlite://{path}"),
            engine: Engine::Sqlite(PathBuf::from(path.as_ref())),
            url,
        })
    }

    fn postgres(text: &str) -> Result<Target> {
        let refuse = |why: &str| Error::usage(format!("read the index URL: {why}")).hint(FORMS);
        let url = Url::parse(text)
            .map_err(|_| refuse("it is not a URL; in a password write %40 for @, %2F for /, %23 for #, %3A for :, %25 for %"))?;
        // The driver reads the URL again at each connection; what it refuses is better said now. Its message may
        // repeat a part of the URL, so it stays out of ours.
        sqlx::postgres::PgConnectOptions::from_url(&url)
            .map_err(|_| refuse("a parameter of it is not one that PostgreSQL takes"))?;
        let given = |name: &str| {
            url.query_pairs()
                .find(|(key, _)| key == name)
                .map(|(_, value)| value.into_owned())
        };
        let user = Some(url.username())
            .filter(|user| !user.is_empty())
            .map(str::to_owned)
            .or_else(|| given("user"));
        let host = url
            .host_str()
            .filter(|host| !host.is_empty())
            .map(str::to_owned)
            .or_else(|| given("host"));
        let port = url
            .port()
            .map(|port| port.to_string())
            .or_else(|| given("port"))
            .unwrap_or_else(|| "5432".to_owned());
        let database = Some(url.path().trim_start_matches('/'))
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .or_else(|| given("dbname"));
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

    /// Where it is, without secrets.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// The statement that begins a transaction that writes. SQLite would otherwise begin it as a reader, and a reader
    /// that wants to write while another does is refused at once instead of waiting.
    pub(super) fn begin(&self) -> &'static str {
        match self.engine {
            Engine::Sqlite(_) => "BEGIN IMMEDIATE",
            Engine::Postgres => "BEGIN",
        }
    }

    /// What asks for the plan of a statement, and the column that has it.
    pub(super) fn explain(&self) -> (&'static str, usize) {
        match self.engine {
            Engine::Sqlite(_) => ("EXPLAIN QUERY PLAN ", 3),
            Engine::Postgres => ("EXPLAIN ", 0),
        }
    }

    /// What each new connection is told. The server gives up on a statement a little before we do.
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

    /// Connects once, brings the schema up to date, and gives a pool.
    ///
    /// The first connection is not the pool's: a pool hides why it cannot connect and only says that it took too long.
    pub(super) async fn connect(&self) -> Result<AnyPool, Fault> {
        // An error means that they are installed already.
        let _ =
            sqlx::any::install_drivers(&[sqlx::sqlite::any::DRIVER, sqlx::postgres::any::DRIVER]);
        if let Engine::Sqlite(path) = &self.engine {
            let path = path.clone();
            tokio::task::spawn_blocking(move || make_file(&path))
                .await
                .map_err(|error| Error::unavailable("make the index file").caused_by(error))??;
        }
        let options = AnyConnectOptions::from_url(&self.url)?.disable_statement_logging();
        let mut connection = tokio::time::timeout(CONNECT, options.connect())
            .await
            .map_err(|_| Fault::Slow)??;
        sqlx::raw_sql(self.settings())
            .execute(&mut connection)
            .await?;
        if matches!(self.engine, Engine::Sqlite(_)) {
            write_ahead(&mut connection).await?;
        }
        self.migrate(&mut connection).await?;
        // All that mattered is done; a failure to part politely is no failure.
        let _ = connection.close().await;

        let settings = self.settings();
        Ok(AnyPoolOptions::new()
            .max_connections(CONNECTIONS)
            .min_connections(0)
            .idle_timeout(IDLE)
            .acquire_timeout(CONNECT)
            .after_connect(move |connection, _| {
                Box::pin(async move {
                    sqlx::raw_sql(settings)
                        .execute(connection)
                        .await
                        .map(|_| ())
                })
            })
            .connect_lazy_with(options))
    }

    /// Brings the schema up to date in one transaction, one process at a time.
    async fn migrate(&self, connection: &mut AnyConnection) -> Result<(), Fault> {
        let mut migrator = sqlx::migrate!("./migrations");
        // Up to date is the usual case, and a role that may only read and write rows cannot even try the rest.
        let versions = sqlx::query(LIST_VERSIONS).fetch_all(&mut *connection).await;
        if let Ok(rows) = &versions {
            let found: Vec<i64> = rows
                .iter()
                .map(|row| row.try_get(0))
                .collect::<Result<_, _>>()?;
            if migrator.iter().map(|migration| migration.version).eq(found) {
                return Ok(());
            }
        }
        // The lock is ours and ends with the transaction, which also holds behind a connection pooler.
        migrator.set_locking(false);
        migrator.dangerous_set_table_name(VERSIONS);
        let mut transaction = connection.begin_with(self.begin()).await?;
        if self.engine == Engine::Postgres {
            sqlx::query("SELECT 1 FROM (SELECT pg_advisory_xact_lock($1)) AS held")
                .bind(MIGRATION_LOCK)
                .execute(&mut *transaction)
                .await?;
            let known = sqlx::query("SELECT 1 WHERE to_regtype('bytewise_text') IS NOT NULL")
                .fetch_optional(&mut *transaction)
                .await?;
            if known.is_none() {
                sqlx::raw_sql("CREATE DOMAIN bytewise_text AS TEXT COLLATE \"C\"")
                    .execute(&mut *transaction)
                    .await?;
            }
        }
        migrator.run_direct(None, &mut *transaction, false).await?;
        sqlx::raw_sql(match self.engine {
            Engine::Sqlite(_) => texts::SQLITE,
            Engine::Postgres => texts::POSTGRES,
        })
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }
}

/// Readers and a writer at once; stays with the file. SQLite does not wait for others here, so we do.
async fn write_ahead(connection: &mut AnyConnection) -> Result<(), Fault> {
    let mut tries = 100;
    loop {
        match sqlx::raw_sql("PRAGMA journal_mode = WAL")
            .execute(&mut *connection)
            .await
        {
            Ok(_) => return Ok(()),
            Err(sqlx::Error::Database(error))
                if tries > 0
                    && error
                        .code()
                        .is_some_and(|code| code == "5" || code == "261") =>
            {
                tries -= 1;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Makes the index file where there is none, readable by its owner alone; SQLite gives its side files the same rights.
fn make_file(path: &Path) -> Result<()> {
    // Closing a file drops all locks that this process has on it, also those of SQLite: so it is opened only if it is
    // new, and nobody else gets to open it before it is closed.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _held = ONE_AT_A_TIME.lock();
    if let Some(directory) = path.parent() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|error| refuse(directory, error))?;
    }
    match std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
    {
        Ok(_) => return Ok(()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(refuse(path, error)),
    }
    if path.is_dir() {
        return Err(refuse(path, ErrorKind::IsADirectory.into()));
    }
    use rustix::fs::{Access, access};
    access(path, Access::READ_OK | Access::WRITE_OK).map_err(|error| refuse(path, error.into()))
}

fn refuse(path: &Path, error: std::io::Error) -> Error {
    Error::named(format!("make {}", path.display()), error)
}
