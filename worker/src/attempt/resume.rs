//! The leader's word on where to resume, held against the storage.
//!
//! On Kubernetes the leader does not read the storage. It may not have heard of a commit (the one
//! before it was lost with the news), and it cannot know that a checkpoint is damaged. Rank 0 tells
//! it what is there, all ranks stop without a step, and the next attempt resumes from that.

use crate::attempt::api::{TrainerEvent, Wait};
use crate::attempt::recorder::Recorder;
use crate::attempt::records::{event, now};
use crate::attempt::saves::Patience;
use crate::attempt::stop::{Stop, fail, no_thread, storage_failed, stumbled};
use crate::attempt::together::Verifiers;
use crate::checkpoint::desk::Desk;
use crate::checkpoint::aside::{WAYS_ON, set_aside};
use crate::checkpoint::fence::{self, FenceError};
use crate::checkpoint::look::{Looked, claim_of_another, others_claims, resumed_step};
use crate::checkpoint::{Disk, Found, Newest, Refusal, newest_by};
use crate::gang::comm::{Comm, CommError};
use crate::state::checksum::Soundness;
use crate::state::rank::RankState;
use crate::state::slot::Slot;
use crate::state::slots::Memory;
use moejob_protocol::WorkerConfig;
use moejob_protocol::checkpoint::ScaleEntry;
use moejob_protocol::config::Resume;
use moejob_protocol::layout;
use moejob_protocol::report::{Detail, Event, EventKind};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// How an attempt finds storage.
enum Opened {
    Ready,
    /// It begins without its claim, and why; the writer goes on trying.
    Without(String),
    /// The storage has another state than the leader believes.
    Elsewhere,
}

/// What rank 0 found before there were records.
pub(crate) struct FoundStorage {
    /// Why storage fails, where it does.
    pub trouble: Option<String>,
    /// The checkpoints that were set aside, as they were told.
    pub refused: Vec<Event>,
}

/// Before the first step: what is there already? Then the claim, which puts newer checkpoints
/// aside. A job that is made again over the folder of an earlier one goes on from that, with higher
/// attempts. An attempt that has its state in memory waits for no storage. On rank 0 it gives what
/// was found.
pub(crate) fn open_storage(
    config: &WorkerConfig,
    desk: &Desk,
    patience: &Patience,
    mut verifiers: Verifiers,
    out: &mut dyn FnMut(TrainerEvent),
) -> Result<FoundStorage, Stop> {
    if verifiers.comm.rank() > 0 {
        let found = FoundStorage { trouble: None, refused: Vec::new() };
        return if verifiers.help()? { Err(Stop::Elsewhere) } else { Ok(found) };
    }
    let mut refused = Vec::new();
    let mut tell = |event: TrainerEvent| {
        if let TrainerEvent::Event(event) = &event
            && event.event == EventKind::CheckpointRefused
        {
            refused.push(event.clone());
        }
        out(event);
    };
    let opened = first_rank_opens(config, desk, patience, &mut verifiers, &mut tell);
    if let Some(error) = verifiers.failed.take() {
        return Err(error.into());
    }
    let opened = opened?;
    if verifiers.end(matches!(opened, Opened::Elsewhere))? {
        return Err(Stop::Elsewhere);
    }
    let trouble = match opened {
        Opened::Without(trouble) => Some(trouble),
        Opened::Ready | Opened::Elsewhere => None,
    };
    Ok(FoundStorage { trouble, refused })
}

