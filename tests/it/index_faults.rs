//! Index errors: a wrong, unreachable or foreign database.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sessiond::error::{Error, ErrorKind};
use sessiond::index::sql::SqlIndex;
use sessiond::index::{Index, RecordOutcome};
use sqlx::Connection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::index_contract::{entry, log, postgres_database, sqlite_database};
use crate::support::needs_servers;
use crate::support::servers::{Postgres, postgres};

async fn ping(url: &str) -> Error {
    let index = SqlIndex::open(url).expect("opening connects to nothing");
    assert!(!format!("{index:?}").contains("wrong-password"));
    assert!(!index.address().contains("wrong-password"));
    index.ping().await.expect_err("it cannot answer")
}

#[test]
fn an_invalid_index_url_is_rejected_and_not_printed() {
    for bad in [
        "",
        "index.db",
        "/tmp/index.db",
        "mysql://u:wrong-password@h/d",
        "sqlite:index.db",
        "sqlite://index.db",
        "sqlite:///",
        "sqlite:///a.db?mode=ro",
        "postgres://u:wrong-password#@h:port/d",
        "postgres://u:wrong-password@h/d?sslmode=wrong-password",
        "sqlite:///%ff",
    ] {
        let error = SqlIndex::open(bad).expect_err(bad);
        assert_eq!(error.kind(), ErrorKind::Usage, "{bad}");
        let hint = error.hint_text().unwrap_or_default();
        assert!(
            hint.contains("sqlite:///") && hint.contains("postgres://"),
            "{bad}: {hint}"
        );
        assert!(
            !format!("{error} {error:?}").contains("wrong-password"),
            "{error:?}"
        );
    }
}

#[test]
fn an_index_address_contains_no_secret() {
    for (url, address) in [
        (
            "postgres://u:wrong-password@h:1/d?sslmode=require",
            "postgres://u@h:1/d",
        ),
        (
            "postgresql://u@h/d?password=wrong-password",
            "postgres://u@h:5432/d",
        ),
        (
            "postgres:///d?host=/run/pg&user=u&password=wrong-password",
            "postgres://u@/run/pg:5432/d",
        ),
        ("sqlite:///a%20b/i.db", "sqlite:///a b/i.db"),
    ] {
        assert_eq!(SqlIndex::open(url).unwrap().address(), address);
    }
}

needs_servers!(async a_wrong_password_is_a_usage_error);
async fn a_wrong_password_is_a_usage_error() {
    let Some(server) = postgres() else { return };
    let error = ping(&server.url_with_password("wrong-password")).await;
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.hint_text().is_some());
    assert!(
        !format!("{error} {error:?}").contains("wrong-password"),
        "{error:?}"
    );
}

needs_servers!(async an_unknown_database_or_role_is_a_usage_error);
async fn an_unknown_database_or_role_is_a_usage_error() {
    let Some(database) = postgres_database() else {
        return;
    };
    let unknown = ping(&database.url.replace("/t", "/no-such-t")).await;
    assert_eq!(unknown.kind(), ErrorKind::Usage, "{unknown}");
    let role = ping(&database.url.replace("postgres@", "nobody:wrong-password@")).await;
    assert_eq!(role.kind(), ErrorKind::Usage, "{role}");
}

needs_servers!(async missing_privileges_are_a_usage_error);
async fn missing_privileges_are_a_usage_error() {
    let Some(server) = postgres() else { return };
    let url = server
        .fresh_database()
        .replace("postgres@", &format!("locked:{}@", Postgres::PASSWORD));
    let error = ping(&url).await;
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.to_string().contains("permission denied"), "{error}");
}

#[tokio::test]
async fn a_refused_port_is_unavailable_at_once() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let began = Instant::now();
    let error = ping(&format!("postgres://u:wrong-password@127.0.0.1:{port}/d")).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(
        error
            .to_string()
            .contains(&format!("postgres://u@127.0.0.1:{port}/d"))
            && error.hint_text().is_some(),
        "{error}"
    );
    assert!(began.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn a_server_that_never_answers_is_unavailable_in_time() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let began = Instant::now();
    let error = ping(&format!(
        "postgres://u@{}/d?sslmode=disable",
        silent.local_addr().unwrap()
    ))
    .await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(began.elapsed() < Duration::from_secs(8));
}

