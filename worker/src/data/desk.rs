//! Data that a worker has open for its engines: each asks at a desk, some shared memory, and a
//! thread of the worker answers there.
//!
//! ```text
//! engine: feeder, validation -> question -> worker: corpus, opened once -> batch in shared memory
//!
//! 0 u32 turn | 4 u32 closed | 8 u32 kind | 12 u32 index | 16 u64 first | 24 u32 tokens
//! 32 u32 how it was answered | 36 u32 bytes | 40 u64 targets of the step | 4096 the answer
//! ```
//! The feeder of an engine asks two steps ahead, so no step waits for a desk. One side alone writes
//! at a time, as the turn says. An engine that is killed at any instruction leaves a desk that
//! nobody uses again.

use super::{Batch, Corpus, DataError, DocumentOverlap, Listing};
use crate::disk::{Disk, Progress};
use crate::failure::Failure;
use crate::gang::memory::Mapping;
use moejob_protocol::config::TrainingConfig;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::thread::futex::{self, Timespec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const TURN: usize = 0;
const CLOSED: usize = 4;
const KIND: usize = 8;
const INDEX: usize = 12;
const FIRST: usize = 16;
const TOKENS: usize = 24;
const HOW: usize = 32;
const BYTES: usize = 36;
const STEP_TARGETS: usize = 40;
const ANSWER: usize = 4096;

/// All targets count.
const ALL: u64 = u64::MAX;

const NOBODYS: u32 = 0;
const ASKED: u32 = 1;
const ANSWERED: u32 = 2;

const TEXT: u32 = 0;
const TOKENS_ALONE: u32 = 1;
const TOKENS_AND_STARTS: u32 = 2;
const FAILED: u32 = 3;

/// For what is no batch. Pages that no answer reaches cost nothing.
const TEXT_BYTES_MAX: usize = 1 << 20;
/// So often the engine looks whether its attempt is over, while it waits.
const ENGINE_LOOKS: Duration = Duration::from_millis(20);
/// So often the worker looks whether its desk was closed.
const WORKER_LOOKS: Duration = Duration::from_secs(1);

/// Files and documents that are held out and trained on, too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlaps {
    pub files: usize,
    /// The first of them, each with the name that it is trained on by.
    pub named: Vec<(String, String)>,
    pub documents: DocumentOverlap,
    /// What else is to be told of the data, a sentence each.
    pub doubts: Vec<String>,
}

/// What an engine must know of data that it does not open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Facts {
    fingerprint: String,
    held_out_windows: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    Facts,
    Overlaps,
    MicroBatch { step: u64, index: u32 },
    HeldOut { first: u32 },
    Listing,
}

/// Shared memory between one engine and its worker; a clone is the same desk.
#[derive(Clone, Debug)]
pub struct Desk {
    memory: Arc<Mapping>,
    /// Of the threads of an engine one asks at a time.
    asking: Arc<Mutex<()>>,
}

impl Desk {
    /// For batches of a micro-batch at most.
    ///
    /// # Errors
    /// The system gives no memory.
    pub fn new(training: &TrainingConfig) -> io::Result<Desk> {
        let tokens = training.micro_batch_size as usize * training.sequence_length as usize;
        let room = TEXT_BYTES_MAX.max(tokens * 3 * 4);
        let memory = Arc::new(Mapping::shared("moejob-data", ANSWER + room)?);
        Ok(Desk { memory, asking: Arc::default() })
    }

