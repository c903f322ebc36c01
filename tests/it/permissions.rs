//! Rights on the store and the database: the policies in deploy/aws for writers, readers and the
//! garbage collector, a bucket that keeps every version, and the settings of PostgreSQL.

use crate::support::backend::{Backend, transcript};
use crate::support::files::{append, files_below};
use crate::support::needs_servers;
use crate::support::servers::{Postgres, S3, postgres};
use crate::support::{TempHome, block_on};

const BUCKET: &str = "rights";

/// A policy as it is handed out, for the prefix that the tests use.
fn policy(text: &str) -> String {
    text.replace("EXAMPLE-BUCKET", BUCKET)
        .replace("EXAMPLE-PREFIX", "some/prefix")
        .replace("EXAMPLE-NAMESPACE", "default")
}

/// A server with an account for each policy, and a bucket.
fn server(object_lock: bool) -> Option<S3> {
    let accounts = [
        (
            "writer",
            include_str!("../../deploy/aws/iam-policy-writer.json"),
        ),
        (
            "reader",
            include_str!("../../deploy/aws/iam-policy-reader.json"),
        ),
        (
            "collector",
            include_str!("../../deploy/aws/iam-policy-collector.json"),
        ),
    ]
    .map(|(name, text)| (name.to_owned(), format!("secret-of-{name}"), policy(text)));
    let server = S3::start_with(&accounts)?;
    let client = server.client(&server.endpoint);
    let created = client
        .create_bucket()
        .bucket(BUCKET)
        .object_lock_enabled_for_bucket(object_lock);
    block_on(created.send()).unwrap();
    Some(server)
}

/// The program with the rights of an account.
fn backend(server: &S3, database: &str, account: &str) -> Backend {
    let mut backend = Backend::on_server(server, &server.endpoint, BUCKET, database);
    backend.set("AWS_ACCESS_KEY_ID", account);
    backend.set("AWS_SECRET_ACCESS_KEY", format!("secret-of-{account}"));
    backend
}

const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/w\",\"text\":\"hello\"}\n";

needs_servers!(
    a_writer_needs_no_right_to_delete,
    a_bucket_with_object_lock_keeps_what_was_written,
    the_database_password_needs_no_place_in_the_url,
    the_tls_mode_of_the_database_comes_from_the_environment,
);

fn a_writer_needs_no_right_to_delete() {
    let Some(database) = postgres() else { return };
    let Some(server) = server(false) else { return };
    let database = database.fresh_database();
    let writer = backend(&server, &database, "writer");
    let home = TempHome::new();
    // The first write tests the store, and every change of the labels replaces a version.
    append(&transcript(&home, "s1"), LINE);
    writer.run(&home, &["run", "--", "true"]).ok();
    for label in ["a=1", "a=2", "b=3"] {
        writer.run(&home, &["label", "s1", label]).ok();
    }
    // The server has refused to delete: the older versions and the scratch keys are still there.
    let client = server.client(&server.endpoint);
    let listed = block_on(client.list_objects_v2().bucket(BUCKET).send()).unwrap();
    let count = |part: &str| {
        let keys = listed.contents().iter().filter_map(|object| object.key());
        keys.filter(|key| key.contains(part)).count()
    };
    assert_eq!((count("/meta/"), count("/.probe/") > 0), (3, true));
    let doctor = writer.run(&home, &["doctor"]);
    assert!(!doctor.out().contains("AccessDenied"), "{}", doctor.out());
    let other = TempHome::new();
    writer.run(&other, &["restore", "s1"]).ok();
    append(&transcript(&other, "s1"), LINE);
    writer.run(&other, &["run", "--", "true"]).ok();
    writer.run(&other, &["fork", "s1"]).ok();
    writer.run(&other, &["verify", "--all"]).ok();

    let reader = backend(&server, &database, "reader");
    let third = TempHome::new();
    reader.run(&third, &["show", "s1"]).ok();
    reader.run(&third, &["pull", "s1", "--to", "copy"]).ok();
    let copy = third.home().join("copy/projects/-work-app/s1.jsonl");
    assert_eq!(std::fs::read_to_string(copy).unwrap(), LINE.repeat(2));
    reader
        .run(&third, &["restore", "s1"])
        .fails(2, "AccessDenied", "s3:GetObject");

    let collector = backend(&server, &database, "collector");
    writer.run(&other, &["rm", "s1", "--yes"]).ok();
    collector.run(&TempHome::new(), &["gc"]).ok();
}

