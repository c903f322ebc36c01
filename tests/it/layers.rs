//! The shape of the source: a module imports only from rows below its own. This reads the imports and fails where one
//! points up or sideways.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The rows of ARCHITECTURE.md, lowest first. Modules of one row don't know each other, except where they are plain
/// values and seams (row 0).
const ROWS: [&[&str]; 8] = [
    &["model", "sys", "config", "error"],
    &["agent", "codec", "store", "index", "mirror"],
    &["log"],
    &["capture", "restore", "history", "upkeep", "exchange"],
    &["wire"],
    &["daemon"],
    &["cli"],
    &["main", "lib"],
];

fn row_of(module: &str) -> Option<usize> {
    ROWS.iter().position(|row| row.contains(&module))
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for item in std::fs::read_dir(directory).unwrap() {
        let path = item.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn every_import_points_down() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    assert!(files.len() > 30, "the sources were not found");
    let mut wrong = Vec::new();
    let mut edges = BTreeMap::new();
    for file in files {
        let relative = file
            .strip_prefix(&src)
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let module = relative.split(['/', '.']).next().unwrap().to_owned();
        let Some(row) = row_of(&module) else {
            panic!("{relative} is in no row of tests/it/layers.rs")
        };
        let text = std::fs::read_to_string(&file).unwrap();
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap();
            for piece in code.split("crate::").skip(1) {
                let target: String = piece
                    .chars()
                    .take_while(|letter| letter.is_alphanumeric() || *letter == '_')
                    .collect();
                if target == module || target.is_empty() {
                    continue;
                }
                let Some(below) = row_of(&target) else {
                    continue;
                };
                *edges.entry((module.clone(), target.clone())).or_insert(0) += 1;
                let fine = below < row || (row == 0 && below == 0);
                if !fine {
                    wrong.push(format!(
                        "{relative}:{}: {module} (row {row}) imports {target} (row {below})",
                        number + 1
                    ));
                }
            }
        }
    }
    assert!(edges.len() > 20, "hardly any import was read: {edges:?}");
    assert!(
        wrong.is_empty(),
        "imports that point up or sideways:\n{}",
        wrong.join("\n")
    );
}
