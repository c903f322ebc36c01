//! The implementation of [`Directory`] for a directory on disk.
//!
//! Every path is resolved without following a symbolic link. Owns the root's path and the user on
//! whose behalf the directory is accessed. Does not own a single access (`access`).

mod access;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, renameat, unlinkat};
use rustix::io::Errno;

use self::access::{Access, DIRECTORY, Location, NewFile, READ, WRITE};
use super::acting::ActingAs;
use super::beneath;
use crate::model::{FileStat, RelPath};
use crate::sys::{BlockedPath, Directory, FileAttributes, Item, OpenFile, Owner};

/// Up to this many files or directories are synced one by one, and more than that with one sync of
/// the file system. Each sync of a file waits for the disk (about 1 ms on a cloud volume). A sync of
/// the file system also writes what other processes wrote, so it does not pay for few files.
const MAX_SINGLE_SYNCS: usize = 32;

/// Maximum length of a small file. The ledger of a session with 250,000 files has about 100 MB.
const MAX_SMALL_FILE_BYTES: u64 = 128 << 20;

/// A directory on disk.
#[derive(Debug, Clone)]
pub struct Disk {
    location: Location,
}

impl Disk {
    /// The directory at `root`, which need not exist. Symbolic links in `root` itself are the
    /// user's choice and are followed now, but never again; links below it are not followed.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        let location = Location {
            resolved: beneath::resolve(&root),
            root,
            owner: None,
            acts_as: None,
        };
        Disk { location }
    }

    /// The same directory on behalf of an owner: the files that sessiond creates belong to the
    /// owner. With `acts`, and if this process is root, every access has only the owner's rights.
    #[must_use]
    pub fn on_behalf_of(&self, owner: Option<Owner>, acts: bool) -> Disk {
        let acts = acts && rustix::process::geteuid().is_root();
        let location = Location {
            owner,
            acts_as: owner.filter(|owner| acts && owner.uid != 0),
            ..self.location.clone()
        };
        Disk { location }
    }

    /// A directory in this one, which must not be a link.
    #[must_use]
    pub fn subdirectory(&self, path: &str) -> Disk {
        let location = Location {
            root: self.location.root.join(path),
            resolved: self.location.resolved.join(path),
            ..self.location.clone()
        };
        Disk { location }
    }

    /// The path of the directory.
    pub fn root(&self) -> &Path {
        &self.location.root
    }

    /// The path of the directory without symbolic links, for a library that opens files by path.
    pub fn resolved_root(&self) -> &Path {
        &self.location.resolved
    }

    /// The user as whom such a library has to act: none if with the rights of the process.
    pub fn acting_user(&self) -> Option<Owner> {
        self.location.acts_as
    }

    /// The owner of the directory, if it is not the user as whom this process acts.
    pub fn foreign_owner(&self) -> Option<u32> {
        let user = self.location.acts_as?;
        let root = beneath::open_absolute(&self.location.resolved, DIRECTORY, Mode::empty());
        let found = File::from(root.ok()?).metadata().ok()?.uid();
        (found != user.uid).then_some(found)
    }

    /// Runs a function with the rights that an access to the directory has.
    pub fn with_rights<T>(&self, run: impl FnOnce() -> T) -> io::Result<T> {
        let _access = Access::new(&self.location)?;
        Ok(run())
    }

    /// Gives a file to the owner of the files that sessiond creates, if this process created it
    /// as another user.
    pub fn give_to_owner(&self, path: &RelPath) -> io::Result<()> {
        let access = Access::new(&self.location)?;
        let Some(owner) = access.owner_of_new(None) else {
            return Ok(());
        };
        let file = File::from(access.open(path.as_str(), OFlags::PATH)?);
        let found = file.metadata()?;
        if found.nlink() > 1 || found.uid() != rustix::process::geteuid().as_raw() {
            return Ok(());
        }
        access::set_owner(&file, owner)
    }

    /// The user for whom sessiond creates files.
    pub fn file_owner(&self) -> Option<Owner> {
        self.location.owner
    }

    /// The owner of the directory; if it does not exist, that of its nearest existing ancestor.
    pub fn owner(&self) -> io::Result<Owner> {
        let found = self
            .location
            .resolved
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

    /// Whether the directory exists.
    pub fn exists(&self) -> bool {
        self.open_path(None).is_ok()
    }

    /// Creates the directory and its missing ancestors, owned by `owner`.
    pub fn create(&self, owner: Option<Owner>) -> io::Result<()> {
        let blocked = |error: io::Error| match beneath::is_blocked(&error) {
            true => BlockedPath::not_a_directory(self.location.root.clone()),
            false => error,
        };
        match beneath::open_absolute(&self.location.resolved, DIRECTORY, Mode::empty()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            opened => return opened.map(|_| ()).map_err(blocked),
        }
        let owner = owner.or(self.location.owner);
        let mut directory = beneath::open_absolute(Path::new("/"), DIRECTORY, Mode::empty())?;
        for component in self.location.resolved.components().skip(1) {
            let name: &Path = component.as_ref();
            directory = match access::open_directory(&directory, name) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.create_child(&directory, name, owner)
                }
                opened => opened,
            }
            .map_err(blocked)?;
        }
        Ok(())
    }

    /// Creates a directory, with the rights of its owner if they suffice: the owner cannot replace
    /// it while root changes its owner.
    fn create_child(
        &self,
        parent: &OwnedFd,
        name: &Path,
        owner: Option<Owner>,
    ) -> io::Result<OwnedFd> {
        if let Some(user) = self.location.acts_as {
            let _acting = ActingAs::start(user)?;
            match access::create_directory(parent, name, None) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                created => return created,
            }
        }
        access::create_directory(parent, name, owner)
    }

    /// Opens a file or a directory below the root (`None` is the root), whatever it is, as a path:
    /// for its attributes, or as an address.
    pub fn open_path(&self, path: Option<&RelPath>) -> io::Result<File> {
        let path = path.map_or("", RelPath::as_str);
        Ok(Access::new(&self.location)?
            .open(path, OFlags::PATH)?
            .into())
    }

    /// Creates a file if it is missing, and opens it for reading and writing.
    pub fn open_or_create(&self, path: &RelPath) -> io::Result<File> {
        self.create(None)?;
        let access = Access::new(&self.location)?;
        let parent = access.create_parent(path, None)?;
        let file = open_own_file(&access, &parent, path, OFlags::RDWR)?;
        Ok(file)
    }

    /// Creates a file with `bytes`, durably. Fails if it exists.
    pub fn create_new(&self, path: &RelPath, bytes: &[u8]) -> io::Result<()> {
        self.create(None)?;
        let access = Access::new(&self.location)?;
        let parent = access.create_parent(path, None)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let name = Path::new(path.name());
        let mut file = File::from(beneath::open_in(&parent, name, flags, PRIVATE)?);
        if let Some(owner) = access.owner_of_new(None) {
            access::set_owner(&file, owner)?;
        }
        file.write_all(bytes)?;
        file.sync_all()
    }

    /// Appends to a file. Creates it if it is missing.
    pub fn append(&self, path: &RelPath, bytes: &[u8]) -> io::Result<()> {
        self.create(None)?;
        let access = Access::new(&self.location)?;
        let parent = access.create_parent(path, None)?;
        let mut file = open_own_file(&access, &parent, path, WRITE | OFlags::APPEND)?;
        file.write_all(bytes)
    }

    /// Creates a directory and opens it as a base for other paths.
    pub fn create_directory(&self, path: &RelPath) -> io::Result<OwnedFd> {
        self.create(None)?;
        let access = Access::new(&self.location)?;
        // The name does not matter: its parent is the directory.
        let child = path.join("x").map_err(io::Error::other)?;
        access.create_parent(&child, None)
    }

    /// Removes a directory if it is empty.
    pub fn remove_empty_directory(&self, path: &RelPath) -> io::Result<()> {
        let access = Access::new(&self.location)?;
        let parent = access.parent(path)?;
        Ok(unlinkat(&parent, path.name(), AtFlags::REMOVEDIR)?)
    }

    /// The directories that contain these files, each opened once.
    fn parents(&self, access: &Access<'_>, paths: &[RelPath]) -> io::Result<Vec<OwnedFd>> {
        let mut parents = BTreeMap::new();
        for path in paths {
            if let std::collections::btree_map::Entry::Vacant(vacant) = parents.entry(path.parent())
            {
                vacant.insert(access.parent(path)?);
            }
        }
        Ok(parents.into_values().collect())
    }
}

