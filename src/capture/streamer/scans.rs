//! The scans of the streamer: when they run, and what follows from their results.

use tokio::time::Instant;

use super::{
    IDLE_SCAN_INTERVAL, JoinedScan, RunningScan, SCAN_INTERVAL, ScanPurpose, Streamer,
    UNLOAD_AFTER, copy_of,
};
use crate::capture::flush_state::FlushEvent;
use crate::capture::scan::{DirectoryScan, ScannedFile};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{RelPath, SessionId};
use crate::sys::blocking;

impl Streamer {
    /// Starts the requested scan, unless another one is running.
    pub(super) fn start_scan(&mut self) {
        if self.scan.is_some() || self.scan_requests.is_empty() {
            return;
        }
        let purposes = std::mem::take(&mut self.scan_requests);
        let mut cache = std::mem::take(&mut self.log_cache);
        let context = self.context.clone();
        let task = tokio::spawn(async move {
            let found = blocking(|| context.scan(&mut cache));
            (cache, found)
        });
        self.scan = Some(RunningScan { task, purposes });
    }

    pub(super) fn apply_scan_result(&mut self, joined: JoinedScan) {
        let Some(RunningScan { purposes, .. }) = self.scan.take() else {
            return;
        };
        let found = match joined {
            Ok((cache, found)) => {
                self.log_cache = cache;
                found
            }
            Err(panic) => Err(Error::new(ErrorKind::Internal, "scan").caused_by(panic)),
        };
        let found = self.scan_ended(found);
        for purpose in purposes {
            match (purpose, &found) {
                (ScanPurpose::Changes { started }, found) => {
                    match found {
                        Ok(found) => self.apply_scan(found),
                        Err(error) => tracing::warn!(%error, "the scan failed; retrying"),
                    }
                    self.schedule_scan(started);
                }
                (ScanPurpose::Flush(session, reply), Ok(found)) => {
                    match self.find_unlisted(found, session.as_ref()) {
                        None => self.flush(found, session, reply),
                        Some(error) => {
                            self.request_flush_of_changed(found, |_| true);
                            let _ = reply.send(Err(error));
                        }
                    }
                }
                (ScanPurpose::Flush(_, reply), Err(error)) => {
                    let _ = reply.send(Err(copy_of(error)));
                }
                (ScanPurpose::Finish, found) => {
                    match found {
                        Ok(found) => {
                            let why = found.unlisted.iter().map(|(_, why)| why.clone());
                            self.unread = why.collect();
                            self.request_flush_of_changed(found, |_| true);
                        }
                        Err(error) => {
                            self.unread = vec![error.to_string()];
                            tracing::error!(%error, "the scan of the final flush failed; flushing the known changes")
                        }
                    }
                    self.flush_unfinished();
                }
            }
        }
    }

    /// The error for a directory that could not be listed, if it may hold files of the session.
    fn find_unlisted(&self, found: &DirectoryScan, session: Option<&SessionId>) -> Option<Error> {
        let known = session.map(|session| {
            let logs = self.logs.iter();
            let logs = logs.filter(|(name, _)| name.session() == Some(session));
            logs.flat_map(|(_, log)| &log.paths).collect::<Vec<_>>()
        });
        let may_hold_files = |directory: &RelPath| {
            let directory = format!("{directory}/");
            known.as_ref().is_none_or(|known| {
                let mut known = known.iter();
                known.len() == 0 || known.any(|path| path.as_str().starts_with(&directory))
            })
        };
        let mut unlisted = found.unlisted.iter();
        let (_, why) = unlisted.find(|(directory, _)| may_hold_files(directory))?;
        Some(
            Error::unavailable(format!("not everything is durable: {why}"))
                .hint("run sessiond as the user of the agent, or give it access to the directory"),
        )
    }

    /// Adds what the streamer knows to a scan.
    pub(super) fn scan_ended(&mut self, found: Result<DirectoryScan>) -> Result<DirectoryScan> {
        self.context.counters.scan_ended();
        let mut found = found?;
        for (name, files) in &mut found.logs {
            if let Some(tracked) = self.logs.get_mut(name) {
                found.named.add_known(&tracked.paths, files);
                tracked.scanned_bytes = ScannedFile::total_size(files);
            }
        }
        for skipped in &found.skipped {
            if self.logged_skips.insert(skipped.clone()) {
                tracing::warn!("skipped: {skipped}");
            }
        }
        Ok(found)
    }

    /// Requests a scan of the root for changes without an event.
    pub(super) fn request_full_scan(&mut self) {
        let started = Instant::now();
        blocking(|| self.refresh_watches());
        self.scan_requests.push(ScanPurpose::Changes { started });
        self.next_scan = started + IDLE_SCAN_INTERVAL;
    }

    /// Unloads quiet logs and schedules the next scan.
    fn schedule_scan(&mut self, started: Instant) {
        let mut is_idle = true;
        for log in self.logs.values_mut() {
            if log.state.is_quiet(started, UNLOAD_AFTER) {
                log.flusher = None;
            } else {
                is_idle = false;
            }
        }
        let pause = match self.watch_problem.is_some() {
            // Without events the scan determines the lag. It may use 5% of one core.
            true => self.context.flush_interval.max(started.elapsed() * 20),
            false if is_idle => IDLE_SCAN_INTERVAL,
            false => SCAN_INTERVAL,
        };
        self.next_scan = Instant::now() + pause;
    }

    fn apply_scan(&mut self, found: &DirectoryScan) {
        for (name, files) in &found.logs {
            let fingerprint = ScannedFile::fingerprint(files);
            // Also during a flush: it may have read the files before the change.
            if self
                .logs
                .get(name)
                .is_none_or(|log| log.fingerprint != fingerprint)
            {
                let paths = files.iter().map(|file| file.path.clone());
                self.tracked(name).paths.extend(paths);
                self.apply(name, FlushEvent::Changed);
            }
        }
    }
}
