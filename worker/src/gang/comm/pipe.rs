//! A bounded stream of bytes between the device's thread and whoever moves the bytes on: a task
//! of the data runtime, or (in tests of exactness) another rank's thread.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Bytes of one chunk at most. Four TLS records: large enough that locks cost nothing, small
/// enough that the receiver starts while the sender still copies.
pub const CHUNK_BYTES_MAX: usize = 64 << 10;
/// Bytes that wait in one direction of one peer at most; the rest waits in the kernel's socket
/// buffers and then in the sender.
pub const PIPE_BYTES_MAX: usize = moejob_protocol::memory::PIPE_BYTES as usize;

/// Wakes a thread that waits for several pipes at once.
#[derive(Debug, Default)]
pub struct Signal {
    generation: Mutex<u64>,
    changed: Condvar,
}

impl Signal {
    pub fn generation(&self) -> u64 {
        *lock(&self.generation)
    }

    pub fn notify(&self) {
        *lock(&self.generation) += 1;
        self.changed.notify_all();
    }

    /// Returns once `notify` was called after `generation` gave `seen`.
    pub fn wait(&self, seen: u64) {
        let mut now = lock(&self.generation);
        while *now == seen {
            now = self.changed.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// One end of a pipe, as the other end wakes it.
#[derive(Clone, Debug)]
pub enum Wake {
    Thread(Arc<Signal>),
    Task(Arc<Notify>),
}

impl Wake {
    fn wake(&self) {
        match self {
            Wake::Thread(signal) => signal.notify(),
            // One permit is kept when nobody waits yet, so no wake is lost.
            Wake::Task(notify) => notify.notify_one(),
        }
    }

    fn task(&self) -> Arc<Notify> {
        match self {
            Wake::Task(notify) => Arc::clone(notify),
            Wake::Thread(_) => unreachable!("a thread holds this end of the pipe"),
        }
    }
}

#[derive(Debug)]
pub enum Pop {
    Chunk(Vec<u8>),
    Empty,
    /// The producer ended, and everything before its end was taken.
    Ended { why: String },
}

/// Single producer, single consumer.
#[derive(Debug)]
pub struct Pipe {
    state: Mutex<State>,
    producer: Wake,
    consumer: Wake,
}

#[derive(Debug, Default)]
struct State {
    chunks: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Why the producer ended.
    ended: Option<String>,
    /// Why the consumer takes no more.
    refused: Option<String>,
}

impl Pipe {
    pub fn new(producer: Wake, consumer: Wake) -> Arc<Pipe> {
        Arc::new(Pipe { state: Mutex::default(), producer, consumer })
    }

    /// Bytes that `push` will take now; an error says why the consumer left.
    pub fn space(&self) -> Result<usize, String> {
        let state = lock(&self.state);
        match &state.refused {
            Some(why) => Err(why.clone()),
            None => Ok(PIPE_BYTES_MAX - state.bytes),
        }
    }

    /// Appends a chunk that fits into `space`.
    pub fn push(&self, chunk: Vec<u8>) {
        let mut state = lock(&self.state);
        if state.refused.is_some() || chunk.is_empty() {
            return;
        }
        assert!(state.bytes + chunk.len() <= PIPE_BYTES_MAX, "a chunk beyond the pipe's bound");
        state.bytes += chunk.len();
        state.chunks.push_back(chunk);
        drop(state);
        self.consumer.wake();
    }

    pub fn pop(&self) -> Pop {
        let mut state = lock(&self.state);
        let Some(chunk) = state.chunks.pop_front() else {
            return match &state.ended {
                Some(why) => Pop::Ended { why: why.clone() },
                None => Pop::Empty,
            };
        };
        state.bytes -= chunk.len();
        drop(state);
        self.producer.wake();
        Pop::Chunk(chunk)
    }

    /// The producer has no more; what is queued can still be taken.
    pub fn end(&self, why: &str) {
        lock(&self.state).ended.get_or_insert_with(|| why.to_string());
        self.consumer.wake();
    }

    /// The consumer takes no more; what is queued is dropped.
    pub fn refuse(&self, why: &str) {
        let mut state = lock(&self.state);
        state.refused.get_or_insert_with(|| why.to_string());
        state.chunks.clear();
        state.bytes = 0;
        drop(state);
        self.producer.wake();
        // The reader of a stream refuses on behalf of its writer.
        self.consumer.wake();
    }

    pub fn is_refused(&self) -> bool {
        lock(&self.state).refused.is_some()
    }

    /// What wakes the producer, which is a task.
    pub fn producer_task(&self) -> Arc<Notify> {
        self.producer.task()
    }

    /// What wakes the consumer, which is a task.
    pub fn consumer_task(&self) -> Arc<Notify> {
        self.consumer.task()
    }
}

/// No code panics while it holds one of these locks, so a poisoned one holds a whole value.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