fn first_rank_opens(
    config: &WorkerConfig,
    desk: &Desk,
    patience: &Patience,
    verifiers: &mut Verifiers,
    out: &mut dyn FnMut(TrainerEvent),
) -> Result<Opened, Stop> {
    let (disk, control, abort) = (verifiers.disk, verifiers.control, verifiers.abort());
    let until = disk.now() + patience.start;
    let (mut told, mut looked_at_newer) = (false, false);
    loop {
        let look = || desk.look(looked_at_newer, now(), patience.answer);
        let (trouble, mistake) = match control.waiting(Wait::Storage, look) {
            Some(Looked::Claimed | Looked::Later) => return Ok(Opened::Ready),
            Some(Looked::Taken { attempt }) => {
                out(TrainerEvent::Event(taken_event(config, attempt)));
                return Ok(Opened::Elsewhere);
            }
            Some(Looked::Fenced { claimed }) => return Err(Stop::Fenced(claimed)),
            Some(Looked::Newer) => match newer(config, verifiers) {
                Ok(Newest { usable: Some(found), .. }) => {
                    out(TrainerEvent::Event(found_event(config, found.step, found.name)));
                    // An earlier job's: its attempts are told at once, so that the next attempt
                    // has a number above theirs.
                    if let Ok(Some(attempt)) = claim_of_another(config, disk) {
                        out(TrainerEvent::Event(taken_event(config, attempt)));
                    }
                    return Ok(Opened::Elsewhere);
                }
                Ok(newest) => match out_of_the_way(config, disk, &newest, out)? {
                    None => {
                        looked_at_newer = true;
                        continue;
                    }
                    Some(trouble) => (trouble, false),
                },
                Err(FenceError::Fenced { claimed, .. }) => return Err(Stop::Fenced(claimed)),
                Err(ref error @ FenceError::Io { ref source, .. }) => {
                    (format!("{error}: {source}"), false)
                }
            },
            Some(Looked::Failed { why, is_mistake }) => (why, is_mistake),
            None => (format!("{} gives no answer", config.checkpoint.location), false),
        };
        abort.check()?;
        // What a user has mistyped is told at once.
        let first = config.attempt == 1 && matches!(config.resume, Resume::Fresh);
        if first && mistake {
            return Err(storage_failed(&trouble));
        }
        if disk.now() >= until {
            return Err(stumbled(&trouble));
        }
        if matches!(config.resume, Resume::Memory { .. }) {
            return Ok(Opened::Without(trouble));
        }
        if !std::mem::replace(&mut told, true) {
            let message = format!("the attempt waits for storage: {trouble}");
            let kind = EventKind::CheckpointDegraded;
            out(TrainerEvent::Event(event(config.attempt, kind, "StorageFails", message, [])));
        }
        control.waiting(Wait::Storage, || disk.pause(patience.retry));
    }
}

fn taken_event(config: &WorkerConfig, attempt: u32) -> Event {
    let path = &config.checkpoint.location;
    let message = format!("an earlier job has made attempts up to {attempt} in {path}");
    let details = [("claimed", Detail::Number(attempt.into()))];
    event(config.attempt, EventKind::AttemptsClaimed, "EarlierJob", message, details)
}

/// The newest whole one of the checkpoints beyond what is resumed from. Every byte is read, by all
/// ranks, which takes its time.
fn newer(config: &WorkerConfig, verifiers: &mut Verifiers) -> Result<Newest, FenceError> {
    let (disk, location) = (verifiers.disk, verifiers.location);
    let claims = others_claims(config, disk)?;
    let verify = &mut |found: &Found| verifiers.verify(&found.name).map(|_| ());
    newest_by(disk, location, resumed_step(config), &claims, verify)
}

/// Nothing beyond what is resumed from can be used. What is refused is set aside and told, so that
/// neither the claim nor a commit meets it; gives why storage did not let that be. A job that would
/// begin anew over it ends instead: all that was trained would be replaced.
fn out_of_the_way(
    config: &WorkerConfig,
    disk: &Disk,
    newest: &Newest,
    out: &mut dyn FnMut(TrainerEvent),
) -> Result<Option<String>, Stop> {
    let location = Path::new(&config.checkpoint.location);
    if matches!(config.resume, Resume::Fresh)
        && let Some(refusal) = newest.none_usable(location)
    {
        let message = format!("no checkpoint in {} can be used: {}", refusal.name, refusal.why());
        return Err(fail(3, &message, WAYS_ON));
    }
    if let Some(claimed) = fence::higher(disk, location, config.attempt)? {
        return Err(Stop::Fenced(claimed));
    }
    for refusal in &newest.refused {
        match set_aside(disk, location, refusal) {
            Ok(put) => out(TrainerEvent::Event(refused_event(config, refusal, &put.words()))),
            Err(error) => return Ok(Some(format!("{} stays: {error}", refusal.name))),
        }
    }
    Ok(None)
}

/// `behind`: what becomes of it.
fn refused_event(config: &WorkerConfig, refusal: &Refusal, behind: &str) -> Event {
    let step = refusal.name.strip_prefix("step-").and_then(|step| step.parse().ok());
    let details = [
        ("step", Detail::Number(step.unwrap_or_default())),
        ("name", Detail::Text(refusal.name.clone())),
    ];
    let reason = refusal.reason();
    let message = format!("{refusal}; {behind}");
    event(config.attempt, EventKind::CheckpointRefused, reason, message, details)
}

/// What a rank says of the checkpoint that it should load: 1, it is damaged; 2, storage stumbles.
const DAMAGED: u8 = 1;
const STUMBLES: u8 = 2;

