//! The adopted control stream: one task that reads, one that writes.
//!
//! ```text
//! send -> reports (bounded) -> writer -> leader
//!  `-> newest step, once many reports wait, and where nothing else does --^
//! ```
//! A job may do more steps a second than its leader reads. Then it hears of the newest ones.

use super::Happened;
use crate::life::control::{FrameError, read_frame, write_frame};
use crate::failure::chain;
use crate::gang::comm::{JoinError, Links};
use crate::life::session::Event;
use moejob_protocol::message::Frame;
use moejob_protocol::{PROTOCOL_VERSION, Up};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// Reports that wait for the leader to read; a leader that lets so many wait is lost.
const REPORTS_MAX: usize = 256;
/// A leader heartbeats every 500 ms; silence for as long as its lease lasts means that it is cut
/// off or replaced.
const LEADER_SILENCE_MS: u64 = 10_000;

/// From so many on a step is told in place of the one before it.
const MANY: usize = REPORTS_MAX / 2;

pub struct Link {
    pub number: u64,
    reports: mpsc::Sender<Frame<Up>>,
    newest: Newest,
    reader: JoinHandle<()>,
    /// Taken by `finish`.
    writer: Option<JoinHandle<()>>,
}

/// The step that is told when nothing else waits. Whoever puts a report into the queue, or takes
/// this one because the queue is empty, holds the lock, so that the order of all stays.
type Newest = Arc<Mutex<Option<Frame<Up>>>>;

fn lock(newest: &Newest) -> MutexGuard<'_, Option<Frame<Up>>> {
    newest.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    pub fn start(
        number: u64,
        stream: impl AsyncRead + AsyncWrite + Send + 'static,
        happened: mpsc::Sender<Happened>,
    ) -> Link {
        let (from, to) = tokio::io::split(stream);
        let (reports, queue) = mpsc::channel(REPORTS_MAX);
        let newest = Newest::default();
        let reader = tokio::spawn(read(number, from, happened.clone()));
        let to_leader = Writer { number, queue, newest: Arc::clone(&newest), happened };
        let writer = Some(tokio::spawn(to_leader.write(to)));
        Link { number, reports, newest, reader, writer }
    }

    /// # Errors
    /// Why the leader does not hear any more.
    pub fn send(&self, term: u64, attempt: u32, body: Up) -> Result<(), String> {
        // What was measured at a step is told whatever comes after it.
        let replaces = matches!(&body, Up::Step(report) if report.validation_loss.is_none());
        let frame = Frame { v: PROTOCOL_VERSION, term, attempt, body };
        let mut newest = lock(&self.newest);
        if replaces && self.reports.capacity() <= REPORTS_MAX - MANY && !self.reports.is_closed() {
            *newest = Some(frame);
            return Ok(());
        }
        let before = newest.take().filter(|_| !replaces);
        let mut frames = before.into_iter().chain([frame]);
        frames.try_for_each(|frame| self.reports.try_send(frame)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => format!("{REPORTS_MAX} reports wait"),
            mpsc::error::TrySendError::Closed(_) => "its stream broke".to_string(),
        })
    }

    /// Writes what waits, and closes.
    pub async fn finish(mut self) {
        let (none, _) = mpsc::channel(1);
        self.reports = none;
        if let Some(writer) = self.writer.take() {
            let _ = writer.await;
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.reader.abort();
        if let Some(writer) = &self.writer {
            writer.abort();
        }
    }
}

async fn read(number: u64, mut from: impl AsyncRead + Unpin, happened: mpsc::Sender<Happened>) {
    loop {
        let event = match read_frame(&mut from, Duration::from_millis(LEADER_SILENCE_MS)).await {
            Ok(frame) => Event::Frame(frame),
            // Nothing of a frame was read yet, so the stream can go on.
            Err(FrameError::Silent { .. }) => Event::LeaderSilent,
            Err(error) => Event::LeaderLost { why: chain(&error) },
        };
        let lost = matches!(event, Event::LeaderLost { .. });
        let sent = happened.send(Happened::Link { number, event }).await;
        if lost || sent.is_err() {
            return;
        }
    }
}

struct Writer {
    number: u64,
    queue: mpsc::Receiver<Frame<Up>>,
    newest: Newest,
    happened: mpsc::Sender<Happened>,
}

impl Writer {
    async fn write(mut self, mut to: impl AsyncWrite + Unpin) {
        while let Some(frame) = self.next().await {
            if let Err(error) = write_frame(&mut to, &frame).await {
                let event = Event::LeaderLost { why: chain(&error) };
                let _ = self.happened.send(Happened::Link { number: self.number, event }).await;
                return;
            }
        }
        let _ = to.shutdown().await;
    }

    /// None: nothing comes any more.
    async fn next(&mut self) -> Option<Frame<Up>> {
        let waits = {
            let mut newest = lock(&self.newest);
            self.queue.try_recv().ok().or_else(|| newest.take())
        };
        match waits {
            Some(frame) => Some(frame),
            None => self.queue.recv().await,
        }
    }
}

/// The answer of the data plane, once; pending while nothing joins.
pub async fn wait_for(
    joining: &mut Option<oneshot::Receiver<Result<Links, JoinError>>>,
) -> Result<Links, JoinError> {
    match joining {
        Some(receiver) => {
            let result = receiver.await.unwrap_or(Err(JoinError::Left));
            *joining = None;
            result
        }
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::message::LeftReason;
    use moejob_protocol::report::StepReport;

    fn step(step: u64, validation_loss: Option<f64>) -> Up {
        Up::Step(StepReport { step, validation_loss, ..StepReport::default() })
    }

    /// A leader that reads nothing for a while hears of the newest step, of every one at which
    /// something was measured, and of all that is no step, in order.
    #[tokio::test]
    async fn a_leader_that_is_slow_hears_of_the_newest_step() {
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let (happened, _lost) = mpsc::channel(16);
        let link = Link::start(1, ours, happened);
        for number in 1..=10_000 {
            link.send(1, 1, step(number, (number == 5_000).then_some(2.0))).expect("it waits");
        }
        let left = Up::Left { reason: LeftReason::Asked, held: Vec::new() };
        link.send(1, 1, left.clone()).expect("it waits");
        let reading = tokio::spawn(async move {
            let mut all: Vec<Up> = Vec::new();
            while let Ok(frame) = read_frame(&mut theirs, Duration::from_secs(60)).await {
                let frame: Frame<Up> = frame;
                all.push(frame.body);
            }
            all
        });
        link.finish().await;
        let mut all = reading.await.expect("it ends");
        assert_eq!(all.pop(), Some(left));
        let numbers: Vec<u64> = all
            .iter()
            .map(|up| match up {
                Up::Step(report) => report.step,
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(numbers.is_sorted() && numbers.len() <= REPORTS_MAX, "{numbers:?}");
        assert!(numbers.contains(&5_000) && numbers.last() == Some(&10_000), "{numbers:?}");
        assert!(numbers.starts_with(&[1, 2, 3]), "{numbers:?}");
    }

    /// One that hears nothing at all is lost by what is no step.
    #[tokio::test]
    async fn a_leader_that_does_not_hear_is_lost() {
        let (ours, theirs) = tokio::io::duplex(64);
        let (happened, _lost) = mpsc::channel(16);
        let link = Link::start(1, ours, happened);
        let left = || Up::Left { reason: LeftReason::Asked, held: Vec::new() };
        let refused = (0..1_000).find_map(|_| link.send(1, 1, left()).err());
        assert_eq!(refused, Some("256 reports wait".to_string()));
        drop(theirs);
    }
}
