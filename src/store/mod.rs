//! Object stores, which hold the logs.
//!
//! Owns the contract that the log depends on, the back ends, and the decorators that all back ends
//! share. Does not own keys (`model/keys.rs`), retries of a flush (`capture`), or the probe for
//! conditional creates (`log/probe.rs`).

pub mod encrypted;
pub mod file;
mod key_option;
pub mod limited;
pub mod retrying;
pub mod s3;
pub mod signature;

use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;

use crate::error::{Error, ErrorKind, Result};
use crate::model::{keys, limits};

/// The result of a conditional create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreateOutcome {
    /// This call created the object.
    Created,
    /// The key exists; nothing changed.
    AlreadyExists,
}

/// One object of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Its key, without the store's prefix.
    pub key: String,
    /// Its size as stored.
    pub size: u64,
    /// When it was written, by the store's clock. Compare it only with other times of the store.
    pub modified: Timestamp,
}

/// One page of a listing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListPage {
    /// The objects directly below the prefix, ordered by key.
    pub objects: Vec<Object>,
    /// The directories directly below the prefix, each with a trailing `/`, in order.
    pub directories: Vec<String>,
    /// The `after` of the next page; none if this is the last page.
    pub next: Option<String>,
}

/// An object store.
///
/// # Contract
/// For callers:
/// - After a write that failed with `Unavailable` the outcome is *unknown*: the write may have
///   taken effect, or may still take effect later. Write the same bytes to the same key again, or
///   read the key.
/// - `list` includes every write that was acknowledged before it began. Anything may change between
///   pages.
/// - Bodies are small (an entry has a few MB at most) and are kept in memory. `check_len` limits
///   them.
///
/// For implementers:
/// - `create` is atomic: of any number of concurrent creates of one key exactly one returns
///   `Created`, and no reader sees part of an object. A store that does not guarantee this
///   returns `None` or `Some(false)` from `has_atomic_create`.
/// - An acknowledged write is durable.
/// - Every call has a timeout, and dropping its future cancels it.
/// - The store classifies foreign errors: a missing object is `None`, denied access and wrong
///   settings are `Usage` with a hint, temporary failures are `Unavailable`.
/// - `get` checks the size of an object with `check_len` before it reads it, and does not read more
///   bytes than that even if the declared size is wrong. `create` and `put` check it too.
/// - Neither errors nor `address` contain a secret.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Writes `key` if it does not exist.
    async fn create(&self, key: &str, body: Bytes) -> Result<CreateOutcome>;

    /// Writes `key`, whether it exists or not.
    async fn put(&self, key: &str, body: Bytes) -> Result<()>;

    /// Reads `key`; none if it does not exist.
    async fn get(&self, key: &str) -> Result<Option<Bytes>>;

    /// Lists up to 1000 objects and directories directly below `prefix`, in order, starting after
    /// the key `after`. A prefix that does not end in `/` matches all names that start with it.
    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage>;

    /// Lists up to 1000 objects below `directory`, at any depth, ordered by key, with one request. If
    /// `next` is set, there are more, and the page is not complete.
    async fn list_tree(&self, directory: &str) -> Result<ListPage>;

    /// Deletes `key`; succeeds if it does not exist.
    async fn delete(&self, key: &str) -> Result<()>;

    /// `Some(true)` if `create` is atomic by construction, `None` if that must be probed.
    fn has_atomic_create(&self) -> Option<bool>;

    /// The store's address: shown to users, and its identity in the ledger.
    fn address(&self) -> String;
}

/// Checks the size of the object at `key` against the limits of the format. A larger object was not
/// written by sessiond.
pub fn check_len(key: &str, len: u64) -> Result<()> {
    let max = keys::max_object_len(key);
    if len > max {
        return Err(Error::corrupt(format!(
            "the object has more than {max} bytes, the maximum for its kind"
        )));
    }
    Ok(())
}

