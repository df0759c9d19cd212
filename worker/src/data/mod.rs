//! The data: `batch = f(seed, step)`, so that resuming needs no state.
//!
//! ```text
//! globs -> files sorted by name -> documents, held out or not by the hash of their place
//!       -> one stream of tokens a source -> windows of S + 1 tokens, stride S
//!       -> sources mixed by weight, windows permuted anew each epoch
//! ```
//! Tokens are read where they lie, a window at a time. What has to be tokenised or decompressed
//! first goes to a temporary file that the workers of a node share; nothing of it is kept in
//! memory. Engines that are processes ask their worker, which has it open for all of them.

pub mod durable;
mod error;
mod files;
mod fingerprint;
mod content;
mod index;
mod handles;
mod store;
mod stream;
mod batch;
pub mod megatron;
pub mod header;
pub mod line;
mod pattern;
mod cut;
mod documents;
#[cfg(feature = "parquet")]
mod parquet;
mod tokenizer;
mod tokenize;
mod cache;
mod divide;
mod doubts;
mod open;
mod pairs;
mod order;
mod overlap;
mod desk;
mod feeder;
mod listing;
pub mod inspect;
pub mod learn;
pub mod prepare;

pub use batch::Batch;
pub use desk::{Closing, Desk, Overlaps, answer};
pub(crate) use durable::replace;
pub use documents::{Format, LINE_BYTES_MAX, Position};
pub use error::DataError;
pub use feeder::{Batches, Feeder};
pub use files::{DataFile, find};
pub use listing::{Listed, Listing};
pub use crate::disk::Progress;
pub use overlap::{DocumentOverlap, Doubled};
pub use order::{MIX_BLOCK, Mix, permute};
pub use store::Width;
pub use stream::Stream;
pub use tokenize::{Document, Recipe, Tokens, jsonl, threads};
pub use tokenizer::Encoder;

use crate::disk::Disk;
use moejob_protocol::config::{DataConfig, DataSource, TrainingConfig};
use open::{Access, Opening, Origin, Part};
use std::collections::HashMap;
use std::path::Path;

/// The epoch whose permutation orders the held-out windows; training never gets there.
const HELD_OUT_EPOCH: u64 = u64::MAX;

/// Files that are held out and trained on as well, of which people are told the names.
const OVERLAPS_NAMED: usize = 3;

/// The sources, divided, and what a step reads of them.
#[derive(Clone, Debug, Default)]
pub struct Corpus {
    training: Vec<Part>,
    held_out: Vec<Part>,
    /// The held-out data have a source of their own.
    held_out_apart: bool,
    mix: Mix,
    fingerprint: String,
    reset_at_boundaries: bool,
    mask_at_boundaries: bool,
    seed: u64,
    global_batch: u64,
    micro_batch: u64,
    sequence: u64,
    /// A held-out loss is asked for.
    wants_held_out: bool,
    /// What all of it is read by.
    disk: Disk,
    /// A step, and how many of its targets count.
    step_targets: Option<(u64, u64)>,
    /// The batch that was asked for last.
    scratch: Batch,
    /// Where the worker has the data open: whom to ask, and the held-out windows there.
    elsewhere: Option<(Desk, u64)>,
}

impl Corpus {
    /// Finds, reads and fingerprints the files, for a model of `vocabulary` tokens.
    ///
    /// # Errors
    /// See [`DataError`]; it names the file, and where in it.
    pub fn open(
        data: &DataConfig,
        training: &TrainingConfig,
        vocabulary: u32,
    ) -> Result<Corpus, DataError> {
        Corpus::open_telling(data, training, vocabulary, &Progress::default())
    }

    /// As `open`; `progress` says how far it is, and may end it early.
    ///
    /// # Errors
    /// See [`DataError`]; it names the file, and where in it.
    pub fn open_telling(
        data: &DataConfig,
        training: &TrainingConfig,
        vocabulary: u32,
        progress: &Progress,
    ) -> Result<Corpus, DataError> {
        let disk = Disk::real().counting(progress.clone());
        Corpus::open_on(&disk, (data, None), training, vocabulary)
    }

