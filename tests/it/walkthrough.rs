//! Runs docs/WALKTHROUGH.md as it is written.

use crate::support::TempHome;
use crate::support::backend::Backend;

/// The shell of a text, block by block.
fn shell(text: &str) -> String {
    let blocks = text
        .split("```sh\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap());
    blocks.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_walk_through_runs_as_it_is_written() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/WALKTHROUGH.md"))
        .unwrap();
    let script = format!(
        "set -eux -o pipefail\ntrap 'kill -9 $DAEMON 2> /dev/null || true' EXIT\n{}\n",
        shell(&text)
    );
    assert!(
        script.matches("sessiond ").count() > 30,
        "the blocks are not found"
    );
    for backend in Backend::all() {
        let home = TempHome::new();
        let mut command = backend.command(&home, &[]);
        let directory = std::path::Path::new(command.get_program())
            .parent()
            .unwrap()
            .to_owned();
        let path = format!("{}:{}", directory.display(), std::env::var("PATH").unwrap());
        let environment: Vec<_> = command
            .get_envs()
            .map(|(name, value)| (name.to_owned(), value.map(ToOwned::to_owned)))
            .collect();
        command = std::process::Command::new("bash");
        command.env_clear();
        for (name, value) in environment {
            command.envs(value.map(|value| (name, value)));
        }
        let output = command
            .arg("-c")
            .arg(&script)
            .env("PATH", path)
            .current_dir(home.home())
            .output()
            .unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "{}\n{}",
            said(&output.stdout),
            said(&output.stderr)
        );
    }
}
