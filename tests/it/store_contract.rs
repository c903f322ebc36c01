//! The contract of `Store`, run over every back end and decorator, and the errors of each back end
//! when its server or disk fails.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::join_all;
use sessiond::error::{Error, ErrorKind, Result};
use sessiond::store::encrypted::EncryptedStore;
use sessiond::store::encrypted::keyring::{self, KeySettings, Keyring};
use sessiond::store::encrypted::policy::{EncryptionPolicy, PlaintextReads};
use sessiond::store::file::FileStore;
use sessiond::store::limited::ConcurrencyLimited;
use sessiond::store::s3::{Checksums, Credentials, S3Settings, S3Store, Sse};
use sessiond::store::{CreateOutcome, ListPage, Object, Store, list_dirs, list_objects};

use crate::support::needs_servers;
use crate::support::servers::{S3, s3};
use crate::support::slow;

/// Objects in the directory that is listed in several pages.
const MANY: usize = 1005;

fn text(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

/// Checks everything a caller may rely on.
async fn check_contract(store: Arc<dyn Store>) {
    check_behavior(&store).await;
    check_sizes(&*store).await;
}

/// Checks everything but sizes: a decorator may change the stored size of a body.
async fn check_behavior(store: &Arc<dyn Store>) {
    check_conditional_create(&**store).await;
    check_concurrent_creates(store).await;
    check_bodies(&**store).await;
    check_unusual_keys(&**store).await;
    check_listing_depth(&**store).await;
    check_paging(&**store).await;
    check_deletes(&**store).await;
}

async fn check_conditional_create(store: &dyn Store) {
    assert_eq!(store.get("c/once").await.expect("get"), None);
    assert_eq!(
        store.create("c/once", text("first")).await.expect("create"),
        CreateOutcome::Created
    );
    assert_eq!(
        store
            .create("c/once", text("second"))
            .await
            .expect("create"),
        CreateOutcome::AlreadyExists
    );
    assert_eq!(store.get("c/once").await.expect("get"), Some(text("first")));
    store.put("c/once", text("third")).await.expect("put");
    assert_eq!(store.get("c/once").await.expect("get"), Some(text("third")));
    assert_eq!(
        store
            .create("c/once", text("fourth"))
            .await
            .expect("create"),
        CreateOutcome::AlreadyExists
    );
    // Neither a directory nor a path below an object is an object.
    assert_eq!(store.get("c").await.expect("get"), None);
    assert_eq!(store.get("c/once/below").await.expect("get"), None);
}

async fn check_concurrent_creates(store: &Arc<dyn Store>) {
    for round in 0..5 {
        let racers = (0..16).map(|racer: u32| {
            let store = Arc::clone(store);
            tokio::spawn(async move {
                // Large, distinct bodies, so that a mixed or short one is detected.
                let body = Bytes::from(vec![u8::try_from(racer).expect("small"); 20_000]);
                (racer, store.create(&format!("race/{round}/k"), body).await)
            })
        });
        let mut winners = Vec::new();
        for racer in join_all(racers).await {
            let (racer, created) = racer.expect("racer");
            // A server may respond to a race with 409, which is "unknown". Then the winner is one
            // of the callers with that response.
            match created {
                Ok(CreateOutcome::Created) => winners.push(racer),
                Ok(CreateOutcome::AlreadyExists) => {}
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
        }
        assert_eq!(winners.len(), 1, "round {round}: {winners:?}");
        let body = store
            .get(&format!("race/{round}/k"))
            .await
            .expect("get")
            .expect("there");
        assert!(
            body.len() == 20_000 && body.iter().all(|byte| u32::from(*byte) == winners[0]),
            "round {round}"
        );
    }
}

async fn check_bodies(store: &dyn Store) {
    store.put("b/empty", Bytes::new()).await.expect("put");
    assert_eq!(
        store
            .create("b/empty2", Bytes::new())
            .await
            .expect("create"),
        CreateOutcome::Created
    );
    assert_eq!(store.get("b/empty").await.expect("get"), Some(Bytes::new()));
    assert_eq!(
        store.get("b/empty2").await.expect("get"),
        Some(Bytes::new())
    );
    assert_eq!(
        store.create("b/empty", text("x")).await.expect("create"),
        CreateOutcome::AlreadyExists
    );
    let large: Bytes = (0..5_000_000_u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    assert_eq!(
        store
            .create("b/large", large.clone())
            .await
            .expect("create"),
        CreateOutcome::Created
    );
    assert!(store.get("b/large").await.expect("get").expect("there") == large);
}

async fn check_sizes(store: &dyn Store) {
    let sizes: Vec<u64> = list_objects(store, "b/", None)
        .await
        .expect("list")
        .iter()
        .map(|object| object.size)
        .collect();
    assert_eq!(sizes, [0, 0, 5_000_000]);
    assert!(
        store
            .list("l/", None)
            .await
            .expect("list")
            .objects
            .iter()
            .all(|object| object.size == 5)
    );
}

async fn check_unusual_keys(store: &dyn Store) {
    let keys = [
        "odd/%41",
        "odd/-x",
        "odd/.dot.json",
        "odd/a+b",
        "odd/a=b",
        "odd/a@b.c",
        "odd/a_b",
        "odd/c d",
        "odd/\u{e9}",
    ];
    for key in keys {
        assert_eq!(
            store.create(key, Bytes::from(key)).await.expect(key),
            CreateOutcome::Created,
            "{key}"
        );
    }
    for key in keys {
        assert_eq!(
            store.get(key).await.expect(key),
            Some(Bytes::from(key)),
            "{key}"
        );
        assert_eq!(
            store.create(key, text("again")).await.expect(key),
            CreateOutcome::AlreadyExists,
            "{key}"
        );
    }
    assert_eq!(store.get("odd/A").await.expect("get"), None, "%41 is not A");
    let listed: Vec<String> = list_objects(store, "odd/", None)
        .await
        .expect("list")
        .into_iter()
        .map(|object| object.key)
        .collect();
    assert_eq!(listed, keys);
    store.put("v1/.store.json", text("{}")).await.expect("put");
    assert_eq!(
        store.get("v1/.store.json").await.expect("get"),
        Some(text("{}"))
    );
}

async fn check_listing_depth(store: &dyn Store) {
    for key in [
        "l/a", "l/b/1", "l/b/2", "l/b-1/x", "l/b.x", "l/bc", "l/c/d/e", "l2/z",
    ] {
        store.put(key, text("12345")).await.expect("put");
    }
    let page = store.list("l/", None).await.expect("list");
    let keys: Vec<&str> = page
        .objects
        .iter()
        .map(|object| object.key.as_str())
        .collect();
    assert_eq!((keys, page.next), (vec!["l/a", "l/b.x", "l/bc"], None));
    assert_eq!(page.directories, ["l/b-1/", "l/b/", "l/c/"]);

    let tree = store.list_tree("l/").await.expect("list");
    let keys: Vec<&str> = tree
        .objects
        .iter()
        .map(|object| object.key.as_str())
        .collect();
    assert_eq!(
        keys,
        [
            "l/a", "l/b-1/x", "l/b.x", "l/b/1", "l/b/2", "l/bc", "l/c/d/e"
        ],
        "every depth"
    );
    assert!(tree.directories.is_empty() && tree.next.is_none());
    let missing = store.list_tree("l/missing/").await.expect("list");
    assert!(missing.objects.is_empty() && missing.next.is_none());

    let page = store.list("l/b", None).await.expect("list");
    let keys: Vec<&str> = page
        .objects
        .iter()
        .map(|object| object.key.as_str())
        .collect();
    assert_eq!(keys, ["l/b.x", "l/bc"], "a prefix that is not a directory");
    assert_eq!(page.directories, ["l/b-1/", "l/b/"]);

    let behind: Vec<String> = list_objects(store, "l/b/", Some("l/b/1".into()))
        .await
        .expect("list")
        .into_iter()
        .map(|o| o.key)
        .collect();
    assert_eq!(behind, ["l/b/2"]);
    assert_eq!(
        list_objects(store, "l/b/", Some("l/b/11".into()))
            .await
            .expect("list")
            .len(),
        1,
        "after needs not exist"
    );
    assert!(
        list_objects(store, "l/b/", Some("l/b/2".into()))
            .await
            .expect("list")
            .is_empty()
    );
    let page = store.list("l/", Some("l/b/")).await.expect("list");
    assert_eq!(
        page.directories,
        ["l/c/"],
        "from behind a directory on, without the directory"
    );

    let top = list_dirs(store, "").await.expect("list");
    assert!(
        top.contains(&"l/".to_owned()) && top.contains(&"l2/".to_owned()),
        "{top:?}"
    );
    assert!(
        !top.iter().any(|directory| directory.starts_with('.')),
        "{top:?}"
    );
    for nothing in ["nothing/", "nothing", "l/a/", "l/x/y/z/"] {
        assert_eq!(
            store.list(nothing, None).await.expect("list"),
            Default::default(),
            "{nothing}"
        );
    }
}

async fn check_paging(store: &dyn Store) {
    let objects: Vec<String> = (0..MANY).map(|n| format!("many/o/{n:012}.gz")).collect();
    let directories: Vec<String> = (0..MANY).map(|n| format!("many/f/{n:04}-x/")).collect();
    // Names with a character lower than a slash sort differently as directories: none may be lost
    // at the end of a page.
    let stems: Vec<String> = (0..MANY / 2)
        .flat_map(|n| [format!("many/s/{n:04}/"), format!("many/s/{n:04}-y/")])
        .collect();
    let keys = objects.iter().cloned().chain(
        directories
            .iter()
            .chain(&stems)
            .map(|directory| format!("{directory}k")),
    );
    let keys: Vec<String> = keys.collect();
    for some in keys.chunks(32) {
        for done in join_all(some.iter().map(|key| store.create(key, text("x")))).await {
            assert_eq!(done.expect("create"), CreateOutcome::Created);
        }
    }

    let first = store.list("many/o/", None).await.expect("list");
    assert!(first.objects.len() <= 1000 && first.next.is_some());
    for directory in ["many/", "many/o/", "many/f/"] {
        let tree = store.list_tree(directory).await.expect("list");
        assert!(tree.next.is_some(), "{directory} has more than a page");
    }
    let last = first.objects.last().expect("some").key.clone();
    let all: Vec<String> = list_objects(store, "many/o/", None)
        .await
        .expect("list")
        .into_iter()
        .map(|object| object.key)
        .collect();
    assert!(all == objects, "{} of {MANY}", all.len());
    // A reader that stopped continues after the last key it read, or after the page token, or
    // repeats the request.
    let rest: Vec<String> = list_objects(store, "many/o/", Some(last.clone()))
        .await
        .expect("list")
        .into_iter()
        .map(|o| o.key)
        .collect();
    assert!(
        rest.iter().eq(objects.iter().filter(|key| **key > last)),
        "{rest:?}"
    );
    for _ in 0..2 {
        let rest = list_objects(store, "many/o/", first.next.clone())
            .await
            .expect("list");
        assert_eq!(rest.len(), MANY - first.objects.len());
    }

    assert!(list_dirs(store, "many/f/").await.expect("list") == directories);
    let all = list_dirs(store, "many/s/").await.expect("list");
    assert_eq!(all.len(), stems.len(), "each once");
    assert_eq!(
        all.into_iter().collect::<BTreeSet<_>>(),
        stems.into_iter().collect::<BTreeSet<_>>()
    );
}

async fn check_deletes(store: &dyn Store) {
    store.put("d/e/f", text("x")).await.expect("put");
    for _ in 0..2 {
        store.delete("d/e/f").await.expect("delete");
    }
    store.delete("never/was").await.expect("delete");
    assert_eq!(store.get("d/e/f").await.expect("get"), None);
    assert!(
        list_objects(store, "d/e/", None)
            .await
            .expect("list")
            .is_empty()
    );
    assert_eq!(
        store.create("d/e/f", text("anew")).await.expect("create"),
        CreateOutcome::Created
    );
}

fn settings(server: &S3, bucket: &str, prefix: &str) -> S3Settings {
    S3Settings {
        prefix: prefix.to_owned(),
        endpoint: Some(server.endpoint.clone()),
        region: Some("us-east-1".to_owned()),
        credentials: Some(Credentials {
            access_key: server.access_key.clone(),
            secret_key: server.secret_key.clone(),
        }),
        ..S3Settings::new(bucket)
    }
}

fn unreachable_endpoint(endpoint: String) -> S3Settings {
    let credentials = Some(Credentials {
        access_key: "key".into(),
        secret_key: "hunter2".into(),
    });
    S3Settings {
        endpoint: Some(endpoint),
        region: Some("us-east-1".into()),
        credentials,
        ..S3Settings::new("bucket")
    }
}

/// The server; reports the test as skipped if there is none.
fn server(test: &str) -> Option<&'static S3> {
    let server = s3();
    if server.is_none() {
        eprintln!("SKIPPED {test}: no S3 server");
    }
    server
}

fn open(directory: &Path) -> FileStore {
    FileStore::open(directory.join("store")).expect("open")
}

slow!(async file_store_fulfills_the_contract);
async fn file_store_fulfills_the_contract() {
    let directory = tempfile::tempdir().expect("directory");
    check_contract(Arc::new(open(directory.path()))).await;
    assert_eq!(
        std::fs::read_dir(directory.path().join("store/.tmp"))
            .expect("temp")
            .count(),
        0,
        "no temp file stays"
    );
}

slow!(async limited_file_store_fulfills_the_contract);
async fn limited_file_store_fulfills_the_contract() {
    let directory = tempfile::tempdir().expect("directory");
    let limited = ConcurrencyLimited::new(Arc::new(open(directory.path())), 3);
    assert_eq!(limited.has_atomic_create(), Some(true));
    check_contract(Arc::new(limited)).await;
}

/// A store below one directory of a log, where everything is encrypted.
struct PrefixedStore(EncryptedStore);

const LOG: &str = "v1/team/claude-code/s1/log/";
const PAGE_MARK: &str = "page:";

#[async_trait]
impl Store for PrefixedStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<CreateOutcome> {
        self.0.create(&format!("{LOG}{key}"), body).await
    }

    async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        self.0.put(&format!("{LOG}{key}"), body).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>> {
        self.0.get(&format!("{LOG}{key}")).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage> {
        // A page token is opaque and may not be a key.
        let after = after.map(|after| {
            after
                .strip_prefix(PAGE_MARK)
                .map_or_else(|| format!("{LOG}{after}"), str::to_owned)
        });
        let page = self
            .0
            .list(&format!("{LOG}{prefix}"), after.as_deref())
            .await?;
        let short = |key: String| key.strip_prefix(LOG).expect("below").to_owned();
        Ok(ListPage {
            objects: page
                .objects
                .into_iter()
                .map(|object| Object {
                    key: short(object.key),
                    ..object
                })
                .collect(),
            directories: page.directories.into_iter().map(short).collect(),
            next: page.next.map(|next| format!("{PAGE_MARK}{next}")),
        })
    }

    async fn list_tree(&self, directory: &str) -> Result<ListPage> {
        let page = self.0.list_tree(&format!("{LOG}{directory}")).await?;
        let objects = page.objects.into_iter().map(|object| Object {
            key: object.key.strip_prefix(LOG).expect("below").to_owned(),
            ..object
        });
        Ok(ListPage {
            objects: objects.collect(),
            ..page
        })
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.0.delete(&format!("{LOG}{key}")).await
    }

    fn has_atomic_create(&self) -> Option<bool> {
        self.0.has_atomic_create()
    }

    fn address(&self) -> String {
        self.0.address()
    }
}

/// Encrypts to a key that is created in the directory.
fn encrypted(inner: impl Store, directory: &Path) -> EncryptedStore {
    let path = directory.join("key.txt");
    std::fs::write(&path, keyring::generate().0).expect("write");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("set the mode");
    let keyring = Keyring::load(&KeySettings {
        identity_files: vec![path],
        ..KeySettings::default()
    })
    .expect("a key");
    EncryptedStore::new(
        Arc::new(inner),
        EncryptionPolicy::new(keyring, PlaintextReads::Accept),
    )
}

slow!(async encrypted_file_store_fulfills_the_contract);
async fn encrypted_file_store_fulfills_the_contract() {
    let directory = tempfile::tempdir().expect("directory");
    let bare = open(directory.path());
    // Objects outside a log are not encrypted, so their sizes are unchanged.
    check_contract(Arc::new(encrypted(
        open(directory.path()),
        directory.path(),
    )))
    .await;
    assert_eq!(bare.get("c/once").await.expect("get"), Some(text("third")));
    let below: Arc<dyn Store> = Arc::new(PrefixedStore(encrypted(
        open(directory.path()),
        directory.path(),
    )));
    check_behavior(&below).await;
    let stored = bare
        .get(&format!("{LOG}c/once"))
        .await
        .expect("get")
        .expect("there");
    assert!(
        stored.starts_with(b"age-encryption.org/v1"),
        "it is encrypted"
    );
    assert!(
        !stored.windows(5).any(|window| window == b"third"),
        "it is encrypted"
    );
}

needs_servers!(async encrypted_s3_store_fulfills_the_contract);
async fn encrypted_s3_store_fulfills_the_contract() {
    let Some(server) = server("encrypted_s3_store_fulfills_the_contract") else {
        return;
    };
    let directory = tempfile::tempdir().expect("directory");
    let store = S3Store::connect(settings(server, &server.fresh_bucket(), "p"))
        .await
        .expect("connect");
    let below: Arc<dyn Store> = Arc::new(PrefixedStore(encrypted(store, directory.path())));
    check_behavior(&below).await;
}

needs_servers!(async s3_store_fulfills_the_contract);
async fn s3_store_fulfills_the_contract() {
    let Some(server) = server("s3_store_fulfills_the_contract") else {
        return;
    };
    let store = S3Store::connect(settings(server, &server.fresh_bucket(), ""))
        .await
        .expect("connect");
    assert_eq!(store.has_atomic_create(), None);
    check_contract(Arc::new(store)).await;
}

needs_servers!(async limited_s3_store_with_a_prefix_fulfills_the_contract);
async fn limited_s3_store_with_a_prefix_fulfills_the_contract() {
    let Some(server) = server("limited_s3_store_with_a_prefix_fulfills_the_contract") else {
        return;
    };
    let settings = S3Settings {
        checksums: Some(Checksums::Required),
        ..settings(server, &server.fresh_bucket(), "some/where")
    };
    let store = S3Store::connect(settings).await.expect("connect");
    check_contract(Arc::new(ConcurrencyLimited::new(Arc::new(store), 4))).await;
}

needs_servers!(async s3_prefixes_are_isolated);
async fn s3_prefixes_are_isolated() {
    let Some(server) = server("s3_prefixes_are_isolated") else {
        return;
    };
    let bucket = server.fresh_bucket();
    let [one, two, whole] =
        ["team", "team-2", ""].map(|prefix| S3Store::connect(settings(server, &bucket, prefix)));
    let (one, two, whole) = (
        one.await.expect("connect"),
        two.await.expect("connect"),
        whole.await.expect("connect"),
    );
    assert_eq!(
        one.create("k", text("one")).await.expect("create"),
        CreateOutcome::Created
    );
    assert_eq!(
        two.create("k", text("two")).await.expect("create"),
        CreateOutcome::Created
    );
    assert_eq!(one.get("k").await.expect("get"), Some(text("one")));
    assert_eq!(list_objects(&one, "", None).await.expect("list").len(), 1);
    assert_eq!(
        list_dirs(&whole, "").await.expect("list"),
        ["team-2/", "team/"]
    );
    two.delete("k").await.expect("delete");
    assert_eq!(one.get("k").await.expect("get"), Some(text("one")));
    assert_eq!(
        one.address(),
        format!("s3://{bucket}/team at {}", server.endpoint)
    );
}

/// Checks the requests on the wire: SeaweedFS accepts no encryption without its own keys.
#[tokio::test]
async fn s3_creates_send_condition_checksum_and_encryption() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("bind");
    let endpoint = format!("http://{}", listener.local_addr().expect("address"));
    let serve = tokio::spawn(async move {
        let mut seen = Vec::new();
        for _ in 0..2 {
            let (mut peer, _) = listener.accept().await.expect("accept");
            let mut asked = Vec::new();
            while !asked.windows(4).any(|end| end == b"\r\n\r\n") {
                assert_ne!(peer.read_buf(&mut asked).await.expect("read"), 0);
            }
            seen.push(String::from_utf8_lossy(&asked).to_lowercase());
            peer.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                .await
                .expect("write");
        }
        seen
    });
    let kms = S3Settings {
        sse: Some(Sse::Kms(Some("key-1".into()))),
        prefix: "p".into(),
        ..unreachable_endpoint(endpoint.clone())
    };
    let store = S3Store::connect(kms).await.expect("connect");
    assert_eq!(
        store.create("k", text("x")).await.expect("create"),
        CreateOutcome::Created
    );
    let plain = S3Settings {
        sse: Some(Sse::Aes256),
        checksums: Some(Checksums::Required),
        ..unreachable_endpoint(endpoint)
    };
    S3Store::connect(plain)
        .await
        .expect("connect")
        .put("k", text("x"))
        .await
        .expect("put");
    let seen = serve.await.expect("server");
    let lines = [
        "put /bucket/p/k?",
        "if-none-match: *",
        "x-amz-server-side-encryption: aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id: key-1",
        "x-amz-checksum-crc32: ",
    ];
    for line in lines {
        assert!(seen[0].contains(line), "{line} in {}", seen[0]);
    }
    assert!(
        seen[1].contains("x-amz-server-side-encryption: aes256"),
        "{}",
        seen[1]
    );
    assert!(
        !seen[1].contains("if-none-match") && !seen[1].contains("x-amz-checksum"),
        "{}",
        seen[1]
    );
}

/// Makes all five calls; each must fail.
async fn all_errors(store: &dyn Store) -> Vec<Error> {
    vec![
        store.create("v1/k", text("x")).await.expect_err("create"),
        store.put("v1/k", text("x")).await.expect_err("put"),
        store.get("v1/k").await.expect_err("get"),
        store.list("v1/", None).await.expect_err("list"),
        store.delete("v1/k").await.expect_err("delete"),
    ]
}

fn assert_all(errors: &[Error], kind: ErrorKind, hint: &str) {
    for error in errors {
        assert_eq!(error.kind(), kind, "{error}");
        assert!(
            error.hint_text().is_some_and(|text| text.contains(hint)),
            "{error}: {:?}",
            error.hint_text()
        );
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
    }
}

needs_servers!(async a_missing_bucket_is_a_usage_error);
async fn a_missing_bucket_is_a_usage_error() {
    let Some(server) = server("a_missing_bucket_is_a_usage_error") else {
        return;
    };
    let store = S3Store::connect(settings(server, "no-such-bucket-here", ""))
        .await
        .expect("connect");
    let errors = [
        store.get("v1/k").await.expect_err("get"),
        store.list("v1/", None).await.expect_err("list"),
    ];
    assert_all(&errors, ErrorKind::Usage, "no-such-bucket-here");
}

needs_servers!(async wrong_credentials_are_rejected);
async fn wrong_credentials_are_rejected() {
    let Some(server) = server("wrong_credentials_are_rejected") else {
        return;
    };
    let bucket = server.fresh_bucket();
    for access_key in [server.access_key.clone(), "nobody".to_owned()] {
        let credentials = Some(Credentials {
            access_key,
            secret_key: "hunter2".into(),
        });
        let store = S3Store::connect(S3Settings {
            credentials,
            ..settings(server, &bucket, "")
        })
        .await
        .expect("connect");
        assert_all(
            &all_errors(&store).await,
            ErrorKind::Usage,
            "AWS_SECRET_ACCESS_KEY",
        );
    }
}

#[tokio::test]
async fn a_refused_connection_is_unavailable() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("address").port();
    drop(listener);
    let store = S3Store::connect(unreachable_endpoint(format!("http://127.0.0.1:{port}")))
        .await
        .expect("connect");
    let errors = all_errors(&store).await;
    assert_all(&errors, ErrorKind::Unavailable, "server is running");
    let message = errors[1].to_string();
    assert!(
        message.starts_with("cannot put v1/k in s3://bucket: ")
            && message.to_lowercase().contains("connection refused"),
        "{message}"
    );
}

