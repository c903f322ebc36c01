//! Bad input: each case is a clear error that names the problem, its place and a remedy, has a
//! documented exit code, and leaves nothing half-written.

use crate::support::TempHome;
use crate::support::backend::{Backend, transcript};
use crate::support::files::append;
use crate::support::needs_servers;
use crate::support::servers::{Postgres, postgres, s3};

#[test]
fn invalid_settings_are_named_in_the_error() {
    let home = TempHome::new();
    let ls = |name: &'static str, value: &str| {
        let mut backend = Backend::file();
        backend.set(name, value);
        backend.run(&home, &["ls"])
    };
    ls("SESSIOND_STORE", "ftp://x").fails(2, "ftp://x", "file:///DIR");
    ls("SESSIOND_STORE", "file://relative/path").fails(2, "absolute", "file:///");
    ls("SESSIOND_STORE", "s3://").fails(2, "bucket", "");
    ls("SESSIOND_STORE", "s3://b/p?endpont=x").fails(2, "endpont", "");
    ls("SESSIOND_INDEX", "mysql://x").fails(2, "index", "");
    ls("SESSIOND_NAMESPACE", "../other").fails(2, "namespace", "");
    ls("SESSIOND_AGENT", "emacs").fails(2, "emacs", "[profile]");
    ls("SESSIOND_FENCING", "hope").fails(2, "--fencing value \"hope\": expected auto", "");
    ls("SESSIOND_CONFIG", "/no/such/file").fails(2, "/no/such/file", "");
    ls("SESSIOND_LOG", "a=b=c").fails(2, "--log", "");
    let backend = Backend::file();
    backend
        .run(&home, &["daemon", "--flush-interval", "soon"])
        .fails(2, "--flush-interval value \"soon\"", "500ms");
    backend
        .run(&home, &["restore"])
        .fails(2, "no session is selected", "--latest");
    backend
        .run(&home, &["restore", "../../etc"])
        .fails(2, "invalid session ID", "");
    backend
        .run(&home, &["restore", "x", "--at", "yesterday-ish"])
        .fails(3, "x", "sessiond ls");
    backend
        .run(&home, &["pull", "nope"])
        .fails(3, "nope", "sessiond ls");
    backend
        .run(&home, &["verify", "nope"])
        .fails(3, "nope", "sessiond ls");
    backend
        .run(&home, &["ls", "--cursor", "garbage"])
        .fails(2, "cursor", "");
    backend
        .run(&home, &["flush", "--wait"])
        .fails(5, "no sessiond is running", "sessiond daemon");
    backend
        .run(&home, &["status"])
        .fails(5, "no sessiond is running", "sessiond daemon");
    assert_eq!(backend.run(&home, &["frobnicate"]).code(), 2);
    assert_eq!(backend.run(&home, &["doctor"]).code(), 0);
}

needs_servers!(an_unusable_store_is_named_in_the_error);
fn an_unusable_store_is_named_in_the_error() {
    let home = TempHome::new();
    let mut backend = Backend::file();
    std::fs::write(backend.path().join("a-file"), "x").unwrap();
    let url = format!("file://{}", backend.path().join("a-file").display());
    backend.set("SESSIOND_STORE", url);
    backend.run(&home, &["ls"]).fails(2, "a-file", "");
    assert_eq!(backend.run(&home, &["doctor"]).code(), 1);

    let (Some(s3), Some(postgres)) = (s3(), postgres()) else {
        return;
    };
    let database = postgres.fresh_database();
    let missing = Backend::on(&s3.endpoint, "no-such-bucket", &database);
    let ran = missing.run(&home, &["restore", "s1"]);
    assert!(ran.code() == 2 || ran.code() == 3, "{}", ran.err());
    assert!(ran.err().contains("no-such-bucket"), "{}", ran.err());
    let mut denied = Backend::on(&s3.endpoint, &s3.fresh_bucket(), &database);
    denied.set("AWS_ACCESS_KEY_ID", s3.denied_access_key.clone());
    denied.set("AWS_SECRET_ACCESS_KEY", s3.denied_secret_key.clone());
    let ran = denied.run(&home, &["restore", "s1"]).fails(2, "", "");
    assert!(
        !ran.err().contains(&s3.denied_secret_key),
        "a secret is in the error"
    );
    let refused = Backend::on("http://127.0.0.1:1", "b", &database);
    refused
        .run(&home, &["restore", "s1"])
        .fails(5, "s3://b", "");
}

needs_servers!(a_wrong_password_is_reported_and_never_printed);
fn a_wrong_password_is_reported_and_never_printed() {
    let Some(postgres) = postgres() else { return };
    let home = TempHome::new();
    let mut backend = Backend::file();
    backend.set(
        "SESSIOND_INDEX",
        postgres.url_with_password("not-the-password"),
    );
    let ran = backend.run(&home, &["ls"]).fails(2, "locked", "");
    assert!(!ran.err().contains("not-the-password"));
    // Streaming continues without the index.
    append(&transcript(&home, "s1"), "{}\n");
    backend.run(&home, &["run", "--", "true"]).ok();
    backend.run(&TempHome::new(), &["restore", "s1"]).ok();
    backend.set(
        "SESSIOND_INDEX",
        postgres.url_with_password(Postgres::PASSWORD),
    );
    backend.run(&home, &["reindex"]).ok();
    assert!(backend.run(&home, &["ls"]).ok().out().contains("s1"));
}
