//! A disk that can be full: a small tmpfs that exists only for one process and its children.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{TempHome, bare_command, run, skip};

/// Runs a test again in a child process with its own mount namespace. Returns true in the child. In
/// the parent, waits for the child and returns false.
#[track_caller]
pub fn in_own_mount_namespace(test: &str) -> bool {
    if std::env::var_os("SESSIOND_TEST_OWN_MOUNTS").is_some() {
        return true;
    }
    // Contains everything that the child creates, and is removed even if the child is killed.
    let directory = TempHome::new();
    let unshare = || {
        let mut command = bare_command(Path::new("unshare"), directory.path());
        command.args(["--mount", "--propagation", "private"]);
        command
    };
    if let Err(error) = run(unshare()
        .args(["mount", "-t", "tmpfs", "tmpfs"])
        .arg(directory.home()))
    {
        skip(&format!("cannot mount a tmpfs: {error}"));
        return false;
    }
    let mut child = unshare();
    child
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"]);
    child
        .env("SESSIOND_TEST_OWN_MOUNTS", "1")
        .env("TMPDIR", directory.path().join("tmp"));
    child.envs(
        [
            "SESSIOND_TEST_SEED",
            "SESSIOND_TEST_UPDATE",
            "CI",
            "RUST_BACKTRACE",
        ]
        .iter()
        .filter_map(|name| Some((name, std::env::var_os(name)?))),
    );
    let output = child.output().unwrap();
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{printed}");
    assert!(
        printed.contains("1 passed"),
        "{test} did not run: {printed}"
    );
    eprintln!("{printed}");
    false
}

/// A tmpfs of this process and its children.
pub struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    /// Mounts a tmpfs on a directory.
    pub fn mount_on(path: &Path, kilobytes: u64) -> SmallDisk {
        let disk = SmallDisk { path: path.into() };
        disk.mount(&format!("size={kilobytes}k"));
        disk
    }

    fn mount(&self, options: &str) {
        assert!(
            std::env::var_os("SESSIOND_TEST_OWN_MOUNTS").is_some(),
            "a test must not change the mounts of the machine"
        );
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(&self.path))
        .unwrap();
    }

    /// Changes the size.
    pub fn resize(&self, kilobytes: u64) {
        self.mount(&format!("remount,size={kilobytes}k"));
    }

    /// Fills the disk with a file until about this many bytes (rounded to pages) are free.
    pub fn fill_until(&self, bytes: u64) {
        let mut ballast = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.path.join("ballast"))
            .unwrap();
        let length = ballast.metadata().unwrap().len();
        let wanted = (length + self.free()).saturating_sub(bytes);
        if wanted < length {
            return ballast.set_len(wanted).unwrap();
        }
        // Another process may have used the space meanwhile.
        std::io::copy(
            &mut std::io::Read::take(std::io::repeat(b'b'), wanted - length),
            &mut ballast,
        )
        .ok();
    }

    /// Returns the number of free bytes.
    pub fn free(&self) -> u64 {
        let found = rustix::fs::statvfs(&self.path).unwrap();
        found.f_bavail * found.f_frsize
    }
}
