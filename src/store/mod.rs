//! Object stores: where the log lives.
//!
//! Owns the contract that the session log is built on. Does not own keys (`model/keys.rs`), retries of a flush
//! (`capture`), or the question whether a store honours conditions (`log/probe.rs` asks it).

pub mod encrypted;
pub mod file;
pub mod limited;
pub mod retrying;
pub mod s3;

use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;

use crate::error::Result;

/// What a conditional create did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// The object is new and ours.
    New,
    /// The key was taken; nothing changed.
    Exists,
}

/// One object of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Its whole key, without the store's prefix.
    pub key: String,
    /// Its size as stored.
    pub size: u64,
    /// When it was written, by the store's own clock: ages are compared with one another, never with ours.
    pub modified: Timestamp,
}

/// One page of a listing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    /// Objects directly below the prefix, in the order of their keys.
    pub objects: Vec<Object>,
    /// Directories directly below the prefix, each ending in `/`, in order.
    pub directories: Vec<String>,
    /// Pass this as `after` for the next page; none if this was the last.
    pub next: Option<String>,
}

/// A place that keeps objects.
///
/// # Contract
/// For those who call:
/// - An error of kind `Unavailable` from a write means *unknown*: it may have taken effect, or may still do so. Write
///   the same bytes to the same key again, or read the key.
/// - `list` sees every write that was answered before it began. Between pages anything may change.
/// - Bodies are small (an entry is a few MB at most) and kept in memory.
///
/// For those who implement:
/// - `create` must be atomic: of any number of racing creates of one key exactly one answers `New`, and an object is
///   never visible in part. A store that cannot promise that says so through `fences_by_itself`.
/// - What was answered is durable.
/// - Every call ends: it has a time-out, and dropping its future cancels it.
/// - Foreign errors are classified here: not there is `None`, denied and misconfigured are `Usage` with a hint, all
///   that may pass is `Unavailable`.
/// - No error and no `address` holds a secret.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Writes `key` if it does not exist.
    async fn create(&self, key: &str, body: Bytes) -> Result<Created>;

    /// Writes `key`, whatever is there.
    async fn put(&self, key: &str, body: Bytes) -> Result<()>;

    /// Reads `key`; none if it does not exist.
    async fn get(&self, key: &str) -> Result<Option<Bytes>>;

    /// Lists what is directly below `prefix` (a directory ends in `/`; anything else matches names that begin so), from
    /// behind `after` on, at most 1000 at a time.
    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page>;

    /// Removes `key`; removing what is not there is fine.
    async fn delete(&self, key: &str) -> Result<()>;

    /// `Some(true)` where `create` is known to be atomic by construction, `None` where only a probe can tell.
    fn fences_by_itself(&self) -> Option<bool>;

    /// The store's address for people, and its identity for the ledger.
    fn address(&self) -> String;
}

/// Lists all objects directly below `directory`, from behind `after` on.
pub async fn list_objects(
    store: &dyn Store,
    directory: &str,
    after: Option<String>,
) -> Result<Vec<Object>> {
    let mut all = Vec::new();
    let mut after = after;
    loop {
        let page = store.list(directory, after.as_deref()).await?;
        all.extend(page.objects);
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
}

/// Lists all directories directly below `prefix`.
pub async fn list_dirs(store: &dyn Store, prefix: &str) -> Result<Vec<String>> {
    let mut all = Vec::new();
    let mut after = None;
    loop {
        let page = store.list(prefix, after.as_deref()).await?;
        all.extend(page.directories);
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
}
