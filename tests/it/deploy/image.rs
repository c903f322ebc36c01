//! Carries out the Dockerfile in an empty directory: only copied files exist, the root is
//! read-only, the user has no name.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use super::dockerfile::Stage;
use super::text;
use crate::support::backend::{Ran, Running, Signal, eventually};
use crate::support::files::append;
use crate::support::servers::{postgres, s3};
use crate::support::{TempHome, fetch, or_skip, run, sessiond, skip};

const SESSION: &str = "3f2a0000-0000-4000-8000-000000000001";
const LINE: &str = "{\"type\":\"user\",\"cwd\":\"/work/app\",\"message\":{\"content\":\"hi\"}}\n";

/// A container of the image: its root directory, and the volume that is its home.
struct Container {
    directory: TempHome,
    stage: Stage,
    variables: Vec<(String, String)>,
}

impl Container {
    fn new() -> Option<Container> {
        let stage = Stage::read(&text("Dockerfile")).pop().unwrap();
        assert_eq!(stage.base, "scratch");
        let container = Container {
            directory: TempHome::new(),
            stage,
            variables: Vec::new(),
        };
        if !rustix::process::geteuid().is_root() {
            skip("only root can change the root directory");
            return None;
        }
        for copy in container.stage.copies() {
            assert!(copy.from_stage, "{copy:?} comes from the build's context");
            let target = container.root().join(copy.target.trim_start_matches('/'));
            std::fs::create_dir_all(target.parent().unwrap()).unwrap();
            match copy.sources[0].as_str() {
                "/src/target/dist/sessiond" => container.copy_program(&target),
                "/etc/ssl/certs/ca-certificates.crt" => {
                    std::fs::copy("/etc/ssl/certs/ca-certificates.crt", &target).unwrap();
                }
                "/home/agent" => std::fs::create_dir(&target).unwrap(),
                other => panic!("{other} is not known here"),
            }
            let (user, group) = container.user();
            if copy
                .owner
                .is_some_and(|owner| owner == format!("{user}:{group}"))
            {
                chown(&target, Some(user), Some(group)).unwrap();
            }
        }
        std::fs::set_permissions(container.root(), PermissionsExt::from_mode(0o755)).unwrap();
        container.new_volume();
        if let Err(why) = run(&mut container.command(&["--version"])) {
            skip(&format!("no directory can be made the root here: {why}"));
            return None;
        }
        Some(container)
    }

    fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    fn volume(&self) -> PathBuf {
        self.directory.path().join("volume")
    }

    fn user(&self) -> (u32, u32) {
        let (user, group) = self.stage.one("USER").split_once(':').unwrap();
        (
            user.parse().expect("a number"),
            group.parse().expect("a number"),
        )
    }

    /// As a container engine creates one: empty, with the owner of the directory in the image.
    fn new_volume(&self) {
        let _ = std::fs::remove_dir_all(self.volume());
        std::fs::create_dir(self.volume()).unwrap();
        let image = std::fs::metadata(
            self.root()
                .join(self.stage.one("VOLUME").trim_start_matches('/')),
        )
        .unwrap();
        chown(self.volume(), Some(image.uid()), Some(image.gid())).unwrap();
    }

    /// Copies the program under test with its shared libraries. The program in the image is static.
    fn copy_program(&self, target: &Path) {
        std::fs::copy(sessiond(), target).unwrap();
        let linked = Command::new("ldd").arg(sessiond()).output().unwrap();
        for library in String::from_utf8(linked.stdout)
            .unwrap()
            .split_whitespace()
            .filter(|word| word.starts_with('/'))
        {
            let to = self.root().join(library.trim_start_matches('/'));
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::copy(library, to).unwrap();
        }
    }

    /// The image's entrypoint with these arguments.
    fn command(&self, arguments: &[&str]) -> Command {
        let entrypoint = self.stage.list("ENTRYPOINT");
        self.exec(
            &[
                &entrypoint.iter().map(String::as_str).collect::<Vec<_>>(),
                arguments,
            ]
            .concat(),
        )
    }

