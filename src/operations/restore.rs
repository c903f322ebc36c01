//! The restore service: lock, agent database, restore, project logs, index and counters.
//!
//! Owns the order of these steps for `restore`, `run`, `daemon` and the session store. Does not own
//! how one log is restored (`restore`).

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::Serialize;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::history_file::{HistoryFallback, HistoryFile};
use super::index;
use crate::error::{Error, ErrorKind, Result};
use crate::history::{ConversationRead, ConversationReader, Extent, HistoryText};
use crate::index::Failure;
use crate::log::errors;
use crate::log::witness::{LogRollback, ReadLinks};
use crate::mirror::UpdateMode;
use crate::model::{LogId, LogName, PointSpec, ResolvedPoint, Version};
use crate::restore::inline::{self, InlineSession};
use crate::restore::{
    Options, Purpose, RestoreContext, RestoreReport, Restored, TargetProject, restore,
    restore_with_projects, write_root_file,
};
use crate::sessions::find::{self, SessionSelector};
use crate::sessions::point;
use crate::sys::lock::{RootLock, lock_root};
use crate::sys::{Counters, Disk, Operation, Owner};
use crate::wire::Parts;

/// When a restore is recorded in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexUpdate {
    /// At the end of the restore.
    Immediate,
    /// Later, by the caller's indexer.
    Deferred,
}

/// The sessions to restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionSet {
    /// Every log of the agent.
    All,
    /// The session that a user selects.
    Selected(SessionSelector),
    /// This session. A removed one counts as missing.
    Exact(LogId),
}

/// What happens if the session does not exist.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum IfMissing {
    /// The restore fails.
    #[default]
    Fail,
    /// The restore does nothing.
    Skip,
}

/// A restore.
#[derive(Debug, Clone)]
pub struct RestoreRequest {
    /// The sessions.
    pub sessions: SessionSet,
    /// What happens if no session matches.
    pub if_missing: IfMissing,
    /// The point to restore.
    pub point: PointSpec,
    /// The project to restore the session into.
    pub project: Option<TargetProject>,
    /// Restore the logs of the session's projects too.
    pub with_projects: bool,
    /// Move local files that differ aside instead of failing.
    pub force: bool,
    /// Restore the undamaged part of a damaged log instead of failing.
    pub salvage: bool,
    /// Write transcripts without damaged lines.
    pub repair: bool,
    /// Continue after the last stored entry if the index knows a later one.
    pub accept_rollback: bool,
    /// Only plan; change nothing.
    pub dry_run: bool,
    /// Do not restore sessions that a newer version of the agent wrote.
    pub max_agent_version: Option<Version>,
    /// Write the conversation as text if the session cannot be restored.
    pub fallback: Option<HistoryFallback>,
}

impl RestoreRequest {
    /// A restore of the latest entry with default options.
    pub fn new(sessions: SessionSet) -> RestoreRequest {
        RestoreRequest {
            sessions,
            if_missing: IfMissing::default(),
            point: PointSpec::default(),
            project: None,
            with_projects: true,
            force: false,
            salvage: false,
            repair: false,
            accept_rollback: false,
            dry_run: false,
            max_agent_version: None,
            fallback: None,
        }
    }
}

/// The result of a restore.
#[derive(Debug, Default)]
pub struct RestoreSummary {
    /// The restored logs: each session, followed by its projects.
    pub restored: Vec<RestoreReport>,
    /// The conversations that were written as text instead.
    pub histories: Vec<FallbackHistory>,
    /// The errors of sessions that failed while others were restored.
    pub failures: Vec<Error>,
}

/// A conversation that was written as text, because its session could not be restored.
#[derive(Debug)]
pub struct FallbackHistory {
    /// The text.
    pub file: HistoryFile,
    /// Why the session could not be restored.
    pub cause: Error,
}

/// One row of the summary as JSON.
#[derive(Serialize)]
#[serde(untagged)]
pub enum SummaryRow<'a> {
    /// A restored log.
    Restored(&'a RestoreReport),
    /// A conversation written as text.
    History(&'a HistoryFile),
}

impl RestoreSummary {
    /// Whether there was nothing to restore.
    pub fn is_empty(&self) -> bool {
        self.restored.is_empty() && self.histories.is_empty() && self.failures.is_empty()
    }

    /// The rows to print as JSON.
    pub fn rows(&self) -> Vec<SummaryRow<'_>> {
        let restored = self.restored.iter().map(SummaryRow::Restored);
        let histories = self.histories.iter().map(|history| &history.file);
        restored.chain(histories.map(SummaryRow::History)).collect()
    }

    /// The logs that were restored.
    pub fn log_names(&self) -> Result<Vec<LogName>> {
        let names = self.restored.iter().map(|report| report.session.parse());
        names.collect()
    }

    /// Writes the restored logs to the log of this process.
    pub fn log(&self) {
        for report in &self.restored {
            tracing::info!(
                session = report.session,
                seq = report.seq,
                files = report.written(),
                bytes = report.bytes,
                "restored"
            );
            for repaired in &report.repaired {
                tracing::warn!(path = %repaired.path, changes = repaired.changes.len(), original = ?repaired.original, "repaired a transcript");
            }
        }
    }
}