#[tokio::test]
async fn a_silent_server_is_unavailable_in_time() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let endpoint = format!("http://{}", listener.local_addr().expect("address"));
    let store = S3Store::connect(S3Settings {
        timeout: Duration::from_millis(300),
        ..unreachable_endpoint(endpoint)
    })
    .await
    .expect("connect");
    let began = Instant::now();
    assert_all(
        &all_errors(&store).await,
        ErrorKind::Unavailable,
        "server is running",
    );
    assert!(
        began.elapsed() < Duration::from_secs(4),
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test]
async fn an_interrupted_body_is_unavailable_in_time() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("bind");
    let endpoint = format!("http://{}", listener.local_addr().expect("address"));
    let serve = tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut peer, _)) = listener.accept().await {
            let _ = peer.read(&mut [0; 4096]).await;
            let _ = peer
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
                .await;
            // The first connection stays open; the second is closed.
            if open.is_empty() {
                open.push(peer);
            }
        }
    });
    let store = S3Store::connect(S3Settings {
        timeout: Duration::from_millis(500),
        ..unreachable_endpoint(endpoint)
    })
    .await
    .expect("connect");
    for _ in 0..2 {
        let error = tokio::time::timeout(Duration::from_secs(5), store.get("v1/k"))
            .await
            .expect("in time")
            .expect_err("half");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    serve.abort();
}

