//! The control socket: one line of JSON per request and per response, for the same user only.
//!
//! Owns the socket file and the protocol. Does not own the execution of requests.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::capture::handle::FlushReport;
use crate::capture::tracked_log::LogStatus;
use crate::error::{Error, ErrorKind, Result};
use crate::model::SessionId;
use crate::sys::lock::{state_dir, state_file};
use crate::sys::{Directory, Disk, STATE_DIR};

/// Maximum length of a request: an operation and an ID need far less.
const MAX_REQUEST_LEN: u64 = 64 << 10;

/// Maximum length of a response: the state of about 100,000 sessions.
const MAX_RESPONSE_LEN: u64 = 64 << 20;

/// Maximum number of open connections. More are closed at once, so that a client cannot use up the
/// file descriptors of the daemon.
const MAX_CONNECTIONS: usize = 64;

/// Number of connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// How long the daemon waits for a client to send its request, and to read the response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause after a failed `accept`, for example while the process is out of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_secs(1);

/// How long a client waits for a status. The daemon responds within one second under load.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// The start of the error if there is no daemon. Any other error means that it does not respond.
pub const NOT_RUNNING: &str = "no sessiond is running";

/// A request to the daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Request {
    /// Make everything durable that is on disk now.
    Flush {
        /// Only this session.
        session: Option<SessionId>,
    },
    /// Report the state of the daemon.
    Status,
}

/// The state of the daemon.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// The version of sessiond.
    pub version: String,
    /// The process ID.
    pub pid: u32,
    /// Whether the session is restored and sessiond is streaming.
    pub ready: bool,
    /// The agent.
    pub agent: String,
    /// The namespace.
    pub namespace: String,
    /// The agent's root.
    pub root: String,
    /// The store.
    pub store: String,
    /// The index.
    pub index: String,
    /// Whether the last update or check of the index succeeded.
    pub index_reachable: bool,
    /// Number of updates that the index has not received yet.
    pub index_backlog: usize,
    /// How often the index lost entries that this process had recorded, for example because its
    /// database was recreated. This process sends them again.
    #[serde(default)]
    pub index_losses: u64,
    /// The fence in use.
    pub fencing: String,
    /// Why the agent's database cannot be read, if the agent has one. Its changes are not uploaded
    /// until it can be read again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database_error: Option<String>,
    /// The state of each log.
    pub sessions: Vec<LogStatus>,
}

/// A response of the daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Response {
    /// The result of `flush`.
    Flushed(FlushReport),
    /// The result of `status`.
    Status(Box<DaemonStatus>),
    /// The request failed.
    Failed {
        /// The error message.
        error: String,
        /// What the user can do about it.
        hint: Option<String>,
        /// The kind of error.
        kind: ErrorKind,
    },
}

impl Response {
    /// The response to a request that failed.
    pub fn failed(error: &Error) -> Response {
        Response::Failed {
            error: error.to_string(),
            hint: error.hint_text().map(str::to_owned),
            kind: error.kind(),
        }
    }
}

/// Carries out requests.
#[async_trait::async_trait]
pub trait RequestHandler: Send + Sync + 'static {
    /// Carries out one request.
    async fn handle(&self, request: Request) -> Response;
}

/// The path of the control socket of a root.
fn path(root: &Path) -> PathBuf {
    state_dir(root).join("socket")
}

/// Removes the control socket.
pub fn remove(disk: &Disk) {
    if let Ok(path) = state_file("socket") {
        let _ = disk.remove(&path);
    }
}

/// The path of an open file or directory. An address through it cannot be redirected by a link, and
/// is never too long for a socket address. Without a `/proc`, it is the path that was opened.
fn open_file_path(file: impl AsFd, opened: PathBuf) -> PathBuf {
    let handle = PathBuf::from(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()));
    if handle.exists() { handle } else { opened }
}

/// Starts to serve requests; abort the task to stop. The caller holds the lock of the root, so an
/// existing socket file is stale.
pub fn listen(
    disk: &Disk,
    handler: Arc<dyn RequestHandler>,
) -> Result<tokio::task::JoinHandle<()>> {
    let failed = |cause| Error::io(format!("listen on {}", path(disk.root()).display()), cause);
    let listener = bind(disk).map_err(failed)?;
    let clients = AllowedClients {
        daemon: rustix::process::geteuid().as_raw(),
        owner: disk.file_owner().map(|owner| owner.uid),
    };
    Ok(tokio::spawn(accept(listener, clients, handler)))
}

