//! Resolves a point that a user names to an entry of the log and a checkpoint within it, and gives
//! points names.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde::Serialize;

use crate::agent::Profile;
use crate::codec::pin::NamedCheckpoint;
use crate::error::{Error, ErrorKind, Result};
use crate::log::read::ReadOptions;
use crate::log::segments::{Granularity, Segment, select_segments};
use crate::log::state::LogState;
use crate::log::{Logs, errors};
use crate::model::{
    Checkpoint, LogId, LogPoint, PointSpec, ResolvedPoint, Seq, WriterId, keys, point,
};
use crate::store::Store;

/// Maximum number of origins that are searched for an inherited turn: forks of forks.
const MAX_ORIGINS: usize = 100;

/// Resolves a point. In a damaged log, only numbered points before the damage can be resolved.
pub async fn resolve(logs: &Logs, id: &LogId, point: &PointSpec) -> Result<ResolvedPoint> {
    resolve_on(logs, id, None, point).await
}

/// Resolves a point of the main line, or of a branch.
pub async fn resolve_on(
    logs: &Logs,
    id: &LogId,
    branch: Option<&WriterId>,
    point: &PointSpec,
) -> Result<ResolvedPoint> {
    let line = Line { logs, id, branch };
    let resolved = resolve_line(line, point, false).await;
    resolved.map_err(|error| with_verify_hint(id, error))
}

/// The main line of a session, or one of its branches.
#[derive(Clone, Copy)]
struct Line<'a> {
    logs: &'a Logs,
    id: &'a LogId,
    branch: Option<&'a WriterId>,
}

impl Line<'_> {
    /// The named checkpoints. A name is given to a point of the main line.
    async fn named_checkpoints(&self) -> Result<Vec<NamedCheckpoint>> {
        match self.branch {
            Some(_) => Ok(Vec::new()),
            None => self.logs.named_checkpoints(self.id).await,
        }
    }

    /// The first `seq` at or after `seq` that can still be read.
    async fn reachable(&self, seq: Seq) -> Result<Seq> {
        if let Some(writer) = self.branch {
            let branch = self.logs.branch(self.id, writer).await?;
            // The entries of a branch are not compacted. Those of the main log before it may be.
            if branch.is_some_and(|branch| seq > branch.base) {
                return Ok(seq);
            }
        }
        Ok(reachable(&self.logs.list_segments(self.id).await?, seq))
    }
}

/// Adds a hint for a reader that must not claim the session.
fn with_verify_hint(id: &LogId, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Corrupt => error.hint(format!(
            "run \"sessiond verify {}\" to see which point can be restored",
            id.name
        )),
        _ => error,
    }
}

/// Resolves a point for a restore. With `salvage`, the last turn of a damaged log is the last one
/// before the damage. The caller adds a hint to an error about damage.
pub async fn resolve_in(
    logs: &Logs,
    id: &LogId,
    point: &PointSpec,
    salvage: bool,
) -> Result<ResolvedPoint> {
    let line = Line {
        logs,
        id,
        branch: None,
    };
    resolve_line(line, point, salvage).await
}

