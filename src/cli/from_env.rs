//! `restore --from-env`: a session that came in variables of the environment, where there is no store to ask.

use std::path::Path;

use crate::cli::restore::Args;
use crate::cli::{exit, print, select};
use crate::daemon::lock;
use crate::error::{Error, Result};
use crate::model::SessionId;
use crate::restore::{Context, Options, RestoreReport, blob};
use crate::wire::Parts;

const ID: &str = "AGENT_SESSION_ID";
const BLOB: &str = "AGENT_SESSION_BLOB";

/// Puts it in place.
pub async fn run(parts: &Parts, args: &Args) -> Result<u8> {
    let set = |name: &str| match std::env::var(name) {
        Ok(text) => Ok(Some(text).filter(|text| !text.trim().is_empty())),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(cause) => Err(Error::usage(format!("read {name}")).caused_by(cause)),
    };
    let id: Option<SessionId> = set(ID)?.map(|text| text.trim().parse()).transpose()?;
    let Some(text) = set(BLOB)? else {
        if args.if_exists {
            return told(parts, args, Vec::new());
        }
        return Err(Error::not_found(format!("restore --from-env: {BLOB} is not set"))
            .hint(format!("{BLOB}=$(sessiond export ID --base64), {ID}=ID; --if-exists takes nothing for an answer")));
    };
    let now_ns = i64::try_from(parts.logs.clock.now().as_nanosecond()).unwrap_or(0);
    let here = select::project_of(parts, Path::new("."));
    let blob = blob::read(&*parts.profile, BLOB, &text, id.as_ref(), &here, now_ns)?;
    let disk = parts.directory()?;
    let owner = select::owner(args.owner.as_deref(), &disk)?;
    let options = Options {
        force: args.force,
        repair: args.repair,
        dry_run: args.dry_run,
        claim: true,
        owner,
        ..Options::default()
    };
    let _lock = if args.dry_run {
        None
    } else {
        Some(lock::take(disk.root(), owner)?)
    };
    let context = Context {
        directory: disk.clone(),
        profile: parts.profile.clone(),
        logs: parts.logs.clone(),
    };
    let report = blob::restore(&context, blob, &options)?;
    super::restore::settle(parts, &report, &options).await?;
    if let (Some(owner), false) = (owner, args.dry_run) {
        disk.give_state(owner)
            .map_err(|cause| Error::io("hand sessiond's own directory over", cause))?;
    }
    told(parts, args, vec![report])
}

fn told(parts: &Parts, args: &Args, reports: Vec<RestoreReport>) -> Result<u8> {
    if args.json {
        print::json(&reports)?;
    } else if reports.is_empty() {
        print::line("nothing to restore")?;
    } else {
        reports
            .iter()
            .try_for_each(|report| super::restore::say(parts, report))?;
    }
    Ok(exit::OK)
}
