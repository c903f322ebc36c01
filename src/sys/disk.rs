//! The implementation of [`Directory`] for a directory on disk.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::OFlags;

use crate::model::{FileStat, RelPath};
use crate::sys::atomic_file::{AtomicFile, sync_directory};
use crate::sys::{BlockedPath, Directory, FileAttributes, Item, ItemKind, OpenFile, Owner};

/// Up to this many files or directories are synced one by one, and more than that with one sync of
/// the file system. Each sync of a file waits for the disk (about 1 ms on a cloud volume). A sync of
/// the file system also writes what other processes wrote, so it does not pay for few files.
const MAX_SINGLE_SYNCS: usize = 32;

/// A directory on disk.
pub struct Disk {
    root: PathBuf,
}

impl Disk {
    /// The directory at `root`, which need not exist. Symbolic links in `root` itself are the
    /// user's choice and are followed; links below it are not.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Disk { root: root.into() }
    }

    /// The path of the directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The owner of the directory; if it does not exist, that of its nearest existing ancestor.
    pub fn owner(&self) -> io::Result<Owner> {
        let found = self
            .root
            .ancestors()
            .find_map(|directory| fs::metadata(directory).ok());
        let found = found.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "none of its parent directories exists",
            )
        })?;
        Ok(Owner {
            uid: found.uid(),
            gid: found.gid(),
        })
    }

    /// Creates the directory and its missing ancestors, owned by `owner`.
    pub fn create(&self, owner: Option<Owner>) -> io::Result<()> {
        if self.root.is_dir() {
            Ok(())
        } else {
            create_directory_all(&self.root, owner)
        }
    }

    /// Changes the owner of sessiond's state directory: the next daemon may run as that user.
    pub fn chown_state(&self, owner: Owner) -> io::Result<()> {
        let mut pending = vec![self.root.join(crate::sys::STATE_DIR)];
        while let Some(path) = pending.pop() {
            let Some(found) = missing_is_none(fs::symlink_metadata(&path))? else {
                continue;
            };
            let changed = std::os::unix::fs::lchown(&path, Some(owner.uid), Some(owner.gid));
            // A running streamer may remove a file at any time.
            if missing_is_none(changed)?.is_none() || !found.is_dir() {
                continue;
            }
            for item in missing_is_none(fs::read_dir(&path))?.into_iter().flatten() {
                pending.extend(item.ok().map(|item| item.path()));
            }
        }
        Ok(())
    }

    /// The directories that contain these files.
    fn parents(&self, paths: &[RelPath]) -> BTreeSet<PathBuf> {
        let parent = |path: &RelPath| match path.parent() {
            Some(parent) => self.path(&parent),
            None => self.root.clone(),
        };
        paths.iter().map(parent).collect()
    }

    fn path(&self, path: &RelPath) -> PathBuf {
        path.below(&self.root)
    }

    /// Creates the parent directories of `path`. Fails on a symbolic link.
    fn create_parents(&self, path: &RelPath, owner: Option<Owner>) -> io::Result<()> {
        self.create(owner)?;
        let mut directory = self.root.clone();
        let mut components: Vec<_> = path.components().collect();
        components.pop();
        for component in components {
            directory.push(component);
            match fs::symlink_metadata(&directory) {
                Ok(found) if found.is_dir() => {}
                Ok(_) => {
                    return Err(BlockedPath::not_a_directory(directory));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    create_directory(&directory, owner)?
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn create_directory(directory: &Path, owner: Option<Owner>) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    match owner {
        Some(owner) => std::os::unix::fs::lchown(directory, Some(owner.uid), Some(owner.gid)),
        None => Ok(()),
    }
}

fn create_directory_all(directory: &Path, owner: Option<Owner>) -> io::Result<()> {
    if let Some(parent) = directory
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty() && !parent.exists())
    {
        create_directory_all(parent, owner)?;
    }
    create_directory(directory, owner)
}

/// Renames a file to another filesystem: copies it next to the target, then renames the copy. A
/// directory of the agent may be a separate mount.
fn rename_across_filesystems(from: &Path, target: &Path) -> io::Result<()> {
    let found = fs::metadata(from)?;
    let mut copy = AtomicFile::with_suffix(target, "new")?;
    io::copy(&mut File::open(from)?, &mut copy)?;
    copy.file().set_permissions(found.permissions())?;
    std::os::unix::fs::fchown(copy.file(), Some(found.uid()), Some(found.gid()))?;
    copy.file().set_modified(found.modified()?)?;
    copy.commit()?;
    fs::remove_file(from)
}

/// Syncs every file system that one of these directories is on. A directory of the agent may be a
/// separate mount.
fn sync_filesystems(directories: BTreeSet<PathBuf>) -> io::Result<()> {
    let mut synced = BTreeSet::new();
    for directory in directories {
        let directory = File::open(directory)?;
        if synced.insert(directory.metadata()?.dev()) {
            rustix::fs::syncfs(&directory)?;
        }
    }
    Ok(())
}

fn no_follow() -> i32 {
    OFlags::NOFOLLOW.bits() as i32
}

fn stat_of(found: &fs::Metadata) -> FileStat {
    FileStat {
        dev: found.dev(),
        ino: found.ino(),
        size: found.len(),
        mtime_ns: found
            .mtime()
            .saturating_mul(1_000_000_000)
            .saturating_add(found.mtime_nsec()),
        mode: found.mode() & 0o7777,
    }
}

fn missing_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl OpenFile for File {
    fn stat(&self) -> io::Result<FileStat> {
        Ok(stat_of(&self.metadata()?))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }
}

impl Directory for Disk {
    fn list(&self, directory: Option<&RelPath>) -> io::Result<Vec<Item>> {
        let path = directory.map_or_else(|| self.root.clone(), |directory| self.path(directory));
        let Some(names) = missing_is_none(fs::read_dir(&path))? else {
            return Ok(Vec::new());
        };
        let mut items = Vec::new();
        for name in names {
            let Some(name) = missing_is_none(name)? else {
                continue;
            };
            let Some(kind) = missing_is_none(name.file_type())? else {
                continue;
            };
            let text = name.file_name();
            let kind = match (text.to_str(), kind) {
                (None, _) => ItemKind::InvalidName,
                (_, kind) if kind.is_file() => ItemKind::File,
                (_, kind) if kind.is_dir() => ItemKind::Directory,
                (_, kind) if kind.is_symlink() => ItemKind::Link,
                _ => ItemKind::Other,
            };
            items.push(Item {
                name: text.to_string_lossy().into_owned(),
                kind,
            });
        }
        items.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(items)
    }

    fn stat(&self, path: &RelPath) -> io::Result<Option<FileStat>> {
        let found = missing_is_none(fs::symlink_metadata(self.path(path)))?;
        Ok(found
            .filter(fs::Metadata::is_file)
            .map(|found| stat_of(&found)))
    }

    fn open(&self, path: &RelPath) -> io::Result<Option<Box<dyn OpenFile>>> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .custom_flags(no_follow() | OFlags::NONBLOCK.bits() as i32);
        let Some(file) = missing_is_none(options.open(self.path(path)))? else {
            return Ok(None);
        };
        Ok(file
            .metadata()?
            .is_file()
            .then(|| Box::new(file) as Box<dyn OpenFile>))
    }

    fn read(&self, path: &RelPath) -> io::Result<Option<Vec<u8>>> {
        missing_is_none(fs::read(self.path(path)))
    }

    fn replace(&self, path: &RelPath, bytes: &[u8], durable: bool) -> io::Result<()> {
        self.create_parents(path, None)?;
        let target = self.path(path);
        // Profiles ignore this name, so that an incomplete file is never uploaded.
        let mut file = AtomicFile::with_suffix(&target, "tmp")?;
        file.write_all(bytes)?;
        if durable {
            file.commit()
        } else {
            file.rename()
        }
    }

    fn write_at(&self, path: &RelPath, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.create_parents(path, None)?;
        let mut options = OpenOptions::new();
        let file = options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(no_follow())
            .open(self.path(path))?;
        if file.metadata()?.len() != offset {
            file.set_len(offset)?;
        }
        file.write_all_at(bytes, offset)
    }

    fn finish(&self, path: &RelPath, attributes: &FileAttributes) -> io::Result<()> {
        let file = OpenOptions::new()
            .write(true)
            .custom_flags(no_follow())
            .open(self.path(path))?;
        // Without the set-uid, set-gid and sticky bits, because modes come from the store, which is
        // not trusted.
        file.set_permissions(fs::Permissions::from_mode(attributes.mode & 0o777))?;
        if let Some(owner) = attributes.owner {
            std::os::unix::fs::fchown(&file, Some(owner.uid), Some(owner.gid))?;
        }
        let since = Duration::from_nanos(attributes.mtime_ns.unsigned_abs());
        let time = if attributes.mtime_ns >= 0 {
            UNIX_EPOCH.checked_add(since)
        } else {
            UNIX_EPOCH.checked_sub(since)
        };
        if let Some(time) = time {
            file.set_modified(time)?;
        }
        Ok(())
    }

    fn rename(&self, from: &RelPath, to: &RelPath, owner: Option<Owner>) -> io::Result<()> {
        self.create_parents(to, owner)?;
        let target = self.path(to);
        if fs::symlink_metadata(&target).is_ok_and(|found| !found.is_file()) {
            return Err(BlockedPath::not_a_file(target));
        }
        match fs::rename(self.path(from), &target) {
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                rename_across_filesystems(&self.path(from), &target)
            }
            done => done,
        }
    }

    fn remove(&self, path: &RelPath) -> io::Result<()> {
        let path = self.path(path);
        let Some(found) = missing_is_none(fs::symlink_metadata(&path))? else {
            return Ok(());
        };
        missing_is_none(if found.is_dir() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        })
        .map(|_| ())
    }

    fn sync_files(&self, paths: &[RelPath]) -> io::Result<()> {
        if paths.len() > MAX_SINGLE_SYNCS {
            return sync_filesystems(self.parents(paths));
        }
        for path in paths {
            let mut options = OpenOptions::new();
            let flags = no_follow() | OFlags::NONBLOCK.bits() as i32;
            let file = options.read(true).custom_flags(flags);
            file.open(self.path(path))?.sync_all()?;
        }
        Ok(())
    }

    fn sync_names(&self, paths: &[RelPath]) -> io::Result<()> {
        let parents = self.parents(paths);
        if parents.len() > MAX_SINGLE_SYNCS {
            return sync_filesystems(parents);
        }
        for parent in parents {
            sync_directory(&parent)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rel(text: &str) -> RelPath {
        text.parse().unwrap()
    }

    #[test]
    fn writes_never_follow_a_link() {
        let outside = tempfile::tempdir().unwrap();
        let root = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(outside.path(), root.path().join("projects")).unwrap();
        let disk = Disk::new(root.path());
        assert!(disk.write_at(&rel("projects/a.jsonl"), 0, b"x").is_err());
        disk.write_at(&rel("staged"), 0, b"x").unwrap();
        assert!(
            disk.rename(&rel("staged"), &rel("projects/a.jsonl"), None)
                .is_err()
        );
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
        assert_eq!(disk.list(None).unwrap()[0].kind, ItemKind::Link);
    }

    #[test]
    fn a_file_gets_its_mode_and_time() {
        let root = tempfile::tempdir().unwrap();
        let disk = Disk::new(root.path().join("does/not/exist"));
        let path = rel("a/b");
        disk.write_at(&path, 0, b"hello").unwrap();
        disk.write_at(&path, 2, b"LLO!").unwrap();
        disk.finish(
            &path,
            &FileAttributes {
                mode: 0o4640,
                mtime_ns: 1_600_000_000_123_456_789,
                owner: None,
            },
        )
        .unwrap();
        let stat = disk.stat(&path).unwrap().unwrap();
        assert_eq!(
            (stat.mode, stat.mtime_ns, stat.size),
            (0o640, 1_600_000_000_123_456_789, 6)
        );
        assert_eq!(disk.read(&path).unwrap().unwrap(), b"heLLO!");
    }
}