/// The mode of files that only their owner can read.
const PRIVATE: Mode = Mode::RUSR.union(Mode::WUSR);

/// Opens a file that sessiond owns, and creates it if it is missing.
fn open_own_file(
    access: &Access<'_>,
    parent: &OwnedFd,
    path: &RelPath,
    flags: OFlags,
) -> io::Result<File> {
    let name = Path::new(path.name());
    let file = match beneath::open_in(parent, name, flags, Mode::empty()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let created = flags | OFlags::CREATE | OFlags::EXCL;
            let file = beneath::open_in(parent, name, created, PRIVATE)?;
            if let Some(owner) = access.owner_of_new(None) {
                access::set_owner(&file, owner)?;
            }
            file
        }
        Err(error) if beneath::is_blocked(&error) => {
            return Err(BlockedPath::not_a_file(access.display(path)));
        }
        opened => opened?,
    };
    let file = File::from(file);
    access.check_own_file(&file, path)?;
    Ok(file)
}

/// Renames a file to another filesystem: copies it next to the target, then renames the copy. A
/// directory of the agent may be a separate mount.
fn rename_across_filesystems(
    (from, from_name): (&OwnedFd, &str),
    (to, to_name): (&OwnedFd, &str),
) -> io::Result<()> {
    let mut source = File::from(beneath::open_in(
        from,
        Path::new(from_name),
        READ,
        Mode::empty(),
    )?);
    let found = source.metadata()?;
    let mut copy = NewFile::create(to, to_name, "new", None)?;
    io::copy(&mut source, copy.file())?;
    copy.file().set_permissions(found.permissions())?;
    let owner = Owner {
        uid: found.uid(),
        gid: found.gid(),
    };
    access::set_owner(copy.file(), owner)?;
    copy.file().set_modified(found.modified()?)?;
    copy.rename(to_name, true)?;
    Ok(unlinkat(from, from_name, AtFlags::empty())?)
}