    /// The desk that a worker has made.
    ///
    /// # Errors
    /// It is none.
    pub fn attach(file: OwnedFd) -> io::Result<Desk> {
        let memory = Arc::new(Mapping::attach(file)?);
        if memory.len() < ANSWER + TEXT_BYTES_MAX {
            return Err(io::Error::other("a desk that is too small"));
        }
        Ok(Desk { memory, asking: Arc::default() })
    }

    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.memory.file()
    }

    fn get(&self, field: usize) -> u32 {
        self.memory.word(field).load(Ordering::SeqCst)
    }

    fn set(&self, field: usize, value: u32) {
        self.memory.word(field).store(value, Ordering::SeqCst);
    }

    fn give_turn(&self, to: u32) {
        self.set(TURN, to);
        self.wake();
    }

    fn wake(&self) {
        let _ = futex::wake(self.memory.word(TURN), futex::Flags::empty(), u32::MAX >> 1);
    }

    /// Waits for this turn; false where `over` says so first.
    fn wait_for(&self, turn: u32, looks: Duration, over: &dyn Fn() -> bool) -> bool {
        let most = Timespec::try_from(looks).ok();
        loop {
            let now = self.get(TURN);
            if now == turn {
                return true;
            }
            if over() || self.get(CLOSED) != 0 {
                return false;
            }
            let word = self.memory.word(TURN);
            let _ = futex::wait(word, futex::Flags::empty(), now, most.as_ref());
        }
    }

    fn room(&self) -> usize {
        self.memory.len() - ANSWER
    }

    fn text(&self) -> Vec<u8> {
        let mut text = vec![0; (self.get(BYTES) as usize).min(self.room())];
        self.memory.read(ANSWER, &mut text);
        text
    }

    fn numbers(&self, place: usize, into: &mut [u32]) {
        let mut bytes = vec![0; into.len() * 4];
        self.memory.read(ANSWER + place * bytes.len(), &mut bytes);
        let (words, _) = bytes.as_chunks::<4>();
        into.iter_mut().zip(words).for_each(|(number, word)| *number = u32::from_le_bytes(*word));
    }

    fn put_numbers(&self, place: usize, from: &[u32]) {
        let bytes: Vec<u8> = from.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.memory.write(ANSWER + place * bytes.len(), &bytes);
    }
}

/// The engine's side.
impl Desk {
    /// Asks, and has the answer read while the desk is this thread's. A wait that was given up
    /// leaves the desk closed.
    fn ask<T>(
        &self,
        question: Question,
        tokens: usize,
        over: &dyn Fn() -> bool,
        read: impl FnOnce(u32) -> Result<T, DataError>,
    ) -> Result<T, DataError> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(tokens * 3 * 4 <= self.room(), "a batch of {tokens} tokens at a smaller desk");
        if !self.wait_for(NOBODYS, ENGINE_LOOKS, over) {
            return Err(DataError::GivenUp);
        }
        let (kind, first, index) = match question {
            Question::Facts => (0, 0, 0),
            Question::Overlaps => (1, 0, 0),
            Question::MicroBatch { step, index } => (2, step, index),
            Question::HeldOut { first } => (3, first.into(), 0),
            Question::Listing => (4, 0, 0),
        };
        self.set(KIND, kind);
        self.set(INDEX, index);
        self.memory.long(FIRST).store(first, Ordering::SeqCst);
        self.set(TOKENS, tokens as u32);
        self.give_turn(ASKED);
        if !self.wait_for(ANSWERED, ENGINE_LOOKS, over) {
            self.set(CLOSED, 1);
            return Err(DataError::GivenUp);
        }
        let answer = match self.get(HOW) {
            FAILED => Err(match serde_json::from_slice::<Failure>(&self.text()) {
                Ok(failure) => DataError::Elsewhere(failure),
                Err(_) => not_understood(),
            }),
            how => read(how),
        };
        self.give_turn(NOBODYS);
        answer
    }

    fn told<T: DeserializeOwned>(
        &self,
        question: Question,
        over: &dyn Fn() -> bool,
    ) -> Result<T, DataError> {
        self.ask(question, 0, over, |how| match how {
            TEXT => serde_json::from_slice(&self.text()).map_err(|_| not_understood()),
            _ => Err(not_understood()),
        })
    }

    fn batch(
        &self,
        question: Question,
        over: &dyn Fn() -> bool,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        let tokens = batch.ids.len();
        self.ask(question, tokens, over, |how| {
            batch.keep_apart(how == TOKENS_AND_STARTS);
            if !matches!(how, TOKENS_ALONE | TOKENS_AND_STARTS) {
                return Err(not_understood());
            }
            self.numbers(0, &mut batch.ids);
            self.numbers(1, &mut batch.targets);
            let targets = self.memory.long(STEP_TARGETS).load(Ordering::SeqCst);
            batch.step_targets = (targets != ALL).then_some(targets);
            if let Some(starts) = &mut batch.starts {
                self.numbers(2, starts);
            }
            Ok(())
        })
    }

    pub(super) fn micro_batch(
        &self,
        (step, index): (u64, u32),
        over: &dyn Fn() -> bool,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        self.batch(Question::MicroBatch { step, index }, over, batch)
    }

    pub(super) fn held_out(
        &self,
        first: u32,
        over: &dyn Fn() -> bool,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        self.batch(Question::HeldOut { first }, over, batch)
    }

    pub(super) fn overlaps(&self, over: &dyn Fn() -> bool) -> Result<Overlaps, DataError> {
        self.told(Question::Overlaps, over)
    }

    pub(super) fn listing(&self) -> Result<Option<Listing>, DataError> {
        self.told(Question::Listing, &|| false)
    }
}