/// Restores sessions into one agent's directory, which it keeps locked.
pub struct RestoreService {
    parts: Parts,
    disk: Arc<Disk>,
    counters: Arc<Counters>,
    index: IndexUpdate,
    /// A restore removes the temporary files of earlier ones, so only one runs at a time.
    running: Mutex<()>,
    _lock: Option<RootLock>,
}

impl RestoreService {
    /// Locks the agent's directory.
    pub fn open(
        parts: &Parts,
        counters: Arc<Counters>,
        index: IndexUpdate,
    ) -> Result<RestoreService> {
        let mut service = RestoreService::without_lock(parts, counters, index)?;
        service._lock = Some(lock_root(&service.disk)?);
        Ok(service)
    }

    /// A service for a dry run.
    pub fn without_lock(
        parts: &Parts,
        counters: Arc<Counters>,
        index: IndexUpdate,
    ) -> Result<RestoreService> {
        Ok(RestoreService {
            parts: parts.clone(),
            disk: parts.directory()?,
            counters,
            index,
            running: Mutex::default(),
            _lock: None,
        })
    }

    /// The agent's directory.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// The owner of restored files.
    fn owner(&self) -> Option<Owner> {
        self.disk.file_owner()
    }

    /// Restores sessions.
    pub async fn restore(&self, request: &RestoreRequest) -> Result<RestoreSummary> {
        let _running = self.running.lock().await;
        let started = Instant::now();
        // Boxed: the future of a restore is large, and each caller would hold a copy on its stack.
        let result = Box::pin(self.restore_all(request)).await;
        match &result {
            Ok(summary) if summary.restored.is_empty() => {}
            Ok(summary) => self.count(&summary.restored, started),
            Err(error) => self.counters.record_error(Operation::Restore, error.kind()),
        }
        result
    }

    /// Restores a session from an environment variable, without reading the store or claiming the
    /// session.
    pub async fn restore_inline(
        &self,
        session: InlineSession,
        request: &RestoreRequest,
    ) -> Result<RestoreSummary> {
        let _running = self.running.lock().await;
        let started = Instant::now();
        let options = self.options(request, ResolvedPoint::default());
        let report = inline::restore(&self.context(), session, &options)?;
        self.push_to_database(&report, request.dry_run).await?;
        let summary = RestoreSummary {
            restored: vec![report],
            ..RestoreSummary::default()
        };
        self.count(&summary.restored, started);
        Ok(summary)
    }

    fn count(&self, restored: &[RestoreReport], started: Instant) {
        let bytes = restored.iter().map(|report| report.bytes).sum();
        let now = self.parts.logs.clock.now();
        self.counters.record_restore(bytes, started.elapsed(), now);
    }

    async fn restore_all(&self, request: &RestoreRequest) -> Result<RestoreSummary> {
        let updates_index = self.index == IndexUpdate::Immediate && !request.dry_run;
        if updates_index {
            index::connect_early(&self.parts);
        }
        let ids = self.find(request).await?;
        let mut summary = RestoreSummary::default();
        let mut done: BTreeSet<String> = BTreeSet::new();
        let mut claims = Vec::new();
        let is_all = request.sessions == SessionSet::All;
        if is_all {
            self.parts.logs.progress.set_total_logs(ids.len());
        }
        for id in &ids {
            if is_all {
                self.parts.logs.progress.start_log();
            }
            // Restored already, as the project of an earlier session.
            if done.contains(&id.name.to_string()) {
                continue;
            }
            // Boxed, because a future of this size needs too much of the stack in a debug build.
            match Box::pin(self.restore_session(id, request)).await {
                Ok(Outcome::Restored(restored)) => {
                    done.extend(restored.iter().map(|log| log.report.session.clone()));
                    claims.extend(restored);
                }
                Ok(Outcome::History(history)) => summary.histories.push(*history),
                Err(error) if is_all => summary.failures.push(error),
                Err(error) if self.is_missing(request, &error).await? => {
                    // Otherwise, the restore itself has asked the index.
                    if request.accept_rollback {
                        self.check_never_stored(request).await?;
                    }
                    return self.missing(request);
                }
                Err(error) => return Err(error),
            }
        }
        if !request.dry_run {
            self.forget_rolled_back(&claims).await?;
        }
        if updates_index {
            index::record_claims(&self.parts, &claims).await;
        }
        summary.restored = claims.into_iter().map(|log| log.report).collect();
        if ids.is_empty() {
            self.check_never_stored(request).await?;
            return self.missing(request);
        }
        Ok(summary)
    }