/// Syncs every file system that one of these directories is on. A directory of the agent may be a
/// separate mount.
fn sync_filesystems(directories: Vec<OwnedFd>) -> io::Result<()> {
    let mut synced = std::collections::BTreeSet::new();
    for directory in directories {
        let directory = File::from(access::reopen_directory(directory)?);
        if synced.insert(directory.metadata()?.dev()) {
            rustix::fs::syncfs(&directory)?;
        }
    }
    Ok(())
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

/// Whether there is no file to read: none exists, or a link is in the way.
fn missing_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        // A root that became a link is an error.
        Err(error) if BlockedPath::of(&error).is_some() => Err(error),
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || beneath::is_blocked(&error)
                // A socket cannot be opened.
                || error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) =>
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

impl Disk {
    /// Opens a file for reading; none if it is not a regular file.
    fn open_file(&self, path: &RelPath) -> io::Result<Option<File>> {
        let opened =
            Access::new(&self.location).and_then(|access| access.open(path.as_str(), READ));
        let Some(file) = missing_is_none(opened)?.map(File::from) else {
            return Ok(None);
        };
        Ok(file.metadata()?.is_file().then_some(file))
    }
}

impl Directory for Disk {
    fn list(&self, directory: Option<&RelPath>) -> io::Result<Vec<Item>> {
        let path = directory.map_or("", RelPath::as_str);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let opened = Access::new(&self.location).and_then(|access| access.open(path, flags));
        let Some(opened) = missing_is_none(opened)? else {
            return Ok(Vec::new());
        };
        let mut items = access::list(opened)?;
        items.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(items)
    }

    fn stat(&self, path: &RelPath) -> io::Result<Option<FileStat>> {
        let Some(file) = missing_is_none(self.open_path(Some(path)))? else {
            return Ok(None);
        };
        let found = file.metadata()?;
        Ok(found.is_file().then(|| stat_of(&found)))
    }

