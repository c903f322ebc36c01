//! A disk that gets full: a small tmpfs that only one process and its children see, and that ends with them.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{TempHome, bare_command, run, skip};

/// Runs a test once more, in a process with mounts of its own. True in that process; in the first one this waits for the
/// other's end and answers false.
#[track_caller]
pub fn alone_with_its_mounts(test: &str) -> bool {
    if std::env::var_os("SESSIOND_TEST_ALONE").is_some() {
        return true;
    }
    // Whatever the other makes is in here, and goes with it even if the other is killed.
    let place = TempHome::new();
    let alone = || {
        let mut command = bare_command(Path::new("unshare"), place.path());
        command.args(["--mount", "--propagation", "private"]);
        command
    };
    if let Err(why) = run(alone()
        .args(["mount", "-t", "tmpfs", "tmpfs"])
        .arg(place.home()))
    {
        skip(&format!("no tmpfs can be mounted here: {why}"));
        return false;
    }
    let mut again = alone();
    again
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"]);
    again
        .env("SESSIOND_TEST_ALONE", "1")
        .env("TMPDIR", place.path().join("tmp"));
    again.envs(
        [
            "SESSIOND_TEST_SEED",
            "SESSIOND_TEST_REGENERATE",
            "CI",
            "RUST_BACKTRACE",
        ]
        .iter()
        .filter_map(|name| Some((name, std::env::var_os(name)?))),
    );
    let output = again.output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("1 passed"), "{test} did not run: {said}");
    eprintln!("{said}");
    false
}

/// A tmpfs that only this process and its children see.
pub struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    /// Mounts it on a directory.
    pub fn on(path: &Path, kilobytes: u64) -> SmallDisk {
        let disk = SmallDisk { path: path.into() };
        disk.mount(&format!("size={kilobytes}k"));
        disk
    }

    fn mount(&self, options: &str) {
        assert!(
            std::env::var_os("SESSIOND_TEST_ALONE").is_some(),
            "the machine's mounts are not the test's"
        );
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(&self.path))
        .unwrap();
    }

    /// Makes it larger or smaller.
    pub fn resize(&self, kilobytes: u64) {
        self.mount(&format!("remount,size={kilobytes}k"));
    }

    /// Leaves about so many bytes free (whole pages), by a file that nobody looks at.
    pub fn leave(&self, bytes: u64) {
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
        // It may be that somebody else was faster.
        std::io::copy(
            &mut std::io::Read::take(std::io::repeat(b'b'), wanted - length),
            &mut ballast,
        )
        .ok();
    }

    /// Bytes that are free.
    pub fn free(&self) -> u64 {
        let found = rustix::fs::statvfs(&self.path).unwrap();
        found.f_bavail * found.f_frsize
    }
}
