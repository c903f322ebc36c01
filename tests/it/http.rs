//! Probes, metrics, heartbeat and traces of the running program.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use sessiond::daemon::health::{HealthState, StreamingState};
use sessiond::sys::SystemClock;

use crate::support::backend::{self, Backend, Signal, eventually, transcript};
use crate::support::counting_directory::CountingDirectory;
use crate::support::files::append;
use crate::support::http;
use crate::support::needs_servers;
use crate::support::proxy::{Mode, TcpProxy};
use crate::support::servers::{postgres, s3};
use crate::support::world::World;
use crate::support::{PATIENCE, TempHome};

const SESSION: &str = "5e550000-0000-4000-8000-000000000001";
/// A secret in addresses that must not be printed.
const SECRET: &str = "hunter2-t0ken";

/// A process that serves HTTP on a free port.
struct ObservedDaemon {
    process: backend::Running,
    address: SocketAddr,
    log: std::path::PathBuf,
}

impl ObservedDaemon {
    fn start(mut command: Command, home: &TempHome) -> ObservedDaemon {
        let log = home.path().join("watched.log");
        let _ = std::fs::remove_file(&log);
        command
            .env("SESSIOND_HTTP", "127.0.0.1:0")
            .env("SESSIOND_FLUSH_INTERVAL", "50ms")
            .env("NO_COLOR", "1");
        command
            .stderr(std::fs::File::create(&log).unwrap())
            .stdout(Stdio::null());
        let process = backend::Running(command.spawn().unwrap());
        let mut address = None;
        eventually("it logs its address", || {
            let log_text = std::fs::read_to_string(&log).unwrap();
            let line = log_text
                .lines()
                .find(|line| line.contains("serving /healthz"));
            address = line.and_then(|line| line.split_once("address=")?.1.trim().parse().ok());
            address.is_some()
        });
        ObservedDaemon {
            process,
            address: address.unwrap(),
            log,
        }
    }

    fn daemon(backend: &Backend, home: &TempHome, arguments: &[&str]) -> ObservedDaemon {
        ObservedDaemon::start(
            backend.command(home, &[&["daemon"], arguments].concat()),
            home,
        )
    }

    fn get(&self, path: &str) -> (u16, String) {
        call(
            self.address,
            &format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n"),
        )
        .unwrap_or_else(|| panic!("{path}: {}", self.log_text()))
    }

    /// The status and the body of a probe.
    fn probe(&self, path: &str) -> (u16, Value) {
        let (status, body) = self.get(path);
        (status, serde_json::from_str(&body).unwrap())
    }

    fn wait_until_ready(&self) {
        eventually("it is ready", || self.get("/readyz").0 == 200);
    }

