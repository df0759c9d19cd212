//! The device's thread: it owns the trainer and runs one attempt at a time.

use super::Happened;
use crate::gang::comm::Comm;
use crate::attempt::api::{AttemptEnd, Control, Failure, TrainerEvent};
use moejob_protocol::WorkerConfig;
use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc as blocking;
use tokio::sync::mpsc;

/// A trainer, as the shell sees it. It keeps its state from one attempt to the next.
pub trait Attempt {
    fn run_attempt(
        &mut self,
        config: &WorkerConfig,
        comm: Comm,
        control: &Control,
        out: &mut dyn FnMut(TrainerEvent),
    ) -> AttemptEnd;
}

struct Order {
    config: Box<WorkerConfig>,
    comm: Comm,
    control: Control,
}

/// Handle of the device's thread.
pub struct Device(Option<blocking::SyncSender<Order>>);

impl Device {
    /// # Errors
    /// When the system gives no thread.
    pub fn start<A: Attempt>(
        happened: mpsc::Sender<Happened>,
        make: impl FnOnce() -> A + Send + 'static,
    ) -> io::Result<Device> {
        let (orders, ordered) = blocking::sync_channel::<Order>(1);
        let body = move || {
            let ended = Ended(happened.clone());
            let mut trainer = make();
            while let Ok(order) = ordered.recv() {
                let attempt = order.config.attempt;
                let end = run(&mut trainer, order, &happened);
                let end = Happened::AttemptEnded { attempt, end };
                if happened.blocking_send(end).is_err() {
                    break;
                }
            }
            drop(trainer);
            drop(ended);
        };
        std::thread::Builder::new().name("device".to_string()).spawn(body)?;
        Ok(Device(Some(orders)))
    }

    /// The thread is idle: the session starts an attempt only after the one before has ended.
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
struct Ended(mpsc::Sender<Happened>);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.blocking_send(Happened::DeviceEnded);
    }
}

fn run<A: Attempt>(
    trainer: &mut A,
    order: Order,
    happened: &mpsc::Sender<Happened>,
) -> AttemptEnd {
    let Order { config, comm, control } = order;
    let mut out = |event| {
        // A closed queue means that the process ends, and the group is aborted already.
        let _ = happened.blocking_send(Happened::Trainer(event));
    };
    let attempt = || trainer.run_attempt(&config, comm, &control, &mut out);
    // After a panic the trainer is only dropped: the session ends the process.
    catch_unwind(AssertUnwindSafe(attempt)).unwrap_or_else(|panic| {
        AttemptEnd::Failed(Failure {
            exit_code: 1,
            message: format!("a bug in the trainer: {}", message(&*panic)),
            advice: "Please report it with the lines above.".to_string(),
        })
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}
