//! The bytes of a session: its files, its transcript by range or turn, and its archive.

use std::io::{self, Write};

use axum::body::{Body, Bytes};
use axum::http::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG,
    HeaderMap, HeaderValue, IF_RANGE, RANGE,
};
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc;

use super::access::Role;
use super::endpoint::{Answer, Call, Endpoint, Reply, get, matches_etag};
use super::problem::Problem;
use crate::error::{Error, Result};
use crate::model::{RelPath, RunningHash};
use crate::operations::export::Export;
use crate::operations::files::{self, FileCopy, ListedFile};
use crate::sessions::point;
use crate::sys::OpenFile;

/// Size of the chunks of a response.
const CHUNK_BYTES: u64 = 64 << 10;

/// Chunks of an archive that wait for the client.
const QUEUED_CHUNKS: usize = 4;

pub fn endpoints() -> Vec<Endpoint> {
    vec![
        get(
            "/sessions/{agent}/{session}/files",
            "listFiles",
            Role::Reader,
            "List the files of a session at a point.",
        )
        .json(list),
        get(
            "/sessions/{agent}/{session}/files/{*item}",
            "getFile",
            Role::Reader,
            "Get the bytes of a file at a point, or a range of them.",
        )
        .bytes("application/octet-stream", file),
        get(
            "/sessions/{agent}/{session}/transcript",
            "getTranscript",
            Role::Reader,
            "Get the transcript at a point, a range of its bytes, or the lines of one turn.",
        )
        .bytes("application/x-ndjson", transcript),
        get(
            "/sessions/{agent}/{session}/export",
            "exportSession",
            Role::Reader,
            "Get a session as one archive that \"sessiond import\" reads.",
        )
        .bytes("application/gzip", export),
    ]
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PointQuery {
    /// The point: latest, turn, turn:N, seq:N, a time or a checkpoint.
    at: Option<String>,
    /// The writer of a branch, or a prefix.
    branch: Option<String>,
}

/// The files of a session.
#[derive(Debug, Serialize, JsonSchema)]
struct FileList {
    /// The files, by path.
    files: Vec<ListedFile>,
}

async fn list(call: Call, query: PointQuery) -> Answer<FileList> {
    let spec = Call::point(query.at.as_deref())?;
    let (parts, id) = call.session()?;
    let _permit = call.api.log_read().await?;
    let branch = Call::branch(&parts, &id, query.branch.as_deref()).await?;
    let point = point::resolve_on(&parts.logs, &id, branch.as_ref(), &spec).await?;
    let files = files::list(&parts, &id, &point).await?;
    Ok(Reply::ok(FileList { files }))
}

async fn file(call: Call, query: PointQuery) -> Result<Response, Problem> {
    let spec = Call::point(query.at.as_deref())?;
    let path: RelPath = call
        .item()
        .parse()
        .map_err(|_| Error::usage(format!("invalid path {:?}", call.item())))?;
    let (parts, id) = call.session()?;
    let permit = call.api.log_read().await?;
    let branch = Call::branch(&parts, &id, query.branch.as_deref()).await?;
    let point = point::resolve_on(&parts.logs, &id, branch.as_ref(), &spec).await?;
    let copy = files::copy(&parts, &id, point, &path).await?;
    let content = Content::new(copy, None)?;
    Ok(content.respond(&call.headers, "application/octet-stream", permit))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct TranscriptQuery {
    /// The point: latest, turn, turn:N, seq:N, a time or a checkpoint.
    at: Option<String>,
    /// The writer of a branch, or a prefix.
    branch: Option<String>,
    /// Only the lines of this turn.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    turn: Option<u64>,
}

async fn transcript(call: Call, query: TranscriptQuery) -> Result<Response, Problem> {
    let at = match (query.at, query.turn) {
        (Some(_), Some(_)) => return Err(Error::usage("use either at or turn, not both").into()),
        (at, turn) => at.or(turn.map(|turn| format!("turn:{turn}"))),
    };
    let spec = Call::point(at.as_deref())?;
    let (parts, id) = call.session()?;
    let permit = call.api.log_read().await?;
    let branch = Call::branch(&parts, &id, query.branch.as_deref()).await?;
    let branch = branch.as_ref();
    let point = point::resolve_on(&parts.logs, &id, branch, &spec).await?;
    let path = files::transcript_path(&parts, &id, &point).await?;
    let range = match query.turn {
        Some(turn) => Some(files::turn_range(&parts, &id, branch, &path, turn).await?),
        None => None,
    };
    let copy = files::copy(&parts, &id, point, &path).await?;
    let content = Content::new(copy, range)?;
    Ok(content.respond(&call.headers, "application/x-ndjson", permit))
}

async fn export(call: Call, query: PointQuery) -> Result<Response, Problem> {
    let spec = Call::point(query.at.as_deref())?;
    let (parts, id) = call.session()?;
    let permit = call.api.log_read().await?;
    let branch = Call::branch(&parts, &id, query.branch.as_deref()).await?;
    let export = Export::fetch(&parts, &id, branch.as_ref(), &spec).await?;
    let (sender, receiver) = mpsc::channel(QUEUED_CHUNKS);
    tokio::task::spawn_blocking(move || {
        let mut out = ChunkWriter {
            sender: sender.clone(),
            chunk: Vec::new(),
        };
        let written = export
            .write(false, &mut out)
            .and_then(|_| out.flush().map_err(|cause| Error::io("send", cause)));
        if let Err(error) = written {
            tracing::debug!(%error, "an archive was not sent completely");
            let _ = sender.blocking_send(Err(io::ErrorKind::BrokenPipe.into()));
        }
        drop(permit);
    });
    let chunks = futures_util::stream::unfold(receiver, |mut receiver| async move {
        let chunk: Option<io::Result<Bytes>> = receiver.recv().await;
        chunk.map(|chunk| (chunk, receiver))
    });
    let name = format!("attachment; filename=\"{}.tar.gz\"", id.name);
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("application/gzip")),
        (CONTENT_DISPOSITION, header(&name)),
    ];
    Ok((headers, Body::from_stream(chunks)).into_response())
}

