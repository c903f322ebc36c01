//! Tests of the test support: servers, proxies, and clean-up.

use crate::support::backend::eventually;
use crate::support::needs_servers;
use crate::support::proxy::{CountingProxy, Mode, TcpProxy};
use crate::support::servers::{self, Postgres, S3};
use crate::support::{TempHome, sessiond};
use aws_sdk_s3::Client;
use sqlx::{Connection, PgConnection};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

async fn select_one(url: &str) -> Result<i32, sqlx::Error> {
    let mut connection = PgConnection::connect(url).await?;
    sqlx::query_scalar("SELECT 1")
        .fetch_one(&mut connection)
        .await
}

/// The status of a conditional PUT.
async fn create(client: &Client, bucket: &str, key: &str, body: &str) -> u16 {
    let put = client
        .put_object()
        .bucket(bucket)
        .key(key)
        .if_none_match("*")
        .body(body.as_bytes().to_vec().into());
    match put.send().await {
        Ok(_) => 200,
        Err(error) => error
            .raw_response()
            .map(|response| response.status().as_u16())
            .unwrap_or_else(|| panic!("{error:?}")),
    }
}

async fn get(client: &Client, bucket: &str, key: &str) -> Vec<u8> {
    let object = client
        .get_object()
        .bucket(bucket)
        .key(key)
        .send()
        .await
        .unwrap();
    object.body.collect().await.unwrap().to_vec()
}

needs_servers!(async postgres_gives_each_test_a_database_and_checks_the_password);
async fn postgres_gives_each_test_a_database_and_checks_the_password() {
    let Some(postgres) = servers::postgres() else {
        return;
    };
    assert_ne!(postgres.fresh_database(), postgres.fresh_database());
    assert_eq!(select_one(&postgres.fresh_database()).await.unwrap(), 1);
    assert_eq!(
        select_one(&postgres.url_with_password(Postgres::PASSWORD))
            .await
            .unwrap(),
        1
    );
    let refused = select_one(&postgres.url_with_password("wrong: p@ss/word"))
        .await
        .unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("password authentication failed"),
        "{refused}"
    );
}

needs_servers!(async a_private_postgres_restarts_with_its_data);
async fn a_private_postgres_restarts_with_its_data() {
    let Some(postgres) = Postgres::start_private() else {
        return;
    };
    let url = postgres.fresh_database();
    postgres.stop();
    select_one(&url).await.unwrap_err();
    postgres.start();
    assert_eq!(select_one(&url).await.unwrap(), 1);
    let dir = postgres.dir().to_owned();
    drop(postgres);
    assert!(!dir.exists());
}

needs_servers!(async s3_lets_one_create_win_unless_conditions_are_dropped);
async fn s3_lets_one_create_win_unless_conditions_are_dropped() {
    let Some(s3) = servers::s3() else { return };
    let bucket = s3.fresh_bucket();
    let direct = s3.client(&s3.endpoint);
    assert_eq!(create(&direct, &bucket, "a/b", "first").await, 200);
    assert_eq!(create(&direct, &bucket, "a/b", "second").await, 412);
    assert_eq!(create(&s3.denied_client(), &bucket, "a/c", "").await, 403);

    let counting = CountingProxy::start(s3.addr(), false);
    assert_eq!(
        create(&s3.client(&counting.endpoint()), &bucket, "a/b", "third").await,
        412
    );
    assert_eq!(
        get(&s3.client(&counting.endpoint()), &bucket, "a/b").await,
        b"first"
    );
    assert_eq!(counting.count(), 2);
    assert!(
        counting.lines()[0].starts_with(&format!("PUT /{bucket}/a/b")),
        "{:?}",
        counting.lines()
    );

    let dropping = CountingProxy::start(s3.addr(), true);
    assert_eq!(
        create(&s3.client(&dropping.endpoint()), &bucket, "a/b", "fourth").await,
        200
    );
    assert_eq!(
        create(&s3.client(&dropping.endpoint()), &bucket, "a/b", "fifth").await,
        200
    );
    assert_eq!(get(&direct, &bucket, "a/b").await, b"fifth");
}