fn not_understood() -> DataError {
    let message = "the worker's answer about the data is not understood";
    DataError::Elsewhere(Failure::new(1, message, "Please report it with the lines above."))
}

impl Corpus {
    /// The data that the worker has open behind `desk`, as a corpus. `over` ends the wait for them,
    /// and for each batch.
    ///
    /// # Errors
    /// The worker could not open them: what it found. `GivenUp`, where `over` said so.
    pub fn behind(
        desk: Desk,
        training: &TrainingConfig,
        over: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Corpus, DataError> {
        let Facts { fingerprint, held_out_windows } = desk.told(Question::Facts, &over)?;
        Ok(Corpus {
            fingerprint,
            disk: Disk::real().counting(Progress::default().until(over)),
            elsewhere: Some((desk, held_out_windows)),
            micro_batch: training.micro_batch_size.into(),
            sequence: training.sequence_length.into(),
            ..Corpus::default()
        })
    }
}

/// The worker's side: answers until the desk is closed. `opened` waits for the data, which all
/// desks of a worker share.
pub fn answer(desk: &Desk, opened: impl Fn() -> Arc<Result<Mutex<Corpus>, Failure>>) {
    // Should this thread end by a panic, nobody waits for it.
    let _closing = Closing(desk.clone());
    while desk.wait_for(ASKED, WORKER_LOOKS, &|| false) {
        let opened = opened();
        let answered = match &*opened {
            Ok(corpus) => {
                let mut corpus = corpus.lock().unwrap_or_else(PoisonError::into_inner);
                desk.answer_from(&mut corpus).map_err(|error| error.failure())
            }
            Err(failure) => Err(failure.clone()),
        };
        let how = answered.unwrap_or_else(|failure| {
            desk.put_text(&failure);
            FAILED
        });
        desk.set(HOW, how);
        desk.give_turn(ANSWERED);
    }
}

/// Closes its desk when it is dropped: nobody will ask there any more.
#[derive(Debug)]
pub struct Closing(pub Desk);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.set(CLOSED, 1);
        self.0.wake();
    }
}

impl Desk {
    fn answer_from(&self, corpus: &mut Corpus) -> Result<u32, DataError> {
        let tokens = self.get(TOKENS) as usize;
        let first = self.memory.long(FIRST).load(Ordering::SeqCst);
        if tokens * 3 * 4 > self.room() {
            return Err(not_understood());
        }
        let mut batch = Batch::new(tokens);
        match self.get(KIND) {
            0 => {
                let fingerprint = corpus.fingerprint().to_string();
                self.put_text(&Facts { fingerprint, held_out_windows: corpus.held_out_windows() });
                return Ok(TEXT);
            }
            1 => {
                self.put_text(&corpus.all_overlaps()?);
                return Ok(TEXT);
            }
            2 => corpus.fill_micro_batch(first, self.get(INDEX), &mut batch)?,
            3 => corpus.fill_held_out(first as u32, &mut batch)?,
            4 => {
                self.put_text(&corpus.listing());
                return Ok(TEXT);
            }
            _ => return Err(not_understood()),
        }
        self.put_numbers(0, &batch.ids);
        self.put_numbers(1, &batch.targets);
        let targets = batch.step_targets.unwrap_or(ALL);
        self.memory.long(STEP_TARGETS).store(targets, Ordering::SeqCst);
        let Some(starts) = &batch.starts else { return Ok(TOKENS_ALONE) };
        self.put_numbers(2, starts);
        Ok(TOKENS_AND_STARTS)
    }

    /// What does not fit is cut, and not understood then.
    fn put_text(&self, what: &impl Serialize) {
        let text = serde_json::to_vec(what).unwrap_or_default();
        let text = &text[..text.len().min(self.room())];
        self.memory.write(ANSWER, text);
        self.set(BYTES, text.len() as u32);
    }
}
