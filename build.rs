//! Records the commit, the target and the profile of the build, for `sessiond version`.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // A commit changes HEAD (detached), the branch it names, or packed-refs.
    for name in ["HEAD", "refs/heads", "packed-refs"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name])
            && std::path::Path::new(&path).exists()
        {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=SESSIOND_BUILD_COMMIT={commit}");
    for name in ["TARGET", "PROFILE"] {
        let value = std::env::var(name).unwrap_or_else(|_| "unknown".to_owned());
        println!("cargo:rustc-env=SESSIOND_BUILD_{name}={value}");
    }
}

/// The output of a git command; none without git or outside of a repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let text = text.trim();
    (output.status.success() && !text.is_empty()).then(|| text.to_owned())
}
