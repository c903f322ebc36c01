//! PostgreSQL and S3 servers on loopback: one of each that all tests share, and private ones that a
//! test can stop. Owns their ports, settings and accounts.

use super::reaper::Reaper;
use super::{bare_command, block_on, fetch, or_skip, run};
use aws_sdk_s3::config::{
    BehaviorVersion, Config, Credentials, Region, retry::RetryConfig, timeout::TimeoutConfig,
};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::{fs::chown, process::CommandExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Returns the PostgreSQL that all tests share; none if the test must be skipped.
pub fn postgres() -> Option<&'static Postgres> {
    static SHARED: OnceLock<Result<Postgres, String>> = OnceLock::new();
    or_skip(
        SHARED
            .get_or_init(Postgres::new)
            .as_ref()
            .map_err(String::clone),
    )
}

/// Returns the S3 server that all tests share; none if the test must be skipped.
pub fn s3() -> Option<&'static S3> {
    static SHARED: OnceLock<Result<S3, String>> = OnceLock::new();
    or_skip(
        SHARED
            .get_or_init(|| S3::new(&[]))
            .as_ref()
            .map_err(String::clone),
    )
}

/// Returns a free port for which the gRPC port of SeaweedFS is free too. Both are below the
/// kernel's range for outgoing connections (from 32,768); otherwise a stopped server might not get
/// its port back.
fn free_port() -> u16 {
    const SPAN: u16 = 10_000;
    static NEXT: OnceLock<AtomicU16> = OnceLock::new();
    // Each process of these tests starts at another port.
    let next = NEXT
        .get_or_init(|| AtomicU16::new((uuid::Uuid::new_v4().as_u128() % u128::from(SPAN)) as u16));
    let free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    let candidates = (0..SPAN).map(|_| 12_000 + next.fetch_add(1, Ordering::Relaxed) % SPAN);
    candidates
        .into_iter()
        .find(|port| free(*port) && free(*port + GRPC_OFFSET))
        .expect("a free port")
}

pub struct Postgres {
    bin: PathBuf,
    port: u16,
    /// The account to run as, because PostgreSQL refuses to run as root.
    account: Option<(u32, u32)>,
    process: Mutex<Option<Child>>,
    reaper: Reaper,
}

impl Postgres {
    /// The password of the role `locked`, the only role that needs one.
    pub const PASSWORD: &str = "right-password";

    /// Starts a server for one test, which may stop it.
    pub fn start_private() -> Option<Postgres> {
        or_skip(Postgres::new())
    }

    fn new() -> Result<Postgres, String> {
        let bin = fetch::postgres_bin()?;
        // Another process may take the port before the server does.
        Postgres::with(&bin).or_else(|_| Postgres::with(&bin))
    }

    fn with(bin: &Path) -> Result<Postgres, String> {
        let account = rustix::process::geteuid()
            .is_root()
            .then(unprivileged_account)
            .transpose()?;
        let process = Mutex::new(None);
        let server = Postgres {
            bin: bin.into(),
            port: free_port(),
            account,
            process,
            reaper: Reaper::new("postgres", &[])?,
        };
        if let Some((uid, gid)) = server.account {
            chown(server.dir(), Some(uid), Some(gid))
                .map_err(|e| format!("chown {}: {e}", server.dir().display()))?;
        }
        run(server.command("initdb").args([
            "-U",
            "postgres",
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
        ]))?;
        let hba = "host all locked 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n";
        std::fs::write(server.data().join("pg_hba.conf"), hba)
            .map_err(|e| format!("write pg_hba.conf: {e}"))?;
        server.try_start()?;
        server.execute(format!(
            "CREATE ROLE locked LOGIN PASSWORD '{}'",
            Postgres::PASSWORD
        ));
        Ok(server)
    }

    /// Creates a database and returns its URL.
    pub fn fresh_database(&self) -> String {
        let name = format!("t{}", uuid::Uuid::new_v4().simple());
        self.execute(format!("CREATE DATABASE {name}"));
        self.url(&name)
    }

