//! Resolves a point that a user names to an entry of the log and a checkpoint within it, and gives
//! points names.

use std::collections::BTreeSet;

use jiff::Timestamp;

use crate::agent::Profile;
use crate::codec::pin::NamedCheckpoint;
use crate::error::{Error, ErrorKind, Result};
use crate::log::read::ReadOptions;
use crate::log::segments::{Granularity, Segment, select_segments};
use crate::log::state::LogState;
use crate::log::{Logs, errors};
use crate::model::{
    Checkpoint, FileKind, LogId, LogPoint, PointSpec, ResolvedPoint, Seq, keys, point,
};
use crate::store::Store;

/// Maximum number of origins that are searched for an inherited turn: forks of forks.
const MAX_ORIGINS: usize = 100;

/// Resolves a point. In a damaged log, only numbered points before the damage can be resolved.
pub async fn resolve(logs: &Logs, id: &LogId, point: &PointSpec) -> Result<ResolvedPoint> {
    let resolved = resolve_in(logs, id, point, false).await;
    resolved.map_err(|error| with_verify_hint(id, error))
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
    let checkpoint = match point {
        PointSpec::Log(at) => {
            let checkpoint = match at {
                LogPoint::Time(time) => checkpoint_by_time(logs, id, *time).await?,
                LogPoint::Latest | LogPoint::Seq(_) => None,
            };
            match checkpoint {
                Some(checkpoint) => checkpoint,
                None => {
                    return Ok(ResolvedPoint {
                        at: *at,
                        checkpoint: None,
                    });
                }
            }
        }
        PointSpec::Name(name) => match logs.named_checkpoint(id, name).await? {
            Some(named) => named.checkpoint,
            None => return Err(no_point(logs, id, point).await),
        },
        PointSpec::Turn(turn) => {
            let (state, damage) = read_state(logs, id).await?;
            let active = state.active_checkpoints();
            let found = match turn {
                None if damage.is_some() && !salvage => None,
                None => active.last(),
                // A turn that the agent continued on its own has several ends.
                Some(turn) => active.iter().rfind(|point| point.turn == *turn),
            };
            match found {
                Some(found) => (*found).clone(),
                None => return Err(damage.unwrap_or(no_point(logs, id, point).await)),
            }
        }
        PointSpec::Checkpoint(number) => {
            let (state, damage) = read_state(logs, id).await?;
            let mut checkpoints = state.checkpoints.into_iter();
            match checkpoints.find(|point| point.number == *number) {
                Some(found) => found,
                None => return Err(damage.unwrap_or(no_point(logs, id, point).await)),
            }
        }
    };
    let seq = checkpoint
        .seq
        .ok_or_else(|| Error::corrupt(format!("point {point} of {id} has no entry number")))?;
    Ok(ResolvedPoint {
        at: LogPoint::Seq(reachable(&logs.list_segments(id).await?, seq)),
        checkpoint: Some(checkpoint),
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
            ..ReadOptions::default()
        };
        // The origin as it was: it may have been rolled back since.
        let state = logs
            .read_log(&id, options, LogState::default)
            .await?
            .require_undamaged(&id)?;
        let forked_at = state.checkpoints.iter().rfind(|checkpoint| {
            (checkpoint.turn, Some(checkpoint.at)) == (origin.turn, origin.turn_ended_at)
        });
        let last = forked_at.map(|checkpoint| checkpoint.number);
        let inherited = state.checkpoints_up_to(last.or(state.turns.parent));
        if let Some(found) = inherited.iter().rfind(|point| point.turn == turn)
            && let Some(seq) = found.seq
        {
            let point = ResolvedPoint {
                at: LogPoint::Seq(reachable(&logs.list_segments(&id).await?, seq)),
                checkpoint: Some((*found).clone()),
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
async fn checkpoint_by_time(
    logs: &Logs,
    id: &LogId,
    time: Timestamp,
) -> Result<Option<Checkpoint>> {
    let (state, damage) = read_state(logs, id).await?;
    let named = logs.named_checkpoints(id).await?;
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
        ..ReadOptions::default()
    };
    let read = logs.read_log(id, options, LogState::default).await?;
    let is_later = read.damage.is_none() && before.seq.is_some_and(|seq| seq > read.seq);
    Ok(is_later.then_some(before))
}

/// Whether `time` is the time `at` as a list shows it: exact in JSON, in seconds in a table.
fn is_listed_as(at: Timestamp, time: Timestamp) -> bool {
    at == time || time.subsec_nanosecond() == 0 && at.as_second() == time.as_second()
}

/// The checkpoints of a session.
#[derive(Debug)]
pub struct Checkpoints {
    /// All checkpoints, in the order in which they were reached.
    pub all: Vec<Checkpoint>,
    /// The named ones.
    pub named: Vec<NamedCheckpoint>,
    /// Damage of the log; there may be more checkpoints after it.
    pub damage: Option<Error>,
}

/// Lists the checkpoints of a session.
pub async fn list(logs: &Logs, id: &LogId) -> Result<Checkpoints> {
    let (state, damage) = read_state(logs, id).await?;
    Ok(Checkpoints {
        all: state.checkpoints,
        named: logs.named_checkpoints(id).await?,
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
        None => checkpoint_at(logs, profile, id, point).await?,
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
        return Err(no_point(logs, id, &PointSpec::Name(name)).await);
    }
    logs.store.delete(&key).await
}

/// A checkpoint at the end of an entry, with the tool calls that are pending there.
async fn checkpoint_at(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    point: &ResolvedPoint,
) -> Result<Checkpoint> {
    let read = logs.read_turns(profile, id, point).await?;
    let (seq, (state, replay)) = (read.seq, read.require_undamaged(id)?);
    let turns = replay.visitor.tracker();
    let transcripts = state
        .files
        .iter()
        .filter(|(_, file)| file.kind == FileKind::Append);
    Ok(Checkpoint {
        number: 0,
        seq: Some(seq),
        turn: state.turns.turn,
        parent: state.turns.parent,
        at: logs.clock.now(),
        message_id: None,
        stop_reason: None,
        transcript_lengths: transcripts
            .map(|(path, file)| (path.clone(), file.len))
            .collect(),
        pending_calls: turns.pending_calls,
        last_tool_result: turns.last_tool_result,
    })
}

/// The state of the undamaged part of a log, and the damage after it.
async fn read_state(logs: &Logs, id: &LogId) -> Result<(LogState, Option<Error>)> {
    let read = logs
        .read_log(id, ReadOptions::default(), LogState::default)
        .await?;
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
async fn no_point(logs: &Logs, id: &LogId, point: &PointSpec) -> Error {
    let missing = match point {
        PointSpec::Log(at) => format!("point {at}"),
        PointSpec::Turn(None) => "complete turn".to_owned(),
        PointSpec::Turn(Some(turn)) => format!("complete turn {turn}"),
        PointSpec::Checkpoint(number) => format!("checkpoint {number}"),
        PointSpec::Name(name) => format!("checkpoint named {name}"),
    };
    let error = Error::not_found(format!("{id} has no {missing}"));
    if let PointSpec::Turn(Some(turn)) = point
        && matches!(logs.fork_origin(id).await, Ok(Some(origin)) if *turn <= origin.turn)
    {
        let name = &id.name;
        return error.hint(format!(
            "run \"sessiond fork {name} --at turn:{turn}\" to start from a turn that the fork inherited"
        ));
    }
    match list(logs, id).await {
        Ok(Checkpoints { all, named, .. }) if all.is_empty() && named.is_empty() => {
            error.hint("use latest, seq:N or a time such as 2026-05-01T12:00:00Z; the session has no complete turn")
        }
        Ok(_) => error.hint(format!(
            "run \"sessiond checkpoints {}\" to list its turns and checkpoints",
            id.name
        )),
        Err(_) => error,
    }
}
