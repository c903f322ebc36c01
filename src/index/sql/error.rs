//! Database errors: their kinds and hints.
//!
//! Owns the classification of PostgreSQL, SQLite and migration errors. Does not own retries.

use sqlx::migrate::MigrateError;

use crate::error::{Error, ErrorKind};

/// An error inside a database call, before it is classified.
#[derive(Debug)]
pub(super) enum SqlError {
    /// An error of the database or of the connection to it.
    Sql(sqlx::Error),
    /// An error while migrating the schema.
    Migrate(MigrateError),
    /// The call exceeded its timeout.
    Timeout,
    /// An error that is classified already.
    Classified(Error),
}

impl From<sqlx::Error> for SqlError {
    fn from(error: sqlx::Error) -> Self {
        SqlError::Sql(error)
    }
}

impl From<MigrateError> for SqlError {
    fn from(error: MigrateError) -> Self {
        SqlError::Migrate(error)
    }
}

impl From<Error> for SqlError {
    fn from(error: Error) -> Self {
        SqlError::Classified(error)
    }
}

impl SqlError {
    /// Whether the pool must be discarded because its connections may be broken.
    pub(super) fn breaks_connections(&self) -> bool {
        use sqlx::Error as E;
        match self {
            SqlError::Timeout => true,
            SqlError::Sql(error) => {
                matches!(
                    error,
                    E::Io(_)
                        | E::Tls(_)
                        | E::Protocol(_)
                        | E::PoolTimedOut
                        | E::PoolClosed
                        | E::WorkerCrashed
                ) || matches!(error, E::InvalidSavePointStatement | E::BeginFailed)
                    || matches!(error, E::Database(error) if error.code().is_some_and(|code| ends_transaction(&code)))
                    || matches!(error, E::Database(error) if is_recreated(&**error))
            }
            SqlError::Migrate(_) | SqlError::Classified(_) => false,
        }
    }
}

impl SqlError {
    /// Whether another transaction changed the same rows, so that a second attempt sees its rows.
    pub(super) fn is_race(&self) -> bool {
        // Unique violation, serialization failure, deadlock. A transaction of SQLite that writes is
        // alone.
        let is_code = |code: &str| matches!(code, "23505" | "40001" | "40P01");
        matches!(self, SqlError::Sql(sqlx::Error::Database(error)) if error.code().is_some_and(|code| is_code(&code)))
    }
}

/// Whether the database was dropped, or created again without the schema. The next connection
/// creates the schema.
fn is_recreated(error: &dyn sqlx::error::DatabaseError) -> bool {
    // Undefined table; unknown database; connection ended by an administrator.
    let is_code = |code: &str| matches!(code, "42P01" | "3D000" | "57P01");
    error.code().is_some_and(|code| is_code(&code)) || error.message().starts_with("no such table")
}

/// Whether SQLite may have rolled back by itself (NOMEM, INTERRUPT, IOERR, FULL). The driver still
/// counts an open transaction then and never begins another one on that connection. All codes of
/// PostgreSQL are longer.
fn ends_transaction(code: &str) -> bool {
    code.len() < 5
        && matches!(
            code.parse::<u32>().map(|code| code & 0xff),
            Ok(7 | 9 | 10 | 13)
        )
}

const UNREACHABLE: &str = "run \"sessiond doctor\" to check the connection to the database; streaming and restoring by ID work without it";
const DISK_FULL: &str =
    "free some space on the database's disk; streaming and restoring by ID work without the index";
const INVALID_LOGIN: &str =
    "correct the user, password or database name in --index postgres://USER:PASSWORD@HOST/DATABASE";
const MISSING_RIGHTS: &str = "run \"sessiond doctor\" as the owner of the database, then grant the role access to its tables; see docs/guides/multiple-tenants.md";
const NEWER_SCHEMA: &str = "upgrade sessiond: a newer version has migrated this index";
const FOREIGN_SCHEMA: &str =
    "set --index to an empty database or a new file, then run \"sessiond reindex\"";

