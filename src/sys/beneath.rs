//! Opens files without following a symbolic link in any component of their path.
//!
//! The kernel resolves the path (`openat2`). On a kernel or in a sandbox without that call, each
//! component is opened on its own.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Stat, openat, openat2};
use rustix::io::Errno;

/// How often a resolution is repeated that a concurrent rename interrupted.
const MAX_ATTEMPTS: usize = 8;

/// Whether the kernel rejected `openat2` as an unknown call.
static HAS_NO_OPENAT2: AtomicBool = AtomicBool::new(false);

/// Opens `path`, which is relative to `directory` and stays below it.
pub fn open_in(
    directory: impl AsFd,
    path: &Path,
    flags: OFlags,
    mode: Mode,
) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    open(directory, path, flags, mode, resolve)
}

/// Opens `path`, which is absolute.
pub fn open_absolute(path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
    open(CWD, path, flags, mode, ResolveFlags::NO_SYMLINKS)
}

fn open(
    directory: impl AsFd,
    path: &Path,
    flags: OFlags,
    mode: Mode,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    if path
        .components()
        .any(|component| component == Component::ParentDir)
    {
        return Err(Errno::XDEV.into());
    }
    let path = match path.as_os_str().is_empty() {
        true => Path::new("."),
        false => path,
    };
    if !HAS_NO_OPENAT2.load(Ordering::Relaxed) {
        for _ in 0..MAX_ATTEMPTS {
            match openat2(&directory, path, flags, mode, resolve) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::NOSYS) => {
                    HAS_NO_OPENAT2.store(true, Ordering::Relaxed);
                    break;
                }
                // A sandbox may reject the call, and a file may reject the flags.
                Err(Errno::PERM) => break,
                opened => return Ok(opened?),
            }
        }
    }
    open_each(directory, path, flags, mode)
}

/// Opens one component after the other.
fn open_each(directory: impl AsFd, path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
    let step = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut names: Vec<&OsStr> = Vec::new();
    let mut current = None;
    for component in path.components() {
        match component {
            Component::RootDir => current = Some(openat(CWD, "/", step, Mode::empty())?),
            Component::Normal(name) => names.push(name),
            _ => {}
        }
    }
    let last = names.pop().unwrap_or(OsStr::new("."));
    for name in names {
        current = Some(match &current {
            Some(parent) => openat(parent, name, step, Mode::empty())?,
            None => openat(&directory, name, step, Mode::empty())?,
        });
    }
    Ok(match &current {
        Some(parent) => openat(parent, last, flags, mode)?,
        None => openat(&directory, last, flags, mode)?,
    })
}

/// The attributes of `name` in a directory, which may be a link.
pub fn stat_in(directory: impl AsFd, name: &str) -> io::Result<Stat> {
    Ok(rustix::fs::statat(
        directory,
        name,
        AtFlags::SYMLINK_NOFOLLOW,
    )?)
}

/// The path of a directory without symbolic links. Components that do not exist are kept as they
/// are, and must not become links.
pub fn resolve(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let resolved = path.ancestors().find_map(|ancestor| {
        let rest = path.strip_prefix(ancestor).ok()?;
        let mut resolved = ancestor.canonicalize().ok()?;
        resolved.extend(rest);
        Some(resolved)
    });
    resolved.unwrap_or(path)
}

/// Whether an open failed because a component is a link, or a file in the place of a directory.
pub fn is_blocked(error: &io::Error) -> bool {
    let blocked = [Errno::LOOP, Errno::NOTDIR, Errno::XDEV];
    blocked
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    type Open = fn(&OwnedFd, &Path, OFlags) -> io::Result<OwnedFd>;

    /// With `openat2`, and without it.
    const OPENERS: [Open; 2] = [
        |directory, path, flags| open_in(directory, path, flags, Mode::empty()),
        |directory, path, flags| {
            open_each(directory, path, flags | OFlags::NOFOLLOW, Mode::empty())
        },
    ];

    #[test]
    fn no_component_may_be_a_link() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/b/file"), "x").unwrap();
        symlink(root.join("a"), root.join("link")).unwrap();
        symlink("file", root.join("a/b/alias")).unwrap();
        let directory = open_absolute(root, OFlags::PATH, Mode::empty()).unwrap();
        for open in OPENERS {
            assert!(open(&directory, Path::new("a/b/file"), OFlags::RDONLY).is_ok());
            for path in ["link/b/file", "link/b", "a/b/alias"] {
                let error = open(&directory, Path::new(path), OFlags::RDONLY).unwrap_err();
                assert!(is_blocked(&error), "{path}: {error}");
            }
            let missing = open(&directory, Path::new("a/c/file"), OFlags::RDONLY);
            assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
        }
        assert!(
            open_in(
                &directory,
                Path::new("a/../../x"),
                OFlags::RDONLY,
                Mode::empty()
            )
            .is_err()
        );
    }

    #[test]
    fn links_in_the_root_are_resolved_once() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("volume")).unwrap();
        symlink(root.join("volume"), root.join("home")).unwrap();
        assert_eq!(resolve(&root.join("home")), root.join("volume"));
        assert_eq!(resolve(&root.join("home/x/y")), root.join("volume/x/y"));
    }
}
