//! The structure of the source: a module imports only from rows below its own, and no files import
//! each other in a cycle. Both are read from the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The rows of ARCHITECTURE.md, lowest first. Modules of one row do not import each other, except
/// in row 0.
const ROWS: [&[&str]; 9] = [
    &["model", "sys", "config", "error"],
    &["agent", "codec", "store", "index", "mirror", "http"],
    &["log"],
    &[
        "capture", "restore", "sessions", "history", "upkeep", "verify", "fork", "adopt",
        "exchange",
    ],
    &["wire"],
    &["operations"],
    &["daemon", "serve"],
    &["cli"],
    &["main", "lib"],
];

fn row_of(module: &str) -> Option<usize> {
    ROWS.iter().position(|row| row.contains(&module))
}

/// A module and the file that defines it.
struct Source {
    /// The path of the module below the crate: `log::read`. Empty for `lib.rs`.
    module: Vec<String>,
    /// The path of the file below `src`.
    file: String,
    /// The code without comments and strings, and without unit tests.
    code: String,
}

fn collect_sources(directory: &Path, root: &Path, sources: &mut Vec<Source>) {
    for item in std::fs::read_dir(directory).unwrap() {
        let path = item.unwrap().path();
        if path.is_dir() {
            collect_sources(&path, root, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let file = path.strip_prefix(root).unwrap();
            let file = file.to_string_lossy().into_owned();
            let module = file.trim_end_matches(".rs").split('/').map(str::to_owned);
            let mut module: Vec<String> = module.collect();
            if module.last().is_some_and(|name| name == "mod") {
                module.pop();
            }
            if module == ["lib"] {
                module.clear();
            }
            let code = strip(&std::fs::read_to_string(&path).unwrap());
            sources.push(Source { module, file, code });
        }
    }
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = Vec::new();
    collect_sources(&root, &root, &mut sources);
    assert!(sources.len() > 30, "the sources were not found");
    sources.sort_by(|a, b| a.file.cmp(&b.file));
    sources
}

/// Removes comments, strings, and the unit tests at the end of a file.
fn strip(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    let mut code = String::new();
    for line in text.lines() {
        let mut in_string = false;
        let mut previous = ' ';
        for (at, letter) in line.char_indices() {
            if letter == '"' && previous != '\\' {
                in_string = !in_string;
            } else if !in_string {
                if line[at..].starts_with("//") {
                    break;
                }
                code.push(letter);
            }
            previous = letter;
        }
        code.push('\n');
    }
    code
}

/// The paths of all `use` declarations, with groups expanded: `a::{b, c::d}` gives `a::b` and
/// `a::c::d`. The flag says whether the declaration is public, a re-export.
fn use_paths(code: &str) -> Vec<(Vec<String>, bool)> {
    let mut paths = Vec::new();
    for (at, _) in code.match_indices("use ") {
        let line = code[..at].rsplit('\n').next().unwrap().trim();
        let is_public = line.starts_with("pub");
        if !line.is_empty() && !is_public {
            continue;
        }
        let declaration = code[at + 4..].split(';').next().unwrap();
        expand(declaration, &mut Vec::new(), &mut |path| {
            paths.push((path.to_vec(), is_public));
        });
    }
    paths
}

fn expand(tree: &str, prefix: &mut Vec<String>, found: &mut impl FnMut(&[String])) {
    let tree = tree.trim();
    let depth = prefix.len();
    match tree.find('{') {
        Some(open) => {
            prefix.extend(segments(&tree[..open]));
            let inner = &tree[open + 1..tree.rfind('}').unwrap()];
            let (mut nesting, mut start) = (0, 0);
            for (at, letter) in inner.char_indices().chain([(inner.len(), ',')]) {
                match letter {
                    '{' => nesting += 1,
                    '}' => nesting -= 1,
                    ',' if nesting == 0 => {
                        expand(&inner[start..at], prefix, found);
                        start = at + 1;
                    }
                    _ => {}
                }
            }
        }
        None if tree.is_empty() => {}
        None => {
            let name = tree.split(" as ").next().unwrap();
            prefix.extend(segments(name).filter(|segment| segment != "self"));
            found(prefix);
        }
    }
    prefix.truncate(depth);
}

fn segments(path: &str) -> impl Iterator<Item = String> {
    let segments = path.split("::").map(str::trim);
    segments
        .filter(|segment| !segment.is_empty())
        .map(str::to_owned)
}

/// Finds the file behind each imported path, through re-exports.
struct Resolver<'a> {
    files: BTreeMap<&'a [String], &'a str>,
    /// Re-exported names: the module and the name, and the path they stand for.
    exports: BTreeMap<(Vec<String>, String), Vec<String>>,
}

