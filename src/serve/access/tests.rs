//! Who is admitted, and who is not.

use std::os::unix::fs::PermissionsExt;

use axum::http::HeaderValue;

use super::*;

const NOW: &str = "2026-06-01T00:00:00Z";

fn control(text: &str, proxies: &[&str]) -> (tempfile::TempDir, AccessControl) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.toml");
    write(&path, text);
    let proxies = TrustedProxies {
        addresses: proxies.iter().map(|text| text.parse().unwrap()).collect(),
        user_header: HeaderName::from_static("x-forwarded-user"),
    };
    let control = AccessControl::open(path, proxies).unwrap();
    (directory, control)
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in list {
        headers.append(*name, HeaderValue::from_str(value).unwrap());
    }
    headers
}

fn token(name: &str, role: &str, expires: &str) -> NewToken {
    let grants = [role.parse().unwrap()];
    NewToken::generate(name, &grants, expires.parse().unwrap()).unwrap()
}

fn caller(control: &AccessControl, list: &[(&'static str, &str)], peer: &str) -> Option<String> {
    let peer = Peer(peer.parse().ok());
    let caller = control.authenticate(&headers(list), peer, NOW.parse().unwrap());
    caller.ok().map(|caller| caller.name)
}

#[test]
fn a_token_is_valid_until_it_expires_and_only_as_it_is() {
    let valid = token("ci", "reader", "2026-07-01T00:00:00Z");
    let expired = token("old", "admin", "2026-06-01T00:00:00Z");
    let text = expired
        .add_to("old", &valid.add_to("ci", "").unwrap())
        .unwrap();
    assert!(!text.contains(&valid.token));
    let (_directory, control) = control(&text, &[]);
    let with = |value: &str| caller(&control, &[("authorization", value)], "10.0.0.1");
    let token = &valid.token;
    assert_eq!(
        with(&format!("Bearer {token}")).as_deref(),
        Some("token:ci")
    );
    assert_eq!(
        with(&format!("bearer {token}")).as_deref(),
        Some("token:ci")
    );
    for wrong in [
        format!("Bearer {}", expired.token),
        format!("Bearer {token}x"),
        format!("Bearer {}", &token[..token.len() - 1]),
        format!("Basic {token}"),
        format!("Bearer {}", Digest::of(token.as_bytes())),
        token.clone(),
        "Bearer ".to_owned(),
        String::new(),
    ] {
        assert_eq!(with(&wrong), None, "{wrong}");
    }
    let twice = format!("Bearer {token}");
    let twice = [
        ("authorization", twice.as_str()),
        ("authorization", "Bearer x"),
    ];
    assert_eq!(caller(&control, &twice, "10.0.0.1"), None);
    assert_eq!(caller(&control, &[], "10.0.0.1"), None);
}

#[test]
fn a_user_counts_only_if_a_trusted_proxy_names_it_once() {
    let text = "[[user]]\nname = \"ada@example.com\"\nroles = { \"*\" = \"reader\" }\n";
    let (_directory, control) = control(text, &["10.1.0.0/16", "unix"]);
    let ada = ("x-forwarded-user", "ada@example.com");
    let named = Some("user:ada@example.com".to_owned());
    assert_eq!(caller(&control, &[ada], "10.1.2.3"), named);
    assert_eq!(caller(&control, &[ada], "::ffff:10.1.2.3"), named);
    assert_eq!(
        caller(&control, &[ada], "a client of the Unix socket"),
        named
    );
    assert_eq!(caller(&control, &[ada], "10.2.0.1"), None);
    assert_eq!(
        caller(&control, &[ada, ("x-forwarded-user", "eve")], "10.1.2.3"),
        None
    );
    assert_eq!(
        caller(&control, &[("x-forwarded-user", "a b")], "10.1.2.3"),
        None
    );
    let unknown = headers(&[("x-forwarded-user", "eve")]);
    let peer = Peer("10.1.2.3".parse().ok());
    let unknown = control.authenticate(&unknown, peer, NOW.parse().unwrap());
    assert_eq!(unknown.unwrap().roles, Roles::default());
}

#[test]
fn a_role_applies_to_its_namespace() {
    let roles = |text: &str| -> Roles {
        let text = format!("[[user]]\nname = \"x\"\nroles = {{ {text} }}\n");
        AccessFile::parse(&text).unwrap().user[0].roles.clone()
    };
    let namespace = |name: &str| name.parse::<Namespace>().unwrap();
    let some = roles("\"*\" = \"metadata\", team-a = \"admin\"");
    assert_eq!(some.in_namespace(&namespace("team-a")), Some(Role::Admin));
    assert_eq!(
        some.in_namespace(&namespace("team-b")),
        Some(Role::Metadata)
    );
    let one = roles("team-a = \"reader\"");
    assert_eq!(one.in_namespace(&namespace("team-b")), None);
    assert!(Role::Metadata < Role::Reader && Role::Operator < Role::Admin);
}

#[test]
fn a_changed_file_applies_at_once_and_a_damaged_one_admits_nobody() {
    let first = token("ci", "reader", "2026-07-01T00:00:00Z");
    let (directory, control) = control(&first.add_to("ci", "").unwrap(), &[]);
    let bearer = format!("Bearer {}", first.token);
    let get = || caller(&control, &[("authorization", &bearer)], "10.0.0.1");
    assert!(get().is_some());
    let path = directory.path().join("access.toml");
    let other = token("other", "reader@team-a", "2026-07-01T00:00:00Z");
    write(&path, &other.add_to("other", "").unwrap());
    assert_eq!(get(), None);
    write(&path, "[[token]]\nname = 1\n");
    let headers = headers(&[("authorization", &bearer)]);
    let denied = control.authenticate(&headers, Peer(None), NOW.parse().unwrap());
    assert!(matches!(denied, Err(Denied::Unavailable(_))));
    std::fs::remove_file(&path).unwrap();
    let denied = control.authenticate(&headers, Peer(None), NOW.parse().unwrap());
    assert!(matches!(denied, Err(Denied::Unavailable(_))));
}

#[test]
fn invalid_files_names_and_addresses_are_rejected() {
    for bad in [
        "[[token]]\nname = \"x\"\n",
        "[[user]]\nname = \"x y\"\nroles = {}\n",
        "[[user]]\nname = \"x\"\nroles = { \"*\" = \"root\" }\n",
        "[[user]]\nname = \"x\"\nroles = { \"a/b\" = \"reader\" }\n",
        "unknown = 1\n",
    ] {
        assert!(AccessFile::parse(bad).is_err(), "{bad}");
    }
    for bad in ["", "10.0.0.0/33", "proxy.example", "10.0.0.0/x"] {
        assert!(bad.parse::<ProxyAddress>().is_err(), "{bad}");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.toml");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(
        AccessFile::read(&path)
            .unwrap_err()
            .to_string()
            .contains("other users")
    );
    assert!(
        token("ci", "reader", NOW)
            .add_to("ci", &token("ci", "reader", NOW).entry)
            .is_err()
    );
}
