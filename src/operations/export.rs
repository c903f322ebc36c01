//! Exports a session to one archive file.

use std::io::Write;
use std::sync::Arc;

use super::pull;
use crate::codec::archive::Manifest;
use crate::error::{Error, Result};
use crate::exchange;
use crate::model::{
    FileKind, LogId, LogName, PointSpec, RelPath, ResolvedPoint, SessionId, WriterId,
};
use crate::restore::{FileAction, Purpose};
use crate::sessions::point;
use crate::sys::scratch::ScratchDirectory;
use crate::wire::Parts;

/// A session whose files were fetched and verified, ready to be written as an archive.
pub struct Export {
    scratch: Arc<ScratchDirectory>,
    manifest: Manifest,
    files: Vec<(RelPath, FileKind)>,
}

impl Export {
    /// Fetches a session at a point of its main line or of a branch.
    pub async fn fetch(
        parts: &Parts,
        id: &LogId,
        branch: Option<&WriterId>,
        point: &PointSpec,
    ) -> Result<Export> {
        let LogName::Session(session) = &id.name else {
            return Err(Error::usage(format!(
                "{id} is not a session: only sessions can be exported"
            )));
        };
        let scratch = Arc::new(ScratchDirectory::new(&*parts.logs.rng));
        let point = point::resolve_on(&parts.logs, id, branch, point).await?;
        let (manifest, files) = fetch(parts, id, session, point, scratch.clone()).await?;
        Ok(Export {
            scratch,
            manifest,
            files,
        })
    }

    /// Writes the archive.
    pub fn write(self, base64: bool, out: impl Write) -> Result<Manifest> {
        exchange::pack(&*self.scratch, &self.files, self.manifest, base64, out)
    }
}

async fn fetch(
    parts: &Parts,
    id: &LogId,
    session: &SessionId,
    point: ResolvedPoint,
    scratch: Arc<ScratchDirectory>,
) -> Result<(Manifest, Vec<(RelPath, FileKind)>)> {
    let report = pull::copy_for(Purpose::Export, parts, id, point, scratch).await?;
    let kind = |path: &RelPath| {
        let class = parts.profile.classify(path);
        class.kind().unwrap_or(FileKind::Whole)
    };
    let files = report
        .files
        .into_iter()
        .filter(|file| file.action == FileAction::Write)
        .map(|file| {
            let kind = kind(&file.path);
            (file.path, kind)
        })
        .collect();
    let metadata = parts.logs.metadata(id).await?.metadata;
    let manifest = Manifest::new(
        id.agent.clone(),
        session.clone(),
        report.seq,
        parts.logs.clock.now(),
        &metadata,
    );
    Ok((manifest, files))
}
