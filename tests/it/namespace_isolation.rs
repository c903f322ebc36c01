//! Namespace isolation: the credentials of one namespace (the policies in deploy/) allow everything
//! in it and cannot read, list or claim anything in another.

use sessiond::store::Store;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};

use crate::support::backend::{Backend, Signal, transcript};
use crate::support::files::{append, files_below};
use crate::support::needs_servers;
use crate::support::servers::{Postgres, S3, postgres};
use crate::support::{TempHome, block_on};

const POLICY: &str = include_str!("../../deploy/aws/iam-policy.json");
const ROLES: &str = include_str!("../../deploy/postgres/roles.sql");

/// Two namespaces; the name of one is a prefix of the other.
const NAMESPACES: [&str; 2] = ["team", "team-2"];

/// The policy with the bucket, the prefix of the tests and the namespace filled in.
fn policy(bucket: &str, namespace: &str) -> String {
    let policy = POLICY
        .replace("EXAMPLE-BUCKET", bucket)
        .replace("EXAMPLE-PREFIX", "some/prefix")
        .replace("EXAMPLE-NAMESPACE", namespace);
    assert!(!policy.contains("EXAMPLE"), "{policy}");
    policy
}

fn execute(url: &str, sql: &str) {
    block_on(async {
        let mut connection = PgConnection::connect(url).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
            .execute(&mut connection)
            .await
            .unwrap();
        connection.close().await.unwrap();
    });
}

fn as_role(url: &str, role: &str) -> String {
    let mut url = url::Url::parse(url).unwrap();
    url.set_username(role).unwrap();
    url.into()
}

/// A database with the isolation policies, created in the order of the file.
fn isolated_database(server: &Postgres) -> String {
    let url = server.fresh_database();
    execute(&url, ROLES);
    let owner = Backend::file();
    let home = TempHome::new();
    let ls = owner.run(&home, &["ls", "--index", &as_role(&url, "sessiond_owner")]);
    ls.ok();
    execute(&url, ROLES);
    for namespace in NAMESPACES {
        execute(
            &url,
            &format!("SELECT sessiond_add_namespace('{namespace}')"),
        );
    }
    url
}

struct Tenant {
    backend: Backend,
    home: TempHome,
    lines: String,
}

/// Two namespaces with separate rights on one bucket and one database.
fn tenants(server: &S3, database: &str, bucket: &str) -> [Tenant; 2] {
    NAMESPACES.map(|namespace| {
        let mut backend = Backend::on_server(
            server,
            &server.endpoint,
            bucket,
            &as_role(database, &format!("sessiond_ns_{namespace}")),
        );
        backend.set("AWS_ACCESS_KEY_ID", namespace);
        backend.set("AWS_SECRET_ACCESS_KEY", format!("secret-of-{namespace}"));
        backend.set("SESSIOND_NAMESPACE", namespace);
        Tenant {
            backend,
            home: TempHome::new(),
            lines: format!("{{\"type\":\"user\",\"cwd\":\"/w\",\"text\":\"of {namespace}\"}}\n"),
        }
    })
}

fn accounts(bucket: &str) -> Vec<(String, String, String)> {
    NAMESPACES
        .map(|namespace| {
            (
                namespace.to_owned(),
                format!("secret-of-{namespace}"),
                policy(bucket, namespace),
            )
        })
        .into()
}

