//! Records without waiting for storage: lines go to a thread that appends them.
//!
//! Where storage fails, lines wait in memory and are tried again; where they would be too many, the
//! oldest go, and a line says how many.

use crate::attempt::records::{Records, event, print};
use crate::disk::Disk;
use crate::failure::chain;
use moejob_protocol::report::{Detail, Event, EventKind, StepReport};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Lines that wait at most: at 20 steps a second, a storage that is away for ten minutes.
const LINES_MAX: usize = 12_000;
/// Between two tries.
const RETRY: Duration = Duration::from_millis(500);
/// How long the end of an attempt waits for its last lines.
const END_MAX: Duration = Duration::from_secs(2);
const ASIDE_POLL: Duration = Duration::from_millis(5);

#[derive(Clone, Debug)]
enum Line {
    Step(Box<StepReport>),
    Event(Event),
}

/// Lines that wait for the next one who records.
#[derive(Debug, Default)]
pub struct Unwritten(VecDeque<Line>);

/// Rank 0's records of an attempt.
#[derive(Debug)]
pub struct Recorder {
    shared: Arc<Shared>,
    echo: bool,
    /// What is written beside the records, a thread each.
    asides: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<Line>,
    lost: u64,
    /// Times that the file was asked to be made durable, and the newest that was done.
    wanted: u64,
    durable: u64,
    closing: bool,
    ended: bool,
    /// Why lines wait, and whether that was told.
    trouble: Option<String>,
    told: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done`, at most for so long.
    fn wait_until(&self, at_most: Duration, done: impl Fn(&State) -> bool) {
        let end = Instant::now() + at_most;
        let mut state = self.lock();
        while !done(&state) {
            let Some(left) = end.checked_duration_since(Instant::now()) else { return };
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Recorder {
    /// Starts the thread, which opens the files in `directory` when storage lets it. With `echo`
    /// each line is printed as well, whatever storage does.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(directory: PathBuf, attempt: u32, echo: bool) -> std::io::Result<Recorder> {
        Recorder::start_with(Unwritten::default(), Disk::real(), directory, attempt, echo)
    }

    /// The same by way of `disk`, with lines that the one before could not write.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start_with(
        Unwritten(lines): Unwritten,
        disk: Disk,
        directory: PathBuf,
        attempt: u32,
        echo: bool,
    ) -> std::io::Result<Recorder> {
        let state = Mutex::new(State { lines, ..State::default() });
        let shared = Arc::new(Shared { state, ..Shared::default() });
        let theirs = Arc::clone(&shared);
        let work = move || append_all((&disk, &directory), attempt, &theirs);
        std::thread::Builder::new().name("records".to_string()).spawn(work)?;
        Ok(Recorder { shared, echo, asides: Vec::new() })
    }

    /// Ends, and says which lines storage has not taken.
    pub fn end(self) -> Unwritten {
        self.close();
        Unwritten(std::mem::take(&mut self.shared.lock().lines))
    }

    fn close(&self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        self.shared.wait_until(END_MAX, |state| state.ended);
    }

    /// Lets a thread of its own do what touches storage, and what no step needs: storage may hang.
    pub fn aside(&mut self, work: impl FnOnce() + Send + 'static) {
        match std::thread::Builder::new().name("keeps".to_string()).spawn(work) {
            Ok(thread) => self.asides.push(thread),
            Err(error) => tracing::warn!("nothing is written beside the records: {error}"),
        }
    }

    /// Lines cannot be written, or can again, since the last call: told once each.
    pub fn take_news(&self) -> Option<String> {
        let mut state = self.shared.lock();
        let fails = state.trouble.is_some();
        if std::mem::replace(&mut state.told, fails) == fails {
            return None;
        }
        Some(match &state.trouble {
            Some(why) => format!(
                "lines for metrics.jsonl and events.jsonl wait in memory, {LINES_MAX} at most, and \
                 are tried again: {why}"
            ),
            None => "metrics.jsonl and events.jsonl are written again".to_string(),
        })
    }

    pub fn step(&self, report: &StepReport) {
        if self.echo {
            print(report);
        }
        self.push(Line::Step(Box::new(report.clone())));
    }

    pub fn event(&self, event: &Event) {
        if self.echo {
            print(event);
        }
        self.push(Line::Event(event.clone()));
    }

    fn push(&self, line: Line) {
        let mut state = self.shared.lock();
        if state.lines.len() == LINES_MAX {
            state.lines.pop_front();
            state.lost += 1;
        }
        state.lines.push_back(line);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Makes the lines so far durable, for another thread, and waits for it at most `at_most`.
    pub fn flusher(&self, at_most: Duration) -> impl Fn() + Send + use<> {
        let shared = Arc::clone(&self.shared);
        move || {
            let mut state = shared.lock();
            state.wanted += 1;
            let wanted = state.wanted;
            drop(state);
            shared.changed.notify_all();
            shared.wait_until(at_most, |state| state.durable >= wanted || state.ended);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let end = Instant::now() + END_MAX;
        self.close();
        // What hangs is left behind.
        while Instant::now() < end && !self.asides.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(ASIDE_POLL);
        }
    }
}

/// What the thread is to do next.
enum Next {
    Append(Line),
    Sync(u64),
    TellLost(u64),
    End,
}

fn next(shared: &Shared) -> Next {
    let mut state = shared.lock();
    loop {
        if state.lost > 0 {
            return Next::TellLost(std::mem::take(&mut state.lost));
        }
        if let Some(line) = state.lines.pop_front() {
            return Next::Append(line);
        }
        if state.wanted > state.durable {
            return Next::Sync(state.wanted);
        }
        if state.closing {
            return Next::End;
        }
        state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

fn append_all((disk, directory): (&Disk, &std::path::Path), attempt: u32, shared: &Shared) {
    let mut records: Option<Records> = None;
    loop {
        let next = next(shared);
        let done = (|| match &next {
            Next::End => Ok(()),
            Next::Sync(_) => {
                let Some(records) = &records else { return Ok(()) };
                records.sync()
            }
            Next::Append(_) | Next::TellLost(_) => {
                let records = match &mut records {
                    Some(records) => records,
                    none => none.insert(Records::open_on(disk, directory)?),
                };
                match &next {
                    Next::Append(Line::Step(report)) => records.step(report),
                    Next::Append(Line::Event(event)) => records.event(event),
                    Next::TellLost(lost) => records.event(&lost_event(attempt, *lost)),
                    Next::Sync(_) | Next::End => Ok(()),
                }
            }
        })();
        let mut state = shared.lock();
        let failed = done.is_err();
        match (&done, &next) {
            (Err(error), _) => state.trouble = Some(chain(error)),
            (Ok(()), Next::Append(_) | Next::TellLost(_)) => state.trouble = None,
            (Ok(()), Next::Sync(_) | Next::End) => {}
        }
        match next {
            Next::End => {
                state.ended = true;
                shared.changed.notify_all();
                return;
            }
            // Whoever waits for it goes on: it was tried.
            Next::Sync(wanted) => state.durable = wanted,
            Next::Append(line) if failed => state.lines.push_front(line),
            Next::TellLost(lost) if failed => state.lost += lost,
            Next::Append(_) | Next::TellLost(_) => {}
        }
        shared.changed.notify_all();
        if failed {
            // Opened anew: that cuts what was written of the line.
            records = None;
            if state.closing {
                state.ended = true;
                shared.changed.notify_all();
                return;
            }
            let waited = shared.changed.wait_timeout_while(state, RETRY, |state| !state.closing);
            drop(waited);
        }
    }
}

fn lost_event(attempt: u32, lost: u64) -> Event {
    let message = format!("{lost} lines of the records were lost while storage failed");
    let details = [("lines", Detail::Number(lost))];
    event(attempt, EventKind::Warning, "RecordsLost", message, details)
}