fn bind(disk: &Disk) -> io::Result<UnixListener> {
    let directory = disk.create_directory(&STATE_DIR.parse().map_err(io::Error::other)?)?;
    remove(disk);
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    // The file gets this mode when it is created. Other users cannot enter the state directory
    // either, and every client is checked.
    let _ = fchmod(&socket, Mode::RUSR | Mode::WUSR);
    let directory_path = open_file_path(&directory, state_dir(disk.root()));
    let address = SocketAddrUnix::new(directory_path.join("socket"))?;
    disk.with_rights(|| rustix::net::bind(&socket, &address))??;
    disk.give_to_owner(&state_file("socket").map_err(io::Error::other)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    UnixListener::from_std(socket.into())
}

/// The users whose requests are carried out, besides root.
#[derive(Clone, Copy)]
struct AllowedClients {
    daemon: u32,
    /// The agent's user, whose hooks request a flush.
    owner: Option<u32>,
}

impl AllowedClients {
    fn contains(self, uid: u32) -> bool {
        uid == 0 || uid == self.daemon || Some(uid) == self.owner
    }
}

async fn accept(listener: UnixListener, clients: AllowedClients, handler: Arc<dyn RequestHandler>) {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let Ok(permit) = connections.clone().try_acquire_owned() else {
                    tracing::debug!("too many connections to the control socket; closing one");
                    continue;
                };
                let handler = handler.clone();
                tokio::spawn(async move {
                    if let Err(error) = serve(stream, clients, &*handler).await {
                        tracing::debug!(%error, "a request on the control socket failed");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the control socket cannot accept a connection; retrying");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

async fn serve(
    stream: UnixStream,
    clients: AllowedClients,
    handler: &dyn RequestHandler,
) -> io::Result<()> {
    let peer = stream.peer_cred()?;
    let (read, mut write) = stream.into_split();
    let response = if clients.contains(peer.uid()) {
        let mut line = String::new();
        let mut reader = BufReader::new(read.take(MAX_REQUEST_LEN));
        timeout(CLIENT_TIMEOUT, reader.read_line(&mut line)).await??;
        match serde_json::from_str(&line) {
            Ok(request) => handler.handle(request).await,
            Err(cause) => Response::failed(&Error::usage(format!("invalid request: {cause}"))),
        }
    } else {
        Response::failed(
            &Error::usage("only root and the daemon's user can use the control socket")
                .hint("run the command as the daemon's user, or with sudo"),
        )
    };
    let mut text = serde_json::to_vec(&response)?;
    text.push(b'\n');
    timeout(CLIENT_TIMEOUT, async {
        write.write_all(&text).await?;
        write.shutdown().await
    })
    .await?
}

/// Sends a request to the daemon of a root, and waits for the response: for a status at most
/// `STATUS_TIMEOUT`, because the daemon may be stopped (SIGSTOP) or hang. The time of a flush
/// depends on the store, so its caller limits it.
pub async fn send_request(root: &Path, request: &Request) -> Result<Response> {
    let response = exchange(root, request);
    match request {
        Request::Flush { .. } => response.await,
        Request::Status => match timeout(STATUS_TIMEOUT, response).await {
            Ok(response) => response,
            Err(_) => Err(unresponsive(root)),
        },
    }
}

/// The error for a daemon that accepts connections and does not respond.
fn unresponsive(root: &Path) -> Error {
    Error::unavailable(format!(
        "the sessiond for {} did not respond within {} seconds",
        root.display(),
        STATUS_TIMEOUT.as_secs()
    ))
    .hint(format!(
        "run \"ps -o pid,stat,args -p $(cat {})\"; the state T means that the process is stopped",
        state_dir(root).join("lock").display()
    ))
}

/// Opens the control socket of a root as a path.
fn open_socket(root: &Path) -> io::Result<File> {
    let path = state_file("socket").map_err(io::Error::other)?;
    let socket = Disk::new(root).open_path(Some(&path))?;
    match socket.metadata()?.file_type().is_socket() {
        true => Ok(socket),
        false => Err(io::ErrorKind::ConnectionRefused.into()),
    }
}

async fn exchange(root: &Path, request: &Request) -> Result<Response> {
    let unreachable = |cause: io::Error| {
        use io::ErrorKind as E;
        let error = match cause.kind() {
            // There is no socket, or its daemon has ended.
            E::NotFound | E::NotADirectory | E::ConnectionRefused => {
                Error::unavailable(format!("{NOT_RUNNING} for {}", root.display()))
            }
            _ => Error::unavailable(format!("connect to the daemon for {}", root.display()))
                .caused_by(cause),
        };
        error
            .hint("run \"sessiond daemon\" to start it, or pass --root to select another directory")
    };
    let socket = open_socket(root).map_err(unreachable)?;
    let mut stream = UnixStream::connect(open_file_path(&socket, path(root)))
        .await
        .map_err(unreachable)?;
    let mut line = serde_json::to_vec(request)
        .map_err(|cause| Error::new(ErrorKind::Internal, "encode a request").caused_by(cause))?;
    line.push(b'\n');
    let disconnected =
        |cause: io::Error| Error::unavailable("read the response of the daemon").caused_by(cause);
    stream.write_all(&line).await.map_err(disconnected)?;
    let mut text = String::new();
    stream
        .take(MAX_RESPONSE_LEN)
        .read_to_string(&mut text)
        .await
        .map_err(disconnected)?;
    if text.is_empty() {
        return Err(Error::unavailable("the daemon stopped before it responded"));
    }
    serde_json::from_str(&text)
        .map_err(|cause| Error::unavailable("parse the response of the daemon").caused_by(cause))
}
