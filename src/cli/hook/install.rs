//! Adds the hooks to the agent's settings file, removes them, or prints them.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Args;
use crate::agent::claude_code::settings::{self, HookCommand};
use crate::cli::{exit, print};
use crate::config::Settings;
use crate::error::{Error, ErrorContext, Result};
use crate::model::point::parse_checkpoint_name;
use crate::sys::AtomicFile;
use crate::wire::agent_root;

/// Changes the settings file, or prints the settings to add.
pub fn run(settings: &Settings, args: &Args, deadline: Duration) -> Result<u8> {
    let hook = hook_command(args, deadline)?;
    if args.print {
        print::line(hook.standalone_settings()?.trim_end())?;
        return Ok(exit::OK);
    }
    let path = settings_path(settings, args)?;
    let old =
        match std::fs::read_to_string(&path) {
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => None,
            read => Some(read.map_err(|cause| {
                Error::unreadable_file(format!("read {}", path.display()), cause)
            })?),
        };
    let text = old.as_deref().unwrap_or_default();
    let new = if args.install {
        settings::install(text, &hook)
    } else {
        settings::uninstall(text, &hook.program)
    };
    let shown = path.display();
    let Some(new) = new.with_context(|| format!("change {shown}"))? else {
        let state = if args.install {
            "already contains the hooks"
        } else {
            "contains no sessiond hooks"
        };
        print::line(format_args!("{shown} {state}: nothing to do"))?;
        return Ok(exit::OK);
    };
    if !args.dry_run {
        replace(&path, old.as_deref(), &new)
            .map_err(|cause| Error::user_path(format!("write {shown}"), cause))?;
    }
    print::line(match (args.install, args.dry_run) {
        (true, is_dry_run) => {
            let verb = if is_dry_run { "would add" } else { "added" };
            format!("{verb} hooks to {shown}: {}", hook.events().join(", "))
        }
        (false, true) => format!("would remove the sessiond hooks from {shown}"),
        (false, false) => format!("removed the sessiond hooks from {shown}"),
    })?;
    if old.is_some() && !args.dry_run {
        print::line(format_args!(
            "saved the previous version as {}",
            backup_path(&path).display()
        ))?;
    }
    Ok(exit::OK)
}

fn settings_path(settings: &Settings, args: &Args) -> Result<PathBuf> {
    let path = match (&args.settings, &args.project) {
        (Some(file), _) => file.clone(),
        (None, Some(directory)) => directory.join(".claude/settings.json"),
        (None, None) => agent_root(settings)?.join("settings.json"),
    };
    // Replace the target of a symbolic link, not the link.
    Ok(path.canonicalize().unwrap_or(path))
}

/// The hook as the agent calls it.
fn hook_command(args: &Args, deadline: Duration) -> Result<HookCommand> {
    let program =
        std::env::current_exe().map_err(|cause| Error::io("find the path of sessiond", cause))?;
    let Some(program) = program.to_str() else {
        return Err(Error::usage(format!(
            "the path of sessiond, {}, is not UTF-8, and the settings file cannot contain it",
            program.display()
        ))
        .hint("move sessiond to another directory"));
    };
    let mut flags = Vec::new();
    if let Some(deadline) = &args.deadline {
        flags.extend(["--deadline".to_owned(), deadline.trim().to_owned()]);
    }
    let after_tools = args.after_tools.unwrap_or(false);
    flags.extend(after_tools.then(|| "--after-tools".to_owned()));
    if let Some(name) = &args.checkpoint {
        flags.extend(["--checkpoint".to_owned(), parse_checkpoint_name(name)?]);
    }
    let verbose = args.verbose.unwrap_or(false);
    flags.extend(verbose.then(|| "--verbose".to_owned()));
    // The agent kills a hook at its own limit, which is 1.5 seconds when a session ends. The
    // hook's own deadline must come first.
    let timeout = deadline.as_secs() + u64::from(deadline.subsec_nanos() > 0) + 1;
    Ok(HookCommand {
        program: program.to_owned(),
        flags,
        timeout,
        after_tools,
    })
}

fn backup_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{name}.before-sessiond"))
}

/// Replaces the file atomically, with the owner and mode of the old one, and keeps a backup.
fn replace(path: &Path, old: Option<&str>, new: &str) -> std::io::Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let metadata = std::fs::metadata(path).ok();
    if let Some(old) = old {
        write(&backup_path(path), old, metadata.as_ref())?;
    }
    write(path, new, metadata.as_ref())
}

fn write(path: &Path, text: &str, like: Option<&std::fs::Metadata>) -> std::io::Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(text.as_bytes())?;
    if let Some(like) = like {
        let created = file.file().metadata()?;
        if (created.uid(), created.gid()) != (like.uid(), like.gid()) {
            // Only root may change the owner; the file then belongs to the current user.
            let _ = std::os::unix::fs::fchown(file.file(), Some(like.uid()), Some(like.gid()));
        }
        let mode = std::fs::Permissions::from_mode(like.mode() & 0o777);
        file.file().set_permissions(mode)?;
    }
    file.commit()
}
