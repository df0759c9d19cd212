//! What ends a worker from outside: signals, and the end of its owner.

use super::Happened;
use std::io::{self, Read};
use tokio::sync::mpsc;
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    /// One of them came.
    any: bool,
}

impl Signals {
    pub fn new() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            any: false,
        })
    }

    /// The terminal is gone for good: a hang-up is the first signal, or none. The second of the
    /// others ends the process at once.
    pub async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => break,
                _ = self.interrupt.recv() => break,
                _ = self.hang_up.recv() => if !self.any { break },
            }
        }
        self.any = true;
    }
}

/// A thread that blocks on the owner's end of a pipe; it ends with the process.
pub(super) fn watch_owner(
    mut owner: impl Read + Send + 'static,
    happened: mpsc::Sender<Happened>,
) -> io::Result<()> {
    let watch = move || {
        let mut ignored = [0; 256];
        loop {
            match owner.read(&mut ignored) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        let _ = happened.blocking_send(Happened::OwnerGone);
    };
    std::thread::Builder::new().name("owner".to_string()).spawn(watch)?;
    Ok(())
}
