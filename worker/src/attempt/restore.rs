//! The state that an attempt begins with.

use crate::attempt::api::{Control, Wait};
use crate::attempt::records::event;
use crate::attempt::resume::{self, Sums};
use crate::attempt::stop::{Stop, fail, stumbled};
use crate::attempt::together::Verifiers;
use crate::attempt::trainer::Trainer;
use crate::checkpoint::{Disk, Expected, Refusal, differences, load, look, show};
use crate::data::{Corpus, Listing};
use crate::engine::model::Model;
use crate::hf::{self, Weights};
use crate::gang::comm::{AbortHandle, Comm};
use crate::state::moves::scatter;
use crate::state::rank::RankState;
use crate::state::snapshot::initialize_telling;
use moejob_protocol::canonical::{training_hash, training_hash_before};
use moejob_protocol::config::Resume;
use moejob_protocol::report::{Event, EventKind};
use moejob_protocol::{CheckpointManifest, WorkerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

impl Trainer {
    /// The state that the attempt begins with.
    pub(super) fn restore(
        &mut self,
        config: &WorkerConfig,
        corpus: &Corpus,
        model: &mut Model,
        comm: &mut Comm,
        (disk, control): (&Disk, &Control),
        tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
    ) -> Result<Option<Sums>, Stop> {
        let mut comparing = None;
        match &config.resume {
            Resume::Fresh => match &config.model_from {
                None => {
                    let tell = &mut || control.stir();
                    initialize_telling(model, config.training.seed, tell);
                }
                Some(path) => {
                    for refused in start_from(Path::new(path), model, comm, (disk, control))? {
                        let (kind, message) =
                            (EventKind::Warning, format!("spec.model.from: {refused}"));
                        tell(event(config.attempt, kind, "OlderCheckpoint", message, []))?;
                    }
                }
            },
            Resume::Checkpoint { step, name } => {
                let directory = PathBuf::from(&config.checkpoint.location).join(name);
                let abort = comm.abort_handle();
                let loaded = control.waiting(Wait::Storage, || {
                    self.restore_checkpoint((&directory, disk), config, corpus, model, &abort)
                })?;
                let location = Path::new(&config.checkpoint.location);
                let verifiers = Verifiers { comm, disk, control, location, failed: None };
                resume::agree_on_loaded(config, verifiers, *step, loaded, tell)?;
            }
            Resume::Memory { layout, sources, .. } => {
                let rank = model.rank;
                let near = resume::near_shards(config, &self.memory, rank)?;
                let is_near = |other| config.are_near(rank, other);
                let held = |shard| Arc::clone(&near[&shard]);
                // Where steps are begun ahead, the first ones may be done before it is known that
                // what they began with was whole: it is compared behind the copies, from which it
                // would take memory's bandwidth. What failed may have failed for that.
                let beside = self.ahead || model.device.as_cuda().is_some();
                let compare = || Sums::begin(config, rank, &near);
                let before = if beside { None } else { compare()? };
                let began = Instant::now();
                let there = scatter(model, comm, layout, sources, is_near, held)
                    .map_err(Stop::from)
                    .and_then(|()| resume::take_loss_scale(&near, model, comm));
                let seconds = began.elapsed().as_secs_f64();
                tracing::debug!(seconds, "what is resumed from is there");
                let mut sums = if beside { compare()? } else { before };
                if (!beside || there.is_err())
                    && let Some(sums) = sums.take()
                {
                    sums.end(config, &self.memory, rank, tell)?;
                }
                there?;
                comparing = sums;
                drop(near);
                self.memory.give_borrowed_back();
            }
        }
        model.finish()?;
        Ok(comparing)
    }

    /// A checkpoint that is whole but of another job, model or data ends the job; one that is
    /// damaged is the inner error. Storage that fails is waited for.
    fn restore_checkpoint(
        &self,
        (directory, disk): (&Path, &Disk),
        config: &WorkerConfig,
        corpus: &Corpus,
        model: &mut Model,
        abort: &AbortHandle,
    ) -> Result<Result<(), Refusal>, Stop> {
        let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let until = disk.now() + self.patience.start;
        let location = Path::new(&config.checkpoint.location);
        loop {
            let loaded = match show(disk, directory) {
                Ok(manifest) => {
                    of_this_job(&manifest, name, config, corpus, model)?;
                    load(disk, directory, &manifest, model)
                }
                Err(problems) => Err(Refusal::of(name, problems)),
            };
            // What stumbled was tried again already.
            let away = || look::is_empty(disk, location).unwrap_or(true);
            match loaded {
                Err(refusal) if disk.now() < until && !refusal.may_heal() && away() => {
                    abort.check()?;
                    disk.pause(self.patience.retry);
                }
                loaded => {
                    // Of an attempt that is over nothing is said of the checkpoint.
                    abort.check()?;
                    return Ok(loaded);
                }
            }
        }
    }
}

/// Weights that others trained, the same on every rank; gives what rank 0 tells of newer ones that
/// are refused.
fn start_from(
    path: &Path,
    model: &mut Model,
    comm: &mut Comm,
    (disk, control): (&Disk, &Control),
) -> Result<Vec<String>, Stop> {
    let refused = |refusal: Refusal| {
        if refusal.may_heal() {
            return stumbled(&format!("spec.model.from: {refusal}"));
        }
        let advice = "leave out of spec.model what the weights say; `moejob checkpoint import` of \
                      the directory lists what else is wrong";
        fail(3, &format!("spec.model.from: {refusal}"), advice)
    };
    let first = comm.rank() == 0;
    let read = control.waiting(Wait::Storage, || {
        let weights = Weights::open_on(disk, path)?;
        if first {
            weights.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
        }
        disk.progress().expect(weights.bytes());
        let own = hf::load(&weights, model)?;
        Ok((own, weights.passed_over().to_vec()))
    });
    let (own, passed_over) = read.map_err(refused)?;
    for (rank, other) in comm.gather_all(&own, own.len())?.iter().enumerate() {
        if *other != own {
            let (path, me) = (path.display(), comm.rank());
            let message = format!("{path} holds other weights for rank {rank} than for rank {me}");
            return Err(fail(3, &message, "give every node the same files"));
        }
    }
    Ok(if first { passed_over } else { Vec::new() })
}

/// Refuses a checkpoint of another job, model or data.
fn of_this_job(
    manifest: &CheckpointManifest,
    name: &str,
    config: &WorkerConfig,
    corpus: &Corpus,
    model: &Model,
) -> Result<(), Stop> {
    let (training, fraction) = (&config.training, config.data.validation.fraction);
    let expected = Expected {
        model: &config.model,
        data_fingerprint: corpus.fingerprint(),
        seed: config.training.seed,
        spec_hash: &config.checkpoint.spec_hash,
        training_hashes: [training_hash, training_hash_before].map(|of| of(training, fraction)),
        float_bytes: model.shape.float_bytes,
    };
    let other = differences(manifest, &expected);
    if other.is_empty() {
        return Ok(());
    }
    let refusal = Refusal::of(name, other);
    match data_changes(manifest, config, corpus) {
        Some(changes) => {
            let message = format!("{refusal}; of the data's files {changes}");
            let advice = "put the files back as they were, or give the job another name";
            Err(fail(3, &message, advice))
        }
        None => Err(resume::refused(&refusal)),
    }
}

/// Which files are others than those that a checkpoint was trained on, where that is known.
fn data_changes(
    manifest: &CheckpointManifest,
    config: &WorkerConfig,
    corpus: &Corpus,
) -> Option<String> {
    let kept = Listing::read(Path::new(&config.checkpoint.location))?;
    let of_it = kept.fingerprint == manifest.data_fingerprint;
    let differs = manifest.data_fingerprint != corpus.fingerprint();
    kept.changes(&corpus.listing().filter(|_| of_it && differs)?)
}

/// All ranks read the same text.
pub(super) fn agree_on_data(corpus: &Corpus, comm: &mut Comm) -> Result<(), Stop> {
    let own = corpus.fingerprint().as_bytes();
    for (rank, other) in comm.gather_all(own, 256)?.iter().enumerate() {
        if other != own {
            let message = format!(
                "rank {rank} reads other data than rank {}: fingerprints {} and {}",
                comm.rank(),
                String::from_utf8_lossy(other),
                corpus.fingerprint()
            );
            return Err(fail(3, &message, "give every node the same files"));
        }
    }
    Ok(())
}
