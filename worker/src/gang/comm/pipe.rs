//! A bounded stream of bytes from one rank to another, in shared memory: a ring between two
//! engines, or between an engine and the task that moves its bytes to another worker.
//!
//! ```text
//! 0 u64 written | 64 u64 taken | 128 u32 ended | 132 u32 refused | 136 u64 told
//! 144 u32 open | 256 why it ended | 512 why it was refused | 2048 as many bytes as it holds
//! of a strand's also: 1024 signal of who writes | 1088 signal of who takes
//! ```
//! One end alone writes `written`, the other `taken`, each after the bytes it speaks of. An engine
//! that is killed at any instruction leaves a pipe whose other end can still be used.

use crate::gang::memory::{Bell, Mapping, Signal};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes of one chunk at most. Four TLS records: large enough that a wake costs nothing, small
/// enough that the receiver starts while the sender still copies.
pub const CHUNK_BYTES_MAX: usize = 64 << 10;
/// Bytes that wait in one direction of one pair of ranks at most; the rest waits in the sender. Of
/// many ranks a pipe holds less (`moejob_protocol::memory::pipe_bytes`).
pub const PIPE_BYTES_MAX: usize = moejob_protocol::memory::PIPE_BYTES as usize;

/// Bytes of a pipe that holds so many, in its mapping.
pub const fn span(holds: usize) -> usize {
    DATA + holds
}

const WRITTEN: usize = 0;
const TAKEN: usize = 64;
const ENDED: usize = 128;
const REFUSED: usize = 132;
const TOLD: usize = 136;
const OPEN: usize = 144;
const ENDED_WHY: usize = 256;
const REFUSED_WHY: usize = 512;
const WHY_ROOM: usize = 256;
const WRITER: usize = 1024;
const TAKER: usize = 1088;
const DATA: usize = moejob_protocol::memory::PIPE_HEAD as usize;

/// One end of a pipe, as the other end wakes it.
#[derive(Clone, Debug)]
pub enum Wake {
    /// A rank, which waits for all of its pipes at once.
    Rank(Signal),
    /// The data thread.
    Mover(Bell),
}

impl Wake {
    fn wake(&self) {
        match self {
            Wake::Rank(signal) => signal.notify(),
            Wake::Mover(bell) => bell.ring(),
        }
    }
}

/// What `Pipe::read` found.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// So many bytes.
    Some(usize),
    Empty,
    /// The producer ended, and everything before its end was taken.
    Ended { why: String },
}

/// Single producer, single consumer; a clone is the same pipe.
#[derive(Clone, Debug)]
pub struct Pipe {
    memory: Arc<Mapping>,
    at: usize,
    /// Bytes that it holds.
    holds: usize,
    producer: Wake,
    consumer: Wake,
}

impl Pipe {
    /// The pipe at `at` of `memory`, which is zero there before its first use.
    pub fn new(
        memory: Arc<Mapping>,
        (at, holds): (usize, usize),
        [producer, consumer]: [Wake; 2],
    ) -> Pipe {
        assert!(at + span(holds) <= memory.len(), "a pipe beyond its memory");
        Pipe { memory, at, holds, producer, consumer }
    }

    /// The same of a strand, at whose ends a thread each waits for it alone: with what wakes the
    /// one that writes and the one that takes.
    pub fn alone(memory: Arc<Mapping>, at: usize) -> (Pipe, Signal, Signal) {
        let signal = |field| Signal::new(Arc::clone(&memory), at + field);
        let (writer, taker) = (signal(WRITER), signal(TAKER));
        let ends = [Wake::Rank(writer.clone()), Wake::Rank(taker.clone())];
        (Pipe::new(memory, (at, PIPE_BYTES_MAX), ends), writer, taker)
    }

    /// Bytes that it holds.
    pub fn holds(&self) -> usize {
        self.holds
    }

    /// Its mover hears of what an engine has taken by these steps: a quarter, so that a sender far
    /// away never waits for room that there is.
    pub fn credit(&self) -> usize {
        self.holds / 4
    }

    fn load(&self, field: usize) -> u64 {
        self.memory.long(self.at + field).load(Ordering::SeqCst)
    }

    fn flag(&self, field: usize) -> bool {
        self.memory.word(self.at + field).load(Ordering::SeqCst) == 1
    }