    fn metrics(&self) -> Metrics {
        let (status, text) = self.get("/metrics");
        assert_eq!(status, 200, "{text}");
        Metrics::read(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    fn stop(mut self) -> (Option<i32>, String) {
        self.process.signal(Signal::TERM);
        (self.process.code(), self.log_text())
    }
}

/// Sends a request; none without a response.
fn call(address: SocketAddr, request: &str) -> Option<(u16, String)> {
    http::send(address, request).map(|response| (response.status, response.body))
}

/// The samples of a metrics page, by name and labels. The parser is as strict as OpenMetrics.
struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    fn read(text: &str) -> Result<Metrics, String> {
        let Some(text) = text.strip_suffix("# EOF\n") else {
            return Err("the page has no end".into());
        };
        let (mut families, mut samples) = (BTreeMap::new(), BTreeMap::new());
        let (mut helped, mut current) = (BTreeSet::new(), String::new());
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').ok_or(format!("no help: {line}"))?;
                if help.is_empty() || !helped.insert(name.to_owned()) {
                    return Err(format!("no help, or twice: {line}"));
                }
                current = name.to_owned();
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').ok_or(format!("no type: {line}"))?;
                let is_known = ["counter", "gauge", "histogram", "info"].contains(&kind);
                // The suffix belongs to the samples, not to the family.
                if name != current
                    || !is_known
                    || name.ends_with("_total")
                    || families.insert(name.to_owned(), kind.to_owned()).is_some()
                {
                    return Err(format!("unexpected type: {line}"));
                }
            } else if let Some(unit) = line.strip_prefix("# UNIT ") {
                let (name, unit) = unit.split_once(' ').ok_or(format!("no unit: {line}"))?;
                let is_known = ["seconds", "bytes"].contains(&unit);
                if name != current || !is_known || !name.ends_with(&format!("_{unit}")) {
                    return Err(format!("unexpected unit: {line}"));
                }
            } else {
                let (series, value) = line.rsplit_once(' ').ok_or(format!("no value: {line}"))?;
                let value: f64 = value.parse().map_err(|_| format!("no number: {line}"))?;
                let (name, labels) = match series.split_once('{') {
                    Some((name, rest)) => (
                        name,
                        rest.strip_suffix('}')
                            .ok_or(format!("labels without an end: {line}"))?,
                    ),
                    None => (series, ""),
                };
                let plain = |word: &str| {
                    !word.is_empty()
                        && word
                            .bytes()
                            .all(|letter| letter.is_ascii_lowercase() || letter == b'_')
                };
                for label in labels.split(',').filter(|label| !label.is_empty()) {
                    let (label, text) = label.split_once('=').ok_or(format!("no label: {line}"))?;
                    let text = text
                        .strip_prefix('"')
                        .and_then(|text| text.strip_suffix('"'))
                        .ok_or(format!("no quotes: {line}"))?;
                    if !plain(label)
                        || text.contains(['"', '\\'])
                        || !["version", "le", "operation", "kind", "result"].contains(&label)
                    {
                        return Err(format!("a label: {line}"));
                    }
                }
                let kind = families
                    .get(&current)
                    .ok_or(format!("no type before {line}"))?;
                let suffix = name
                    .strip_prefix(current.as_str())
                    .ok_or(format!("out of place: {line}"))?;
                let fits = match kind.as_str() {
                    "histogram" => ["_bucket", "_sum", "_count"].contains(&suffix),
                    "counter" => suffix == "_total",
                    "info" => suffix == "_info",
                    _ => suffix.is_empty(),
                };
                if !fits
                    || !plain(name)
                    || value < 0.0
                    || !value.is_finite()
                    || samples.insert(series.to_owned(), value).is_some()
                {
                    return Err(format!("a sample: {line}"));
                }
            }
        }
        let metrics = Metrics(samples);
        for (name, _) in families.iter().filter(|(_, kind)| *kind == "histogram") {
            let buckets: Vec<f64> = text
                .lines()
                .filter(|line| line.starts_with(&format!("{name}_bucket")))
                .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
                .collect();
            if !buckets.is_sorted()
                || buckets.last() != Some(&metrics.value(&format!("{name}_count")))
            {
                return Err(format!("{name}: the buckets do not add up"));
            }
        }
        Ok(metrics)
    }

    #[track_caller]
    fn value(&self, series: &str) -> f64 {
        *self
            .0
            .get(series)
            .unwrap_or_else(|| panic!("there is no {series}: {:?}", self.0.keys()))
    }

    fn errors(&self, operation: &str, kind: &str) -> f64 {
        self.value(&format!(
            "sessiond_errors_total{{operation=\"{operation}\",kind=\"{kind}\"}}"
        ))
    }
}

/// The head and the body of a request.
type SentRequest = (String, Vec<u8>);

/// A server on a free port that records its requests and responds with a given status.
struct RequestRecorder {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<SentRequest>>>,
    status: Arc<AtomicU16>,
}

impl RequestRecorder {
    fn start() -> RequestRecorder {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (requests, status) = (
            Arc::new(Mutex::new(Vec::new())),
            Arc::new(AtomicU16::new(200)),
        );
        let (recorded, response_status) = (requests.clone(), status.clone());
        // The thread ends with the test process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if let Some(request) = RequestRecorder::read(&stream) {
                    recorded.lock().unwrap().push(request);
                    let status = response_status.load(Ordering::SeqCst);
                    let _ = write!(
                        &stream,
                        "HTTP/1.1 {status} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                    );
                }
            }
        });
        RequestRecorder {
            address,
            requests,
            status,
        }
    }

    fn read(stream: &TcpStream) -> Option<SentRequest> {
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        let mut reader = BufReader::new(stream);
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
            if line == "\r\n" {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().ok()?;
            }
            head.push_str(&line);
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        Some((head, body))
    }

    fn count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }

    fn request_heads(&self) -> Vec<String> {
        self.requests
            .lock()
            .unwrap()
            .iter()
            .map(|(head, _)| head.clone())
            .collect()
    }

    /// All spans that were sent.
    fn spans(&self) -> Vec<Value> {
        let requests = self.requests.lock().unwrap();
        let bodies = requests
            .iter()
            .map(|(_, body)| serde_json::from_slice::<Value>(body).unwrap());
        bodies
            .flat_map(|body| {
                body["resourceSpans"][0]["scopeSpans"][0]["spans"]
                    .as_array()
                    .unwrap()
                    .clone()
            })
            .collect()
    }
}

/// A line as the agent writes it.
fn line(text: &str) -> String {
    format!(
        "{{\"type\":\"user\",\"cwd\":\"/work/app\",\"sessionId\":\"{SESSION}\",\"text\":\"{text}\"}}\n"
    )
}

/// Stores a session that no process owns.
fn stored(backend: &Backend) -> String {
    let home = TempHome::new();
    let text: String = (0..50)
        .map(|number| line(&format!("line {number}")))
        .collect();
    append(&transcript(&home, SESSION), &text);
    let mut daemon = backend.daemon(&home, &[]);
    backend.run(&home, &["flush", "--wait"]).ok();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.code(), Some(0));
    text
}

