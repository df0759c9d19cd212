//! Job -> what the planner wants, and the configuration that every attempt starts from.

use crate::observed::Wanted;
use crate::placement;
use crate::preflight::Standard;
use moejob_manifest::job::{DataFormat, Job, Source, TrainPart, Venue};
use moejob_protocol::Mesh;
use moejob_protocol::config::{
    CheckpointConfig, DataConfig, DataSource, Exchange, MixturePart, RecoveryConfig, Resume,
    Tokenizer, WorkerConfig,
};
use moejob_protocol::layout::Layout;

/// Where a job's files lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// What relative data paths mean.
    pub root: String,
    /// The folder of checkpoints, absolute.
    pub checkpoints: String,
    /// The folder of `metrics.jsonl` and `events.jsonl`, absolute.
    pub records: String,
    /// Folders that are never read as data: the runs.
    pub exclude: Vec<String>,
}

/// What `plan()` needs of a job.
pub fn wanted(job: &Job, venue: Venue) -> Wanted {
    let (sizes, _) = placement::sizes(job);
    Wanted {
        nodes_min: job.nodes.min,
        nodes_max: job.nodes.max,
        spares: job.nodes.spares,
        sizes,
        restarts_max: job.recovery.max_restarts,
        restart_window: job.recovery.window,
        growth_interval: job.growth_interval(venue),
        gang_timeout: job.recovery.gang_timeout,
        step_timeout: job.recovery.step_timeout.unwrap_or(0),
        suspend: job.suspend,
        preflight: job.is_measured().then(|| Box::new(Standard::of(&job.profile))),
        venue,
    }
}

/// A worker's configuration without what the plan fills in for an attempt.
pub fn template(job: &Job, venue: Venue, job_uid: &str, places: &Places) -> WorkerConfig {
    WorkerConfig {
        job_uid: job_uid.to_string(),
        job_name: job.name.clone(),
        attempt: 0,
        digest: String::new(),
        rank: None,
        layout: Layout::contiguous(Mesh::data_parallel(1, 1)),
        members: Vec::new(),
        resume: Resume::Fresh,
        model: job.model.clone(),
        model_from: job.model_from.as_ref().map(|path| match path.starts_with('/') {
            true => path.clone(),
            false => format!("{}/{path}", places.root),
        }),
        training: job.training.clone(),
        data: data(job, places),
        checkpoint: CheckpointConfig {
            every_steps: job.checkpoint.every_steps,
            auto: job.checkpoint.auto,
            keep: job.checkpoint.keep,
            keep_best: job.checkpoint.keep_best,
            location: places.checkpoints.clone(),
            records: places.records.clone(),
            spec_hash: job.spec_hash.clone(),
        },
        recovery: recovery(job, venue),
        ranks: job.profile.ranks,
        exchange: Exchange::Flat,
        threads: 0,
    }
}

/// How its workers keep their state, and how long they wait.
pub fn recovery(job: &Job, venue: Venue) -> RecoveryConfig {
    RecoveryConfig {
        heartbeat_timeout_ms: job.recovery.heartbeat_timeout,
        step_timeout_ms: job.recovery.step_timeout.unwrap_or(0),
        orphan_timeout_ms: job.orphan_timeout(venue),
        memory_every_steps: job.recovery.memory_every_steps,
        memory_auto: job.recovery.memory_auto,
    }
}

/// What the workers read: paths as typed, and what they are relative to.
fn data(job: &Job, places: &Places) -> DataConfig {
    let data = &job.data;
    let source = |source: &Source| {
        let (root, paths) = (places.root.clone(), source.paths.clone());
        let (exclude, field) = (source.exclude.clone(), source.field.clone());
        match source.format {
            DataFormat::Text => DataSource::Text { root, paths, exclude },
            DataFormat::Jsonl => DataSource::Jsonl { root, paths, exclude, field },
            DataFormat::Tokens => {
                DataSource::Tokens { root, paths, exclude, dtype: source.dtype }
            }
            DataFormat::Megatron => DataSource::Megatron { root, paths, exclude },
            DataFormat::Parquet => DataSource::Parquet { root, paths, exclude, field },
        }
    };
    let part = |part: &TrainPart| MixturePart {
        weight: part.weight.unwrap_or(1.0),
        source: source(&part.source),
    };
    let tokenizer = match &data.tokenizer {
        Tokenizer::Bytes => Tokenizer::Bytes,
        Tokenizer::Path(path) => {
            let path = std::path::Path::new(&places.root).join(path);
            Tokenizer::Path(path.display().to_string())
        }
    };
    DataConfig {
        source: match &data.train[..] {
            [only] if only.weight.is_none() => source(&only.source),
            parts => DataSource::Mixture { parts: parts.iter().map(part).collect() },
        },
        held_out: data.held_out.as_ref().map(source),
        tokenizer,
        end_of_document: data.end_of_document,
        reset_at_boundaries: data.reset_at_boundaries,
        mask_at_boundaries: data.mask_at_boundaries,
        validation: data.validation,
        exclude: places.exclude.clone(),
    }
}