    fn open(&self, path: &RelPath) -> io::Result<Option<Box<dyn OpenFile>>> {
        let file = self.open_file(path)?;
        Ok(file.map(|file| Box::new(file) as Box<dyn OpenFile>))
    }

    fn read(&self, path: &RelPath) -> io::Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(path)? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        file.take(MAX_SMALL_FILE_BYTES + 1)
            .read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_SMALL_FILE_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        Ok(Some(bytes))
    }

    fn replace(&self, path: &RelPath, bytes: &[u8], durable: bool) -> io::Result<()> {
        self.create(None)?;
        let access = Access::new(&self.location)?;
        let parent = access.create_parent(path, None)?;
        // Profiles ignore this name, so that an incomplete file is never uploaded.
        let mut file = NewFile::create(&parent, path.name(), "tmp", access.owner_of_new(None))?;
        file.file().write_all(bytes)?;
        file.rename(path.name(), durable)
    }

    fn write_at(&self, path: &RelPath, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.create(None)?;
        let access = Access::new(&self.location)?;
        let parent = access.create_parent(path, None)?;
        let file = open_own_file(&access, &parent, path, WRITE)?;
        if file.metadata()?.len() != offset {
            file.set_len(offset)?;
        }
        file.write_all_at(bytes, offset)
    }

    fn finish(&self, path: &RelPath, attributes: &FileAttributes) -> io::Result<()> {
        let access = Access::new(&self.location)?;
        let file = File::from(access.open(path.as_str(), WRITE)?);
        access.check_own_file(&file, path)?;
        // Without the set-uid, set-gid and sticky bits, because modes come from the store, which is
        // not trusted.
        file.set_permissions(fs::Permissions::from_mode(attributes.mode & 0o777))?;
        if let Some(owner) = access.owner_of_new(attributes.owner) {
            access::set_owner(&file, owner)?;
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
        self.create(owner)?;
        let access = Access::new(&self.location)?;
        let target = access.create_parent(to, owner)?;
        let source = access.parent(from)?;
        let found = beneath::stat_in(&target, to.name());
        if found.is_ok_and(|found| !FileType::from_raw_mode(found.st_mode).is_file()) {
            return Err(BlockedPath::not_a_file(to.below(&self.location.root)));
        }
        match renameat(&source, from.name(), &target, to.name()) {
            Err(Errno::XDEV) => {
                rename_across_filesystems((&source, from.name()), (&target, to.name()))
            }
            renamed => Ok(renamed?),
        }
    }

    fn remove(&self, path: &RelPath) -> io::Result<()> {
        let removed = Access::new(&self.location).and_then(|access| {
            let parent = access.parent(path)?;
            access::remove(parent, path.name())
        });
        missing_is_none(removed).map(|_| ())
    }

    fn sync_files(&self, paths: &[RelPath]) -> io::Result<()> {
        let access = Access::new(&self.location)?;
        if paths.len() > MAX_SINGLE_SYNCS {
            return sync_filesystems(self.parents(&access, paths)?);
        }
        for path in paths {
            File::from(access.open(path.as_str(), READ)?).sync_all()?;
        }
        Ok(())
    }

    fn sync_names(&self, paths: &[RelPath]) -> io::Result<()> {
        let access = Access::new(&self.location)?;
        let parents = self.parents(&access, paths)?;
        if parents.len() > MAX_SINGLE_SYNCS {
            return sync_filesystems(parents);
        }
        for parent in parents {
            access::sync_directory(parent.as_fd())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::ItemKind;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

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
    fn reads_never_follow_a_link() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("token"), "secret").unwrap();
        let root = tempfile::tempdir().unwrap();
        symlink(outside.path(), root.path().join("tasks")).unwrap();
        symlink(outside.path().join("token"), root.path().join("file")).unwrap();
        let disk = Disk::new(root.path());
        for path in ["tasks/token", "file"] {
            let path = rel(path);
            assert!(disk.open(&path).unwrap().is_none(), "{path}");
            assert!(disk.read(&path).unwrap().is_none(), "{path}");
            assert!(disk.stat(&path).unwrap().is_none(), "{path}");
        }
        assert!(disk.list(Some(&rel("tasks"))).unwrap().is_empty());
        assert!(disk.sync_names(&[rel("tasks/token")]).is_err());
        disk.remove(&rel("tasks/token")).unwrap();
        disk.remove(&rel("file")).unwrap();
        assert!(outside.path().join("token").exists());
        assert!(!root.path().join("file").exists());
    }

    #[test]
    fn a_root_that_becomes_a_link_is_not_followed() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("token"), "secret").unwrap();
        let home = tempfile::tempdir().unwrap();
        let disk = Disk::new(home.path().join("root"));
        disk.create(None).unwrap();
        assert!(disk.list(None).unwrap().is_empty());
        fs::remove_dir(home.path().join("root")).unwrap();
        symlink(outside.path(), home.path().join("root")).unwrap();
        let error = disk.list(None).unwrap_err();
        assert!(error.to_string().contains("is not a directory"), "{error}");
        assert!(disk.read(&rel("token")).ok().flatten().is_none());
        assert!(disk.replace(&rel("new"), b"x", true).is_err());
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_a_crash_left_is_not_written_to() {
        let outside = tempfile::tempdir().unwrap();
        let victim = outside.path().join("victim");
        fs::write(&victim, "keep").unwrap();
        let root = tempfile::tempdir().unwrap();
        let disk = Disk::new(root.path());
        for plant in [symlink::<&Path, PathBuf>, fs::hard_link::<&Path, PathBuf>] {
            plant(&victim, root.path().join(".ledger.tmp")).unwrap();
            disk.replace(&rel("ledger"), b"new", true).unwrap();
            assert_eq!(fs::read(&victim).unwrap(), b"keep");
            assert_eq!(disk.read(&rel("ledger")).unwrap().unwrap(), b"new");
        }
    }

    #[test]
    fn a_directory_is_removed_with_links_but_not_their_targets() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("victim"), "keep").unwrap();
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("a/b/c")).unwrap();
        fs::write(root.path().join("a/b/c/file"), "x").unwrap();
        symlink(outside.path(), root.path().join("a/b/link")).unwrap();
        fs::write(root.path().join(OsStr::from_bytes(b"a/\xff")), "x").unwrap();
        let disk = Disk::new(root.path());
        disk.remove(&rel("a")).unwrap();
        assert!(disk.list(None).unwrap().is_empty());
        assert!(outside.path().join("victim").exists());
    }

    /// As root, with the rights of another user.
    #[test]
    fn an_access_for_an_owner_has_only_its_rights() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can act as another user");
            return;
        }
        let owner = Owner {
            uid: 12_345,
            gid: 12_346,
        };
        let home = tempfile::tempdir().unwrap();
        let secret = home.path().join("secret");
        fs::write(&secret, "root's").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let disk = Disk::new(home.path().join("root")).on_behalf_of(Some(owner), true);
        disk.create(None).unwrap();
        disk.replace(&rel("a/b"), b"x", true).unwrap();
        disk.write_at(&rel("tmp/staged"), 0, b"y").unwrap();
        disk.rename(&rel("tmp/staged"), &rel("c/d"), None).unwrap();
        for path in [".", "a", "a/b", "c", "c/d"] {
            let found = fs::metadata(disk.root().join(path)).unwrap();
            assert_eq!((found.uid(), found.gid()), (12_345, 12_346), "{path}");
        }
        assert_eq!(disk.read(&rel("a/b")).unwrap().unwrap(), b"x");
        // A file of root that is linked into the directory.
        fs::hard_link(&secret, disk.root().join("linked")).unwrap();
        let denied = disk.read(&rel("linked")).unwrap_err();
        assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);
        assert!(disk.write_at(&rel("linked"), 0, b"z").is_err());
        assert_eq!(fs::read(&secret).unwrap(), b"root's");
        // The thread is root again.
        assert!(rustix::process::geteuid().is_root());
        fs::read(&secret).unwrap();
        // Without acting, the file of another user is not changed either.
        let disk = Disk::new(disk.root()).on_behalf_of(Some(owner), false);
        fs::write(disk.root().join("own"), "x").unwrap();
        disk.replace(&rel("new/file"), b"x", true).unwrap();
        let found = fs::metadata(disk.root().join("new/file")).unwrap();
        assert_eq!((found.uid(), found.gid()), (12_345, 12_346));
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