/// A bucket behind a proxy.
fn backend_with_proxy() -> Option<(Backend, TcpProxy)> {
    let (s3, postgres) = (s3()?, postgres()?);
    let proxy = TcpProxy::start(s3.addr());
    let backend = Backend::on(
        &format!("http://{}", proxy.addr()),
        &s3.fresh_bucket(),
        &postgres.fresh_database(),
    );
    Some((backend, proxy))
}

needs_servers!(a_sidecar_is_ready_once_the_session_is_restored);
fn a_sidecar_is_ready_once_the_session_is_restored() {
    let Some((backend, proxy)) = backend_with_proxy() else {
        return;
    };
    let text = stored(&backend);
    let home = TempHome::new();
    proxy.set(Mode::Hang);
    let daemon = ObservedDaemon::daemon(
        &backend,
        &home,
        &["--session", SESSION, "--request-timeout", "20s"],
    );
    eventually("it restores", || {
        daemon.probe("/readyz").1["phase"] == "restoring"
    });
    for _ in 0..5 {
        let (ready, body) = daemon.probe("/readyz");
        assert_eq!(
            (ready, &body["ready"], body["reason"].is_string()),
            (503, &Value::Bool(false), true),
            "{body}"
        );
        assert_eq!(daemon.probe("/healthz").0, 200);
        let metrics = daemon.metrics();
        assert_eq!(
            (
                metrics.value("sessiond_ready"),
                metrics.value("sessiond_healthy")
            ),
            (0.0, 1.0)
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(!transcript(&home, SESSION).exists());
    proxy.set(Mode::Pass);
    daemon.wait_until_ready();
    // The gate: an agent that starts now finds its session.
    assert_eq!(
        std::fs::read_to_string(transcript(&home, SESSION)).unwrap(),
        text
    );
    assert_eq!(
        daemon.probe("/healthz"),
        (
            200,
            serde_json::json!({ "healthy": true, "ready": true, "phase": "streaming" })
        )
    );
    let metrics = daemon.metrics();
    assert_eq!(
        (
            metrics.value("sessiond_ready"),
            metrics.value("sessiond_restores_total")
        ),
        (1.0, 1.0)
    );
    assert_eq!(
        metrics.value("sessiond_restored_bytes_total"),
        text.len() as f64
    );
    assert!(metrics.value("sessiond_restore_last_duration_seconds") > 0.1);
    assert!(
        metrics.value("sessiond_restore_last_success_timestamp_seconds")
            >= metrics.value("process_start_time_seconds")
    );
    // The sidecar owns the session: appended lines continue its log.
    append(&transcript(&home, SESSION), line("more"));
    backend.run(&home, &["flush", "--wait"]).ok();
    let listed = backend.run(&home, &["status", "--json"]).ok().json();
    assert_eq!(listed["sessions"][0]["write_target"], "main", "{listed}");
    // An outage does not make it unready, nor unhealthy.
    proxy.set(Mode::Refuse);
    append(&transcript(&home, SESSION), line("during an outage"));
    eventually("the flush fails", || {
        daemon.metrics().errors("flush", "unavailable") >= 2.0
    });
    assert_eq!(
        (daemon.get("/healthz").0, daemon.get("/readyz").0),
        (200, 200)
    );
    proxy.set(Mode::Pass);
    assert_eq!(daemon.stop().0, Some(0));
}

#[test]
fn a_sidecar_reports_a_failed_restore_and_starts_with_nothing_stored() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let daemon = ObservedDaemon::daemon(&backend, &home, &["--session", SESSION]);
    daemon.wait_until_ready();
    assert_eq!(daemon.metrics().value("sessiond_restores_total"), 0.0);
    assert_eq!(daemon.stop().0, Some(0));
    backend
        .run(&home, &["daemon", "--session", SESSION, "--must-exist"])
        .fails(8, SESSION, "");
    backend
        .run(&home, &["daemon", "--session", " "])
        .fails(2, "--session", "omit --session");
}

/// A hanging disk stops the loop. A signal cannot do that to a single thread.
#[tokio::test(flavor = "multi_thread")]
async fn an_unresponsive_streaming_loop_is_unhealthy() {
    let world = World::new();
    let directory = Arc::new(CountingDirectory::new(world.root()));
    let handle = crate::support::writer::stream(world.root(), world.context_of(directory.clone()));
    let health = HealthState::new(Arc::new(SystemClock));
    let before = health.snapshot().await.report;
    assert_eq!(
        (before.healthy, before.ready, before.phase),
        (true, false, "starting")
    );
    let index_reachable = Arc::new(AtomicBool::new(true));
    health.set_streaming(StreamingState {
        handle: handle.clone(),
        index_queue: world.writer.context.index_queue.clone(),
        index_reachable,
        mirror: None,
    });
    assert!(health.snapshot().await.report.ready);
    let (asking, hangs) = (handle.clone(), directory.clone());
    let (stuck, mend) = (
        std::sync::mpsc::channel::<()>(),
        std::sync::mpsc::channel::<()>(),
    );
    let holder = std::thread::spawn(move || {
        let _held = hangs.block_listing();
        stuck.0.send(()).unwrap();
        mend.1.recv().unwrap();
    });
    stuck.1.recv().unwrap();
    let asked = tokio::spawn(async move { asking.flush(None).await });
    let mut snapshot = health.snapshot().await;
    let deadline = tokio::time::Instant::now() + PATIENCE;
    // A busy loop is healthy until its requests have gone unanswered for some seconds.
    while snapshot.report.healthy && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(200)).await;
        snapshot = health.snapshot().await;
    }
    assert_eq!(
        (
            snapshot.report.healthy,
            snapshot.report.ready,
            snapshot.streams
        ),
        (false, false, None)
    );
    assert!(snapshot.report.reason.unwrap().contains("unresponsive"));
    mend.0.send(()).unwrap();
    holder.join().unwrap();
    asked.await.unwrap().unwrap();
    assert!(health.snapshot().await.report.healthy);
    handle
        .finish(tokio::time::Instant::now() + Duration::from_secs(5))
        .await
        .unwrap();
    let snapshot = health.snapshot().await;
    assert_eq!(
        (snapshot.report.healthy, snapshot.report.ready),
        (false, false)
    );
    assert!(snapshot.report.reason.unwrap().contains("ended"));
    health.set_stopping();
    let last = health.snapshot().await.report;
    assert_eq!(
        (last.healthy, last.ready, last.phase),
        (true, false, "stopping")
    );
}