/// After each rank has tried to load its part of the checkpoint at `step`: where it is damaged, the
/// newest one that is whole takes its place. Where storage stumbles nothing is known of it.
pub(crate) fn agree_on_loaded(
    config: &WorkerConfig,
    mut verifiers: Verifiers,
    step: u64,
    loaded: Result<(), Refusal>,
    tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let own = match &loaded {
        Ok(()) => 0,
        Err(refusal) if refusal.may_heal() => STUMBLES,
        Err(_) => DAMAGED,
    };
    let all = verifiers.comm.gather_all(&[own], 1)?;
    let first = |word: u8| all.iter().position(|of| of == &[word]);
    let Some(damaged) = first(DAMAGED) else {
        return match (first(STUMBLES), loaded) {
            (None, _) => Ok(()),
            (Some(_), Err(refusal)) => Err(stumbled(&refusal.to_string())),
            (Some(rank), Ok(())) => {
                let message = format!("rank {rank} cannot read the checkpoint of step {step}");
                Err(stumbled(&message))
            }
        };
    };
    let found = match verifiers.comm.rank() {
        0 => {
            let found = look_for_other(config, &mut verifiers, step, tell);
            if let Some(error) = verifiers.failed.take() {
                return Err(error.into());
            }
            verifiers.end(found?)?
        }
        _ => verifiers.help()?,
    };
    if found {
        return Err(Stop::Elsewhere);
    }
    match loaded {
        Err(refusal) => Err(fail(3, &refusal.to_string(), WAYS_ON)),
        Ok(()) => {
            let message = format!("rank {damaged} cannot load the checkpoint of step {step}");
            Err(fail(3, &message, WAYS_ON))
        }
    }
}

/// Tells what is damaged and what can be used instead, if there is such. A checkpoint that is whole
/// to all who have looked at it once more is not told as damaged, whatever another rank has seen of
/// it: the two would be told in turn.
fn look_for_other(
    config: &WorkerConfig,
    verifiers: &mut Verifiers,
    step: u64,
    tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
) -> Result<bool, Stop> {
    let (disk, location) = (verifiers.disk, verifiers.location);
    let name = moejob_protocol::checkpoint::directory_name(step);
    let Err(problems) = verifiers.verify(&name) else { return Ok(false) };
    let refusal = Refusal::of(&name, problems);
    if refusal.may_heal() {
        return Err(stumbled(&refusal.to_string()));
    }
    let claims = fence::claims(disk, location)?;
    let verify = &mut |found: &Found| verifiers.verify(&found.name).map(|_| ());
    let newest = newest_by(disk, location, None, &claims, verify)?;
    let Some(usable) = newest.usable else { return Ok(false) };
    tell(refused_event(config, &refusal, &format!("{} is used", usable.name)))?;
    tell(found_event(config, usable.step, usable.name))?;
    Ok(true)
}

fn found_event(config: &WorkerConfig, step: u64, name: String) -> Event {
    let details = [("step", Detail::Number(step))];
    event(config.attempt, EventKind::CheckpointCommitted, "Found", name, details)
}

/// The shards in the memory of this rank's worker that the plan wants of its ranks.
pub(crate) fn near_shards(
    config: &WorkerConfig,
    memory: &Memory,
    rank: u32,
) -> Result<BTreeMap<u32, Arc<Slot>>, Stop> {
    let Resume::Memory { step, attempt, sources, .. } = &config.resume else {
        return Ok(BTreeMap::new());
    };
    let mut near = BTreeMap::new();
    for source in sources.iter().filter(|source| config.are_near(rank, source.from)) {
        let shard = source.shard;
        let name = format!("shard {shard} of step {step} of attempt {attempt}");
        let Some(slot) = memory.shard(*attempt, *step, shard) else {
            return Err(fail(75, &format!("{name} is not in memory here"), "start the job again"));
        };
        near.insert(shard, slot);
    }
    Ok(near)
}

/// This rank's shards that are compared with their checksums, as the others do with theirs, beside
/// what is done with them. One that is not sound is given up and ends the attempt, whatever was
/// made of it: the next one resumes from another copy, or from an older state.
pub(crate) struct Sums {
    /// The first one that is not sound.
    compared: JoinHandle<Option<(u32, Soundness)>>,
    step: u64,
    attempt: u32,
}

impl Sums {
    /// None where nothing is resumed from memory.
    pub fn begin(
        config: &WorkerConfig,
        rank: u32,
        near: &BTreeMap<u32, Arc<Slot>>,
    ) -> Result<Option<Sums>, Stop> {
        let Resume::Memory { step, attempt, sources, .. } = &config.resume else { return Ok(None) };
        let own = sources.iter().filter(|source| source.from == rank);
        let slot = |shard| near.get(&shard).map(|slot| (shard, Arc::clone(slot)));
        let own: Vec<(u32, Arc<Slot>)> = own.filter_map(|source| slot(source.shard)).collect();
        let began = Instant::now();
        let work = move || {
            let of = |(shard, slot): &(u32, Arc<Slot>)| (*shard, slot.soundness());
            let unsound = own.iter().map(of).find(|(_, found)| *found != Soundness::Sound);
            let seconds = began.elapsed().as_secs_f64();
            tracing::debug!(seconds, "what is resumed from is compared");
            unsound
        };
        let compared = std::thread::Builder::new().name("sums".to_string()).spawn(work);
        let compared = compared.map_err(|error| no_thread("to compare checksums", &error))?;
        Ok(Some(Sums { compared, step: *step, attempt: *attempt }))
    }

