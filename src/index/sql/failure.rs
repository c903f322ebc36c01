//! What can go wrong with a database, and what the caller should do about each.
//!
//! Owns the one classification of the databases' errors. Does not own trying again.

use sqlx::migrate::MigrateError;

use crate::error::{Error, ErrorKind};

/// A failure inside a call, before it is known to the rest of the program.
#[derive(Debug)]
pub(super) enum Fault {
    /// The database, or the way to it.
    Sql(sqlx::Error),
    /// Bringing the schema up to date.
    Migrate(MigrateError),
    /// The whole call took too long.
    Slow,
    /// Already said in our words.
    Ours(Error),
}

impl From<sqlx::Error> for Fault {
    fn from(error: sqlx::Error) -> Self {
        Fault::Sql(error)
    }
}

impl From<MigrateError> for Fault {
    fn from(error: MigrateError) -> Self {
        Fault::Migrate(error)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Ours(error)
    }
}

impl Fault {
    /// Whether the connections cannot be trusted any more.
    pub(super) fn breaks_connections(&self) -> bool {
        use sqlx::Error as E;
        match self {
            Fault::Slow => true,
            Fault::Sql(error) => {
                matches!(
                    error,
                    E::Io(_)
                        | E::Tls(_)
                        | E::Protocol(_)
                        | E::PoolTimedOut
                        | E::PoolClosed
                        | E::WorkerCrashed
                ) || matches!(error, E::InvalidSavePointStatement | E::BeginFailed)
                    || matches!(error, E::Database(error) if error.code().is_some_and(|code| ends_transactions(&code)))
            }
            Fault::Migrate(_) | Fault::Ours(_) => false,
        }
    }
}

/// NOMEM, INTERRUPT, IOERR, FULL: SQLite may roll back by itself then, and the driver, which still counts a transaction,
/// never begins another on that connection. No code of PostgreSQL's is so short.
fn ends_transactions(code: &str) -> bool {
    code.len() < 5
        && matches!(
            code.parse::<u32>().map(|code| code & 0xff),
            Ok(7 | 9 | 10 | 13)
        )
}

const DOWN: &str = "see that the database runs and can be reached; streaming, and restoring by id, go on without it";
const FULL: &str =
    "free some space on the database's disk; streaming, and restoring by id, go on without it";
const LOGIN: &str =
    "mend user, password or database name in the index URL: postgres://USER:PASSWORD@HOST/DATABASE";
const RIGHTS: &str =
    "give that role the rights, or make it the database's owner: ALTER DATABASE … OWNER TO …";
const NEWER: &str = "upgrade sessiond: a newer one has changed this index";
const STRANGE: &str = "give sessiond a database (or file) of its own, then run: sessiond reindex";

/// Says what the caller does about a fault. `address` holds no secret.
pub(super) fn classify(fault: Fault, address: &str) -> Error {
    let (kind, hint, cause): (
        ErrorKind,
        Option<&str>,
        Option<Box<dyn std::error::Error + Send + Sync>>,
    ) = match fault {
        Fault::Ours(error) => return error.context(format_args!("index {address}")),
        Fault::Slow => {
            return Error::unavailable(format!("index {address}: no answer in time")).hint(DOWN);
        }
        Fault::Sql(error)
        | Fault::Migrate(MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _)) =>
        {
            let (kind, hint) = of_sql(&error);
            (kind, hint, Some(said(error)))
        }
        Fault::Migrate(error) => {
            let (kind, hint) = of_migration(&error);
            (kind, hint, Some(Box::new(error)))
        }
    };
    let mut error = Error::new(kind, format!("index {address}"));
    if let Some(cause) = cause {
        error = error.caused_by(cause);
    }
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// What a database said, with its code. The driver adds a line, which is one of the server's own source.
fn said(error: sqlx::Error) -> Box<dyn std::error::Error + Send + Sync> {
    match error {
        sqlx::Error::Database(error) => match error.code() {
            Some(code) => format!("{} (code {code})", error.message()).into(),
            None => error.message().into(),
        },
        error => Box::new(error),
    }
}

fn of_migration(error: &MigrateError) -> (ErrorKind, Option<&'static str>) {
    match error {
        MigrateError::VersionMissing(_) | MigrateError::VersionTooNew(..) => {
            (ErrorKind::Usage, Some(NEWER))
        }
        MigrateError::VersionMismatch(_) | MigrateError::Dirty(_) => {
            (ErrorKind::Usage, Some(STRANGE))
        }
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => of_sql(error),
        _ => (ErrorKind::Internal, None),
    }
}