#[test]
fn run_is_ready_before_its_command_starts() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let text = stored(&backend);
    let flag = home.path().join("go");
    let script = format!(
        "while ! test -e {}; do sleep 0.05; done; exit 5",
        flag.display()
    );
    let mut run = ObservedDaemon::start(
        backend.command(
            &home,
            &["run", "--session", SESSION, "--", "sh", "-c", &script],
        ),
        &home,
    );
    run.wait_until_ready();
    assert_eq!(
        run.metrics().value("sessiond_restored_bytes_total"),
        text.len() as f64
    );
    std::fs::write(flag, "").unwrap();
    assert_eq!(run.process.code(), Some(5));
    // The agent is started despite the error: the process is healthy but never ready.
    backend
        .run(&home, &["run", "--http", "nonsense", "--", "true"])
        .fails(2, "invalid --http value \"nonsense\"", "--http off");
    let ran = backend.run(
        &home,
        &[
            "run",
            "--http",
            "nonsense",
            "--on-restore-error",
            "continue",
            "--",
            "sh",
            "-c",
            "exit 6",
        ],
    );
    assert_eq!(ran.code(), 6, "{}", ran.err());
}

needs_servers!(metrics_count_flushes_restores_and_errors);
fn metrics_count_flushes_restores_and_errors() {
    let Some((backend, proxy)) = backend_with_proxy() else {
        return;
    };
    let home = TempHome::new();
    let daemon = ObservedDaemon::daemon(
        &backend,
        &home,
        &["--request-timeout", "5s", "--label", "team=secretteam"],
    );
    daemon.wait_until_ready();
    let before = daemon.metrics();
    assert_eq!(
        (
            before.value("sessiond_flushes_total"),
            before.value("sessiond_logs")
        ),
        (0.0, 0.0)
    );
    let mut bytes = 0;
    for number in 0..3 {
        let text = line(&format!("number {number}"));
        bytes += text.len();
        append(&transcript(&home, SESSION), &text);
        backend.run(&home, &["flush", "--wait"]).ok();
    }
    // A late file event causes another scan, without changes.
    let mut now = before;
    eventually("all is quiet", || {
        now = daemon.metrics();
        now.value("sessiond_index_backlog_entries") == 0.0
            && now.value("sessiond_logs_unflushed") == 0.0
    });
    assert_eq!(now.value("sessiond_uploaded_raw_bytes_total"), bytes as f64);
    let flushes = now.value("sessiond_flushes_total");
    assert!((1.0..=3.0).contains(&flushes), "{flushes}");
    // Plus one for the claim.
    assert_eq!(now.value("sessiond_entries_written_total"), flushes + 1.0);
    assert_eq!(now.value("sessiond_flush_duration_seconds_count"), flushes);
    assert!(now.value("sessiond_uploaded_stored_bytes_total") > 0.0);
    assert_eq!(
        (
            now.value("sessiond_logs"),
            now.value("sessiond_watched_files"),
            now.value("sessiond_logs_unflushed")
        ),
        (1.0, 1.0, 0.0)
    );
    assert_eq!(
        (
            now.value("sessiond_lag_max_bytes"),
            now.value("sessiond_lag_max_seconds")
        ),
        (0.0, 0.0)
    );
    assert_eq!(
        (
            now.value("sessiond_index_up"),
            now.errors("flush", "unavailable")
        ),
        (1.0, 0.0)
    );
    assert!(
        now.value("sessiond_flush_last_success_timestamp_seconds")
            >= now.value("process_start_time_seconds")
    );
    assert!(
        now.value("sessiond_index_last_success_timestamp_seconds")
            >= now.value("process_start_time_seconds")
    );

    proxy.set(Mode::Refuse);
    let text = line("during an outage");
    append(&transcript(&home, SESSION), &text);
    eventually("the outage is seen", || {
        daemon.metrics().errors("flush", "unavailable") >= 2.0
    });
    let away = daemon.metrics();
    assert_eq!(away.value("sessiond_logs_unflushed"), 1.0);
    assert_eq!(
        (
            away.value("sessiond_lag_sum_bytes"),
            away.value("sessiond_lag_max_bytes")
        ),
        (text.len() as f64, text.len() as f64)
    );
    assert!(
        away.value("sessiond_lag_max_seconds") > 0.0
            && away.value("sessiond_lag_max_seconds") == away.value("sessiond_lag_sum_seconds")
    );
    assert_eq!(away.value("sessiond_flushes_total"), flushes);
    proxy.set(Mode::Pass);
    eventually("it has caught up", || {
        daemon.metrics().value("sessiond_lag_sum_bytes") == 0.0
    });
    assert_eq!(
        daemon.metrics().value("sessiond_uploaded_raw_bytes_total"),
        (bytes + text.len()) as f64
    );

    // Another writer takes over the session.
    let other = TempHome::new();
    backend.run(&other, &["restore", SESSION]).ok();
    append(&transcript(&home, SESSION), line("too late"));
    eventually("it is fenced", || {
        daemon.metrics().value("sessiond_sessions_fenced") == 1.0
    });
    eventually("the branch is written", || {
        daemon.metrics().value("sessiond_branches_total") == 1.0
    });
    assert_eq!(daemon.metrics().errors("flush", "fenced"), 1.0);
    append(&transcript(&home, SESSION), line("more of the branch"));
    backend.run(&home, &["flush", "--wait"]);
    assert_eq!(daemon.metrics().value("sessiond_branches_total"), 1.0);

    // No metric contains a name.
    let (_, page) = daemon.get("/metrics");
    for word in [
        SESSION,
        "5e55",
        "/work",
        "-work-app",
        "secretteam",
        "jsonl",
        home.path().to_str().unwrap(),
        ".claude",
        "127.0.0.1",
    ] {
        assert!(!page.contains(word), "{word} is in\n{page}");
    }
    // Another writer owns the session.
    assert_eq!(daemon.stop().0, Some(4));
}

