//! One access to a directory on disk: the handle from which paths are resolved, and the user whose
//! rights apply.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, mkdirat, renameat, unlinkat};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

use crate::model::RelPath;
use crate::sys::acting::ActingAs;
use crate::sys::atomic_file::sync_open_directory;
use crate::sys::{BlockedPath, Item, ItemKind, Owner, beneath};

/// Opens a directory as a base for other paths.
pub(super) const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY);

/// Opens a file for reading. A pipe in its place does not block the open.
pub(super) const READ: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Opens a file for writing.
pub(super) const WRITE: OFlags = OFlags::WRONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Maximum depth of a directory that is removed. sessiond creates about ten levels.
const MAX_DEPTH: usize = 128;

/// The place of a directory, and on whose behalf it is accessed.
#[derive(Debug, Clone)]
pub(super) struct Location {
    /// The path as the user wrote it, for messages.
    pub root: PathBuf,
    /// The path without symbolic links.
    pub resolved: PathBuf,
    /// The owner of files that sessiond creates; none leaves them to the user of the process.
    pub owner: Option<Owner>,
    /// The user whose rights apply; none for those of the process.
    pub acts_as: Option<Owner>,
}

/// An access to the directory. The thread acts as the owner until it is dropped.
pub(super) struct Access<'a> {
    location: &'a Location,
    /// The root, if the thread acts as its owner, who may not be able to reach it by its path.
    root: Option<OwnedFd>,
    /// The owner of files that this access creates, if that is not the user it acts as.
    owner: Option<Owner>,
    _acting: Option<ActingAs>,
}

impl<'a> Access<'a> {
    /// Opens the directory. Fails if it does not exist.
    pub fn new(location: &'a Location) -> io::Result<Access<'a>> {
        let mut access = Access {
            location,
            root: None,
            owner: location.owner,
            _acting: None,
        };
        let Some(user) = location.acts_as else {
            return Ok(access);
        };
        let root = File::from(access.open("", DIRECTORY)?);
        let found = root.metadata()?.uid();
        // The user can put a directory of somebody else in the place of the root.
        if found != user.uid {
            let why = format!("it belongs to user {found}, not to user {}", user.uid);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        match ActingAs::start(user) {
            Ok(acting) => {
                access._acting = Some(acting);
                access.owner = None;
            }
            // A container may run as root without the capability.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            Err(error) => return Err(error),
        }
        access.root = Some(root.into());
        Ok(access)
    }

    /// Opens a path below the root; the root itself if it is empty.
    pub fn open(&self, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let opened = match &self.root {
            Some(root) => beneath::open_in(root, Path::new(path), flags, Mode::empty()),
            None => {
                let path = match path.is_empty() {
                    true => self.location.resolved.clone(),
                    false => self.location.resolved.join(path),
                };
                beneath::open_absolute(&path, flags, Mode::empty())
            }
        };
        match opened {
            // The user resolved the links in the path when the program started.
            Err(error) if path.is_empty() && beneath::is_blocked(&error) => {
                Err(BlockedPath::not_a_directory(self.location.root.clone()))
            }
            opened => opened,
        }
    }

    /// Opens the directory that contains a path.
    pub fn parent(&self, path: &RelPath) -> io::Result<OwnedFd> {
        let parent = path.parent();
        self.open(parent.as_ref().map_or("", RelPath::as_str), DIRECTORY)
    }

    /// Opens the directory that contains a path. Creates missing directories, owned by `owner`.
    pub fn create_parent(&self, path: &RelPath, owner: Option<Owner>) -> io::Result<OwnedFd> {
        match self.parent(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if BlockedPath::of(&error).is_none() && beneath::is_blocked(&error) => {}
            opened => return opened,
        }
        let mut directory = self.open("", DIRECTORY)?;
        let mut display = self.location.root.clone();
        let parent = path.parent();
        for name in parent.iter().flat_map(RelPath::components) {
            display.push(name);
            directory = match open_directory(&directory, Path::new(name)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let owner = self.owner_of_new(owner);
                    create_directory(&directory, Path::new(name), owner)
                }
                opened => opened,
            }
            .map_err(|error| match beneath::is_blocked(&error) {
                true => BlockedPath::not_a_directory(display.clone()),
                false => error,
            })?;
        }
        Ok(directory)
    }

    /// The owner to set on a new file: none if the file belongs to it from the start.
    pub fn owner_of_new(&self, owner: Option<Owner>) -> Option<Owner> {
        match self._acting {
            Some(_) => None,
            None => owner.or(self.owner),
        }
    }

    /// Whether a file that sessiond writes is one of its own: not a link of another user's file.
    pub fn check_own_file(&self, file: &File, path: &RelPath) -> io::Result<()> {
        let found = file.metadata()?;
        let user = rustix::process::geteuid().as_raw();
        let user = self.owner.map_or(user, |owner| owner.uid);
        if found.is_file() && (found.nlink() <= 1 || found.uid() == user) {
            Ok(())
        } else {
            Err(BlockedPath::not_a_file(self.display(path)))
        }
    }

    /// The path in messages.
    pub fn display(&self, path: &RelPath) -> PathBuf {
        path.below(&self.location.root)
    }
}

/// Opens a directory in a directory.
pub(super) fn open_directory(parent: impl AsFd, name: &Path) -> io::Result<OwnedFd> {
    beneath::open_in(parent, name, DIRECTORY, Mode::empty())
}

/// Creates a directory that only its owner can enter, unless it exists, and opens it.
pub(super) fn create_directory(
    parent: impl AsFd,
    name: &Path,
    owner: Option<Owner>,
) -> io::Result<OwnedFd> {
    let created = match mkdirat(&parent, name, Mode::RWXU) {
        Err(Errno::EXIST) => false,
        created => created.map(|()| true)?,
    };
    let directory = open_directory(parent, name)?;
    if let Some(owner) = owner.filter(|_| created) {
        set_owner(&directory, owner)?;
    }
    Ok(directory)
}

/// Changes the owner of an open file. Also works with a file that is open as a path only.
pub(super) fn set_owner(file: impl AsFd, owner: Owner) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    let found = rustix::fs::fstat(&file)?;
    if (found.st_uid, found.st_gid) == (owner.uid, owner.gid) {
        return Ok(());
    }
    let chowned = rustix::fs::chownat(file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH);
    Ok(chowned?)
}