    /// Drops the database at a URL, with its connections, and creates it again, empty.
    pub fn recreate_database(&self, url: &str) {
        let url = url::Url::parse(url).unwrap();
        let name = url.path().trim_start_matches('/');
        self.execute(format!("DROP DATABASE {name} WITH (FORCE)"));
        self.execute(format!("CREATE DATABASE {name}"));
    }

    /// Creates a database of the role `locked`, which needs [`Postgres::PASSWORD`], and returns its
    /// URL.
    pub fn url_with_password(&self, password: &str) -> String {
        let mut url = url::Url::parse(&self.fresh_database()).unwrap();
        self.execute(format!(
            "ALTER DATABASE {} OWNER TO locked",
            url.path().trim_start_matches('/')
        ));
        url.set_username("locked").unwrap();
        url.set_password(Some(password)).unwrap();
        url.into()
    }

    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    pub fn dir(&self) -> &Path {
        self.reaper.dir()
    }

    /// Stops at once and closes all connections, like a crash; committed data survives.
    pub fn stop(&self) {
        if let Some(mut process) = self.process.lock().unwrap().take() {
            // PostgreSQL's immediate shutdown.
            kill_process(Pid::from_child(&process), Signal::QUIT).unwrap();
            process.wait().unwrap();
        }
    }

