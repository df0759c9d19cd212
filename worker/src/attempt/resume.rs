//! The leader's word on where to resume, held against the storage.
//!
//! On Kubernetes the leader does not read the storage. It may not have heard of a commit (the one
//! before it was lost with the news), and it cannot know that a checkpoint is damaged. Rank 0 tells
//! it what is there, all ranks stop without a step, and the next attempt resumes from that.

use crate::attempt::api::TrainerEvent;
use crate::attempt::recorder::Recorder;
use crate::attempt::records::{event, now};
use crate::attempt::saves::Patience;
use crate::attempt::trainer::{Stop, fail, storage_failed};
use crate::checkpoint::fence::{self, Claim, Claiming, FenceError, tidy};
use crate::checkpoint::{Disk, Refusal, list_above, newest_under, newest_usable, verify};
use crate::gang::comm::{AbortHandle, Comm, CommError};
use crate::state::rank::RankState;
use crate::state::slots::{Memory, Slot};
use moejob_protocol::WorkerConfig;
use moejob_protocol::checkpoint::ScaleEntry;
use moejob_protocol::config::Resume;
use moejob_protocol::report::{Detail, Event, EventKind};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What rank 0 has of storage when its attempt begins.
pub(crate) struct Opened {
    pub claiming: Arc<Mutex<Claiming>>,
    /// Why the claim is not made yet: the writer goes on trying.
    pub trouble: Option<String>,
}

/// What storage says of an attempt before its first step.
enum Looked {
    Claimed,
    /// There are newer checkpoints than the one that the attempt resumes from.
    Newer,
    /// Another job has claimed this attempt or a later one.
    Taken(Box<Event>),
}

/// Before the first step: what is there already? Then the claim, which puts newer checkpoints
/// aside. A job that is made again over the folder of an earlier one goes on from that, with higher
/// attempts. An attempt that has its state in memory waits for no storage.
pub(crate) fn open_storage(
    config: &WorkerConfig,
    disk: &Disk,
    patience: &Patience,
    comm: &mut Comm,
    out: &mut dyn FnMut(TrainerEvent),
) -> Result<Option<Opened>, Stop> {
    let mut opened = None;
    if comm.rank() == 0 {
        opened = first_rank_opens(config, disk, patience, &comm.abort_handle(), out)?;
    }
    let leave = comm.rank() == 0 && opened.is_none();
    if first_rank_says(comm, leave)? { Err(Stop::Elsewhere) } else { Ok(opened) }
}

fn first_rank_opens(
    config: &WorkerConfig,
    disk: &Disk,
    patience: &Patience,
    abort: &AbortHandle,
    out: &mut dyn FnMut(TrainerEvent),
) -> Result<Option<Opened>, Stop> {
    let claiming = Arc::new(Mutex::new(Claiming::new(Claim {
        attempt: config.attempt,
        resume_step: config.resume.step(),
        job_uid: config.job_uid.clone(),
        time: now(),
    })));
    let until = Instant::now() + patience.start;
    let (mut told, mut looked_at_newer) = (false, false);
    loop {
        let asked = (config.clone(), disk.clone(), Arc::clone(&claiming), looked_at_newer);
        let answer = within(patience.answer, move || look_and_claim(&asked));
        let why = match answer {
            Some(Ok(Looked::Claimed)) => return Ok(Some(Opened { claiming, trouble: None })),
            Some(Ok(Looked::Taken(taken))) => {
                out(TrainerEvent::Event(*taken));
                return Ok(None);
            }
            Some(Ok(Looked::Newer)) => match newer(config, disk) {
                Ok(Some(found)) => {
                    out(TrainerEvent::Event(found));
                    // An earlier job's: its attempts are told at once, so that the next attempt
                    // has a number above theirs.
                    let location = Path::new(&config.checkpoint.location);
                    if let Ok(Some(taken)) = claim_of_another(config, disk, location) {
                        out(TrainerEvent::Event(taken));
                    }
                    return Ok(None);
                }
                Ok(None) => {
                    looked_at_newer = true;
                    continue;
                }
                Err(error) => error,
            },
            Some(Err(error)) => error,
            None => {
                let path = config.checkpoint.location.clone().into();
                FenceError::Io { path, source: std::io::ErrorKind::TimedOut.into() }
            }
        };
        let FenceError::Io { source, .. } = &why else { return Err(why.into()) };
        let trouble = format!("{why}: {source}");
        // What a user has mistyped is told at once.
        let first = config.attempt == 1 && matches!(config.resume, Resume::Fresh);
        if first && is_mistake(source) || Instant::now() >= until {
            return Err(storage_failed(&trouble));
        }
        if matches!(config.resume, Resume::Memory { .. }) {
            return Ok(Some(Opened { claiming, trouble: Some(trouble) }));
        }
        if !std::mem::replace(&mut told, true) {
            let message = format!("the attempt waits for storage: {trouble}");
            let kind = EventKind::CheckpointDegraded;
            out(TrainerEvent::Event(event(config.attempt, kind, "StorageFails", message, [])));
        }
        abort.check()?;
        std::thread::sleep(patience.retry);
    }
}