    /// Corrects the index after the user accepted the rollback of logs.
    async fn forget_rolled_back(&self, restored: &[Restored]) -> Result<()> {
        for report in restored.iter().map(|log| &log.report) {
            if let Some(rollback) = &report.accepted_rollback {
                let id = self.parts.logs.id(report.session.parse()?);
                self.forget_rows(&id, rollback).await;
            }
        }
        Ok(())
    }

    /// Deletes the rows of a log that contradict the store. The next update of the index records the
    /// log again. The failure list keeps a trace.
    async fn forget_rows(&self, id: &LogId, rollback: &LogRollback) {
        let failure = Failure {
            namespace: id.namespace.clone(),
            agent: id.agent.clone(),
            session: Some(id.name.to_string()),
            at: self.parts.logs.clock.now(),
            attempt: 1,
            message: format!("accepted a rollback: {rollback}"),
        };
        let forget = async {
            self.parts.index.delete_log(id).await?;
            self.parts.index.record_failure(&failure).await
        };
        if let Err(error) = forget.await {
            tracing::warn!(%error, session = %id.name, "the index still knows the entries before the rollback; run \"sessiond reindex\"");
        }
    }

    /// Checks that a session which the store does not have is unknown to the index, too; otherwise
    /// its log was rolled back.
    async fn check_never_stored(&self, request: &RestoreRequest) -> Result<()> {
        let id = match &request.sessions {
            SessionSet::Selected(SessionSelector::Id(text)) => {
                text.trim().parse().map(|name| self.parts.logs.id(name))
            }
            SessionSet::Exact(id) => Ok(id.clone()),
            SessionSet::All | SessionSet::Selected(_) => return Ok(()),
        };
        let Ok(id) = id else {
            return Ok(());
        };
        let witness = self
            .parts
            .witness
            .accepting_rollback(request.accept_rollback);
        let log = ReadLinks {
            head: 0,
            links: &[],
        };
        if let Some(rollback) = witness.ask(&id).check(&self.parts.logs, &id, &log).await?
            && !request.dry_run
        {
            self.forget_rows(&id, &rollback).await;
        }
        Ok(())
    }

    /// The logs to restore; sessions come before projects, because each restores its own.
    async fn find(&self, request: &RestoreRequest) -> Result<Vec<LogId>> {
        let logs = &self.parts.logs;
        match &request.sessions {
            SessionSet::All => {
                let mut names = logs.log_names("").await?;
                names.sort_by_key(LogName::is_project);
                Ok(names.into_iter().map(|name| logs.id(name)).collect())
            }
            SessionSet::Selected(selector) => {
                let found = find::select(logs, &*self.parts.index, selector).await?;
                Ok(found.into_iter().collect())
            }
            SessionSet::Exact(id) => Ok(vec![id.clone()]),
        }
    }

    async fn is_missing(&self, request: &RestoreRequest, error: &Error) -> Result<bool> {
        match &request.sessions {
            SessionSet::All => Ok(false),
            SessionSet::Selected(selector) => {
                find::is_missing(&self.parts.logs, selector, error).await
            }
            SessionSet::Exact(_) => Ok(error.kind() == ErrorKind::NotFound),
        }
    }

    fn missing(&self, request: &RestoreRequest) -> Result<RestoreSummary> {
        if request.if_missing == IfMissing::Skip {
            return Ok(RestoreSummary::default());
        }
        let logs = &self.parts.logs;
        Err(match &request.sessions {
            SessionSet::All => find::no_match(logs, &SessionSelector::Latest(Default::default())),
            SessionSet::Selected(selector) => find::no_match(logs, selector),
            SessionSet::Exact(id) => errors::not_found(id),
        })
    }

