//! An engine that is a process, as it is inside. It knows its worker alone.
//!
//! ```text
//! socket -> thread -> orders -> main thread: the trainer, one attempt at a time
//!                                 `-> reports -> thread -> socket
//! thread: beats, so that the worker knows one that was stopped
//! ```

use super::thread::run;
use super::wire::{Order, Report, Wire};
use crate::attempt::api::{AttemptEnd, Control, TrainerEvent};
use crate::attempt::trainer::Trainer;
use crate::checkpoint;
use crate::checkpoint::desk::Board;
use crate::data;
use crate::engine::notes;
use crate::engine::step::device_of;
use crate::gang::comm::{Links, Shape};
use crate::life::binding::apply::take_seat;
use crate::state::farewell::OfSlot;
use crate::state::slots::Memory;
use moejob_kernels::cuda::{keep_open, uuid_of, uuid_text};
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::Backend;
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::io;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Reports that wait for the worker; a trainer that has more to say waits.
const REPORTS_MAX: usize = 256;
/// Several within the shortest heartbeat timeout.
const BEAT: Duration = Duration::from_millis(100);
/// The worker is gone.
const EXIT_ALONE: u8 = 75;
/// The device failed, and works again for a new process alone. The worker starts one.
pub(super) const EXIT_DEVICE: i32 = 70;
/// The same, and the device is not to blame: another rank was lost before, or others have memory
/// that it needs.
pub(super) const EXIT_VICTIM: i32 = 71;

struct Training {
    config: Box<WorkerConfig>,
    shape: Shape,
    memory: OwnedFd,
    bell: OwnedFd,
    desk: OwnedFd,
}

/// Set for an engine that will train on a GPU: it opens that one while workers still connect.
pub(super) const ENV_OPENS_GPU: &str = "MOEJOB_OPENS_GPU";

type Reports = SyncSender<(Report, Option<OwnedFd>)>;

