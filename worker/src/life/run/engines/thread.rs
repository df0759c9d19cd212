//! An engine that is a thread of the worker: it owns the trainer and runs one attempt at a time.

use super::{Attempt, Doing, Name, Said};
use crate::attempt::api::{AttemptEnd, Control, TrainerEvent};
use crate::failure::Failure;
use crate::gang::comm::Comm;
use crate::life::run::Happened;
use moejob_protocol::WorkerConfig;
use moejob_protocol::message::Phase;
use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc as blocking;
use tokio::sync::mpsc;

struct Order {
    config: Box<WorkerConfig>,
    comm: Comm,
    control: Control,
}

/// Handle of the thread.
pub(super) struct Thread(Option<blocking::SyncSender<Order>>);

impl Thread {
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        name: Name,
        make: impl FnOnce() -> Box<dyn Attempt> + Send + 'static,
        happened: mpsc::Sender<Happened>,
    ) -> io::Result<Thread> {
        let (orders, ordered) = blocking::sync_channel::<Order>(1);
        let body = move || {
            let ended = Gone { name, happened: happened.clone() };
            let mut trainer = make();
            while let Ok(order) = ordered.recv() {
                let attempt = order.config.attempt;
                let mut out = |event| {
                    // A closed queue means that the process ends, and the group is aborted already.
                    let _ = happened.blocking_send(Happened::Engine(name, Said::Told(event)));
                };
                let Order { config, comm, control } = order;
                let end = run(&mut *trainer, &config, comm, &control, &mut out);
                let said = Said::Ended { attempt, end };
                if happened.blocking_send(Happened::Engine(name, said)).is_err() {
                    break;
                }
            }
            drop(trainer);
            drop(ended);
        };
        let thread = std::thread::Builder::new().name(format!("engine-{}", name.index));
        thread.spawn(body)?;
        Ok(Thread(Some(orders)))
    }

    pub fn train(&self, config: Box<WorkerConfig>, comm: Comm, control: Control) {
        if let Some(orders) = &self.0 {
            // A thread that has ended says so by itself.
            let _ = orders.try_send(Order { config, comm, control });
        }
    }

    /// No more attempts: the trainer is dropped after the one that runs.
    pub fn end(&mut self) {
        self.0 = None;
    }
}

/// Says that the thread ended, also when the trainer panicked while it was made or dropped.
struct Gone {
    name: Name,
    happened: mpsc::Sender<Happened>,
}

impl Drop for Gone {
    fn drop(&mut self) {
        let (how, last_words) = ("its thread ended".to_string(), String::new());
        let said = Said::Gone { how, last_words, doing: Doing::Unknown };
        let _ = self.happened.blocking_send(Happened::Engine(self.name, said));
    }
}

/// Runs one attempt. After a panic the trainer is only dropped: the session ends the process.
pub(super) fn run(
    trainer: &mut dyn Attempt,
    config: &WorkerConfig,
    comm: Comm,
    control: &Control,
    out: &mut dyn FnMut(TrainerEvent),
) -> AttemptEnd {
    let attempt = || trainer.run_attempt(config, comm, control, out);
    catch_unwind(AssertUnwindSafe(attempt)).unwrap_or_else(|panic| {
        let message = format!("a bug in the trainer: {}", message(&*panic));
        let failure = Failure::new(1, message, "Please report it with the lines above.");
        let in_step = matches!(control.phase(), Phase::Training | Phase::Validating);
        let step = in_step.then(|| control.step());
        AttemptEnd::Failed(Failure { step, ..failure })
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