/// The next version of a file, under another name in the same directory. Dropping it without
/// [`rename`](NewFile::rename) removes it.
pub(super) struct NewFile<'a> {
    file: File,
    directory: &'a OwnedFd,
    temporary: String,
    is_renamed: bool,
}

impl<'a> NewFile<'a> {
    /// Creates the file next to `name`. A file that a crash left is removed, never written to: it
    /// may be a link by now.
    pub fn create(
        directory: &'a OwnedFd,
        name: &str,
        suffix: &str,
        owner: Option<Owner>,
    ) -> io::Result<NewFile<'a>> {
        let temporary = format!(".{name}.{suffix}");
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let mode = Mode::RUSR | Mode::WUSR;
        let create = || beneath::open_in(directory, Path::new(&temporary), flags, mode);
        let file = match create() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                unlinkat(directory, temporary.as_str(), AtFlags::empty())?;
                create()
            }
            created => created,
        }?;
        if let Some(owner) = owner {
            set_owner(&file, owner)?;
        }
        Ok(NewFile {
            file: file.into(),
            directory,
            temporary,
            is_renamed: false,
        })
    }

    /// The file.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives the file its name, durably if `durable`.
    pub fn rename(mut self, name: &str, durable: bool) -> io::Result<()> {
        self.file.flush()?;
        if durable {
            self.file.sync_all()?;
        }
        let temporary = self.temporary.as_str();
        renameat(self.directory, temporary, self.directory, name)?;
        self.is_renamed = true;
        match durable {
            true => sync_directory(self.directory),
            false => Ok(()),
        }
    }
}

impl Drop for NewFile<'_> {
    fn drop(&mut self) {
        if !self.is_renamed {
            let _ = unlinkat(self.directory, self.temporary.as_str(), AtFlags::empty());
        }
    }
}

/// Makes the names in a directory durable. `directory` may be open as a path only.
pub(super) fn sync_directory(directory: impl AsFd) -> io::Result<()> {
    sync_open_directory(&File::from(reopen_directory(directory)?))
}

/// Opens a directory for reading that is open as a path only.
pub(super) fn reopen_directory(directory: impl AsFd) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    beneath::open_in(directory, Path::new("."), flags, Mode::empty())
}

/// The items of a directory that is open for reading, in no order.
pub(super) fn list(directory: OwnedFd) -> io::Result<Vec<Item>> {
    let mut directory = Dir::new(directory)?;
    let mut items = Vec::new();
    while let Some(entry) = directory.read() {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let Ok(text) = name.to_str() else {
            items.push(Item {
                name: name.to_string_lossy().into_owned(),
                kind: ItemKind::InvalidName,
            });
            continue;
        };
        let kind = match entry.file_type() {
            // Some filesystems do not tell.
            FileType::Unknown => match beneath::stat_in(directory.fd()?, text) {
                Ok(found) => FileType::from_raw_mode(found.st_mode),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            },
            kind => kind,
        };
        items.push(Item {
            name: text.to_owned(),
            kind: match kind {
                FileType::RegularFile => ItemKind::File,
                FileType::Directory => ItemKind::Directory,
                FileType::Symlink => ItemKind::Link,
                _ => ItemKind::Other,
            },
        });
    }
    Ok(items)
}

/// Removes a file, or a directory with its content.
pub(super) fn remove(parent: impl AsFd, name: &str) -> io::Result<()> {
    remove_level(parent, OsStr::new(name), MAX_DEPTH)
}

fn remove_level(parent: impl AsFd, name: &OsStr, depth: usize) -> io::Result<()> {
    let removed = unlinkat(&parent, name, AtFlags::empty());
    if !matches!(removed, Err(Errno::ISDIR | Errno::PERM)) {
        return Ok(removed?);
    }
    if depth == 0 {
        return Err(io::Error::other("it has too many levels of directories"));
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let directory = beneath::open_in(&parent, Path::new(name), flags, Mode::empty())?;
    // The names of files that the agent put there may be anything, also not UTF-8.
    let mut items = Dir::read_from(&directory)?;
    while let Some(item) = items.read() {
        let item = item?;
        let name = OsStr::from_bytes(item.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        match remove_level(&directory, name, depth - 1) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed?,
        }
    }
    Ok(unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}
