//! Runs the walkthrough of the documentation as it is written, on every back end.

use crate::docs::Page;
use crate::support::TempHome;
use crate::support::backend::Backend;
use crate::support::on_each_backend;
use crate::support::shell_blocks::shell;

on_each_backend!(the_walkthrough_runs_as_written);
fn the_walkthrough_runs_as_written(backend: Backend) {
    let script = Page::open("docs/guides/walkthrough.md").script();
    assert!(
        script.matches("sessiond ").count() >= 30,
        "the blocks are not found"
    );
    let home = TempHome::new();
    let backend = backend.command(&home, &[]);
    let settings = backend
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)))
        .filter(|(name, _)| *name != "PATH");
    let output = shell(&script, &home).envs(settings).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{}\n{}",
        text(&output.stdout),
        text(&output.stderr)
    );
}