needs_servers!(async a_database_that_comes_back_is_used_again);
async fn a_database_that_comes_back_is_used_again() {
    let Some(server) = Postgres::start_private() else {
        return;
    };
    let index = SqlIndex::open(&server.fresh_database()).unwrap();
    let log = log("s1");
    for seq in 1..=3 {
        assert_eq!(
            index
                .record(&entry(&log, seq * 2 - 1, vec![]))
                .await
                .unwrap(),
            RecordOutcome::Recorded
        );
        server.stop();
        for _ in 0..2 {
            let error = index
                .record(&entry(&log, seq * 2, vec![]))
                .await
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        }
        server.start();
        assert_eq!(
            index.record(&entry(&log, seq * 2, vec![])).await.unwrap(),
            RecordOutcome::Recorded
        );
    }
    // Restarted between two calls: no call fails.
    server.stop();
    server.start();
    assert_eq!(
        index.record(&entry(&log, 7, vec![])).await.unwrap(),
        RecordOutcome::Recorded
    );
}

/// Forwards bytes between a client and `server` until `held`, then keeps the connections open
/// without forwarding.
async fn proxy(server: String, held: Arc<AtomicBool>) -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (server, held) = (
                tokio::net::TcpStream::connect(&server).await.unwrap(),
                held.clone(),
            );
            // A held connection stays dead, like one that a firewall dropped.
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            for (mut from, mut to) in [(from_client, to_server), (from_server, to_client)] {
                let held = held.clone();
                tokio::spawn(async move {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut bytes).await {
                        if held.load(Ordering::SeqCst) {
                            std::future::pending::<()>().await;
                        }
                        to.write_all(&bytes[..count]).await.unwrap();
                    }
                });
            }
        }
    });
    port
}

needs_servers!(async hanging_connections_are_abandoned);
async fn hanging_connections_are_abandoned() {
    let Some(database) = postgres_database() else {
        return;
    };
    let held = Arc::new(AtomicBool::new(false));
    let url = url::Url::parse(&database.url).unwrap();
    let port = proxy(format!("127.0.0.1:{}", url.port().unwrap()), held.clone()).await;
    let index = SqlIndex::open(&format!(
        "postgres://postgres@127.0.0.1:{port}{}?sslmode=disable",
        url.path()
    ))
    .unwrap();
    assert_eq!(
        index.record(&entry(&log("s1"), 1, vec![])).await.unwrap(),
        RecordOutcome::Recorded
    );
    held.store(true, Ordering::SeqCst);
    let began = Instant::now();
    let (two, three) = (entry(&log("s1"), 2, vec![]), entry(&log("s2"), 1, vec![]));
    let (one, other) = tokio::join!(index.record(&two), index.record(&three));
    assert_eq!(
        (one.unwrap_err().kind(), other.unwrap_err().kind()),
        (ErrorKind::Unavailable, ErrorKind::Unavailable)
    );
    assert!(began.elapsed() < Duration::from_secs(17));
    held.store(false, Ordering::SeqCst);
    assert_eq!(index.record(&two).await.unwrap(), RecordOutcome::Recorded);
}

needs_servers!(async a_role_with_table_privileges_is_sufficient);
async fn a_role_with_table_privileges_is_sufficient() {
    let (Some(server), Some(database)) = (postgres(), postgres_database()) else {
        return;
    };
    database.open().ping().await.unwrap();
    drivers();
    let mut other = sqlx::AnyConnection::connect(&database.url).await.unwrap();
    sqlx::raw_sql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO locked")
        .execute(&mut other)
        .await
        .unwrap();
    let (url, name) = (
        server.url_with_password("right-password"),
        database.url.rsplit_once('/').unwrap().1,
    );
    let index = SqlIndex::open(&format!("{}/{name}", url.rsplit_once('/').unwrap().0)).unwrap();
    assert_eq!(
        index.record(&entry(&log("s1"), 1, vec![])).await.unwrap(),
        RecordOutcome::Recorded
    );
}

#[tokio::test]
async fn the_sqlite_file_is_private() {
    let database = sqlite_database();
    database.open().ping().await.unwrap();
    let path = database.url.trim_start_matches("sqlite://");
    let mode =
        |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(path.as_ref()), 0o600);
    assert_eq!(mode(std::path::Path::new(path).parent().unwrap()), 0o700);
}