async fn resolve_line(line: Line<'_>, point: &PointSpec, salvage: bool) -> Result<ResolvedPoint> {
    let Line { logs, id, branch } = line;
    let checkpoint = match point {
        PointSpec::Log(at) => {
            let checkpoint = match at {
                LogPoint::Time(time) => checkpoint_by_time(line, *time).await?,
                LogPoint::Latest | LogPoint::Seq(_) => None,
            };
            match checkpoint {
                Some(checkpoint) => checkpoint,
                None => {
                    return Ok(ResolvedPoint {
                        at: *at,
                        checkpoint: None,
                        branch: branch.cloned(),
                    });
                }
            }
        }
        // A name is given to a point of the main line.
        PointSpec::Name(name) if branch.is_none() => match logs.named_checkpoint(id, name).await? {
            Some(named) => named.checkpoint,
            None => return Err(no_point(line, point).await),
        },
        PointSpec::Name(_) => return Err(no_point(line, point).await),
        PointSpec::Turn(turn) => {
            let (state, damage) = read_state(line).await?;
            let active = state.active_checkpoints();
            let mut turns = active.iter().filter(|point| point.step.is_none());
            let found = match turn {
                None if damage.is_some() && !salvage => None,
                None => turns.next_back(),
                // A turn that the agent continued on its own has several ends.
                Some(turn) => turns.rfind(|point| point.turn == *turn),
            };
            match found {
                Some(found) => (*found).clone(),
                None => return Err(damage.unwrap_or(no_point(line, point).await)),
            }
        }
        PointSpec::Step { turn, step } => {
            let (state, damage) = read_state(line).await?;
            let active = state.active_checkpoints();
            let mut steps = active
                .iter()
                .filter(|point| point.step.is_some() && point.turn == *turn);
            let found = steps.rfind(|point| step.is_none() || point.step == *step);
            match found {
                Some(found) => (*found).clone(),
                None => return Err(damage.unwrap_or(no_point(line, point).await)),
            }
        }
        PointSpec::Checkpoint(number) => {
            let (state, damage) = read_state(line).await?;
            let mut checkpoints = state.checkpoints.into_iter();
            match checkpoints.find(|point| point.number == *number) {
                Some(found) => found,
                None => return Err(damage.unwrap_or(no_point(line, point).await)),
            }
        }
    };
    let seq = checkpoint
        .seq
        .ok_or_else(|| Error::corrupt(format!("point {point} of {id} has no entry number")))?;
    Ok(ResolvedPoint {
        at: LogPoint::Seq(line.reachable(seq).await?),
        checkpoint: Some(checkpoint),
        branch: branch.cloned(),
    })
}

/// Resolves a turn that a fork inherited from its origin: the session that has the turn, and the
/// point in it. None if no origin has it.
pub async fn resolve_inherited(
    logs: &Logs,
    id: &LogId,
    turn: u64,
) -> Result<Option<(LogId, ResolvedPoint)>> {
    let mut id = id.clone();
    for _ in 0..MAX_ORIGINS {
        let Some(origin) = logs.fork_origin(&id).await? else {
            break;
        };
        if turn > origin.turn {
            break;
        }
        id = logs.id(origin.session);
        let options = ReadOptions {
            at: LogPoint::Seq(origin.seq),
            branch: origin.branch.as_ref(),
            ..ReadOptions::default()
        };
        // The origin as it was: it may have been rolled back since.
        let state = logs
            .read_log(&id, options, LogState::default)
            .await?
            .require_undamaged(&id)?;
        let forked_at = state.checkpoints.iter().rfind(|checkpoint| {
            (
                checkpoint.complete_turns(),
                checkpoint.step,
                Some(checkpoint.at),
            ) == (origin.turn, origin.step, origin.checkpointed_at)
        });
        let last = forked_at.map(|checkpoint| checkpoint.number);
        let inherited = state.checkpoints_up_to(last.or(state.turns.parent));
        let is_end_of_turn = |point: &&&Checkpoint| point.step.is_none() && point.turn == turn;
        if let Some(found) = inherited.iter().rfind(is_end_of_turn)
            && let Some(seq) = found.seq
        {
            let branch = origin.branch.as_ref();
            let line = Line {
                logs,
                id: &id,
                branch,
            };
            let point = ResolvedPoint {
                at: LogPoint::Seq(line.reachable(seq).await?),
                checkpoint: Some((*found).clone()),
                branch: branch.cloned(),
            };
            return Ok(Some((id, point)));
        }
    }
    Ok(None)
}

