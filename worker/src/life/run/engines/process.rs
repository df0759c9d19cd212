//! An engine that is a process, as its worker holds it.
//!
//! ```text
//! orders -> thread -> socket -> engine -> socket -> thread -> reports, and its end
//!                                 `-- standard error -> thread -> the worker's, and its last words
//! ```

use super::child::{EXIT_DEVICE, EXIT_VICTIM};
use super::wire::{Order, Report, Wire};
use super::{Doing, Name, Said};
use crate::checkpoint::scribe::Scribe;
use crate::data::{Closing, Desk};
use crate::engine::step::ENV_DEVICE;
use crate::gang::comm::Links;
use crate::life::dying::{self, Look};
use crate::life::run::Happened;
use crate::state::slots::Memory;
use moejob_protocol::WorkerConfig;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// Orders that wait: an attempt's snapshots and the attempt itself.
const ORDERS_MAX: usize = 1024;
/// What is kept of the last that an engine wrote.
const LAST_WORDS_MAX: usize = 500;
/// For the rest of its standard error, once it has ended.
const LAST_WORDS_WAIT: Duration = Duration::from_millis(50);

type Sent = (Order, Vec<OwnedFd>);

pub(super) struct Process {
    pid: u32,
    /// Names the process also when its number is another's.
    handle: OwnedFd,
    orders: Orders,
    /// Of the attempt that runs.
    desk: Option<Closing>,
}

/// None once no more are given.
type Orders = Arc<Mutex<Option<SyncSender<Sent>>>>;

/// Whether the engine takes the order: one that has ended says so by itself.
fn give(orders: &Orders, order: Order, files: Vec<OwnedFd>) -> bool {
    let orders = orders.lock().unwrap_or_else(PoisonError::into_inner);
    orders.as_ref().is_none_or(|orders| orders.try_send((order, files)).is_ok())
}