/// A place that no waiting makes good.
fn is_mistake(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{
        AlreadyExists, NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem,
    };
    // A file where a folder is asked for exists already.
    let kinds =
        [AlreadyExists, NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem];
    kinds.contains(&error.kind())
}

/// What a thread of its own answers, unless storage keeps it for longer than `at_most`.
fn within<T: Send + 'static>(
    at_most: Duration,
    ask: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (answer, answered) = channel();
    let thread = std::thread::Builder::new().name("storage".to_string());
    // Nobody may wait for the answer any longer when it comes.
    let started = thread.spawn(move || drop(answer.send(ask())));
    match started {
        Ok(_) => match answered.recv_timeout(at_most) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
        },
        Err(_) => None,
    }
}

fn look_and_claim(
    (config, disk, claiming, looked_at_newer): &(WorkerConfig, Disk, Arc<Mutex<Claiming>>, bool),
) -> Result<Looked, FenceError> {
    let location = Path::new(&config.checkpoint.location);
    let io = |source| FenceError::Io { path: location.to_path_buf(), source };
    match &config.resume {
        Resume::Fresh => disk.create_directories(location).map_err(io)?,
        _ if is_empty(disk, location).map_err(io)? => {
            let why = "nothing of this job is there: is its volume mounted?";
            return Err(io(std::io::Error::other(why)));
        }
        _ => {}
    }
    if !looked_at_newer && has_newer(config, disk)? {
        return Ok(Looked::Newer);
    }
    if let Some(taken) = claim_of_another(config, disk, location)? {
        return Ok(Looked::Taken(Box::new(taken)));
    }
    let mut claiming = claiming.lock().unwrap_or_else(PoisonError::into_inner);
    claiming.go(disk, location)?;
    // The attempt before may have committed between the look and the claim, and the claim would
    // rule that out.
    if !looked_at_newer && has_newer(config, disk)? {
        claiming.give_back(disk, location);
        return Ok(Looked::Newer);
    }
    // What earlier attempts left only takes room; the next claim tries it again.
    let _ = tidy(disk, location, config.attempt);
    Ok(Looked::Claimed)
}

