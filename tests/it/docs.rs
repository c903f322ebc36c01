//! The documentation: links resolve, every page is in the table of contents, shell blocks run as
//! they are written and print the sample output, and every variable, metric, exit code, file and test
//! that a page names exists.
//!
//! `SESSIOND_TEST_UPDATE=1 cargo test --test it docs::` rewrites the sample output and the command-line
//! reference.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use regex_lite::Regex;

use crate::support::shell_blocks::{Block, blocks, shell};
use crate::support::slow;
use crate::support::{TempHome, is_update, sessiond};

/// Maximum width of a line of prose.
const MAX_COLUMNS: usize = 100;

/// Documents that a program writes.
const GENERATED: [&str; 3] = [
    "docs/explanation/benchmarks.md",
    "docs/explanation/comparison.md",
    "docs/reference/cli.md",
];

/// A page with this text continues the quick start, whose blocks run first in the same shell.
const CONTINUES: &str = "continues the [quick start]";

fn tree() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(tree().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The paths of all files with one of the extensions below a directory of the repository, relative to
/// its root.
fn files(below: &str, extensions: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut pending = vec![tree().join(below)];
    while let Some(directory) = pending.pop() {
        for item in std::fs::read_dir(&directory).unwrap() {
            let path = item.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let is_skipped = name.starts_with('.') || ["target", "node_modules"].contains(&&*name);
            if path.is_dir() && !is_skipped {
                pending.push(path);
            } else if extensions.iter().any(|extension| name.ends_with(extension)) {
                let path = path.strip_prefix(tree()).unwrap();
                found.push(path.to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    found
}

/// All documents for readers: every Markdown file except the snapshots and fixtures of the tests.
fn documents() -> Vec<String> {
    let found: Vec<_> = files("", &[".md"])
        .into_iter()
        .filter(|path| !path.starts_with("tests/") && !path.starts_with("fuzz/"))
        .collect();
    assert!(found.len() > 40, "{found:?}");
    found
}

/// The text without fenced blocks and inline code.
fn prose(text: &str) -> String {
    let inside: BTreeSet<_> = blocks(text)
        .into_iter()
        .flat_map(|block| block.lines)
        .collect();
    let lines = text.lines().enumerate();
    let kept: Vec<_> = lines
        .filter(|(number, _)| !inside.contains(number))
        .map(|(_, line)| line)
        .collect();
    Regex::new("`[^`]*`")
        .unwrap()
        .replace_all(&kept.join("\n"), "")
        .into_owned()
}

/// The anchors of a page: its headings as GitHub and mdBook spell them.
fn anchors(text: &str) -> BTreeSet<String> {
    let inside: BTreeSet<_> = blocks(text)
        .into_iter()
        .flat_map(|block| block.lines)
        .collect();
    let headings = text
        .lines()
        .enumerate()
        .filter(|(number, line)| line.starts_with('#') && !inside.contains(number));
    let anchor = |(_, line): (usize, &str)| -> String {
        let kept = |letter: char| letter.is_alphanumeric() || ['_', '-', ' '].contains(&letter);
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        heading
            .chars()
            .filter(|letter| kept(*letter))
            .collect::<String>()
            .replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// The targets of the links in a page.
fn links(text: &str) -> Vec<String> {
    let link = Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    link.captures_iter(&prose(text))
        .map(|found| found[1].to_owned())
        .collect()
}

#[test]
fn links_and_anchors_resolve() {
    let mut broken = Vec::new();
    for page in documents() {
        let text = read(&page);
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match path {
                "" => tree().join(&page),
                path => tree().join(&page).parent().unwrap().join(path),
            };
            let resolves = target.exists()
                && (anchor.is_empty()
                    || anchors(&std::fs::read_to_string(&target).unwrap()).contains(anchor));
            if !resolves {
                broken.push(format!("{page}: {link}"));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

#[test]
fn the_summary_lists_every_page() {
    let listed: BTreeSet<_> = links(&read("docs/SUMMARY.md")).into_iter().collect();
    let pages: BTreeSet<_> = files("docs", &[".md"])
        .into_iter()
        .map(|path| path.strip_prefix("docs/").unwrap().to_owned())
        .filter(|path| path != "SUMMARY.md")
        .collect();
    assert_eq!(listed, pages);
}

#[test]
fn lines_of_prose_fit_in_100_columns() {
    let mut long = Vec::new();
    for page in documents() {
        if GENERATED.contains(&&*page) {
            continue;
        }
        let text = read(&page);
        let inside: BTreeSet<_> = blocks(&text)
            .into_iter()
            .flat_map(|block| block.lines)
            .collect();
        for (number, line) in text.lines().enumerate() {
            let is_table = line.trim_start().starts_with('|');
            // A name or an address that cannot be wrapped.
            let has_long_word = line.split(' ').any(|word| word.chars().count() > 60);
            if !is_table
                && !inside.contains(&number)
                && !has_long_word
                && line.chars().count() > MAX_COLUMNS
            {
                long.push(format!("{page}:{}", number + 1));
            }
        }
    }
    assert!(long.is_empty(), "too long:\n{}", long.join("\n"));
}

#[test]
fn the_readme_is_short() {
    let lines = read("README.md").lines().count();
    assert!(lines <= 150, "{lines} lines");
}

#[test]
fn the_command_line_reference_is_current() {
    let path = "docs/reference/cli.md";
    let home = TempHome::new();
    let output = home
        .command(&sessiond())
        .args(["man", "--markdown"])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let generated = String::from_utf8(output.stdout).unwrap();
    if is_update() {
        std::fs::write(tree().join(path), &generated).unwrap();
    }
    assert!(
        read(path) == generated,
        "{path} is out of date: run SESSIOND_TEST_UPDATE=1 cargo test --test it docs::"
    );
}

/// The pages with shell blocks. `tests/it/format.rs` runs the block of the storage format, which takes
/// arguments.
fn shell_pages() -> Vec<String> {
    let pages = files("docs", &[".md"]).into_iter();
    pages
        .filter(|page| page != "docs/reference/format.md")
        .filter(|page| {
            blocks(&read(page))
                .iter()
                .any(|block| block.language == "sh")
        })
        .collect()
}

/// The shell of a page and the output of each of its blocks.
pub struct Page {
    text: String,
    blocks: Vec<Block>,
}

impl Page {
    pub fn open(path: &str) -> Page {
        let text = read(path);
        let blocks = blocks(&text);
        Page { text, blocks }
    }

    /// The shell of the page, with a line on stdout before each block.
    pub fn script(&self) -> String {
        let mut script =
            "set -euo pipefail\ntrap 'kill -9 ${DAEMON:-} 2> /dev/null || true' EXIT\n".to_owned();
        if self.text.contains(CONTINUES) {
            script += &Page::open("docs/quick-start.md")
                .shell()
                .map(|(_, body)| body)
                .collect::<String>();
        }
        for (number, body) in self.shell() {
            script += &format!("echo '@@@ {number}'\n{body}");
        }
        script
    }

    fn shell(&self) -> impl Iterator<Item = (usize, &str)> {
        let blocks = self.blocks.iter().enumerate();
        blocks
            .filter(|(_, block)| block.language == "sh")
            .map(|(number, block)| (number, &*block.body))
    }

    /// The sample output of a shell block: the `text` block right after it.
    fn sample(&self, number: usize) -> Option<&Block> {
        let next = self.blocks.get(number + 1)?;
        let follows = next.lines.start == self.blocks[number].lines.end + 2;
        (follows && next.language == "text").then_some(next)
    }
}

/// Runs the shell of a page in an empty home directory and returns the output of each block.
fn run(page: &Page) -> BTreeMap<usize, String> {
    let home = TempHome::new();
    // Several pages run at the same time.
    let output = shell(&page.script(), &home)
        .env("SESSIOND_HTTP", "off")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let scratch = Regex::new(&format!("{}/tmp/tmp[.][A-Za-z0-9]+", home.path().display()));
        let text = scratch
            .unwrap()
            .replace_all(&text, "/home/you")
            .into_owned();
        text.replace(&home.home().display().to_string(), "/home/you")
    };
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    let mut outputs = BTreeMap::new();
    let mut current = None;
    for line in stdout.lines() {
        if let Some(number) = line.strip_prefix("@@@ ") {
            current = Some(number.parse().unwrap());
            outputs.insert(number.parse().unwrap(), String::new());
        } else if let Some(number) = current {
            *outputs.get_mut(&number).unwrap() += &format!("{line}\n");
        }
    }
    outputs
}

/// Output without what differs between two runs: every word with a digit, the unit after it, and the
/// width of columns.
fn comparable(output: &str) -> Vec<String> {
    let line = |line: &str| {
        let mut words: Vec<&str> = Vec::new();
        for word in line.split_whitespace() {
            let is_unit = ["B", "KB", "MB", "KiB", "MiB", "ms", "s"]
                .contains(&word.trim_end_matches([',', ')', ';', ':', '.']));
            let word = if word.contains(|letter: char| letter.is_ascii_digit()) {
                "#"
            } else {
                word
            };
            if !(is_unit && words.last() == Some(&"#")) {
                words.push(word);
            }
        }
        words.join(" ")
    };
    output.lines().map(line).collect()
}

slow!(shell_blocks_run_and_print_the_sample_output);
fn shell_blocks_run_and_print_the_sample_output() {
    let pages = shell_pages();
    assert!(pages.len() > 8, "{pages:?}");
    std::thread::scope(|scope| {
        let running: Vec<_> = pages
            .iter()
            .map(|path| scope.spawn(|| check_page(path)))
            .collect();
        for result in running {
            result
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
}

fn check_page(path: &str) {
    let page = Page::open(path);
    let outputs = run(&page);
    let mut updated: Vec<_> = page.text.lines().map(ToOwned::to_owned).collect();
    for (number, output) in outputs.iter().rev() {
        let Some(sample) = page.sample(*number) else {
            continue;
        };
        if is_update() {
            let lines = output.lines().map(|line| line.trim_end().to_owned());
            updated.splice(sample.lines.clone(), lines);
        } else {
            let line = sample.lines.start;
            assert_eq!(
                comparable(output),
                comparable(&sample.body),
                "{path}:{line}: the program prints\n{output}\nSESSIOND_TEST_UPDATE=1 rewrites the page"
            );
        }
    }
    if is_update() {
        std::fs::write(tree().join(path), updated.join("\n") + "\n").unwrap();
    }
}

#[test]
fn every_block_has_a_known_language() {
    let known = [
        "sh",
        "console",
        "text",
        "toml",
        "json",
        "yaml",
        "dockerfile",
        "sql",
    ];
    for page in files("docs", &[".md"]) {
        if GENERATED.contains(&&*page) {
            continue;
        }
        for block in blocks(&read(&page)) {
            let line = block.lines.start;
            assert!(
                known.contains(&&*block.language),
                "{page}:{line}: {:?}",
                block.language
            );
        }
    }
}

/// The words of documents that match a pattern, with a page that has them.
fn words(pattern: &str) -> BTreeMap<String, String> {
    let pattern = Regex::new(pattern).unwrap();
    let mut found = BTreeMap::new();
    for page in documents() {
        for word in pattern.find_iter(&read(&page)) {
            found.insert(word.as_str().to_owned(), page.clone());
        }
    }
    found
}

fn sources() -> String {
    files("src", &[".rs"])
        .iter()
        .map(|path| read(path))
        .collect()
}

#[test]
fn every_variable_in_the_documents_exists() {
    let mut sources = sources();
    // The tests have variables of their own.
    sources.extend(files("tests", &[".rs"]).iter().map(|path| read(path)));
    let mut unknown = words("SESSIOND_[A-Z_0-9]+[A-Z]");
    unknown.retain(|name, _| !sources.contains(&format!("\"{name}\"")));
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn the_metrics_in_the_documents_and_in_the_program_are_the_same() {
    let metrics = metrics_of_the_program();
    assert!(metrics.len() > 20, "{metrics:?}");
    let documented = read("docs/reference/metrics.md");
    let missing: Vec<_> = metrics
        .iter()
        .filter(|name| !documented.contains(&format!("`{name}`")))
        .collect();
    assert!(
        missing.is_empty(),
        "not in docs/reference/metrics.md: {missing:?}"
    );

    // Roles, functions and files with the same prefix.
    let others = read("deploy/postgres/roles.sql") + "sessiond_store sessiond_home sessiond_old";
    let mut unknown = words("\\bsessiond_[a-z_]+[a-z]");
    unknown.retain(|name, _| !metrics.contains(name) && !others.contains(name));
    assert!(unknown.is_empty(), "no such metrics: {unknown:?}");
}

/// The names of the metrics that a running daemon serves.
fn metrics_of_the_program() -> BTreeSet<String> {
    let home = TempHome::new();
    let mut daemon = home.command(&sessiond());
    let log = home.path().join("log");
    daemon
        .args(["daemon", "--http", "127.0.0.1:0"])
        .stderr(std::fs::File::create(&log).unwrap());
    let _running = crate::support::backend::Running(daemon.spawn().unwrap());
    let address = Regex::new(r"127\.0\.0\.1:[0-9]+").unwrap();
    let mut page = String::new();
    crate::support::backend::eventually("the daemon serves all metrics", || {
        let text = std::fs::read_to_string(&log).unwrap();
        let found = address.find(&text).map(|found| found.as_str().to_owned());
        page = found
            .and_then(|address| get(&address, "/metrics"))
            .unwrap_or_default();
        page.contains("sessiond_lag_max_seconds")
    });
    let sample = Regex::new("(?m)^([a-z_]+)[{ ]").unwrap();
    let is_part = |name: &str| {
        ["_bucket", "_sum", "_count"]
            .iter()
            .any(|end| name.ends_with(end))
    };
    let name = |name: &str| match is_part(name) {
        true => name.rsplit_once('_').unwrap().0.to_owned(),
        false => name.to_owned(),
    };
    sample
        .captures_iter(&page)
        .map(|found| name(&found[1]))
        .collect()
}

fn get(address: &str, path: &str) -> Option<String> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    crate::support::http::send(address, &request).map(|response| response.body)
}

#[test]
fn every_exit_code_is_documented() {
    let documented = read("docs/reference/exit-codes.md");
    let codes = Regex::new("pub(?:\\(crate\\))? const [A-Z_]+: u8 = ([0-9]+);").unwrap();
    let source = read("src/cli/exit.rs");
    let codes: Vec<_> = codes
        .captures_iter(&source)
        .map(|found| found[1].to_owned())
        .collect();
    assert!(codes.len() > 10, "{codes:?}");
    for code in codes {
        assert!(
            documented.contains(&format!("| {code} |")),
            "exit code {code}"
        );
    }
}

#[test]
fn every_test_that_a_page_names_exists() {
    let mut paths = files("tests", &[".rs"]);
    paths.extend(files("src", &[".rs"]));
    let code: String = paths.iter().map(|path| read(path)).collect();
    let modules: BTreeSet<_> = paths
        .iter()
        .flat_map(|path| Path::new(path).iter())
        .map(|name| {
            PathBuf::from(name)
                .with_extension("")
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    let named = Regex::new("`([a-z_0-9*]+(?:::[a-z_0-9*]+)+)`").unwrap();
    let mut missing = Vec::new();
    for page in [
        "docs/explanation/guarantees.md",
        "docs/explanation/security.md",
    ] {
        let text = read(page);
        let names: Vec<_> = named
            .captures_iter(&text)
            .map(|found| found[1].to_owned())
            .collect();
        assert!(!names.is_empty(), "{page} names no test");
        for name in names {
            let (module, function) = name.rsplit_once("::").unwrap();
            let module = module.split("::").next().unwrap();
            let function = format!("fn {}", function.trim_end_matches('*'));
            let exists =
                modules.contains(module) && (function == "fn " || code.contains(&function));
            if !exists {
                missing.push(format!("{page}: {name}"));
            }
        }
    }
    assert!(missing.is_empty(), "no such tests:\n{}", missing.join("\n"));
}

#[test]
fn every_file_that_a_document_names_exists() {
    let named = Regex::new(
        "`((?:src|tests|deploy|docs|examples|benches|migrations|fuzz)/[A-Za-z0-9_./@-]+)`",
    )
    .unwrap();
    let mut missing = Vec::new();
    for page in documents() {
        let text = read(&page);
        for found in named.captures_iter(&text) {
            let path = &found[1];
            // `NAME` and `NNNN` stand for a name and a number.
            let is_placeholder = path.contains("NAME") || path.contains("NNNN");
            if !is_placeholder && !tree().join(path).exists() {
                missing.push(format!("{page}: {path}"));
            }
        }
    }
    assert!(missing.is_empty(), "no such files:\n{}", missing.join("\n"));
}

#[test]
fn the_readme_has_one_command_to_try_it_and_one_to_test_it() {
    let readme = read("README.md");
    let commands: Vec<_> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("    cargo "))
        .collect();
    assert_eq!(commands, ["run --release -- demo", "test"]);
}
