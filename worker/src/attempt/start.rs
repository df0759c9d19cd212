//! What an attempt does before its first step, and how long each part of that took.

use moejob_kernels::cuda::Fault;
use moejob_protocol::report::Detail;
use std::time::Instant;

/// The parts, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passage {
    /// Data is opened and compared.
    Data,
    /// The storage is looked into and claimed.
    Storage,
    /// A device is made, with its memory, and connected to the other ranks'.
    Device,
    /// Weights and moments are there.
    State,
}

impl Passage {
    const ALL: [(Passage, &'static str); 4] = [
        (Passage::Data, "dataMs"),
        (Passage::Storage, "storageMs"),
        (Passage::Device, "deviceMs"),
        (Passage::State, "stateMs"),
    ];
}

/// Milliseconds of the parts that were passed.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    since: Instant,
    took: [u64; Passage::ALL.len()],
}

impl Default for Start {
    fn default() -> Start {
        Start { since: Instant::now(), took: Default::default() }
    }
}

impl Start {
    /// All since the last one was `passage`.
    pub fn passed(&mut self, passage: Passage) {
        let now = Instant::now();
        let took = now.duration_since(std::mem::replace(&mut self.since, now));
        self.took[passage as usize] += u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    }

    /// For the event that tells of the start.
    pub fn details(&self) -> impl Iterator<Item = (&'static str, Detail)> + '_ {
        let of = |passage| Detail::Number(self.took[passage as usize]);
        Passage::ALL.iter().map(move |(passage, name)| (*name, of(*passage)))
    }
}

/// For tests of what happens then: `MOEJOB_FAULT=illegal@60/1` breaks the GPU of rank 1 in step 60
/// of a job's first attempt, `hang@60/1` lets it hang, and `illegal@60/1x3` breaks it in each of
/// the first three attempts.
pub(crate) fn fault_of(attempt: u32, rank: u32) -> Option<(u64, Fault)> {
    let wanted = Wanted::parse(&std::env::var(ENV_FAULT).ok()?)?;
    (attempt <= wanted.attempts && rank == wanted.rank).then_some((wanted.step, wanted.fault))
}

pub(crate) const ENV_FAULT: &str = "MOEJOB_FAULT";

/// A fault that a test wants, as [`ENV_FAULT`] says it.
#[derive(Debug)]
pub(crate) struct Wanted {
    fault: Fault,
    step: u64,
    rank: u32,
    /// The first attempts that have it.
    attempts: u32,
}

impl Wanted {
    /// `KIND@STEP/RANK`, or with `xATTEMPTS` behind it.
    pub(crate) fn parse(text: &str) -> Option<Wanted> {
        let (kind, place) = text.split_once('@')?;
        let (step, of) = place.split_once('/')?;
        let (rank, attempts) = of.split_once('x').unwrap_or((of, "1"));
        let fault = match kind {
            "illegal" => Fault::IllegalAddress,
            "hang" => Fault::EndlessKernel,
            _ => return None,
        };
        let (step, rank) = (step.parse().ok()?, rank.parse().ok()?);
        Some(Wanted { fault, step, rank, attempts: attempts.parse().ok()? })
    }
}