#[tokio::test]
async fn a_bad_ca_file_is_a_usage_error() {
    let directory = tempfile::tempdir().expect("directory");
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (name, content) in [
        ("missing", None),
        ("empty", Some("")),
        ("text", Some("hello")),
        ("broken", Some(broken)),
        ("cut", Some(&broken[..35])),
    ] {
        let path = directory.path().join(name);
        if let Some(content) = content {
            std::fs::write(&path, content).expect("write");
        }
        let settings = S3Settings {
            ca_file: Some(path.clone()),
            ..unreachable_endpoint("https://127.0.0.1:1".into())
        };
        let error = S3Store::connect(settings).await.expect_err(name);
        assert_eq!(error.kind(), ErrorKind::Usage, "{name}: {error}");
        assert!(
            error.to_string().contains(path.to_str().expect("plain")),
            "{error}"
        );
    }
}

#[tokio::test]
async fn the_file_store_rejects_bad_keys() {
    let directory = tempfile::tempdir().expect("directory");
    let store = open(directory.path());
    for key in ["", "/abs", "../up", "a/../../b", "a//b", "a/", ".tmp/x"] {
        let error = store.create(key, text("x")).await.expect_err(key);
        assert_eq!(error.kind(), ErrorKind::Usage, "{key:?}");
        assert_eq!(
            store.get(key).await.expect_err(key).kind(),
            ErrorKind::Usage
        );
    }
    assert!(!directory.path().join("up").exists());
    // A directory cannot contain both `a` and `a/b`. The store returns an error instead of
    // retrying, and never lists a directory as an object.
    store.put("a", text("x")).await.expect("put");
    store.put("f/g", text("x")).await.expect("put");
    assert_eq!(
        store
            .create("a/b", text("x"))
            .await
            .expect_err("below a file")
            .kind(),
        ErrorKind::Usage
    );
    assert_eq!(
        store
            .create("f", text("x"))
            .await
            .expect_err("on a directory")
            .kind(),
        ErrorKind::Usage
    );
    assert_eq!(
        store
            .put("f", text("x"))
            .await
            .expect_err("on a directory")
            .kind(),
        ErrorKind::Usage
    );
}