    /// Bytes between the two positions; what no honest end could have left counts as full.
    fn waiting(&self) -> usize {
        let waiting = self.load(WRITTEN).wrapping_sub(self.load(TAKEN));
        usize::try_from(waiting).map_or(self.holds, |waiting| waiting.min(self.holds))
    }

    /// Bytes that `push` will take now; an error says why the consumer left.
    pub fn space(&self) -> Result<usize, String> {
        if self.flag(REFUSED) {
            return Err(self.memory.read_text(self.at + REFUSED_WHY, WHY_ROOM));
        }
        Ok(self.holds - self.waiting())
    }

    /// Appends what fits into `space`: both parts, in this order, as one.
    pub fn push(&self, first: &[u8], then: &[u8]) {
        let len = first.len() + then.len();
        if self.flag(REFUSED) || len == 0 {
            return;
        }
        assert!(self.waiting() + len <= self.holds, "a chunk beyond the pipe's bound");
        let written = self.load(WRITTEN);
        self.copy_in(written, first);
        self.copy_in(written + first.len() as u64, then);
        self.memory.long(self.at + WRITTEN).store(written + len as u64, Ordering::SeqCst);
        self.consumer.wake();
    }

    fn copy_in(&self, position: u64, bytes: &[u8]) {
        let start = (position % self.holds as u64) as usize;
        let (until_end, rest) = bytes.split_at(bytes.len().min(self.holds - start));
        self.memory.write(self.at + DATA + start, until_end);
        self.memory.write(self.at + DATA, rest);
    }

    /// Takes as many bytes as there are and fit.
    pub fn read(&self, into: &mut [u8]) -> Read {
        // Asked first: what was written before the end is then seen.
        let ended = self.flag(ENDED);
        let len = self.waiting().min(into.len());
        if len == 0 {
            return match ended {
                true => Read::Ended { why: self.memory.read_text(self.at + ENDED_WHY, WHY_ROOM) },
                false => Read::Empty,
            };
        }
        let taken = self.load(TAKEN);
        let start = (taken % self.holds as u64) as usize;
        let (until_end, rest) = into[..len].split_at_mut(len.min(self.holds - start));
        self.memory.read(self.at + DATA + start, until_end);
        self.memory.read(self.at + DATA, rest);
        let taken = taken + len as u64;
        self.memory.long(self.at + TAKEN).store(taken, Ordering::SeqCst);
        match &self.producer {
            Wake::Rank(signal) => signal.notify(),
            Wake::Mover(bell) => {
                let told = self.memory.long(self.at + TOLD);
                if taken.wrapping_sub(told.load(Ordering::Relaxed)) >= self.credit() as u64 {
                    told.store(taken, Ordering::Relaxed);
                    bell.ring();
                }
            }
        }
        Read::Some(len)
    }

    /// Whether `read` would find bytes or an end.
    pub fn has_more(&self) -> bool {
        self.waiting() > 0 || self.flag(ENDED)
    }

    /// Why the producer ended, whatever is still to be taken.
    pub fn ended(&self) -> Option<String> {
        self.flag(ENDED).then(|| self.memory.read_text(self.at + ENDED_WHY, WHY_ROOM))
    }

    /// Bytes that were ever taken.
    pub fn taken(&self) -> u64 {
        self.load(TAKEN)
    }

    /// The producer has no more; what is queued can still be taken. The first reason stays.
    pub fn end(&self, why: &str) {
        self.set(ENDED, ENDED_WHY, why);
        self.consumer.wake();
    }

    /// The consumer takes no more.
    pub fn refuse(&self, why: &str) {
        self.set(REFUSED, REFUSED_WHY, why);
        self.producer.wake();
        // The reader of a stream refuses on behalf of its writer.
        self.consumer.wake();
    }

    /// Two that set it at once say the same in different words; either will do.
    fn set(&self, flag: usize, text: usize, why: &str) {
        if !self.flag(flag) {
            self.memory.write_text(self.at + text, WHY_ROOM, why);
            self.memory.word(self.at + flag).store(1, Ordering::SeqCst);
        }
    }

    /// Whether somebody carries its bytes: of a strand only the worker knows.
    pub fn set_open(&self, open: bool) {
        self.memory.word(self.at + OPEN).store(u32::from(open), Ordering::SeqCst);
    }

    pub fn is_open(&self) -> bool {
        self.flag(OPEN)
    }

    pub fn is_refused(&self) -> bool {
        self.flag(REFUSED)
    }
}