needs_servers!(async s3_has_room_for_the_buckets_of_many_tests);
async fn s3_has_room_for_the_buckets_of_many_tests() {
    let Some(s3) = servers::s3() else { return };
    let client = s3.client(&s3.endpoint);
    for _ in 0..25 {
        assert_eq!(create(&client, &s3.fresh_bucket(), "a", "x").await, 200);
    }
}

needs_servers!(async a_private_s3_restarts_with_its_data_next_to_the_shared_one);
async fn a_private_s3_restarts_with_its_data_next_to_the_shared_one() {
    let (Some(_shared), Some(s3)) = (servers::s3(), S3::start_private()) else {
        return;
    };
    let bucket = s3.fresh_bucket();
    let client = s3.client(&s3.endpoint);
    assert_eq!(create(&client, &bucket, "a/b", "kept").await, 200);
    s3.stop();
    client
        .get_object()
        .bucket(&bucket)
        .key("a/b")
        .send()
        .await
        .unwrap_err();
    s3.start();
    assert_eq!(get(&client, &bucket, "a/b").await, b"kept");
    let dir = s3.dir().to_owned();
    drop(s3);
    assert!(!dir.exists());
}

/// Echoes each line.
fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                for line in BufReader::new(&stream).lines().map_while(Result::ok) {
                    (&stream).write_all(format!("{line}\n").as_bytes()).ok();
                }
            });
        }
    });
    addr
}

/// Sends a line on a new connection. Returns the bytes up to the end of the line or of the
/// connection, or until 1.5 seconds of silence.
fn exchange(proxy: &TcpProxy, line: &str) -> String {
    exchange_on(&TcpStream::connect(proxy.addr()).unwrap(), line)
}

fn exchange_on(mut stream: &TcpStream, line: &str) -> String {
    stream
        .set_read_timeout(Some(Duration::from_millis(1500)))
        .unwrap();
    stream.write_all(format!("{line}\n").as_bytes()).ok();
    let mut answer = String::new();
    let mut byte = [0];
    loop {
        match stream.read(&mut byte) {
            Ok(1) if byte[0] != b'\n' => answer.push(byte[0].into()),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                return format!("{answer}(silence)");
            }
            Ok(1) => return answer,
            _ => return format!("{answer}(closed)"),
        }
    }
}

#[test]
fn each_tcp_proxy_mode_works() {
    let proxy = TcpProxy::start(echo_server());
    assert_eq!(exchange(&proxy, "pass"), "pass");
    assert_eq!(
        (proxy.connections(), proxy.bytes_up(), proxy.bytes_down()),
        (1, 5, 5)
    );

    let open = TcpStream::connect(proxy.addr()).unwrap();
    assert_eq!(exchange_on(&open, "open"), "open");
    proxy.set(Mode::CutAfter(3));
    assert_eq!(exchange(&proxy, "abcdef"), "abc(closed)");
    proxy.set(Mode::Refuse);
    assert_eq!(exchange(&proxy, "refused"), "(closed)");
    assert_eq!(exchange_on(&open, "cut"), "(closed)");

    proxy.set(Mode::Hang);
    let (before, hung) = (proxy.bytes_up(), TcpStream::connect(proxy.addr()).unwrap());
    assert_eq!(exchange_on(&hung, "hang"), "(silence)");
    assert_eq!(proxy.bytes_up(), before);
    proxy.set(Mode::DropResponses);
    let before = proxy.bytes_up();
    assert_eq!(exchange(&proxy, "done, unanswered"), "(closed)");
    assert!(proxy.bytes_up() >= before + 17);

    proxy.set(Mode::Delay(Duration::from_millis(200)));
    let start = Instant::now();
    assert_eq!(exchange(&proxy, "late"), "late");
    assert!(start.elapsed() >= Duration::from_millis(200));
    proxy.set(Mode::Throttle(1000));
    let start = Instant::now();
    assert_eq!(exchange(&proxy, &"x".repeat(499)).len(), 499);
    assert!(
        start.elapsed() >= Duration::from_millis(450),
        "{:?}",
        start.elapsed()
    );

    proxy.set(Mode::Pass);
    let open = TcpStream::connect(proxy.addr()).unwrap();
    assert_eq!(exchange_on(&open, "open"), "open");
    let addr = proxy.addr();
    drop(proxy);
    assert_eq!(exchange_on(&open, "cut"), "(closed)");
    // A connection may still succeed: a child that another test is forking holds the listener until
    // it runs its program, and another test may get the port. It carries no bytes.
    let after = TcpStream::connect(addr).map(|stream| exchange_on(&stream, "after the end"));
    assert_ne!(after.unwrap_or_default(), "after the end");
}