#[tokio::test]
async fn a_file_store_is_private_and_leaves_no_empty_directories() {
    let directory = tempfile::tempdir().expect("directory");
    let store = open(directory.path());
    store.create("a/b/c", text("x")).await.expect("create");
    let mode = |path: &str| {
        std::fs::metadata(directory.path().join(path))
            .expect("there")
            .permissions()
            .mode()
            & 0o777
    };
    assert_eq!(
        [
            mode("store"),
            mode("store/.tmp"),
            mode("store/a"),
            mode("store/a/b"),
            mode("store/a/b/c")
        ],
        [0o700, 0o700, 0o700, 0o700, 0o600]
    );
    store.delete("a/b/c").await.expect("delete");
    assert!(!directory.path().join("store/a").exists() && directory.path().join("store").exists());
    assert_eq!(
        store.address(),
        format!("file://{}/store", directory.path().display())
    );
}

/// Deletes remove empty directories while concurrent creates use them.
#[tokio::test(flavor = "multi_thread")]
async fn racing_creates_and_deletes_in_one_directory_succeed() {
    let directory = tempfile::tempdir().expect("directory");
    let store = open(directory.path());
    let workers = (0..4).map(|worker| {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0..50 {
                let key = format!("x/y/{worker}-{n}");
                assert_eq!(
                    store.create(&key, text("x")).await.expect("create"),
                    CreateOutcome::Created
                );
                assert_eq!(store.get(&key).await.expect("get"), Some(text("x")));
                store.delete(&key).await.expect("delete");
            }
        })
    });
    for worker in join_all(workers).await {
        worker.expect("worker");
    }
}

#[tokio::test]
async fn a_store_path_that_is_not_a_directory_is_an_error() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("file");
    std::fs::write(&file, "x").expect("write");
    for path in [file.clone(), file.join("below")] {
        let error = FileStore::open(path).expect_err("a file");
        assert!(
            error.kind() == ErrorKind::Usage
                && error.to_string().contains(file.to_str().expect("plain")),
            "{error}"
        );
    }
    // An unmounted disk must not look like an empty store.
    let store = open(directory.path());
    std::fs::rename(
        directory.path().join("store"),
        directory.path().join("elsewhere"),
    )
    .expect("rename");
    for error in all_errors(&store).await {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    assert!(!directory.path().join("store").exists());
}