impl<'a> Resolver<'a> {
    fn new(sources: &'a [Source]) -> Resolver<'a> {
        let files = sources
            .iter()
            .map(|source| (source.module.as_slice(), source.file.as_str()))
            .collect();
        let mut resolver = Resolver {
            files,
            exports: BTreeMap::new(),
        };
        for source in sources {
            for (path, is_public) in use_paths(&source.code) {
                let Some(absolute) = resolver.absolute(source, &path).filter(|_| is_public) else {
                    continue;
                };
                if let Some(name) = absolute.last().cloned() {
                    let key = (source.module.clone(), name);
                    resolver.exports.insert(key, absolute);
                }
            }
        }
        resolver
    }

    /// The path below the crate; none if it is of another crate.
    fn absolute(&self, source: &Source, path: &[String]) -> Option<Vec<String>> {
        let mut base = source.module.clone();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => {
                base.clear();
                rest = &rest[1..];
            }
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|segment| segment == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            // A module below this one, or another crate.
            name => {
                let mut child = base.clone();
                child.push(name.to_owned());
                self.files.get(child.as_slice())?;
            }
        }
        base.extend(rest.iter().cloned());
        Some(base)
    }

    /// The file that defines what is at an absolute path.
    fn file(&self, path: &[String]) -> Option<&'a str> {
        let len = (0..=path.len())
            .rev()
            .find(|len| self.files.contains_key(&path[..*len]))?;
        let (module, rest) = path.split_at(len);
        if let Some(name) = rest.first()
            && let Some(target) = self.exports.get(&(module.to_vec(), name.clone()))
            && target != path
        {
            let mut target = target.clone();
            target.extend(rest[1..].iter().cloned());
            return self.file(&target);
        }
        self.files.get(module).copied()
    }
}

/// The imports between files, as the compiler would follow them.
fn imports(sources: &[Source]) -> BTreeMap<&str, BTreeSet<&str>> {
    let resolver = Resolver::new(sources);
    let mut imports: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for source in sources {
        for (path, is_public) in use_paths(&source.code) {
            // A re-export is followed where it is used.
            if is_public {
                continue;
            }
            let target = resolver.absolute(source, &path);
            let file = target.and_then(|target| resolver.file(&target));
            if let Some(file) = file.filter(|file| *file != source.file) {
                imports.entry(&source.file).or_default().insert(file);
            }
        }
    }
    imports
}

/// The cycles among the files: for each, a shortest way back to its first file.
fn cycles(imports: &BTreeMap<&str, BTreeSet<&str>>) -> Vec<String> {
    let none = BTreeSet::new();
    let of = |file: &str| imports.get(file).unwrap_or(&none);
    let mut found: BTreeMap<BTreeSet<&str>, String> = BTreeMap::new();
    for start in imports.keys() {
        let mut previous: BTreeMap<&str, &str> = BTreeMap::new();
        let mut queue = std::collections::VecDeque::from([*start]);
        while let Some(file) = queue.pop_front() {
            if of(file).contains(start) {
                let mut path = vec![file];
                while let Some(before) = previous.get(path[path.len() - 1]) {
                    path.push(before);
                }
                path.reverse();
                let text = format!("{} → {start}", path.join(" → "));
                found.entry(path.into_iter().collect()).or_insert(text);
                break;
            }
            for next in of(file) {
                if next != start && !previous.contains_key(next) {
                    previous.insert(next, file);
                    queue.push_back(next);
                }
            }
        }
    }
    found.into_values().collect()
}