impl Process {
    /// Starts `engine` of this program on `device` of this machine, with more in its environment.
    /// The thread that calls it must live as long as the worker: the engine ends with it. `scribe`
    /// writes its checkpoints.
    ///
    /// # Errors
    /// The system gives no process, thread or socket.
    pub fn start(
        name: Name,
        device: u32,
        environment: Vec<(&'static str, String)>,
        memory: Memory,
        scribe: Arc<Scribe>,
        happened: mpsc::Sender<Happened>,
    ) -> io::Result<Process> {
        let (ours, theirs) = UnixStream::pair()?;
        // The link names the program that runs, whatever lies at its path by now.
        let child = Command::new("/proc/self/exe")
            .arg0(std::env::args_os().next().unwrap_or_else(|| "moejob".into()))
            .arg("engine")
            .arg(std::process::id().to_string())
            .env(ENV_DEVICE, device.to_string())
            .envs(environment)
            .stdin(OwnedFd::from(theirs))
            .stderr(Stdio::piped())
            .spawn()?;
        let mut child = Reaped(child);
        let pid = child.0.id();
        let opened = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let handle = pidfd_open(opened.ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
        let (orders, ordered) = sync_channel(ORDERS_MAX);
        let wire = Wire::new(ours);
        let out = wire.try_clone()?;
        let words = Words::default();
        let thread = |what: &str| {
            std::thread::Builder::new().name(format!("{what}-{}", name.index))
        };
        if let Some(errors) = child.0.stderr.take() {
            let words = words.clone();
            thread("engine-err").spawn(move || pass_on(errors, &words))?;
        }
        thread("engine-out").spawn(move || send(&out, &ordered))?;
        let orders: Orders = Arc::new(Mutex::new(Some(orders)));
        let telling = Arc::clone(&orders);
        // What is not taken is told again, with the next change.
        scribe.tell_to(Box::new(move |told| {
            give(&telling, Order::Wrote(told), Vec::new());
        }));
        memory.engine_begins(name.life);
        let keeps = Keeps { memory: memory.clone(), scribe };
        let work = move || receive(name, wire, child, &words, &keeps, &happened);
        if let Err(error) = thread("engine-in").spawn(work) {
            memory.engine_ended(name.life);
            return Err(error);
        }
        Ok(Process { pid, handle, orders, desk: None })
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// `sources`: what it resumes from, and whether that is another engine's. The data are asked
    /// for at `desk`, which `closing` closes when the attempt is over.
    pub fn train(
        &mut self,
        config: Box<WorkerConfig>,
        links: &Links,
        sources: Vec<(bool, OwnedFd)>,
        (desk, closing): (Desk, Closing),
    ) {
        self.desk = Some(closing);
        let desk = desk.file().map(|file| file.try_clone_to_owned());
        let memory = links.memory().file().map(|file| file.try_clone_to_owned());
        let bell = links.bell().map(|bell| bell.event().try_clone_to_owned());
        let (Some(Ok(memory)), Some(Ok(bell)), Some(Ok(desk))) = (memory, bell, desk) else {
            tracing::error!("the links cannot be handed over");
            return self.kill();
        };
        let train = Order::Train { config, shape: links.shape() };
        let slots = sources.into_iter();
        let slots = slots.map(|(borrowed, source)| (Order::Slot { borrowed }, vec![source]));
        let all = std::iter::once((Order::Forget, Vec::new())).chain(slots);
        for (order, files) in all.chain(std::iter::once((train, vec![memory, bell, desk]))) {
            // One that takes no orders is of no use.
            if !give(&self.orders, order, files) {
                return self.kill();
            }
        }
    }

    /// No more attempts: it ends after the one that runs.
    pub fn end(&self) {
        *self.orders.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub fn kill(&self) {
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
    }
}

/// A process that nobody leaves behind: where it is not waited for it is killed first.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // Both do nothing to one that was waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Whoever drops it has taken note of its end, or has no use for it.
        self.kill();
    }
}

fn send(wire: &Wire, orders: &Receiver<Sent>) {
    while let Ok((order, files)) = orders.recv() {
        let files: Vec<BorrowedFd> = files.iter().map(AsFd::as_fd).collect();
        if wire.send(&order, &files).is_err() {
            return;
        }
    }
    wire.close();
}

/// What of its worker's an engine uses without a word of the worker.
struct Keeps {
    memory: Memory,
    scribe: Arc<Scribe>,
}

fn receive(
    name: Name,
    mut wire: Wire,
    mut child: Reaped,
    words: &Words,
    keeps: &Keeps,
    happened: &mpsc::Sender<Happened>,
) {
    let said = |said| drop(happened.blocking_send(Happened::Engine(name, said)));
    loop {
        if let Some(status) = ends_before_it_speaks(&wire, &mut child.0) {
            said(gone(&Ok(status), words));
            // Its number is its own until it was waited for.
            let _ = child.0.wait();
            keeps.memory.engine_ended(name.life);
            return;
        }
        let next = match wire.receive() {
            Ok(Some(Report::Slot)) => {
                wire.file().and_then(|file| keeps.memory.adopt_from(name.life, file))
            }
            Ok(Some(Report::Closed { slot })) => {
                keeps.memory.engine_closed(name.life, slot);
                Ok(())
            }
            Ok(Some(Report::Asks(ask))) => {
                keeps.scribe.on(ask);
                Ok(())
            }
            Ok(Some(Report::Changed)) => {
                said(Said::Changed);
                Ok(())
            }
            Ok(Some(Report::Device { uuid })) => {
                said(Said::Device { uuid });
                Ok(())
            }
            Ok(Some(Report::Told(event))) => {
                said(Said::Told(event));
                Ok(())
            }
            Ok(Some(Report::Ended { attempt, end })) => {
                said(Said::Ended { attempt, end });
                Ok(())
            }
            Ok(None) => break,
            Err(error) => Err(error),
        };
        if let Err(error) = next {
            tracing::error!(%error, "an engine's report is not understood");
            break;
        }
    }
    // One that closed its socket is of no use.
    let ended = child.0.try_wait().ok().flatten();
    let status = match ended {
        Some(status) => Ok(status),
        None => wait_or_kill(&mut child.0),
    };
    keeps.memory.engine_ended(name.life);
    said(gone(&status, words));
}

fn gone(status: &io::Result<ExitStatus>, words: &Words) -> Said {
    let (how, last_words) = (describe(status), words.last());
    Said::Gone { how, last_words, doing: doing(status) }
}

/// Between two looks at an engine that says nothing.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// So many looks in a row at an engine that a signal has stopped, and it is ended. All others wait
/// for it, and a recovery takes less than what else would be waited for.
const STOPPED_LOOKS: u32 = 15;

/// Waits for the next report. A process that was killed gives its memory back before its files are
/// closed, which takes the kernel seconds where it maps much: it is seen before. One that is
/// stopped is seen, too. Looks are counted and no time, so that a machine that was asleep ends
/// nobody. None: there is something to read, if only the end.
fn ends_before_it_speaks(wire: &Wire, child: &mut Child) -> Option<ExitStatus> {
    let socket = wire.socket();
    let mut stopped = 0;
    loop {
        let mut all = [PollFd::new(&socket, PollFlags::IN)];
        match poll(&mut all, Some(&LOOK_EVERY)) {
            Ok(0) => {}
            Err(Errno::INTR) => continue,
            Ok(_) | Err(_) => return None,
        }
        match dying::look(child.id()) {
            Look::Ends(status) => return Some(status),
            Look::Runs => stopped = 0,
            Look::Stopped => stopped += 1,
        }
        if stopped == STOPPED_LOOKS {
            tracing::warn!(pid = child.id(), "an engine was stopped by a signal; ending it");
            let _ = child.kill();
        }
    }
}

/// The socket closes a moment before the process can be waited for.
fn wait_or_kill(child: &mut Child) -> io::Result<ExitStatus> {
    const PATIENCE: u32 = 2000;
    for _ in 0..PATIENCE {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    child.kill()?;
    child.wait()
}

fn describe(status: &io::Result<ExitStatus>) -> String {
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, signal) => format!("killed by signal {}", signal.unwrap_or_default()),
        },
        Err(error) => format!("cannot be waited for: {error}"),
    }
}