    /// Restores a session, or writes its conversation as text if that was requested.
    async fn restore_session(&self, id: &LogId, request: &RestoreRequest) -> Result<Outcome> {
        let salvage = request.salvage || request.fallback.is_some();
        let logs = &self.parts.logs;
        let point = point::resolve_in(logs, id, &request.point, salvage)
            .await
            .map_err(|error| with_salvage_hint(id, error))?;
        let mut history = None;
        if let Some(max) = &request.max_agent_version
            && !id.name.is_project()
        {
            let read = self.read_history(id, &point, request).await?;
            if let Some(version) = agent_version(&read).filter(|version| version > max) {
                let cause = too_new(id, &version, max);
                let reason = "a newer version of the agent wrote it";
                return self.fall_back(id, request, read, cause, reason);
            }
            history = Some(read);
        }
        let cause = match self.restore_at(id, request, point.clone()).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => error,
            restored => return restored.map(Outcome::Restored),
        };
        if request.fallback.is_none() || id.name.is_project() {
            return Err(cause);
        }
        let history = match history {
            Some(history) => history,
            None => self.read_history(id, &point, request).await?,
        };
        self.fall_back(id, request, history, cause, "its stored log is damaged")
    }

    async fn restore_at(
        &self,
        id: &LogId,
        request: &RestoreRequest,
        point: ResolvedPoint,
    ) -> Result<Vec<Restored>> {
        if let (Some(mirror), false) = (&self.parts.mirror, request.dry_run) {
            // Sessions that are only in the agent's database must not be overwritten.
            mirror.update_files(UpdateMode::Always).await?;
        }
        let options = self.options(request, point);
        let context = self.context();
        // On the heap: in a debug build, a restore within `run` would otherwise use up the stack.
        let (session, projects) = match request.with_projects {
            true => Box::pin(restore_with_projects(&context, id, &options)).await?,
            false => (Box::pin(restore(&context, id, &options)).await?, Vec::new()),
        };
        if let (Some(project), false) = (&request.project, request.dry_run) {
            write_root_file(&context, project, self.owner())?;
        }
        self.push_to_database(&session.report, request.dry_run)
            .await?;
        let mut restored = vec![session];
        for project in projects {
            restored.push(project?);
        }
        Ok(restored)
    }

    /// If the agent stores its sessions in a database, writes the restored session to it.
    async fn push_to_database(&self, report: &RestoreReport, dry_run: bool) -> Result<()> {
        let Some(mirror) = self.parts.mirror.as_ref().filter(|_| !dry_run) else {
            return Ok(());
        };
        if report.written() > 0 || !mirror.has_session(&report.session).await {
            mirror.update_database(&report.session).await?;
        }
        Ok(())
    }

    async fn read_history(
        &self,
        id: &LogId,
        point: &ResolvedPoint,
        request: &RestoreRequest,
    ) -> Result<ConversationRead<HistoryText>> {
        let max_messages = request
            .fallback
            .as_ref()
            .map_or(0, |fallback| fallback.max_messages);
        let reader = ConversationReader::new(&self.parts.logs, &*self.parts.profile, id);
        reader
            .read(point, Extent::PastDamage, || HistoryText::new(max_messages))
            .await
    }

    fn fall_back(
        &self,
        id: &LogId,
        request: &RestoreRequest,
        history: ConversationRead<HistoryText>,
        cause: Error,
        reason: &str,
    ) -> Result<Outcome> {
        let Some(fallback) = &request.fallback else {
            return Err(cause);
        };
        if history.visitor.shown_count() == 0 {
            let is_futile = cause.hint_text() == Some(errors::history_hint(id).as_str());
            let error = cause.context("write the history text: no message is readable");
            return Err(match is_futile {
                true => Error::corrupt(error.to_string()).hint(errors::NO_UNDAMAGED_ENTRY),
                false => error,
            });
        }
        let owner = self.owner();
        let file = fallback.write(
            &self.disk,
            owner,
            id,
            &history,
            (&cause, reason),
            request.dry_run,
        )?;
        Ok(Outcome::History(Box::new(FallbackHistory { file, cause })))
    }

    fn context(&self) -> RestoreContext {
        RestoreContext {
            directory: self.disk.clone(),
            profile: self.parts.profile.clone(),
            logs: self.parts.logs.clone(),
        }
    }

    fn options(&self, request: &RestoreRequest, point: ResolvedPoint) -> Options {
        Options {
            purpose: Purpose::Restore,
            point,
            is_last_turn: request.point == PointSpec::Turn(None),
            project: request.project.clone(),
            force: request.force,
            salvage: request.salvage,
            repair: request.repair,
            dry_run: request.dry_run,
            claim: true,
            owner: self.owner(),
            witness: self
                .parts
                .witness
                .accepting_rollback(request.accept_rollback),
        }
    }
}

/// Adds a hint to an error about damage that was found while a point was resolved.
fn with_salvage_hint(id: &LogId, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Corrupt => error.hint(format!(
            "run \"sessiond restore {} --salvage\" to restore the entries before the damage",
            id.name
        )),
        _ => error,
    }
}

/// The outcome for one session.
enum Outcome {
    Restored(Vec<Restored>),
    History(Box<FallbackHistory>),
}

/// The version of the agent that wrote last.
fn agent_version(history: &ConversationRead<HistoryText>) -> Option<Version> {
    history.facts.agent_version.as_deref()?.parse().ok()
}

fn too_new(id: &LogId, version: &Version, max: &Version) -> Error {
    Error::conflict(format!(
        "{id} was written by agent version {version}, which is newer than {max}"
    ))
    .hint("upgrade the agent, or use --fallback history to write the conversation as text")
}