#[test]
fn every_import_points_to_a_lower_row() {
    let mut wrong = Vec::new();
    let mut edges = BTreeSet::new();
    for source in &sources() {
        let module = source.module.first().map_or("lib", String::as_str);
        let Some(row) = row_of(module) else {
            panic!("{} is in no row of tests/it/layers.rs", source.file)
        };
        for (number, line) in source.code.lines().enumerate() {
            for path in line.split("crate::").skip(1) {
                let end = path.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
                let target = &path[..end.unwrap_or(path.len())];
                let Some(below) = row_of(target).filter(|_| target != module) else {
                    continue;
                };
                edges.insert((module.to_owned(), target.to_owned()));
                if below >= row && row > 0 || below > row {
                    wrong.push(format!(
                        "{}:{}: {module} (row {row}) imports {target} (row {below})",
                        source.file,
                        number + 1
                    ));
                }
            }
        }
    }
    assert!(edges.len() > 20, "hardly any import was read: {edges:?}");
    assert!(
        wrong.is_empty(),
        "imports that do not point to a lower row:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn only_the_wiring_and_the_rows_above_it_import_the_settings() {
    let wire = row_of("wire").unwrap();
    for source in &sources() {
        let module = source.module.first().map_or("lib", String::as_str);
        if row_of(module).unwrap() < wire && module != "config" {
            let imports_settings = source.code.contains("crate::config");
            assert!(!imports_settings, "{} imports the settings", source.file);
        }
    }
}

#[test]
fn no_files_import_each_other_in_a_cycle() {
    let sources = sources();
    let imports = imports(&sources);
    let edges: usize = imports.values().map(BTreeSet::len).sum();
    assert!(edges > 200, "hardly any import was read: {imports:?}");
    let cycles = cycles(&imports);
    assert!(
        cycles.is_empty(),
        "files that import each other:\n{}",
        cycles.join("\n")
    );
}

#[test]
fn imports_are_resolved_through_groups_and_exports() {
    let source = |file: &str, code: &str| Source {
        module: file
            .trim_end_matches(".rs")
            .trim_end_matches("/mod")
            .split('/')
            .map(str::to_owned)
            .collect(),
        file: file.to_owned(),
        code: strip(code),
    };
    let sources = [
        source("a/mod.rs", "pub mod b;\npub mod c;\npub use b::B;\n"),
        source(
            "a/b.rs",
            "use super::c::{self, d};\npub struct B; // use super::B\n",
        ),
        source("a/c.rs", "use crate::a::{B, other};\n"),
        source("e.rs", "use crate::a::b::B;\nuse std::io;\n"),
    ];
    let imports = imports(&sources);
    assert_eq!(imports["a/b.rs"], BTreeSet::from(["a/c.rs"]));
    assert_eq!(imports["a/c.rs"], BTreeSet::from(["a/b.rs", "a/mod.rs"]));
    assert_eq!(imports["e.rs"], BTreeSet::from(["a/b.rs"]));
    assert_eq!(cycles(&imports), ["a/b.rs → a/c.rs → a/b.rs"]);
}

/// The files that access files by path. The path is one that the user chose, or only an attribute is
/// read. `sys/` has the handles that all access to an agent's directory goes through.
const PATH_ACCESS: [(&str, &str); 25] = [
    ("capture/watch.rs", "registers watches; events are hints"),
    ("cli/demo.rs", "its own directory"),
    ("cli/doctor/agents.rs", "its own directory"),
    ("cli/doctor/directory.rs", "reads attributes"),
    ("cli/hook.rs", "runs in the agent, with its rights"),
    ("cli/hook/install.rs", "the user's settings of the agent"),
    ("cli/manual.rs", "a directory that the user names"),
    ("config/file.rs", "the configuration file"),
    ("http/listen.rs", "an address that the user names"),
    ("daemon/service.rs", "the ready file, which the user names"),
    ("daemon/session_store/token.rs", "the token file"),
    ("daemon/socket.rs", "a handle of sys::Disk"),
    ("index/sql/connect.rs", "the index"),
    (
        "mirror/sqlite.rs",
        "checked by handles; SQLite opens by path",
    ),
    ("operations/import.rs", "an archive that the user names"),
    ("operations/pull.rs", "attributes of the target"),
    ("store/key_option.rs", "key files"),
    ("store/file.rs", "the store"),
    ("store/file/disk.rs", "the store"),
    ("store/file/objects.rs", "the store"),
    ("cli/logging.rs", "the log file"),
    ("cli/select.rs", "a directory that the user names"),
    ("cli/token.rs", "the access file"),
    ("serve/access.rs", "the access file"),
    ("serve/audit.rs", "the audit log"),
];

/// Access by path follows links, which an agent can put into its directory.
#[test]
fn the_agents_directory_is_accessed_through_handles() {
    let by_path = [
        "std::fs",
        "tokio::fs",
        "rustix::fs",
        "SqliteConnectOptions",
        ".canonicalize()",
    ];
    let is_test = |file: &str| file.ends_with("/tests.rs");
    let found: Vec<String> = sources()
        .into_iter()
        .filter(|source| !source.file.starts_with("sys/") && !is_test(&source.file))
        .filter(|source| by_path.iter().any(|text| source.code.contains(text)))
        .map(|source| source.file)
        .collect();
    let mut allowed: Vec<&str> = PATH_ACCESS.iter().map(|(file, _)| *file).collect();
    allowed.sort_unstable();
    assert_eq!(
        found, allowed,
        "use sys::Disk for files below an agent's root; otherwise add the file to PATH_ACCESS"
    );
}
