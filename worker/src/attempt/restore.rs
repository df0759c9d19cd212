//! The state that an attempt begins with.

use crate::attempt::records::event;
use crate::attempt::resume::{self, Sums};
use crate::attempt::stop::{Stop, fail};
use crate::attempt::trainer::{Trainer, start_from};
use crate::checkpoint::{Expected, Refusal, differences, load, look, show};
use crate::data::{Corpus, Listing};
use crate::engine::model::Model;
use crate::gang::comm::{AbortHandle, Comm};
use crate::state::moves::scatter;
use crate::state::rank::RankState;
use crate::state::snapshot::initialize;
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
        tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
    ) -> Result<Option<Sums>, Stop> {
        let mut comparing = None;
        match &config.resume {
            Resume::Fresh => match &config.model_from {
                None => initialize(model, config.training.seed),
                Some(path) => {
                    for refused in start_from(Path::new(path), model, comm)? {
                        let (kind, message) =
                            (EventKind::Warning, format!("spec.model.from: {refused}"));
                        tell(event(config.attempt, kind, "OlderCheckpoint", message, []))?;
                    }
                }
            },
            Resume::Checkpoint { step, name } => {
                let directory = PathBuf::from(&config.checkpoint.location).join(name);
                let abort = comm.abort_handle();
                let loaded =
                    self.restore_checkpoint(&directory, config, corpus, model, &abort)?;
                resume::agree_on_loaded(config, &self.disk, comm, *step, loaded, tell)?;
            }
            Resume::Memory { layout, sources, .. } => {
                let rank = model.rank;
                let near = resume::near_shards(config, &self.memory, rank)?;
                let is_near = |other| resume::is_near(config, rank, other);
                let held = |shard| Arc::clone(&near[&shard]);
                let began = Instant::now();
                let mut sums = Sums::begin(config, rank, &near)?;
                let there = scatter(model, comm, layout, sources, is_near, held)
                    .map_err(Stop::from)
                    .and_then(|()| resume::take_loss_scale(&near, model, comm));
                let seconds = began.elapsed().as_secs_f64();
                tracing::debug!(seconds, "what is resumed from is there");
                // Where steps are begun ahead, the first ones may be done before it is known that
                // what they began with was whole. What failed may have failed for that.
                let beside = self.ahead || model.device.as_cuda().is_some();
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
        directory: &Path,
        config: &WorkerConfig,
        corpus: &Corpus,
        model: &mut Model,
        abort: &AbortHandle,
    ) -> Result<Result<(), Refusal>, Stop> {
        let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let until = Instant::now() + self.patience.start;
        let location = Path::new(&config.checkpoint.location);
        loop {
            let loaded = match show(&self.disk, directory) {
                Ok(manifest) => {
                    of_this_job(&manifest, name, config, corpus, model)?;
                    load(&self.disk, directory, &manifest, model)
                }
                Err(problems) => Err(Refusal::of(name, problems)),
            };
            let away = || look::is_empty(&self.disk, location).unwrap_or(true);
            match loaded {
                Err(refusal) if Instant::now() < until && (refusal.may_heal() || away()) => {
                    abort.check()?;
                    std::thread::sleep(self.patience.retry);
                }
                loaded => return Ok(loaded),
            }
        }
    }
}

/// Refuses a checkpoint of another job, model or data.
fn of_this_job(
    manifest: &CheckpointManifest,
    name: &str,
    config: &WorkerConfig,
    corpus: &Corpus,
    model: &Model,
) -> Result<(), Stop> {
    let expected = Expected {
        model: &config.model,
        data_fingerprint: corpus.fingerprint(),
        seed: config.training.seed,
        spec_hash: &config.checkpoint.spec_hash,
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