/// Sends what is written in chunks. A client that reads slowly slows the writer down.
struct ChunkWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    chunk: Vec<u8>,
}

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.chunk.extend_from_slice(bytes);
        if self.chunk.len() as u64 >= CHUNK_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let chunk = Bytes::from(std::mem::take(&mut self.chunk));
        let sent = self.sender.blocking_send(Ok(chunk));
        sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Bytes to send: a file, or a part of it.
struct Content {
    file: Box<dyn OpenFile>,
    start: u64,
    len: u64,
    etag: String,
}

impl Content {
    fn new(copy: FileCopy, range: Option<(u64, u64)>) -> Result<Content> {
        let file = copy.file;
        let (start, end) = range.unwrap_or((0, copy.len));
        let (start, end) = (start.min(copy.len), end.min(copy.len));
        let mut hash = RunningHash::default();
        let mut at = start;
        while at < end {
            let chunk = read_chunk(&*file, at, end)
                .map_err(|cause| Error::io("read the copy of a file", cause))?;
            hash.update(&chunk);
            at += chunk.len() as u64;
        }
        Ok(Content {
            file,
            start,
            len: end - start,
            etag: format!("\"{:.32}\"", hash.digest().to_string()),
        })
    }

    /// The response to a request, which may ask for a range or have the bytes already.
    fn respond(
        self,
        request: &HeaderMap,
        media_type: &'static str,
        permit: OwnedSemaphorePermit,
    ) -> Response {
        let common: [(HeaderName, HeaderValue); 2] = [
            (ETAG, header(&self.etag)),
            (ACCEPT_RANGES, HeaderValue::from_static("bytes")),
        ];
        if matches_etag(request, &self.etag) {
            return (StatusCode::NOT_MODIFIED, common).into_response();
        }
        let is_same = request.get(IF_RANGE).is_none_or(|tag| tag == &self.etag);
        let range = request.get(RANGE).filter(|_| is_same);
        let range = range.and_then(|range| range.to_str().ok());
        let (status, first, len) = match range
            .map_or(Requested::All, |text| parse_range(text, self.len))
        {
            Requested::All => (StatusCode::OK, 0, self.len),
            Requested::Range(first, last) => (StatusCode::PARTIAL_CONTENT, first, last - first + 1),
            Requested::Unsatisfiable => {
                let problem = Problem::new(
                    StatusCode::RANGE_NOT_SATISFIABLE,
                    "range",
                    format!("the range is after the end: there are {} bytes", self.len),
                );
                let mut response = problem.into_response();
                let range = header(&format!("bytes */{}", self.len));
                response.headers_mut().insert(CONTENT_RANGE, range);
                return response;
            }
        };
        let mut headers = HeaderMap::from_iter(common);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        headers.insert(CONTENT_LENGTH, HeaderValue::from(len));
        let attachment = HeaderValue::from_static("attachment");
        headers.insert(CONTENT_DISPOSITION, attachment);
        if status == StatusCode::PARTIAL_CONTENT {
            let last = first + len - 1;
            let range = format!("bytes {first}-{last}/{}", self.len);
            headers.insert(CONTENT_RANGE, header(&range));
        }
        let (at, end) = (self.start + first, self.start + first + len);
        let state = (self.file, at, permit);
        let chunks =
            futures_util::stream::try_unfold(state, move |(file, at, permit)| async move {
                if at >= end {
                    return Ok::<_, io::Error>(None);
                }
                let chunk = read_chunk(&*file, at, end)?;
                let next = at + chunk.len() as u64;
                Ok(Some((Bytes::from(chunk), (file, next, permit))))
            });
        (status, headers, Body::from_stream(chunks)).into_response()
    }
}