#[tokio::test]
async fn an_sqlite_path_may_contain_any_character() {
    let directory = tempfile::tempdir().unwrap();
    let index = SqlIndex::open(&format!(
        "sqlite://{}/a%20b%25%3F%23ä.db",
        directory.path().display()
    ))
    .unwrap();
    index.ping().await.unwrap();
    assert!(directory.path().join("a b%?#ä.db").is_file());
}

#[tokio::test]
async fn an_sqlite_file_that_cannot_be_created_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path().display();
    std::fs::write(
        directory.path().join("file"),
        "this is no database, and long enough to be seen as none".repeat(20),
    )
    .unwrap();
    std::fs::create_dir(directory.path().join("directory.db")).unwrap();
    for bad in [
        format!("sqlite://{here}/directory.db"),
        format!("sqlite://{here}/file/index.db"),
        format!("sqlite://{here}/file"),
    ] {
        let error = ping(&bad).await;
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.hint_text().is_some(), "{error}");
    }
    // Not even root may write there.
    let error = ping("sqlite:///proc/sessiond/index.db").await;
    assert!(
        matches!(error.kind(), ErrorKind::Usage | ErrorKind::Unavailable),
        "{error}"
    );
}

#[tokio::test]
async fn a_directory_that_becomes_writable_is_used() {
    let directory = tempfile::tempdir().unwrap();
    let blocked = directory.path().join("state");
    std::fs::write(&blocked, "").unwrap();
    let index = SqlIndex::open(&format!("sqlite://{}/index.db", blocked.display())).unwrap();
    index.ping().await.unwrap_err();
    std::fs::remove_file(&blocked).unwrap();
    index.ping().await.unwrap();
}

#[tokio::test]
async fn a_locked_sqlite_file_is_unavailable() {
    let database = sqlite_database();
    let index = database.open();
    index.ping().await.unwrap();
    let mut other = sqlx::SqliteConnection::connect(&database.url)
        .await
        .unwrap();
    sqlx::raw_sql("BEGIN EXCLUSIVE")
        .execute(&mut other)
        .await
        .unwrap();
    let error = index
        .record(&entry(&log("s1"), 1, vec![]))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    sqlx::raw_sql("COMMIT").execute(&mut other).await.unwrap();
    assert_eq!(
        index.record(&entry(&log("s1"), 1, vec![])).await.unwrap(),
        RecordOutcome::Recorded
    );
}

needs_servers!(async a_newer_schema_asks_for_an_upgrade);
async fn a_newer_schema_asks_for_an_upgrade() {
    for database in [Some(sqlite_database()), postgres_database()]
        .into_iter()
        .flatten()
    {
        database.open().ping().await.unwrap();
        drivers();
        let mut other = sqlx::AnyConnection::connect(&database.url).await.unwrap();
        let sql = "INSERT INTO sessiond_migrations (version, description, success, checksum, execution_time) SELECT 999, 'newer', success, checksum, 0 FROM sessiond_migrations WHERE version = 1";
        sqlx::raw_sql(sql).execute(&mut other).await.unwrap();
        let error = database.open().ping().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(
            error.hint_text().unwrap().contains("upgrade sessiond"),
            "{error}"
        );
    }
}

needs_servers!(async foreign_tables_are_left_alone);
async fn foreign_tables_are_left_alone() {
    for database in [Some(sqlite_database()), postgres_database()]
        .into_iter()
        .flatten()
    {
        if let Some(path) = database.url.strip_prefix("sqlite://") {
            std::fs::create_dir_all(std::path::Path::new(path).parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        database.open().address();
        drivers();
        let mut other = sqlx::AnyConnection::connect(&database.url).await.unwrap();
        sqlx::raw_sql("CREATE TABLE entries (theirs TEXT)")
            .execute(&mut other)
            .await
            .unwrap();
        let index = database.open();
        index.ping().await.unwrap_err();
        // Nothing is created; without the foreign tables it works.
        sqlx::raw_sql("DROP TABLE entries")
            .execute(&mut other)
            .await
            .unwrap();
        index.ping().await.unwrap();
    }
}

/// Installs the drivers once; the index may have done it already.
fn drivers() {
    let _ = sqlx::any::install_drivers(&[sqlx::sqlite::any::DRIVER, sqlx::postgres::any::DRIVER]);
}
