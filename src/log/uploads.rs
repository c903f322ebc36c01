//! Uploads of side files that do not fit into one entry. Pure.
//!
//! Owns which upload a part continues, and when an upload is abandoned. Does not own the bytes: each
//! reader of a log keeps what it needs per upload.

use std::collections::BTreeMap;

use crate::model::{EntryHeader, RelPath, WriterId};

/// The uploads of which the last part has not been read yet, by path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uploads<T>(BTreeMap<RelPath, Upload<T>>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Upload<T> {
    writer: WriterId,
    /// The length of the file up to the last part.
    end: u64,
    state: T,
}

impl<T> Default for Uploads<T> {
    fn default() -> Self {
        Uploads(BTreeMap::new())
    }
}

impl<T> Uploads<T> {
    /// Starts an entry, a merge or a snapshot: abandons the uploads of writers that wrote none of
    /// its entries.
    pub fn start_entry(&mut self, header: &EntryHeader) {
        self.0.retain(|_, upload| match &header.covers {
            Some(covers) => covers.writers.contains_key(&upload.writer),
            None => upload.writer == header.writer,
        });
    }

    /// Ends an entry, a merge or a snapshot: only its last writer can continue an upload.
    pub fn end_entry(&mut self, header: &EntryHeader) {
        self.0.retain(|_, upload| upload.writer == header.writer);
    }

    /// Removes the upload of a file that a part at `start` continues. An upload that the part does not
    /// continue is abandoned.
    pub fn take(&mut self, path: &RelPath, start: u64) -> Option<T> {
        let upload = self.0.remove(path).filter(|upload| upload.end == start);
        upload.map(|upload| upload.state)
    }

    /// Records an upload whose parts reach up to `end`.
    pub fn insert(&mut self, path: &RelPath, header: &EntryHeader, end: u64, state: T) {
        let writer = header.writer.clone();
        self.0.insert(path.clone(), Upload { writer, end, state });
    }

    /// Abandons all uploads.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The state of each upload.
    pub fn states(&self) -> impl Iterator<Item = &T> {
        self.0.values().map(|upload| &upload.state)
    }

    /// The path and the state of each upload.
    pub fn into_states(self) -> impl Iterator<Item = (RelPath, T)> {
        self.0
            .into_iter()
            .map(|(path, upload)| (path, upload.state))
    }
}