    pub fn are_made(&self) -> bool {
        self.compared.is_finished()
    }

    /// Waits for them. What was resumed from is known to be whole then.
    pub fn end(
        self,
        config: &WorkerConfig,
        memory: &Memory,
        rank: u32,
        tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let Sums { compared, step, attempt } = self;
        let Some((shard, found)) = compared.join().expect("hashing does not panic") else {
            memory.confirm(attempt, step);
            memory.rest();
            return Ok(());
        };
        memory.give_up(attempt, step, shard);
        let (reason, why) = match found {
            Soundness::NotSummed => ("SnapshotNotSummed", "has no checksum, which nobody makes,"),
            _ => ("SnapshotDamaged", "was damaged in memory"),
        };
        let message =
            format!("shard {shard} of step {step} of attempt {attempt} {why} and is not used");
        let details = [("step", Detail::Number(step)), ("rank", Detail::Number(rank.into()))];
        let kind = EventKind::Warning;
        tell(event(config.attempt, kind, reason, message.clone(), details))?;
        Err(Stop::Comm(CommError::Aborted { reason: message }))
    }
}

/// Every rank resumes from its own shard of the layout that it has, and none has a buddy: what is
/// in memory is the state that the attempt begins with, in as many copies as there can be.
pub(crate) fn resumes_in_place(config: &WorkerConfig, buddies: &[Option<u32>]) -> bool {
    match &config.resume {
        Resume::Memory { layout, sources, .. } => {
            *layout == config.layout
                && sources.iter().all(|source| source.from == source.shard)
                && buddies.iter().all(Option::is_none)
        }
        Resume::Fresh | Resume::Checkpoint { .. } => false,
    }
}

/// The rank that keeps each rank's second copy, on another node, else of another worker. The ranks
/// of one worker are lost together.
pub(crate) fn buddies(config: &WorkerConfig) -> Vec<Option<u32>> {
    // The first rank on each node stands for it.
    let mut first = BTreeMap::new();
    for member in &config.members {
        first.entry(member.node.as_str()).or_insert(member.rank);
    }
    let node = |rank: u32| config.member_of(rank).map_or(rank, |of| first[of.node.as_str()]);
    let ranks = 0..config.layout.mesh.world();
    let nodes: Vec<u32> = ranks.clone().map(node).collect();
    let one = nodes.windows(2).all(|of| of[0] == of[1]);
    let worker = |rank: u32| config.member_of(rank).map_or(rank, |of| of.rank);
    layout::buddies(&if one { ranks.map(worker).collect() } else { nodes })
}

/// In fp16: goes on with the loss scale of the resumed shards, of which a rank may have none. They
/// all have the same.
pub(crate) fn take_loss_scale(
    own: &BTreeMap<u32, Arc<Slot>>,
    state: &mut impl RankState,
    comm: &mut Comm,
) -> Result<(), Stop> {
    if state.loss_scale().is_none() {
        return Ok(());
    }
    let kept = own.values().find_map(|slot| slot.loss_scale());
    let told = kept.map_or(Vec::new(), |ScaleEntry { scale, good_steps }| {
        [&scale.to_le_bytes()[..], &good_steps.to_le_bytes()].concat()
    });
    let all = comm.gather_all(&told, size_of::<f64>() + size_of::<u32>())?;
    state.set_loss_scale(all.iter().find_map(|told| {
        let (scale, rest) = told.split_first_chunk()?;
        let (good_steps, _) = rest.split_first_chunk()?;
        let (scale, good_steps) = (f64::from_le_bytes(*scale), u32::from_le_bytes(*good_steps));
        Some(ScaleEntry { scale, good_steps })
    }));
    Ok(())
}

/// Recorded where there is a record of this attempt, and told to the leader.
pub(crate) fn tell(
    event: Event,
    records: Option<&Recorder>,
    out: &mut dyn FnMut(TrainerEvent),
) -> Result<(), Stop> {
    if let Some(records) = records {
        records.event(&event);
    }
    out(TrainerEvent::Event(event));
    Ok(())
}

/// A checkpoint of another job, model or data ends the job.
pub(crate) fn refused(refusal: &Refusal) -> Stop {
    let advice = "give the job another name, or another checkpoint.location; `moejob checkpoint \
                  show` tells whose it is";
    fail(3, &refusal.to_string(), advice)
}