/// The checkpoint that a time selects; none if the time selects a whole entry.
///
/// A checkpoint has the time of its last message, and an entry has the time of its upload, which is
/// later: much later in an imported session. A time that is listed for a checkpoint selects that
/// checkpoint. Any other time selects the last checkpoint or entry before it, whichever is later.
async fn checkpoint_by_time(line: Line<'_>, time: Timestamp) -> Result<Option<Checkpoint>> {
    let (state, damage) = read_state(line).await?;
    let named = line.named_checkpoints().await?;
    let named = named.into_iter().map(|named| named.checkpoint);
    let mut checkpoints: Vec<Checkpoint> = state.checkpoints.into_iter().chain(named).collect();
    checkpoints.sort_by_key(|checkpoint| (checkpoint.at, checkpoint.number));
    if let Some(listed) = checkpoints
        .iter()
        .rfind(|checkpoint| is_listed_as(checkpoint.at, time))
    {
        return Ok(Some(listed.clone()));
    }
    let before = checkpoints
        .into_iter()
        .rfind(|checkpoint| checkpoint.at < time);
    // In a damaged log there may be later checkpoints that cannot be read.
    let (Some(before), None) = (before, damage) else {
        return Ok(None);
    };
    let options = ReadOptions {
        at: LogPoint::Time(time),
        branch: line.branch,
        ..ReadOptions::default()
    };
    let read = line
        .logs
        .read_log(line.id, options, LogState::default)
        .await?;
    let is_later = read.damage.is_none() && before.seq.is_some_and(|seq| seq > read.seq);
    Ok(is_later.then_some(before))
}

/// Whether `time` is the time `at` as a list shows it: exact in JSON, in seconds in a table.
fn is_listed_as(at: Timestamp, time: Timestamp) -> bool {
    at == time || time.subsec_nanosecond() == 0 && at.as_second() == time.as_second()
}

/// The checkpoints of a session, as commands and the API list them.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct CheckpointList {
    /// The session.
    pub session: String,
    /// The ends of turns and steps, in the order in which they were reached.
    pub checkpoints: Vec<ListedCheckpoint>,
    /// The named checkpoints.
    pub named: Vec<NamedCheckpoint>,
}

/// A checkpoint in a list.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct ListedCheckpoint {
    /// The checkpoint.
    #[serde(flatten)]
    pub checkpoint: Checkpoint,
    /// Bytes of the transcripts at this point.
    pub transcript_bytes: u64,
    /// Whether it was rewound: a rollback to an earlier point left it behind.
    #[serde(rename = "rewound")]
    pub is_rewound: bool,
}

/// The checkpoints of a session.
#[derive(Debug)]
pub struct Checkpoints {
    /// All checkpoints, in the order in which they were reached.
    pub all: Vec<Checkpoint>,
    /// The numbers of those that the current conversation includes.
    pub active: BTreeSet<u64>,
    /// The named ones.
    pub named: Vec<NamedCheckpoint>,
    /// Damage of the log; there may be more checkpoints after it.
    pub damage: Option<Error>,
}

impl Checkpoints {
    /// The list of the session `id`.
    pub fn into_list(self, id: &LogId) -> CheckpointList {
        let listed = |checkpoint: Checkpoint| ListedCheckpoint {
            transcript_bytes: checkpoint.size(),
            is_rewound: !self.active.contains(&checkpoint.number),
            checkpoint,
        };
        CheckpointList {
            session: id.name.to_string(),
            checkpoints: self.all.into_iter().map(listed).collect(),
            named: self.named,
        }
    }
}

/// Lists the checkpoints of a session, on its main line or on a branch.
pub async fn list(logs: &Logs, id: &LogId, branch: Option<&WriterId>) -> Result<Checkpoints> {
    let line = Line { logs, id, branch };
    let (state, damage) = read_state(line).await?;
    let active = state.active_checkpoints();
    Ok(Checkpoints {
        active: active.iter().map(|point| point.number).collect(),
        all: state.checkpoints,
        named: line.named_checkpoints().await?,
        damage: damage.map(|error| with_verify_hint(id, error)),
    })
}

/// Gives a point of a session a name, and pins the entry it is in.
pub async fn create(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    name: &str,
    point: &ResolvedPoint,
) -> Result<NamedCheckpoint> {
    let name = point::parse_checkpoint_name(name)?;
    let checkpoint = match &point.checkpoint {
        Some(checkpoint) => checkpoint.clone(),
        None => logs.checkpoint_at(profile, id, point).await?,
    };
    logs.name_checkpoint(id, &name, checkpoint)
        .await?
        .ok_or_else(|| {
            Error::conflict(format!("{id} already has a checkpoint named {name}")).hint(format!(
                "run \"sessiond checkpoint {} --delete --name {name}\" to delete it, or choose another name",
                id.name
            ))
        })
}