    /// As `open`, by way of a disk with its patience and its progress; so are all reads later.
    /// `kept` is where the names of its files were kept, of a job that goes on.
    ///
    /// # Errors
    /// See [`DataError`]; it names the file, and where in it.
    pub fn open_on(
        disk: &Disk,
        (data, kept): (&DataConfig, Option<&Path>),
        training: &TrainingConfig,
        vocabulary: u32,
    ) -> Result<Corpus, DataError> {
        let known = match kept {
            Some(path) => Listing::read_on(disk, path)?,
            None => None,
        };
        let (handles, folder) = (handles::Handles::default(), cache::folder());
        let access = Access { handles, folder, disk: disk.clone(), known };
        let encoder = Encoder::open_on(disk, &data.tokenizer)?;
        if any(data, &|source| !is_tokenized(source)) {
            encoder.check(vocabulary)?;
        }
        if let Some(id) = data.end_of_document.filter(|id| *id >= vocabulary) {
            return Err(DataError::EndOfDocument { id, vocabulary });
        }
        let sequence = u64::from(training.sequence_length);
        let fraction = if data.held_out.is_some() { 0.0 } else { data.validation.fraction };
        let needed = sequence + 1;
        let access = &access;
        let own = &encoder;
        let opening =
            |part| Opening { data, encoder: own, vocabulary, fraction, needed, part, access };
        let mut weights = vec![1.0];
        let mut opened = match &data.source {
            DataSource::Mixture { parts } => {
                weights = parts.iter().map(|part| part.weight).collect();
                let parts = parts.iter().enumerate();
                let parts = parts.map(|(number, part)| opening(number).open(&part.source));
                parts.collect::<Result<Vec<_>, _>>()?
            }
            source => vec![opening(0).open(source)?],
        };
        let mix = Mix::new(&weights)?;
        let apart = match &data.held_out {
            Some(source) => {
                Some(Opening { fraction: 0.0, ..opening(opened.len()) }.open(source)?)
            }
            None => None,
        };
        let fingerprint = fingerprint::of(data, &encoder, &weights, &opened, apart.as_ref());
        let held_out = match apart {
            Some(apart) => vec![apart.training],
            None => opened.iter_mut().map(|part| std::mem::take(&mut part.held_out)).collect(),
        };
        let corpus = Corpus {
            training: opened.into_iter().map(|part| part.training).collect(),
            held_out,
            held_out_apart: data.held_out.is_some(),
            wants_held_out: data.validation.every_steps > 0
                && (data.held_out.is_some() || data.validation.fraction > 0.0),
            mix,
            fingerprint,
            reset_at_boundaries: data.reset_at_boundaries,
            mask_at_boundaries: data.mask_at_boundaries,
            step_targets: None,
            seed: training.seed,
            global_batch: training.global_batch_size.into(),
            micro_batch: training.micro_batch_size.into(),
            sequence,
            disk: disk.clone(),
            scratch: Batch::default(),
            elsewhere: None,
        };
        corpus.is_large_enough()?;
        disk.is_known();
        Ok(corpus)
    }

    fn is_large_enough(&self) -> Result<(), DataError> {
        let needed = self.sequence + 1;
        for (part, opened) in self.training.iter().enumerate() {
            let found = opened.stream.tokens();
            if self.training.len() > 1 && found < needed {
                return Err(DataError::PartTooSmall { part, found, needed });
            }
        }
        let windows: u64 =
            self.training.iter().map(|part| part.stream.windows(self.sequence)).sum();
        if windows < self.global_batch {
            let found = self.training.iter().map(|part| part.stream.tokens()).sum();
            let needed = self.global_batch * self.sequence + 1;
            return Err(DataError::TooSmall { found, needed });
        }
        Ok(())
    }

    /// BLAKE3 over names, sizes and contents, and over how they are read; hex.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Training and held-out files and tokens.
    pub fn sizes(&self) -> [(usize, u64); 2] {
        [&self.training, &self.held_out].map(|parts| {
            let files = parts.iter().map(|part| part.origins.len()).sum();
            (files, parts.iter().map(|part| part.stream.tokens()).sum())
        })
    }

