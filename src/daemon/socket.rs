//! The control socket: one JSON request and one JSON answer a connection, for the same user alone.

use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use crate::capture::handle::FlushReport;
use crate::capture::tracked_log::LogStatus;
use crate::daemon::lock::state_dir;
use crate::error::{Error, ErrorKind, Result};
use crate::model::SessionId;

/// Longest request: an id and a few words.
const LONGEST_REQUEST: u64 = 64 << 10;

/// What can be asked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Request {
    /// Make all durable that is on disk.
    Flush {
        /// Of this session alone.
        session: Option<SessionId>,
    },
    /// How everything stands.
    Status,
}

/// How everything stands.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    /// Of sessiond.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Restored and streaming.
    pub ready: bool,
    /// Whose files.
    pub agent: String,
    /// The tenant.
    pub namespace: String,
    /// The agent's directory.
    pub root: String,
    /// The object store.
    pub store: String,
    /// The index.
    pub index: String,
    /// Whether the index answered the last time.
    pub index_answers: bool,
    /// What the index is still to learn.
    pub index_waiting: usize,
    /// What keeps two writers apart.
    pub fencing: String,
    /// Why the agent's own database cannot be read, if it has one and so it is: what is in it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database_error: Option<String>,
    /// Every session.
    pub sessions: Vec<LogStatus>,
}

/// What is answered.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// To `flush`.
    Flushed(FlushReport),
    /// To `status`.
    Status(Box<Status>),
    /// It could not be done.
    Failed {
        /// The error as a person reads it.
        error: String,
        /// What to try.
        hint: Option<String>,
        /// What to do about it.
        #[serde(default = "unavailable")]
        kind: ErrorKind,
    },
}

impl Answer {
    /// It could not be done.
    pub fn failed(error: &Error) -> Answer {
        Answer::Failed {
            error: error.to_string(),
            hint: error.hint_text().map(str::to_owned),
            kind: error.kind(),
        }
    }
}

/// What a sessiond that does not say it most likely means.
fn unavailable() -> ErrorKind {
    ErrorKind::Unavailable
}

/// Answers requests.
#[async_trait::async_trait]
pub trait Answers: Send + Sync + 'static {
    /// Answers one.
    async fn answer(&self, request: Request) -> Answer;
}

/// Where the socket of a root is.
pub fn path(root: &Path) -> PathBuf {
    state_dir(root).join("socket")
}

/// A socket's address holds 107 bytes, and a home directory can be deeper than that: go through an open directory then.
struct Address {
    path: PathBuf,
    _folder: Option<std::fs::File>,
}

fn address(root: &Path) -> std::io::Result<Address> {
    let path = path(root);
    if path.as_os_str().len() <= 107 {
        return Ok(Address {
            path,
            _folder: None,
        });
    }
    let directory = std::fs::File::open(state_dir(root))?;
    Ok(Address {
        path: PathBuf::from(format!("/proc/self/fd/{}/socket", directory.as_raw_fd())),
        _folder: Some(directory),
    })
}

/// Listens until dropped. The caller holds the lock of the root, so a socket that is there is a dead one's.
pub fn listen(root: &Path, answers: Arc<dyn Answers>) -> Result<tokio::task::JoinHandle<()>> {
    let failed = |cause| Error::io(format!("listen on {}", path(root).display()), cause);
    let address = address(root).map_err(failed)?;
    let _ = std::fs::remove_file(path(root));
    let listener = UnixListener::bind(&address.path).map_err(failed)?;
    // The directory around it is closed to others too.
    std::fs::set_permissions(path(root), std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let answers = answers.clone();
                    tokio::spawn(async move {
                        if let Err(error) = serve(stream, &*answers).await {
                            tracing::debug!(%error, "a request on the control socket broke off");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "the control socket does not accept");
                    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                }
            }
        }
    }))
}

async fn serve(stream: UnixStream, answers: &dyn Answers) -> std::io::Result<()> {
    let peer = stream.peer_cred()?;
    let (read, mut write) = stream.into_split();
    let answer = if peer.uid() != rustix::process::geteuid().as_raw() && peer.uid() != 0 {
        Answer::failed(
            &Error::usage("only the user that runs this sessiond may ask it")
                .hint("run this as that user, or as root"),
        )
    } else {
        let mut line = String::new();
        BufReader::new(read.take(LONGEST_REQUEST))
            .read_line(&mut line)
            .await?;
        match serde_json::from_str(&line) {
            Ok(request) => answers.answer(request).await,
            Err(error) => Answer::failed(&Error::usage("read a request").caused_by(error)),
        }
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    write.write_all(&text).await?;
    write.shutdown().await
}

/// Asks the sessiond of a root.
pub async fn ask(root: &Path, request: &Request) -> Result<Answer> {
    let absent = |cause: std::io::Error| {
        use std::io::ErrorKind as E;
        let context = format!("ask the sessiond that keeps {}", root.display());
        let error = match cause.kind() {
            // No socket, or one that its sessiond has left behind.
            E::NotFound | E::NotADirectory | E::ConnectionRefused => {
                Error::unavailable(format!("{context}: there is none"))
            }
            _ => Error::unavailable(context).caused_by(cause),
        };
        error.hint("is it running? sessiond daemon starts it; --root says which directory is meant")
    };
    let address = address(root).map_err(absent)?;
    let mut stream = UnixStream::connect(&address.path).await.map_err(absent)?;
    let mut line = serde_json::to_vec(request)
        .map_err(|cause| Error::new(ErrorKind::Internal, "write a request").caused_by(cause))?;
    line.push(b'\n');
    let broke = |cause: std::io::Error| {
        Error::unavailable("hear from the sessiond that runs: it broke off").caused_by(cause)
    };
    stream.write_all(&line).await.map_err(broke)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.map_err(broke)?;
    serde_json::from_str(&answer).map_err(|cause| {
        Error::unavailable("hear from the sessiond that runs: it stopped before it answered")
            .caused_by(cause)
    })
}