#[test]
fn an_index_outage_is_visible_and_streaming_continues() {
    let (mut backend, home) = (Backend::file(), TempHome::new());
    backend.set("SESSIOND_INDEX", "postgres://nobody@127.0.0.1:1/none");
    let daemon = ObservedDaemon::daemon(&backend, &home, &[]);
    daemon.wait_until_ready();
    append(&transcript(&home, SESSION), line("one"));
    backend.run(&home, &["flush", "--wait"]).ok();
    eventually("the index is away", || {
        let metrics = daemon.metrics();
        metrics.value("sessiond_index_up") == 0.0
            && metrics.value("sessiond_index_backlog_entries") >= 1.0
    });
    let metrics = daemon.metrics();
    assert!(metrics.errors("index", "unavailable") >= 1.0);
    assert_eq!(
        (
            metrics.value("sessiond_lag_sum_bytes"),
            metrics.value("sessiond_index_last_success_timestamp_seconds")
        ),
        (0.0, 0.0)
    );
    assert_eq!(
        (daemon.get("/healthz").0, daemon.get("/readyz").0),
        (200, 200)
    );
}

#[test]
fn invalid_http_requests_are_rejected() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let daemon = ObservedDaemon::daemon(&backend, &home, &[]);
    daemon.wait_until_ready();
    assert_eq!(daemon.get("/").0, 404);
    assert_eq!(daemon.get("/metrics/../../etc/passwd").0, 404);
    assert_eq!(daemon.get("/metrics?x=1").0, 200);
    let (status, _) = call(
        daemon.address,
        "POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    )
    .unwrap();
    assert_eq!(status, 405);
    let (status, body) = call(daemon.address, "HEAD /healthz HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    assert_eq!((status, body.as_str()), (200, ""));
    let long = format!(
        "GET /healthz HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n",
        "y".repeat(64 << 10)
    );
    assert!(call(daemon.address, &long).is_none_or(|(status, _)| status == 431));
    // More silent connections than allowed at once: they are closed, and other requests are served.
    let began = Instant::now();
    let mut silent: Vec<TcpStream> = (0..40)
        .map(|_| TcpStream::connect(daemon.address).unwrap())
        .collect();
    for stream in &mut silent {
        stream.write_all(b"GET /healthz HT").unwrap();
    }
    assert_eq!(daemon.get("/healthz").0, 200);
    for stream in &mut silent[..32] {
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(
            !rest.starts_with(b"HTTP/1.1 200"),
            "{}",
            String::from_utf8_lossy(&rest)
        );
    }
    assert!(
        began.elapsed() < Duration::from_secs(40),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(daemon.stop().0, Some(0));
}

#[test]
fn a_taken_http_address_is_an_error_only_if_it_was_set() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (backend, home) = (Backend::file(), TempHome::new());
    for verb in [&["daemon"][..], &["run", "--", "true"], &["serve-store"]] {
        let (verb, rest) = verb.split_first().unwrap();
        let ran = backend.run(&home, &[&[*verb, "--http", &address], rest].concat());
        ran.fails(2, &address, "--http off");
    }
    assert!(
        !home.home().join(".claude/.sessiond").exists(),
        "it had begun"
    );
    // Whether this test or another program uses the default port: the next process runs without it.
    let _holder = TcpListener::bind("127.0.0.1:9464");
    let mut command = backend.command(&home, &["daemon"]);
    let (log, ready) = (home.path().join("default.log"), home.path().join("ready"));
    command
        .env_remove("SESSIOND_HTTP")
        .arg("--ready-file")
        .arg(&ready)
        .stderr(std::fs::File::create(&log).unwrap());
    let mut daemon = backend::Running(command.spawn().unwrap());
    eventually("it streams", || ready.exists());
    append(&transcript(&home, SESSION), line("one"));
    backend.run(&home, &["flush", "--wait"]).ok();
    let log_text = std::fs::read_to_string(&log).unwrap();
    assert!(
        log_text.contains("WARN")
            && log_text.contains("127.0.0.1:9464")
            && log_text.contains("--http"),
        "{log_text}"
    );
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.code(), Some(0));
}