    /// Training and held-out documents.
    pub fn documents(&self) -> [u64; 2] {
        [&self.training, &self.held_out]
            .map(|parts| parts.iter().map(|part| part.stream.documents()).sum())
    }

    /// Names of the files that have held-out tokens.
    pub fn held_out_names(&self) -> Vec<String> {
        let origins = self.held_out.iter().flat_map(|part| &part.origins);
        origins.map(|origin| String::from_utf8_lossy(&origin.name).into_owned()).collect()
    }

    /// Held-out files whose content is trained on as well, each with the name that it has there:
    /// the held-out loss says less then. The parts of one file that is divided are no such.
    pub fn overlaps(&self) -> Vec<(String, String)> {
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        let mut trained: HashMap<[u8; 32], Vec<(usize, &Origin)>> = HashMap::new();
        for (index, part) in self.training.iter().enumerate() {
            for origin in &part.origins {
                trained.entry(origin.content).or_default().push((index, origin));
            }
        }
        let mut found = Vec::new();
        for (index, part) in self.held_out.iter().enumerate() {
            for origin in &part.origins {
                let twins = trained.get(&origin.content).into_iter().flatten();
                let twin = twins.into_iter().find(|(of, twin)| {
                    self.held_out_apart || *of != index || twin.name != origin.name
                });
                if let Some((_, twin)) = twin {
                    found.push((text(&origin.name), text(&twin.name)));
                }
            }
        }
        found
    }

    /// What is held out and trained on as well, files and documents.
    ///
    /// # Errors
    /// The file of the documents' tokens cannot be read.
    pub fn all_overlaps(&self) -> Result<Overlaps, DataError> {
        if let Some((desk, _)) = &self.elsewhere {
            return desk.overlaps(&self.over());
        }
        let mut named = self.overlaps();
        let files = named.len();
        named.truncate(OVERLAPS_NAMED);
        let (documents, doubts) = (self.document_overlap()?, doubts::of(self));
        Ok(Overlaps { files, named, documents, doubts })
    }

    /// What it is read by: its clock, its progress, and whether it stumbles.
    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Whether nobody waits for what is read.
    fn over(&self) -> impl Fn() -> bool + use<> {
        let disk = self.disk.clone();
        move || disk.progress().is_given_up()
    }

    /// Tokens of a sequence.
    pub fn sequence(&self) -> usize {
        self.sequence as usize
    }

    /// Tokens of a micro-batch.
    pub(crate) fn micro_batch_tokens(&self) -> usize {
        (self.micro_batch * self.sequence) as usize
    }

    /// Held-out documents that are trained on as well, of those that were tokenised here.
    ///
    /// # Errors
    /// The file of their tokens cannot be read.
    pub fn document_overlap(&self) -> Result<DocumentOverlap, DataError> {
        overlap::overlap(&self.training, &self.held_out)
    }