/// Deletes a temporary object. A process without the right to delete leaves it to garbage
/// collection.
pub async fn delete_temporary(store: &dyn Store, key: &str) -> Result<()> {
    match store.delete(key).await {
        Err(error) if error.kind() == ErrorKind::Usage => {
            tracing::debug!(%error, key, "the object stays until the next garbage collection");
            Ok(())
        }
        deleted => deleted,
    }
}

/// Lists all objects directly below `directory`, starting after the key `after`.
pub async fn list_objects(
    store: &dyn Store,
    directory: &str,
    after: Option<String>,
) -> Result<Vec<Object>> {
    list_mapped(store, directory, after, Some).await
}

/// Lists the objects directly below `directory`, starting after the key `after`, and keeps only what
/// `map` makes of them.
pub async fn list_mapped<T: Send>(
    store: &dyn Store,
    directory: &str,
    after: Option<String>,
    map: impl Fn(Object) -> Option<T> + Send + Sync,
) -> Result<Vec<T>> {
    let mut mapped = Vec::new();
    list_pages(store, directory, after, |page| {
        mapped.extend(page.objects.into_iter().filter_map(&map));
    })
    .await?;
    Ok(mapped)
}

/// Lists all directories directly below `prefix`.
pub async fn list_dirs(store: &dyn Store, prefix: &str) -> Result<Vec<String>> {
    let mut directories = Vec::new();
    list_pages(store, prefix, None, |page| {
        directories.extend(page.directories);
    })
    .await?;
    Ok(directories)
}

async fn list_pages(
    store: &dyn Store,
    prefix: &str,
    mut after: Option<String>,
    mut add: impl FnMut(ListPage) + Send,
) -> Result<()> {
    let (mut objects, mut directories) = (0, 0);
    loop {
        let mut page = store.list(prefix, after.as_deref()).await?;
        objects += page.objects.len();
        directories += page.directories.len();
        if objects.max(directories) > limits::MAX_LISTED {
            return Err(too_many(prefix));
        }
        after = page.next.take();
        add(page);
        if after.is_none() {
            return Ok(());
        }
    }
}

fn too_many(prefix: &str) -> Error {
    Error::corrupt(format!(
        "cannot list {prefix}: it has more than {} objects",
        limits::MAX_LISTED
    ))
    .hint(format!(
        "delete the objects below {prefix} that sessiond did not write, and run \"sessiond gc\" more often"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bucket in which every listing goes on for ever.
    struct EndlessStore;

    #[async_trait]
    impl Store for EndlessStore {
        async fn create(&self, _: &str, _: Bytes) -> Result<CreateOutcome> {
            Ok(CreateOutcome::Created)
        }

        async fn put(&self, _: &str, _: Bytes) -> Result<()> {
            Ok(())
        }

        async fn get(&self, _: &str) -> Result<Option<Bytes>> {
            Ok(None)
        }

        async fn list(&self, prefix: &str, _: Option<&str>) -> Result<ListPage> {
            let object = Object {
                key: format!("{prefix}000000000001.gz"),
                size: 1,
                modified: Timestamp::UNIX_EPOCH,
            };
            Ok(ListPage {
                objects: vec![object; 1000],
                directories: vec![format!("{prefix}s/"); 1000],
                next: Some(prefix.to_owned()),
            })
        }

        async fn list_tree(&self, directory: &str) -> Result<ListPage> {
            self.list(directory, None).await
        }

        async fn delete(&self, _: &str) -> Result<()> {
            Ok(())
        }

        fn has_atomic_create(&self) -> Option<bool> {
            Some(true)
        }

        fn address(&self) -> String {
            "endless".into()
        }
    }

    #[tokio::test]
    async fn a_listing_of_millions_of_keys_ends_with_an_error() {
        let objects = list_mapped(&EndlessStore, "a/log/", None, |object| Some(object.size));
        let directories = list_dirs(&EndlessStore, "a/");
        for error in [objects.await.unwrap_err(), directories.await.unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.to_string().contains("more than 1000000"), "{error}");
        }
    }
}