#[test]
fn the_session_store_serves_probes_and_metrics() {
    let (backend, home) = (Backend::file(), TempHome::new());
    let server = ObservedDaemon::start(backend.command(&home, &["serve-store"]), &home);
    server.wait_until_ready();
    assert_eq!(server.metrics().value("sessiond_logs"), 0.0);
    assert_eq!(server.stop().0, Some(0));
}

needs_servers!(a_heartbeat_is_sent_only_while_everything_is_durable);
fn a_heartbeat_is_sent_only_while_everything_is_durable() {
    let Some((mut backend, proxy)) = backend_with_proxy() else {
        return;
    };
    let home = TempHome::new();
    let recorder = RequestRecorder::start();
    backend.set(
        "SESSIOND_HEARTBEAT_URL",
        format!("http://{}/ping/{SECRET}?key={SECRET}", recorder.address),
    );
    let arguments = [
        "--heartbeat-interval",
        "1s",
        "--flush-deadline",
        "2s",
        "--request-timeout",
        "1s",
        "--log",
        "debug",
    ];
    let daemon = ObservedDaemon::daemon(&backend, &home, &arguments);
    eventually("it beats", || recorder.count() >= 2);
    let head = recorder.request_heads().remove(0);
    assert!(
        head.starts_with(&format!("GET /ping/{SECRET}?key={SECRET} HTTP/1.1"))
            && head.contains("sessiond/"),
        "{head}"
    );
    append(&transcript(&home, SESSION), line("one"));
    backend.run(&home, &["flush", "--wait"]).ok();

    proxy.set(Mode::Refuse);
    append(&transcript(&home, SESSION), line("two"));
    eventually("it is withheld", || {
        daemon
            .metrics()
            .value("sessiond_heartbeats_total{result=\"withheld\"}")
            >= 1.0
    });
    // From then on none is sent while the outage lasts.
    let before = recorder.count();
    eventually("it is withheld again and again", || {
        daemon
            .metrics()
            .value("sessiond_heartbeats_total{result=\"withheld\"}")
            >= 4.0
    });
    assert_eq!(recorder.count(), before);
    proxy.set(Mode::Pass);
    eventually("it beats again", || recorder.count() > before);
    assert_eq!(daemon.metrics().value("sessiond_lag_sum_bytes"), 0.0);

    // A server that rejects heartbeats is logged once.
    recorder.status.store(500, Ordering::SeqCst);
    eventually("it fails", || {
        daemon
            .metrics()
            .value("sessiond_heartbeats_total{result=\"failed\"}")
            >= 3.0
    });
    recorder.status.store(200, Ordering::SeqCst);
    let failed = daemon
        .metrics()
        .value("sessiond_heartbeats_total{result=\"failed\"}");
    let sent = |metrics: &Metrics| metrics.value("sessiond_heartbeats_total{result=\"sent\"}");
    let so_far = sent(&daemon.metrics());
    eventually("heartbeats are accepted again", || {
        sent(&daemon.metrics()) > so_far
    });
    assert!(
        failed >= 3.0
            && daemon
                .metrics()
                .value("sessiond_heartbeat_last_success_timestamp_seconds")
                > 0.0
    );
    let status = backend.run(&home, &["status", "--json"]).ok().out();
    let help = backend.run(&home, &["daemon", "--help"]).ok().out();
    let (code, log_text) = daemon.stop();
    assert_eq!(code, Some(0));
    assert_eq!(
        log_text.matches("the heartbeat failed").count(),
        1,
        "{log_text}"
    );
    assert_eq!(
        log_text
            .matches("withholding heartbeats: not everything is durable")
            .count(),
        1,
        "{log_text}"
    );
    for text in [&log_text, &status, &help] {
        assert!(!text.contains(SECRET), "{text}");
    }
    // Nor in the error for an invalid address.
    for bad in [
        format!("ftp://host/{SECRET}"),
        format!("http://user:{SECRET}@host/"),
        SECRET.to_owned(),
    ] {
        backend.set("SESSIOND_HEARTBEAT_URL", bad);
        let ran = backend
            .run(&home, &["daemon"])
            .fails(2, "--heartbeat-url", "https://");
        assert!(!ran.err().contains(SECRET), "{}", ran.err());
    }
    backend.set(
        "SESSIOND_HEARTBEAT_URL",
        format!("http://{}", recorder.address),
    );
    backend
        .run(&home, &["daemon", "--heartbeat-interval", "0s"])
        .fails(2, "--heartbeat-interval", "");
}