needs_servers!(credentials_of_one_namespace_cannot_reach_another);
fn credentials_of_one_namespace_cannot_reach_another() {
    let Some(database) = postgres() else { return };
    let bucket = "walled";
    let Some(server) = S3::start_with(&accounts(bucket)) else {
        return;
    };
    block_on(async {
        server
            .client(&server.endpoint)
            .create_bucket()
            .bucket(bucket)
            .send()
            .await
    })
    .unwrap();
    let database = isolated_database(database);
    // The operator probes the store once. The namespaces only read the result.
    let mut operator = Backend::on_server(
        &server,
        &server.endpoint,
        bucket,
        &as_role(&database, "sessiond_operator"),
    );
    operator.run(&TempHome::new(), &["ls"]).ok();
    let doctor = operator.run(&TempHome::new(), &["doctor"]);
    assert!(
        doctor.out().contains("fencing    enforced by the store"),
        "{}{}",
        doctor.out(),
        doctor.err()
    );

    let tenants = tenants(&server, &database, bucket);
    for Tenant {
        backend,
        home,
        lines,
    } in &tenants
    {
        let mut daemon = backend.daemon(home, &[]);
        append(&transcript(home, "s1"), lines);
        backend.run(home, &["flush", "--wait"]).ok();
        daemon.signal(Signal::TERM);
        assert_eq!(
            daemon.code(),
            Some(0),
            "{}",
            std::fs::read_to_string(home.path().join("daemon.log")).unwrap()
        );
        let other = TempHome::new();
        backend.run(&other, &["restore", "s1"]).ok();
        assert_eq!(
            files_below(&other.home().join(".claude")),
            files_below(&home.home().join(".claude"))
        );
        for command in [
            vec!["label", "s1", "a=b"],
            vec!["checkpoint", "s1", "--name", "here"],
            vec!["show", "s1"],
            vec!["verify", "--all"],
            vec!["reindex"],
            vec!["gc"],
            vec!["fork", "s1"],
            vec!["close", "s1"],
            vec!["stats"],
        ] {
            backend.run(home, &command).ok();
        }
        let rows = backend.run(home, &["ls", "--json"]).ok().json();
        assert_eq!(rows["sessions"].as_array().unwrap().len(), 2, "{rows}");
    }
    for at in 0..tenants.len() {
        // The credentials of one namespace with the name of the other.
        let theirs = NAMESPACES[1 - at];
        let mut thief = self::tenants(&server, &database, bucket)
            .into_iter()
            .nth(at)
            .unwrap()
            .backend;
        thief.set("SESSIOND_NAMESPACE", theirs);
        let elsewhere = TempHome::new();
        for command in [
            vec!["restore", "s1"],
            vec!["pull", "s1", "--to", "copy"],
            vec!["show", "s1"],
            vec!["verify"],
            vec!["rm", "s1", "--yes"],
            vec!["reindex"],
            vec!["gc"],
            vec!["ls"],
        ] {
            thief
                .run(&elsewhere, &command)
                .fails(2, "AccessDenied", "s3:GetObject");
        }
        assert_eq!(
            files_below(&elsewhere.home()).len(),
            0,
            "nothing was brought"
        );
        // The database returns none of its rows and accepts no writes.
        let sql = format!(
            "INSERT INTO labels (namespace, agent, session, name, value) VALUES ('{theirs}', 'claude-code', 's1', 'x', 'y')"
        );
        let refused = block_on(async {
            let role = as_role(&database, &format!("sessiond_ns_{}", NAMESPACES[at]));
            let mut connection = PgConnection::connect(&role).await.unwrap();
            let seen = sqlx::query("SELECT namespace::text FROM sessions")
                .fetch_all(&mut connection)
                .await
                .unwrap();
            let seen: Vec<String> = seen.iter().map(|row| row.get(0)).collect();
            assert_eq!(seen, [NAMESPACES[at]; 2]);
            let moved = sqlx::query(AssertSqlSafe(format!(
                "UPDATE labels SET value = 'stolen' WHERE namespace = '{theirs}'"
            )));
            assert_eq!(
                moved
                    .execute(&mut connection)
                    .await
                    .unwrap()
                    .rows_affected(),
                0
            );
            sqlx::query(AssertSqlSafe(sql))
                .execute(&mut connection)
                .await
                .unwrap_err()
                .to_string()
        });
        assert!(refused.contains("row-level security"), "{refused}");
        // A writer in the other namespace writes nothing and reports why.
        let mut daemon = thief.daemon(&elsewhere, &[]);
        append(&transcript(&elsewhere, "s9"), "{\"text\":\"mine\"}\n");
        thief
            .run(&elsewhere, &["flush", "--wait"])
            .fails(2, "AccessDenied", "s3:GetObject");
        daemon.kill();
    }
    // The sessions of each are unchanged; the operator sees both.
    for (Tenant { lines, .. }, namespace) in tenants.iter().zip(NAMESPACES) {
        operator.set("SESSIOND_NAMESPACE", namespace);
        let home = TempHome::new();
        operator.run(&home, &["verify", "--all"]).ok();
        let listed = operator.run(&home, &["ls", "--json"]).ok().json();
        assert_eq!(listed["sessions"].as_array().unwrap().len(), 2, "{listed}");
        operator.run(&home, &["pull", "s1", "--to", "copy"]).ok();
        assert_eq!(
            std::fs::read_to_string(home.home().join("copy/projects/-work-app/s1.jsonl")).unwrap(),
            *lines
        );
    }
}

/// AWS returns 403 for a missing key if the caller may list only some prefixes.
#[tokio::test]
async fn a_denied_get_of_a_missing_key_falls_back_to_a_listing() {
    use sessiond::store::s3::{Credentials, S3Settings, S3Store};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut request = Vec::new();
            while !request.windows(4).any(|end| end == b"\r\n\r\n") {
                let mut piece = [0; 4096];
                match socket.read(&mut piece).await {
                    Ok(got) if got > 0 => request.extend_from_slice(&piece[..got]),
                    _ => return,
                }
            }
            let request = String::from_utf8_lossy(&request).into_owned();
            let found = |key: &str| {
                format!(
                    "<ListBucketResult><IsTruncated>false</IsTruncated>{key}</ListBucketResult>"
                )
            };
            let (status, body) = match request.lines().next().unwrap() {
                line if line.contains("prefix=there") => (
                    "200 OK",
                    found("<Contents><Key>there</Key><Size>1</Size></Contents>"),
                ),
                line if line.contains("prefix=thither") => (
                    "200 OK",
                    found("<Contents><Key>thither-more</Key><Size>1</Size></Contents>"),
                ),
                line if line.contains("prefix=missing") => ("200 OK", found("")),
                _ => (
                    "403 Forbidden",
                    "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
                        .to_owned(),
                ),
            };
            let answer = format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/xml\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            socket.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    let credentials = Some(Credentials {
        access_key: "key".into(),
        secret_key: "secret".into(),
    });
    let settings = S3Settings {
        endpoint: Some(endpoint),
        region: Some("us-east-1".into()),
        credentials,
        ..S3Settings::new("bucket")
    };
    let store = S3Store::connect(settings).await.unwrap();
    assert_eq!(store.get("missing").await.unwrap(), None);
    assert_eq!(store.get("thither").await.unwrap(), None);
    for denied in ["there", "another"] {
        let error = store.get(denied).await.unwrap_err();
        assert!(
            error.kind() == sessiond::error::ErrorKind::Usage
                && error.to_string().contains("AccessDenied"),
            "{error}"
        );
    }
}