/// Converts a database error to an error of the crate. `address` contains no secret.
pub(super) fn classify(error: SqlError, address: &str) -> Error {
    let (kind, hint, cause): (
        ErrorKind,
        Option<&str>,
        Option<Box<dyn std::error::Error + Send + Sync>>,
    ) = match error {
        SqlError::Classified(error) => return error.context(format_args!("use index {address}")),
        SqlError::Timeout => {
            return Error::unavailable("the database did not respond in time")
                .context(format_args!("use index {address}"))
                .hint(UNREACHABLE);
        }
        SqlError::Sql(error)
        | SqlError::Migrate(
            MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _),
        ) => {
            let (kind, hint) = classify_sql(&error);
            (kind, hint, Some(database_message(error)))
        }
        SqlError::Migrate(error) => {
            let (kind, hint) = classify_migration(&error);
            (kind, hint, Some(Box::new(error)))
        }
    };
    let mut error = Error::new(kind, format!("use index {address}"));
    if let Some(cause) = cause {
        error = error.caused_by(cause);
    }
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// Returns the message of the database with its code. The driver's own text would add a line number
/// of the server's source.
fn database_message(error: sqlx::Error) -> Box<dyn std::error::Error + Send + Sync> {
    match error {
        sqlx::Error::Database(error) => match error.code() {
            Some(code) => format!("{} (code {code})", error.message()).into(),
            None => error.message().into(),
        },
        error => Box::new(error),
    }
}

fn classify_migration(error: &MigrateError) -> (ErrorKind, Option<&'static str>) {
    match error {
        MigrateError::VersionMissing(_) | MigrateError::VersionTooNew(..) => {
            (ErrorKind::Usage, Some(NEWER_SCHEMA))
        }
        MigrateError::VersionMismatch(_) | MigrateError::Dirty(_) => {
            (ErrorKind::Usage, Some(FOREIGN_SCHEMA))
        }
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            classify_sql(error)
        }
        _ => (ErrorKind::Internal, None),
    }
}

