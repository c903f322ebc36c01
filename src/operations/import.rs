//! Imports an archive file into the store.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use super::index;
use crate::error::{Error, Result};
use crate::exchange::import::{self, ImportReport};
use crate::model::{LogName, SessionId};
use crate::sys::scratch::ScratchDirectory;
use crate::wire::Parts;

/// Imports the archive at `path`, or from standard input if `path` is `-`. The session gets the ID
/// `new_id` if it is given.
pub async fn import(
    parts: &Parts,
    path: &Path,
    new_id: Option<&SessionId>,
    dry_run: bool,
) -> Result<ImportReport> {
    let scratch = ScratchDirectory::new(&*parts.logs.rng);
    let (name, input) = open(path)?;
    let mut unpacked = import::unpack(&name, input, &scratch)?;
    if let Some(new_id) = new_id {
        unpacked.rename(new_id)?;
    }
    let imported = import::import(&parts.logs, &*parts.profile, &unpacked, dry_run).await?;
    if !dry_run {
        let session = unpacked.manifest.session.clone();
        index::update(parts, &parts.logs.id(LogName::Session(session))).await;
    }
    Ok(imported)
}

fn open(path: &Path) -> Result<(String, Box<dyn Read>)> {
    if path == Path::new("-") {
        return Ok((
            "standard input".to_owned(),
            Box::new(std::io::stdin().lock()),
        ));
    }
    let name = path.display().to_string();
    let opened = if path.is_dir() {
        Err(ErrorKind::IsADirectory.into())
    } else {
        File::open(path)
    };
    match opened {
        Ok(file) => Ok((name, Box::new(file))),
        Err(cause) if cause.kind() == ErrorKind::NotFound => {
            Err(Error::not_found(format!("{name} does not exist")))
        }
        Err(cause) => Err(Error::unreadable_file(format!("import {name}"), cause)),
    }
}
