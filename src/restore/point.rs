//! Points that people name: which entry they are in, and where in it.

use super::conversation_state;
use crate::agent::Profile;
use crate::error::{Error, Result};
use crate::log::Logs;
use crate::log::pins::Named;
use crate::log::read::ReadOptions;
use crate::log::segments::{Prefer, Segment, cover};
use crate::log::state::LogState;
use crate::model::{Checkpoint, FileKind, LogId, LogPoint, PointSpec, Seq, keys};

/// Where a point is.
#[derive(Debug, Clone, Default)]
pub struct ResolvedPoint {
    /// The point of the log.
    pub at: LogPoint,
    /// What of it counts, if that is not all.
    pub cut: Option<Checkpoint>,
}

/// Finds a point. Where the log is damaged, only one before the damage, by its number.
pub async fn find(logs: &Logs, id: &LogId, point: &PointSpec) -> Result<ResolvedPoint> {
    find_in(logs, id, point, false).await
}

/// The same; with `salvage`, the last turn is the last one before damage.
pub async fn find_in(
    logs: &Logs,
    id: &LogId,
    point: &PointSpec,
    salvage: bool,
) -> Result<ResolvedPoint> {
    let checkpoint = match point {
        PointSpec::Log(at) => return Ok(ResolvedPoint { at: *at, cut: None }),
        PointSpec::Name(name) => match logs
            .named_points(id)
            .await?
            .into_iter()
            .find(|named| named.name == *name)
        {
            Some(named) => named.point,
            None => return Err(no_point(logs, id, point).await),
        },
        PointSpec::Turn(turn) => {
            let (state, damage) = state(logs, id).await?;
            let line = line(&state);
            let found = match turn {
                None if damage.is_some() && !salvage => None,
                None => line.last(),
                // A turn that the agent went on with by itself has several ends.
                Some(turn) => line.iter().rfind(|point| point.turn == *turn),
            };
            match found {
                Some(found) => (*found).clone(),
                None => return Err(damage.unwrap_or(no_point(logs, id, point).await)),
            }
        }
        PointSpec::Checkpoint(number) => {
            let (state, damage) = state(logs, id).await?;
            match state
                .checkpoints
                .into_iter()
                .find(|point| point.number == *number)
            {
                Some(found) => found,
                None => return Err(damage.unwrap_or(no_point(logs, id, point).await)),
            }
        }
    };
    let seq = checkpoint
        .seq
        .ok_or_else(|| Error::corrupt(format!("{point} of {id} does not say where it is")))?;
    Ok(ResolvedPoint {
        at: LogPoint::Seq(reachable(&logs.pieces(id).await?, seq)),
        cut: Some(checkpoint),
    })
}

/// What the log amounts to, as far as it is sound, and what is behind that.
async fn state(logs: &Logs, id: &LogId) -> Result<(LogState, Option<Error>)> {
    let read = logs
        .read_log(id, ReadOptions::default(), LogState::default)
        .await?;
    if read.head == 0 {
        return Err(super::find::unknown(id));
    }
    let sound = read.seq;
    let hint = || {
        format!(
            "up to entry {sound} it is sound: seq:{sound}, or the number of a turn before; --salvage takes what is sound"
        )
    };
    Ok((read.sink, read.damage.map(|damage| damage.hint(hint()))))
}

/// The first point at or behind an entry that is still there: transcripts only grow, so what is more is cut off again.
fn reachable(pieces: &[Segment], seq: Seq) -> Seq {
    let picked = cover(
        pieces,
        0,
        seq,
        Prefer::Long,
        &std::collections::BTreeSet::new(),
    );
    let there = picked.last().is_some_and(|last| last.to == seq)
        && picked
            .iter()
            .try_fold(0, |to, piece| (piece.from <= to + 1).then_some(piece.to))
            .is_some();
    if there {
        return seq;
    }
    pieces
        .iter()
        .filter(|piece| piece.from <= seq && seq <= piece.to)
        .map(|piece| piece.to)
        .min()
        .unwrap_or(seq)
}

/// The checkpoints that led to where the conversation is, in order: without those that were gone back from.
pub fn line(state: &LogState) -> Vec<&Checkpoint> {
    let mut line = Vec::new();
    let mut next = state.turns.parent;
    while let Some(point) = next.and_then(|number| {
        state
            .checkpoints
            .iter()
            .find(|point| point.number == number)
    }) {
        line.push(point);
        next = point.parent.filter(|parent| *parent < point.number);
    }
    line.reverse();
    line
}

async fn no_point(logs: &Logs, id: &LogId, point: &PointSpec) -> Error {
    let error = Error::not_found(format!("{id} has no point {point}"));
    match all(logs, id).await {
        Ok((points, names, _)) if points.is_empty() && names.is_empty() => {
            error.hint("no turn of it is complete yet; use latest, seq:N or a time")
        }
        Ok((points, names, _)) => {
            let turns = points.iter().map(|point| point.turn).max().unwrap_or(0);
            let names: Vec<String> = names.into_iter().map(|named| named.name).collect();
            error.hint(format!(
                "it has checkpoints up to {} and turns up to {turns}, and the names: {}; sessiond checkpoints {} lists them",
                points.iter().map(|point| point.number).max().unwrap_or(0),
                if names.is_empty() { "none".to_owned() } else { names.join(", ") },
                id.name
            ))
        }
        Err(_) => error,
    }
}

/// Every checkpoint, those with a name, and the damage behind which there may be more.
pub async fn all(logs: &Logs, id: &LogId) -> Result<(Vec<Checkpoint>, Vec<Named>, Option<Error>)> {
    let (state, damage) = state(logs, id).await?;
    Ok((state.checkpoints, logs.named_points(id).await?, damage))
}

/// Gives a point of a session a name.
pub async fn name(
    logs: &Logs,
    profile: &dyn Profile,
    id: &LogId,
    name: &str,
    goal: &ResolvedPoint,
) -> Result<Named> {
    let name = crate::model::point::point_name(name)?;
    let point = match &goal.cut {
        Some(point) => point.clone(),
        None => {
            let read = conversation_state::read(logs, profile, id, goal.at, None).await?;
            let (seq, (state, heard)) = (read.seq, read.sound()?);
            let turns = heard.ear.turns();
            let transcripts = state
                .files
                .iter()
                .filter(|(_, file)| file.kind == FileKind::Append);
            Checkpoint {
                number: 0,
                seq: Some(seq),
                turn: state.turns.turn,
                parent: state.turns.parent,
                at: logs.clock.now(),
                uuid: None,
                stop: None,
                files: transcripts
                    .map(|(path, file)| (path.clone(), file.len))
                    .collect(),
                pending: turns.pending,
                last_answer: turns.last_answer,
            }
        }
    };
    logs.name_point(id, &name, point).await?.ok_or_else(|| {
        Error::conflict(format!("{id} has a checkpoint named {name} already")).hint(format!(
            "take another name, or sessiond checkpoint {} --delete --name {name}",
            id.name
        ))
    })
}

/// Takes a name away; what it pointed at can be collected again.
pub async fn unname(logs: &Logs, id: &LogId, name: &str) -> Result<()> {
    let name = crate::model::point::point_name(name)?;
    if !logs
        .named_points(id)
        .await?
        .iter()
        .any(|named| named.name == name)
    {
        return Err(no_point(logs, id, &PointSpec::Name(name)).await);
    }
    logs.store.delete(&keys::named_point(id, &name)).await
}