/// Runs an engine of the worker with the process id `worker` on the socket that is its standard
/// input.
pub fn main(worker: &str) -> ExitCode {
    match serve(worker) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("moe-worker engine: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(worker: &str) -> io::Result<u8> {
    // Also ends an engine that is stopped. A worker that ended before this line is seen below.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let parent = getppid().map(|pid| pid.as_raw_nonzero().get().to_string());
    if parent.as_deref() != Some(worker) {
        return Ok(EXIT_ALONE);
    }
    // Before there is a second thread, and before memory is touched.
    if let Err(error) = take_seat() {
        eprintln!("moe-worker engine: {error}");
    }
    die_of_faults();
    if std::env::var_os(ENV_OPENS_GPU).is_some() {
        // SAFETY: there is no second thread yet.
        unsafe { notes::begin(device_of(0, 1)) };
    }
    open_gpu();
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let wire = Wire::new(socket);
    let out = wire.try_clone()?;
    let (reports, reported) = sync_channel(REPORTS_MAX);
    let announcing = reports.clone();
    let memory = Memory::of_engine(move |of| announce(of, &announcing));
    let (trainings, ordered) = sync_channel(1);
    let beating = Arc::<Mutex<Option<Control>>>::default();
    let thread = |name: &str| std::thread::Builder::new().name(name.to_string());
    let board = Board::default();
    let asking = reports.clone();
    // Without a worker the process ends by itself.
    let ask = move |ask| drop(asking.send((Report::Asks(ask), None)));
    let desk = checkpoint::Desk::of_engine(ask, board.clone());
    let known = memory.clone();
    thread("orders").spawn(move || receive(wire, &known, &board, &trainings))?;
    thread("reports").spawn(move || send(&out, &reported))?;
    let beats = Arc::clone(&beating);
    thread("beats").spawn(move || beat(&beats))?;
    let mut trainer = Trainer::with_desk(memory, desk);
    while let Ok(training) = ordered.recv() {
        let attempt = training.config.attempt;
        let end = train(&mut trainer, training, &beating, &reports)?;
        if let AttemptEnd::DeviceFailed { message, own } = end {
            // The last words that the worker tells of a lost engine. What the trainer holds of the
            // device is not given back: a driver that failed may never answer.
            eprintln!("{message}");
            // SAFETY: ends the process, without what else would still be called.
            unsafe { libc::_exit(if own { EXIT_DEVICE } else { EXIT_VICTIM }) };
        }
        let report = Report::Ended { attempt, end };
        reports.send((report, None)).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        give_back();
    }
    Ok(0)
}

/// Gives the system what an attempt has freed, which takes 2 ms, while the leader decides. NCCL
/// takes and frees some hundred MB of small pieces for each group of ranks that it connects.
fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// On a thread of its own. An attempt that finds the GPU not open yet opens it, and says what
/// fails.
fn open_gpu() {
    if std::env::var_os(ENV_OPENS_GPU).is_some() {
        let thread = std::thread::Builder::new().name("open-gpu".to_string());
        let began = Instant::now();
        let work = move || {
            let opened = keep_open(device_of(0, 1)).is_ok();
            let seconds = began.elapsed().as_secs_f64();
            tracing::debug!(seconds, opened, "a GPU is opened early");
        };
        let _ = thread.spawn(work);
    }
}

/// The runtime's handler, which tells a stack that overflowed, returns from any other of these
/// signals the first time; one that was sent would change nothing, and a fault would come twice.
fn die_of_faults() {
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: the default disposition runs no code of ours, and no other thread exists yet.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

fn train(
    trainer: &mut Trainer,
    training: Training,
    beating: &Mutex<Option<Control>>,
    reports: &Reports,
) -> io::Result<AttemptEnd> {
    let Training { config, shape, memory, bell, desk } = training;
    trainer.ask_at(data::Desk::attach(desk)?);
    let links = Links::attach(shape, memory, bell)?;
    let rank = config.rank.ok_or_else(|| io::Error::other("an attempt without a rank"))?;
    let control = Control::new(Arc::clone(links.memory()), links.progress(rank));
    control.beat();
    if config.training.compute.backend == Backend::Cuda {
        // Whoever replaces a broken device looks for it by its uuid.
        let uuid = uuid_of(device_of(rank, config.ranks.max(1))).map(uuid_text);
        let _ = reports.send((Report::Device { uuid: uuid.unwrap_or_default() }, None));
    }
    *beating.lock().unwrap_or_else(PoisonError::into_inner) = Some(control.clone());
    let mut out = |event: TrainerEvent| {
        let report = match event {
            // The worker sees what is held.
            TrainerEvent::Held(_) => Report::Changed,
            other => Report::Told(other),
        };
        // Without a worker the process ends by itself.
        let _ = reports.send((report, None));
    };
    Ok(run(trainer, &config, links.comm(rank), &control, &mut out))
}

/// In the order in which slots are made and used, so that the worker has one before it hears of it,
/// and a copy of its file that was sent is closed here before the worker hears that the slot is.
fn announce(of: OfSlot<'_>, reports: &Reports) {
    let report = match of {
        OfSlot::Made(slot) => match slot.file().map(|file| file.try_clone_to_owned()) {
            Some(Ok(file)) => (Report::Slot, Some(file)),
            _ => return,
        },
        OfSlot::Closed(slot) => (Report::Closed { slot }, None),
    };
    // Without a worker the process ends by itself.
    let _ = reports.send(report);
}

/// The end of the orders is the end of the engine, once its attempt is over.
fn receive(
    mut wire: Wire,
    memory: &Memory,
    board: &Board,
    trainings: &SyncSender<Training>,
) {
    let mut next = || -> io::Result<bool> {
        match wire.receive()? {
            None => return Ok(false),
            Some(Order::Forget) => memory.clear(),
            Some(Order::Slot { borrowed: false }) => memory.adopt(wire.file()?)?,
            Some(Order::Slot { borrowed: true }) => memory.borrow(wire.file()?)?,
            Some(Order::Wrote(told)) => board.take_in(told),
            Some(Order::Train { config, shape }) => {
                let (memory, bell, desk) = (wire.file()?, wire.file()?, wire.file()?);
                let training = Training { config, shape, memory, bell, desk };
                return Ok(trainings.send(training).is_ok());
            }
        }
        Ok(true)
    };
    loop {
        match next() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                eprintln!("moe-worker engine: an order is not understood: {error}");
                return;
            }
        }
    }
}

fn send(wire: &Wire, reports: &Receiver<(Report, Option<OwnedFd>)>) {
    while let Ok((report, file)) = reports.recv() {
        let file = file.as_ref().map(AsFd::as_fd);
        if let Err(error) = wire.send(&report, file.as_slice()) {
            eprintln!("moe-worker engine: the worker does not hear: {error}");
            return;
        }
    }
}

fn beat(beating: &Mutex<Option<Control>>) {
    loop {
        std::thread::sleep(BEAT);
        if let Some(control) = &*beating.lock().unwrap_or_else(PoisonError::into_inner) {
            control.beat();
        }
    }
}
