//! The leader's word on where to resume, held against the storage.
//!
//! On Kubernetes the leader does not read the storage. It may not have heard of a commit (the one
//! before it was lost with the news), and it cannot know that a checkpoint is damaged. Rank 0 tells
//! it what is there, all ranks stop without a step, and the next attempt resumes from that.

use crate::checkpoint::{Refusal, newest_above, newest_usable, verify};
use crate::gang::comm::Comm;
use crate::attempt::fence;
use crate::attempt::records::{Records, event};
use crate::attempt::trainer::{Stop, fail, record_failed};
use crate::attempt::api::TrainerEvent;
use moejob_protocol::WorkerConfig;
use moejob_protocol::report::{Detail, Event, EventKind};
use std::path::Path;

/// Before the claim, which would put newer checkpoints aside: what is there already? A job that is
/// made again over the folder of an earlier one goes on from that, with higher attempts.
pub(crate) fn look_into_storage(
    config: &WorkerConfig,
    comm: &mut Comm,
    out: &mut dyn FnMut(TrainerEvent),
) -> Result<(), Stop> {
    let mut leave = false;
    if comm.rank() == 0 {
        let location = Path::new(&config.checkpoint.location);
        if let Some(newer) = newest_above(location, Some(config.resume.step()))?.usable {
            out(TrainerEvent::Event(found_event(config, newer.step, newer.name)));
            leave = true;
        }
        if let Some(claim) = claim_of_another(config, location)? {
            out(TrainerEvent::Event(claim));
            leave = true;
        }
    }
    if first_rank_says(comm, leave)? { Err(Stop::Elsewhere) } else { Ok(()) }
}

/// This attempt or a later one is claimed, by another job than this.
fn claim_of_another(config: &WorkerConfig, location: &Path) -> Result<Option<Event>, Stop> {
    let Some(newest) = fence::claims(location)?.pop() else { return Ok(None) };
    let own = newest.job_uid == config.job_uid || newest.job_uid.is_empty();
    if own || newest.attempt < config.attempt {
        return Ok(None);
    }
    let (attempt, path) = (newest.attempt, location.display());
    let message = format!("an earlier job has made attempts up to {attempt} in {path}");
    let details = [("claimed", Detail::Number(attempt.into()))];
    Ok(Some(event(config.attempt, EventKind::AttemptsClaimed, "EarlierJob", message, details)))
}

/// After each rank has tried to load its part of the checkpoint at `step`: where it is damaged, the
/// newest one that is whole takes its place.
pub(crate) fn agree_on_loaded(
    config: &WorkerConfig,
    comm: &mut Comm,
    step: u64,
    loaded: Result<(), Refusal>,
    tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let own = [u8::from(loaded.is_err())];
    let damaged = comm.gather_all(&own, own.len())?.iter().position(|of| of == &[1]);
    let Some(damaged) = damaged else { return Ok(()) };
    let found = comm.rank() == 0 && look_for_other(config, step, tell)?;
    if first_rank_says(comm, found)? {
        return Err(Stop::Elsewhere);
    }
    match loaded {
        Err(refusal) => Err(refused(&refusal)),
        Ok(()) => {
            let message = format!("rank {damaged} cannot load the checkpoint of step {step}");
            Err(fail(3, &message, "`moejob checkpoint verify` lists what is wrong with it"))
        }
    }
}

/// Tells what is damaged and what can be used instead, if there is such. A checkpoint that is whole
/// to rank 0 is not told as damaged, whatever another rank has seen of it: the two would be told in
/// turn.
fn look_for_other(
    config: &WorkerConfig,
    step: u64,
    tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
) -> Result<bool, Stop> {
    let location = Path::new(&config.checkpoint.location);
    let name = moejob_protocol::checkpoint::directory_name(step);
    let Err(problems) = verify(&location.join(&name)) else { return Ok(false) };
    let Some(usable) = newest_usable(location)?.usable else { return Ok(false) };
    let message = format!("{}; {} is used", Refusal::of(&name, problems), usable.name);
    let details = [("step", Detail::Number(step)), ("name", Detail::Text(name))];
    let kind = EventKind::CheckpointRefused;
    tell(event(config.attempt, kind, "Damaged", message, details))?;
    tell(found_event(config, usable.step, usable.name))?;
    Ok(true)
}

fn found_event(config: &WorkerConfig, step: u64, name: String) -> Event {
    let details = [("step", Detail::Number(step))];
    event(config.attempt, EventKind::CheckpointCommitted, "Found", name, details)
}

fn first_rank_says(comm: &mut Comm, own: bool) -> Result<bool, Stop> {
    let own = [u8::from(own)];
    let all = comm.gather_all(&own, own.len())?;
    Ok(all.first().is_some_and(|first| first == &[1]))
}

/// Recorded where there is a record of this attempt, and told to the leader.
pub(crate) fn tell(
    event: Event,
    records: Option<&mut Records>,
    out: &mut dyn FnMut(TrainerEvent),
) -> Result<(), Stop> {
    if let Some(records) = records {
        records.event(&event).map_err(record_failed)?;
    }
    out(TrainerEvent::Event(event));
    Ok(())
}

/// A checkpoint that no attempt can go on from ends the job.
pub(crate) fn refused(refusal: &Refusal) -> Stop {
    let advice = "`moejob checkpoint verify` lists all problems; remove it or the cause";
    fail(3, &refusal.to_string(), advice)
}
