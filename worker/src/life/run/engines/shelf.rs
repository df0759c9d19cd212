//! The data of a worker's engines that are processes: opened once, by a thread of the worker, and
//! kept from one attempt to the next.

use crate::attempt::api::Control;
use crate::data::{Closing, Corpus, Desk, Progress, answer};
use crate::failure::Failure;
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::{DataConfig, TrainingConfig};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

#[derive(Default)]
pub(super) struct Shelf {
    held: Option<Held>,
    /// The newest attempt: it shows how far the opening is, whichever attempt began that.
    shown: Arc<Mutex<Option<Control>>>,
}

/// The data of a job, opened or being opened.
struct Held {
    data: DataConfig,
    training: TrainingConfig,
    vocabulary: u32,
    opened: Arc<OnceLock<Opened>>,
    unwanted: Arc<AtomicBool>,
}

type Opened = Arc<Result<Mutex<Corpus>, Failure>>;

impl Shelf {
    /// An attempt begins; `control` is its first rank's.
    pub fn begin(&mut self, config: &WorkerConfig, control: Control) {
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = Some(control);
        // What could not be opened is tried again.
        let is_of = |held: &Held| {
            (&held.data, &held.training) == (&config.data, &config.training)
                && held.vocabulary == config.model.vocab_size
                && held.opened.get().is_none_or(|opened| opened.is_ok())
        };
        if self.held.as_ref().is_some_and(is_of) {
            return;
        }
        let held = Held {
            data: config.data.clone(),
            training: config.training.clone(),
            vocabulary: config.model.vocab_size,
            opened: Arc::default(),
            unwanted: Arc::default(),
        };
        if let Some(before) = self.held.replace(held) {
            before.unwanted.store(true, Ordering::Relaxed);
        }
    }

    /// A desk for an engine of the attempt that began, and what closes it.
    ///
    /// # Errors
    /// The system gives no memory or no thread.
    pub fn serve(&self, index: usize) -> io::Result<(Desk, Closing)> {
        let held = self.held.as_ref().ok_or_else(|| io::Error::other("no attempt has begun"))?;
        let desk = Desk::new(&held.training)?;
        let (data, training, vocabulary) =
            (held.data.clone(), held.training.clone(), held.vocabulary);
        let (opened, unwanted) = (Arc::clone(&held.opened), Arc::clone(&held.unwanted));
        let shown = Arc::clone(&self.shown);
        let at = desk.clone();
        let open = move || -> Opened {
            let (shown, unwanted) = (Arc::clone(&shown), Arc::clone(&unwanted));
            let progress = Progress::default().until(move || unwanted.load(Ordering::Relaxed));
            let progress = progress.seen_by(move |counts, life| {
                if let Some(control) = &*shown.lock().unwrap_or_else(PoisonError::into_inner) {
                    control.set_loaded(counts, life);
                }
            });
            let corpus = Corpus::open_telling(&data, &training, vocabulary, &progress);
            Arc::new(corpus.map(Mutex::new).map_err(|error| error.failure()))
        };
        let thread = std::thread::Builder::new().name(format!("data-{index}"));
        thread.spawn(move || answer(&at, || Arc::clone(opened.get_or_init(&open))))?;
        Ok((desk.clone(), Closing(desk)))
    }
}