/// Deletes a named checkpoint. Garbage collection may then delete the entry it pinned.
pub async fn delete(logs: &Logs, id: &LogId, name: &str) -> Result<()> {
    let name = point::parse_checkpoint_name(name)?;
    let key = keys::checkpoint_pin(id, &name);
    if logs.store.get(&key).await?.is_none() {
        let line = Line {
            logs,
            id,
            branch: None,
        };
        return Err(no_point(line, &PointSpec::Name(name)).await);
    }
    logs.store.delete(&key).await
}

/// The state of the undamaged part of a log, and the damage after it.
async fn read_state(line: Line<'_>) -> Result<(LogState, Option<Error>)> {
    let Line { logs, id, branch } = line;
    let options = ReadOptions {
        branch,
        ..ReadOptions::default()
    };
    let read = logs.read_log(id, options, LogState::default).await?;
    if read.head == 0 {
        return Err(errors::not_found(id));
    }
    let damage = match read.seq {
        0 => read
            .damage
            .map(|error| error.hint(errors::NO_UNDAMAGED_ENTRY)),
        _ => read.damage,
    };
    Ok((read.sink, damage))
}

/// The first `seq` at or after `seq` that can still be read. Transcripts only grow, so a reader
/// cuts the surplus off.
fn reachable(segments: &[Segment], seq: Seq) -> Seq {
    let read = select_segments(segments, 0, seq, Granularity::Coarse, &BTreeSet::new());
    let is_complete = read.last().is_some_and(|last| last.last_seq == seq)
        && read
            .iter()
            .try_fold(0, |to, segment| {
                (segment.first_seq <= to + 1).then_some(segment.last_seq)
            })
            .is_some();
    if is_complete {
        return seq;
    }
    segments
        .iter()
        .filter(|segment| segment.first_seq <= seq && seq <= segment.last_seq)
        .map(|segment| segment.last_seq)
        .min()
        .unwrap_or(seq)
}

/// The error for a point that a session does not have.
async fn no_point(line: Line<'_>, point: &PointSpec) -> Error {
    let Line { logs, id, branch } = line;
    let missing = match point {
        PointSpec::Log(at) => format!("point {at}"),
        PointSpec::Turn(None) => "complete turn".to_owned(),
        PointSpec::Turn(Some(turn)) => format!("complete turn {turn}"),
        PointSpec::Step { turn, step: None } => format!("complete step in turn {turn}"),
        PointSpec::Step {
            turn,
            step: Some(step),
        } => format!("checkpoint at step {step} of turn {turn}"),
        PointSpec::Checkpoint(number) => format!("checkpoint {number}"),
        PointSpec::Name(name) => format!("checkpoint named {name}"),
    };
    let error = match branch {
        Some(writer) => Error::not_found(format!("branch {writer} of {id} has no {missing}")),
        None => Error::not_found(format!("{id} has no {missing}")),
    };
    if let PointSpec::Turn(Some(turn)) = point
        && matches!(logs.fork_origin(id).await, Ok(Some(origin)) if *turn <= origin.turn)
    {
        let name = &id.name;
        return error.hint(format!(
            "run \"sessiond fork {name} --at turn:{turn}\" to start from a turn that the fork inherited"
        ));
    }
    match list(logs, id, branch).await {
        Ok(Checkpoints { all, named, .. }) if all.is_empty() && named.is_empty() => {
            error.hint("use latest, seq:N or a time such as 2026-05-01T12:00:00Z; the session has no complete turn")
        }
        Ok(_) => {
            let on_branch = branch.map_or_else(String::new, |writer| format!(" --branch {writer}"));
            let steps = match point {
                PointSpec::Step { .. } => " --steps",
                _ => "",
            };
            error.hint(format!(
                "run \"sessiond checkpoints {}{on_branch}{steps}\" to list its turns and checkpoints",
                id.name
            ))
        }
        Err(_) => error,
    }
}
