//! The adopted control stream: one task that reads, one that writes.
//!
//! ```text
//! send -> reports (bounded) -> writer -> leader
//!  `-> newest step, where steps come fast ---^
//! ```
//! A job may do thousands of steps a second. Its leader hears of the newest one, so many times a
//! second as it can read by far: what waits in sockets would be minutes old.

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
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// Reports that wait for the leader to read; a leader that lets so many wait is lost.
const REPORTS_MAX: usize = 256;
/// A leader heartbeats every 500 ms; silence for as long as its lease lasts means that it is cut
/// off or replaced.
const LEADER_SILENCE_MS: u64 = 10_000;

/// So many steps in a row are told each, and then so many a second. The leader reads 500 frames a
/// second of a job.
const STEPS_AT_ONCE: f64 = 100.0;
const STEPS_A_SECOND: f64 = 50.0;

pub struct Link {
    pub number: u64,
    reports: mpsc::Sender<Frame<Up>>,
    steps: Arc<Steps>,
    reader: JoinHandle<()>,
    /// Taken by `finish`.
    writer: Option<JoinHandle<()>>,
}

/// Steps that are on their way. Whoever puts a report into the queue, or takes the newest step
/// because the queue is empty, holds the lock, so that the order of all stays.
#[derive(Debug)]
struct Steps {
    state: Mutex<Allowed>,
    /// There is a newest one.
    came: Notify,
}

#[derive(Debug)]
struct Allowed {
    /// The one that is told next, unless another comes before.
    newest: Option<Frame<Up>>,
    /// How many may be told now, at that time.
    left: f64,
    at: Instant,
}

impl Steps {
    fn new() -> Steps {
        let allowed = Allowed { newest: None, left: STEPS_AT_ONCE, at: Instant::now() };
        Steps { state: Mutex::new(allowed), came: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Allowed> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Allowed {
    /// Whether a step may be told now, which is done then.
    fn take(&mut self) -> bool {
        let now = Instant::now();
        let passed = now.duration_since(self.at).as_secs_f64();
        self.left = (self.left + passed * STEPS_A_SECOND).min(STEPS_AT_ONCE);
        self.at = now;
        let has = self.left >= 1.0;
        self.left -= f64::from(u8::from(has));
        has
    }

    /// When that is so again, in whole milliseconds, as clocks tell them.
    fn due(&self) -> Instant {
        let milliseconds = 1e3 * (1.0 - self.left).max(0.0) / STEPS_A_SECOND;
        self.at + Duration::from_millis(milliseconds as u64 + 1)
    }
}

impl Link {
    pub fn start(
        number: u64,
        stream: impl AsyncRead + AsyncWrite + Send + 'static,
        happened: mpsc::Sender<Happened>,
    ) -> Link {
        let (from, to) = tokio::io::split(stream);
        let (reports, queue) = mpsc::channel(REPORTS_MAX);
        let steps = Arc::new(Steps::new());
        let reader = tokio::spawn(read(number, from, happened.clone()));
        let to_leader = Writer { number, queue, steps: Arc::clone(&steps), happened };
        let writer = Some(tokio::spawn(to_leader.write(to)));
        Link { number, reports, steps, reader, writer }
    }

    /// # Errors
    /// Why the leader does not hear any more.
    pub fn send(&self, term: u64, attempt: u32, mut body: Up) -> Result<(), String> {
        body.cut();
        // What was measured at a step is told whatever comes after it.
        let replaces = matches!(&body, Up::Step(report) if report.validation_loss.is_none());
        let frame = Frame { v: PROTOCOL_VERSION, term, attempt, body };
        let mut steps = self.steps.lock();
        let many = self.reports.capacity() <= REPORTS_MAX / 2;
        if replaces && !self.reports.is_closed() && (many || !steps.take()) {
            steps.newest = Some(frame);
            self.steps.came.notify_one();
            return Ok(());
        }
        let before = steps.newest.take().filter(|_| !replaces);
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
    steps: Arc<Steps>,
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
        loop {
            let due = {
                let mut steps = self.steps.lock();
                if let Ok(frame) = self.queue.try_recv() {
                    return Some(frame);
                }
                let waits = steps.newest.is_some();
                if waits && (self.queue.is_closed() || steps.take()) {
                    return steps.newest.take();
                }
                waits.then(|| steps.due())
            };
            tokio::select! {
                biased;
                frame = self.queue.recv() => match frame {
                    Some(frame) => return Some(frame),
                    // The newest step is the last that is told.
                    None if self.steps.lock().newest.is_some() => {}
                    None => return None,
                },
                () = self.steps.came.notified(), if due.is_none() => {}
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            }
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
    use std::sync::atomic::{AtomicU64, Ordering};

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

    /// Two thousand steps a second for two seconds: the leader is never far behind, and what it
    /// hears is bounded.
    #[tokio::test(start_paused = true)]
    async fn steps_that_come_fast_are_told_as_they_are_and_not_each() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 16);
        let (happened, _lost) = mpsc::channel(16);
        let link = Link::start(1, ours, happened);
        let done = Arc::new(AtomicU64::new(0));
        let newest = Arc::clone(&done);
        let reading = tokio::spawn(async move {
            let (mut told, mut behind) = (Vec::new(), 0);
            while let Ok(frame) = read_frame(&mut theirs, Duration::from_secs(60)).await {
                let frame: Frame<Up> = frame;
                if let Up::Step(report) = frame.body {
                    behind = behind.max(newest.load(Ordering::SeqCst) - report.step);
                    told.push(report.step);
                }
            }
            (told, behind)
        });
        for number in 1..=4_000 {
            done.store(number, Ordering::SeqCst);
            link.send(1, 1, step(number, None)).expect("it is told");
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        link.finish().await;
        let (told, behind) = reading.await.expect("it ends");
        assert!(told.is_sorted() && told.last() == Some(&4_000), "{told:?}");
        assert!((150..400).contains(&told.len()), "{} are told", told.len());
        assert!(behind <= 100, "{behind} steps behind");
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