/// Storage that is not mounted shows an empty folder, or none.
pub(crate) fn is_empty(disk: &Disk, location: &Path) -> std::io::Result<bool> {
    match disk.names(location) {
        Ok(names) => Ok(names.is_empty()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

/// The claims of other attempts than this.
fn others_claims(config: &WorkerConfig, disk: &Disk) -> Result<Vec<Claim>, FenceError> {
    let mut claims = fence::claims(disk, Path::new(&config.checkpoint.location))?;
    claims.retain(|claim| claim.attempt != config.attempt);
    Ok(claims)
}

fn has_newer(config: &WorkerConfig, disk: &Disk) -> Result<bool, FenceError> {
    let location = Path::new(&config.checkpoint.location);
    let claims = others_claims(config, disk)?;
    let io = |source| FenceError::Io { path: location.to_path_buf(), source };
    let found = list_above(disk, location, Some(config.resume.step())).map_err(io)?;
    Ok(found.iter().any(|found| {
        let manifest = found.manifest.as_ref();
        manifest.is_ok_and(|manifest| fence::counts(&claims, manifest.attempt, found.step))
    }))
}

/// The newest whole one of the checkpoints above what is resumed from. Every byte is read, which
/// takes its time.
fn newer(config: &WorkerConfig, disk: &Disk) -> Result<Option<Event>, FenceError> {
    let location = Path::new(&config.checkpoint.location);
    let claims = others_claims(config, disk)?;
    let newest = newest_under(disk, location, Some(config.resume.step()), &claims)?;
    Ok(newest.usable.map(|found| found_event(config, found.step, found.name)))
}

/// This attempt or a later one is claimed, by another job than this.
fn claim_of_another(
    config: &WorkerConfig,
    disk: &Disk,
    location: &Path,
) -> Result<Option<Event>, FenceError> {
    let Some(newest) = fence::claims(disk, location)?.pop() else { return Ok(None) };
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
    disk: &Disk,
    comm: &mut Comm,
    step: u64,
    loaded: Result<(), Refusal>,
    tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let own = [u8::from(loaded.is_err())];
    let damaged = comm.gather_all(&own, own.len())?.iter().position(|of| of == &[1]);
    let Some(damaged) = damaged else { return Ok(()) };
    let found = comm.rank() == 0 && look_for_other(config, disk, step, tell)?;
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
    disk: &Disk,
    step: u64,
    tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
) -> Result<bool, Stop> {
    let location = Path::new(&config.checkpoint.location);
    let name = moejob_protocol::checkpoint::directory_name(step);
    let Err(problems) = verify(disk, &location.join(&name)) else { return Ok(false) };
    let Some(usable) = newest_usable(disk, location)?.usable else { return Ok(false) };
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

/// The shards in memory that the plan wants of this rank. One that is damaged is given up and ends
/// the attempt: the next one resumes from another copy, or from an older state.
pub(crate) fn own_shards(
    config: &WorkerConfig,
    memory: &Memory,
    rank: u32,
    tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
) -> Result<BTreeMap<u32, Arc<Slot>>, Stop> {
    let Resume::Memory { step, attempt, sources, .. } = &config.resume else {
        return Ok(BTreeMap::new());
    };
    let mut own = BTreeMap::new();
    for shard in sources.iter().filter(|source| source.from == rank).map(|source| source.shard) {
        let name = format!("shard {shard} of step {step} of attempt {attempt}");
        let Some(slot) = memory.shard(*attempt, *step, shard) else {
            return Err(fail(75, &format!("{name} is not in memory here"), "start the job again"));
        };
        if !slot.is_sound() {
            drop(slot);
            memory.give_up(*attempt, *step, shard);
            let message = format!("{name} was damaged in memory and is not used");
            let details = [("step", Detail::Number(*step)), ("rank", Detail::Number(rank.into()))];
            let kind = EventKind::Warning;
            tell(event(config.attempt, kind, "SnapshotDamaged", message.clone(), details))?;
            return Err(Stop::Comm(CommError::Aborted { reason: message }));
        }
        own.insert(shard, slot);
    }
    Ok(own)
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

/// A checkpoint that no attempt can go on from ends the job.
pub(crate) fn refused(refusal: &Refusal) -> Stop {
    let advice = "`moejob checkpoint verify` lists all problems; remove it or the cause";
    fail(3, &refusal.to_string(), advice)
}