    /// Ids and targets, [sequences, S] each, of micro-batch `index` of step `step`.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    pub fn micro_batch(
        &mut self,
        step: u64,
        index: u32,
        ids: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), DataError> {
        let mut batch = Batch::new(ids.len());
        self.fill_micro_batch(step, index, &mut batch)?;
        ids.copy_from_slice(&batch.ids);
        targets.copy_from_slice(&batch.targets);
        Ok(())
    }

    /// As `micro_batch`, and where documents start if they are kept apart.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    pub fn fill_micro_batch(
        &mut self,
        step: u64,
        index: u32,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        if let Some((desk, _)) = &self.elsewhere {
            return desk.micro_batch((step, index), &self.over(), batch);
        }
        let first = step * self.global_batch + u64::from(index) * self.micro_batch;
        batch.keep_apart(self.reset_at_boundaries);
        for row in 0..self.micro_batch {
            let (part, at) = self.place(first + row);
            let stream = &mut self.training[part].stream;
            batch.row(stream, at, row as usize, self.sequence as usize)?;
        }
        let masks = self.mask_at_boundaries;
        batch.step_targets = masks.then(|| self.targets_of(step)).transpose()?;
        Ok(())
    }

    /// Where training sequence `number` begins: the part, and the token of its stream.
    fn place(&self, number: u64) -> (usize, u64) {
        let (part, sample) = self.mix.sample(number, self.seed);
        let windows = self.training[part].stream.windows(self.sequence);
        // Parts of equal size are not walked in step.
        let seed = self.seed.wrapping_add((part as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let at = permute(sample % windows, windows, seed, sample / windows);
        (part, at * self.sequence)
    }

    /// How many targets of the whole step count. Micro-batches of a step are asked for in a row.
    fn targets_of(&mut self, step: u64) -> Result<u64, DataError> {
        if let Some((_, targets)) = self.step_targets.filter(|(of, _)| *of == step) {
            return Ok(targets);
        }
        let mut targets = 0;
        for number in step * self.global_batch..(step + 1) * self.global_batch {
            let (part, at) = self.place(number);
            targets += self.training[part].stream.targets(at, self.sequence as usize)?;
        }
        self.step_targets = Some((step, targets));
        Ok(targets)
    }

    /// Held-out windows that one measurement of at most `most` uses.
    pub fn held_out_sequences(&self, most: u32) -> u32 {
        self.held_out_windows().min(most.into()) as u32
    }

    fn held_out_windows(&self) -> u64 {
        if let Some((_, windows)) = &self.elsewhere {
            return *windows;
        }
        self.held_out.iter().map(|part| part.stream.windows(self.sequence)).sum()
    }

    /// Ids and targets of the held-out sequences `first ..`, as many as `batch` has room for.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    pub fn fill_held_out(&mut self, first: u32, batch: &mut Batch) -> Result<(), DataError> {
        if let Some((desk, _)) = &self.elsewhere {
            return desk.held_out(first, &self.over(), batch);
        }
        let windows = self.held_out_windows();
        let sequence = self.sequence as usize;
        batch.keep_apart(self.reset_at_boundaries);
        for row in 0..batch.ids.len() / sequence {
            let sample = u64::from(first) + row as u64;
            let at = permute(sample, windows, self.seed, HELD_OUT_EPOCH);
            Corpus::window(&mut self.held_out, at, row, sequence, batch)?;
        }
        Ok(())
    }

    /// Training windows in all.
    pub fn windows(&self) -> u64 {
        self.training.iter().map(|part| part.stream.windows(self.sequence)).sum()
    }

    /// The training windows `first ..` in the order in which they lie, as many as `batch` has room
    /// for: what an evaluation reads.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    pub fn fill_in_order(&mut self, first: u64, batch: &mut Batch) -> Result<(), DataError> {
        let sequence = self.sequence as usize;
        batch.keep_apart(self.reset_at_boundaries);
        for row in 0..batch.ids.len() / sequence {
            let at = first + row as u64;
            Corpus::window(&mut self.training, at, row, sequence, batch)?;
        }
        Ok(())
    }

    /// Window `at` of all parts' windows, one part after the other.
    fn window(
        parts: &mut [Part],
        mut at: u64,
        row: usize,
        sequence: usize,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        for part in parts {
            let windows = part.stream.windows(sequence as u64);
            if at < windows {
                return batch.row(&mut part.stream, at * sequence as u64, row, sequence);
            }
            at -= windows;
        }
        panic!("a window behind the last");
    }
}

fn is_tokenized(source: &DataSource) -> bool {
    matches!(source, DataSource::Tokens { .. } | DataSource::Megatron { .. })
}

/// Whether one of the sources, or of their parts, is `wanted`.
fn any(data: &DataConfig, wanted: &dyn Fn(&DataSource) -> bool) -> bool {
    let one = |source: &DataSource| match source {
        DataSource::Mixture { parts } => parts.iter().any(|part| wanted(&part.source)),
        source => wanted(source),
    };
    one(&data.source) || data.held_out.as_ref().is_some_and(one)
}