/// As far as the engine itself knew.
fn doing(status: &io::Result<ExitStatus>) -> Doing {
    match status.as_ref().ok().and_then(ExitStatus::code) {
        Some(EXIT_DEVICE) => Doing::Device,
        Some(EXIT_VICTIM) => Doing::Another,
        _ => Doing::Unknown,
    }
}

/// The last that an engine wrote, and whether it can write no more.
#[derive(Clone, Default)]
struct Words(Arc<(Mutex<(Vec<u8>, bool)>, Condvar)>);

impl Words {
    fn add(&self, line: &[u8]) {
        let (words, _) = &mut *self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        words.extend_from_slice(line);
        words.drain(..words.len().saturating_sub(LAST_WORDS_MAX));
    }

    fn end(&self) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.0.1.notify_all();
    }

    /// Of an engine that ends: what it wrote may still be on its way.
    fn last(&self) -> String {
        let words = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        let more = |(_, ended): &mut (Vec<u8>, bool)| !*ended;
        let waited = self.0.1.wait_timeout_while(words, LAST_WORDS_WAIT, more);
        let (words, _) = waited.unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&words.0).trim().to_string()
    }
}

/// What an engine writes goes where the worker writes.
fn pass_on(errors: impl Read, words: &Words) {
    let mut errors = BufReader::new(errors);
    loop {
        let mut line = Vec::new();
        // A line without end is passed on in pieces.
        match (&mut errors).take(1 << 16).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        let _ = io::stderr().write_all(&line);
        words.add(&line);
    }
    words.end();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_engine_that_says_so_was_ended_by_its_device() {
        let ended = |script: &str| Command::new("sh").args(["-c", script]).status();
        assert_eq!(doing(&ended(&format!("exit {EXIT_DEVICE}"))), Doing::Device);
        assert_eq!(doing(&ended(&format!("exit {EXIT_VICTIM}"))), Doing::Another);
        for script in ["exit 0", "exit 1", "exit 75", "kill -SEGV $$", "kill -KILL $$"] {
            assert_eq!(doing(&ended(script)), Doing::Unknown, "{script}");
        }
        assert_eq!(doing(&Err(io::ErrorKind::NotFound.into())), Doing::Unknown);
    }
}
