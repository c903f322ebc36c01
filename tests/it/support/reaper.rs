//! A directory for a server, and a process that outlives us to end the server and remove the directory; owns both.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

/// Reads until our end of the pipe closes, which the kernel sees to even after SIGKILL. Whatever names the directory on its command
/// line is then a process of the server; looking for it there also finds one that was just being started. The first rounds ask
/// with QUIT, PostgreSQL's immediate stop, since a killed postmaster would leave shared memory behind. `[$first]` keeps grep
/// from finding itself.
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
    /// Makes the directory, after the process that will remove it and the files that the server leaves elsewhere.
    pub fn new(server: &str, elsewhere: &[PathBuf]) -> Result<Reaper, String> {
        let dir = std::env::temp_dir().join(format!(
            "sessiond-it-{server}-{}",
            uuid::Uuid::new_v4().simple()
        ));
        let mut sh = Command::new("sh");
        // A process group of its own, so that Ctrl-C for the tests is not for the reaper.
        sh.args(["-c", SCRIPT, "reaper"])
            .args(elsewhere)
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
            .map_err(|e| format!("make {}: {e}", reaper.dir.display()))?;
        Ok(reaper)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        drop(self.pipe.take());
        // Only an error of wait itself is possible, and then there is nobody to wait for.
        self.process.wait().ok();
    }
}
