//! OpenCode stores its sessions in a database: rows are uploaded line by line and restored as the
//! same rows; secrets in other tables stay behind.

use std::path::PathBuf;

use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row, SqliteConnection};

use crate::agents::{contains_text, objects};
use crate::support::backend::{Backend, Ran, eventually};
use crate::support::files::append;
use crate::support::on_each_backend;
use crate::support::{TempHome, block_on};

const SECRET: &str = "sk-not-for-the-bucket";

/// The relevant tables, with the columns that are read by name and a few more.
const SCHEMA: &str = "
    CREATE TABLE project (id TEXT PRIMARY KEY, worktree TEXT NOT NULL, time_updated INTEGER NOT NULL);
    CREATE TABLE session (id TEXT PRIMARY KEY, project_id TEXT NOT NULL, parent_id TEXT, directory TEXT NOT NULL, title TEXT NOT NULL,
        version TEXT NOT NULL, cost REAL DEFAULT 0 NOT NULL, time_updated INTEGER NOT NULL);
    CREATE TABLE message (id TEXT PRIMARY KEY, session_id TEXT NOT NULL, time_created INTEGER NOT NULL, time_updated INTEGER NOT NULL, data TEXT NOT NULL);
    CREATE TABLE part (id TEXT PRIMARY KEY, message_id TEXT NOT NULL, session_id TEXT NOT NULL, time_created INTEGER NOT NULL,
        time_updated INTEGER NOT NULL, data TEXT NOT NULL);
    CREATE INDEX part_session_idx ON part (session_id);
    CREATE TABLE todo (session_id TEXT NOT NULL, content TEXT NOT NULL, position INTEGER NOT NULL, time_updated INTEGER NOT NULL,
        CONSTRAINT todo_pk PRIMARY KEY (session_id, position));
    CREATE TABLE event_sequence (aggregate_id TEXT PRIMARY KEY, seq INTEGER NOT NULL);
    CREATE TABLE credential (id TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE account (id TEXT PRIMARY KEY, access_token TEXT NOT NULL);
    CREATE TABLE session_share (session_id TEXT PRIMARY KEY, secret TEXT NOT NULL);
    CREATE TABLE migration (id TEXT PRIMARY KEY, time_completed INTEGER NOT NULL);
    INSERT INTO migration VALUES ('first', 1), ('second', 2);
    INSERT INTO project VALUES ('global', '/', 1)";

fn data(home: &TempHome) -> PathBuf {
    home.home().join(".local/share/opencode")
}

/// A running OpenCode: its connection stays open, and its writes stay in the WAL.
struct Database(SqliteConnection);

impl Database {
    fn at(home: &TempHome) -> Database {
        std::fs::create_dir_all(data(home)).unwrap();
        let options = SqliteConnectOptions::new()
            .filename(data(home).join("opencode.db"))
            .create_if_missing(true)
            .foreign_keys(false);
        Database(block_on(options.journal_mode(SqliteJournalMode::Wal).connect()).unwrap())
    }

    /// Creates a database that contains secrets.
    fn create(home: &TempHome) -> Database {
        let mut database = Database::at(home);
        SCHEMA.split(';').for_each(|sql| database.run(sql));
        database.run(&format!("INSERT INTO credential VALUES ('c', '{SECRET}')"));
        database.run(&format!("INSERT INTO account VALUES ('a', '{SECRET}')"));
        std::fs::write(data(home).join("auth.json"), SECRET).unwrap();
        database
    }

    fn run(&mut self, sql: &str) {
        block_on(sqlx::query(AssertSqlSafe(sql.to_owned())).execute(&mut self.0)).unwrap();
    }

    fn session(&mut self, id: &str, parent: Option<&str>) {
        let parent = parent.map_or("NULL".to_owned(), |parent| format!("'{parent}'"));
        self.run(&format!("INSERT INTO session VALUES ('{id}', 'global', {parent}, '/work/app', 'a title', '1.18.33', 0.0, 1)"));
        self.run(&format!("INSERT INTO event_sequence VALUES ('{id}', 0)"));
        self.run(&format!(
            "INSERT INTO session_share VALUES ('{id}', '{SECRET}')"
        ));
    }

    fn changed(&mut self, id: &str, at: u32) {
        self.run(&format!(
            "UPDATE event_sequence SET seq = {at} WHERE aggregate_id = '{id}'"
        ));
    }

    /// A turn: a prompt, a tool, an answer.
    fn turn(&mut self, id: &str, n: u32) {
        let at = u64::from(n) * 1000 + 1_794_836_000_000;
        // Message IDs do not contain the session ID.
        let short = id.trim_start_matches("ses_");
        let mut put = |table: &str, key: &str, more: &str, data: &str| {
            self.run(&format!(
                "INSERT INTO {table} VALUES ('{key}', {more}, {at}, {at}, '{data}')"
            ));
        };
        for (role, part, data) in [
            ("user", 0, format!(r#"{{"type":"text","text":"prompt {n}"}}"#)),
            (
                "assistant",
                1,
                format!(
                    r#"{{"type":"tool","tool":"bash","callID":"c{n}","state":{{"status":"completed","input":{{"command":"ls"}},"output":"é\n{n}"}}}}"#
                ),
            ),
            ("assistant", 2, format!(r#"{{"type":"text","text":"answer {n}","time":{{"start":1,"end":2}}}}"#)),
            (
                "assistant",
                3,
                r#"{"type":"step-finish","reason":"stop","tokens":{"input":100,"output":10,"reasoning":1,"cache":{"read":5,"write":6}}}"#
                    .to_owned(),
            ),
        ] {
            let message = format!("msg_{short}_{n}_{role}");
            if part < 2 {
                put("message", &message, &format!("'{id}'"), &format!(r#"{{"role":"{role}","modelID":"m"}}"#));
            }
            put("part", &format!("prt_{short}_{n}_{part}"), &format!("'{message}', '{id}'"), &data);
        }
        self.changed(id, n * 10);
    }

    /// Every row of the tables of sessions, as text.
    fn rows(&mut self) -> Vec<String> {
        let tables = [
            ("project", "id, worktree"),
            ("session", "*"),
            ("message", "*"),
            ("part", "*"),
            ("todo", "*"),
            ("migration", "*"),
        ];
        let mut all = Vec::new();
        for (table, columns) in tables {
            let found = block_on(
                sqlx::query(AssertSqlSafe(format!(
                    "SELECT {columns} FROM {table} ORDER BY 1, 2"
                )))
                .fetch_all(&mut self.0),
            )
            .unwrap();
            for row in found {
                let values = (0..row.len()).map(|at| {
                    row.try_get::<Option<String>, _>(at)
                        .map(|text| format!("{text:?}"))
                        .or_else(|_| row.try_get::<i64, _>(at).map(|n| n.to_string()))
                        .unwrap_or_else(|_| row.get::<f64, _>(at).to_string())
                });
                all.push(format!(
                    "{table} {}",
                    values.collect::<Vec<_>>().join(" | ")
                ));
            }
        }
        all
    }

    fn count(&mut self, table: &str) -> i64 {
        block_on(
            sqlx::query_scalar(AssertSqlSafe(format!("SELECT count(*) FROM {table}")))
                .fetch_one(&mut self.0),
        )
        .unwrap()
    }

    fn close(self) {
        block_on(self.0.close()).unwrap();
    }
}

/// A home whose session `ses_a` with this number of turns is stored.
fn stored(turns: u32) -> (Backend, TempHome, Database) {
    let mut backend = Backend::file();
    backend.set("SESSIOND_AGENT", "opencode");
    let home = TempHome::new();
    let mut database = Database::create(&home);
    database.session("ses_a", None);
    (1..=turns).for_each(|turn| database.turn("ses_a", turn));
    backend.run(&home, &["run", "--", "true"]).ok();
    (backend, home, database)
}

fn raw_bytes(ran: Ran) -> u64 {
    ran.ok().json()["sessions"][0]["raw_bytes"]
        .as_u64()
        .unwrap()
}

on_each_backend!(an_opencode_session_restores_row_by_row_without_secrets);
fn an_opencode_session_restores_row_by_row_without_secrets(mut backend: Backend) {
    backend.set("SESSIOND_AGENT", "opencode");
    let home = TempHome::new();
    let mut database = Database::create(&home);
    database.session("ses_a", None);
    let mut daemon = backend.daemon(&home, &[]);
    database.turn("ses_a", 1);
    database.session("ses_child", Some("ses_a"));
    database.turn("ses_child", 2);
    database.run("INSERT INTO todo VALUES ('ses_a', 'first', 0, 1), ('ses_a', 'second', 1, 1)");
    database.changed("ses_a", 99);
    backend.run(&home, &["flush", "--wait"]).ok();
    let sessions = || backend.run(&home, &["ls", "--json"]).ok().json()["sessions"].clone();
    eventually("the index knows the turn", || sessions()[0]["turns"] == 1);
    let row = sessions();
    assert_eq!(
        row.as_array().unwrap().len(),
        1,
        "a sub-agent's session belongs to the one that started it: {row}"
    );
    assert_eq!(
        (row[0]["id"].as_str(), row[0]["cwd"].as_str()),
        (Some("ses_a"), Some("/work/app")),
        "{row}"
    );
    let shipped = row[0]["raw_bytes"].as_u64().unwrap();

    // Only changes are uploaded: a new row, a changed row, a deleted row.
    database.run(r#"UPDATE part SET data = '{"type":"text","text":"better","time":{"end":3}}', time_updated = 1794836009000 WHERE id = 'prt_a_1_2'"#);
    database.run("DELETE FROM todo WHERE position = 1");
    database.changed("ses_a", 100);
    backend.run(&home, &["flush", "--wait"]).ok();
    eventually("the index knows the change", || {
        raw_bytes(backend.run(&home, &["ls", "--json"])) > shipped
    });
    let more = raw_bytes(backend.run(&home, &["ls", "--json"])) - shipped;
    assert!(more < 800, "{more} bytes for two rows");
    daemon.kill();

    let other = TempHome::new();
    backend.run(&other, &["restore", "ses_a"]).ok();
    let mut restored = Database::at(&other);
    assert_eq!(restored.rows(), database.rows(), "on {}", backend.name);
    for table in ["credential", "account", "session_share"] {
        assert_eq!(restored.count(table), 0, "{table}");
    }
    assert!(!data(&other).join("auth.json").exists());

    // It continues there; restored rows are not uploaded again.
    let before = raw_bytes(backend.run(&other, &["ls", "--json"]));
    restored.turn("ses_a", 3);
    backend.run(&other, &["run", "--", "true"]).ok();
    let after = raw_bytes(backend.run(&other, &["ls", "--json"]));
    assert!(
        after > before && after - before < 2500,
        "{} bytes for a turn",
        after - before
    );
    let third = TempHome::new();
    backend.run(&third, &["restore", "ses_a"]).ok();
    assert_eq!(Database::at(&third).rows(), restored.rows());
    if backend.name == "file+sqlite" {
        let objects = objects(&backend.path().join("bucket"));
        assert!(
            objects
                .iter()
                .any(|object| contains_text(object, "answer 3")),
            "the objects are read"
        );
        assert!(
            !objects.iter().any(|object| contains_text(object, SECRET)),
            "a secret is in the bucket"
        );
    }
}

#[test]
fn local_opencode_rows_are_never_overwritten() {
    let (backend, _home, mut database) = stored(1);
    let stored = database.rows();

    let other = TempHome::new();
    let mut local = Database::create(&other);
    local.session("ses_a", None);
    local.turn("ses_a", 7);
    local.session("ses_b", None);
    local.turn("ses_b", 8);
    let before = local.rows();
    backend
        .run(&other, &["restore", "ses_a"])
        .fails(7, "local file", "--force");
    assert_eq!(local.rows(), before);
    backend.run(&other, &["restore", "ses_a", "--force"]).ok();
    let now = local.rows();
    assert!(
        stored.iter().all(|row| now.contains(row))
            && !now.iter().any(|row| row.contains("prompt 7")),
        "{now:#?}"
    );
    assert!(
        before
            .iter()
            .filter(|row| row.contains("ses_b"))
            .all(|row| now.contains(row)),
        "the other session is as it was"
    );
    // The local rows are moved aside, and the agent's other tables are unchanged.
    let aside = objects(&data(&other).join(".sessiond-mirror/.sessiond/aside"));
    assert!(aside.iter().any(|bytes| contains_text(bytes, "prompt 7")));
    assert_eq!(
        (local.count("credential"), local.count("session_share")),
        (1, 2)
    );
    database.close();
}

#[test]
fn an_opencode_rollback_removes_rows_and_continues() {
    let (backend, home, mut database) = stored(3);
    let early: Vec<String> = database
        .rows()
        .into_iter()
        .filter(|row| !row.contains("_2_") && !row.contains("_3_"))
        .collect();
    // Each turn has its own end, although all are in one entry.
    backend
        .run(&home, &["restore", "ses_a", "--at", "turn:1"])
        .ok();
    assert_eq!(database.rows(), early);
    database.turn("ses_a", 4);
    backend.run(&home, &["run", "--", "true"]).ok();
    let other = TempHome::new();
    backend.run(&other, &["restore", "ses_a"]).ok();
    assert_eq!(Database::at(&other).rows(), database.rows());
}

#[test]
fn an_unreadable_opencode_database_only_delays_uploads() {
    let mut backend = Backend::file();
    backend.set("SESSIOND_AGENT", "opencode");
    let home = TempHome::new();
    let file = data(&home).join("opencode.db");
    append(
        &file,
        "this is no database, and it is long enough to be looked at by one\n",
    );
    let _daemon = backend.daemon(&home, &[]);
    let status = || backend.run(&home, &["status", "--json"]).ok().json();
    assert!(
        status()["database_error"]
            .as_str()
            .is_some_and(|error| error.contains("opencode.db")),
        "{}",
        status()
    );
    backend
        .run(&home, &["flush", "--wait"])
        .fails(5, "opencode.db", "");
    assert_eq!(backend.run(&home, &["doctor"]).code(), 1);
    std::fs::remove_file(&file).unwrap();
    let mut database = Database::create(&home);
    database.session("ses_a", None);
    database.turn("ses_a", 1);
    eventually("it is read by itself", || {
        status()["sessions"][0]["durable_bytes"].as_u64() > Some(0)
    });
    assert!(status().get("database_error").is_none(), "{}", status());
    let other = TempHome::new();
    backend.run(&home, &["flush", "--wait"]).ok();
    backend.run(&other, &["restore", "ses_a"]).ok();
    assert_eq!(Database::at(&other).rows(), database.rows());
}

#[test]
fn odd_ids_and_bytes_in_opencode_rows_are_stored() {
    let mut backend = Backend::file();
    backend.set("SESSIOND_AGENT", "opencode");
    let home = TempHome::new();
    let mut database = Database::create(&home);
    database.session("../../evil", None);
    database.session("ses_a", None);
    database.turn("ses_a", 1);
    database.run("UPDATE part SET data = CAST(X'7B22FF227D' AS TEXT) WHERE id = 'prt_a_1_2'");
    backend.run(&home, &["run", "--", "true"]).ok();
    let other = TempHome::new();
    backend.run(&other, &["restore", "ses_a"]).ok();
    let mut restored = Database::at(&other);
    assert_eq!((restored.count("session"), restored.count("part")), (1, 4));
    let names: Vec<_> = std::fs::read_dir(data(&home).join(".sessiond-mirror/sessions"))
        .unwrap()
        .map(|item| item.unwrap().file_name())
        .collect();
    assert_eq!(names, ["ses_a.jsonl"]);
}

#[test]
fn a_torn_mirror_line_is_rewritten() {
    let (backend, home, mut database) = stored(1);
    let mirror = data(&home).join(".sessiond-mirror/sessions/ses_a.jsonl");
    let whole = std::fs::read(&mirror).unwrap();
    // Killed during a write, before an upload.
    database.turn("ses_a", 2);
    let torn = [
        whole.as_slice(),
        b"{\"table\":\"part\",\"key\":\"prt_a_2_0\",\"ro",
    ]
    .concat();
    std::fs::write(&mirror, torn).unwrap();
    backend.run(&home, &["run", "--", "true"]).ok();
    let other = TempHome::new();
    backend.run(&other, &["restore", "ses_a"]).ok();
    assert_eq!(Database::at(&other).rows(), database.rows());
}

#[test]
fn an_opencode_fork_restores_into_its_own_database() {
    let (backend, home, mut database) = stored(2);
    backend
        .run(&home, &["fork", "ses_a", "--id", "ses_fork"])
        .ok();
    backend
        .run(&home, &["restore", "ses_fork"])
        .fails(7, "in another session", "XDG_DATA_HOME");
    let before = database.rows();
    let other = TempHome::new();
    backend.run(&other, &["restore", "ses_fork"]).ok();
    let forked: Vec<String> = before
        .iter()
        .map(|row| row.replace("ses_a", "ses_fork"))
        .collect();
    assert_eq!(Database::at(&other).rows(), forked);
}