    fn exec(&self, command: &[&str]) -> Command {
        // Mounts that only this command sees: the root read-only, the volume in it.
        const ENTER: &str = "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && mount --bind \"$2\" \"$1$3\" || exit 125\n\
            root=$1 user=$4; shift 4; exec setpriv --no-new-privs chroot --userspec=\"$user\" --groups= \"$root\" \"$@\"";
        let (user, group) = self.user();
        let mut enter = Command::new("unshare");
        enter
            .args([
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                ENTER,
                "sh",
            ])
            .arg(self.root())
            .arg(self.volume());
        enter
            .args([self.stage.one("VOLUME"), &format!("{user}:{group}")])
            .args(command);
        // PATH is for the commands before the new root, where the image's PATH finds nothing.
        let own = self
            .stage
            .environment()
            .into_iter()
            .filter(|(name, _)| name != "PATH");
        enter
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .envs(own)
            .envs(self.variables.iter().cloned());
        enter.stdin(Stdio::null()).current_dir("/");
        enter
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        Ran(self.command(arguments).output().unwrap())
    }

    fn healthy(&self) -> bool {
        let check = self.stage.list("HEALTHCHECK");
        let Output { status, .. } = self
            .exec(&check.iter().map(String::as_str).collect::<Vec<_>>())
            .output()
            .unwrap();
        status.success()
    }

    fn transcript(&self) -> PathBuf {
        self.volume()
            .join(format!(".claude/projects/-work-app/{SESSION}.jsonl"))
    }

    /// Writes as the agent, which has the same user.
    fn agent_writes(&self) {
        append(&self.transcript(), LINE);
        let (user, group) = self.user();
        run(Command::new("chown")
            .arg("-R")
            .arg(format!("{user}:{group}"))
            .arg(self.volume()))
        .unwrap();
    }
}

#[test]
fn the_image_streams_and_restores_without_other_programs() {
    let (Some(s3), Some(postgres)) = (s3(), postgres()) else {
        return;
    };
    let Some(mut container) = Container::new() else {
        return;
    };
    // It contains only the program, its libraries and the certificates.
    let found = Command::new("find")
        .arg(container.root())
        .args(["-type", "f", "-printf", "/%P\n"])
        .output()
        .unwrap();
    let found: BTreeSet<String> = String::from_utf8(found.stdout)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect();
    let stray = found.iter().find(|path| {
        !path.contains("/lib") && !path.ends_with("/sessiond") && !path.ends_with(".crt")
    });
    assert!(
        stray.is_none() && !container.root().join("etc/passwd").exists(),
        "{found:?}"
    );

    // Every engine provides the names of other containers.
    std::fs::write(
        container.root().join("etc/hosts"),
        "127.0.0.1 objects database\n",
    )
    .unwrap();
    let store = format!(
        "s3://{}/agents?endpoint=http://objects:{}&region=us-east-1",
        s3.fresh_bucket(),
        s3.addr().port()
    );
    let index = postgres.fresh_database().replace("127.0.0.1", "database");
    container.variables = [
        ("SESSIOND_STORE", store.as_str()),
        ("SESSIOND_INDEX", index.as_str()),
        ("AWS_ACCESS_KEY_ID", s3.access_key.as_str()),
        ("AWS_SECRET_ACCESS_KEY", s3.secret_key.as_str()),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec();
    assert!(!container.healthy(), "nothing runs yet");
    let log = std::fs::File::create(container.directory.path().join("log")).unwrap();
    let log_text = || std::fs::read_to_string(container.directory.path().join("log")).unwrap();
    let default: Vec<String> = container.stage.list("CMD");
    let default: Vec<&str> = default.iter().map(String::as_str).collect();
    let mut daemon = Running(
        container
            .command(&default)
            .env("SESSIOND_HTTP", "off")
            .stderr(log)
            .spawn()
            .unwrap(),
    );
    eventually("it is healthy", || {
        assert!(daemon.0.try_wait().unwrap().is_none(), "{}", log_text());
        container.healthy()
    });
    container.agent_writes();
    container.run(&["flush", "--wait"]).ok();
    assert_eq!(container.stage.one("STOPSIGNAL"), "SIGTERM");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.code(), Some(0), "{}", log_text());

    // Another container of the image, on an empty volume.
    container.new_volume();
    container.run(&["restore", SESSION]).ok();
    assert_eq!(
        std::fs::read_to_string(container.transcript()).unwrap(),
        LINE
    );
    let owner = std::fs::metadata(container.transcript()).unwrap();
    assert_eq!((owner.uid(), owner.gid()), container.user());
    // As an entrypoint: the only program that there is to launch is itself.
    container
        .variables
        .push(("SESSIOND_HTTP".into(), "off".into()));
    let program = container.stage.list("ENTRYPOINT")[0].clone();
    container
        .run(&[
            "run",
            "--session",
            SESSION,
            "--",
            &program,
            "flush",
            "--wait",
        ])
        .ok();
    // Nothing outside the volume is writable.
    container.variables[0].1 = "file:///elsewhere".into();
    let refused = container.run(&["restore", SESSION]);
    assert!(
        refused.code() != 0 && refused.err().contains("/elsewhere"),
        "{}",
        refused.err()
    );
}

