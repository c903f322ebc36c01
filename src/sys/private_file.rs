//! Files that only their owner should read: keys, and settings with passwords.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Whether users outside the file's group can read or change it. A group may share a key: that is
/// how Kubernetes gives a secret to a pod.
pub fn is_open_to_others(path: &Path) -> io::Result<bool> {
    Ok(std::fs::metadata(path)?.mode() & 0o006 != 0)
}

/// Writes a file that only its owner can read, for tests.
#[cfg(test)]
pub fn write(path: &Path, content: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::write(path, content).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}