#[test]
fn tcp_proxy_cuts_requests_and_closes_one_direction() {
    let proxy = TcpProxy::start(echo_server());
    proxy.set(Mode::CutRequestAfter(7));
    let before = (proxy.bytes_up(), proxy.bytes_down());
    assert_eq!(exchange(&proxy, "half a request"), "(closed)");
    assert_eq!(
        (proxy.bytes_up(), proxy.bytes_down()),
        (before.0 + 7, before.1)
    );
    for (mode, seen) in [(Mode::Swallow, "(silence)"), (Mode::HalfClose, "(closed)")] {
        proxy.set(mode);
        let deaf = TcpStream::connect(proxy.addr()).unwrap();
        assert_eq!(exchange_on(&deaf, "done, unanswered"), seen, "{mode:?}");
        // Requests still pass, and responses are lost.
        proxy.set(Mode::Pass);
        let before = proxy.bytes_up();
        assert_eq!(exchange_on(&deaf, "more"), seen, "{mode:?}");
        eventually("it has arrived", || proxy.bytes_up() == before + 5);
    }
}

#[test]
#[ignore = "runs in the child process of servers_and_their_directories_are_removed_when_the_tests_are_killed"]
fn holds_servers_until_killed() {
    let (Some(postgres), Some(s3)) = (servers::postgres(), servers::s3()) else {
        return;
    };
    writeln!(
        std::io::stdout(),
        "\n{}\n{}\nready",
        postgres.dir().display(),
        s3.dir().display()
    )
    .unwrap();
    std::thread::sleep(Duration::from_secs(600));
}

needs_servers!(servers_and_their_directories_are_removed_when_the_tests_are_killed);
fn servers_and_their_directories_are_removed_when_the_tests_are_killed() {
    let mut victim = Command::new(std::env::current_exe().unwrap());
    victim.args([
        "--nocapture",
        "--ignored",
        "--exact",
        "support_test::holds_servers_until_killed",
    ]);
    let mut victim = victim.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(victim.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    let dirs: Vec<String> = lines
        .take_while(|line| line != "ready")
        .filter(|line| line.starts_with('/'))
        .collect();
    let running = |dir: &String| Path::new(dir).exists() || mentioned_by_a_process(dir);
    let all_running = dirs.iter().all(running);
    victim.kill().unwrap();
    victim.wait().unwrap();
    assert!(all_running);
    let deadline = Instant::now() + Duration::from_secs(20);
    while dirs.iter().any(running) {
        assert!(Instant::now() < deadline, "still there: {dirs:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn mentioned_by_a_process(dir: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut lines =
        processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    lines.any(|line| String::from_utf8_lossy(&line).contains(dir))
}

#[test]
fn a_command_inherits_no_settings_of_the_user() {
    let home = TempHome::new();
    assert!(sessiond().exists());
    let output = home.command(Path::new("env")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut names: Vec<&str> = text
        .lines()
        .filter_map(|line| Some(line.split_once('=')?.0))
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["HOME", "PATH", "TMPDIR"]);
    assert!(text.contains(&format!("HOME={}/home", home.path().display())));
}
