//! Gemini CLI: two directories with the same base name are two projects, and `.project_root` tells
//! which is which.

use std::path::{Path, PathBuf};

use crate::support::TempHome;
use crate::support::backend::Backend;
use crate::support::files::{append, write};
use crate::support::on_each_backend;

const IDS: [&str; 2] = [
    "0aaaaaaa-0000-4000-8000-000000000001",
    "1bbbbbbb-0000-4000-8000-000000000002",
];

fn project(home: &TempHome, name: &str) -> PathBuf {
    home.home().join(".gemini/tmp").join(name)
}

fn chat(home: &TempHome, name: &str, id: &str) -> PathBuf {
    let file = format!("chats/session-2026-11-18T05-00-{}.jsonl", &id[..8]);
    project(home, name).join(file)
}

fn root(home: &TempHome, name: &str) -> Option<String> {
    std::fs::read_to_string(project(home, name).join(".project_root")).ok()
}

/// A session in a project of a directory.
fn begin(home: &TempHome, name: &str, directory: &Path, id: &str) {
    let marker = project(home, name).join(".project_root");
    write(&marker, directory.to_string_lossy().as_bytes());
    let line = format!("{{\"sessionId\":\"{id}\",\"kind\":\"main\"}}\n");
    append(&chat(home, name, id), line);
}

on_each_backend!(each_directory_gets_its_own_project_back);
fn each_directory_gets_its_own_project_back(mut backend: Backend) {
    backend.set("SESSIOND_AGENT", "gemini");
    let home = TempHome::new();
    begin(&home, "app", Path::new("/x/app"), IDS[0]);
    begin(&home, "app-1", Path::new("/y/app"), IDS[1]);
    backend.run(&home, &["run", "--", "true"]).ok();

    let other = TempHome::new();
    backend.run(&other, &["restore", IDS[1]]).ok();
    assert_eq!(root(&other, "app-1").as_deref(), Some("/y/app"));
    assert_eq!(root(&other, "app"), None, "of the other session");
    backend.run(&other, &["restore", IDS[0]]).ok();
    assert_eq!(root(&other, "app").as_deref(), Some("/x/app"));
}

on_each_backend!(another_directory_never_gets_the_project_of_a_third);
fn another_directory_never_gets_the_project_of_a_third(mut backend: Backend) {
    backend.set("SESSIOND_AGENT", "gemini");
    let home = TempHome::new();
    begin(&home, "app", Path::new("/x/app"), IDS[0]);
    backend.run(&home, &["run", "--", "true"]).ok();

    // In this home the name is taken by a directory of its own.
    let other = TempHome::new();
    begin(&other, "app", Path::new("/y/app"), IDS[1]);
    let cwd = other.path().canonicalize().unwrap().join("z/app");
    std::fs::create_dir_all(&cwd).unwrap();
    let cwd = cwd.to_string_lossy().into_owned();
    backend
        .run(&other, &["restore", IDS[0], "--cwd", &cwd])
        .ok();
    assert!(chat(&other, "app-1", IDS[0]).exists());
    assert!(!chat(&other, "app", IDS[0]).exists());
    assert_eq!(root(&other, "app-1").as_deref(), Some(cwd.as_str()));
    assert_eq!(root(&other, "app").as_deref(), Some("/y/app"));

    // It goes on there, and from there to a third home, into that directory and no other.
    append(&chat(&other, "app-1", IDS[0]), "{\"type\":\"more\"}\n");
    backend.run(&other, &["run", "--", "true"]).ok();
    let third = TempHome::new();
    backend.run(&third, &["restore", IDS[0]]).ok();
    assert_eq!(root(&third, "app-1").as_deref(), Some(cwd.as_str()));
    assert_eq!(root(&third, "app"), None);
    // Without --cwd the name is not given away.
    let fourth = TempHome::new();
    begin(&fourth, "app-1", Path::new("/w/app"), IDS[1]);
    backend
        .run(&fourth, &["restore", IDS[0]])
        .fails(7, ".project_root", "--force");
}
