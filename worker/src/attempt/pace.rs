//! When state is copied to memory, where nobody said how often.
//!
//! A copy of a GPU's state stalls its steps. So the next one comes when it costs at most half a
//! percent of the time since the last, by what the last one cost. Until one was taken, by what a
//! copy of so many bytes usually costs.

use crate::gang::comm::{Comm, CommError};
use moejob_kernels::memory_bounds::{Bound, BoundSource, MemoryBounds};
use moejob_protocol::memory::{GENERATIONS, host_memory};
use std::time::{Duration, Instant};

/// Time between snapshots over what one costs: 0.5%.
const TIMES: u32 = 200;
/// Bytes a second from a GPU to the memory of its host, before one was measured.
const USUAL: f64 = 2e10;
/// Snapshots may take so much of a machine's memory, which others use as well.
const SHARE: f64 = 0.7;
/// The same of a limit that was made for this worker: its pod asks for what it keeps.
const SHARE_OF_LIMIT: f64 = 0.85;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    since: Instant,
    cost: Duration,
    /// Memory has room for what every worker keeps.
    fits: bool,
}

/// When a checkpoint is due, where nobody said how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saving {
    /// Steps between two, at least, and those done when the last one began.
    every: u64,
    last: u64,
    /// Of copies that are made for a checkpoint alone.
    alone: Pace,
}

/// Bytes of what is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InMemory {
    /// Weights and moments of all ranks together, as snapshots have them.
    pub state: u64,
    /// What of them the ranks of this worker compute with in its memory, beside snapshots.
    pub offloaded: u64,
}

impl Pace {
    /// Of a rank that copies `bytes`, whose worker keeps `kept` bytes where `room` are.
    pub fn new(bytes: u64, kept: u64, room: u64, now: Instant) -> Pace {
        let cost = Duration::from_secs_f64(bytes as f64 / USUAL);
        Pace { since: now, cost, fits: kept <= room }
    }

    /// Of an attempt with the rank in whose memory the snapshot of each lies beside its own. Ranks
    /// own alike, but for the last blocks. One rank without room is enough: a resume from memory
    /// takes all of them.
    ///
    /// # Errors
    /// See [`CommError`]: it is a collective of all ranks.
    pub fn agreed(
        ranks: u32,
        buddies: &[Option<u32>],
        held: InMemory,
        comm: &mut Comm,
    ) -> Result<Pace, CommError> {
        let shard = held.state.div_ceil(buddies.len().max(1) as u64);
        let snapshots = GENERATIONS * shard * kept_with(ranks, buddies, comm.rank());
        let kept = snapshots + held.offloaded;
        let memory = MemoryBounds::of_this_process();
        let processes = host_memory(0, ranks.into(), buddies.len() as u64, &[]);
        let room = room(&memory, processes.iter().map(|part| part.bytes).sum());
        let mut pace = Pace::new(shard, kept, room.unwrap_or(0), Instant::now());
        if !pace.fits {
            let (room, unread) = (room.unwrap_or(0), memory.unread.join("; "));
            tracing::warn!(
                kept,
                room,
                unread,
                "no copies of the state are kept in memory, which has no room for them: a loss \
                 goes back to the last checkpoint"
            );
        }
        let said = comm.gather_all(&[u8::from(pace.fits)], 1)?;
        pace.fits = said.iter().all(|fits| fits == &[1]);
        Ok(pace)
    }

    /// Memory has room for snapshots at all; else checkpoints alone protect the state.
    pub fn fits(&self) -> bool {
        self.fits
    }

    pub fn is_due(&self, now: Instant) -> bool {
        self.fits && now.duration_since(self.since) >= self.cost * TIMES
    }

    /// A snapshot was taken between the two.
    pub fn taken(&mut self, began: Instant, ended: Instant) {
        (self.since, self.cost) = (ended, ended.duration_since(began));
    }
}

impl Saving {
    /// Of a rank that copies `bytes`, behind `step`.
    pub fn new(every: u64, step: u64, bytes: u64, now: Instant) -> Saving {
        Saving { every, last: step, alone: Pace::new(bytes, 0, 0, now) }
    }

    /// Behind `step`, the next one. A checkpoint is written from a snapshot, and its copy costs
    /// nothing then: `snapshot` says whether one is due; None: there is no room for any, or they
    /// come by number.
    pub fn is_due(&self, step: u64, snapshot: Option<bool>, now: Instant) -> bool {
        step.saturating_sub(self.last) >= self.every
            && snapshot.unwrap_or_else(|| self.alone.is_due(now))
    }

    /// A checkpoint of the state behind `step` has begun.
    pub fn began(&mut self, step: u64) {
        self.last = step;
    }

    /// A copy was made for a checkpoint alone, between the two.
    pub fn copied(&mut self, began: Instant, ended: Instant) {
        self.alone.taken(began, ended);
    }
}

