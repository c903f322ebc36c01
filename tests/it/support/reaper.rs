//! Cleanup of servers: a directory, and a process that survives the tests, kills the server and
//! removes the directory.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

/// Reads until the tests' end of the pipe closes, which the kernel does even after SIGKILL. Every
/// process that has the directory on its command line then belongs to the server, including one
/// that is just starting. The first rounds send QUIT, PostgreSQL's immediate shutdown, because a
/// killed postmaster leaves shared memory behind. `[$first]` keeps grep from finding itself. `kill`
/// is built into the shell.
const SCRIPT: &str = r#"
trap '' INT TERM HUP QUIT
cat >/dev/null
name=${DIR##*/}; rest=${name#?}; first=${name%"$rest"}
round=0
while pids=$(grep -ls -- "[$first]$rest" /proc/[0-9]*/cmdline | cut -d/ -f3); [ -n "$pids" ] && [ $round -lt 100 ]; do
    if [ $round -lt 20 ]; then kill -QUIT $pids; else kill -KILL $pids; fi
    round=$((round + 1)); sleep 0.1
done
rm -f -- "$@"
rm -rf -- "$DIR" || { sleep 1; rm -rf -- "$DIR"; }
"#;

pub struct Reaper {
    dir: PathBuf,
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Reaper {
    /// Creates the directory, after the process that removes it and the `other_files` of the
    /// server.
    pub fn new(server: &str, other_files: &[PathBuf]) -> Result<Reaper, String> {
        let dir = std::env::temp_dir().join(format!(
            "sessiond-it-{server}-{}",
            uuid::Uuid::new_v4().simple()
        ));
        let mut sh = Command::new("sh");
        // In its own process group, so that Ctrl-C stops the tests but not the reaper.
        sh.args(["-c", SCRIPT, "reaper"])
            .args(other_files)
            .env("DIR", &dir)
            .process_group(0)
            .current_dir("/");
        sh.stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut process = sh.spawn().map_err(|e| format!("start a reaper: {e}"))?;
        let pipe = process.stdin.take();
        let reaper = Reaper { dir, process, pipe };
        std::fs::create_dir(&reaper.dir)
            .map_err(|e| format!("create {}: {e}", reaper.dir.display()))?;
        Ok(reaper)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        drop(self.pipe.take());
        // If waiting fails, there is no process to wait for.
        self.process.wait().ok();
    }
}