#[test]
fn flushes_and_restores_are_exported_as_traces() {
    let mut backend = Backend::file();
    let recorder = RequestRecorder::start();
    stored(&backend);
    let home = TempHome::new();
    backend.set(
        "SESSIOND_OTLP_ENDPOINT",
        format!("http://{}/otlp", recorder.address),
    );
    backend.set(
        "OTEL_EXPORTER_OTLP_HEADERS",
        format!("authorization=Bearer%20{SECRET}"),
    );
    backend.set("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test");
    let daemon = ObservedDaemon::daemon(&backend, &home, &["--session", SESSION, "--log", "debug"]);
    daemon.wait_until_ready();
    let spoken = "what was spoken stays here";
    append(&transcript(&home, SESSION), line(spoken));
    backend.run(&home, &["flush", "--wait"]).ok();
    let (code, log_text) = daemon.stop();
    assert_eq!(code, Some(0), "{log_text}");
    assert!(!log_text.contains(SECRET), "{log_text}");
    // Log lines do not carry the spans.
    assert!(!log_text.contains("restore{"), "{log_text}");
    for head in recorder.request_heads() {
        assert!(head.starts_with("POST /otlp/v1/traces HTTP/1.1"), "{head}");
        assert!(
            head.contains("content-type: application/json")
                && head.contains(&format!("authorization: Bearer {SECRET}")),
            "{head}"
        );
    }
    let raw: Vec<u8> = recorder
        .requests
        .lock()
        .unwrap()
        .iter()
        .flat_map(|(_, body)| body.clone())
        .collect();
    let raw = String::from_utf8(raw).unwrap();
    assert!(
        raw.contains("deployment.environment")
            && raw.contains("\"sessiond\"")
            && !raw.contains(spoken),
        "{raw}"
    );

    let spans = recorder.spans();
    let named = |name: &str| {
        spans
            .iter()
            .filter(|span| span["name"] == name)
            .cloned()
            .collect::<Vec<_>>()
    };
    let told = |span: &Value, key: &str| {
        let attributes = span["attributes"].as_array().unwrap();
        attributes
            .iter()
            .find(|attribute| attribute["key"] == key)
            .map(|attribute| attribute["value"].clone())
    };
    let number = |span: &Value, key: &str| {
        told(span, key).unwrap()["intValue"]
            .as_str()
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    for span in &spans {
        let hex = |key: &str| span[key].as_str().unwrap().to_owned();
        assert_eq!(
            (
                hex("traceId").len(),
                hex("spanId").len(),
                span["kind"].as_u64()
            ),
            (32, 16, Some(1)),
            "{span}"
        );
        let time = |key: &str| hex(key).parse::<u64>().unwrap();
        assert!(
            time("startTimeUnixNano") > 1_600_000_000_000_000_000
                && time("startTimeUnixNano") <= time("endTimeUnixNano"),
            "{span}"
        );
    }
    let ids: BTreeSet<String> = spans
        .iter()
        .map(|span| span["spanId"].to_string())
        .collect();
    assert_eq!(ids.len(), spans.len());
    let restore = named("restore")
        .into_iter()
        .find(|span| told(span, "session.id").unwrap()["stringValue"] == SESSION)
        .unwrap();
    assert!(
        restore.get("parentSpanId").is_none()
            && number(&restore, "bytes") > 0
            && number(&restore, "files") == 1,
        "{restore}"
    );
    for part in ["plan", "fetch", "place", "claim"] {
        let children = named(part)
            .into_iter()
            .filter(|span| span["parentSpanId"] == restore["spanId"]);
        assert!(children.clone().count() >= 1, "{part}: {spans:?}");
        assert!(
            children
                .clone()
                .all(|span| span["traceId"] == restore["traceId"]),
            "{part}"
        );
    }
    let flush = named("flush")
        .into_iter()
        .find(|span| told(span, "entries").is_some_and(|entries| entries["intValue"] != "0"));
    let flush = flush.unwrap_or_else(|| panic!("{spans:?}"));
    assert_eq!(number(&flush, "bytes"), line(spoken).len() as u64);
    assert!(
        flush["traceId"] != restore["traceId"] && flush["status"] == serde_json::json!({}),
        "{flush}"
    );
}

#[test]
fn an_unreachable_trace_collector_changes_nothing() {
    let (mut backend, home) = (Backend::file(), TempHome::new());
    // Invalid OpenTelemetry variables, which are meant for the agent, are not an error.
    backend.set("OTEL_EXPORTER_OTLP_ENDPOINT", "not an address");
    let daemon = ObservedDaemon::daemon(&backend, &home, &[]);
    daemon.wait_until_ready();
    let (code, log_text) = daemon.stop();
    assert_eq!(code, Some(0));
    assert!(log_text.contains("traces are disabled"), "{log_text}");

    backend.set("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1");
    let daemon = ObservedDaemon::daemon(&backend, &home, &[]);
    daemon.wait_until_ready();
    append(&transcript(&home, SESSION), line("one"));
    backend.run(&home, &["flush", "--wait"]).ok();
    let (code, log_text) = daemon.stop();
    assert_eq!(code, Some(0));
    assert_eq!(
        log_text.matches("the trace export failed").count(),
        1,
        "{log_text}"
    );

    backend
        .run(&home, &["daemon", "--otlp-endpoint", "nonsense"])
        .fails(2, "--otlp-endpoint", "http://");
    backend.set("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
    let daemon = ObservedDaemon::daemon(&backend, &home, &[]);
    daemon.wait_until_ready();
    let (_, log_text) = daemon.stop();
    assert!(
        log_text.contains("grpc") && !log_text.contains("WARN"),
        "{log_text}"
    );
}

#[test]
fn a_heartbeat_accepts_a_custom_certificate_authority() {
    let Some(tls) = Tls::start() else { return };
    let (mut backend, home) = (Backend::file(), TempHome::new());
    backend.set(
        "SESSIOND_HEARTBEAT_URL",
        format!("https://localhost:{}/{SECRET}", tls.port),
    );
    let strange = ObservedDaemon::daemon(&backend, &home, &["--heartbeat-interval", "1s"]);
    eventually("it is not trusted", || {
        strange
            .metrics()
            .value("sessiond_heartbeats_total{result=\"failed\"}")
            >= 1.0
    });
    let (_, log_text) = strange.stop();
    assert!(
        log_text.contains("https://localhost") && !log_text.contains(SECRET),
        "{log_text}"
    );
    let trusted = ObservedDaemon::daemon(
        &backend,
        &home,
        &[
            "--heartbeat-interval",
            "1s",
            "--ca-file",
            tls.certificate(&home).to_str().unwrap(),
        ],
    );
    eventually("it is heard", || {
        trusted
            .metrics()
            .value("sessiond_heartbeats_total{result=\"sent\"}")
            >= 1.0
    });
    assert_eq!(trusted.stop().0, Some(0));
}

/// A web server with TLS, by `openssl`.
struct Tls {
    _process: backend::Running,
    directory: TempHome,
    port: u16,
}

impl Tls {
    fn start() -> Option<Tls> {
        let directory = TempHome::new();
        let openssl = |arguments: &[&str]| {
            let mut command = directory.command(Path::new("openssl"));
            command
                .args(arguments)
                .current_dir(directory.path())
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command
        };
        let make = [
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out",
            "cert.pem", "-days", "2",
        ];
        // Not as a certificate authority, which no client accepts as a server.
        let kind = ["-addext", "basicConstraints=critical,CA:FALSE"];
        let name = [
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
        ];
        match openssl(&[&make[..], &name, &kind].concat()).status() {
            Ok(made) if made.success() => {}
            _ => {
                crate::support::skip("openssl cannot make a certificate");
                return None;
            }
        }
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let accept = format!("127.0.0.1:{port}");
        let serve = [
            "s_server", "-accept", &accept, "-cert", "cert.pem", "-key", "key.pem", "-www",
            "-quiet",
        ];
        let process = backend::Running(openssl(&serve).spawn().unwrap());
        eventually("openssl serves", || TcpStream::connect(&accept).is_ok());
        Some(Tls {
            _process: process,
            directory,
            port,
        })
    }

    fn certificate(&self, home: &TempHome) -> std::path::PathBuf {
        let copy = home.path().join("ca.pem");
        std::fs::copy(self.directory.path().join("cert.pem"), &copy).unwrap();
        copy
    }
}