fn classify_sql(error: &sqlx::Error) -> (ErrorKind, Option<&'static str>) {
    use sqlx::Error as E;
    match error {
        E::Database(error) => match error.code() {
            Some(code)
                if error
                    .try_downcast_ref::<sqlx::postgres::PgDatabaseError>()
                    .is_some() =>
            {
                classify_postgres(&code)
            }
            Some(code) => classify_sqlite(&code),
            None => (ErrorKind::Internal, None),
        },
        E::Io(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed => {
            (ErrorKind::Unavailable, Some(UNREACHABLE))
        }
        // The transaction ended without the driver's knowledge; a new connection works again.
        E::InvalidSavePointStatement | E::BeginFailed => {
            (ErrorKind::Unavailable, Some(UNREACHABLE))
        }
        // The bytes are not a response of a database: a proxy interfered, or the response was
        // truncated.
        E::Protocol(_) => (ErrorKind::Unavailable, Some(UNREACHABLE)),
        E::Tls(_) => (
            ErrorKind::Usage,
            Some(
                "set sslmode and sslrootcert in --index postgres://…?sslmode=verify-full&sslrootcert=FILE",
            ),
        ),
        E::Configuration(_) => (ErrorKind::Usage, Some(super::connect::URL_FORMS)),
        E::ColumnDecode { .. } | E::Decode(_) => (
            ErrorKind::Corrupt,
            Some("run \"sessiond reindex\" to rebuild the index"),
        ),
        _ => (ErrorKind::Internal, None),
    }
}

/// Classifies a SQLSTATE code. Its first two characters are the class.
fn classify_postgres(code: &str) -> (ErrorKind, Option<&'static str>) {
    match code {
        // invalid_catalog_name, invalid_schema_name
        "3D000" | "3F000" => (ErrorKind::Usage, Some(INVALID_LOGIN)),
        // insufficient_privilege
        "42501" => (ErrorKind::Usage, Some(MISSING_RIGHTS)),
        // duplicate_table, duplicate_object: tables of another program have the same name.
        "42P07" | "42710" => (ErrorKind::Usage, Some(FOREIGN_SCHEMA)),
        "53100" => (ErrorKind::Unavailable, Some(DISK_FULL)),
        // read_only_sql_transaction: a standby, until a failover.
        // idle_in_transaction_session_timeout.
        "25006" | "25P03" => (ErrorKind::Unavailable, Some(UNREACHABLE)),
        // lock_not_available
        "55P03" => (ErrorKind::Unavailable, Some(UNREACHABLE)),
        // data_corrupted, index_corrupted
        "XX001" | "XX002" => (ErrorKind::Corrupt, None),
        _ => match code.get(..2) {
            Some("28") => (ErrorKind::Usage, Some(INVALID_LOGIN)),
            // Connection, rollback, resources, operator intervention, system.
            Some("08" | "40" | "53" | "57" | "58") => (ErrorKind::Unavailable, Some(UNREACHABLE)),
            _ => (ErrorKind::Internal, None),
        },
    }
}

/// Classifies an SQLite result code. Its low byte is the primary code.
fn classify_sqlite(code: &str) -> (ErrorKind, Option<&'static str>) {
    match code.parse::<u32>().map(|code| code & 0xff) {
        // PERM, READONLY, AUTH
        Ok(3 | 8 | 23) => (
            ErrorKind::Usage,
            Some("run sessiond as the user that owns the index file, or correct its permissions"),
        ),
        // BUSY, LOCKED, NOMEM, INTERRUPT, IOERR, CANTOPEN, PROTOCOL
        Ok(5 | 6 | 7 | 9 | 10 | 14 | 15) => (
            ErrorKind::Unavailable,
            Some(
                "check the disk of the index file, and that no other process locks the file; streaming and restoring by ID work without the index",
            ),
        ),
        // FULL
        Ok(13) => (ErrorKind::Unavailable, Some(DISK_FULL)),
        // CORRUPT
        Ok(11) => (
            ErrorKind::Corrupt,
            Some("move the index file away, then run \"sessiond reindex\""),
        ),
        // NOTADB
        Ok(26) => (ErrorKind::Usage, Some(FOREIGN_SCHEMA)),
        _ => (ErrorKind::Internal, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_errors_are_unavailable_and_permanent_ones_are_usage() {
        for code in ["28P01", "28000", "3D000", "42501", "42P07"] {
            assert_eq!(classify_postgres(code).0, ErrorKind::Usage, "{code}");
        }
        for code in [
            "08006", "53300", "53100", "57P01", "57P03", "57014", "40P01", "40001", "25006",
        ] {
            assert_eq!(classify_postgres(code).0, ErrorKind::Unavailable, "{code}");
        }
        for code in ["42703", "", "é", "x"] {
            assert_eq!(classify_postgres(code).0, ErrorKind::Internal, "{code}");
        }
        // SQLITE_BUSY, SQLITE_BUSY_SNAPSHOT, SQLITE_FULL, SQLITE_IOERR_WRITE
        for code in ["5", "517", "13", "778"] {
            assert_eq!(classify_sqlite(code).0, ErrorKind::Unavailable, "{code}");
        }
        assert_eq!(classify_sqlite("26").0, ErrorKind::Usage);
        assert_eq!(classify_sqlite("nonsense").0, ErrorKind::Internal);
    }

    #[test]
    fn a_full_disk_discards_the_connections() {
        for code in ["13", "778", "7", "9"] {
            assert!(ends_transaction(code), "{code}");
        }
        // BUSY, CONSTRAINT_UNIQUE; PostgreSQL's connection_failure, numeric_value_out_of_range.
        for code in ["5", "2067", "08006", "22003", "00013", ""] {
            assert!(!ends_transaction(code), "{code}");
        }
        assert!(SqlError::Sql(sqlx::Error::InvalidSavePointStatement).breaks_connections());
    }

    #[test]
    fn a_newer_schema_hints_at_an_upgrade() {
        let error = classify(
            MigrateError::VersionMissing(7).into(),
            "postgres://u@h:5432/d",
        );
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(
            error
                .hint_text()
                .is_some_and(|hint| hint.contains("upgrade sessiond"))
        );
    }
}
