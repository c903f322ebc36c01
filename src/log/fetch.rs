//! The fetch pipeline: reads segments in parallel and returns them decoded, in order.
//!
//! Owns the number of requests in flight and the memory of fetched segments. Does not own which
//! segments are read (`segments`) or what a failure means (`recovery`).

use std::collections::VecDeque;

use bytes::Bytes;
use tokio::task::{JoinError, JoinHandle};

use super::segments::Segment;
use super::{Logs, decode, decode_up_to, schedule};
use crate::codec::entry::{Entry, TARGET_RAW_BYTES};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{LogId, WriterId};
use crate::sys::blocking;

/// Maximum number of objects in flight: enough for all segments of a compacted log.
pub(super) const MAX_CONCURRENCY: usize = schedule::MAX_SEGMENTS as usize;

/// Maximum stored bytes in flight or waiting. Fetched segments wait as stored, because decoding
/// makes them several times larger.
const MAX_FETCHED_BYTES: u64 = 12 << 20;

/// Maximum stored bytes of segments that are decoded before they are consumed.
const MAX_DECODED_AHEAD_BYTES: u64 = 2 << 20;

/// Maximum number of segments that are decoded before they are consumed.
const MAX_DECODED_AHEAD: usize = 3;

/// Maximum raw bytes of a segment that is decoded before it is consumed: a small object can expand a
/// thousandfold. A backlog is uploaded in entries of about this size.
const MAX_DECODED_AHEAD_RAW_BYTES: u64 = TARGET_RAW_BYTES + (1 << 20);

/// Maximum stored bytes of a segment that is decoded without another thread. Decoding it takes about
/// as long as the change of threads.
const MAX_INLINE_BYTES: u64 = 4 << 10;

/// A key, the object stored there, and whether it is encrypted; none if it does not exist.
type Fetched = Result<Option<(String, Bytes, bool)>>;

/// A decoded segment, and whether it is encrypted; none if it does not exist.
pub(super) type Decoded = Result<Option<(Entry, bool)>>;

/// A segment that was decoded ahead, or that is decoded when it is consumed, and whether it is
/// encrypted.
enum Ahead {
    Missing,
    Decoded(Box<Entry>, bool),
    Stored(String, Bytes, bool),
}

/// Reads segments of a log, or of a branch, ahead of their consumer.
pub(super) struct SegmentFetcher<'a> {
    logs: &'a Logs,
    id: LogId,
    branch: Option<WriterId>,
    concurrency: usize,
    waiting: VecDeque<Segment>,
    fetching: TaskQueue<Fetched>,
    decoding: TaskQueue<Result<Ahead>>,
}

impl<'a> SegmentFetcher<'a> {
    /// A pipeline over `segments`, which are returned in this order.
    pub(super) fn new(
        logs: &'a Logs,
        id: &LogId,
        branch: Option<&WriterId>,
        segments: &[Segment],
        concurrency: usize,
    ) -> Self {
        logs.progress
            .add_expected(segments.iter().map(|segment| segment.size).sum());
        SegmentFetcher {
            logs,
            id: id.clone(),
            branch: branch.cloned(),
            concurrency,
            waiting: segments.iter().copied().collect(),
            fetching: TaskQueue::default(),
            decoding: TaskQueue::default(),
        }
    }

    /// Returns the next segment, decoded; none after the last.
    pub(super) async fn next(&mut self) -> Option<(Segment, Decoded)> {
        self.start_fetching();
        self.start_decoding();
        let (segment, decoded) = self.decoding.pop_if(|_| true)?;
        let ahead = decoded.await.map_err(task_failed).and_then(|ahead| ahead);
        self.logs.progress.add_done(segment.size);
        let decoded = match ahead {
            Ok(Ahead::Missing) => Ok(None),
            Ok(Ahead::Decoded(entry, is_encrypted)) => Ok(Some((*entry, is_encrypted))),
            Ok(Ahead::Stored(key, stored, is_encrypted)) => {
                blocking(|| decode(&self.id, &segment, &key, &stored))
                    .map(|entry| Some((entry, is_encrypted)))
            }
            Err(error) => Err(error),
        };
        Some((segment, decoded))
    }

    fn start_fetching(&mut self) {
        while let Some(segment) = self.waiting.pop_front_if(|segment| {
            let tasks = self.fetching.len() + self.decoding.len();
            let bytes = self.fetching.bytes + self.decoding.bytes + segment.size;
            tasks == 0 || tasks < self.concurrency && bytes <= MAX_FETCHED_BYTES
        }) {
            let store = self.logs.store.clone();
            let key = segment.key_in(&self.id, self.branch.as_ref());
            let fetch = async move {
                let read = store.get_with_encryption(&key).await?;
                Ok(read.map(|(stored, is_encrypted)| (key, stored, is_encrypted)))
            };
            self.fetching.push(segment, tokio::spawn(fetch));
        }
    }

    fn start_decoding(&mut self) {
        while let Some((segment, fetch)) = self.fetching.pop_if(|segment| {
            self.decoding.is_empty()
                || self.decoding.len() < MAX_DECODED_AHEAD
                    && self.decoding.bytes + segment.size <= MAX_DECODED_AHEAD_BYTES
        }) {
            let id = self.id.clone();
            let decode = async move {
                let Some((key, stored, is_encrypted)) = fetch.await.map_err(task_failed)?? else {
                    return Ok(Ahead::Missing);
                };
                let max = MAX_DECODED_AHEAD_RAW_BYTES;
                let decode = || decode_up_to(&id, &segment, &key, &stored, max);
                let decoded = match segment.size > MAX_INLINE_BYTES {
                    true => blocking(decode),
                    false => decode(),
                };
                Ok(match decoded? {
                    None => Ahead::Stored(key, stored, is_encrypted),
                    Some(entry) => Ahead::Decoded(Box::new(entry), is_encrypted),
                })
            };
            // A task per segment, so that decoding uses every core.
            self.decoding.push(segment, tokio::spawn(decode));
        }
    }
}

/// Segments in order, each with its task.
struct TaskQueue<T> {
    tasks: VecDeque<(Segment, JoinHandle<T>)>,
    /// Their size as stored.
    bytes: u64,
}

impl<T> Default for TaskQueue<T> {
    fn default() -> Self {
        TaskQueue {
            tasks: VecDeque::new(),
            bytes: 0,
        }
    }
}

impl<T> TaskQueue<T> {
    fn len(&self) -> usize {
        self.tasks.len()
    }

    fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    fn push(&mut self, segment: Segment, task: JoinHandle<T>) {
        self.bytes += segment.size;
        self.tasks.push_back((segment, task));
    }

    fn pop_if(
        &mut self,
        may_start: impl FnOnce(&Segment) -> bool,
    ) -> Option<(Segment, JoinHandle<T>)> {
        let (segment, task) = self.tasks.pop_front_if(|(segment, _)| may_start(segment))?;
        self.bytes -= segment.size;
        Some((segment, task))
    }
}

fn task_failed(cause: JoinError) -> Error {
    Error::new(ErrorKind::Internal, "read a segment").caused_by(cause)
}