/// A TLS server with a certificate of an unknown authority, which responds with "not found".
const TLS: &str = "import http.server, ssl, sys\n\
    class Answer(http.server.BaseHTTPRequestHandler):\n\
    \x20   def do_GET(self):\n\
    \x20       self.send_response(404); self.send_header('content-length', '0'); self.end_headers()\n\
    \x20   do_PUT = do_HEAD = do_POST = do_GET\n\
    \x20   def log_message(self, *_): print('asked', flush=True)\n\
    server = http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Answer)\n\
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); context.load_cert_chain(sys.argv[2])\n\
    server.socket = context.wrap_socket(server.socket, server_side=True)\n\
    server.serve_forever()";

#[test]
fn the_image_trusts_its_bundled_certificates() {
    if or_skip(
        fetch::program_of("openssl", "openssl")
            .or_else(|_| run(Command::new("openssl").arg("version"))),
    )
    .is_none()
    {
        return;
    }
    let Some(mut container) = Container::new() else {
        return;
    };
    let path = |name: &str| container.directory.path().join(name);
    let wanted = "[req]\ndistinguished_name=dn\nx509_extensions=v3\nprompt=no\n[dn]\nCN=test\n\
        [v3]\nsubjectAltName=IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\n";
    std::fs::write(path("wanted"), wanted).unwrap();
    let mut make = Command::new("openssl");
    make.args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-config",
    ]);
    make.arg(path("wanted"))
        .arg("-keyout")
        .arg(path("key"))
        .arg("-out")
        .arg(path("certificate"));
    run(&mut make).unwrap();
    let certificate = std::fs::read_to_string(path("certificate")).unwrap();
    std::fs::write(
        path("both"),
        certificate.clone() + &std::fs::read_to_string(path("key")).unwrap(),
    )
    .unwrap();
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let requests_log = std::fs::File::create(path("requests")).unwrap();
    let serve = Command::new("python3")
        .args(["-c", TLS, &port.to_string()])
        .arg(path("both"))
        .stdout(requests_log)
        .stderr(Stdio::null())
        .spawn();
    let _server = Running(serve.unwrap());
    eventually("it listens", || {
        std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    let requests_log = container.directory.path().join("requests");
    let store = format!("s3://bucket?endpoint=https://127.0.0.1:{port}&region=us-east-1");
    let named = [
        ("SESSIOND_STORE", store.as_str()),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
    ];
    container.variables = named
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec();
    container
        .variables
        .push(("SESSIOND_REQUEST_TIMEOUT".into(), "2s".into()));
    let refused = container.run(&["restore", SESSION]);
    assert!(refused.code() != 0, "{}", refused.out());
    assert_eq!(
        std::fs::read_to_string(&requests_log).unwrap(),
        "",
        "an unknown authority was trusted: {}",
        refused.err()
    );
    // At the path in the Dockerfile.
    let bundle = container
        .stage
        .environment()
        .into_iter()
        .find(|(name, _)| name == "SSL_CERT_FILE")
        .unwrap()
        .1;
    append(
        &container.root().join(bundle.trim_start_matches('/')),
        &certificate,
    );
    let ran = container.run(&["restore", SESSION]);
    assert_ne!(
        std::fs::read_to_string(&requests_log).unwrap(),
        "",
        "{}",
        ran.err()
    );
}

#[test]
fn the_dockerfile_copies_every_build_input() {
    let stages = Stage::read(&text("Dockerfile"));
    let build = &stages[0];
    let tree = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The compiler is the one that Cargo.toml requires.
    let manifest = std::fs::read_to_string(tree.join("Cargo.toml")).unwrap();
    let wanted = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = "))
        .unwrap()
        .trim_matches('"');
    assert!(
        build.base.starts_with(&format!("rust:{wanted}-")),
        "{}",
        build.base
    );
    // Cargo accepts the empty program with which the dependencies are built.
    let directory = tempfile::tempdir().unwrap();
    let copied: Vec<String> = build
        .copies()
        .into_iter()
        .flat_map(|copy| copy.sources)
        .collect();
    for name in copied.iter().filter(|name| tree.join(name).is_file()) {
        std::fs::copy(tree.join(name), directory.path().join(name)).unwrap();
    }
    let steps = build
        .runs()
        .into_iter()
        .find(|steps| steps.iter().any(|step| step.contains("fn main")))
        .unwrap();
    for step in steps.iter().take_while(|step| !step.starts_with("cargo ")) {
        run(Command::new("sh")
            .args(["-c", step])
            .current_dir(directory.path()))
        .unwrap();
    }
    let complete = || {
        let read = Command::new("cargo")
            .args([
                "metadata",
                "--locked",
                "--offline",
                "--no-deps",
                "--format-version=1",
            ])
            .current_dir(directory.path())
            .output()
            .unwrap();
        assert!(
            read.status.success(),
            "{}",
            String::from_utf8_lossy(&read.stderr)
        );
        let read: serde_json::Value = serde_json::from_slice(&read.stdout).unwrap();
        let targets = read["packages"][0]["targets"].as_array().unwrap().iter();
        let mut built = targets.filter(|target| {
            ["bin", "lib", "custom-build"]
                .iter()
                .any(|kind| target["kind"][0] == *kind)
        });
        built.all(|target| Path::new(target["src_path"].as_str().unwrap()).exists())
    };
    assert!(
        complete(),
        "the empty program lacks a file that Cargo.toml names"
    );
    std::fs::remove_file(directory.path().join("src/main.rs")).unwrap();
    assert!(!complete(), "this would not notice one that is missing");
    // The files that the source includes from outside `src`, and the files in the build context.
    let included = Command::new("grep")
        .args(["-rhoE", "(include_str|include_bytes|migrate)!\\(\"[^\"]+\""])
        .arg(tree.join("src"))
        .output()
        .unwrap();
    let included = String::from_utf8(included.stdout).unwrap();
    assert!(included.contains("migrations"), "{included}");
    for line in included.lines() {
        let name = line
            .split('"')
            .nth(1)
            .unwrap()
            .trim_start_matches("./")
            .trim_start_matches("../");
        let inside = copied
            .iter()
            .any(|copied| name.starts_with(copied.as_str()))
            || !name.contains('/');
        assert!(inside, "{name} is not copied into the build");
    }
    let ignore = std::fs::read_to_string(tree.join(".dockerignore")).unwrap();
    let let_in: BTreeSet<&str> = ignore
        .lines()
        .filter_map(|line| line.strip_prefix('!'))
        .collect();
    assert_eq!(
        let_in,
        copied.iter().map(String::as_str).collect::<BTreeSet<_>>()
    );
}