/// Shards that lie in the memory of the worker of `rank`: those of its ranks, and of those whose
/// buddies they are.
fn kept_with(ranks: u32, buddies: &[Option<u32>], rank: u32) -> u64 {
    let here = |other: u32| other / ranks == rank / ranks;
    let owned = (0..buddies.len() as u32).filter(|other| here(*other)).count();
    let others = |(other, buddy): &(usize, &Option<u32>)| {
        !here(*other as u32) && buddy.is_some_and(here)
    };
    (owned + buddies.iter().enumerate().filter(others).count()) as u64
}

/// Bytes of memory that snapshots may take here beside a worker's processes, which take so many
/// themselves; None where nothing tells how much there is.
///
/// By limits and not by what is left of them: what a worker keeps from the attempt before is among
/// what is used.
fn room(memory: &MemoryBounds, processes: u64) -> Option<u64> {
    let part = |bound: &Bound, share: f64| (bound.limit as f64 * share) as u64;
    let of = |bound: &Bound| match &bound.by {
        BoundSource::Machine | BoundSource::Group { own: false, .. } => Some(part(bound, SHARE)),
        // Of a small one the processes take most.
        BoundSource::Group { own: true, .. } => {
            Some(part(bound, SHARE_OF_LIMIT).min(bound.limit.saturating_sub(processes)))
        }
        BoundSource::Ulimit('v') => Some(part(bound, SHARE_OF_LIMIT)),
        // Snapshots lie in shared memory, which is none of a process's data.
        BoundSource::Ulimit(_) => None,
    };
    memory.bounds.iter().filter_map(of).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_costs_half_a_percent() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        // 20 GB take a second, until one was measured.
        let mut pace = Pace::new(20_000_000_000, 40_000_000_000, 44_000_000_000, start);
        assert!(!pace.is_due(at(199.0)) && pace.is_due(at(200.0)));
        pace.taken(at(200.0), at(200.5));
        assert!(!pace.is_due(at(300.0)) && pace.is_due(at(300.5)));
        let large = Pace::new(83_000_000_000, 166_000_000_000, 90_000_000_000, start);
        assert!(!large.fits() && !large.is_due(at(1e6)));
    }

    #[test]
    fn checkpoints_are_written_from_snapshots_that_are_taken_anyway() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let mut saving = Saving::new(200, 1000, 20_000_000_000, start);
        let with = |saving: &Saving, step| saving.is_due(step, Some(true), at(1.0));
        assert!(!with(&saving, 1199) && with(&saving, 1200));
        assert!(!saving.is_due(1200, Some(false), at(1e6)), "no copy for it alone");
        saving.began(1201);
        assert!(!with(&saving, 1400) && with(&saving, 1401));
        // Without room for snapshots as often as its own copy may cost: 1 s until one was measured.
        assert!(!saving.is_due(1500, None, at(199.0)) && saving.is_due(1500, None, at(200.0)));
        saving.copied(at(200.0), at(202.0));
        saving.began(1500);
        assert!(!saving.is_due(9999, None, at(601.0)) && saving.is_due(1700, None, at(602.0)));
        assert!(!saving.is_due(1699, None, at(602.0)));
    }

    #[test]
    fn a_worker_keeps_its_own_shards_and_those_of_its_buddies() {
        let kept = |ranks: u32, buddies: &[Option<u32>]| -> Vec<u64> {
            (0..buddies.len() as u32).map(|rank| kept_with(ranks, buddies, rank)).collect()
        };
        // Alone; two devices of one; two nodes of two, each with the other's.
        assert_eq!(kept(1, &[None]), [1]);
        assert_eq!(kept(2, &[None, None]), [2, 2]);
        assert_eq!(kept(2, &[Some(2), Some(3), Some(0), Some(1)]), [4; 4]);
        // Three nodes, one of which keeps for nobody.
        assert_eq!(kept(1, &[Some(1), Some(0), Some(1)]), [2, 3, 1]);
    }

    #[test]
    fn a_pod_keeps_what_it_asked_for() {
        let bound = |by, limit| Bound { by, limit, left: 0 };
        let of = |own, limit| {
            bound(BoundSource::Group { folder: "/".into(), file: "memory.max", own }, limit)
        };
        let room = |others: &[Bound]| {
            // A machine of 1,900 GB, as others use it too.
            let bounds = [&[bound(BoundSource::Machine, 1_900)], others].concat();
            room(&MemoryBounds { bounds, ..MemoryBounds::default() }, 90)
        };
        assert_eq!(room(&[]), Some(1_330));
        // A pod that was given 1,000 of them; or that shares them with others around it.
        assert_eq!(room(&[of(true, 1_000)]), Some(850));
        assert_eq!(room(&[of(true, 1_000), of(false, 1_000)]), Some(700));
        assert_eq!(room(&[of(true, 1_800), of(false, 100)]), Some(70));
        let ulimit = |letter| bound(BoundSource::Ulimit(letter), 100);
        assert_eq!(room(&[ulimit('v')]), Some(85));
        assert_eq!(room(&[ulimit('d')]), Some(1_330));
        // The processes of a small pod leave less.
        assert_eq!(room(&[of(true, 200)]), Some(110));
        assert_eq!(room(&[of(true, 80)]), Some(0));
        assert_eq!(super::room(&MemoryBounds::default(), 90), None);
    }
}
