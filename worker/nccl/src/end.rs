//! The end of communicators whose peers may be dead.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::comm::Comm;
use crate::error::Error;
use crate::library::Handle;

/// What a drop waits for an abort: 11 ms after a revoke, half a second without.
pub(crate) const DROP_LIMIT: Duration = Duration::from_secs(2);
/// Behind streams that are empty. An abort that takes longer does not end, as was seen where all of
/// NCCL's sockets had failed; its process is better given up.
const ABORT_LIMIT: Duration = Duration::from_secs(1);
/// Between two looks at the streams.
const PAUSE: Duration = Duration::from_micros(500);

/// Ends communicators in the one order that neither hangs nor costs the CUDA context: all of them
/// are revoked, the streams run empty, captured graphs are destroyed, then all are aborted.
///
/// `comms` are all of this device, since an abort of an idle one does not return while another one
/// spins. `drained` tells whether the streams are empty and does not wait; `graphs` is everything
/// that was captured with the communicators, and is dropped here. Before NCCL 2.28 there is no
/// revoke: aborts then come first, and return when the graphs are gone.
///
/// # Errors
/// [`Error::Unended`]: something still runs after `limit`, or an abort does a second after the
/// streams were empty. Only the end of the process helps.
pub fn abandon<G>(
    comms: Vec<Comm>,
    mut drained: impl FnMut() -> bool,
    graphs: G,
    limit: Duration,
) -> Result<(), Error> {
    let until = Instant::now() + limit;
    let mut comms = comms;
    // One that cannot be revoked at once is aborted before the streams are waited for: on a
    // blocking communicator a revoke waits itself.
    let revoke = |comm: &Comm| !comm.config().blocking && comm.revoke().is_ok();
    let revoked: Vec<bool> = comms.iter().map(revoke).collect();
    let mut ends = Vec::new();
    let mut start = |ends: &mut Vec<Ending>, which: bool| -> Result<(), Error> {
        for (comm, revoked) in comms.iter_mut().zip(&revoked) {
            if *revoked == which {
                ends.push(Ending::start(comm)?);
            }
        }
        Ok(())
    };
    start(&mut ends, false)?;
    // A stream that does not end may still end by the abort, which has the other half.
    let halfway = Instant::now() + limit / 2;
    let mut empty = drained();
    while !empty && Instant::now() < halfway {
        std::thread::sleep(PAUSE);
        empty = drained();
    }
    drop(graphs);
    start(&mut ends, true)?;
    let began = until - limit;
    let until = if empty { until.min(Instant::now() + ABORT_LIMIT) } else { until };
    let left = ends.iter().filter(|end| !end.wait(until)).count();
    while !empty && Instant::now() < until {
        std::thread::sleep(PAUSE);
        empty = drained();
    }
    let limit = until - began;
    match (left, empty) {
        (0, true) => Ok(()),
        (0, false) => Err(Error::Unended { what: "a stream".to_owned(), limit }),
        (left, _) => {
            Err(Error::Unended { what: format!("the abort of {left} communicators"), limit })
        }
    }
}

/// Aborts `comm` and waits for it, at most `limit`; tells whether it is done. Never panics.
pub(crate) fn abort_within(comm: &mut Comm, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    Ending::start(comm).is_ok_and(|end| end.wait(until))
}

/// An abort under way in a thread of its own, because it may never return.
struct Ending {
    done: Receiver<()>,
}

/// A handle that only the thread that got it uses.
struct Last(Handle);

// SAFETY: a communicator may be aborted by any thread; nobody else has the handle any more.
unsafe impl Send for Last {}

impl Ending {
    fn start(comm: &mut Comm) -> Result<Ending, Error> {
        let (told, done) = channel();
        let library = comm.library().clone();
        let config = comm.config().clone();
        let last = Last(comm.take());
        let work = move || {
            let last = last;
            config.enter();
            // SAFETY: the handle is valid and was taken from its owner: it is ended once. What NCCL
            // answers changes nothing, since there is no other way to end it.
            let _ = unsafe { (library.functions().abort)(last.0) };
            let _ = told.send(());
        };
        let thread = std::thread::Builder::new().name("nccl abort".to_owned());
        thread.spawn(work).map_err(|source| Error::Thread { source })?;
        Ok(Ending { done })
    }

    /// Whether it is done, by `until`.
    fn wait(&self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        // A thread that ended without a word is no abort that is under way.
        !matches!(self.done.recv_timeout(left), Err(RecvTimeoutError::Timeout))
    }
}