fn of_sql(error: &sqlx::Error) -> (ErrorKind, Option<&'static str>) {
    use sqlx::Error as E;
    match error {
        E::Database(error) => match error.code() {
            Some(code)
                if error
                    .try_downcast_ref::<sqlx::postgres::PgDatabaseError>()
                    .is_some() =>
            {
                of_postgres(&code)
            }
            Some(code) => of_sqlite(&code),
            None => (ErrorKind::Internal, None),
        },
        E::Io(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed => {
            (ErrorKind::Unavailable, Some(DOWN))
        }
        // A transaction that ended without the driver's knowledge; the next connection knows of none.
        E::InvalidSavePointStatement | E::BeginFailed => (ErrorKind::Unavailable, Some(DOWN)),
        // Bytes that are no answer of a database: a proxy between, or a reply cut in the middle.
        E::Protocol(_) => (ErrorKind::Unavailable, Some(DOWN)),
        E::Tls(_) => (
            ErrorKind::Usage,
            Some(
                "see sslmode and sslrootcert in the index URL: postgres://…?sslmode=verify-full&sslrootcert=FILE",
            ),
        ),
        E::Configuration(_) => (ErrorKind::Usage, Some(super::connect::FORMS)),
        E::ColumnDecode { .. } | E::Decode(_) => (
            ErrorKind::Corrupt,
            Some("make the rows again: sessiond reindex"),
        ),
        _ => (ErrorKind::Internal, None),
    }
}

/// SQLSTATE codes; the first two characters are the class.
fn of_postgres(code: &str) -> (ErrorKind, Option<&'static str>) {
    match code {
        // invalid_catalog_name, invalid_schema_name
        "3D000" | "3F000" => (ErrorKind::Usage, Some(LOGIN)),
        // insufficient_privilege
        "42501" => (ErrorKind::Usage, Some(RIGHTS)),
        // duplicate_table, duplicate_object: tables of the same name that are not ours.
        "42P07" | "42710" => (ErrorKind::Usage, Some(STRANGE)),
        "53100" => (ErrorKind::Unavailable, Some(FULL)),
        // read_only_sql_transaction: a standby; after a failover another one answers. idle_in_transaction_session_timeout.
        "25006" | "25P03" => (ErrorKind::Unavailable, Some(DOWN)),
        // lock_not_available
        "55P03" => (ErrorKind::Unavailable, Some(DOWN)),
        // data_corrupted, index_corrupted
        "XX001" | "XX002" => (ErrorKind::Corrupt, None),
        _ => match code.get(..2) {
            Some("28") => (ErrorKind::Usage, Some(LOGIN)),
            // Connection, rollback, resources, operator intervention, system.
            Some("08" | "40" | "53" | "57" | "58") => (ErrorKind::Unavailable, Some(DOWN)),
            _ => (ErrorKind::Internal, None),
        },
    }
}

/// SQLite's result codes; the low byte is the primary one.
fn of_sqlite(code: &str) -> (ErrorKind, Option<&'static str>) {
    match code.parse::<u32>().map(|code| code & 0xff) {
        // PERM, READONLY, AUTH
        Ok(3 | 8 | 23) => (
            ErrorKind::Usage,
            Some("run sessiond as the user that owns the index file, or mend its permissions"),
        ),
        // BUSY, LOCKED, NOMEM, INTERRUPT, IOERR, CANTOPEN, PROTOCOL
        Ok(5 | 6 | 7 | 9 | 10 | 14 | 15) => (
            ErrorKind::Unavailable,
            Some(
                "another process holds the index file, or its disk fails; streaming, and restoring by id, go on without it",
            ),
        ),
        // FULL
        Ok(13) => (ErrorKind::Unavailable, Some(FULL)),
        // CORRUPT
        Ok(11) => (
            ErrorKind::Corrupt,
            Some("move the index file away, then run: sessiond reindex"),
        ),
        // NOTADB
        Ok(26) => (ErrorKind::Usage, Some(STRANGE)),
        _ => (ErrorKind::Internal, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_unavailable_and_what_may_not_is_usage() {
        for code in ["28P01", "28000", "3D000", "42501", "42P07"] {
            assert_eq!(of_postgres(code).0, ErrorKind::Usage, "{code}");
        }
        for code in [
            "08006", "53300", "53100", "57P01", "57P03", "57014", "40P01", "40001", "25006",
        ] {
            assert_eq!(of_postgres(code).0, ErrorKind::Unavailable, "{code}");
        }
        for code in ["42703", "", "é", "x"] {
            assert_eq!(of_postgres(code).0, ErrorKind::Internal, "{code}");
        }
        // SQLITE_BUSY, SQLITE_BUSY_SNAPSHOT, SQLITE_FULL, SQLITE_IOERR_WRITE
        for code in ["5", "517", "13", "778"] {
            assert_eq!(of_sqlite(code).0, ErrorKind::Unavailable, "{code}");
        }
        assert_eq!(of_sqlite("26").0, ErrorKind::Usage);
        assert_eq!(of_sqlite("nonsense").0, ErrorKind::Internal);
    }

    #[test]
    fn a_full_disk_leaves_no_connection_with_a_transaction_that_is_none() {
        for code in ["13", "778", "7", "9"] {
            assert!(ends_transactions(code), "{code}");
        }
        // BUSY, CONSTRAINT_UNIQUE; PostgreSQL's connection_failure, numeric_value_out_of_range.
        for code in ["5", "2067", "08006", "22003", "00013", ""] {
            assert!(!ends_transactions(code), "{code}");
        }
        assert!(Fault::Sql(sqlx::Error::InvalidSavePointStatement).breaks_connections());
    }

    #[test]
    fn a_newer_schema_asks_for_an_upgrade() {
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