    /// Kills the server and all of its processes.
    pub fn kill(&self) {
        let Some(mut process) = self.process.lock().unwrap().take() else {
            return;
        };
        let server = Pid::from_child(&process);
        // A suspended postmaster can neither start processes nor react to the end of others.
        kill_process(server, Signal::STOP).unwrap();
        let children =
            std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", process.id())).unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        for pid in children.split_whitespace() {
            // An error means that the process has ended already.
            pid.parse()
                .ok()
                .and_then(Pid::from_raw)
                .map(|pid| kill_process(pid, Signal::KILL).ok());
            // Until then it holds memory that the next server wants. Nobody may be there to reap
            // it.
            let has_ended = || {
                std::fs::read_to_string(format!("/proc/{pid}/stat"))
                    .map_or(true, |stat| stat.contains(") Z "))
            };
            while !has_ended() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// Starts a stopped server with the same port and data, and waits until it responds.
    pub fn start(&self) {
        self.try_start().unwrap();
    }

    fn try_start(&self) -> Result<(), String> {
        let path = self.dir().join("log");
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|e| format!("open {}: {e}", path.display()))?;
        let mut command = self.command("postgres");
        command.args(["-p", &self.port.to_string()]);
        let settings = [
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "fsync=off",
            "shared_buffers=32MB",
            "max_connections=300",
        ];
        command
            .args(settings.iter().flat_map(|setting| ["-c", setting]))
            .process_group(0);
        command
            .stdin(std::process::Stdio::null())
            .stdout(log.try_clone().map_err(|e| e.to_string())?)
            .stderr(log);
        let process = command
            .spawn()
            .map_err(|e| format!("start PostgreSQL: {e}"))?;
        *self.process.lock().unwrap() = Some(process);
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(error) = block_on(PgConnection::connect(&self.url("postgres"))) {
            let ended = self
                .process
                .lock()
                .unwrap()
                .as_mut()
                .and_then(|process| process.try_wait().ok()?);
            if ended.is_some() || Instant::now() > deadline {
                return Err(format!("start PostgreSQL: {error}; {}", tail(&path)));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn url(&self, database: &str) -> String {
        format!("postgres://postgres@{}/{database}", self.addr())
    }

    pub fn execute(&self, sql: String) {
        block_on(async {
            let mut connection = PgConnection::connect(&self.url("postgres")).await.unwrap();
            sqlx::raw_sql(AssertSqlSafe(sql))
                .execute(&mut connection)
                .await
                .unwrap();
            connection.close().await.unwrap();
        });
    }

    fn data(&self) -> PathBuf {
        self.dir().join("data")
    }

    fn command(&self, program: &str) -> Command {
        let mut command = bare_command(&self.bin.join(program), self.dir());
        command.arg("-D").arg(self.data());
        if let Some((uid, gid)) = self.account {
            command.uid(uid).gid(gid);
        }
        command
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns Debian's account for the server, or `nobody`, which every machine has.
fn unprivileged_account() -> Result<(u32, u32), String> {
    let passwd =
        std::fs::read_to_string("/etc/passwd").map_err(|e| format!("read /etc/passwd: {e}"))?;
    let account = |name: &str| {
        let line = passwd
            .lines()
            .find(|line| line.split(':').next() == Some(name))?;
        let mut ids = line.split(':').skip(2).map_while(|id| id.parse().ok());
        Some((ids.next()?, ids.next()?))
    };
    account("postgres")
        .or_else(|| account("nobody"))
        .ok_or("/etc/passwd has neither postgres nor nobody".into())
}

/// The servers in one SeaweedFS process. Each has an HTTP port and a gRPC port.
const SERVICES: [&str; 4] = ["master", "volume", "filer", "s3"];
const GRPC_OFFSET: u16 = 10_000;

pub struct S3 {
    pub endpoint: String,
    pub access_key: String,
    pub secret_key: String,
    /// An account without any rights.
    pub denied_access_key: String,
    pub denied_secret_key: String,
    weed: PathBuf,
    /// Of each of the [`SERVICES`].
    ports: [u16; 4],
    process: Mutex<Option<Child>>,
    reaper: Reaper,
}

impl S3 {
    /// Starts a server for one test, which may stop it.
    pub fn start_private() -> Option<S3> {
        or_skip(S3::new(&[]))
    }

    /// Starts a server with more accounts: the key, secret and policy of each.
    pub fn start_with(accounts: &[(String, String, String)]) -> Option<S3> {
        or_skip(S3::new(accounts))
    }

    fn new(accounts: &[(String, String, String)]) -> Result<S3, String> {
        let weed = fetch::weed()?;
        S3::with(&weed, accounts).or_else(|_| S3::with(&weed, accounts))
    }

    fn with(weed: &Path, more: &[(String, String, String)]) -> Result<S3, String> {
        let ports = [(); 4].map(|()| free_port());
        // No flag changes these paths, and a killed server leaves the files behind.
        let sockets = SERVICES.iter().zip(ports);
        let sockets = sockets.map(|(part, port)| {
            format!("/tmp/seaweedfs-{part}-grpc-{}.sock", port + GRPC_OFFSET).into()
        });
        let sockets: Vec<PathBuf> = sockets.collect();
        let server = S3 {
            endpoint: format!("http://127.0.0.1:{}", ports[3]),
            access_key: "test-admin".into(),
            secret_key: "test-admin-secret".into(),
            denied_access_key: "test-denied".into(),
            denied_secret_key: "test-denied-secret".into(),
            weed: weed.into(),
            ports,
            process: Mutex::new(None),
            reaper: Reaper::new("s3", &sockets)?,
        };
        // Anonymous requests have all rights, because a proxy that edits a request breaks its
        // signature.
        let rights = ["Admin", "Read", "Write", "List", "Tagging"];
        let keys = |access: &str, secret: &str| serde_json::json!([{ "accessKey": access, "secretKey": secret }]);
        let mut accounts = serde_json::json!({ "policies": [], "identities": [
            { "name": "admin", "credentials": keys(&server.access_key, &server.secret_key), "actions": rights },
            { "name": "denied", "credentials": keys(&server.denied_access_key, &server.denied_secret_key), "actions": [] },
            { "name": "anonymous", "actions": rights },
        ]});
        for (name, secret, policy) in more {
            let account = serde_json::json!({ "name": name, "credentials": keys(name, secret), "actions": [], "policyNames": [name] });
            accounts["identities"].as_array_mut().unwrap().push(account);
            accounts["policies"]
                .as_array_mut()
                .unwrap()
                .push(serde_json::json!({ "name": name, "content": policy }));
        }
        std::fs::write(server.dir().join("s3.json"), accounts.to_string())
            .map_err(|e| format!("write s3.json: {e}"))?;
        server.try_start()?;
        Ok(server)
    }

    /// Creates a bucket and returns its name.
    pub fn fresh_bucket(&self) -> String {
        let name = format!("t{}", uuid::Uuid::new_v4().simple());
        let client = self.client(&self.endpoint);
        block_on(async { client.create_bucket().bucket(&name).send().await }).unwrap();
        name
    }

    /// Returns a client with all rights, without retries. `endpoint` may be a proxy.
    pub fn client(&self, endpoint: &str) -> aws_sdk_s3::Client {
        client(endpoint, &self.access_key, &self.secret_key)
    }

    pub fn denied_client(&self) -> aws_sdk_s3::Client {
        client(
            &self.endpoint,
            &self.denied_access_key,
            &self.denied_secret_key,
        )
    }

    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.ports[3]).into()
    }

    pub fn dir(&self) -> &Path {
        self.reaper.dir()
    }

    /// Kills the server, like a crash; acknowledged objects survive.
    pub fn stop(&self) {
        if let Some(mut process) = self.process.lock().unwrap().take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Starts a stopped server with the same ports and data, and waits until it responds.
    pub fn start(&self) {
        self.try_start().unwrap();
    }

    fn try_start(&self) -> Result<(), String> {
        let path = self.dir().join("log");
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|e| format!("open {}: {e}", path.display()))?;
        let mut command = bare_command(&self.weed, self.dir());
        // Each bucket has its own volumes, by default seven; many buckets would exhaust them.
        command.env("WEED_MASTER_VOLUME_GROWTH_COPY_1", "1");
        command.args([
            "-logtostderr=true",
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer",
            "-s3",
            "-s3.config=s3.json",
        ]);
        command.args([
            "-volume.max=10000",
            "-master.volumeSizeLimitMB=64",
            "-master.telemetry=false",
        ]);
        // Without other masters, a start takes 2.5 s instead of up to 20 s.
        command.arg("-master.peers=none");
        // By default, all instances use the same ports and the same sockets in /tmp.
        command.args([
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-filer.localSocket=filer.sock",
            "-s3.localSocket=s3.sock",
        ]);
        command.args(
            SERVICES
                .iter()
                .zip(self.ports)
                .map(|(part, port)| format!("-{part}.port={port}")),
        );
        command
            .arg(format!("-dir={}", self.dir().display()))
            .process_group(0);
        command
            .stdin(std::process::Stdio::null())
            .stdout(log.try_clone().map_err(|e| e.to_string())?)
            .stderr(log);
        let process = command
            .spawn()
            .map_err(|e| format!("start {}: {e}", self.weed.display()))?;
        *self.process.lock().unwrap() = Some(process);
        self.wait_until_ready()
            .map_err(|e| format!("start SeaweedFS: {e}; {}", tail(&path)))
    }

    /// Waits until an object can be stored. The gateway listens long before that.
    fn wait_until_ready(&self) -> Result<(), String> {
        let client = self.client(&self.endpoint);
        let deadline = Instant::now() + Duration::from_secs(60);
        block_on(async {
            loop {
                // After a restart the bucket exists; only the object shows that the server works.
                client.create_bucket().bucket("ready").send().await.ok();
                let Err(error) = client
                    .put_object()
                    .bucket("ready")
                    .key("ready")
                    .body(vec![b'x'].into())
                    .send()
                    .await
                else {
                    return Ok(());
                };
                if let Some(status) = self
                    .process
                    .lock()
                    .unwrap()
                    .as_mut()
                    .and_then(|process| process.try_wait().ok()?)
                {
                    return Err(format!("the server ended: {status}"));
                }
                if Instant::now() > deadline {
                    return Err(format!("no response within 60 s: {error:?}"));
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        self.stop();
    }
}

fn client(endpoint: &str, access_key: &str, secret_key: &str) -> aws_sdk_s3::Client {
    let config = Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .endpoint_url(endpoint)
        .region(Region::new("us-east-1"))
        .force_path_style(true)
        .credentials_provider(Credentials::new(access_key, secret_key, None, None, "test"))
        .retry_config(RetryConfig::disabled())
        .timeout_config(
            TimeoutConfig::builder()
                .operation_timeout(Duration::from_secs(20))
                .build(),
        );
    aws_sdk_s3::Client::from_conf(config.build())
}

/// Returns the end of a server's log for an error message.
fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
