//! Files on disk: writing them as an agent does, and comparing directories.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

/// The bytes of each file by its path below a root.
pub type Files = BTreeMap<String, Vec<u8>>;

/// Writes a file and creates its directory.
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// Appends to a file and creates it with its directory if necessary.
pub fn append(path: &Path, bytes: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.append(true).create(true).open(path).unwrap();
    file.write_all(bytes.as_ref()).unwrap();
}

/// Writes a new file and renames it over the old one, as many programs do.
pub fn replace(path: &Path, bytes: impl AsRef<[u8]>) {
    let temporary = path.with_extension("tmp");
    write(&temporary, bytes);
    std::fs::rename(temporary, path).unwrap();
}

/// Returns every regular file below a directory, without the state of sessiond. An agent may delete
/// directories at the same time.
pub fn files_below(root: &Path) -> Files {
    let mut files = Files::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        let Ok(items) = std::fs::read_dir(&directory) else {
            continue;
        };
        for item in items.flatten() {
            let (path, kind) = (item.path(), item.file_type().unwrap());
            if kind.is_dir() && item.file_name() != ".sessiond" {
                directories.push(path);
            } else if kind.is_file() {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap();
                files.insert(name.to_owned(), std::fs::read(&path).unwrap());
            }
        }
    }
    files
}

/// Copies a directory with everything in it, including modes and times.
pub fn copy_dir(from: &Path, to: &Path) {
    let mut command = std::process::Command::new("cp");
    super::run(command.arg("-a").arg(from).arg(to)).unwrap();
}
