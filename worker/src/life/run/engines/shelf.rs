//! The data of a worker's engines that are processes: opened once, by a thread of the worker, and
//! kept from one attempt to the next.

use crate::attempt::api::{Control, Shown, Wait};
use crate::attempt::saves::Patience;
use crate::data::{Closing, Corpus, Desk, Listing, answer};
use crate::disk::Disk;
use crate::failure::Failure;
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::{DataConfig, TrainingConfig};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

#[derive(Default)]
pub(super) struct Shelf {
    held: Option<Held>,
    /// The newest attempt: it shows how far the opening is, whichever attempt began that, and
    /// whether reads stumble.
    shown: Shown,
}

/// The data of a job, opened or being opened.
struct Held {
    data: DataConfig,
    training: TrainingConfig,
    vocabulary: u32,
    /// Where the names of its files were kept before.
    kept: Option<PathBuf>,
    opened: Arc<OnceLock<Opened>>,
    unwanted: Arc<AtomicBool>,
    disk: Disk,
}

type Opened = Arc<Result<Mutex<Corpus>, Failure>>;

impl Shelf {
    /// An attempt begins; `control` is its first rank's.
    pub fn begin(&mut self, config: &WorkerConfig, control: Control) {
        // What could not be opened is tried again.
        let is_of = |held: &Held| {
            (&held.data, &held.training) == (&config.data, &config.training)
                && held.vocabulary == config.model.vocab_size
                && held.opened.get().is_none_or(|opened| opened.is_ok())
        };
        if let Some(held) = self.held.as_ref().filter(|held| is_of(held)) {
            return self.shown.begin(control, None, held.disk.trouble());
        }
        let unwanted = Arc::<AtomicBool>::default();
        let given_up = Arc::clone(&unwanted);
        let stamina = Patience::default().of_data(config);
        let is_unwanted = move || given_up.load(Ordering::Relaxed);
        let disk = self.shown.disk(&Disk::real(), stamina, Wait::Data, is_unwanted);
        self.shown.begin(control, None, disk.trouble());
        let held = Held {
            data: config.data.clone(),
            training: config.training.clone(),
            vocabulary: config.model.vocab_size,
            kept: Listing::of_job(config),
            opened: Arc::default(),
            unwanted,
            disk,
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
        let (opened, disk) = (Arc::clone(&held.opened), held.disk.clone());
        let (at, kept) = (desk.clone(), held.kept.clone());
        let open = move || -> Opened {
            let corpus =
                Corpus::open_on(&disk, (&data, kept.as_deref()), &training, vocabulary);
            Arc::new(corpus.map(Mutex::new).map_err(|error| error.failure()))
        };
        let thread = std::thread::Builder::new().name(format!("data-{index}"));
        thread.spawn(move || answer(&at, || Arc::clone(opened.get_or_init(&open))))?;
        Ok((desk.clone(), Closing(desk)))
    }
}
