//! Bulk data between ranks of two workers, over several streams at once.
//!
//! ```text
//! message -> a part a strand, one after the other in the message
//! part:  thread -> Pipe -> pump -> TLS -> pump -> Pipe -> thread      (a core each on the way)
//! ```
//! One TLS stream gives what one core encrypts. So where a rank's state is large, two workers open
//! more streams for each pair of their ranks: *strands*, each for one direction. Which ones carry a
//! message its sender says where the message would have been ([`Kind::Striped`]), and the
//! receiver needs no word of its own. With a peer that has none, as of an earlier release, all
//! goes where it always went.
//!
//! Nothing else travels in a strand, so a pair of ranks that is slow holds no other one up.

use super::frame::{Header, Kind};
use super::parcel::{Expected, Outbound, Receive, Target};
use super::pipe::Pipe;
use super::{CommError, Lane};
use crate::gang::memory::Signal;
use std::borrow::Cow;
use moejob_protocol::WorkerConfig;
use moejob_protocol::checkpoint::Part;
use moejob_protocol::config::{Backend, Precision};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, ScopedJoinHandle};
use std::time::Duration;

/// Between two ranks, in each direction.
pub const STRANDS_MAX: u32 = 8;
/// Bytes from which on a message is worth a strand more.
const PART_BYTES_MIN: usize = 512 << 10;
/// A rank whose state has fewer bytes needs none.
const STATE_BYTES_MIN: u64 = 64 << 20;
/// How soon who waits at a strand hears that its attempt is over.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Parts begin at such places.
const ALIGNMENT: usize = 4096;

/// Says how many strands there are, whatever [`wanted`] says.
const ENV_STRANDS: &str = "MOEJOB_STRANDS";

/// How many a worker of an attempt wants that has so many processors. Beside GPUs they have little
/// to do, else they compute.
pub fn wanted_by(config: &WorkerConfig, processors: usize) -> u32 {
    let world = config.layout.mesh.world() as usize;
    let ranks = config.ranks.max(1) as usize;
    let float = if config.training.precision == Precision::Fp64 { 8 } else { 4 };
    let state = config.model.numel() * Part::ALL.len() as u64 * float;
    let pairs = ranks * world.saturating_sub(ranks);
    let told = std::env::var(ENV_STRANDS).ok().and_then(|text| text.parse().ok());
    let free = match config.training.compute.backend {
        Backend::Cuda => processors,
        Backend::Cpu => processors / 2,
    };
    told.unwrap_or_else(|| wanted(state / world.max(1) as u64, free, pairs))
}

/// How many strands a worker wants for each pair of ranks: each takes a thread of it in each
/// direction, and all of those of one direction together what processors are free at most.
fn wanted(state_bytes_of_rank: u64, free: usize, pairs: usize) -> u32 {
    if state_bytes_of_rank < STATE_BYTES_MIN || pairs == 0 {
        return 0;
    }
    u32::try_from(free / pairs).unwrap_or(STRANDS_MAX).min(STRANDS_MAX)
}

/// One of them, at either end of its pipe.
#[derive(Clone, Debug)]
pub(super) struct Strand {
    pub pipe: Pipe,
    /// Wakes who writes into the pipe.
    pub room: Signal,
    /// Wakes who takes from it.
    pub more: Signal,
}

impl Strand {
    pub fn new((pipe, room, more): (Pipe, Signal, Signal)) -> Strand {
        Strand { pipe, room, more }
    }

    fn lane(&self) -> Lane {
        Lane { outgoing: self.pipe.clone(), incoming: self.pipe.clone() }
    }

    fn send(&self, mut part: Outbound, check: Check) -> Result<(), CommError> {
        let lane = self.lane();
        while !part.is_done() {
            let seen = self.room.generation();
            check()?;
            if !part.step(&lane)? {
                self.room.wait_for(seen, LOOK_EVERY);
            }
        }
        Ok(())
    }

    fn receive(&self, mut part: Receive, of: &Expected, check: Check) -> Result<(), CommError> {
        let lane = self.lane();
        while !part.is_done() {
            let seen = self.more.generation();
            check()?;
            if !part.step(&lane, of)? {
                self.more.wait_for(seen, LOOK_EVERY);
            }
        }
        Ok(())
    }
}

/// Whether it is worth to go on.
type Check<'a> = &'a (dyn Fn() -> Result<(), CommError> + Sync);

/// A message that goes over strands, a bit each.
pub(super) type Going<'a> = (u32, &'a [u8], u32);
/// One that comes.
pub(super) type Coming<'a> = (u32, &'a mut [u8], u32);

/// All of one rank; a clone is the same.
#[derive(Clone, Debug)]
pub(super) struct Strands {
    rank: u32,
    attempt: u32,
    /// By peer: those that go there, and those that come from there.
    with: Vec<(Vec<Strand>, Vec<Strand>)>,
}

impl Strands {
    pub fn new(rank: u32, attempt: u32, with: Vec<(Vec<Strand>, Vec<Strand>)>) -> Strands {
        Strands { rank, attempt, with }
    }

    /// Which strands a message of so many bytes goes over; none: it goes where it always did.
    pub fn for_message(&self, peer: u32, bytes: usize) -> u32 {
        let most = bytes / PART_BYTES_MIN;
        let open = self.with[peer as usize].0.iter().enumerate();
        let open = open.filter(|(_, strand)| strand.pipe.is_open()).map(|(at, _)| 1u32 << at);
        open.take(most).sum()
    }