fn read_chunk(file: &dyn OpenFile, at: u64, end: u64) -> io::Result<Vec<u8>> {
    let mut chunk = vec![0; (end - at).min(CHUNK_BYTES) as usize];
    let read = file.read_at(&mut chunk, at)?;
    if read == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    chunk.truncate(read);
    Ok(chunk)
}

fn header(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("invalid"))
}

/// The bytes that a request asks for.
#[derive(Debug, PartialEq, Eq)]
enum Requested {
    All,
    /// First and last byte.
    Range(u64, u64),
    Unsatisfiable,
}

/// Parses a `Range` header. A header that is invalid or has several ranges is ignored, as RFC 9110
/// allows.
fn parse_range(text: &str, len: u64) -> Requested {
    let parse = || -> Option<Requested> {
        let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
        let number = |text: &str| -> Option<u64> {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().unwrap_or(u64::MAX))
        };
        let (first, last) = match (first.trim(), last.trim()) {
            ("", last) => {
                let suffix = number(last)?;
                if suffix == 0 {
                    return Some(Requested::Unsatisfiable);
                }
                (len.saturating_sub(suffix), len.checked_sub(1))
            }
            (first, "") => (number(first)?, len.checked_sub(1)),
            (first, last) => {
                let (first, last) = (number(first)?, number(last)?);
                if last < first {
                    return None;
                }
                (first, len.checked_sub(1).map(|end| last.min(end)))
            }
        };
        Some(match last {
            Some(last) if first <= last => Requested::Range(first, last),
            _ => Requested::Unsatisfiable,
        })
    };
    parse().unwrap_or(Requested::All)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed_as_rfc_9110_says() {
        use Requested::{All, Range, Unsatisfiable};
        let cases = [
            ("bytes=0-0", 10, Range(0, 0)),
            ("bytes=2-5", 10, Range(2, 5)),
            ("bytes=2-", 10, Range(2, 9)),
            ("bytes=-3", 10, Range(7, 9)),
            ("bytes=-30", 10, Range(0, 9)),
            ("bytes=0-99", 10, Range(0, 9)),
            ("bytes=0-99999999999999999999999", 10, Range(0, 9)),
            ("bytes=10-", 10, Unsatisfiable),
            ("bytes=-0", 10, Unsatisfiable),
            ("bytes=0-", 0, Unsatisfiable),
            ("bytes=5-2", 10, All),
            ("bytes=0-1,3-4", 10, All),
            ("bytes=a-b", 10, All),
            ("lines=0-1", 10, All),
            ("", 10, All),
        ];
        for (text, len, expected) in cases {
            assert_eq!(parse_range(text, len), expected, "{text}");
        }
    }
}