/// The recipe in docs/guides/append-only.md: what a stolen key deletes comes back.
fn a_bucket_with_object_lock_keeps_what_was_written() {
    use aws_sdk_s3::types::{
        DefaultRetention, ObjectLockConfiguration, ObjectLockEnabled, ObjectLockRetentionMode,
        ObjectLockRule,
    };
    let Some(database) = postgres() else { return };
    let Some(server) = server(true) else { return };
    let client = server.client(&server.endpoint);
    let retention = DefaultRetention::builder()
        .mode(ObjectLockRetentionMode::Compliance)
        .days(1)
        .build();
    let rule = ObjectLockRule::builder().default_retention(retention);
    let lock = ObjectLockConfiguration::builder()
        .object_lock_enabled(ObjectLockEnabled::Enabled)
        .rule(rule.build())
        .build();
    let put = client
        .put_object_lock_configuration()
        .bucket(BUCKET)
        .object_lock_configuration(lock);
    block_on(put.send()).unwrap();

    let writer = backend(&server, &database.fresh_database(), "writer");
    let home = TempHome::new();
    append(&transcript(&home, "s1"), LINE);
    writer.run(&home, &["run", "--", "true"]).ok();

    // Somebody with all rights deletes every object: first the versions, then the keys.
    let listed = block_on(client.list_object_versions().bucket(BUCKET).send()).unwrap();
    let entries: Vec<_> = listed
        .versions()
        .iter()
        .filter(|version| version.key().is_some_and(|key| key.contains("/log/")))
        .collect();
    assert!(!entries.is_empty());
    for version in &entries {
        let (key, id) = (version.key().unwrap(), version.version_id().unwrap());
        let by_version = client
            .delete_object()
            .bucket(BUCKET)
            .key(key)
            .version_id(id);
        assert!(
            block_on(by_version.send()).is_err(),
            "a locked version of {key} was deleted"
        );
        block_on(client.delete_object().bucket(BUCKET).key(key).send()).unwrap();
    }
    let other = TempHome::new();
    assert_ne!(writer.run(&other, &["restore", "s1"]).code(), 0);

    // The operator removes the delete markers.
    let listed = block_on(client.list_object_versions().bucket(BUCKET).send()).unwrap();
    for marker in listed.delete_markers() {
        let (key, id) = (marker.key().unwrap(), marker.version_id().unwrap());
        let undo = client
            .delete_object()
            .bucket(BUCKET)
            .key(key)
            .version_id(id);
        block_on(undo.send()).unwrap();
    }
    writer.run(&other, &["restore", "s1"]).ok();
    assert_eq!(
        files_below(&other.home().join(".claude")),
        files_below(&home.home().join(".claude"))
    );
}

fn the_database_password_needs_no_place_in_the_url() {
    let Some(server) = Postgres::start_private() else {
        return;
    };
    let url = server.url_with_password("");
    let password = "p@ss/w:rd?#%&+ é";
    server.execute(format!("ALTER ROLE locked PASSWORD '{password}'"));
    let mut backend = Backend::file();
    let mut bare = url::Url::parse(&url).unwrap();
    bare.set_password(None).unwrap();
    backend.set("SESSIOND_INDEX", bare.to_string());
    backend.set("PGPASSWORD", password);
    backend.run(&TempHome::new(), &["ls"]).ok();
    backend.set("PGPASSWORD", "another");
    assert_ne!(backend.run(&TempHome::new(), &["ls"]).code(), 0);
}

fn the_tls_mode_of_the_database_comes_from_the_environment() {
    let Some(server) = postgres() else { return };
    let mut backend = Backend::file();
    backend.set("SESSIOND_INDEX", server.fresh_database());
    backend.run(&TempHome::new(), &["ls"]).ok();
    // The server has no certificate, so that a mode which demands one must fail.
    backend.set("PGSSLMODE", "verify-full");
    let ran = backend.run(&TempHome::new(), &["ls"]);
    assert!(
        ran.code() != 0 && ran.err().contains("TLS"),
        "{}{}",
        ran.out(),
        ran.err()
    );
}