    /// The announcement of a message, or the message.
    pub fn announce<'a>(&self, peer: u32, header: Header, bytes: &'a [u8]) -> (Outbound<'a>, u32) {
        match self.for_message(peer, bytes.len()) {
            0 => (Outbound::new(peer, header, Cow::Borrowed(bytes)), 0),
            strands => (Outbound::striped(peer, header, strands), strands),
        }
    }

    /// Carries messages that were announced, by a thread for each part. A part that fails ends no
    /// other: what a lost peer had sent still arrives, and its rank is added to `arrived`.
    ///
    /// # Errors
    /// What `check` says, or of a strand that it is lost.
    pub fn carry(
        &self,
        (number, kind): (u64, Kind),
        going: &[Going],
        coming: Vec<Coming>,
        arrived: &mut Vec<u32>,
        check: Check,
    ) -> Result<(), CommError> {
        if going.is_empty() && coming.is_empty() {
            return Ok(());
        }
        let Strands { rank, attempt, .. } = *self;
        for (peer, _, strands) in &coming {
            self.over(&self.with[*peer as usize].1, *peer, *strands)?;
        }
        // Those that have a thread end where another one got none.
        let refused = Mutex::new(None);
        let check: Check = &|| match lock(&refused).clone() {
            Some(refused) => Err(refused),
            None => check(),
        };
        let no_thread = |error: io::Error| {
            let reason = format!("there is no thread for a strand: {error}");
            lock(&refused).insert(CommError::Aborted { reason }).clone()
        };
        std::thread::scope(|scope| {
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            for (peer, bytes, strands) in going {
                let over = self.over(&self.with[*peer as usize].0, *peer, *strands)?;
                let parts = bytes.chunks(part(bytes.len(), over.len()));
                for (strand, bytes) in over.into_iter().zip(parts) {
                    let length = bytes.len() as u64;
                    let header = Header { attempt, number, source: rank, kind, length };
                    let out = Outbound::new(*peer, header, Cow::Borrowed(bytes));
                    let send = move || strand.send(out, check);
                    let thread = Builder::new().spawn_scoped(scope, send);
                    sent.push(thread.map_err(no_thread)?);
                }
            }
            for (peer, into, strands) in coming {
                let over = self.over(&self.with[peer as usize].1, peer, strands)?;
                let length = part(into.len(), over.len());
                let mut parts = Vec::new();
                for (strand, into) in over.into_iter().zip(into.chunks_mut(length)) {
                    let expected = Expected { attempt, number, source: peer, kind };
                    let receive = Receive::new(peer, Target::Exact(into));
                    let received = move || strand.receive(receive, &expected, check);
                    let thread = Builder::new().spawn_scoped(scope, received);
                    parts.push(thread.map_err(no_thread)?);
                }
                received.push((peer, parts));
            }
            let mut ended = Ok(());
            for (peer, parts) in received {
                let came = all(parts);
                arrived.extend(came.is_ok().then_some(peer));
                ended = ended.and(came);
            }
            ended.and(all(sent))
        })
    }

    fn over<'s>(
        &self,
        all: &'s [Strand],
        peer: u32,
        strands: u32,
    ) -> Result<Vec<&'s Strand>, CommError> {
        if strands.checked_shr(all.len() as u32).unwrap_or(0) != 0 {
            return Err(CommError::Protocol {
                rank: peer,
                found: format!("a message over the strands {strands:#b}"),
                expected: format!("{} of them", all.len()),
            });
        }
        let wanted = |at: &usize| strands >> at & 1 == 1;
        Ok((0..all.len()).filter(wanted).map(|at| &all[at]).collect())
    }

    /// The rank is in the group no more.
    pub fn leave(&self, why: &str) {
        for (going, coming) in &self.with {
            going.iter().for_each(|strand| strand.pipe.end(why));
            coming.iter().for_each(|strand| strand.pipe.refuse(why));
        }
    }
}

/// Waits for all of them.
fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn all(parts: Vec<ScopedJoinHandle<Result<(), CommError>>>) -> Result<(), CommError> {
    let ended = parts.into_iter().map(|part| part.join().expect("copying does not panic"));
    ended.fold(Ok(()), Result::and)
}

/// Bytes of each part but the last of a message of `bytes` over so many strands.
fn part(bytes: usize, strands: usize) -> usize {
    bytes.div_ceil(strands.max(1)).next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strands_are_for_large_states_and_take_free_processors() {
        let state = 11 << 30;
        assert_eq!([0, 1, 4, 8, 64].map(|free| wanted(state, free, 1)), [0, 1, 4, 8, 8]);
        // Two workers of eight ranks each; many workers.
        assert_eq!([32, 96].map(|free| wanted(state, free, 64)), [0, 1]);
        assert_eq!(wanted(1 << 20, 64, 1), 0);
        assert_eq!(wanted(state, 64, 0), 0);
    }

    #[test]
    fn parts_cover_a_message() {
        for bytes in [1, 4096, 4097, 1 << 20, (11 << 20) + 3] {
            for strands in 1..=8 {
                let part = part(bytes, strands);
                assert!(part * strands >= bytes && bytes.div_ceil(part) <= strands);
            }
        }
    }
}
